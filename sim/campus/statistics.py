"""Statistics over replications: bootstrap intervals, paired differences and reductions, p-values with Holm's correction."""

from collections.abc import Callable, Sequence
from math import fsum
from random import Random
from statistics import NormalDist

import msgspec

from sim.campus.metrics import percentile

RESAMPLES = 2000
LEVEL = 0.95
SEED = 20130  # of the resampling, so that the same replications give the same interval
ENOUGH = 0.02  # half width of a reduction at which a study may stop


class Interval(msgspec.Struct, frozen=True):
    value: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def bootstrap(count: int, statistic: Callable[[Sequence[int]], float], resamples: int = RESAMPLES) -> Interval:
    """Return a statistic with its bootstrap interval: bias-corrected percentiles (Efron 1987, without acceleration).

    `statistic` takes the indices of the resampled replications.
    """
    value = statistic(range(count))
    if count < 2:
        return Interval(value, value, value, count)
    rng = Random(SEED)
    drawn = sorted(statistic([int(rng.random() * count) for _ in range(count)]) for _ in range(resamples))
    below = sum(one < value for one in drawn) + sum(one == value for one in drawn) / 2
    normal = NormalDist()
    shift = normal.inv_cdf(min(1 - 1 / resamples, max(1 / resamples, below / resamples)))
    tail = normal.inv_cdf((1 + LEVEL) / 2)
    low, high = (percentile(drawn, normal.cdf(2 * shift + side * tail)) for side in (-1, 1))
    return Interval(value, min(low, value), max(high, value), count)


def mean_of(values: Sequence[float]) -> Interval:
    return bootstrap(len(values), lambda places: fsum([values[p] for p in places]) / len(places))


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the mean of second - first, paired."""
    return mean_of([b - a for a, b in zip(first, second, strict=True)])


def reduction(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the relative reduction from first to second, 1 - sum / sum, paired; 0 if the first sum is 0."""

    def ratio(places: Sequence[int]) -> float:
        base = fsum([first[p] for p in places])
        return 1 - fsum([second[p] for p in places]) / base if base else 0.0

    return bootstrap(len(first), ratio)


def p_value(differences: Sequence[float]) -> float:
    """Return the p-value of "no difference" by permutation of signs (Fisher): all up to 2^12, else 10,000 draws."""
    there = [one for one in differences if one]
    if not there:
        return 1.0
    extreme = abs(fsum(there)) * (1 - 1e-12)
    if len(there) <= 12:
        totals = [0.0]
        for one in there:
            totals = [total + sign * one for total in totals for sign in (1, -1)]
        return sum(abs(total) >= extreme for total in totals) / len(totals)
    rng, hits, draws = Random(SEED), 0, 10_000
    for _ in range(draws):
        bits = rng.getrandbits(len(there))
        total = fsum(one if bits >> place & 1 else -one for place, one in enumerate(there))
        hits += abs(total) >= extreme
    return (hits + 1) / (draws + 1)


def holm(values: Sequence[float]) -> list[float]:
    """Return adjusted p-values (Holm 1979) in the given order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted = [0.0] * len(values)
    least = 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted
