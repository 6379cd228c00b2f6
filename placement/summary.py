"""A node's summary of its own stays, in integers. Other nodes pool the summaries into the campus's prior and forecast by them.

It travels as a signed lane-2 section, published every hour and when a stay ends. Its counts are bounded: a node that lies about
itself moves the campus's prior by no more than a few honest nodes do.
"""

from collections.abc import Iterable, Sequence
from math import floor
from typing import Annotated

import msgspec

from membership.malformed import MALFORMED
from placement import factors
from placement.availability import Span
from placement.calibration import MOST_INFORMATION, MOST_THETA
from placement.survival import Estimator, ZoneHistory

LAYOUT = 2
UNIT = 100  # counts travel in hundredths
LEVELS = (1, factors.AGES, factors.HOURS, factors.SHARES)
OWN_LEVELS = (1, factors.OWN_AGES, factors.OWN_BLOCKS)
COMMON, OWN = sum(LEVELS), sum(OWN_LEVELS)
WEEK_HOURS = 168
MOST_HISTORY_S = 120 * factors.DAY_S  # from which the week is computed
UNSEEN = 255  # an hour of the week without history

# A node that is always lent has 1,385 h at risk with a half-life of 40 days; twice that allows for an unusual age. Departures:
# ten a day (both own choices).
MOST_HOURS, MOST_EVENTS = 2800.0, 580.0

Hundredths = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Unix = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class SummaryError(ValueError):
    """Bytes that are not a valid summary."""


class Summary(msgspec.Struct, frozen=True):
    """`events` and `expected`: the node's counts of the base rate (expected: hours), ages, hours and shares, concatenated;
    `own_events` and `own_expected`: of the node, its ages and its four-hour blocks. `since_unix`: start of the present stay, 0 if
    not lent. `until_unix`: when its owner takes it back, 0 if not known. `lent`: hours lent. `slope`: information and kappa;
    `frailty`: information and theta. `week`: as `week_of` returns it."""

    layout: int
    as_of_unix: int
    since_unix: Unix
    until_unix: Unix
    events: tuple[Hundredths, ...]
    expected: tuple[Hundredths, ...]
    own_events: tuple[Hundredths, ...]
    own_expected: tuple[Hundredths, ...]
    lent: Hundredths
    slope: tuple[Hundredths, Annotated[int, msgspec.Meta(ge=0, le=UNIT)]]
    frailty: tuple[Hundredths, Annotated[int, msgspec.Meta(ge=0, le=int(MOST_THETA * UNIT))]]
    week: bytes


_decoder = msgspec.msgpack.Decoder(Summary)


def encode_summary(summary: Summary) -> bytes:
    return msgspec.msgpack.encode(summary)


def decode_summary(data: bytes) -> Summary:
    try:
        summary = _decoder.decode(data)
    except MALFORMED as error:
        raise SummaryError(f"not a summary of stays: {error}") from error
    if summary.layout != LAYOUT:
        raise SummaryError(f"a summary of layout {summary.layout}; this node knows {LAYOUT}")
    lengths = (len(summary.events), len(summary.expected), len(summary.own_events), len(summary.own_expected))
    if lengths != (COMMON, COMMON, OWN, OWN) or len(summary.week) != WEEK_HOURS:
        raise SummaryError("a summary of stays with the wrong number of levels")
    if any(share > 100 and share != UNSEEN for share in summary.week):
        raise SummaryError("a summary whose week has more than 100 per cent in an hour")
    return summary


def week_of(stays: Iterable[Span], first: float, last: float, utc_offset_s: float) -> bytes:
    """Return the per cent of each hour of the week in which the node was lent, from Monday 0:00 local time; 255 if unknown."""
    first = max(first, last - MOST_HISTORY_S)
    known, lent = [0.0] * WEEK_HOURS, [0.0] * WEEK_HOURS
    for spans, seconds in (([(first, last)], known), (stays, lent)):
        for start, end in spans:
            now, until = max(first, start), min(last, end)
            hour = floor((now + utc_offset_s) / factors.HOUR_S)
            while now < until:
                upper = min(until, max(now, (hour + 1) * factors.HOUR_S - utc_offset_s))
                seconds[(hour + 72) % WEEK_HOURS] += upper - now  # the epoch began on a Thursday
                now, hour = upper, hour + 1
    return bytes(round(100 * min(1.0, there / of)) if of > 0 else UNSEEN for there, of in zip(lent, known, strict=True))


