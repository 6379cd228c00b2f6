"""What a node can see of itself: its GPUs and its machine."""
