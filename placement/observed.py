"""What this node has itself seen of others' stays, and how much of what they say of themselves it believes.

Of a node's stays that were seen to reach the age of the present one, so many lasted for another hour: it is not believed to be
likelier to stay than the upper bound of that share. Whoever has never been seen to leave is believed; so is nearly every honest
node always, since the bound is one-sided and wide (99 per cent). It reins in those who say 64 and leave again and again.
"""

from collections import deque
from collections.abc import Set
from math import ceil, sqrt

import msgspec

from placement.advert import HORIZONS_S, HOUR, MAX_WEIGHT, Advert

KEPT = 64  # stays of one node; ours
Z_99 = 2.326

Caps = tuple[int, ...]  # for each of HORIZONS_S, in 64ths


class Observed:
    def __init__(self) -> None:
        self._since: dict[bytes, float] = {}
        self._lengths: dict[bytes, deque[float]] = {}

    def see(self, lent: Set[bytes], now: float) -> None:
        """These are lent now, and all others are not; `now` is seconds of any clock."""
        for node in self._since.keys() - lent:
            lengths = self._lengths.setdefault(node, deque(maxlen=KEPT))
            lengths.append(max(0.0, now - self._since.pop(node)))
        for node in lent - self._since.keys():
            self._since[node] = now

    def forget(self, but: Set[bytes]) -> None:
        """Those that are members no more."""
        self._lengths = {node: lengths for node, lengths in self._lengths.items() if node in but}

    def caps(self, now: float) -> dict[bytes, Caps]:
        """The most that is believed of each node that is lent; none of those who may say what they like."""
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
    """Of a share, with 99 per cent (Wilson 1927); 1 if nothing was seen."""
    if of == 0:
        return 1.0
    share, square = lasted / of, Z_99 * Z_99 / of
    return min(1.0, (share + square / 2 + sqrt(square * (share * (1 - share) + square / 4))) / (1 + square))


def believed(advert: Advert, most: Caps | None) -> Advert:
    """The advert, with no more said of its stay than is believed."""
    if most is None:
        return advert
    stays = tuple(map(min, advert.stays, most))
    return msgspec.structs.replace(advert, weight=min(advert.weight, most[HOUR]), stays=stays)