def summarise(estimator: Estimator, node: bytes, now: float, until: float, week: bytes) -> Summary:
    """Summarise an estimator that counts for the campus only what this node does."""
    scale, known = estimator.scale, estimator.nodes[node]
    return Summary(
        LAYOUT,
        int(now),
        0 if known.since is None else int(known.since),
        int(until),
        _hundredths([estimator.events, *(value for counts in estimator.common for value in counts.events)], scale),
        _hundredths(
            [estimator.hours_at_risk, *(value for counts in estimator.common for value in counts.expected)], scale
        ),
        _hundredths([known.own.events * scale, *known.ages.events, *known.blocks.events], scale),
        _hundredths([known.own.expected * scale, *known.ages.expected, *known.blocks.expected], scale),
        min(2**31, round(estimator.hours_lent / scale * UNIT)),
        (round(estimator.slope.information * UNIT), round(estimator.slope.own * UNIT)),
        (round(estimator.frailty.information * UNIT), round(estimator.frailty.own * UNIT)),
        week,
    )


def adopt(estimator: Estimator, summaries: Iterable[Summary], now: float) -> None:
    """Replace the campus's prior by the pooled summaries of all other nodes."""
    events, expected = [0.0] * COMMON, [0.0] * COMMON
    lent = 0.0
    slope = frailty = (0.0, 0.0)
    for summary in summaries:
        worth = _worth(summary, now) / UNIT
        lent += min(summary.lent * worth, MOST_HOURS)
        slope = _pooled(slope, summary.slope, worth)
        frailty = _pooled(frailty, summary.frailty, worth)
        for level, value in enumerate(summary.events):
            events[level] += value * worth
        for level, value in enumerate(summary.expected):
            expected[level] += value * worth
    estimator.slope.adopt(*slope)
    estimator.frailty.adopt(*frailty)
    parts = list(zip(_split(events, LEVELS), _split(expected, LEVELS), strict=True))
    estimator.adopt((events[0], expected[0], lent), parts[1:])


def introduce(estimator: Estimator, node: bytes, summary: Summary, zone: ZoneHistory, now: float) -> None:
    """Add another node as its summary describes it. Its stays do not count for the campus here: its own summary counts them."""
    known = estimator.add_node(node, zone, now)
    known.campus = False
    faded = 0.5 ** (max(0.0, now - summary.as_of_unix) / factors.NODE_HALF_LIFE_S)
    own_events, own_expected = (
        [min(MOST_EVENTS, value / UNIT) for value in counts] for counts in (summary.own_events, summary.own_expected)
    )
    known.own.at, known.own.events, known.own.expected = now, own_events[0] * faded, own_expected[0] * faded
    known.own.add(0.0, 0.0, now)
    scale = _worth(summary, now) * estimator.scale
    parts = zip(_split(own_events, OWN_LEVELS), _split(own_expected, OWN_LEVELS), strict=True)
    for factor, (events, expected) in zip((known.ages, known.blocks), list(parts)[1:], strict=True):
        factor.events, factor.expected = [value * scale for value in events], [value * scale for value in expected]
        factor.renew(estimator.scale)
    if known.since is None:  # a node that is observed is known better from that
        known.since = min(float(summary.since_unix), now) if summary.since_unix else None
        known.seen = now


def _split(values: Sequence[float], levels: Iterable[int]) -> list[Sequence[float]]:
    parts, begin = [], 0
    for count in levels:
        parts.append(values[begin : begin + count])
        begin += count
    return parts


def _pooled(known: tuple[float, float], reported: tuple[int, int], worth: float) -> tuple[float, float]:
    """Return the information and the value with those of one more node."""
    more = min(MOST_INFORMATION, reported[0] * worth)
    information = known[0] + more
    return information, (known[0] * known[1] + more * reported[1] / UNIT) / information if information else 0.0


def _worth(summary: Summary, now: float) -> float:
    """Return the weight of its counts now: they fade with the half-life, and are bounded by what one node can have."""
    aged = float(0.5 ** (max(0.0, now - summary.as_of_unix) / factors.HALF_LIFE_S))
    hours, events = summary.expected[0] / UNIT, summary.events[0] / UNIT
    most = max(max(summary.events) / UNIT / MOST_EVENTS, max(summary.expected[1:]) / UNIT / MOST_EVENTS)
    return aged / float(max(1.0, hours / MOST_HOURS, events / MOST_EVENTS, most))


def _hundredths(values: Iterable[float], scale: float) -> tuple[int, ...]:
    return tuple(min(2**31, round(value / scale * UNIT)) for value in values)
