"""Survival forecasts of machines, from the estimator of `placement`, updated as the daemon updates it."""

from collections.abc import Iterable, Iterator, Sequence

from placement.advert import HORIZONS_S
from placement.survival import Estimator, Window

DAY_S = 86_400.0
MONDAY_S = 4 * DAY_S  # the first Monday of Unix time, which the estimator uses


class Forecast:
    """Forecasts for machines by number. Times are seconds of virtual time, which starts on weekday `first_day`."""

    def __init__(self, rooms: Sequence[str], first_day: int = 0) -> None:
        self._rooms = rooms
        self._names = [number.to_bytes(32, "big") for number in range(len(rooms))]
        self._since = [0.0] * len(rooms)
        self._estimator = Estimator(0.0, MONDAY_S + first_day * DAY_S)
        self._windows: dict[int, Window] = {}  # of the latest weights, by horizon
        self.departures = 0
        self.lent_s = 0.0

    def lent(self, machine: int, now: float) -> None:
        self._since[machine] = now
        self._estimator.record_lent(self._names[machine], now, zone=self._rooms[machine])

    def left(self, machine: int, now: float) -> None:
        self._estimator.record_end(self._names[machine], now)
        self.departures += 1
        self.lent_s += now - self._since[machine]

    def weights(self, machines: Iterable[int], now: float, horizon: int) -> list[int]:
        """Return the weights of adverts: survival over one of their horizons (by index), in 64ths."""
        window = self._windows.get(horizon)
        if window is None or window.start != now:
            window = self._windows[horizon] = self._estimator.window(now, HORIZONS_S[horizon])
        names = self._names
        return self._estimator.weights([names[machine] for machine in machines], window)

    def survival(self, machine: int, now: float, horizon_s: float) -> float:
        """Return the probability that a machine stays for another `horizon_s`."""
        return self._estimator.survivals([self._names[machine]], now, horizon_s)[0]

    def rates(self, machine: int, start: float) -> Iterator[tuple[float, float]]:
        """Yield (departures a second, end of that rate) from `start` on."""
        return self._estimator.rates(self._names[machine], start)

    @property
    def mean_rate(self) -> float:
        """The departures a second over the whole campus so far; one in twelve hours before any is known."""
        return (self.departures + 1) / (self.lent_s + 12 * 3600)
