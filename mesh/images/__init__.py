"""Container images: which may be run, where they are, and how nodes give them to each other without a registry."""
