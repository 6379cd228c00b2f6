"""Room for the guard around the CUDA driver API. Empty for now: GPUs are lent whole, and taken back by ending their guests."""
