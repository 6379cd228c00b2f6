"""What a policy may know of who stays: the survival estimate of `placement`, fed as the daemon feeds it.

This is the only place of the simulator that knows which estimator there is.
"""

from collections.abc import Iterator

from placement.survival import Estimator, weights, windows

DAY_S = 86_400.0
MONDAY_S = 4 * DAY_S  # the first of Unix time, in which the estimator counts


class Forecast:
    """Of machines by number; seconds of virtual time, which begins on the `first_day` of a week."""

    def __init__(self, count: int, first_day: int = 0) -> None:
        self._offset_s = MONDAY_S + first_day * DAY_S
        self._names = [number.to_bytes(32, "big") for number in range(count)]
        self._since = [0.0] * count
        self._estimator = Estimator(self._offset_s)
        self._ahead = windows(self._estimator, self._offset_s)
        self.departures = 0
        self.lent_s = 0.0

    def lent(self, machine: int, now: float) -> None:
        self._since[machine] = now
        self._estimator.lent(self._names[machine], now + self._offset_s)

    def left(self, machine: int, now: float) -> None:
        self._estimator.left(self._names[machine], now + self._offset_s)
        self.departures += 1
        self.lent_s += now - self._since[machine]

    def weights(self, machine: int, now: float) -> tuple[int, ...]:
        """The advert's: survival over each of its horizons, in 64ths."""
        if self._ahead[0].start != now + self._offset_s:
            self._ahead = windows(self._estimator, now + self._offset_s)
        return weights(self._estimator, self._names[machine], self._ahead)

    def survival(self, machine: int, now: float, horizon_s: float) -> float:
        """The probability that it stays for another `horizon_s`."""
        return self._estimator.survivals([self._names[machine]], now + self._offset_s, horizon_s)[0]

    def rates(self, machine: int, start: float) -> Iterator[tuple[float, float]]:
        """Departures a second from `start` on, each with until when it holds."""
        for until, rate in self._estimator.rates(self._names[machine], start + self._offset_s):
            yield until - self._offset_s, rate

    @property
    def mean_rate(self) -> float:
        """Departures a second over the whole campus so far; one in twelve hours before anything is known."""
        return (self.departures + 1) / (self.lent_s + 12 * 3600)
