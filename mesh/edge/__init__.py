"""The node's edge: what the kernel does with packets of guests and of checkpoints, so that the owner can cut and shape both."""
