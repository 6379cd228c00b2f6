"""A job's memory when its processes race, fork and die, in any order: never a byte above the quota."""

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cuda_guard.allocations import (
    KINDS,
    OUT_OF_MEMORY,
    QUOTA,
    context,
    from_default_pool,
    from_own_pool,
    refused,
)
from tests.cuda_guard.guests import CONTEXT, MIB, Bench, sweep
from tests.fake.client import CudaError, Driver

pytestmark = pytest.mark.cc
EXACT = [kind for kind in KINDS if kind not in {from_default_pool, from_own_pool}]

operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(range(len(KINDS))), st.integers(1, 400)),
        st.tuples(st.just(-1), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=operations)
def test_never_above_the_quota_and_never_refused_below_it(
    make_bench: Callable[..., Bench], made: list[tuple[int, int]]
) -> None:
    """Any sequence of allocations and frees, compared with the driver's own account."""
    machine = shared_bench(make_bench)
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        held: list[Callable[[], None]] = []
        for kind, number in made:
            before = machine.world.memory(os.getpid())
            if kind < 0:
                if held:
                    held.pop(number % len(held))()
            else:
                size = number * 2 * MIB
                try:
                    held.append(KINDS[kind](driver, size))
                except CudaError as error:
                    assert error.code == OUT_OF_MEMORY and before + size + 32 * MIB > QUOTA, "refused although it fits"
            now = machine.world.memory(os.getpid())
            assert now <= QUOTA
            assert job.pages.memory_used(0) >= now, "every allocation is charged"
        for free in held:
            free()
        driver.cuCtxSynchronize()
        assert job.pages.memory_used(0) == CONTEXT == machine.world.memory(os.getpid())

    machine.run(job, work)
    machine.end(job)


_shared: list[Bench] = []


def shared_bench(make_bench: Callable[..., Bench]) -> Bench:
    """Make one machine for all examples of a test."""
    if not _shared:
        _shared.append(make_bench(memory=65536 * MIB))
    return _shared[0]


def test_eight_processes_racing_for_the_last_memory(make_bench: Callable[..., Bench]) -> None:
    """All kinds of allocation but from pools, for seconds, with a changing quota.

    By the driver's account the job never exceeds it, except for what it had when the quota fell. A pool can, until the call
    returns (docs/explanation/gpu-memory.md).
    """
    machine = make_bench(memory=65536 * MIB)
    quotas = [8 * CONTEXT + more * MIB for more in (1024, 512, 768)]
    job = machine.job(memory=quotas[0])
    ready = os.pipe()

    def work(driver: Driver) -> tuple[int, int]:
        driver.start()
        (until,) = struct.unpack("d", os.read(ready[0], 8))
        rng, done, failed, held = random.Random(os.getpid()), 0, 0, []
        while time.monotonic() < until:
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held)))()
                continue
            try:
                held.append(rng.choice(EXACT)(driver, rng.randrange(1, 150) * 2 * MIB))
                done += 1
            except CudaError as error:
                assert error.code == OUT_OF_MEMORY
                failed += 1
        return done, failed

    guests = [machine.start(job, work) for _ in range(8)]
    while job.usage()[0].processes < 8:
        time.sleep(0.01)
    until = time.monotonic() + 3
    os.write(ready[1], struct.pack("d", until) * 8)
    above, rng = [], random.Random(6)
    while time.monotonic() < until:
        quota = rng.choice(quotas)
        job.set_memory(0, quota)
        most = max(quota, job.pages.memory_used(0))
        for _ in range(rng.randrange(1, 200)):
            above.append(machine.world.used() - most)
    counts = [guest.result() for guest in guests]
    assert all(done > 10 and failed > 5 for done, failed in counts), "the processes did race"
    assert len(above) > 1000 and max(above) <= 0
    assert job.usage()[0].peak <= quotas[0]
    sweep(job)
    assert job.usage()[0].processes == 0 and job.pages.memory_used(0) == 0


def test_memory_of_a_killed_process_is_released(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def hold(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 700 * MIB)
        time.sleep(600)

    victim = machine.start(job, hold)
    deadline = time.monotonic() + 60
    while job.pages.memory_used(0) < 1000 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert machine.run(job, lambda driver: (driver.cuInit(0), refused(driver, context, 0))[1])
    victim.kill(signal.SIGKILL)
    victim.wait()

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 700 * MIB)  # without the daemon: the process that needs memory sweeps

    machine.run(job, work)


def test_forked_child_starts_with_nothing(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 100 * MIB)
        child = os.fork()
        if child == 0:
            clean = job.pages.memory_used(0) == CONTEXT + 100 * MIB
            os._exit(0 if clean else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert job.pages.memory_used(0) == CONTEXT + 100 * MIB, "the child's end does not change the parent's charge"
        driver.out("cuMemAlloc_v2", 100 * MIB)

    machine.run(job, work)


def test_sixty_four_threads(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=CONTEXT + 256 * MIB)

    def work(driver: Driver) -> int:
        context = driver.start()
        failures: list[int] = []

        def churn() -> None:
            driver.cuCtxSetCurrent(context)
            for _ in range(50):
                try:
                    driver.cuMemFree_v2(driver.out("cuMemAlloc_v2", 8 * MIB))
                except CudaError as error:
                    failures.append(error.code)

        threads = [threading.Thread(target=churn) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert job.pages.memory_used(0) == CONTEXT
        assert set(failures) <= {OUT_OF_MEMORY}
        return len(threads)

    assert machine.run(job, work) == 64


@pytest.mark.long
def test_200_process_start(make_bench: Callable[..., Bench]) -> None:
    """All start at once, without a lock between them (HAMi #1662: a minute); each gets a slot, and all memory is released."""
    machine = make_bench(memory=200_000 * MIB)
    job = machine.job(memory=None)
    ready = os.pipe()

    def work(driver: Driver) -> bool:
        driver.start()
        os.read(ready[0], 1)  # all are ready
        return True

    guests = [machine.start(job, work) for _ in range(200)]
    deadline = time.monotonic() + 60
    while job.usage()[0].processes < 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.usage()[0].processes == 200 and job.pages.memory_used(0) == 200 * CONTEXT
    os.write(ready[1], b"." * 200)
    assert all(guest.result() for guest in guests)
    sweep(job)
    assert job.usage()[0].processes == 0 and job.pages.memory_used(0) == 0
