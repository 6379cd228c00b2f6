"""The versions that nodes and their state directories tell and check (docs/upgrade.md)."""

WIRE = 1  # of what nodes say to each other: the version byte of an envelope (`membership.envelope.VERSION`)
STATE = 1  # of a state directory; grows when an older daemon would damage what a newer one has written
