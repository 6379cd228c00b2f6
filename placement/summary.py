"""What a node tells of its own stays, in integers: the others build the campus's prior of it, and foretell its stay by it.

A signed lane-2 section, told every hour and when a stay ends. What others say is bounded: a node that lies about itself moves the
campus by no more than a few honest ones.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from placement import factors
from placement.belief import MOST, MOST_THETA
from placement.room import Room
from placement.survival import Estimator

LAYOUT = 1
UNIT = 100  # counts travel in hundredths
LEVELS = (1, factors.AGES, factors.HOURS, factors.STAYS, factors.SHARES)
OWN_LEVELS = (1, factors.OWN_AGES, factors.OWN_BLOCKS)
COMMON, OWN = sum(LEVELS), sum(OWN_LEVELS)
WEEK_HOURS = 168
UNSEEN = 255  # in `week`: nothing is known of that hour

# A node that is always lent has 1,385 h at risk, once all of them have been halving every 40 days; twice that leaves room for an
# unusual age. Departures: ten a day. Both ours.
MOST_HOURS, MOST_EVENTS = 2800.0, 580.0

Hundredths = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class SummaryError(ValueError):
    """Bytes that are no possible summary."""


class Summary(msgspec.Struct, frozen=True):
    """`events` and `expected`: its own counts of the base rate (expected: hours), ages, hours, stays and shares, one after
    another; `own_...`: of the node, its ages, its four-hour blocks. `since_unix`: lent since then, 0 if it is not. `until_unix`:
    its owner has said that he takes it back then, 0 if not. `lent`: hours; `belief`: information and kappa; `frailty`:
    information and theta; `week`: as `week.week_of` has it."""

    layout: int
    as_of_unix: int
    since_unix: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    until_unix: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    last_stay_s: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    events: tuple[Hundredths, ...]
    expected: tuple[Hundredths, ...]
    own_events: tuple[Hundredths, ...]
    own_expected: tuple[Hundredths, ...]
    lent: Hundredths
    belief: tuple[Hundredths, Annotated[int, msgspec.Meta(ge=0, le=UNIT)]]
    week: bytes
    frailty: tuple[Hundredths, Annotated[int, msgspec.Meta(ge=0, le=MOST_THETA * UNIT)]] = (0, 0)


_decoder = msgspec.msgpack.Decoder(Summary)


def encode_summary(summary: Summary) -> bytes:
    return msgspec.msgpack.encode(summary)


def decode_summary(data: bytes) -> Summary:
    try:
        summary = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SummaryError(f"not a summary of stays: {error}") from error
    if summary.layout != LAYOUT:
        raise SummaryError(f"a summary of layout {summary.layout}; this node knows {LAYOUT}")
    lengths = (len(summary.events), len(summary.expected), len(summary.own_events), len(summary.own_expected))
    if lengths != (COMMON, COMMON, OWN, OWN) or len(summary.week) != WEEK_HOURS:
        raise SummaryError("a summary of stays has another number of levels")
    if any(share > 100 and share != UNSEEN for share in summary.week):
        raise SummaryError("a summary's week has more than 100 per cent of an hour")
    return summary


def summarise(estimator: Estimator, node: bytes, now: float, until: float, week: bytes) -> Summary:
    """Of an estimator that counts for the campus what this node does, and nothing else."""
    scale = estimator.scale
    common = [(counts.events, counts.expected) for counts in estimator.common()]
    events = [estimator.events, *(value for counts, _ in common for value in counts)]
    expected = [estimator.hours_at_risk, *(value for _, counts in common for value in counts)]
    known = estimator.nodes[node]
    own = (known.ages, known.blocks)
    own_events = [known.own.events, *(value / scale for counts in own for value in counts.events)]
    own_expected = [known.own.expected, *(value / scale for counts in own for value in counts.expected)]
    return Summary(
        LAYOUT,
        int(now),
        0 if known.since is None else int(known.since),
        int(until),
        int(known.last_stay_s),
        _hundredths(value / scale for value in events),
        _hundredths(value / scale for value in expected),
        _hundredths(own_events),
        _hundredths(own_expected),
        min(2**31, round(estimator.hours_lent / scale * UNIT)),
        (round(estimator.belief.information * UNIT), round(estimator.belief.own * UNIT)),
        week,
        (round(estimator.frailty.information * UNIT), round(estimator.frailty.own * UNIT)),
    )


def adopt(estimator: Estimator, summaries: Iterable[Summary], now: float) -> None:
    """What all the others tell becomes the campus's prior, in place of what they told before."""
    events, expected = [0.0] * COMMON, [0.0] * COMMON
    lent = 0.0
    belief = frailty = (0.0, 0.0)
    for summary in summaries:
        worth = _worth(summary, now) / UNIT
        lent += min(summary.lent * worth, MOST_HOURS)
        belief = _pooled(belief, summary.belief, worth)
        frailty = _pooled(frailty, summary.frailty, worth)
        for level, value in enumerate(summary.events):
            events[level] += value * worth
        for level, value in enumerate(summary.expected):
            expected[level] += value * worth
    parts: list[tuple[Sequence[float], Sequence[float]]] = []
    begin = 0
    for levels in LEVELS:
        parts.append((events[begin : begin + levels], expected[begin : begin + levels]))
        begin += levels
    base = (parts[0][0][0], parts[0][1][0], lent)
    estimator.belief.adopt(*belief)
    estimator.frailty.adopt(*frailty)
    estimator.adopt(base, parts[1], parts[2], parts[3], parts[4])


