"""Cross-iteration batch normalization."""
