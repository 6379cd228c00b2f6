"""Placement: adverts, survival estimates, weighted rendezvous, and decisions that every node can recompute. Pure, no I/O."""
