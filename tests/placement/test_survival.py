"""The survival estimate: probabilities that behave, learn what there is to learn, and never cost more than they are worth."""

import sys
from itertools import islice, pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.forecast.evaluation import CLIMATOLOGY, CONSTANT, OURS, WEEKLY, evaluate
from placement.belief import LEAST_THETA, MOST_THETA, Frailty
from placement.factors import AGE_EDGES_S, HALF_LIFE_S, REBASE, Factor
from placement.room import Room
from placement.survival import BASE_EVENTS, BASE_HOURS, Estimator, Survival, weight
from tests.placement.campuses import DAY_S, campus

A, B, C = b"a", b"b", b"c"
HOUR_S = 3600.0
MONDAY = 4 * DAY_S  # 5 January 1970

# (node, what, seconds since the last one)
happenings = st.lists(
    st.tuples(
        st.sampled_from([A, B, C]), st.sampled_from(["lent", "left", "planned", "forget", "room"]), st.floats(-1e5, 1e6)
    ),
    max_size=40,
)


def lived(
    estimator: Estimator, node: bytes, start: float, length_s: float, room: str = "", every_s: float = 600.0
) -> float:
    """One stay, told every so often; returns its end."""
    now, end = start, start + length_s
    while now < end:
        estimator.lent(node, now, start, room)
        now += every_s
    estimator.left(node, end)
    return end


@given(happenings, st.floats(0, 1e6), st.integers(-14, 14))
def test_whatever_happens_survival_is_a_probability_that_falls_with_the_horizon(
    what: list[tuple[bytes, str, float]], horizon_s: float, zone: int
) -> None:
    now = 1e9
    estimator = Estimator(now, zone * HOUR_S)
    for node, kind, later in what:
        now += later
        if kind == "lent":
            estimator.lent(node, now, room="r" if node == C else "")
        elif kind == "forget":
            estimator.forget(node)
        elif kind == "room":
            estimator.room("r", now).see(1, 2, now)
        else:
            estimator.left(node, now, reclaimed=kind == "left")
    for node in (A, C, b"unheard of"):
        near, far = (estimator.survival(node, now, length) for length in (horizon_s, horizon_s * 2 + 60))
        for found in (near, far):
            assert 0 <= found.low <= found.probability <= found.high <= 1
        assert far.probability <= near.probability + 1e-12
        assert estimator.survivals([node], now, horizon_s) == [near.probability]
        assert 1 <= weight(near.probability) <= 64
    assert estimator.survival(A, now, 0.0).probability == 1.0


def test_a_node_that_has_been_lent_for_long_is_trusted_more_and_its_past_tells() -> None:
    estimator = Estimator(MONDAY)
    now = MONDAY + 10 * DAY_S
    chances = []
    for age_s in (60, 6 * HOUR_S, 24 * HOUR_S):
        node = b"%d" % age_s
        estimator.lent(node, now, now - age_s)
        chances.append(estimator.survival(node, now, HOUR_S).probability)
    assert chances[0] < chances[1] < chances[2]

    estimator = Estimator(MONDAY)
    for number in range(40):
        lived(estimator, A, MONDAY + number * 6 * HOUR_S, 1200.0)
        lived(estimator, B, MONDAY + number * 6 * HOUR_S, 5.9 * HOUR_S)
    now = MONDAY + 10 * DAY_S
    for node in (A, B, C):
        estimator.lent(node, now)
    flaky, steady, new = estimator.survivals([A, B, C], now + 600, HOUR_S)
    assert flaky < new < steady


def test_hours_and_weekends_tell() -> None:
    estimator = Estimator(MONDAY)
    for day in range(28):
        start = MONDAY + day * DAY_S
        for node in (A, B, C):
            if day % 7 < 5:  # taken at ten, back at eleven
                lived(estimator, node, start, 10 * HOUR_S + 600)
                lived(estimator, node, start + 11 * HOUR_S, 12.9 * HOUR_S)
            else:
                estimator.lent(node, start)
                estimator.lent(node, start + DAY_S - 1)
    now = MONDAY + 28 * DAY_S
    for node in (A, B, C):
        estimator.lent(node, now)
    window = [estimator.window(now + hour * HOUR_S, HOUR_S) for hour in range(24)]
    risk = [estimator.hazard(A, hour) for hour in window]
    assert risk[10] > 4 * max(*risk[5:9], *risk[12:22])
    saturday = now + 5 * DAY_S
    assert estimator.hazard(A, estimator.window(saturday + 10 * HOUR_S, HOUR_S)) < risk[10] / 2


