"""Who runs what: adverts, survival, weighted rendezvous, and decisions that anybody can recompute. Pure, no I/O."""
