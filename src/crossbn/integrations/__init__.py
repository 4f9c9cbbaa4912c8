"""Other people's libraries, one file each; importing this package loads none of them."""