def test_a_constant_hazard_is_found() -> None:
    random = Random(4)
    estimator = Estimator(MONDAY)
    for node in range(30):
        now = MONDAY
        while now < MONDAY + 20 * DAY_S:
            now = lived(estimator, b"%d" % node, now, random.expovariate(0.2 / HOUR_S), every_s=1800) + 3600
    end = MONDAY + 21 * DAY_S
    found = []
    for node in range(30):
        estimator.lent(b"%d" % node, end, end - 3 * HOUR_S)
        found.append(estimator.survival(b"%d" % node, end, HOUR_S).probability)
    assert sum(found) / len(found) == pytest.approx(exp(-0.2), abs=0.03)
    assert max(found) - min(found) < 0.15, "they are all alike"


@given(
    st.lists(st.floats(60, 2e5), min_size=1, max_size=8),
    st.floats(0, 2e5),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
)
def test_hazards_of_two_windows_add_up(stays: list[float], age_s: float, first_s: float, second_s: float) -> None:
    estimator = Estimator(MONDAY)
    now = MONDAY
    for length_s in stays:
        now = lived(estimator, A, now, length_s, every_s=1e6) + 100
    now = max(now, MONDAY + 100.0) + age_s
    estimator.lent(A, now, now - age_s)
    known = estimator.nodes[A]
    known.room = Room(now)  # that does as ever: what a room does now is not added up, but forgotten bit by bit
    estimator.shares.rates = [1.0] * len(estimator.shares.rates)
    parts = [estimator.window(now, first_s), estimator.window(now + first_s, second_s)]
    assert sum(estimator.hazard(A, part) for part in parts) == pytest.approx(
        estimator.hazard(A, estimator.window(now, first_s + second_s)), rel=1e-6, abs=1e-9
    )


def test_a_window_is_the_same_in_one_piece_and_cut_at_ages() -> None:
    estimator = Estimator(MONDAY)
    for number in range(30):
        lived(estimator, A, MONDAY + number * 9 * HOUR_S, HOUR_S * (1 + number % 7), every_s=300)
    now = MONDAY + 20 * DAY_S
    estimator.lent(A, now)
    step = 10.0
    total = 0.0
    known = estimator.nodes[A]
    for number in range(int(4 * HOUR_S / step)):
        window = estimator.window(now + number * step, step)
        window.reversion = estimator.window(now, 4 * HOUR_S).reversion
        total += estimator.hazard(A, window)
    assert total == pytest.approx(estimator.hazard(A, estimator.window(now, 4 * HOUR_S)), rel=1e-9)
    assert known.since == now and AGE_EDGES_S[0] < 4 * HOUR_S


def test_exposure_is_counted_the_same_however_often_it_is_told() -> None:
    counted = []
    for every_s in (60.0, 600.0, 7200.0):
        estimator = Estimator(MONDAY)
        for number in range(20):
            lived(estimator, A, MONDAY + number * 12 * HOUR_S, 7 * HOUR_S, every_s=every_s)
        assert sum(estimator.ages.events) / estimator.scale == pytest.approx(20, rel=0.1)
        counted.append(estimator.hours_at_risk)
    assert counted[0] == pytest.approx(counted[1], rel=0.02) and counted[1] == pytest.approx(counted[2], rel=0.02)


def test_what_was_planned_is_no_departure_and_past_the_plan_nobody_stays() -> None:
    surprised, planned = Estimator(MONDAY), Estimator(MONDAY)
    for number in range(20):
        start = MONDAY + number * DAY_S
        lived(surprised, A, start, 8 * HOUR_S)
        planned.lent(A, start)
        planned.left(A, start + 8 * HOUR_S, reclaimed=False)
    now = MONDAY + 20 * DAY_S
    for estimator in (surprised, planned):
        estimator.lent(A, now)
    assert planned.events == 0 < surprised.events
    assert planned.survival(A, now, 4 * HOUR_S).probability > surprised.survival(A, now, 4 * HOUR_S).probability
    until = now + 2 * HOUR_S
    assert planned.survival(A, now, 2 * HOUR_S, until) == planned.survival(A, now, 2 * HOUR_S)
    assert planned.survival(A, now, 2 * HOUR_S + 1, until) == Survival(0.0, 0.0, 0.0)


