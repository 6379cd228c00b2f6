"""Observed stays: an upper bound on how far a node's own survival estimate is trusted.

Of a node's observed stays that reached the age of the present one, some lasted for another hour. Its weight is capped at the
upper confidence bound of that share. A node that was never observed to leave is not capped. The bound is one-sided and wide (99
per cent), so honest nodes are hardly ever capped; a node that claims 64 and leaves again and again is.
"""

from collections import deque
from collections.abc import Set
from math import ceil, sqrt

import msgspec

from placement.advert import HORIZONS_S, HOUR, MAX_WEIGHT, Advert

KEPT = 64  # stays of one node (own choice)
Z_99 = 2.326

Caps = tuple[int, ...]  # for each of HORIZONS_S, in 64ths


class Observed:
    def __init__(self) -> None:
        self._since: dict[bytes, float] = {}
        self._lengths: dict[bytes, deque[float]] = {}

    def observe(self, lent: Set[bytes], now: float) -> None:
        """Record the nodes that are lent now; `now` is seconds of any clock."""
        for node in self._since.keys() - lent:
            lengths = self._lengths.setdefault(node, deque(maxlen=KEPT))
            lengths.append(now - self._since.pop(node))
        for node in lent - self._since.keys():
            self._since[node] = now

    def keep_only(self, members: Set[bytes]) -> None:
        """Drop the nodes that are no longer members."""
        self._lengths = {node: lengths for node, lengths in self._lengths.items() if node in members}

    def caps(self, now: float) -> dict[bytes, Caps]:
        """Return the caps of the lent nodes that have any."""
        found = {
            node: self._caps(lengths, now - self._since[node])
            for node, lengths in self._lengths.items()
            if node in self._since
        }
        return {node: caps for node, caps in found.items() if min(caps) < MAX_WEIGHT}

    @staticmethod
    def _caps(lengths: deque[float], age: float) -> Caps:
        at_risk = [length for length in lengths if length >= age]
        return tuple(
            ceil(MAX_WEIGHT * upper_bound(sum(length >= age + horizon for length in at_risk), len(at_risk)))
            for horizon in HORIZONS_S
        )


def upper_bound(lasted: int, of: int) -> float:
    """Return the upper 99 per cent bound of a share (Wilson 1927); 1 without observations."""
    if of == 0:
        return 1.0
    share, square = lasted / of, Z_99 * Z_99 / of
    return min(1.0, (share + square / 2 + sqrt(square * (share * (1 - share) + square / 4))) / (1 + square))


def capped(advert: Advert, caps: Caps | None) -> Advert:
    """Return the advert with its weights capped."""
    if caps is None:
        return advert
    weights = tuple(map(min, advert.weights, caps))
    return msgspec.structs.replace(advert, weight=min(advert.weight, caps[HOUR]), weights=weights)
