"""Evaluation questions from a trace: this node is lent at this time; does it stay lent for the next so many minutes?

Time is divided into bins of five minutes; a bin in which the node was not lent at some moment counts as not lent. The end of
every third bin is a question for each node that is lent in that bin. The outcome is unknown if the trace ends before the window.
A model may use only the data before the question.
"""

from array import array
from collections.abc import Callable, Iterator
from math import ceil, floor

import msgspec

from placement.availability import Trace, TraceError
from placement.survival import Estimator

BIN_S = 300
EVERY_BINS = 3  # a question every 15 minutes
MOST_BINS = 20_000_000  # over all nodes; about 200 nodes for a year
DAY_BINS = 288


class Questions(msgspec.Struct, frozen=True):
    """The questions as columns, in order of time. `stayed[h]` is 1, 0 or -1 (unknown); `features`: for models without state."""

    first: float  # start of the first bin
    bins: int
    nodes: tuple[str, ...]
    horizons_min: tuple[int, ...]
    node: "array[int]"
    bin: "array[int]"  # the question is asked at its end
    stayed: "dict[int, array[int]]"
    features: "dict[str, array[float]]"

    def time(self, bin: int) -> float:
        return self.first + BIN_S * (bin + 1)


class Bins(msgspec.Struct, frozen=True):
    """For each node, in order, the runs of bins [begin, end) in which it is lent."""

    first: float
    bins: int
    nodes: tuple[str, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]


def cut_into_bins(trace: Trace) -> Bins:
    first = floor(trace.first / BIN_S) * BIN_S
    bins = floor((trace.last - first) / BIN_S)
    if bins < 2:
        raise TraceError("the trace is shorter than two bins of five minutes")
    if bins * len(trace.nodes) > MOST_BINS:
        raise TraceError(f"the trace is too large: {len(trace.nodes)} nodes for {bins * BIN_S / 86_400:.0f} days")
    runs = []
    for stays in trace.nodes.values():
        whole = ((max(0, ceil((s.start - first) / BIN_S)), min(bins, floor((s.end - first) / BIN_S))) for s in stays)
        runs.append(tuple((begin, end) for begin, end in whole if begin < end))
    return Bins(float(first), bins, tuple(trace.nodes), tuple(runs))


def walk(trace: Bins) -> Iterator[tuple[int, list[tuple[int, int]], list[int]]]:
    """Yield for each bin: its number, the lent nodes as (node, first bin of its stay), and the nodes whose stay just ended."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for node, runs in enumerate(trace.runs):
        for begin, end in runs:
            starts.setdefault(begin, []).append(node)
            ends.setdefault(end, []).append(node)
    lent: dict[int, int] = {}
    for number in range(trace.bins):
        left = ends.get(number, [])
        for node in left:
            del lent[node]
        for node in starts.get(number, []):
            lent[node] = number
        yield number, sorted(lent.items()), left


def ask(trace: Bins, horizons_min: tuple[int, ...], utc_offset_s: float) -> Questions:
    """Return all questions with their outcomes and features."""
    windows = {horizon: ceil(horizon * 60 / BIN_S) for horizon in horizons_min}
    names = ("age_h", "hour", "weekday", "node", "last_stay_h", "last_absence_h", "left_day", "share", "left_all_day")
    questions = Questions(
        trace.first,
        trace.bins,
        trace.nodes,
        horizons_min,
        array("l"),
        array("l"),
        {horizon: array("b") for horizon in horizons_min},
        {name: array("d") for name in names},
    )
    end_of = [dict(runs) for runs in trace.runs]
    count = len(trace.nodes)
    last_stay, left_at, absence = [0.0] * count, [-1] * count, [0.0] * count
    recent, recent_at, all_recent = [0.0] * count, [0] * count, 0.0
    began: dict[int, int] = {}
    for number, lent, left in walk(trace):
        all_recent = all_recent * 0.5 ** (1 / DAY_BINS) + len(left)
        for node in left:
            last_stay[node], left_at[node] = (number - began.pop(node)) / 12, number
            recent[node] = recent[node] * 0.5 ** ((number - recent_at[node]) / DAY_BINS) + 1
            recent_at[node] = number
        for node, begin in lent:
            if node not in began:
                began[node] = begin
                absence[node] = (begin - left_at[node]) / 12 if left_at[node] >= 0 else 0.0
        if number % EVERY_BINS:
            continue
        local = questions.time(number) + utc_offset_s
        for node, begin in lent:
            questions.node.append(node)
            questions.bin.append(number)
            values = (
                (number + 1 - begin) / 12,
                local % 86_400 / 3600,
                float((int(local // 86_400) + 3) % 7),
                float(node),
                last_stay[node],
                absence[node],
                recent[node] * 0.5 ** ((number - recent_at[node]) / DAY_BINS),
                len(lent) / count,
                all_recent,
            )
            for name, value in zip(names, values, strict=True):
                questions.features[name].append(value)
            until = end_of[node][begin]
            for horizon, window in windows.items():
                known = number + 1 + window <= trace.bins  # else only departures would be known
                questions.stayed[horizon].append(int(until >= number + 1 + window) if known else -1)
    return questions


def answer(
    trace: Bins,
    questions: Questions,
    utc_offset_s: float,
    frozen_from: float,
    progress: Callable[[str], None] = lambda _: None,
) -> "dict[int, array[float]]":
    """Return the estimator's probabilities for every question; `progress` is called once for each day of the trace.

    From `frozen_from` on only the factors of nodes and of the zone are updated, not those of the campus.
    """
    estimator = Estimator(trace.first, utc_offset_s)
    names = [node.encode() for node in trace.nodes]
    zone = estimator.zone("", trace.first)
    given: dict[int, array[float]] = {horizon: array("d") for horizon in questions.horizons_min}
    for name in names:
        estimator.add_node(name, zone, trace.first)
    frozen = False
    for number, lent, left in walk(trace):
        now = questions.time(number)
        if number % DAY_BINS == 0:
            progress(f"day {number // DAY_BINS + 1} of {-(-trace.bins // DAY_BINS)}")
        if now > frozen_from and not frozen:
            frozen = True
            for known in estimator.nodes.values():
                known.campus = False
        for node in left:
            estimator.record_end(names[node], now)
        for node, _ in lent:
            estimator.record_lent(names[node], now, now - BIN_S)
        zone.observe(len(lent), len(names), now)
        if number % EVERY_BINS:
            continue
        for horizon, chances in given.items():
            chances.extend(estimator.survivals([names[node] for node, _ in lent], now, horizon * 60))
    return given
