"""Scores of forecasts: probabilities `p` that a node stays, against the outcomes."""

from collections.abc import Sequence
from math import log

CLIP = 1e-6  # a certain forecast that is wrong costs 14 nats, not infinity
ECE_BINS = 10  # of equal width, as in Guo et al. (ICML 2017)


def log_loss(p: Sequence[float], stayed: Sequence[bool]) -> float:
    """Return the mean log-loss in nats."""
    return sum(losses(p, stayed)) / len(p)


def losses(p: Sequence[float], stayed: Sequence[bool]) -> list[float]:
    """Return the log-loss of each forecast in nats."""
    return [
        -log(min(1 - CLIP, max(CLIP, chance if there else 1 - chance))) for chance, there in zip(p, stayed, strict=True)
    ]


def brier(p: Sequence[float], stayed: Sequence[bool]) -> float:
    """Return the mean squared error (Brier 1950, for one of two outcomes)."""
    return sum((chance - there) ** 2 for chance, there in zip(p, stayed, strict=True)) / len(p)


def auc(p: Sequence[float], stayed: Sequence[bool]) -> float | None:
    """Return P(a node that stayed had a higher forecast than one that left); ties count half. None if all outcomes are equal."""
    ranked = sorted(zip(p, stayed, strict=True))
    stayers = sum(stayed)
    leavers = len(ranked) - stayers
    if not stayers or not leavers:
        return None
    rank_sum, begin = 0.0, 0
    while begin < len(ranked):
        end = begin
        while end < len(ranked) and ranked[end][0] == ranked[begin][0]:
            end += 1
        rank_sum += (begin + 1 + end) / 2 * sum(there for _, there in ranked[begin:end])
        begin = end
    return (rank_sum - stayers * (stayers + 1) / 2) / (stayers * leavers)


def reliability(p: Sequence[float], stayed: Sequence[bool]) -> list[tuple[int, float, float]]:
    """Return (count, mean forecast, share that stayed) for each tenth that has forecasts."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(ECE_BINS)]
    for chance, there in zip(p, stayed, strict=True):
        bins[min(ECE_BINS - 1, int(chance * ECE_BINS))].append((chance, there))
    return [(len(b), sum(chance for chance, _ in b) / len(b), sum(there for _, there in b) / len(b)) for b in bins if b]


def ece(p: Sequence[float], stayed: Sequence[bool]) -> float:
    """Return the expected calibration error: the mean difference of forecasts and outcomes over the tenths."""
    return sum(count * abs(forecast - outcome) for count, forecast, outcome in reliability(p, stayed)) / len(p)
