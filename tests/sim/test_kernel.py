from hypothesis import given
from hypothesis import strategies as st

from sim.kernel import EventLog, Kernel, Streams


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_events_run_by_time_then_priority_then_sequence(wanted: list[tuple[int, int]]) -> None:
    kernel, seen = Kernel(), []
    for number, (time_s, priority) in enumerate(wanted):
        kernel.at(float(time_s), seen.append, (time_s, priority, number), priority=priority)
    kernel.run(10.0)
    assert seen == sorted(seen) and len(seen) == len(wanted)
    assert kernel.now == 10.0


def test_cancelled_events_do_not_run_and_past_times_mean_now() -> None:
    kernel, seen = Kernel(), []
    handle = kernel.at(1.0, seen.append, "cancelled")
    kernel.at(2.0, lambda: kernel.at(0.5, seen.append, "late"))
    handle.cancel()
    kernel.run(3.0)
    assert seen == ["late"] and kernel.executed == 2


def test_run_stops_at_its_bound() -> None:
    kernel, seen = Kernel(), []
    kernel.at(5.0, seen.append, 5)
    kernel.run(4.999)
    assert seen == [] and kernel.now == 4.999
    kernel.run(5.0)
    assert seen == [5]


def test_streams_are_independent() -> None:
    first, second = Streams(1), Streams(1)
    [second.get("other", "purpose").random() for _ in range(100)]
    assert first.get("node", "x").random() == second.get("node", "x").random()
    assert Streams(1).get("node", "x").random() != Streams(2).get("node", "x").random()


def test_different_logs_have_different_digests() -> None:
    logs = [EventLog() for _ in range(3)]
    logs[0].add(1.0, "a", "bc")
    logs[1].add(1.0, "ab", "c")
    logs[2].add(1.0, "a", "bc")
    assert logs[0].digest == logs[2].digest != logs[1].digest
