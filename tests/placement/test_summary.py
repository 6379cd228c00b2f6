"""Summaries of stays: exact, small, and bounded in their effect on other nodes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.factors import DAY_S, HALF_LIFE_S
from placement.summary import (
    COMMON,
    MOST_EVENTS,
    OWN,
    UNSEEN,
    Summary,
    SummaryError,
    adopt,
    decode_summary,
    encode_summary,
    introduce,
    summarise,
    week_of,
)
from placement.survival import Estimator
from tests.placement.test_survival import HOUR_S, MONDAY, A, B, lived

WEEK = bytes([50] * 24 + [UNSEEN] * 144)


def told(length_s: float, count: int = 40) -> tuple[Summary, Estimator, float]:
    estimator = Estimator(MONDAY)
    for number in range(count):
        lived(estimator, A, MONDAY + number * 7 * HOUR_S, length_s)
    now = MONDAY + count * 7 * HOUR_S
    estimator.record_lent(A, now)
    estimator.record_lent(A, now + 1200)
    return summarise(estimator, A, now + 1200, 0.0, WEEK), estimator, now + 1200


def test_node_introduced_by_summary_has_same_survival() -> None:
    summary, mine, now = told(6 * HOUR_S)
    assert len(encode_summary(summary)) < 1500
    heard = decode_summary(encode_summary(summary))
    assert heard == summary and heard.since_unix == int(now - 1200)
    assert heard.frailty == (round(100 * mine.frailty.information), round(100 * mine.frailty.value))
    other = Estimator(now)
    adopt(other, [heard], now)
    introduce(other, A, heard, other.zone("", now), now)
    mine.zones[""].week.rates = [1.0] * 168  # data of its own zone, which the summary does not contain
    for horizon_s in (900.0, HOUR_S, 6 * HOUR_S):
        theirs = other.survival(A, now, horizon_s).probability
        assert theirs == pytest.approx(mine.survival(A, now, horizon_s).probability, abs=0.03)


def test_new_node_starts_from_campus_prior() -> None:
    chances = []
    for length_s in (1200.0, 6.5 * HOUR_S):
        summary, _, now = told(length_s)
        fresh = Estimator(now)
        fresh.record_lent(B, now)
        before = fresh.survival(B, now, HOUR_S).probability
        adopt(fresh, [summary] * 20, now)
        chances.append(fresh.survival(B, now, HOUR_S).probability)
        adopt(fresh, [], now)
        assert fresh.survival(B, now, HOUR_S).probability == pytest.approx(before)
    assert chances[0] < before < chances[1]


def test_old_summary_weighs_less() -> None:
    summary, _, now = told(1200.0)
    weights = []
    for later in (0.0, HALF_LIFE_S, 10 * HALF_LIFE_S):
        fresh = Estimator(now + later)
        adopt(fresh, [summary], now + later)
        weights.append(fresh.other_events)
    assert weights[1] == pytest.approx(weights[0] / 2) and weights[2] < weights[0] / 1000
    fresh = Estimator(now)
    ahead = msgspec.structs.replace(summary, as_of_unix=int(now + HALF_LIFE_S), since_unix=int(now + DAY_S))
    adopt(fresh, [ahead], now)
    introduce(fresh, B, ahead, fresh.zone("", now), now)
    assert fresh.other_events == pytest.approx(weights[0]) and fresh.nodes[B].since == now, "its clock is ahead"


def test_false_summary_has_bounded_effect() -> None:
    honest, _, now = told(6 * HOUR_S, count=300)
    huge = tuple([2**31] * COMMON)
    for events, expected in ((huge, honest.expected), (honest.events, huge), (huge, huge)):
        liar = msgspec.structs.replace(honest, events=events, expected=expected, lent=2**31, slope=(2**31, 0))
        estimator = Estimator(now)
        adopt(estimator, [honest] * 30, now)
        before = estimator.rate
        adopt(estimator, [honest] * 30 + [decode_summary(encode_summary(liar))], now)
        assert before / 2 < estimator.rate < before * 2
        introduce(estimator, B, liar, estimator.zone("", now), now)
        assert 0 <= estimator.survival(B, now, HOUR_S).probability <= 1
        assert estimator.nodes[B].own.events <= MOST_EVENTS
        assert not estimator.nodes[B].campus


def test_hours_lent_and_events_of_one_node_are_bounded() -> None:
    honest, _, now = told(6 * HOUR_S)
    liar = msgspec.structs.replace(
        honest, lent=2**31, own_events=(2**31,) * OWN, own_expected=(2**31,) * OWN, as_of_unix=int(now) + 40 * 86_400
    )
    estimator = Estimator(now)
    adopt(estimator, [liar], now)
    assert estimator.other_lent == 2800.0, "twice what a node has that is always lent"
    introduce(estimator, B, liar, estimator.zone("", now), now)
    own = estimator.nodes[B].own
    assert own.events == own.expected == 580.0, "no more by a clock that is ahead"


def hours_of(week: bytes) -> dict[int, int]:
    return {hour: per_cent for hour, per_cent in enumerate(week) if per_cent}


def test_week_has_the_per_cent_of_each_hour_from_monday_on() -> None:
    monday = 4 * 86_400.0  # the first of all: 5 January 1970
    week_s, hour_s = 7 * 86_400.0, 3600.0
    stays = [(monday - 99.0, monday + hour_s), (monday + 36.5 * hour_s, monday + 37.5 * hour_s)]
    stays.append((monday + 167.25 * hour_s, monday + week_s + hour_s))
    for offset_s, later in ((0.0, 0), (hour_s, 1), (-2 * hour_s, -2)):
        found = hours_of(week_of(stays, monday, monday + week_s, offset_s))
        assert found == {(hour + later) % 168: part for hour, part in ((0, 100), (36, 50), (37, 50), (167, 75))}
    half = hours_of(week_of(stays, monday, monday + week_s, 1800.0))
    assert half == {0: 100, 1: 50, 37: 100, 167: 25}, "half an hour of each is in the next"


def test_week_is_of_the_last_120_days_and_tells_what_is_not_known() -> None:
    day_s, last = 86_400.0, 400 * 86_400.0
    assert set(week_of([(0.0, last - 120 * day_s)], 0.0, last, 0.0)) == {0}
    assert set(week_of([(0.0, last)] * 3, 0.0, last, 0.0)) == {100}, "each hour counts once"
    part = week_of([(last - day_s, last)], last - day_s, last, 0.0)
    assert sorted(part) == [100] * 24 + [UNSEEN] * 144


IMPOSSIBLE: list[dict[str, object]] = [
    {"layout": 1},
    {"events": (0,) * (COMMON - 1)},
    {"expected": (0,) * (COMMON + 1)},
    {"own_events": (0,) * (OWN + 1)},
    {"events": (-1,) + (0,) * (COMMON - 1)},
    {"week": b"\x32" * 167},
    {"week": b"\x65" * 168},
    {"since_unix": 2**41},
    {"slope": (1, 101)},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_impossible_summaries_are_refused(changes: dict[str, object]) -> None:
    good, _, _ = told(HOUR_S, count=3)
    with pytest.raises(SummaryError):
        decode_summary(encode_summary(msgspec.structs.replace(good, **changes)))


@given(st.binary(max_size=300), st.integers(0, 800), st.binary(max_size=6))
def test_hostile_bytes_are_refused_or_valid_summary(data: bytes, at: int, patch: bytes) -> None:
    good = bytearray(encode_summary(GOOD))
    good[at : at + len(patch)] = patch
    for candidate in (data, bytes(good)):
        try:
            summary = decode_summary(candidate)
        except SummaryError:
            continue
        estimator = Estimator(MONDAY + 9 * DAY_S)
        adopt(estimator, [summary], MONDAY + 9 * DAY_S)
        introduce(estimator, B, summary, estimator.zone("", MONDAY), MONDAY + 9 * DAY_S)
        assert 0 <= estimator.survival(B, MONDAY + 9 * DAY_S, HOUR_S).probability <= 1


GOOD = told(HOUR_S, count=3)[0]