def test_a_room_that_empties_is_left_sooner_and_leaves_together() -> None:
    estimator = Estimator(MONDAY)
    nodes = [b"%d" % number for number in range(10)]
    for day in range(20):
        start, room = MONDAY + day * DAY_S, estimator.room("lab", MONDAY)
        taken = start + 9 * HOUR_S + Random(day).random() * 6 * HOUR_S  # all of them, within minutes
        for step in range(200):
            now = start + step * 300
            lent = 0
            for number, node in enumerate(nodes):
                there = now < taken + 250 * number
                if there:
                    estimator.lent(node, now, room="lab")
                else:
                    estimator.left(node, now)
                lent += there
            room.see(lent, len(nodes), now)
    assert estimator.rooms["lab"].common > 0.8
    now = MONDAY + 20 * DAY_S
    for node in nodes:
        estimator.lent(node, now, room="lab")
    estimator.rooms["lab"].see(10, 10, now)
    calm = estimator.survival(nodes[9], now, HOUR_S).probability
    for number in range(5):
        estimator.left(nodes[number], now + 300 * (number + 1))
        estimator.lent(nodes[9], now + 300 * (number + 1))
        estimator.rooms["lab"].see(9 - number, 10, now + 300 * (number + 1))
    assert estimator.survival(nodes[9], now + 1800, HOUR_S).probability < calm - 0.1

    pair = estimator.together(nodes[6:8], now + 1800, HOUR_S)
    one, other = estimator.survivals(nodes[6:8], now + 1800, HOUR_S)
    assert one * other < pair <= min(one, other)
    estimator.know(nodes[7], estimator.room("elsewhere", now), now)
    assert estimator.together(nodes[6:8], now + 1800, HOUR_S) < pair, "apart they do not leave together"


def test_what_is_long_past_is_forgotten() -> None:
    """But not at once: what is told later counts more."""
    old, new = Estimator(MONDAY), Estimator(MONDAY)
    later = MONDAY + 200 * DAY_S
    for number in range(60):
        for estimator, start in ((old, MONDAY), (new, later - 60 * HOUR_S)):
            lived(estimator, A, start + number * HOUR_S, 1800.0)
    chances = []
    for estimator in (old, new):
        for number in range(10):  # ten quiet days
            estimator.lent(A, later + number * DAY_S, later)
        estimator.lent(B, later + 10 * DAY_S)
        chances.append(estimator.survivals([A, B], later + 10 * DAY_S, HOUR_S))
    assert chances[0][0] > chances[1][0] and chances[0][1] > chances[1][1] + 0.05


def test_times_between_the_seconds_are_times_too() -> None:
    """Sums of such times are not exact: edges must be passed all the same."""
    random = Random(7)
    estimator = Estimator(1.7e9, 19_800.0)
    for _ in range(300):
        since = 1.7e9 + random.random() * 1e6
        estimator.lent(A, since)
        estimator.lent(A, since + AGE_EDGES_S[random.randrange(8)])
        estimator.lent(A, since + 40_000 * random.random() + 40_000)
        assert 0 < estimator.survival(A, since + 80_000, random.random() * 1e5).probability <= 1
        estimator.left(A, since + 80_000)


def test_years_pass_without_a_number_growing_beyond_bounds() -> None:
    estimator = Estimator(0.0)  # a machine that does not know the date yet
    lived(estimator, A, 10.0, 3000.0)
    now = 1.7e9
    for number in range(10):
        now = lived(estimator, A, now, 5000.0) + number * 365 * DAY_S
    estimator.lent(A, now)
    assert 0 < estimator.survival(A, now, HOUR_S).probability < 1
    assert max(*estimator.ages.events, estimator.events) < 100 * REBASE
    estimator.lent(A, 1000.0)  # and it forgot it again
    assert 0 < estimator.survival(A, 1000.0, HOUR_S).probability < 1


