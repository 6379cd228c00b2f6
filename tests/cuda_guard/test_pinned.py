"""Pinned host memory: limited like device memory, and released."""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from cuda_guard.page import HOST
from tests.cuda_guard.allocations import OUT_OF_MEMORY, AllocationProp, PoolProps
from tests.cuda_guard.guests import CONTEXT, MIB, Bench, sweep
from tests.fake.client import CudaError, Driver

pytestmark = pytest.mark.cc

LIMIT = 64 * MIB
Location = tuple[int, int]
OF_THE_HOST, OF_A_NUMA_NODE, OF_ITS_NUMA_NODE = (
    (2, 0),
    (3, 0),
    (4, 0),
)  # CU_MEM_LOCATION_TYPE_HOST, _NUMA, _NUMA_CURRENT
PAGE = 4096


def allocated(driver: Driver, size: int) -> Callable[[], None]:
    pointer = driver.out("cuMemAllocHost_v2", size)
    return lambda: driver.cuMemFreeHost(ctypes.c_void_p(pointer))


def flagged(driver: Driver, size: int) -> Callable[[], None]:
    pointer = driver.out("cuMemHostAlloc", size, 1)
    return lambda: driver.cuMemFreeHost(ctypes.c_void_p(pointer))


def registered(driver: Driver, size: int) -> Callable[[], None]:
    own = ctypes.create_string_buffer(size)
    driver.cuMemHostRegister_v2(own, size, 0)
    return lambda: driver.cuMemHostUnregister(own)


def physical(driver: Driver, size: int) -> Callable[[], None]:
    handle = driver.out("cuMemCreate", size, ctypes.byref(AllocationProp(type=1, location=OF_THE_HOST)), 0)
    return lambda: driver.cuMemRelease(handle)


@pytest.mark.parametrize("kind", [allocated, flagged, registered, physical])
def test_each_kind_of_pinned_memory_counts_and_is_refused_beyond_the_limit(
    make_bench: Callable[..., Bench], kind: Callable[[Driver, int], Callable[[], None]]
) -> None:
    machine = make_bench()
    job = machine.job(host_memory=LIMIT)

    def work(driver: Driver) -> None:
        driver.start()
        first = kind(driver, LIMIT - 2 * MIB)
        kind(driver, 2 * MIB)
        with pytest.raises(CudaError) as refusal:
            kind(driver, 2 * MIB)
        assert refusal.value.code == OUT_OF_MEMORY and job.pages.memory_used(HOST) == LIMIT
        first()
        assert job.pages.memory_used(HOST) == 2 * MIB
        kind(driver, LIMIT - 2 * MIB)

    machine.run(job, work)
    sweep(job)
    assert job.pages.memory_used(HOST) == 0 and job.pages.job.uses[HOST].refused == 1


def created(driver: Driver, location: Location) -> int:
    return driver.out("cuMemPoolCreate", ctypes.byref(PoolProps(type=1, location=location)))


def default(driver: Driver, location: Location) -> int:
    return driver.out("cuMemGetDefaultMemPool", (ctypes.c_int * 2)(*location), 1)


def current(driver: Driver, location: Location) -> int:
    """Make a pool that the program sets as the default."""
    own = created(driver, location)
    driver.cuMemSetMemPool((ctypes.c_int * 2)(*location), 1, own)
    assert driver.out("cuMemGetMemPool", (ctypes.c_int * 2)(*location), 1) == own
    return own


@pytest.mark.parametrize("pool", [created, default, current])
def test_host_pools_are_charged_for_their_reserved_memory(
    make_bench: Callable[..., Bench], pool: Callable[[Driver, Location], int]
) -> None:
    """This holds for any way to get a pool, any location and any stream; the device is not charged."""
    machine = make_bench(pool_chunk=2 * MIB)
    job = machine.job(host_memory=LIMIT)

    def use(driver: Driver, location: Location, form: str) -> None:
        own = pool(driver, location)

        def take(size: int) -> int:
            return driver.out(f"cuMemAllocFromPoolAsync{form}", size, own, 0)

        def give(*pointers: int) -> int:
            for pointer in pointers:
                driver.call(f"cuMemFreeAsync{form}", pointer, 0)
            driver.call(f"cuStreamSynchronize{form}", 0)
            return job.pages.memory_used(HOST)

        first, second = take(LIMIT - 2 * MIB), take(1)
        assert job.pages.memory_used(HOST) == LIMIT
        with pytest.raises(CudaError) as refusal:
            take(2 * MIB)
        assert refusal.value.code == OUT_OF_MEMORY and job.pages.memory_used(HOST) == LIMIT
        third = take(MIB)  # the pool's memory is charged already
        assert give(first) == 2 * MIB
        fourth = take(LIMIT - 2 * MIB)
        assert give(second) == LIMIT and give(third, fourth) == 0
        assert job.pages.memory_used(0) == CONTEXT == machine.world.memory(os.getpid())

    def work(driver: Driver) -> None:
        driver.start()
        for location in (OF_THE_HOST, OF_A_NUMA_NODE, OF_ITS_NUMA_NODE):
            for form in ("", "_ptsz"):
                use(driver, location, form)

    machine.run(job, work)
    assert job.pages.job.uses[HOST].refused == 6


def test_pinned_memory_stays_exact_when_eight_racing_processes_are_killed(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(host_memory=LIMIT)
    reading, writing = os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        while True:
            held: list[Any] = []
            for size in (1, PAGE, 3 * MIB + 1, 40 * MIB):
                try:
                    held.append(allocated(driver, size))
                except CudaError as error:
                    assert error.code == OUT_OF_MEMORY
                    os.write(writing, b".")
            for free in held:
                free()

    guests = [machine.start(job, work) for _ in range(8)]
    for _ in range(50):
        os.read(reading, 1)
    for guest in guests:
        guest.kill(signal.SIGKILL)
        guest.wait()
    assert LIMIT // 2 < job.pages.job.uses[HOST].peak * 512 <= LIMIT
    sweep(job)
    assert job.pages.memory_used(HOST) == 0


def test_pinned_memory_without_a_limit_is_only_counted(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> None:
        driver.start()
        allocated(driver, 1)
        assert job.pages.memory_used(HOST) == PAGE

    machine.run(job, work)
