"""Eviction of data sets: which of them a node may give up when its quota is full. No I/O.

A node gives one up only if another says, when asked, that it has it whole, and either has it pinned or comes before this node in
the set's rendezvous order. The first of the holders that have not pinned it therefore finds a pinned copy or none, so of all that
evict at the same time one keeps the data: no last copy goes. What is pinned, or in use by a guest, stays in any case; what was
unpinned stays for a while, so that nobody who has just heard of the pin relies on it in vain.
"""

from collections.abc import Collection, Sequence

import msgspec

from placement.rendezvous import rank

WHOLE, PINNED, LACKS = b"whole", b"pinned", b"no"  # answers of a node about a data set
UNPINNED_S = 15.0  # longer than a question about a data set and what follows from its answer (own choice)


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


def may_rely(data: bytes, me: bytes, node: bytes, answer: bytes) -> bool:
    """Tell whether this node may give up a data set because of what another holder has answered."""
    return answer == PINNED or (answer == WHOLE and node in keepers(data, me, [node]))


def keepers(data: bytes, me: bytes, holders: Collection[bytes]) -> list[bytes]:
    """Return the holders that come before this node for a data set."""
    ranked = [node for node, _ in rank(data, [(node, 1) for node in {*holders, me}])]
    return ranked[: ranked.index(me)]
