"""Where the jobs of a leaving node go: against every assignment and every order, under hostile values, in words."""

import math
from collections import Counter
from itertools import permutations, product
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import placement.destination as destination_module
from placement.advert import HORIZONS_S, WHOLE, Advert, Gpu, Portion
from placement.destination import (
    FETCHES,
    LEAST_HORIZON_S,
    LOGISTIC,
    RESTART,
    SCORES,
    SUDDEN,
    Assignment,
    Leaver,
    Way,
    in_time,
    plan,
    survival,
    told,
    worth,
)
from placement.request import Request
from tests.jobs.worlds import make_advert

NODES = [bytes([65 + number]) * 32 for number in range(4)]
GPU_MIB = 24_000
LEAST, ON_AVERAGE = 0.5, 0.98  # of the best there is: whatever is drawn to spite it, and of a fair sample


def node(number: int, free: int, of: int = 4) -> Advert:
    gpus = tuple(Gpu(f"g{n}", "gpu", GPU_MIB) for n in range(of))
    room = tuple(Portion(gpu.uuid, WHOLE, GPU_MIB) for gpu in gpus[:free])
    return msgspec.structs.replace(make_advert(NODES[number]), gpus=gpus, room=room)


def way(
    number: int, count: float = 1e9, bps: float = 1e8, *, stays: float = 0.9, spread: float = 0.5, place: bool = True
) -> Way:
    return Way(NODES[number], count, bps, spread, stays, place)


def leaver(number: int, *ways: Way, gpus: int = 1, value: float = 1800.0, **more: float) -> Leaver:
    return Leaver(Request(bytes([number]) * 16, 0, "ada", gpus=gpus), value, ways, **more)


def places(found: Assignment) -> list[bytes | None]:
    return [destination.place for destination in found.destinations]


def expected(
    choices: tuple[tuple[Way | None, Way | None], ...], order: tuple[int, ...], jobs: list[Leaver], window_s: float
) -> float:
    """Written anew from the formulas: job i runs at choices[i][0], its state goes to choices[i][1]."""
    total = clock = busy = weighed = 0.0
    for i in order:
        job, (place, to) = jobs[i], choices[i]
        runs, horizon_s = 0.0, max(LEAST_HORIZON_S, job.horizon_s)
        if place is not None:
            runs = horizon_s * job.request.gpus * place.stays
        if to is None:
            continue
        seconds, steep = to.bytes / to.bps, LOGISTIC / to.spread
        begun = max(clock, job.ready_s)
        idle, busy, clock = begun - busy, busy + seconds, begun + seconds
        weighed += steep * seconds
        left = window_s - idle
        chance = min(within(busy, left, weighed / busy), within(seconds, window_s - job.ready_s, steep))
        saved = job.value * (1 - (1 - to.stays) * SUDDEN)
        part = 0.0
        if place is not None:
            begun = max(RESTART, horizon_s / (horizon_s + place.bytes / place.bps))
            part = begun if place is to else max(RESTART, FETCHES * begun)
        total += chance * (saved + runs * part) + (1 - chance) * runs * RESTART
    return total


def within(seconds: float, window_s: float, steep: float) -> float:
    return 0.0 if window_s <= 0 else 1 / (1 + (seconds / window_s) ** steep)


def fits(choices: tuple[tuple[Way | None, Way | None], ...], jobs: list[Leaver], free: dict[bytes, int]) -> bool:
    used: Counter[bytes] = Counter()
    for job, (place, _) in zip(jobs, choices, strict=True):
        if place is not None:
            used[place.node] += job.request.gpus
    return all(count <= free[name] for name, count in used.items())


def best_of_all(jobs: list[Leaver], free: dict[bytes, int], window_s: float) -> float:
    """Every place, every keeper, every order."""
    each = []
    for job in jobs:
        able = [one for one in job.ways if one.place]
        each.append(
            [(None, None), *((None, to) for to in job.ways), *((place, to) for place in able for to in job.ways)]
        )
    return max(
        expected(choices, order, jobs, window_s)
        for choices in product(*each)
        if fits(choices, jobs, free)
        for order in permutations(range(len(jobs)))
    )


