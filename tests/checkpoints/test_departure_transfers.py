"""Order of the transfers when several checkpoints must leave a node, and the reports to their users."""

import asyncio
from contextlib import ExitStack

import pytest

from mesh.checkpoints import departure_transfers
from mesh.checkpoints.departure_transfers import BREATH_S, SILENT_S, Departures, Stream
from mesh.checkpoints.loss_estimate import LossEstimate, Urgency

MB, GB = 10**6, 10**9


class Leaving:
    """A departure queue with a clock set by the test, and the warnings sent to users."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 100.0
        self.told: list[str] = []
        self._stack = stack
        self.queue = Departures(lambda: self.now)

    def add(self, count: int, bps: float | None, weight: float = 1.0, window_s: float = 30.0) -> Stream:
        urgency = Urgency(self.now + window_s, weight, self.told.append)
        departure = self._stack.enter_context(self.queue.departure(urgency))
        return self._stack.enter_context(departure.stream(count, bps))


@pytest.fixture
def leaving() -> object:
    with ExitStack() as stack:
        yield Leaving(stack)


async def send(stream: Stream, seen: list[str], name: str) -> None:
    for _ in range(5):
        await stream.turn()
        seen.append(name)
        await asyncio.sleep(0)
    stream.rests()


async def test_user_is_warned_once_and_a_departure_leaves_nothing() -> None:
    with ExitStack() as stack:
        leaving = Leaving(stack)
        leaving.add(10 * GB, 100e6, window_s=1)
        leaving.queue.replan()
        assert len(leaving.told) == 1
    assert not leaving.queue._open and leaving.queue.need_bps() == 0.0


async def test_transfer_with_the_larger_loss_goes_first(leaving: Leaving) -> None:
    small = leaving.add(2 * GB, 100e6, weight=10)
    seen: list[str] = []
    first = send(small, seen, "small").__await__()
    for _ in range(3):
        first.send(None)
    assert seen == ["small"] * 3, "a single transfer is not delayed"
    large = leaving.add(2 * GB, 100e6, weight=1000)
    assert small.waits and not large.waits and small.departure.late and not large.departure.late
    assert leaving.told == ["1.9 GiB must wait for checkpoints with which more would be lost, and 30 s are left"]
    first.close()
    await send(large, seen, "large")
    assert seen[3:] == ["large"] * 5
    assert not small.waits, "only the peer has work left"
    await send(small, seen, "small")
    assert seen[8:] == ["small"] * 5


async def test_waiting_transfer_continues_at_intervals_or_beside_a_silent_one(leaving: Leaving) -> None:
    first, second = leaving.add(100 * MB, 100e6, window_s=10), leaving.add(100 * MB, 100e6, window_s=20)
    assert not first.waits and second.waits
    leaving.now += SILENT_S
    assert not second.waits, "the first transfer sends nothing"
    first.moved_s = second.moved_s = leaving.now
    assert second.waits
    leaving.now += BREATH_S
    first.moved_s = leaving.now
    assert not second.waits, "a waiting transfer may send now and then"
    second.moved_s = leaving.now
    assert second.waits


async def test_next_transfer_starts_when_the_previous_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure_transfers, "LOOK_S", 60.0)
    queue = Departures(lambda: 0.0)
    seen: list[str] = []

    async def leave(name: str, deadline: float) -> None:
        with queue.departure(Urgency(deadline, 1.0)) as departure, departure.stream(5, 1e6) as stream:
            await asyncio.sleep(0)
            await send(stream, seen, name)

    async with asyncio.timeout(60):
        await asyncio.gather(*(leave(str(deadline), deadline) for deadline in (30.0, 10.0, 20.0)))
    assert seen == ["10.0"] * 5 + ["20.0"] * 5 + ["30.0"] * 5


async def test_pace_leaves_time_for_later_transfers(leaving: Leaving) -> None:
    pace = leaving.add(300 * MB, 100e6).pace
    alone = pace.tick(0.0, 0, None, None)
    assert alone == pytest.approx(300 * MB / 24)
    leaving.add(300 * MB, 100e6)
    assert pace.tick(0.0, 0, None, None) == pytest.approx(2 * alone)
    leaving.add(100 * GB, 100e6)
    assert pace.tick(0.0, 0, None, None) is None, "not all transfers can finish in time, so the pace is unlimited"
    leaving.now += 30
    assert pace.tick(0.0, 0, None, None) is None


async def test_one_complete_copy_is_preferred_to_two_partial_ones(leaving: Leaving) -> None:
    with leaving.queue.departure(Urgency(leaving.now + 10, 1.0)) as departure:
        with departure.stream(500 * MB, 100e6) as first, departure.stream(100 * MB, 100e6) as second:
            assert not departure.late and not first.waits and not second.waits, "both transfers can finish in time"
        with departure.stream(600 * MB, 100e6) as first, departure.stream(600 * MB, 100e6) as second:
            assert departure.late and not first.waits and second.waits
            second.pace.remaining = 10
            assert first.waits and not second.waits, "the transfer with fewer bytes left goes first"
            second.rests()
            assert not first.waits


async def test_bytes_already_sent_do_not_count(leaving: Leaving) -> None:
    with leaving.queue.departure(Urgency(leaving.now + 10, 1.0, leaving.told.append)) as departure:
        with departure.stream(2 * GB, 100e6, sent=2 * GB - 100 * MB) as stream:
            assert not leaving.told and stream.pace.remaining == departure.remaining == 100 * MB
        with departure.stream(2 * GB, 100e6):
            assert leaving.told == ["1.9 GiB cannot reach another node in 10 s at 95.4 MiB/s"]
    assert leaving.queue.time_for(departure) == 0.0, "a departure outside the queue is not delayed"


async def test_transfer_of_unknown_speed_is_not_delayed_or_reported(leaving: Leaving) -> None:
    assert not leaving.add(10**14, None).waits and leaving.told == []


async def test_late_checkpoint_is_reported_to_the_user_once() -> None:
    told: list[str] = []
    loss = LossEstimate(400, told.append)
    loss.began(0.0, False, None)
    loss.stored(90.0, 41)
    heard: list[Urgency] = []
    with loss.heard_by(heard.append, 95.0):
        assert not heard
        loss.noticed(100.0, 30.0)
    (urgency,) = heard
    assert urgency.deadline_s == 130.0 and urgency.weight == 40.0
    queue = Departures(lambda: 100.0)
    with queue.departure(urgency) as departure, departure.stream(3_200 * MB, 40e6) as first:
        assert departure.late and not first.waits
    assert told == [
        "3.0 GiB cannot reach another node in 30 s at 38.1 MiB/s; the checkpoint of step 41 stands. The transfer continues"
    ]


@pytest.mark.parametrize(
    ("saved", "step", "stands"),
    [
        (False, None, "there is no earlier checkpoint"),
        (True, None, "the last checkpoint stands"),
        (True, 0, "the checkpoint of step 0 stands"),
    ],
)
def test_warning_names_the_last_stored_checkpoint(saved: bool, step: int | None, stands: str) -> None:
    told: list[str] = []
    loss = LossEstimate(100, told.append)
    loss.began(10.0, saved, step)
    loss.noticed(12.0, 8.0)
    heard: list[Urgency] = []
    with loss.heard_by(heard.append, 15.0):
        assert heard[0].weight == 5.0 and heard[0].deadline_s == 20.0
        loss.noticed(16.0, 1.0)
    loss.noticed(17.0, 1.0)
    assert len(heard) == 2, "the listener is removed"
    heard[0].warn("why")
    assert told == [f"why; {stands}. The transfer continues"]


async def test_needed_bandwidth_covers_the_tightest_deadline_and_earlier_ones(leaving: Leaving) -> None:
    assert leaving.queue.need_bps() == 0
    first = leaving.add(80 * MB, 100e6, window_s=10)  # 8 s of transfer
    assert leaving.queue.need_bps() == pytest.approx(10e6)
    leaving.add(80 * MB, 100e6, window_s=100)
    assert leaving.queue.need_bps() == pytest.approx(10e6), "the second transfer has enough time"
    tight = leaving.add(160 * MB, 100e6, window_s=12.5)
    assert leaving.queue.need_bps() == pytest.approx(24e6), "240 MB in 10 s"
    first.pace.remaining = tight.pace.remaining = 0
    assert leaving.queue.need_bps() == pytest.approx(1e6)
    hopeless = leaving.add(10 * GB, 100e6, window_s=1)
    assert hopeless.departure.late and leaving.queue.need_bps() == pytest.approx(1e6), (
        "a transfer that cannot finish in time slows no other"
    )
    leaving.now += 81
    assert leaving.queue.need_bps() == float("inf"), "the target time has passed"
