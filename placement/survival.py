"""How likely a node stays: a hazard that falls with the time it has been up, shrunk towards a campus prior.

Time since the node became available says most about how long it will stay, on every trace tried (university cluster 2013,
spot instances 2022 and 2023): fitted Weibull shapes are 0.46 to 0.68, far from memoryless. The first estimate is therefore
piecewise constant in age, rate = (events + prior) / (exposure + prior exposure) per bin.
"""

from bisect import bisect_right
from collections.abc import Iterable
from math import exp

import msgspec

from placement.advert import MAX_WEIGHT

# Bin edges in seconds of age: 5 minutes, doubling.
EDGES_S = tuple(300.0 * 2**power for power in range(12))

# The campus prior, per hour and bin: h(age) of a Weibull with k = 0.57, scale 5.55 h, the fit to when nodes of a
# 44-node university cluster were free of their owners (1,266 stays). At the middle of each bin.
PRIOR_SHAPE, PRIOR_SCALE_H = 0.57, 5.55
PRIOR_EXPOSURE_H = 8.0  # a node's own history outweighs the campus after a working day in a bin; ours


def _prior_rate(bin_number: int) -> float:
    lower = EDGES_S[bin_number - 1] if bin_number > 0 else 0.0
    upper = EDGES_S[bin_number] if bin_number < len(EDGES_S) else 2 * EDGES_S[-1]
    hours = (lower + upper) / 7200
    return float(PRIOR_SHAPE / PRIOR_SCALE_H * (hours / PRIOR_SCALE_H) ** (PRIOR_SHAPE - 1))


class History(msgspec.Struct, frozen=True):
    """Per age bin: how often the node left in it, and the hours it spent in it."""

    events: tuple[float, ...] = (0.0,) * (len(EDGES_S) + 1)
    exposure_h: tuple[float, ...] = (0.0,) * (len(EDGES_S) + 1)

    def with_session(self, length_s: float, ended: bool) -> "History":
        """One stay of this length; `ended` is False for one that is still going on."""
        events, exposure = list(self.events), list(self.exposure_h)
        lower = 0.0
        for number in range(len(EDGES_S) + 1):
            upper = EDGES_S[number] if number < len(EDGES_S) else float("inf")
            exposure[number] += max(0.0, min(length_s, upper) - lower) / 3600
            lower = upper
            if length_s < upper:
                break
        if ended:
            events[_bin(length_s)] += 1
        return History(tuple(events), tuple(exposure))

    @classmethod
    def of(cls, sessions: Iterable[tuple[float, bool]]) -> "History":
        history = cls()
        for length_s, ended in sessions:
            history = history.with_session(length_s, ended)
        return history


def hazard_per_hour(history: History, age_s: float) -> float:
    """The rate at which a node of this age leaves."""
    number = _bin(age_s)
    return (history.events[number] + _prior_rate(number) * PRIOR_EXPOSURE_H) / (
        history.exposure_h[number] + PRIOR_EXPOSURE_H
    )


def survival(history: History, age_s: float, horizon_s: float) -> float:
    """The probability that a node that has been up for `age_s` stays for another `horizon_s`."""
    total, now, end = 0.0, max(0.0, age_s), max(0.0, age_s) + max(0.0, horizon_s)
    while now < end:
        number = _bin(now)
        upper = min(end, EDGES_S[number] if number < len(EDGES_S) else end)
        total += hazard_per_hour(history, now) * (upper - now) / 3600
        now = upper
    return exp(-total)


def weight(history: History, age_s: float, horizon_s: float = 3600.0) -> int:
    """The advert's integer weight, 1 to 64: survival over the next hour, in steps that do not flutter."""
    return max(1, min(MAX_WEIGHT, round(MAX_WEIGHT * survival(history, age_s, horizon_s) / 4) * 4))


def _bin(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s)
