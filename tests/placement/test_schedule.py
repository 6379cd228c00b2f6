"""The checkpoint schedule: Young's interval at constant rates, monotone, bounded, stable; bandwidth shares against a solver."""

from collections.abc import Iterator
from math import inf, isfinite, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.schedule import (
    Cost,
    Cover,
    Rates,
    Recent,
    Schedule,
    Upload,
    next_due,
    shares,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)
STALLS = st.floats(0.1, 300.0)
RATES = st.floats(1e-7, 1e-2)


def steady(rate: float) -> Rates:
    return lambda start: iter([(inf, rate)])


def stepped(*steps: tuple[float, float]) -> Rates:
    """Yield (until, rate) in seconds of the clock."""
    return lambda start: iter([step for step in steps if step[0] > start])


def interval(stall_s: float, rate: float, lossy: float = 1.0) -> float:
    return next_due(0.0, 0.0, Cost(stall_s), lossy, steady(rate)).at


@given(STALLS, RATES, st.floats(0.01, 1.0))
def test_constant_rate_gives_youngs_interval(stall_s: float, rate: float, lossy: float) -> None:
    due = next_due(1000.0, 1000.0, Cost(stall_s), lossy, steady(rate))
    young = sqrt(2 * stall_s / (rate * lossy))
    least = max(60.0, stall_s)
    assert due.interval_s == pytest.approx(min(21_600.0, max(least, young)), rel=0.01)
    assert due.why == ("least" if young < least else "most" if young >= 21_600.0 else "hazard")


