"""What a policy may know of who stays: the survival estimate of `placement`, fed as the daemon feeds it.

This is the only place of the simulator that knows which estimator there is.
"""

from collections.abc import Iterable, Iterator, Sequence

from placement.advert import HORIZONS_S
from placement.survival import Estimator, Window

DAY_S = 86_400.0
MONDAY_S = 4 * DAY_S  # the first of Unix time, in which the estimator counts


class Forecast:
    """Of machines by number, each in one of these `rooms`; seconds of virtual time, which begins on the `first_day` of a week."""

    def __init__(self, rooms: Sequence[str], first_day: int = 0) -> None:
        self._rooms = rooms
        self._names = [number.to_bytes(32, "big") for number in range(len(rooms))]
        self._since = [0.0] * len(rooms)
        self._estimator = Estimator(0.0, MONDAY_S + first_day * DAY_S)
        self._ahead: dict[int, Window] = {}  # of the weights that were asked for last, by horizon
        self.departures = 0
        self.lent_s = 0.0

    def lent(self, machine: int, now: float) -> None:
        self._since[machine] = now
        self._estimator.lent(self._names[machine], now, room=self._rooms[machine])

    def left(self, machine: int, now: float) -> None:
        self._estimator.left(self._names[machine], now)
        self.departures += 1
        self.lent_s += now - self._since[machine]

    def weights(self, machines: Iterable[int], now: float, horizon: int) -> list[int]:
        """The adverts': survival over one of their horizons, by its place, in 64ths."""
        window = self._ahead.get(horizon)
        if window is None or window.start != now:
            window = self._ahead[horizon] = self._estimator.window(now, HORIZONS_S[horizon])
        names = self._names
        return self._estimator.weights([names[machine] for machine in machines], window)

    def survival(self, machine: int, now: float, horizon_s: float) -> float:
        """The probability that it stays for another `horizon_s`."""
        return self._estimator.survivals([self._names[machine]], now, horizon_s)[0]

    def rates(self, machine: int, start: float) -> Iterator[tuple[float, float]]:
        """Departures a second from `start` on, each with until when it holds."""
        return self._estimator.rates(self._names[machine], start)

    @property
    def mean_rate(self) -> float:
        """Departures a second over the whole campus so far; one in twelve hours before anything is known."""
        return (self.departures + 1) / (self.lent_s + 12 * 3600)
