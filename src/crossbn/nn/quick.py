"""A stub while the core is being rebuilt."""
def observe(*_):
    return None