@given(st.lists(RATES, min_size=1, max_size=30), STALLS, st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_higher_hazard_is_never_later_and_longer_stall_never_sooner(
    hours: list[float], stall_s: float, more: float, dearer: float
) -> None:
    def rates(factor: float) -> Rates:
        return stepped(*[((number + 1) * 1800.0, rate * factor) for number, rate in enumerate(hours)])

    due = next_due(0.0, 0.0, Cost(stall_s), 1.0, rates(1.0)).at
    assert next_due(0.0, 0.0, Cost(stall_s), 1.0, rates(more)).at <= due + 1e-6
    assert next_due(0.0, 0.0, Cost(stall_s * dearer), 1.0, rates(1.0)).at >= due - 1e-6
    assert next_due(0.0, 0.0, Cost(stall_s), 1 / more, rates(1.0)).at >= due - 1e-6


def test_due_time_anticipates_hazard_and_upload_delay() -> None:
    """Without departures before noon, nothing is due until shortly before it, earlier by the time of the upload."""
    noon = 3 * 3600.0
    rates = stepped((noon, 1e-9), (inf, 1 / 600))
    at_once = next_due(0.0, 0.0, Cost(2.0), 1.0, rates)
    late = next_due(0.0, 0.0, Cost(2.0, upload_s=900.0), 1.0, rates)
    assert noon < at_once.at < noon + 60
    assert late.at == pytest.approx(at_once.at - 900.0, abs=1.0)
    assert next_due(0.0, 0.0, Cost(2.0, upload_s=4000.0), 1.0, steady(1 / 600)).why == "upload"


@given(ANY, ANY, ANY, ANY, st.lists(st.tuples(ANY, ANY), max_size=20))
def test_due_time_is_in_future_and_bounded_for_any_input(
    stall_s: float, upload_s: float, price_s: float, lossy: float, told: list[tuple[float, float]]
) -> None:
    due = next_due(500.0, 100.0, Cost(stall_s, upload_s, price_s), lossy, lambda start: iter(told))
    assert 500.0 <= due.at <= 21_700.0 and due.interval_s >= 60.0
    assert 0.0 <= due.loss_s <= due.interval_s + 21_600.0


def test_rate_without_progress_terminates() -> None:
    def stuck(start: float) -> Iterator[tuple[float, float]]:
        while True:
            yield start, 0.01

    assert isfinite(next_due(0.0, 0.0, Cost(1.0), 1.0, stuck).at)


@given(RATES, STALLS, st.floats(0.0, 1.0))
def test_announced_time_moves_only_beyond_hysteresis(rate: float, stall_s: float, drift: float) -> None:
    schedule = Schedule(stall_s)
    schedule.began(0.0)
    first = schedule.plan(0.0, 1.0, steady(rate))
    again = schedule.plan(1.0, 1.0, steady(rate * (1 + drift)))
    moved = abs(next_due(1.0, 0.0, Cost(stall_s), 1.0, steady(rate * (1 + drift))).at - first.at)
    assert (again is first) == (moved < 0.2 * first.interval_s)
    assert schedule.number == 1 + (again is not first)


def test_due_checkpoint_is_announced_again_after_missed_interval() -> None:
    schedule = Schedule(20.0)
    schedule.began(0.0)
    first = schedule.plan(0.0, 1.0, steady(1 / 3600))
    now = 0.0
    while now < first.at + first.interval_s - 15.0:
        assert schedule.plan(now, 1.0, steady(1 / 3600)) is first
        now += 15.0
    now = first.at + first.interval_s
    again = schedule.plan(now, 1.0, steady(1 / 3600))
    assert again.at == now and schedule.number == 2


@given(
    st.lists(st.tuples(st.sampled_from(["saved", "stored", "failed", "still", "plan"]), st.floats(0.0, 4000.0), ANY))
)
def test_events_in_any_order_announce_no_past_time_twice(events: list[tuple[str, float, float]]) -> None:
    schedule, now, last = Schedule(5.0), 0.0, None
    schedule.began(now)
    overdue: set[int] = set()
    for kind, pause, rate in events:
        now += pause
        if kind == "saved":
            schedule.saved(now)
        elif kind == "stored":
            schedule.stored(now, now - pause)
        elif kind == "failed":
            schedule.failed(now)
        elif kind == "still":
            schedule.pause(pause)
        else:
            number = schedule.number
            due = schedule.plan(now, 1.0, steady(rate))
            assert schedule.number - number in {0, 1}
            if schedule.number != number:
                assert due.at >= now, "a due time in the past is never announced"
                assert last is None or last not in overdue or schedule.number > last
            if due.at < now:
                overdue.add(schedule.number)
            last = schedule.number
        assert schedule.since <= now or kind == "still"


def test_failed_upload_puts_work_at_risk_and_delays_retry() -> None:
    schedule = Schedule(20.0)
    schedule.began(0.0)
    schedule.saved(1000.0)
    assert schedule.since == 1000.0
    schedule.failed(1500.0)
    due = schedule.plan(1500.0, 1.0, steady(1 / 3600))
    assert schedule.since == 0.0 and due.at == 1560.0
    schedule.failed(1500.0)
    assert schedule.plan(1500.0, 1.0, steady(1 / 3600), every_s=10.0).at == 1560.0
    schedule.stored(1700.0, 1600.0)
    assert schedule.since == 1600.0 and schedule.upload_s.value == 100.0


def test_cost_is_median_of_recent_values() -> None:
    recent = Recent(7.0)
    assert recent.value == 7.0 and not recent.known
    for value in (1.0, nan, -1.0, inf, 2.0, 100.0, 2.0, 2.0):
        recent.add(value)
    assert recent.value == 2.0
    for _ in range(20):
        recent.add(9.0)
    assert recent.value == 9.0


def test_notice_counts_by_its_record() -> None:
    cover = Cover()
    assert cover.lossy == 1.0, "without observations every departure counts as lossy"
    for _ in range(45):
        cover = cover.after(True)
    assert cover.lossy == pytest.approx(0.1)
    assert cover.lossy_for(10.0, 30.0, True) == cover.lossy
    assert cover.lossy_for(25.0, 30.0, True) == cover.lossy_for(1.0, 30.0, False) == 1.0
    for _ in range(1000):
        cover = cover.after(False)
    assert cover.lossy > 0.99 and cover.departed < 70


uploads = st.builds(
    Upload,
    bytes=st.floats(1e6, 1e11),
    stall_s=st.floats(0.1, 100.0),
    rate=st.floats(1e-6, 1e-3),
    weight=st.floats(0.1, 8.0),
)


def waste(jobs: list[Upload], bps: tuple[float, ...]) -> float:
    return sum(
        job.weight * (job.stall_s * b / job.bytes + job.rate * job.bytes / (2 * b))
        for job, b in zip(jobs, bps, strict=True)
    )


@given(st.lists(uploads, min_size=1, max_size=6), st.floats(1e4, 1e9), st.data())
def test_shares_minimise_waste(jobs: list[Upload], budget: float, data: st.DataObject) -> None:
    found = shares(jobs, budget)
    free = [job.bytes * sqrt(job.rate / (2 * job.stall_s)) for job in jobs]
    assert sum(found.bps) <= budget * 1.000001
    assert found.bps == pytest.approx(free) if sum(free) <= budget else sum(found.bps) == pytest.approx(budget)
    factors = data.draw(st.lists(st.floats(0.2, 5.0), min_size=len(jobs), max_size=len(jobs)))
    other = [b * factor for b, factor in zip(found.bps, factors, strict=True)]
    fit = min(1.0, budget / sum(other))
    assert waste(jobs, found.bps) <= waste(jobs, tuple(b * fit for b in other)) * 1.000001


def test_shares_match_solver() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    jobs = [Upload(4e9, 2.0, 1e-5, 1.0), Upload(4e10, 9.0, 1e-5, 8.0), Upload(5e8, 0.5, 4e-5, 0.5)]
    budget = 2e6
    found = shares(jobs, budget)
    solved = optimize.minimize(
        lambda x: waste(jobs, tuple(x * budget)) * 1e3,
        [1 / 3] * 3,
        bounds=[(1e-6, 1)] * 3,
        constraints={"type": "ineq", "fun": lambda x: 1 - sum(x)},
        method="SLSQP",
        options={"ftol": 1e-12},
    )
    assert [b / budget for b in found.bps] == pytest.approx(list(solved.x), rel=0.01)
    # As the price of its bytes: Young's interval with that much more stall.
    for job, b, price_s in zip(jobs, found.bps, found.price_s, strict=True):
        assert job.bytes / b == pytest.approx(sqrt(2 * (job.stall_s + price_s) / job.rate))


@given(st.lists(st.builds(Upload, ANY, ANY, ANY, ANY), max_size=5), ANY)
def test_shares_of_invalid_input_are_finite(jobs: list[Upload], budget: float) -> None:
    found = shares(jobs, budget)
    assert len(found.bps) == len(found.price_s) == len(jobs)
    assert all(isfinite(b) and b >= 0 for b in (*found.bps, *found.price_s))
