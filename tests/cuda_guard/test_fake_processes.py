"""Processes sharing the fake devices: turns, deaths, checkpoints, virtual time, injected failures."""

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.cuda_guard.guests import CONTEXT
from tests.fake.child import Child, Talk, run
from tests.fake.client import LEGACY, NON_BLOCKING, PER_THREAD, Driver, timed
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

NOT_READY = 600
MakeWorld = Callable[..., World]


def busy(driver: Driver, name: str, seconds: float, talk: Talk) -> int:
    """Keep the stream busy; return the number of completed kernels."""
    driver.start()
    kernel, stream = driver.kernel(name), driver.out("cuStreamCreate", NON_BLOCKING)
    talk.say("ready")
    talk.hear()
    events: list[int] = []
    count = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        driver.launch(kernel, stream)
        events.append(driver.record(stream))
        if len(events) > 8:
            driver.cuEventSynchronize(events[0])
            driver.cuEventDestroy_v2(events.pop(0))
            count += 1
    return count


def test_processes_take_turns_with_equal_parts(world: World) -> None:
    names = ["k_300us", "k_700us", "k_5ms"]
    children = [Child(world, busy, name, 0.6) for name in names]
    try:
        for child in children:
            child.hear()
        before = world.busy_ns()
        for child in children:
            child.tell()
        time.sleep(0.1)
        shares = [world.executed_ns(child.pid) for child in children]
        time.sleep(0.4)
        shares = [world.executed_ns(child.pid) - share for child, share in zip(children, shares, strict=True)]
        counts = [child.result() for child in children]
    finally:
        for child in children:
            child.kill()
    total = sum(shares)
    assert [share / total for share in shares] == pytest.approx([1 / 3] * 3, abs=0.02)
    assert (
        sum(world.executed_ns(child.pid) for child in children) == world.busy_ns() - before
    )  # never two at the same time
    for child, count, each in zip(children, counts, [0.3e6, 0.7e6, 5e6], strict=True):
        assert world.executed_ns(child.pid) >= count * each


def stretched(driver: Driver, talk: Talk) -> float:
    driver.start()
    kernel = driver.kernel("k_400ms")
    talk.say("ready")
    talk.hear()
    start = driver.record()
    driver.launch(kernel)
    end = driver.record()
    driver.cuEventSynchronize(end)
    return driver.elapsed_ms(start, end)


def test_another_process_lengthens_the_time_between_events(world: World) -> None:
    with Child(world, stretched) as one, Child(world, stretched) as other:
        for child in (one, other):
            child.hear()
        one.tell()
        other.tell()
        times = sorted([one.result(), other.result()])
    assert 500 <= times[0] <= times[1] < 810  # 400 alone; both began at nearly the same time


def hold(driver: Driver, talk: Talk) -> None:
    driver.start()
    driver.out("cuMemAlloc_v2", 600 * MIB)
    kernel = driver.kernel("k_1s")
    for _ in range(10):
        driver.launch(kernel)
    talk.say("holding")
    talk.hear()


def want(driver: Driver) -> float:
    driver.start()
    driver.out("cuMemAlloc_v2", 600 * MIB)
    driver.launch(driver.kernel("k_10ms"))
    return timed(driver.cuCtxSynchronize)


def test_killed_process_releases_memory_and_device(make_world: MakeWorld) -> None:
    world = make_world(memory=1500 * MIB)
    with Child(world, hold) as holder:
        holder.hear()
        assert world.memory(holder.pid) == 900 * MIB
        with pytest.raises(AssertionError, match="cuMemAlloc_v2 gave 2"):
            run(world, want)
        os.kill(holder.pid, signal.SIGKILL)
        holder.kill()
        assert run(world, want) < 5, "its launched work would take ten seconds"
        assert world.memory(holder.pid) == 0
        assert 0 < world.executed_ns(holder.pid) < 3e9  # kept; the rest of its ten seconds never runs
        assert world.pending(holder.pid) == 0


def hammer(driver: Driver, seed: int, talk: Talk) -> None:
    """Use the world's lock until killed."""
    driver.start()
    dice = random.Random(seed)
    kernels = [driver.kernel(name) for name in ("k_5us", "k_50us", "k_500us")]
    streams = [driver.out("cuStreamCreate", kind) for kind in (0, NON_BLOCKING)]
    talk.say("ready")
    while True:
        driver.launch(dice.choice(kernels), dice.choice([*streams, LEGACY, PER_THREAD]))
        event = driver.record(dice.choice(streams))
        driver.cuStreamWaitEvent(dice.choice(streams), event, 0)
        driver.cuEventDestroy_v2(event)
        driver.cuMemFreeAsync(driver.out("cuMemAllocAsync", dice.randrange(1, 5 * MIB), streams[0]), streams[1])


