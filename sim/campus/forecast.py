"""What a policy may know of who stays: the survival estimate of `placement`, fed as the daemon feeds it.

This is the only place of the simulator that knows which estimator there is.
"""

from collections.abc import Iterator

from placement import survival
from placement.survival import EDGES_S, History


class Forecast:
    """Of machines by number; seconds of virtual time. A stay counts once it is over."""

    def __init__(self, count: int) -> None:
        self._histories = [History()] * count
        self._since = [0.0] * count
        self.departures = 0
        self.lent_s = 0.0

    def lent(self, machine: int, now: float) -> None:
        self._since[machine] = now

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
        history, since = self._histories[machine], self._since[machine]
        for edge in EDGES_S:
            if since + edge > start:
                yield since + edge, survival.hazard_per_hour(history, edge - 1) / 3600
        yield float("inf"), survival.hazard_per_hour(history, EDGES_S[-1]) / 3600

    @property
    def mean_rate(self) -> float:
        """Departures a second over the whole campus so far; one in twelve hours before anything is known."""
        return (self.departures + 1) / (self.lent_s + 12 * 3600)
