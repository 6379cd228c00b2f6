"""Guard: a shim over the CUDA driver API that limits a job to a share of a GPU and lets the owner stop it at once.

docs/explanation/cuda-guard.md.
"""
