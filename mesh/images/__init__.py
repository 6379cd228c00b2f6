"""Container images: the rules about them, where they are, and their exchange between nodes without a registry."""
