"""What shows that the library works: it uses the library's public names, and the library never imports it."""