def test_process_killed_at_any_moment_affects_no_other(world: World) -> None:
    dice = random.Random(6)
    children = [Child(world, hammer, seed) for seed in range(2)]
    for seed in range(2, 22):
        children[0].hear()
        time.sleep(dice.random() * 0.02)
        children.pop(0).kill()
        children.append(Child(world, hammer, seed))
    for child in children:
        child.kill()
    assert world.used() == 0
    assert run(world, want) < 5, "work of dead processes is not waited for"


def fail_some(driver: Driver) -> list[int]:
    driver.start()
    number = ctypes.byref(ctypes.c_uint64())
    codes = [driver.code("cuMemAlloc_v2", number, 1) for _ in range(4)]
    return [*codes, driver.code("cuCtxSynchronize"), driver.code("cuCtxSynchronize")]


def test_calls_are_counted_and_fail_on_demand(world: World) -> None:
    assert run(world, fail_some, fail="cuMemAlloc_v2:3=2,cuCtxSynchronize:1=719") == [0, 0, 2, 0, 719, 0]
    assert world.calls("cuMemAlloc_v2") == 4
    assert world.calls("cuInit") == 1
    with pytest.raises(KeyError):
        world.calls("cuNope")


def virtual_time(driver: Driver, talk: Talk) -> list[float]:
    driver.start()
    kernel, stream = driver.kernel("k_3s"), driver.out("cuStreamCreate", NON_BLOCKING)
    start = driver.record(stream)
    driver.launch(kernel, stream)
    end = driver.record(stream)
    talk.say(driver.code("cuEventQuery", end))
    talk.hear()
    talk.say(driver.code("cuEventQuery", end))
    driver.launch(kernel, stream)
    later = driver.record(stream)
    driver.cuStreamSynchronize(stream)
    return [driver.elapsed_ms(start, end), driver.elapsed_ms(end, later)]


def test_virtual_time_advances_by_hand_and_when_a_process_waits(make_world: MakeWorld) -> None:
    world = make_world(virtual=True)
    began = time.monotonic()
    with Child(world, virtual_time) as child:
        assert child.hear() == NOT_READY
        now = world.now_ns()
        world.advance(4_000_000_000)
        assert world.now_ns() == now + 4_000_000_000
        assert world.executed_ns(child.pid) == 3_000_000_000
        child.tell()
        assert child.hear() == 0
        assert child.result() == [3000, 4000]  # idle for a second in between
        assert world.now_ns() == now + 7_000_000_000
    assert time.monotonic() - began < 6, "the seven seconds did not pass in real time"


def work_in_steps(driver: Driver, talk: Talk) -> int:
    driver.start()
    driver.out("cuMemAlloc_v2", 100 * MIB)
    driver.launch(driver.kernel("k_2s"))
    talk.say("launched")
    talk.hear()
    talk.say("calling")
    return driver.code("cuCtxSynchronize")


def checkpoint(driver: Driver, pid: int, talk: Talk) -> None:
    """Work without cuInit, like a daemon."""

    def state() -> int:
        value = ctypes.c_int(-1)
        driver.cuCheckpointProcessGetState(pid, ctypes.byref(value))
        return value.value

    timeout = (ctypes.c_uint * 16)(1)
    assert driver.code("cuCheckpointProcessLock", pid, timeout) == NOT_READY  # its kernel takes longer
    assert state() == 0
    driver.cuCheckpointProcessLock(pid, None)
    assert state() == 1
    assert driver.code("cuCheckpointProcessLock", pid, None) == 401
    driver.cuCheckpointProcessCheckpoint(pid, None)
    assert state() == 2
    talk.say("put away")
    talk.hear()
    driver.cuCheckpointProcessRestore(pid, None)
    talk.say("brought back")
    talk.hear()
    driver.cuCheckpointProcessUnlock(pid, None)
    assert driver.code("cuCheckpointProcessLock", 1, None) == 1


def test_process_is_suspended_and_resumed(world: World) -> None:
    with Child(world, work_in_steps) as worker:
        worker.hear()
        with Child(world, checkpoint, worker.pid) as owner:
            assert owner.hear() == "put away"
            assert world.used() == 0
            worker.tell()
            assert worker.hear() == "calling"
            assert worker.silent(0.05)
            owner.tell()
            assert owner.hear() == "brought back"
            assert world.memory(worker.pid) == CONTEXT + 100 * MIB
            assert worker.silent(0.05)
            owner.tell()
            assert worker.result() == 0
            owner.result()
