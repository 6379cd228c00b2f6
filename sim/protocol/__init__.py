"""The production protocol cores of a whole mesh in virtual time, under every kind of fault."""