WAYS = st.tuples(
    st.floats(1e7, 4e10), st.sampled_from([3e7, 1.25e8, 1.25e9]), st.floats(0.2, 1.0), st.sampled_from([0.3, 0.6, 1.2])
)
JOBS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 4]),
    st.floats(0, 7200),
    st.floats(0, 20),
    st.sampled_from([300.0, 1800.0]),
    st.lists(WAYS, min_size=2, max_size=2),
)


@given(
    st.lists(JOBS, min_size=1, max_size=3),
    st.lists(st.sampled_from([0, 1, 2, 4]), min_size=2, max_size=2),
    st.sampled_from([10.0, 30.0, 60.0, 300.0]),
)
@settings(max_examples=40)
def test_it_comes_near_the_best_of_all_assignments_and_orders(drawn: list, rooms: list[int], window_s: float) -> None:
    adverts = {NODES[number]: node(number, free) for number, free in enumerate(rooms)}
    free = {NODES[number]: count for number, count in enumerate(rooms)}
    jobs = [
        leaver(
            number,
            *(
                way(n, count, bps, stays=stays, spread=spread, place=gpus <= rooms[n])
                for n, (count, bps, stays, spread) in enumerate(ways)
            ),
            gpus=gpus,
            value=value,
            ready_s=ready_s,
            horizon_s=horizon_s,
        )
        for number, (gpus, value, ready_s, horizon_s, ways) in enumerate(drawn)
    ]
    found = plan(jobs, adverts, window_s)
    used: Counter[bytes] = Counter()
    for job, destination in zip(jobs, found.destinations, strict=True):
        if destination.place is not None:
            used[destination.place] += job.request.gpus
    assert all(count <= free[name] for name, count in used.items()), "nobody gets more than he has room for"
    assert sorted(found.order) == list(range(len(jobs)))
    best = best_of_all(jobs, free, window_s)
    assert found.expected <= best * (1 + 1e-6) + 1e-6, "the brute force knows the same formulas"
    assert found.expected >= LEAST * best
    assert plan(jobs, adverts, window_s) == found


def test_of_a_fair_sample_it_finds_nearly_all_there_is() -> None:
    random, ratios = Random(8), []
    for _ in range(60):
        rooms = [random.choice([0, 1, 2, 4]) for _ in range(2)]
        jobs = []
        for number in range(random.choice([2, 3])):
            gpus = random.choice([1, 1, 1, 2, 4])
            ways = (
                way(
                    n,
                    10 ** random.uniform(7, 10.6),
                    random.choice([3e7, 1.25e8, 1.25e9]),
                    stays=random.uniform(0.2, 1),
                    spread=random.choice([0.3, 0.6, 1.2]),
                    place=gpus <= rooms[n],
                )
                for n in range(2)
            )
            value, ready_s = random.uniform(0, 7200), random.uniform(0, 20)
            jobs.append(leaver(number, *ways, gpus=gpus, value=value, ready_s=ready_s))
        adverts = {NODES[number]: node(number, free) for number, free in enumerate(rooms)}
        window_s = random.choice([10.0, 30.0, 60.0, 300.0])
        best = best_of_all(jobs, {NODES[number]: free for number, free in enumerate(rooms)}, window_s)
        ratios.append(plan(jobs, adverts, window_s).expected / best)
    assert sum(ratios) / len(ratios) >= ON_AVERAGE and sum(ratio >= 0.95 for ratio in ratios) >= 54


def test_however_many_leave_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = 0
    before = destination_module._schedule

    def counted(*args: Any) -> Any:
        nonlocal scored
        scored += 1
        return before(*args)

    monkeypatch.setattr(destination_module, "_schedule", counted)
    nodes = [number.to_bytes(2, "big") * 16 for number in range(200)]
    adverts = {name: msgspec.structs.replace(node(0, number % 3), node=name) for number, name in enumerate(nodes)}
    ways = tuple(Way(name, 1e9 + number, 1e8, 0.5, 0.5 + number / 500, True) for number, name in enumerate(nodes))
    jobs = [leaver(number, *ways, value=100.0 * number) for number in range(32)]
    found = plan(jobs, adverts, 60.0)
    assert None not in places(found) and scored <= SCORES + 2


