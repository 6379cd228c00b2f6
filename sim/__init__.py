"""Simulation in virtual time: the production cores under injected faults, and studies of whole campuses."""
