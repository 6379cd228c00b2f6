"""From a uniform draw to a value: one draw for each, whatever the parameters are, so that two worlds share their luck."""

from math import exp, log
from statistics import NormalDist

from sim.campus.world import Spread

_normal = NormalDist()


def quantile(spread: Spread, u: float) -> float:
    """The value below which a part `u` lies, of the lognormal cut off at both ends."""
    if spread.sigma == 0:
        return spread.median
    mu = log(spread.median)
    low = _normal.cdf((log(spread.least) - mu) / spread.sigma) if spread.least > 0 else 0.0
    high = _normal.cdf((log(spread.most) - mu) / spread.sigma)
    inside = min(1 - 1e-12, max(1e-12, low + u * (high - low)))
    return min(spread.most, max(spread.least, exp(mu + spread.sigma * _normal.inv_cdf(inside))))


def unlike(sigma: float, u: float) -> float:
    """How one of many differs from their mean: a lognormal of mean 1."""
    return exp(sigma * _normal.inv_cdf(min(1 - 1e-12, max(1e-12, u))) - sigma * sigma / 2)


def waiting(u: float) -> float:
    """Of an exponential of mean 1."""
    return -log(1 - u)