def test_one_free_gpu_is_not_named_twice_and_the_wide_job_gets_the_wide_node() -> None:
    adverts = {NODES[0]: node(0, 4), NODES[1]: node(1, 1), NODES[2]: node(2, 1)}
    ways = (way(0, stays=0.99), way(1, stays=0.7), way(2, stays=0.6))
    wide = leaver(9, way(0, stays=0.99), gpus=4)
    found = plan([leaver(1, *ways), leaver(2, *ways), wide], adverts, 300.0)
    assert places(found)[2] == NODES[0] and set(places(found)[:2]) == {NODES[1], NODES[2]}
    three = plan([leaver(number, way(1), way(2)) for number in range(3)], adverts, 300.0)
    assert Counter(places(three)) == {NODES[1]: 1, NODES[2]: 1, None: 1}
    waiting = next(one for one in three.destinations if one.place is None)
    assert waiting.to is not None and waiting.chance > 0.5, "its state is kept all the same"


def test_a_share_goes_beside_a_share_as_far_as_there_is_room() -> None:
    half = Request(b"h" * 16, 0, "ada", gpus=1, gpu_share=50, vram_mib=8_000)
    one = msgspec.structs.replace(node(0, 1, of=1), guards=True, gpu_sharing=True)
    jobs = [Leaver(msgspec.structs.replace(half, job=bytes([n]) * 16), 60.0, (way(0),)) for n in range(3)]
    assert Counter(places(plan(jobs, {NODES[0]: one}, 300.0))) == {NODES[0]: 2, None: 1}


def test_what_cannot_reach_the_better_node_in_time_goes_to_the_one_that_it_can_reach() -> None:
    adverts = {NODES[n]: node(n, 1) for n in (0, 1)}
    steady_but_slow, near = way(0, 8e9, 3e7, stays=0.99), way(1, 8e9, 1.2e9, stays=0.9)
    assert places(plan([leaver(1, steady_but_slow, near)], adverts, 30.0)) == [NODES[1]]
    fleeting = way(1, 8e9, 1.2e9, stays=0.4)
    assert places(plan([leaver(1, steady_but_slow, fleeting, value=10.0)], adverts, 3000.0)) == [NODES[0]]
    kept = way(2, 4e8, 1.2e9, place=False)
    (around,) = plan([leaver(1, steady_but_slow, kept)], adverts, 30.0).destinations
    assert (around.place, around.to) == (NODES[0], NODES[2]) and around.chance > 0.9, (
        "by way of who holds the checkpoint before"
    )


def test_the_wire_is_shared_and_what_is_worth_most_for_each_second_goes_first() -> None:
    adverts = {NODES[n]: node(n, 1) for n in range(3)}
    jobs = [leaver(n, way(n, 2e9, 1e8), value=value) for n, value in enumerate((100.0, 9000.0, 3000.0))]
    found = plan(jobs, adverts, 45.0)
    assert found.order[:2] == (1, 2)
    at = [destination.at_s for destination in found.destinations]
    assert at[1] == pytest.approx(20.0) and at[2] == pytest.approx(40.0)
    chances = [destination.chance for destination in found.destinations]
    assert chances[1] > chances[2] > 0.5 > chances[0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([0.0, -1.0, 1.0, 1e9, 1e300, inf, nan]),
            st.sampled_from([0.0, -1.0, 1e-300, 1e8, inf, nan]),
            st.sampled_from([0.0, -1.0, 0.5, 1e9, inf, nan]),
            st.sampled_from([0.0, -1.0, 0.5, 2.0, nan, inf]),
            st.booleans(),
        ),
        max_size=5,
    ),
    st.sampled_from([0.0, -1.0, 1800.0, 1e308, inf, nan]),
    st.sampled_from([0.0, -5.0, 3.0, inf, nan]),
    st.sampled_from([0.0, -1.0, 30.0, inf, nan, 1e-320]),
)
@settings(max_examples=150)
def test_hostile_values_give_a_plan_of_finite_numbers(
    drawn: list, value: float, ready_s: float, window_s: float
) -> None:
    ways = tuple(Way(NODES[n], count, bps, spread, stays, place) for n, count, bps, spread, stays, place in drawn)
    jobs = [leaver(n, *ways, value=value, ready_s=ready_s, horizon_s=value) for n in range(2)]
    found = plan(jobs, {name: node(n, 1) for n, name in enumerate(NODES)}, window_s)
    assert math.isfinite(found.expected) and found.expected >= 0
    named = [place for place in places(found) if place is not None]
    assert len(named) == len(set(named)) and sorted(found.order) == [0, 1]
    for destination in found.destinations:
        assert 0 <= destination.chance <= 1 and 0 <= destination.stays <= 1
        assert told(destination, lambda name: name.hex()[:4], window_s)


