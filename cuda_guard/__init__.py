"""A part of a GPU for a job, and a switch for the owner: the guard around the CUDA driver API (docs/cuda-guard.md)."""
