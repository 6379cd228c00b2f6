"""Availability traces and the two curves, against their definitions and lifelines."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.availability import (
    Stay,
    TraceError,
    busy,
    greenwood,
    kaplan_meier,
    merge,
    nelson_aalen,
    trace_of_held,
    trace_of_lent,
    union,
)
from placement.summary import UNSEEN, week_of

spans = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 30)).map(lambda it: (float(it[0]), float(sum(it)))), max_size=12
)
lives = st.lists(st.tuples(st.integers(1, 12).map(float), st.booleans()), min_size=1, max_size=40)

# Remission of 21 leukaemia patients under 6-mercaptopurine, weeks (Freireich et al. 1963), and the curve every textbook prints.
FREIREICH = [6, 6, 6, 7, 10, 13, 16, 22, 23]
CENSORED = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
PRINTED = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}


def test_curves_match_textbook_example() -> None:
    curve = dict(kaplan_meier([(float(t), True) for t in FREIREICH] + [(float(t), False) for t in CENSORED]))
    assert {week: round(curve[week], 3) for week in PRINTED} == PRINTED and curve[35] == curve[23]


@given(lives)
def test_curves_match_their_definitions(stays: list[tuple[float, bool]]) -> None:
    survived, hazard = Fraction(1), Fraction(0)
    km, na = dict(kaplan_meier(stays)), dict(nelson_aalen(stays))
    for moment in sorted({length for length, _ in stays}):
        at_risk = sum(length >= moment for length, _ in stays)
        ends = stays.count((moment, True))
        survived *= Fraction(at_risk - ends, at_risk)
        hazard += sum((Fraction(1, at_risk - already) for already in range(ends)), Fraction(0))
        assert km[moment] == pytest.approx(float(survived), abs=1e-12)
        assert na[moment] == pytest.approx(float(hazard), abs=1e-12)


def test_curves_equal_lifelines_to_nine_digits() -> None:
    lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed: pip install 'campus-mesh[bench]'")
    from random import Random

    random = Random(1)
    for number in range(20):
        stays = [
            (round(random.weibullvariate(5, 0.6), number % 3 + 1) + 0.1, random.random() < 0.8) for _ in range(200)
        ]
        lengths, ended = [length for length, _ in stays], [end for _, end in stays]
        for curve, theirs in (
            (kaplan_meier(stays), lifelines.KaplanMeierFitter().fit(lengths, ended).survival_function_),
            (nelson_aalen(stays), lifelines.NelsonAalenFitter().fit(lengths, ended).cumulative_hazard_),
        ):
            other = theirs.iloc[:, 0]
            assert list(other.index) == [length for length, _ in curve]
            assert max(abs(ours - it) for (_, ours), it in zip(curve, other, strict=True)) < 1e-9


@given(spans, spans)
def test_lent_and_held_times_are_complements(
    mine: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    first, last = 10.0, 90.0
    trace = trace_of_held({"a": mine, "b": others}, first, last)
    for node, held in (("a", mine), ("b", others)):
        for second in range(10, 90):
            taken = any(start <= second < end for start, end in held)
            lent = any(stay.start <= second < stay.end for stay in trace.nodes[node])
            assert lent is not taken
        assert all(stay.ended is (stay.end < last) for stay in trace.nodes[node])
    again = trace_of_lent({node: [(s.start, s.end) for s in stays] for node, stays in trace.nodes.items()}, first, last)
    assert again == trace
    merged = union(mine)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


def test_node_is_busy_at_or_above_threshold() -> None:
    demands = [(0.0, 10.0, 3.0), (5.0, 20.0, 4.0), (10.0, 12.0, 3.0), (30.0, 40.0, 9.0)]
    assert busy(demands, 7.0) == [(5.0, 12.0), (30.0, 40.0)]
    assert busy([], 1.0) == []


def test_merge_keeps_time_common_to_all_traces() -> None:
    one = trace_of_lent({"a": [(0.0, 50.0)]}, 0.0, 100.0)
    other = trace_of_lent({"b": [(20.0, 80.0)]}, 10.0, 60.0)
    both = merge([one, other])
    assert (both.first, both.last) == (10.0, 60.0)
    assert both.nodes == {"a": (Stay(10.0, 50.0, True),), "b": (Stay(20.0, 60.0, False),)}
    with pytest.raises(TraceError, match="a node 'a'"):
        merge([one, one])
    with pytest.raises(TraceError, match="no time in common"):
        merge([one, trace_of_lent({"c": []}, 200.0, 300.0)])


def test_week_of_counts_each_hour() -> None:
    monday = 4 * 86_400.0
    week = week_of(
        [(monday + 3600, monday + 9000), (monday + 7 * 86_400 + 3600, monday + 7 * 86_400 + 7200)],
        monday,
        monday + 9 * 86_400,
        0,
    )
    assert len(week) == 168 and week[0] == 0 and week[1] == 100 and week[2] == 25
    short = week_of([(monday, monday + 1800.5)], monday, monday + 3600, 3600.0)
    assert short[1] == 50 and set(short[2:]) | {short[0]} == {UNSEEN}


def test_greenwood_interval_matches_formula() -> None:
    # The 21 patients on 6-MP (Freireich 1963), as every textbook has them; the bounds are R's survfit(conf.type="log-log").
    ended = (6, 6, 6, 7, 10, 13, 16, 22, 23)
    going_on = (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35)
    band = greenwood([*((float(t), True) for t in ended), *((float(t), False) for t in going_on)])
    found = {length: (low, high) for length, low, high in band}
    assert found[0] == (1.0, 1.0)
    assert found[6] == pytest.approx((0.620, 0.952), abs=0.001) and found[23] == pytest.approx(
        (0.188, 0.680), abs=0.001
    )
    assert greenwood([(1.0, True), (2.0, True)])[-1] == (2.0, 0.0, 0.0)
    assert greenwood([(1.0, False), (2.0, True)])[1] == (1.0, 1.0, 1.0), "nothing has ended yet"
