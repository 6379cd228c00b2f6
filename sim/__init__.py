"""Virtual time: the production cores of a whole mesh, driven from one seed."""