def test_with_no_time_or_no_bandwidth_a_job_still_learns_where_it_goes_on() -> None:
    adverts = {NODES[0]: node(0, 1)}
    for window_s, bps in ((0.0, 1e8), (30.0, 0.0)):
        (found,) = plan([leaver(1, way(0, bps=bps))], adverts, window_s).destinations
        assert found.place == NODES[0] and found.chance == 0
        assert "likely too late" in told(found, lambda name: "lab1", window_s) or bps > 0
    (nobody,) = plan([leaver(1)], {}, 30.0).destinations
    assert (
        nobody.place is None
        and told(nobody, lambda name: "x", 30.0) == "waits: nobody has room for it; nobody can take its last state"
    )
    assert plan([], {}, 30.0).destinations == ()


def test_in_words() -> None:
    adverts = {NODES[0]: node(0, 1)}

    def words(*ways: Way, window_s: float = 30.0) -> str:
        (found,) = plan([leaver(1, *ways)], adverts, window_s).destinations
        return told(found, {NODES[0]: "lab1", NODES[1]: "lab2"}.__getitem__, window_s)

    assert words(way(0, 4e8)) == "goes on at lab1; 400.0 MB that it lacks, there in about 4 s, 100% in time"
    assert words(way(0, 0.0)) == "goes on at lab1, which lacks nothing of it"
    assert words(way(0, 6e10)) == "goes on at lab1; 60.0 GB that it lacks would take about 600 s of 30: likely too late"
    assert words(way(0, 6e10), way(1, 4e8, place=False)).startswith(
        "goes on at lab1; 400.0 MB go to lab2, who keeps them for it"
    )
    assert words(way(1, 4e8, place=False)).startswith("waits: nobody has room for it; 400.0 MB go to lab2")


def test_chances_are_those_of_the_formulas() -> None:
    def foretold(weight: int, *stays: int) -> Advert:
        return make_advert(NODES[0], weight=weight, stays=stays)

    assert survival(foretold(64), 3600) == pytest.approx(127 / 128)
    assert survival(foretold(32), 7200) == pytest.approx(0.25) and survival(foretold(48), 0.0) == 1
    stays = [60, 48, *[16] * (len(HORIZONS_S) - 2)]
    assert survival(foretold(32, *stays), HORIZONS_S[1]) == pytest.approx(0.75)
    assert survival(foretold(32, *stays), 2 * HORIZONS_S[-1]) == pytest.approx((16 / 64) ** 2)
    assert worth(3600, 200) == 7200 and worth(3600, 100, 0) == 1800 and worth(-5, 100) == 0
    assert in_time(10, 10, 4.0) == 0.5 and in_time(5, 10, 4.0) == pytest.approx(1 / (1 + 0.5**4))
    assert (
        in_time(0, 1, 4.0) == 1 and in_time(1, 0, 4.0) == 0 and in_time(inf, 9, 4.0) == 0 and in_time(1e300, 1, 99) == 0
    )
