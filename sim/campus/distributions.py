"""Inverse distribution functions. Each value takes one uniform draw, so that worlds with other parameters draw alike."""

from math import exp, log
from statistics import NormalDist

from sim.campus.world import Lognormal

_normal = NormalDist()


def quantile(spread: Lognormal, u: float) -> float:
    """Return the `u`-quantile of a truncated lognormal."""
    if spread.sigma == 0:
        return spread.median
    mu = log(spread.median)
    low = _normal.cdf((log(spread.min) - mu) / spread.sigma) if spread.min > 0 else 0.0
    high = _normal.cdf((log(spread.max) - mu) / spread.sigma)
    inside = min(1 - 1e-12, max(1e-12, low + u * (high - low)))
    return min(spread.max, max(spread.min, exp(mu + spread.sigma * _normal.inv_cdf(inside))))


def lognormal_factor(sigma: float, u: float) -> float:
    """Return the `u`-quantile of a lognormal of mean 1."""
    return exp(sigma * _normal.inv_cdf(min(1 - 1e-12, max(1e-12, u))) - sigma * sigma / 2)


def exponential(u: float) -> float:
    """Return the `u`-quantile of an exponential of mean 1."""
    return -log(1 - u)
