"""What training with a norm looks like from inside: plain records out."""
