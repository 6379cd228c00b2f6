"""Bandwidth to each peer, learnt from transfers: a mean for plans, a low quantile for promises, and a distribution for placement.

Only regular transfers are measured; nothing is sent just to measure a campus link. No I/O.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

import msgspec

SEEN = 32  # transfers kept per peer (own choice)
PEERS = 1024  # peers remembered, the most recent ones; twice the largest planned mesh
LEAST_BYTES = 1 << 20  # smaller transfers are not measured (own choice)
LEARN = 0.3  # weight of the last transfer (own choice)
PESSIMISTIC = 0.2  # share of transfers slower than the promise (own choice)
GUESS_BPS, GUESS_SPREAD = 5e7, 1.2  # of an unknown path: between Fast and Gigabit Ethernet
PRIOR_SPREAD, PRIOR_COUNT = 0.5, 2  # prior of a path: a factor of 1.6 either way, worth two transfers (own choice)
ELSEWHERE_SPREAD = 0.6  # minimum for a path estimated from other paths (own choice)
MOST_LOGARITHM = 100.0  # bound on stored values: e^100 is 10^43 bytes per second
AGE_SPREAD, DAY_S = 0.3, 86_400.0  # uncertainty added per day since the last transfer (own choice)

Source = Literal["measured", "zone", "mesh", "guessed"]


class PathEstimate(msgspec.Struct, frozen=True):
    """Bandwidth to one peer: the median in bytes per second, and the standard deviation of the logarithm.

    `source`: measured on this path, on paths to the peer's zone or to any peer, or guessed; from `transfers`, the last one
    `age_s` ago.
    """

    bps: float
    spread: float
    source: Source = "guessed"
    transfers: int = 0
    age_s: float = 0.0


UNKNOWN = PathEstimate(GUESS_BPS, GUESS_SPREAD)


class SavedRate(msgspec.Struct, frozen=True):
    """A path's state over restarts: mean and variance of the logarithm of bytes per second, and number of transfers."""

    mean: float
    variance: float
    count: int


def _ignore(peer: bytes, rate: SavedRate) -> None:
    """Store nothing."""


class _Rate:
    """The exponentially weighted mean and variance of a logarithm (West 1979)."""

    __slots__ = ("at", "count", "mean", "variance")

    def __init__(self, first: float, at: float) -> None:
        self.mean, self.variance, self.count, self.at = first, 0.0, 1, at

    def add(self, value: float, at: float) -> None:
        apart = value - self.mean
        self.mean += LEARN * apart
        self.variance = (1 - LEARN) * (self.variance + LEARN * apart * apart)
        self.count, self.at = self.count + 1, at

    def path(self, now: float) -> PathEstimate:
        shown = min(self.count, SEEN)
        squared = (shown * self.variance + PRIOR_COUNT * PRIOR_SPREAD**2) / (shown + PRIOR_COUNT)
        age_s = max(0.0, now - self.at)
        spread = math.sqrt(squared + AGE_SPREAD**2 * age_s / DAY_S)
        return PathEstimate(math.exp(self.mean), min(spread, GUESS_SPREAD), "measured", self.count, age_s)


class Bandwidth:
    """`keep` is called with the state of a path when it changes; `restore` loads it after a restart."""

    def __init__(self, keep: Callable[[bytes, SavedRate], None] = _ignore) -> None:
        self._keep = keep
        self._mean: dict[bytes, float] = {}
        self._seen: dict[bytes, deque[float]] = {}
        self._rates: dict[bytes, _Rate] = {}
        self._any: PathEstimate | None = None  # of all measured paths, cached

    def record(self, peer: bytes, count: int, seconds: float, held: bool = False, now: float = 0.0) -> None:
        """Record a transfer of `count` bytes, timed until the peer had them on disk.

        `held`: this node limited the rate. Then the link may carry more, so the transfer counts only if it was faster than the
        promise. `now`: seconds of a monotonic clock.
        """
        if count < LEAST_BYTES or not 0 < seconds < math.inf:
            return
        rate = count / seconds
        self._mean[peer] = self._mean.get(peer, rate) * (1 - LEARN) + rate * LEARN
        promised = self.promised_bps(peer) if held else 0.0
        if promised is not None and rate > promised:
            self._seen.setdefault(peer, deque(maxlen=SEEN)).append(rate)
            known = self._rates.pop(peer, None)
            if known is not None:
                known.add(math.log(rate), now)
            known = self._rates[peer] = known or _Rate(math.log(rate), now)  # the most recent peer is last
            self._any = None
            self._keep(peer, SavedRate(known.mean, known.variance, known.count))
        self._forget()

    def restore(self, peer: bytes, saved: SavedRate, at: float) -> None:
        """Load the state of a path last updated at time `at`. Promises are learnt again."""
        if not (abs(saved.mean) < MOST_LOGARITHM and 0 <= saved.variance < MOST_LOGARITHM and saved.count > 0):
            return
        rate = self._rates[peer] = _Rate(saved.mean, at)
        rate.variance, rate.count = saved.variance, saved.count
        self._mean[peer] = math.exp(saved.mean)
        self._any = None
        self._forget()

    def mean_bps(self, peers: Iterable[bytes]) -> float | None:
        """Return the mean of the slowest of these peers; None if none was measured."""
        return min((self._mean[peer] for peer in peers if peer in self._mean), default=None)

    def promised_bps(self, peer: bytes) -> float | None:
        """Return the rate that nearly all transfers to this peer reached; None if unknown."""
        seen = sorted(self._seen.get(peer, ()))
        return seen[int(PESSIMISTIC * len(seen))] if seen else None

    def path(self, peer: bytes, neighbours: Iterable[bytes] = (), now: float = 0.0) -> PathEstimate:
        """Estimate the path to one peer; without measurements, from the paths to its `neighbours` (its zone) or to all peers."""
        own = self._rates.get(peer)
        if own is not None:
            return own.path(now)
        near = [self._rates[other] for other in neighbours if other in self._rates]
        if near:
            return _pooled(near, "zone", now) or UNKNOWN
        if self._any is None:
            self._any = _pooled(list(self._rates.values()), "mesh", now)
        return self._any or UNKNOWN

    def measured(self, now: float) -> dict[bytes, PathEstimate]:
        """Return every measured path."""
        return {peer: rate.path(now) for peer, rate in self._rates.items()}

    def _forget(self) -> None:
        while len(self._mean) > PEERS:
            oldest = next((peer for peer in self._mean if peer not in self._rates), None) or next(iter(self._rates))
            self._mean.pop(oldest, None)
            self._seen.pop(oldest, None)
            self._rates.pop(oldest, None)


def _pooled(rates: list[_Rate], source: Source, now: float) -> PathEstimate | None:
    """Return the median of these paths, with their spread."""
    if not rates:
        return None
    middle = median(rate.mean for rate in rates)
    apart = math.sqrt(sum((rate.mean - middle) ** 2 for rate in rates) / len(rates))
    spread = math.hypot(max(apart, ELSEWHERE_SPREAD), max(rate.path(now).spread for rate in rates) / 2)
    age_s = min(max(0.0, now - rate.at) for rate in rates)
    return PathEstimate(math.exp(middle), min(GUESS_SPREAD, spread), source, sum(rate.count for rate in rates), age_s)
