"""Pacing of streams on a simulated network: bounds and steady states."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.pacing import AIM, FLOOR_BPS, TARGET_S, TICK_S, Background, Deadline, Load, Rtt, aim, time_for

CALM, BUSY = Rtt(0.001, 0.001), Rtt(0.001 + 2 * TARGET_S, 0.001)


class Queue:
    """A bottleneck with a queue that lengthens the round trip."""

    def __init__(self, capacity_bps: float) -> None:
        self.capacity_bps, self.waiting, self.sent, self.now = capacity_bps, 0.0, 0, 0.0

    def run(self, pace: Background, others_bps: float, seconds: float, budget_bps: float | None = None) -> float:
        """Return the mean rate of the stream."""
        before = self.sent
        for _ in range(int(seconds / TICK_S)):
            rtt = Rtt(0.001 + self.waiting / self.capacity_bps, 0.001)
            rate = pace.tick(self.now, self.sent, rtt, budget_bps)
            # An unlimited TCP stream fills the free capacity and a quarter of a second of queue.
            most = self.capacity_bps * 1.25 if rate is None else rate
            free = self.capacity_bps - others_bps
            self.waiting = min(max(0.0, self.waiting + (most - free) * TICK_S), self.capacity_bps * 0.25)
            self.sent += int(min(most, free) * TICK_S) if free > 0 else 0
            self.now += TICK_S
        return (self.sent - before) / seconds


def test_background_stream_uses_only_idle_bandwidth() -> None:
    link, pace = Queue(100e6), Background()
    assert link.run(pace, 0.0, 60) > 60e6
    link.run(pace, 60e6, 20)
    assert link.waiting < 0.25 * 100e6, "the queue does not stay full"
    assert link.run(pace, 60e6, 60) > 20e6
    assert link.run(pace, 0.0, 60) > 60e6, "its rate recovers"


def test_background_stream_keeps_its_budget() -> None:
    link, pace = Queue(100e6), Background()
    assert link.run(pace, 0.0, 20, 10e6) == pytest.approx(10e6, rel=0.01) and link.waiting == 0


def test_background_stream_keeps_the_floor_on_a_busy_network() -> None:
    pace, sent = Background(), 0
    assert pace.tick(0.0, 0, CALM, None) is None
    for tick in range(1, 60):
        sent += 10**7
        rate = pace.tick(tick * TICK_S, sent, BUSY, None)
    assert rate == FLOOR_BPS
    rates = [pace.tick((60 + tick) * TICK_S, sent + tick * 10**5, CALM, None) or 1e12 for tick in range(400)]
    assert rates == sorted(rates) and rates[-1] == 1e12, "the limit finally disappears"


def test_background_stream_slows_down_once_per_round_trip() -> None:
    """An earlier reduction shows its effect only then."""
    pace, slow = Background(), Rtt(1.0, 0.001)
    rates = [pace.tick(tick * TICK_S, tick * 10**8, slow, None) for tick in range(10)]
    assert rates[0] is None and rates[1] == rates[2] == rates[3] == rates[4]
    assert rates[4] is not None and rates[5] is not None and rates[5] < rates[4]


SAMPLES = st.lists(
    st.tuples(st.floats(0.001, 2), st.integers(0, 10**8), st.none() | st.builds(Rtt, st.floats(0, 1), st.floats(0, 1))),
    max_size=50,
)


@given(SAMPLES, st.none() | st.floats(1e3, 1e10))
@settings(max_examples=200)
def test_background_rate_stays_between_floor_and_budget(
    samples: list[tuple[float, int, Rtt | None]], budget: float | None
) -> None:
    pace, now, sent, before = Background(), 0.0, 0, None
    for passed, more, rtt in samples:
        now, sent = now + passed, sent + more
        rate = pace.tick(now, sent, rtt, budget)
        if budget is None:
            assert rate is None or rate >= FLOOR_BPS
        else:
            assert rate is not None and min(FLOOR_BPS, budget) <= rate <= budget
        if rtt is not None and rtt.smoothed_s - TARGET_S > 1 and before is not None:
            assert rate is not None and rate <= before
        before = rate


def test_deadline_stream_finishes_in_its_part_of_the_window() -> None:
    now, sent = 0.0, 0
    done_by = aim(0.0, 10.0)
    pace = Deadline(100 * 10**6, lambda: done_by - now)
    rates = []
    while pace.remaining and now < 20:
        rate = pace.tick(now, sent, BUSY, None) or 1e12
        rates.append(rate)
        sent += int(rate * TICK_S)
        now += TICK_S
    assert now <= 10.0 * AIM + 2 * TICK_S and rates[0] == pytest.approx(100e6 / 8)
    assert max(rates[:-2]) == pytest.approx(min(rates[:-2]), rel=0.01), "an even rate"


@given(st.floats(0.1, 100), st.integers(1, 10**10), st.none() | st.floats(1e3, 1e9), st.floats(0.3, 1.0))
@settings(max_examples=200)
def test_deadline_stream_speeds_up_when_behind_and_is_unlimited_when_late(
    window: float, total: int, budget: float | None, luck: float
) -> None:
    now, sent = 0.0, 0
    pace = Deadline(total, lambda: window - now)
    first = pace.tick(now, sent, None, budget)
    assert first is not None and first >= total / window * 0.999 and first >= (budget or 0)
    now, sent = window / 2, int(total / 2 * luck)
    second = pace.tick(now, sent, None, budget)
    assert second is not None and second >= (budget or 0)
    if luck < 0.9 and first == total / window:
        assert second >= first
    now = window
    assert pace.tick(now, sent, None, budget) is None


@given(
    st.integers(1, 10**9),
    st.floats(0.1, 100),
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 100)), max_size=5),
)
@settings(max_examples=200)
def test_queued_streams_are_on_time_too(own: int, window: float, others: list[tuple[int, float]]) -> None:
    behind = [Load(size, window + more) for size, more in sorted(others, key=lambda other: other[1])]
    seconds = time_for(Load(own, window), behind)
    assert 0 < seconds <= window
    rate, clock, total = own / seconds, seconds, own
    for load in behind:
        total += load.bytes
        assert total / rate <= load.aim_s * 1.000001
    assert clock <= window
    if not behind:
        assert seconds == window
