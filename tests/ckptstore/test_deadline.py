"""Upload order of a leaving node, compared with every possible order."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.deadline import STEPS, Upload, feasible, on_time, plan, scaled
from ckptstore.pacing import AIM

JOBS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25), st.integers(1, 50)), min_size=1, max_size=7)


def on_time_weight(order: tuple[int, ...], jobs: list[tuple[int, int, int]]) -> int:
    clock = weight = 0
    for i in order:
        clock += jobs[i][0]
        weight += jobs[i][2] if clock <= jobs[i][1] else 0
    return weight


def best_of_all(jobs: list[tuple[int, int, int]]) -> int:
    return max(on_time_weight(order, jobs) for order in permutations(range(len(jobs))))


@given(JOBS)
@settings(max_examples=150)
def test_no_order_saves_more(jobs: list[tuple[int, int, int]]) -> None:
    times, deadlines, weights = ([job[k] for job in jobs] for k in range(3))
    early = on_time(times, deadlines, weights)
    assert sum(weights[i] for i in early) == best_of_all(jobs)
    first = tuple(sorted(early, key=lambda i: deadlines[i]))
    assert on_time_weight(first, jobs) == sum(weights[i] for i in early), "this set is on time in order of deadlines"


@given(JOBS)
@settings(max_examples=150)
def test_plan_saves_as_much_as_any_order(jobs: list[tuple[int, int, int]]) -> None:
    """One upload has the longest window of 4096 steps, so whole steps are not rounded."""
    bps, step = 1000.0, 1.0
    jobs = [*jobs, (0, STEPS, 1)][-7:]
    uploads = [Upload(w, int(t * bps * step), d * step / AIM, bps) for t, d, w in jobs]
    found = plan(uploads, 0.0)
    assert sorted(found.order) == list(range(len(jobs)))
    assert found.late == {i for i in found.order if i in found.late}
    assert on_time_weight(found.order, jobs) >= sum(jobs[i][2] for i in found.order if i not in found.late)
    assert on_time_weight(found.order, jobs) == best_of_all(jobs)


@given(
    st.lists(
        st.builds(Upload, st.floats(0, 1e9), st.integers(0, 10**13), st.floats(-100, 1e5), st.floats(1, 1e10)),
        min_size=1,
        max_size=64,
    )
)
@settings(max_examples=100)
def test_uploads_planned_on_time_are_on_time_and_work_is_bounded(uploads: list[Upload]) -> None:
    times, deadlines = scaled(uploads, 0.0)
    assert max(deadlines) <= STEPS and max(times) <= STEPS + 1, "the table has jobs x steps cells"
    found = plan(uploads, 0.0)
    clock = 0.0
    for i in found.order:
        clock += uploads[i].bytes / (uploads[i].bps or 1)
        if i not in found.late:
            window = max(0.0, uploads[i].deadline_s)
            assert clock <= AIM * window + 1e-5 * max(1.0, *(u.deadline_s for u in uploads))


@pytest.mark.parametrize("step_s", [1.0, 0.7])
@pytest.mark.parametrize("now", [0.0, 123_456.7])
def test_uploads_that_just_fit_are_on_time(step_s: float, now: float) -> None:
    """Whatever the rounding error is."""
    last = Upload(1.0, 0, now + STEPS * step_s / AIM, 1000.0)
    for steps in range(1, STEPS, 7):
        upload = Upload(1.0, round(steps * step_s * 1000), now + steps * step_s / AIM, 1000.0)
        assert not plan([upload, last], now).late


def test_rounding_costs_little_and_plans_nothing_too_long() -> None:
    full = [Upload(1.0, 59_040, 3600 / AIM, 1000.0)] * 60
    assert not plan(full, 0.0).late, "98.4 % of the window"
    part = [Upload(1.0, 1490, 64 / AIM, 1000.0)] * 64
    assert len(plan([*part, Upload(1.0, 0, STEPS / AIM, 1000.0)], 0.0).late) == 32, "1.49 steps each"


def test_of_two_uploads_that_are_worth_the_same_the_shorter_is_sent() -> None:
    assert on_time([3, 5], [6, 6], [1.0, 1.0]) == {0} and on_time([5, 3], [6, 6], [1.0, 1.0]) == {1}


def test_window_of_almost_no_time_is_too_short_for_any_upload() -> None:
    assert plan([Upload(1.0, 10**13, 1e-310, 1.0)], 0.0).late == {0}


def test_table_size_does_not_grow_with_upload_sizes() -> None:
    uploads = [Upload(i + 1, 10**12 * (i % 7 + 1), 3600.0 * (i + 1), 1e6) for i in range(64)]
    times, deadlines = scaled(uploads, 0.0)
    assert len(times) == len(deadlines) == 64 and max(deadlines) == STEPS and max(times) <= STEPS + 1


def test_with_one_deadline_late_uploads_follow_by_weight_per_byte() -> None:
    gb = 10**9
    uploads = [
        Upload(100, 3 * gb, 50.0, 1e8),  # 30 s of the usable 40 s
        Upload(60, 2 * gb, 50.0, 1e8),
        Upload(60, 2 * gb, 50.0, 1e8),
        Upload(1, 8 * gb, 50.0, 1e8),
    ]
    found = plan(uploads, 0.0)
    assert found.order == (1, 2, 0, 3) and found.late == {0, 3}
    early = plan([Upload(3, 3 * gb, 500.0, 1e8), Upload(2, gb, 500.0, 1e8), Upload(0, gb, 500.0, 1e8)], 0.0)
    assert early.order == (1, 0, 2) and not early.late, "also one that nothing is lost without"


def test_each_upload_takes_the_time_of_its_own_link_from_now_on() -> None:
    slow, fast, unknown = (Upload(1, 10**9, 1050.0, bps) for bps in (1e7, 1e9, None))
    assert plan([slow, fast], 1000.0).late == {0} and not plan([slow, fast], 900.0).late
    assert len(plan([unknown, fast, slow], 900.0).late) == 1, "it may take as long as on the slowest link"


def test_upload_of_unknown_rate_is_not_refused() -> None:
    assert feasible(10**12, None, 1.0) and not feasible(10**9, 1e7, 30.0)
    assert feasible(int(AIM * 30e7), 1e7, 30.0) and not feasible(int(AIM * 30e7) + 1, 1e7, 30.0)
    unknown = plan([Upload(1, 10**12, 10.0, None), Upload(2, 10**12, 5.0, None)], 0.0)
    assert unknown.order == (1, 0) and not unknown.late
    beside = plan([Upload(1, 10**9, 10.0, None), Upload(2, 10**7, 10.0, 1e7)], 0.0)
    assert beside.late == {0}, "uploads share a port"


@pytest.mark.parametrize("deadline", [0.0, -5.0])
def test_after_the_deadline_all_are_late_and_ordered_by_density(deadline: float) -> None:
    found = plan([Upload(1, 1000, deadline, 1e6), Upload(5, 1000, deadline, None)], 0.0)
    assert found.order == (1, 0) and found.late == {0, 1}
    unknown = plan([Upload(2, 3000, deadline, None), *[Upload(1, 1000, deadline, None)] * 2], 0.0)
    assert unknown.order == (1, 2, 0), "by weight per byte, then as they came"
    assert plan([], 0.0).order == ()
