"""What a policy may know of who stays: the survival estimate of `placement`, fed as the daemon feeds it.

This is the only place of the simulator that knows which estimator there is.
"""

from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter

from placement import survival
from placement.survival import EDGES_S, History


class Forecast:
    """Of machines by number; seconds of virtual time. A stay counts once it is over."""

    def __init__(self, count: int) -> None:
        self._histories = [History()] * count
        self._since = [0.0] * count
        self._ahead: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self.departures = 0
        self.lent_s = 0.0

    def lent(self, machine: int, now: float) -> None:
        self._since[machine] = now
        history = self._histories[machine]
        # What is known of it does not change while it stays.
        ahead = [(now + edge, survival.hazard_per_hour(history, edge - 1) / 3600) for edge in EDGES_S]
        self._ahead[machine] = [*ahead, (float("inf"), survival.hazard_per_hour(history, EDGES_S[-1]) / 3600)]

    def left(self, machine: int, now: float) -> None:
        length = now - self._since[machine]
        self._histories[machine] = self._histories[machine].with_session(length, True)
        self.departures += 1
        self.lent_s += length

    def weight(self, machine: int, now: float) -> int:
        """The advert's: survival over the next hour, in 64ths."""
        return survival.weight(self._histories[machine], now - self._since[machine])

    def rates(self, machine: int, start: float) -> Iterator[tuple[float, float]]:
        """Departures a second from `start` on, each with until when it holds."""
        ahead = self._ahead[machine]
        return iter(ahead[bisect_right(ahead, start, key=itemgetter(0)) :])

    @property
    def mean_rate(self) -> float:
        """Departures a second over the whole campus so far; one in twelve hours before anything is known."""
        return (self.departures + 1) / (self.lent_s + 12 * 3600)
