"""Factors of a node's hazard: the relative rate of departures at each level of an age, an hour, ...

A level's rate is relative to the rate that the rest of the model expects: (events + a) / (expected + a), where both counts halve
every 40 days and `a` shrinks the rate towards 1. This is the posterior mean of a Gamma-Poisson model. Counts decay forwards
(Cormode et al., ICDE 2009): later events are written with a larger weight, so an update touches one level.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

HOUR_S = 3600.0
DAY_S = 86_400.0

# Chosen on the first 70 % of two traces by rolling log-loss (docs/explanation/survival.md). The optimum is flat: half or double
# changes the log-loss by less than 0.5 %.
HALF_LIFE_S = 40 * DAY_S
SHARE_HALF_LIFE_S = 14 * DAY_S
NODE_HALF_LIFE_S = 7 * DAY_S
RECENT_HALF_LIFE_S = DAY_S / 4

AGE_EDGES_S = tuple(300.0 * 2**power for power in range(11))  # 5 minutes, doubling, to 3.5 days
AGES = len(AGE_EDGES_S) + 1
# A node's own ages are coarser, since it has fewer departures: below 40 min, 160 min, 11 h, 43 h, and above.
OWN_AGE_OF = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
OWN_AGES = 5
HOURS = 48  # hours of the day: 24 from Monday to Friday, 24 at the weekend
OWN_BLOCKS = 12  # blocks of four of these hours
# The part of a zone that is lent, relative to its mean of two weeks: a room that empties goes on emptying.
SHARE_EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
SHARES = len(SHARE_EDGES) + 1

# The prior of the age factor: the hazard of a Weibull distribution of shape 0.57, fitted to 1,266 stays of 44 nodes of a
# university cluster, relative to its value at four hours; at each level's middle, and at 7 days for the last level.
WEIBULL_SHAPE = 0.57
_MIDDLES_S = (AGE_EDGES_S[0] / 2, *((low + high) / 2 for low, high in pairwise(AGE_EDGES_S)), 7 * DAY_S)
AGE_SHAPE = tuple((middle / (4 * HOUR_S)) ** (WEIBULL_SHAPE - 1) for middle in _MIDDLES_S)

REBASE = 2.0**40  # forward weight at which counts are rescaled: every four and a half years


class Factor:
    """The counts and the rates of each level. `shrinkage`: the prior's departures; `shape` multiplies the rates.

    With `circle`, the levels form circles of this length, and neighbours count half for each other.
    """

    __slots__ = ("circle", "events", "expected", "other_events", "other_expected", "rates", "shape", "shrinkage")

    def __init__(self, levels: int, shrinkage: float, shape: Sequence[float] = (), circle: int = 0) -> None:
        self.shrinkage, self.shape, self.circle = shrinkage, shape, circle
        self.events = [0.0] * levels
        self.expected = [0.0] * levels
        self.other_events: Sequence[float] = ()  # counts that other nodes report
        self.other_expected: Sequence[float] = ()
        self.rates = list(shape) or [1.0] * levels

    def add(self, level: int, events: float, expected: float, scale: float) -> None:
        """Add counts of now; `scale` is the forward weight of now."""
        self.events[level] += events * scale
        self.expected[level] += expected * scale
        if self.circle or self.other_events:
            for touched in (level, *self._neighbours(level)):
                self._renew(touched, scale)
            return
        # The rate as `_renew` computes it, without its calls: an update does this for most factors.
        rate = (self.events[level] / scale + self.shrinkage) / (self.expected[level] / scale + self.shrinkage)
        self.rates[level] = rate * self.shape[level] if self.shape else rate

    def relative(self, level: int) -> float:
        """Return the rate without the shape."""
        return self.rates[level] / self.shape[level] if self.shape else self.rates[level]

    def variance(self, level: int, scale: float) -> float:
        """Return the approximate variance of the rate's logarithm: 1 / (events + a)."""
        return 1 / (self._count(self.events, self.other_events, level, scale) + self.shrinkage)

    def renew(self, scale: float) -> None:
        """Compute the rates of all levels again; levels without new counts fade too."""
        for level in range(len(self.rates)):
            self._renew(level, scale)

    def rebase(self, scale: float) -> None:
        """Divide the counts by the forward weight."""
        self.events = [value / scale for value in self.events]
        self.expected = [value / scale for value in self.expected]

    def adopt(self, events: Sequence[float], expected: Sequence[float], scale: float) -> None:
        """Replace the counts of all other nodes."""
        self.other_events, self.other_expected = tuple(events), tuple(expected)
        self.renew(scale)

    def _renew(self, level: int, scale: float) -> None:
        events = self._count(self.events, self.other_events, level, scale)
        expected = self._count(self.expected, self.other_expected, level, scale)
        rate = (events + self.shrinkage) / (expected + self.shrinkage)
        self.rates[level] = rate * self.shape[level] if self.shape else rate

    def _count(self, own: Sequence[float], others: Sequence[float], level: int, scale: float) -> float:
        count = own[level] / scale + (others[level] if others else 0.0)
        if not self.circle:
            return count
        left, right = self._neighbours(level)
        count += (own[left] + own[right]) / scale / 2 + ((others[left] + others[right]) / 2 if others else 0.0)
        return count / 2

    def _neighbours(self, level: int) -> tuple[int, ...]:
        if not self.circle:
            return ()
        first = level - level % self.circle
        return first + (level - 1) % self.circle, first + (level + 1) % self.circle


class Fading:
    """A factor of one level whose counts have a half-life of its own."""

    __slots__ = ("at", "events", "expected", "half_life_s", "rate", "shrinkage")

    def __init__(self, shrinkage: float, half_life_s: float, now: float) -> None:
        self.shrinkage, self.half_life_s, self.at = shrinkage, half_life_s, now
        self.events = self.expected = 0.0
        self.rate = 1.0

    def add(self, events: float, expected: float, now: float) -> None:
        """Let the counts fade until `now`, and add to them."""
        if now > self.at:
            kept = 0.5 ** ((now - self.at) / self.half_life_s)
            self.events *= kept
            self.expected *= kept
            self.at = now
        self.events += events
        self.expected += expected
        self.rate = (self.events + self.shrinkage) / (self.expected + self.shrinkage)


def age_level(age_s: float) -> int:
    return bisect_right(AGE_EDGES_S, age_s)


def share_level(share: float, usual: float) -> int:
    return bisect_right(SHARE_EDGES, share / usual) if usual > 0 else SHARES - 1


def hour_level(hours: int) -> int:
    """Return the level of an hour of local time since the epoch: the hour of the day, plus 24 on Saturday and Sunday."""
    return hours % 24 + (24 if (hours // 24 + 3) % 7 >= 5 else 0)


def block_of(hour: int) -> int:
    """Return the four-hour block of an hour level."""
    return hour % 24 // 4 + (6 if hour >= 24 else 0)


# For each hour of the week, from the epoch's first (a Thursday): its hour level and its block.
WEEK = tuple((hour_level(hours), block_of(hour_level(hours))) for hours in range(7 * 24))
