"""How fast each peer has taken bytes: the mean that plans are made with, and the fifth that promises are made with. No I/O.

Only what was sent anyway is looked at: nobody floods a campus link to measure it.
"""

from collections import deque
from collections.abc import Iterable

SEEN = 32  # transfers of each peer; ours
LEAST_BYTES = 1 << 20  # of a transfer that says something of a link; ours
LEARN = 0.3  # the weight of the last one; ours
PESSIMISTIC = 0.2  # of the transfers were slower than what is promised; ours


class Bandwidth:
    def __init__(self) -> None:
        self._mean: dict[bytes, float] = {}
        self._seen: dict[bytes, deque[float]] = {}

    def saw(self, peer: bytes, count: int, seconds: float, held: bool = False) -> None:
        """So many bytes went to a peer in this time, until it said that they were on its disk. `held`: this node held them back.

        Then the link may carry more, so it counts for a promise only if it is more than was promised.
        """
        if count < LEAST_BYTES or seconds <= 0:
            return
        rate = count / seconds
        self._mean[peer] = self._mean.get(peer, rate) * (1 - LEARN) + rate * LEARN
        if held:
            promised = self.promised_bps(peer)
            if promised is None or rate <= promised:
                return
        self._seen.setdefault(peer, deque(maxlen=SEEN)).append(rate)

    def mean_bps(self, peers: Iterable[bytes]) -> float | None:
        """Of the slowest of these that is known."""
        return min((self._mean[peer] for peer in peers if peer in self._mean), default=None)

    def promised_bps(self, peer: bytes) -> float | None:
        """What it has nearly always reached."""
        seen = sorted(self._seen.get(peer, ()))
        return seen[int(PESSIMISTIC * len(seen))] if seen else None
