"""Data sets: named trees of files that jobs read, kept by the nodes that need them."""
