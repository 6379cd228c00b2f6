"""Checkpoints as content-addressed chunks. Their bytes on disk and between peers are defined in `pack.py` (chunks) and
`manifest.py` (files), and described in docs/reference/ckptstore-format.md.
"""