def test_a_factor_is_shrunk_and_its_neighbours_in_the_circle_help() -> None:
    factor = Factor(48, 4.0, circle=24)
    factor.add(0, 10.0, 2.0, 1.0)
    assert factor.rates[0] == (10 / 2 + 4) / (2 / 2 + 4)
    assert factor.rates[1] == factor.rates[23] == (10 / 4 + 4) / (2 / 4 + 4)
    assert factor.rates[24] == factor.rates[2] == 1.0, "the weekend has a circle of its own"
    alone = Factor(3, 5.0, (2.0, 1.0, 1.0))
    alone.add(0, 4.0, 1.0, 2.0)  # told when counts weigh twice
    assert alone.rates == [2 * (4 + 5) / (1 + 5), 1.0, 1.0] and alone.relative(0) == 9 / 6
    alone.renew(4.0)  # a half-life later
    assert alone.relative(0) == (2 + 5) / (0.5 + 5)


def test_a_node_takes_less_than_4_kb() -> None:
    estimator = Estimator(MONDAY)
    for number in range(50):
        lived(estimator, A, MONDAY + number * 5 * HOUR_S, 4 * HOUR_S)
    known = estimator.nodes[A]
    assert _bytes(known, {id(known.room)}) < 4096


def _bytes(thing: object, seen: set[int]) -> int:
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    inner = list(thing) if isinstance(thing, list | tuple) else [getattr(thing, name) for name in _slots(thing)]
    return sys.getsizeof(thing) + sum(_bytes(part, seen) for part in inner)


def _slots(thing: object) -> list[str]:
    return [name for name in getattr(thing, "__slots__", ()) if hasattr(thing, name)]


def test_before_anything_is_known_it_says_what_the_prior_says() -> None:
    estimator = Estimator(MONDAY)
    estimator.belief.kappa = 1.0
    window = estimator.window(MONDAY, 4 * HOUR_S)
    assert estimator.rate == BASE_EVENTS / BASE_HOURS
    ages = [0.0, *AGE_EDGES_S]
    expected = sum(
        estimator.rate * estimator.ages.rates[level] * (min(high, 4 * HOUR_S) - low) / HOUR_S
        for level, (low, high) in enumerate(pairwise(ages))
        if low < 4 * HOUR_S
    )
    assert estimator.hazard(b"?", window) == pytest.approx(expected)


@given(happenings, st.floats(-1e4, 1e6), st.integers(-14, 14))
def test_rates_are_the_hazard_of_each_piece_and_leave_no_gap(
    what: list[tuple[bytes, str, float]], ahead_s: float, zone: int
) -> None:
    now = MONDAY
    estimator = Estimator(now, zone * HOUR_S)
    for node, kind, later in what:
        now += abs(later)
        if kind == "lent":
            estimator.lent(node, now)
        else:
            estimator.left(node, now)
    estimator.lent(A, now)
    begun = now + ahead_s
    for until, rate in islice(estimator.rates(A, begun), 40):
        window = estimator.window(begun, until - begun)
        assert begun < until <= begun + HOUR_S
        assert rate * (until - begun) == pytest.approx(estimator.hazard(A, window), rel=1e-6)
        begun = until


def test_with_little_data_it_is_never_worse_than_climatology() -> None:
    """Under three days of data: at most 2 per cent more log-loss over made-up campuses of all kinds, and over those of each kind
    but two: where all leave at once, one day says too little of the next (docs/survival.md)."""
    kinds = ("steady", "ageing", "lectures", "unlike", "bursts")
    for days in (0.5, 1.0, 2.9):
        lost = {(model, kind): 0.0 for model in (OURS, CLIMATOLOGY) for kind in kinds}
        for kind in kinds:
            for seed in range(3):
                outcome = evaluate(campus(kind, seed, days + 1, nodes=8), (60, 240), days * DAY_S, boosted=False)
                for row in outcome.rows():
                    if row.model in {OURS, CLIMATOLOGY}:
                        lost[row.model, kind] += row.n * row.log_loss
        assert sum(lost[OURS, kind] for kind in kinds) <= 1.02 * sum(lost[CLIMATOLOGY, kind] for kind in kinds)
        for kind in ("steady", "ageing", "unlike"):
            more = lost[OURS, kind] / lost[CLIMATOLOGY, kind]
            assert more <= 1.02, f"{kind}, {days} days: {more - 1:+.1%}"


