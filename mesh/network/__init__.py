"""The network edge: kernel programs and queues that let the owner cut off and shape traffic of guests and checkpoints."""
