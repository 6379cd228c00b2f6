"""The factors of a node's hazard: what each level (an age, an hour, ...) does to the rate at which machines are taken back.

A level's rate is relative to what the rest of the model expects: (events + a) / (expected + a), both counts halving every
40 days, `a` pulling towards 1: the posterior mean of a Gamma-Poisson model. Counts decay forwards (Cormode et al., ICDE 2009):
what comes later is written larger, so an update touches one level.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

HOUR_S = 3600.0
DAY_S = 86_400.0

# Chosen on the first 70 % of two traces by rolling log-loss (docs/survival.md); the optimum is flat: half or double is < 0.5 %.
HALF_LIFE_S = 40 * DAY_S
NODE_HALF_LIFE_S = 7 * DAY_S
ROOM_HALF_LIFE_S = DAY_S / 4
SHARE_HALF_LIFE_S = 14 * DAY_S

# Seconds of age: 5 minutes, doubling, to 3.5 days.
AGE_EDGES_S = tuple(300.0 * 2**power for power in range(11))
AGES = len(AGE_EDGES_S) + 1
# A node's own ages are coarser, since it has fewer departures: below 40 min, 160 min, 11 h, 43 h, and above.
OWN_AGE_OF = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
OWN_AGES = 5
HOURS = 48  # of the day, Monday to Friday and then the weekend
OWN_BLOCKS = 12  # four hours each, likewise
STAY_EDGES_S = tuple(150.0 * 2**power for power in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10))  # how long it stayed last time
STAYS = len(STAY_EDGES_S) + 1
# How much of the room is lent now, by its mean of two weeks: a room that empties goes on emptying.
SHARE_EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
SHARES = len(SHARE_EDGES) + 1

# Before any data: h(age) of a Weibull of shape 0.57, the fit to when 44 nodes of a university cluster were free (1,266 stays),
# relative to its value at four hours, at each bin's middle; the last bin's at 7 days.
WEIBULL_SHAPE = 0.57
_MIDDLES_S = (
    AGE_EDGES_S[0] / 2,
    *((low + high) / 2 for low, high in pairwise(AGE_EDGES_S)),
    7 * DAY_S,
)
AGE_SHAPE = tuple((middle / (4 * HOUR_S)) ** (WEIBULL_SHAPE - 1) for middle in _MIDDLES_S)

REBASE = 2.0**40  # of the forward scale: every four and a half years


class Factor:
    """`shape` multiplies the rates; with `circles`, neighbours in a circle of so many levels count half for each other."""

    __slots__ = ("circle", "events", "expected", "other_events", "other_expected", "rates", "shape", "shrinkage")

    def __init__(self, levels: int, shrinkage: float, shape: Sequence[float] = (), circle: int = 0) -> None:
        self.shrinkage, self.circle = shrinkage, circle
        self.shape = tuple(shape)
        self.events = [0.0] * levels
        self.expected = [0.0] * levels
        self.other_events: list[float] = []  # of other nodes, as they gossip them
        self.other_expected: list[float] = []
        self.rates = list(self.shape) or [1.0] * levels

    def add(self, level: int, events: float, expected: float, scale: float) -> None:
        """Counts as they are now; `scale` is the forward weight of now."""
        self.events[level] += events * scale
        self.expected[level] += expected * scale
        if not (self.circle or self.other_events):  # as `_renew`, without the way there
            rate = (self.events[level] / scale + self.shrinkage) / (self.expected[level] / scale + self.shrinkage)
            self.rates[level] = rate * self.shape[level] if self.shape else rate
            return
        self._renew(level, scale)
        if self.circle:
            first = level - level % self.circle
            self._renew(first + (level + 1) % self.circle, scale)
            self._renew(first + (level - 1) % self.circle, scale)

    def relative(self, level: int) -> float:
        """The rate without the shape."""
        return self.rates[level] / self.shape[level] if self.shape else self.rates[level]

    def variance(self, level: int, scale: float) -> float:
        """Of the rate's logarithm, about: 1 / (events + a)."""
        return 1 / (self._count(self.events, self.other_events, level, scale) + self.shrinkage)

    def renew(self, scale: float) -> None:
        for level in range(len(self.rates)):
            self._renew(level, scale)

    def rebase(self, scale: float) -> None:
        self.events = [value / scale for value in self.events]
        self.expected = [value / scale for value in self.expected]

    def adopt(self, events: Sequence[float], expected: Sequence[float], scale: float) -> None:
        """The campus without this node, in place of what was known of it before."""
        self.other_events, self.other_expected = list(events), list(expected)
        self.renew(scale)

    def _renew(self, level: int, scale: float) -> None:
        events = self._count(self.events, self.other_events, level, scale)
        expected = self._count(self.expected, self.other_expected, level, scale)
        rate = (events + self.shrinkage) / (expected + self.shrinkage)
        self.rates[level] = rate * self.shape[level] if self.shape else rate

    def _count(self, counts: list[float], others: list[float], level: int, scale: float) -> float:
        if not self.circle:
            return counts[level] / scale + (others[level] if others else 0.0)
        first = level - level % self.circle
        left, right = first + (level - 1) % self.circle, first + (level + 1) % self.circle
        count = (counts[level] + (counts[left] + counts[right]) / 2) / scale
        if others:
            count += others[level] + (others[left] + others[right]) / 2
        return count / 2


class Fading:
    """One rate whose counts halve quickly, each time they are looked at."""

    __slots__ = ("at", "events", "expected", "half_life_s", "rate", "shrinkage")

    def __init__(self, shrinkage: float, half_life_s: float, now: float) -> None:
        self.shrinkage, self.half_life_s, self.at = shrinkage, half_life_s, now
        self.events = self.expected = 0.0
        self.rate = 1.0

    def add(self, events: float, expected: float, now: float) -> None:
        self.fade(now)
        self.events += events
        self.expected += expected
        self.rate = (self.events + self.shrinkage) / (self.expected + self.shrinkage)

    def fade(self, now: float) -> None:
        if now > self.at:
            kept = 0.5 ** ((now - self.at) / self.half_life_s)
            self.events *= kept
            self.expected *= kept
            self.at = now
            self.rate = (self.events + self.shrinkage) / (self.expected + self.shrinkage)

    def variance(self) -> float:
        return 1 / (self.events + self.shrinkage)


def age_level(age_s: float) -> int:
    return bisect_right(AGE_EDGES_S, age_s)


def stay_level(length_s: float) -> int:
    """Of the length of the stay before; 0 where none is known."""
    return bisect_right(STAY_EDGES_S, length_s)


def share_level(share: float, usual: float) -> int:
    return bisect_right(SHARE_EDGES, share / usual) if usual > 0 else SHARES - 1


def hour_level(hours: int) -> int:
    """Of the hours of local time since the epoch: the hour of the day, with 24 more on Saturday and Sunday."""
    return hours % 24 + (24 if (hours // 24 + 3) % 7 >= 5 else 0)


def block_of(hour: int) -> int:
    """The four hours that one of `hour_level` lies in."""
    return hour % 24 // 4 + (6 if hour >= 24 else 0)


# Of the hours of a week, from the epoch's: each hour's level, and the four hours that it lies in.
WEEK = tuple((hour_level(hours), block_of(hour_level(hours))) for hours in range(7 * 24))
