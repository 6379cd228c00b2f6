"""Bounds of a job that the settings of a node keep as well. They are apart: a command that reads settings needs no specs."""

MIN_LEASE_S, MAX_LEASE_S = 1.0, 3600.0
MAX_GRACE_S = 86_400
MAX_NODES = 64  # of a gang
MAX_CPUS = 4096  # of a job on one node (own choice)