def introduce(estimator: Estimator, node: bytes, summary: Summary, room: Room, now: float) -> None:
    """Know another node by what it tells of itself. Its stays are not counted for the campus here: it does that itself."""
    known = estimator.know(node, room, now)
    known.campus = False
    scale, worth = estimator.scale, _worth(summary, now)
    quicker = 0.5 ** (max(0.0, now - summary.as_of_unix) / factors.NODE_HALF_LIFE_S)
    known.own.at = now
    known.own.events = min(MOST_EVENTS, summary.own_events[0] / UNIT) * quicker
    known.own.expected = min(MOST_EVENTS, summary.own_expected[0] / UNIT) * quicker
    known.own.add(0.0, 0.0, now)
    begin = 1
    for factor in (known.ages, known.blocks):
        levels = len(factor.rates)
        for counts, told in ((factor.events, summary.own_events), (factor.expected, summary.own_expected)):
            counts[:] = [min(MOST_EVENTS, value / UNIT) * worth * scale for value in told[begin : begin + levels]]
        factor.renew(scale)
        begin += levels
    known.last_stay_s = float(summary.last_stay_s)
    if known.since is None:  # what is watched is known better
        known.since = min(float(summary.since_unix), now) if summary.since_unix else None
        known.seen = now


def _pooled(known: tuple[float, float], told: tuple[int, int], worth: float) -> tuple[float, float]:
    """Information and value, with what one more has come to."""
    more = min(MOST, told[0] * worth)
    information = known[0] + more
    return information, (known[0] * known[1] + more * told[1] / UNIT) / information if information else 0.0


def _worth(summary: Summary, now: float) -> float:
    """What its counts weigh now: they have been halving since, and nobody has more than a node can have."""
    aged = float(0.5 ** (max(0.0, now - summary.as_of_unix) / factors.HALF_LIFE_S))
    hours, events = summary.expected[0] / UNIT, summary.events[0] / UNIT
    most = max(max(summary.events) / UNIT / MOST_EVENTS, max(summary.expected[1:]) / UNIT / MOST_EVENTS)
    return aged / float(max(1.0, hours / MOST_HOURS, events / MOST_EVENTS, most))


def _hundredths(values: Iterable[float]) -> tuple[int, ...]:
    return tuple(min(2**31, round(value * UNIT)) for value in values)
