"""How fast each peer has taken bytes: the mean that plans are made with, the fifth that promises are made with, and the path with
its uncertainty that a destination is chosen with. No I/O.

Only what was sent anyway is looked at: nobody floods a campus link to measure it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

import msgspec

SEEN = 32  # transfers of each peer; ours
PEERS = 1024  # of whom something is remembered, those heard of last; twice the largest mesh we plan for; ours
LEAST_BYTES = 1 << 20  # of a transfer that says something of a link; ours
LEARN = 0.3  # the weight of the last one; ours
PESSIMISTIC = 0.2  # of the transfers were slower than what is promised; ours
GUESS_BPS, GUESS_SPREAD = 5e7, 1.2  # of a path of which nothing is known: between Fast and Gigabit Ethernet; ours
PRIOR_SPREAD, PRIOR_COUNT = 0.5, 2  # of a path before it was measured often: a factor of 1.6 either way; ours
ELSEWHERE_SPREAD = 0.6  # at least, of a path judged by other paths; ours
MOST_LOGARITHM = 100.0  # of what is recalled: nothing sends 10^43 bytes a second
AGE_SPREAD, DAY_S = 0.3, 86_400.0  # that a day adds to what was measured; ours

Source = Literal["measured", "zone", "mesh", "guessed"]


class Path(msgspec.Struct, frozen=True):
    """From here to one peer: bytes a second (the median), and the standard deviation of their logarithm. `source`: this path's
    own transfers, those to the peer's zone, to any peer, or nothing; `transfers` of them, the last `age_s` ago."""

    bps: float
    spread: float
    source: Source = "guessed"
    transfers: int = 0
    age_s: float = 0.0


UNKNOWN = Path(GUESS_BPS, GUESS_SPREAD)


class Learnt(msgspec.Struct, frozen=True):
    """What is kept of a path over a restart: mean and variance of the logarithm of bytes a second, of so many transfers."""

    mean: float
    variance: float
    count: int


def _ignore(peer: bytes, learnt: Learnt) -> None:
    """Nobody keeps it."""


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

    def path(self, now: float) -> Path:
        shown = min(self.count, SEEN)
        squared = (shown * self.variance + PRIOR_COUNT * PRIOR_SPREAD**2) / (shown + PRIOR_COUNT)
        age_s = max(0.0, now - self.at)
        spread = math.sqrt(squared + AGE_SPREAD**2 * age_s / DAY_S)
        return Path(math.exp(self.mean), min(spread, GUESS_SPREAD), "measured", self.count, age_s)


class Bandwidth:
    """`keep` is told what is known of a path each time that changes; `recall` takes it up again after a restart."""

    def __init__(self) -> None:
        self.keep: Callable[[bytes, Learnt], None] = _ignore
        self._mean: dict[bytes, float] = {}
        self._seen: dict[bytes, deque[float]] = {}
        self._rates: dict[bytes, _Rate] = {}
        self._any: Path | None = None  # of all that were measured, until more is

    def saw(self, peer: bytes, count: int, seconds: float, held: bool = False, now: float = 0.0) -> None:
        """So many bytes went to a peer in this time, until it said that they were on its disk. `held`: this node held them back.

        Then the link may carry more, so it counts for a promise only if it is more than was promised. `now`: seconds of a clock
        that does not jump.
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
            known = self._rates[peer] = known or _Rate(math.log(rate), now)  # the last heard of stands last
            self._any = None
            self.keep(peer, Learnt(known.mean, known.variance, known.count))
        self._forget()

    def recall(self, peer: bytes, learnt: Learnt, at: float) -> None:
        """Learnt before a restart, and last heard of `at` that time. What is promised is learnt anew."""
        if not (abs(learnt.mean) < MOST_LOGARITHM and 0 <= learnt.variance < MOST_LOGARITHM and learnt.count > 0):
            return
        rate = self._rates[peer] = _Rate(learnt.mean, at)
        rate.variance, rate.count = learnt.variance, learnt.count
        self._mean[peer] = math.exp(learnt.mean)
        self._any = None
        self._forget()

    def mean_bps(self, peers: Iterable[bytes]) -> float | None:
        """Of the slowest of these that is known."""
        return min((self._mean[peer] for peer in peers if peer in self._mean), default=None)

    def promised_bps(self, peer: bytes) -> float | None:
        """What it has nearly always reached."""
        seen = sorted(self._seen.get(peer, ()))
        return seen[int(PESSIMISTIC * len(seen))] if seen else None

    def path(self, peer: bytes, neighbours: Iterable[bytes] = (), now: float = 0.0) -> Path:
        """To one peer. One that was never measured is judged by its `neighbours` (of its zone), else by all that were."""
        own = self._rates.get(peer)
        if own is not None:
            return own.path(now)
        near = [self._rates[other] for other in neighbours if other in self._rates]
        if near:
            return _pooled(near, "zone", now) or UNKNOWN
        if self._any is None:
            self._any = _pooled(list(self._rates.values()), "mesh", now)
        return self._any or UNKNOWN

    def measured(self, now: float) -> dict[bytes, Path]:
        """Every path of which something was measured."""
        return {peer: rate.path(now) for peer, rate in self._rates.items()}

    def _forget(self) -> None:
        while len(self._mean) > PEERS:
            oldest = next((peer for peer in self._mean if peer not in self._rates), None) or next(iter(self._rates))
            self._mean.pop(oldest, None)
            self._seen.pop(oldest, None)
            self._rates.pop(oldest, None)


def _pooled(rates: list[_Rate], source: Source, now: float) -> Path | None:
    """The middle one of these paths, with how far apart they are."""
    if not rates:
        return None
    middle = median(rate.mean for rate in rates)
    apart = math.sqrt(sum((rate.mean - middle) ** 2 for rate in rates) / len(rates))
    spread = math.hypot(max(apart, ELSEWHERE_SPREAD), max(rate.path(now).spread for rate in rates) / 2)
    age_s = min(max(0.0, now - rate.at) for rate in rates)
    return Path(math.exp(middle), min(GUESS_SPREAD, spread), source, sum(rate.count for rate in rates), age_s)
