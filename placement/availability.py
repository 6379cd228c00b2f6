"""Availability traces: when machines were lent, and the estimators of Kaplan and Meier and of Nelson and Aalen for stays."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import exp, log, sqrt

import msgspec

Span = tuple[float, float]
Z_95 = 1.959964  # of the normal distribution


class TraceError(ValueError):
    """A file that is not a valid trace; the text names the invalid lines."""


class Stay(msgspec.Struct, frozen=True):
    """A stay: lent from `start` to `end` (Unix seconds). `ended` is False if the trace ends before the stay does."""

    start: float
    end: float
    ended: bool


class Trace(msgspec.Struct, frozen=True):
    """The stays of each node between `first` and `last`, in order. Between its stays, a node is not lent."""

    first: float
    last: float
    nodes: dict[str, tuple[Stay, ...]]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans, in order; spans that touch are merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def trace_of_lent(lent: Mapping[str, Iterable[Span]], first: float, last: float) -> Trace:
    """Build a trace from the times when nodes were lent. A stay that reaches `last` has not ended."""
    nodes: dict[str, tuple[Stay, ...]] = {}
    for node, spans in lent.items():
        inside = ((max(start, first), min(end, last)) for start, end in union(spans) if start < last and end > first)
        nodes[node] = tuple(Stay(start, end, end < last) for start, end in inside if start < end)
    return Trace(first, last, nodes)


def trace_of_held(held: Mapping[str, Iterable[Span]], first: float, last: float) -> Trace:
    """Build a trace from the times when nodes were in use by their owners: they are lent at all other times."""
    lent: dict[str, list[Span]] = {}
    for node, spans in held.items():
        gaps: list[Span] = []
        since = first
        for start, end in union(spans):
            if start > since:
                gaps.append((since, start))
            since = max(since, end)
        lent[node] = [*gaps, (since, last)] if since < last else gaps
    return trace_of_lent(lent, first, last)


def busy(demands: Iterable[tuple[float, float, float]], threshold: float) -> list[Span]:
    """Return the spans in which demands of (start, end, amount) add up to the threshold or more."""
    changes = [change for start, end, amount in demands for change in ((start, amount), (end, -amount))]
    spans: list[Span] = []
    load, since = 0.0, None
    for moment, group in groupby(sorted(changes), key=lambda change: change[0]):
        load += sum(amount for _, amount in group)
        if load >= threshold and since is None:
            since = moment
        elif load < threshold and since is not None:
            spans.append((since, moment))
            since = None
    return spans


def merge(traces: Sequence[Trace]) -> Trace:
    """Merge traces of different nodes over the time that all of them cover. Raises TraceError if there is none."""
    first, last = max(trace.first for trace in traces), min(trace.last for trace in traces)
    if first >= last:
        raise TraceError("the traces have no time in common")
    lent: dict[str, list[Span]] = {}
    for trace in traces:
        for node, stays in trace.nodes.items():
            if node in lent:
                raise TraceError(f"two of the traces have a node {node!r}")
            lent[node] = [(stay.start, stay.end) for stay in stays]
    return trace_of_lent(lent, first, last)


def kaplan_meier(stays: Iterable[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Return (length, share that stays longer) from (length, ended) pairs (Kaplan and Meier 1958). Starts with (0, 1)."""
    curve, survived = [(0.0, 1.0)], 1.0
    for length, ends, at_risk in _life_table(stays):
        survived *= 1 - ends / at_risk
        curve.append((length, survived))
    return curve


def greenwood(stays: Iterable[tuple[float, bool]]) -> list[tuple[float, float, float]]:
    """Return (length, low, high): the 95 % interval of Kaplan and Meier's curve, from Greenwood's variance of log(-log S), which
    keeps it between 0 and 1 (Kalbfleisch and Prentice 1980)."""
    band, survived, total = [(0.0, 1.0, 1.0)], 1.0, 0.0
    for length, ends, at_risk in _life_table(stays):
        survived *= 1 - ends / at_risk
        if ends < at_risk:
            total += ends / (at_risk * (at_risk - ends))
        if 0 < survived < 1:
            spread = Z_95 * sqrt(total) / log(survived)
            band.append((length, survived ** exp(-spread), survived ** exp(spread)))
        else:
            band.append((length, survived, survived))
    return band


def nelson_aalen(stays: Iterable[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Return (length, cumulative hazard) from (length, ended) pairs (Aalen 1978); ties in sequence, as in lifelines."""
    curve, total = [(0.0, 0.0)], 0.0
    for length, ends, at_risk in _life_table(stays):
        total += sum(1 / (at_risk - already) for already in range(ends))
        curve.append((length, total))
    return curve


def _life_table(stays: Iterable[tuple[float, bool]]) -> Iterable[tuple[float, int, int]]:
    """Yield (length, number that end at it, number at risk just before it) for each length."""
    ordered = sorted(stays)
    at_risk = len(ordered)
    for length, group in groupby(ordered, key=lambda stay: stay[0]):
        ended = [stay[1] for stay in group]
        yield length, sum(ended), at_risk
        at_risk -= len(ended)