@pytest.mark.parametrize(("kind", "most"), [("steady", 1.02), ("busy", 1.03), ("lectures", 1.02), ("timetable", 1.3)])
def test_no_simple_model_is_much_better_where_it_is_right(kind: str, most: float) -> None:
    """Where the truth is a constant hazard, or one by the hour of the week. A timetable takes longer to learn beside the other
    factors than alone (docs/survival.md)."""
    outcome = evaluate(campus(kind, 1, 28, nodes=6), (60, 240), 0.7, boosted=False)
    rows = {(row.model, row.horizon_min): row for row in outcome.rows()}
    for horizon in (60, 240):
        ours, simple = rows[OURS, horizon], [rows[model, horizon] for model in (CLIMATOLOGY, CONSTANT, WEEKLY)]
        assert ours.log_loss <= most * min(row.log_loss for row in simple)
        assert ours.log_loss <= 1.02 * min(row.log_loss for row in simple[:2])


def test_a_rooms_timetable_is_learnt() -> None:
    estimator = Estimator(MONDAY)
    nodes = [b"%d" % number for number in range(8)]
    for day in range(35):
        start = MONDAY + day * DAY_S
        for node in nodes:
            if day % 7 == 1:  # on Tuesdays at ten
                lived(estimator, node, start, 10 * HOUR_S + 600, room="lab")
                lived(estimator, node, start + 11 * HOUR_S, 12.9 * HOUR_S, room="lab")
            else:
                estimator.lent(node, start, room="lab")
                estimator.lent(node, start + DAY_S - 1, room="lab")
    now = MONDAY + 35 * DAY_S
    for node in nodes:
        estimator.lent(node, now, room="lab")
    tuesday, wednesday, thursday = (
        estimator.hazard(nodes[0], estimator.window(now + day * DAY_S + 10 * HOUR_S, HOUR_S)) for day in (1, 2, 3)
    )
    assert tuesday > 3 * max(wednesday, thursday)
    estimator.know(nodes[0], estimator.room("elsewhere", now), now)
    moved = estimator.hazard(nodes[0], estimator.window(now + DAY_S + 10 * HOUR_S, HOUR_S))
    assert moved < tuesday / 2, "that timetable is its room's"


@pytest.mark.parametrize("theta", [0.0, 0.8])
def test_how_much_nodes_differ_is_learnt(theta: float) -> None:
    random, frailty = Random(6), Frailty()
    for _ in range(6000):
        hazard = random.choice([0.3, 1.0, 3.0])
        frail = random.gammavariate(1 / theta, theta) if theta else 1.0
        frailty.learn(hazard, random.random() < exp(-frail * hazard))
    assert frailty.theta == pytest.approx(theta, abs=0.12)
    assert frailty.stays(2.0) == pytest.approx((1 + 2 * theta) ** (-1 / theta) if theta else exp(-2.0), abs=0.02)


@given(st.lists(st.tuples(st.floats(0, 1e300), st.booleans()), max_size=30), st.floats(0, 1e12))
def test_no_outcome_takes_the_frailty_out_of_its_bounds(outcomes: list[tuple[float, bool]], hazard: float) -> None:
    frailty = Frailty()
    for foretold, stayed in outcomes:
        frailty.learn(foretold, stayed)
        assert LEAST_THETA <= frailty.theta <= MOST_THETA
    assert 0 <= frailty.stays(hazard) <= 1 == frailty.stays(0.0)


def test_half_lives_are_what_they_say() -> None:
    estimator = Estimator(MONDAY)
    lived(estimator, A, MONDAY, HOUR_S)
    before = estimator.ages.events[4] / estimator.scale
    estimator.lent(B, MONDAY + HOUR_S + HALF_LIFE_S)
    assert estimator.ages.events[4] / estimator.scale == pytest.approx(before / 2, rel=1e-6) and before > 0
