"""How long a mesh takes to know that a machine is gone: measured in the membership protocol's own simulation, and loaded here."""

QUANTILES_S: tuple[float, ...] = (3.0, 5.0)
