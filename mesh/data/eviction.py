"""Eviction of data sets: which of them a node may give up when its quota is full. No I/O.

A node gives one up only if a holder that comes before it in the set's rendezvous order has it whole, and says so when asked. The
first holder in that order therefore never does, so of all holders that evict at the same time one keeps the data: no last copy
goes. What is pinned, or in use by a guest, stays in any case.
"""

from collections.abc import Collection, Sequence

import msgspec

from placement.rendezvous import rank


class Kept(msgspec.Struct, frozen=True):
    """A data set here. `bytes`: that go with it; `used_unix`: its last use; `superseded`: a newer version is known."""

    id: bytes
    bytes: int
    used_unix: float
    pinned: bool = False
    in_use: bool = False
    superseded: bool = False


def order(kept: Sequence[Kept]) -> list[Kept]:
    """Return what may go, in this order: older versions, then the longest unused."""
    free = [one for one in kept if not one.pinned and not one.in_use]
    return sorted(free, key=lambda one: (not one.superseded, one.used_unix, one.id))


def keepers(data: bytes, me: bytes, holders: Collection[bytes]) -> list[bytes]:
    """Return the holders that come before this node for a data set; one of them must confirm that it keeps it."""
    ranked = [node for node, _ in rank(data, [(node, 1) for node in {*holders, me}])]
    return ranked[: ranked.index(me)]
