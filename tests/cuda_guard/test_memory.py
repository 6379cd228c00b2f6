"""A job's memory: every kind of allocation counts, none exceeds the quota, and released memory is available again."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_guard.allocations import (
    DEVICE,
    KINDS,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    QUOTA,
    AllocationProp,
    PoolProps,
    alloc,
    array,
    context,
    pinned,
    refused,
)
from tests.cuda_guard.guests import CONTEXT, MIB, Bench, sweep
from tests.fake.client import NON_BLOCKING, Driver

pytestmark = pytest.mark.cc


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_allocation_counts_and_is_refused_beyond_the_quota(
    make_bench: Callable[..., Bench], kind: Callable[..., Any]
) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        left = QUOTA - CONTEXT
        assert driver.free_memory() == (left, QUOTA)
        free = kind(driver, 512 * MIB)
        assert driver.free_memory() == (left - 512 * MIB, QUOTA)
        assert refused(driver, kind, 256 * MIB), "the allocation does not fit beside the context"
        assert driver.free_memory() == (left - 512 * MIB, QUOTA), "a refused allocation is not charged"
        again = kind(driver, 128 * MIB)
        again()
        free()
        assert driver.free_memory() == (left, QUOTA)
        assert machine.world.memory(os.getpid()) == CONTEXT
        kind(driver, 640 * MIB)

    machine.run(job, work)
    usage = job.usage()[0]
    assert usage.refused == 1 and usage.peak == CONTEXT + 640 * MIB


def test_all_memory_queries_agree(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench(memory=8192 * MIB)
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> Any:
        driver.start()
        driver.out("cuMemAlloc_v2", 100 * MIB)
        return driver.free_memory(), driver.out("cuDeviceTotalMem_v2", 0)

    assert machine.run(job, work) == ((QUOTA - CONTEXT - 100 * MIB, QUOTA), QUOTA)

    def whole(driver: Driver) -> Any:
        driver.start()
        return driver.free_memory()[1], driver.out("cuDeviceTotalMem_v2", 0)

    assert machine.run(machine.job(memory=None), whole) == (8192 * MIB, 8192 * MIB)


class NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def test_nvml_agrees_with_the_driver(make_bench: Callable[..., Bench]) -> None:
    """HAMi-core #181: if the two differ, vLLM's profiling runs out of memory. Only the job's own processes are listed."""
    machine = make_bench(memory=8192 * MIB)
    job = machine.job(memory=QUOTA)
    other = machine.start(None, lambda driver: (driver.start(), time.sleep(600)))
    while machine.world.used() == 0:
        time.sleep(0.01)

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 100 * MIB)
        nvml, device, memory = ctypes.CDLL(str(machine.libraries.nvml)), ctypes.c_void_p(), NvmlMemory()
        assert nvml.nvmlInit_v2() == 0
        assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
        assert nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        assert (memory.free, memory.total) == driver.free_memory() and memory.used == CONTEXT + 100 * MIB
        rows, count = (ctypes.c_ulonglong * 48)(), ctypes.c_uint(16)
        assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), rows) == 0
        assert (count.value, rows[0] & 0xFFFFFFFF) == (1, os.getpid())

    machine.run(job, work)
    other.kill(signal.SIGKILL)
    other.wait()


def test_both_libraries_of_a_process_share_one_slot(make_bench: Callable[..., Bench]) -> None:
    """The slot is held by a lock that a process loses when it closes any descriptor of the file."""
    machine = make_bench()
    job = machine.job()
    reading, writing = os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 100 * MIB)
        assert ctypes.CDLL(str(machine.libraries.nvml)).nvmlInit_v2() == 0
        os.write(writing, b"\n")
        time.sleep(600)

    guest = machine.start(job, work)
    os.read(reading, 1)
    sweep(job)
    assert (list(job.charges()), job.pages.memory_used(0)) == ([guest.pid], CONTEXT + 100 * MIB)
    guest.kill(signal.SIGKILL)
    guest.wait()
    os.close(reading)
    os.close(writing)


def test_graph_allocations_count(make_bench: Callable[..., Bench]) -> None:
    """Allocations by a node and by a capture are reserved before the launch, then follow the driver, and end with a trim."""
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def captured(driver: Driver, size: int) -> int:
        stream, graph = driver.out("cuStreamCreate", 1), ctypes.c_uint64()
        driver.cuStreamBeginCapture_v2(stream, 0)
        pointer = driver.out("cuMemAllocAsync", size, stream)
        driver.cuMemFreeAsync(pointer, stream)
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        return driver.out("cuGraphInstantiateWithFlags", graph, 0)

    def work(driver: Driver) -> None:
        driver.start()
        small, large = captured(driver, 256 * MIB), captured(driver, 900 * MIB)
        assert job.pages.memory_used(0) == CONTEXT == machine.world.memory(os.getpid())
        for _ in range(3):
            driver.cuGraphLaunch(small, 0)
        driver.cuCtxSynchronize()
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid()) == CONTEXT + 256 * MIB
        assert driver.code("cuGraphLaunch", large, 0) == OUT_OF_MEMORY
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid()) <= CONTEXT + 256 * MIB
        driver.cuGraphLaunch(small, 0)
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid()) == CONTEXT + 256 * MIB
        driver.cuCtxSynchronize()
        driver.cuDeviceGraphMemTrim(0)
        assert job.pages.memory_used(0) == CONTEXT == machine.world.memory(os.getpid())

    machine.run(job, work)


def test_each_of_many_allocations_is_released(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=None)

    def work(driver: Driver) -> None:
        driver.start()
        pointers = [driver.out("cuMemAlloc_v2", MIB) for _ in range(500)]
        for left, pointer in enumerate(pointers[1::2] + pointers[::2], 1):
            driver.cuMemFree_v2(pointer)
            assert job.pages.memory_used(0) == CONTEXT + (500 - left) * MIB

    machine.run(job, work)


def test_graph_that_fails_to_launch_keeps_no_memory(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> int:
        driver.start()
        node = AllocNode(props=PoolProps(type=1, location=(DEVICE, 0)), size=256 * MIB)
        graph = driver.out("cuGraphCreate", 0)
        driver.out("cuGraphAddMemAllocNode", graph, None, 0, ctypes.byref(node))
        code = driver.code("cuGraphLaunch", driver.out("cuGraphInstantiateWithFlags", graph, 0), 0)
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid())
        return code

    assert machine.run(job, work, fail="cuGraphLaunch:1=700") == 700


class AllocNode(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = (
        ("props", PoolProps),
        ("access", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("pointer", ctypes.c_uint64),
    )


def test_graph_is_charged_on_the_device_of_its_memory(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench(devices=2)
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> int:
        driver.start(1)
        driver.start(0)
        graphs = []
        for size in (256 * MIB, 1024 * MIB):
            node = AllocNode(props=PoolProps(type=1, location=(DEVICE, 1)), size=size)
            graphs.append(driver.out("cuGraphCreate", 0))
            driver.out("cuGraphAddMemAllocNode", graphs[-1], None, 0, ctypes.byref(node))
        small, large = (driver.out("cuGraphInstantiateWithFlags", graph, 0) for graph in graphs)
        driver.cuGraphLaunch(small, 0)
        driver.cuCtxSynchronize()
        has = [machine.world.memory(os.getpid(), device) for device in (0, 1)]
        assert [job.pages.memory_used(place) for place in (0, 1)] == has == [CONTEXT, CONTEXT + 256 * MIB]
        return driver.code("cuGraphLaunch", large, 0)

    assert machine.run(job, work) == OUT_OF_MEMORY


def test_graph_that_uses_memory_again_fits_if_its_sum_does_not(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def captured(driver: Driver, *streams: int) -> int:
        graph, begun = ctypes.c_uint64(), driver.out("cuEventCreate", 0)
        driver.cuStreamBeginCapture_v2(streams[0], 0)
        driver.cuEventRecord(begun, streams[0])
        for stream in streams[1:]:
            driver.cuStreamWaitEvent(stream, begun, 0)
        for n in range(12):
            stream = streams[n % len(streams)]
            driver.cuMemFreeAsync(driver.out("cuMemAllocAsync", 128 * MIB, stream), stream)
        for stream in streams[1:]:
            driver.cuEventRecord(begun, stream)
            driver.cuStreamWaitEvent(streams[0], begun, 0)
        driver.cuStreamEndCapture(streams[0], ctypes.byref(graph))
        return driver.out("cuGraphInstantiateWithFlags", graph, 0)

    def work(driver: Driver) -> None:
        driver.start()
        streams = [driver.out("cuStreamCreate", 1) for _ in range(8)]
        one_by_one, side_by_side = captured(driver, streams[0]), captured(driver, *streams)
        for _ in range(2):
            driver.cuGraphLaunch(one_by_one, 0)
        driver.cuCtxSynchronize()
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid()) == CONTEXT + 128 * MIB
        assert job.usage()[0].refused == 0
        assert driver.code("cuGraphLaunch", side_by_side, 0) == OUT_OF_MEMORY
        assert job.pages.memory_used(0) == machine.world.memory(os.getpid()) <= CONTEXT + 128 * MIB

    machine.run(job, work)
    assert job.usage()[0].refused == 1


def test_failed_capture_is_not_charged_to_the_next_graph(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        stream, graph = driver.out("cuStreamCreate", 1), ctypes.c_uint64()
        driver.cuStreamBeginCapture_v2(stream, 0)
        driver.out("cuMemAllocAsync", 900 * MIB, stream)
        assert driver.code("cuStreamSynchronize", stream) and driver.code(
            "cuStreamEndCapture", stream, ctypes.byref(graph)
        )
        driver.cuStreamBeginCapture_v2(stream, 0)
        driver.cuMemFreeAsync(driver.out("cuMemAllocAsync", 64 * MIB, stream), stream)
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        uploads = machine.world.calls("cuGraphUpload")
        driver.cuGraphLaunch(driver.out("cuGraphInstantiateWithFlags", graph, 0), stream)
        assert machine.world.calls("cuGraphUpload") == uploads, "it fits at once"

    machine.run(job, work)


def test_pool_is_charged_only_for_what_it_grows_by(make_bench: Callable[..., Bench]) -> None:
    """An allocation may span memory that the pool has reserved and a new chunk."""
    machine = make_bench()
    job = machine.job(memory=CONTEXT + 64 * MIB)

    def work(driver: Driver) -> bool:
        driver.start()
        for size in (20 * MIB, 40 * MIB):
            driver.out("cuMemAllocAsync", size, 0)
        assert job.pages.memory_used(0) == CONTEXT + 64 * MIB == machine.world.memory(os.getpid())
        return refused(driver, lambda driver, size: driver.out("cuMemAllocAsync", size, 0), 8 * MIB)

    assert machine.run(job, work)


def test_memory_that_is_taken_back_leaves_a_capture_whole(make_bench: Callable[..., Bench]) -> None:
    """A pool that grew by more than before is released, which waits for its stream: that would invalidate the capture."""
    machine = make_bench(pool_chunk=64 * MIB)
    job = machine.job(memory=CONTEXT + 48 * MIB)

    def work(driver: Driver) -> tuple[bool, int]:
        driver.start()
        captured, stream = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
        driver.cuStreamBeginCapture_v2(captured, 0)
        over = refused(driver, lambda driver, size: driver.out("cuMemAllocAsync", size, stream), 20 * MIB)
        return over, driver.code("cuStreamEndCapture", captured, ctypes.byref(ctypes.c_uint64()))

    assert machine.run(job, work) == (True, 0)
    assert job.usage()[0].refused == 1


def test_pool_of_a_foreign_device_is_refused(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench(devices=2)
    machine.uuids = machine.uuids[:1]

    def work(driver: Driver) -> Any:
        driver.start()
        props = PoolProps(type=1, location=(DEVICE, 1))
        return [
            driver.code("cuMemPoolCreate", ctypes.byref(ctypes.c_uint64()), ctypes.byref(props)),
            driver.code("cuDeviceGetDefaultMemPool", ctypes.byref(ctypes.c_uint64()), 1),
            driver.code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 2 * MIB, ctypes.byref(pinned(1)), 0),
        ]

    assert machine.run(machine.job(), work) == [NOT_PERMITTED] * 3


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemAllocAsync"])
def test_allocation_waits_at_a_closed_gate(make_bench: Callable[..., Bench], call: str) -> None:
    machine = make_bench()
    job = machine.job()
    reading, writing = os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        os.write(writing, b"r")
        while not job.pages.policy.gate & 1:
            time.sleep(0.001)
        driver.out(call, MIB, 0)

    guest = machine.start(job, work)
    os.read(reading, 1)
    job.set_gate(closed=True)
    time.sleep(0.2)
    assert machine.world.calls(call) == 0
    job.set_gate(closed=False)
    guest.result()


def test_context_counts_until_it_ends_with_its_allocations(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.cuInit(0)
        driver.out("cuDevicePrimaryCtxRetain", 0)
        driver.out("cuDevicePrimaryCtxRetain", 0)
        assert job.pages.memory_used(0) == CONTEXT
        context = driver.out("cuCtxCreate_v2", 0, 0)
        driver.out("cuMemAlloc_v2", 64 * MIB)
        array(driver, 32 * MIB)
        assert job.pages.memory_used(0) == 2 * CONTEXT + 96 * MIB == machine.world.memory(os.getpid())
        driver.cuCtxDestroy_v2(context)
        assert job.pages.memory_used(0) == CONTEXT
        driver.cuDevicePrimaryCtxRelease_v2(0)
        assert job.pages.memory_used(0) == CONTEXT
        driver.cuDevicePrimaryCtxRelease_v2(0)
        assert job.pages.memory_used(0) == 0
        small = [driver.code("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 0) for _ in range(1)]
        assert small == [0]

    machine.run(job, work)
    assert machine.run(machine.job(memory=100 * MIB), lambda driver: (driver.cuInit(0), refused(driver, context, 0))[1])


def test_memory_counts_until_its_handle_and_mappings_are_gone(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        at, size = driver.out("cuMemAddressReserve", 64 * MIB, 0, 0, 0), 32 * MIB
        handle = driver.out("cuMemCreate", size, ctypes.byref(pinned()), 0)
        driver.cuMemMap(at, size, 0, handle, 0)
        driver.cuMemMap(at + size, size, 0, handle, 0)
        again = driver.out("cuMemRetainAllocationHandle", ctypes.c_void_p(at + 5 * MIB))
        driver.cuMemRelease(handle)
        driver.cuMemUnmap(at, size)
        driver.cuMemUnmap(at + size, size)
        assert job.pages.memory_used(0) == CONTEXT + size == machine.world.memory(os.getpid())
        driver.cuMemRelease(again)
        assert job.pages.memory_used(0) == CONTEXT == machine.world.memory(os.getpid())

    machine.run(job, work)


def test_exported_memory_stays_charged(make_bench: Callable[..., Bench]) -> None:
    """Another process may import it and keep it, and is not charged for it."""
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        handle, file = driver.out("cuMemCreate", 64 * MIB, ctypes.byref(pinned()), 0), ctypes.c_int()
        driver.cuMemExportToShareableHandle(ctypes.byref(file), handle, 1, 0)
        driver.cuMemRelease(handle)
        assert job.pages.memory_used(0) == CONTEXT + 64 * MIB == machine.world.memory(os.getpid())

    machine.run(job, work)


MANAGED = 2  # CU_MEM_ALLOCATION_TYPE_MANAGED


@pytest.mark.parametrize("location", [(0, 0), (2, 0), (DEVICE, 0)])
def test_managed_pool_is_charged_to_a_device_wherever_it_begins(
    make_bench: Callable[..., Bench], location: tuple[int, int]
) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA, host_memory=0)

    def work(driver: Driver) -> bool:
        driver.start()
        pool = driver.out("cuMemPoolCreate", ctypes.byref(PoolProps(type=MANAGED, location=location)))
        driver.out("cuMemAllocFromPoolAsync", 64 * MIB, pool, 0)
        assert job.pages.memory_used(0) == CONTEXT + 64 * MIB == machine.world.memory(os.getpid())
        return refused(driver, lambda driver, size: driver.out("cuMemAllocFromPoolAsync", size, pool, 0), QUOTA)

    assert machine.run(job, work)


@pytest.mark.parametrize(("kind", "location"), [(1, (5, 0)), (1, (7, 0)), (3, (2, 0))])
def test_memory_of_an_unknown_kind_is_refused(
    make_bench: Callable[..., Bench], kind: int, location: tuple[int, int]
) -> None:
    """It may be on any device."""
    machine = make_bench()

    def work(driver: Driver) -> list[int]:
        driver.start()
        prop, props = AllocationProp(type=kind, location=location), PoolProps(type=kind, location=location)
        return [
            driver.code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 2 * MIB, ctypes.byref(prop), 0),
            driver.code("cuMemPoolCreate", ctypes.byref(ctypes.c_uint64()), ctypes.byref(props)),
        ]

    assert machine.run(machine.job(), work) == [NOT_PERMITTED] * 2


def test_device_that_is_none_gets_the_error_of_the_driver(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()

    def work(driver: Driver) -> list[int]:
        out = ctypes.byref(ctypes.c_uint64())
        codes = [driver.code("cuDevicePrimaryCtxRetain", out, 0)]
        driver.cuInit(0)
        codes += [driver.code(name, out, 99) for name in ("cuDevicePrimaryCtxRetain", "cuDeviceGetDefaultMemPool")]
        return [*codes, driver.code("cuCtxCreate_v2", out, 0, 99)]

    assert machine.run(machine.job(), work) == machine.run(None, work) == [3, 101, 101, 101]


def test_context_ends_with_its_last_detach(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> None:
        driver.cuInit(0)
        context = driver.out("cuCtxCreate_v2", 0, 0)
        driver.out("cuMemAlloc_v2", MIB)
        assert driver.out("cuCtxAttach", 0) == context
        driver.cuCtxDetach(context)
        assert job.pages.memory_used(0) == CONTEXT + MIB
        driver.cuCtxDetach(context)
        assert job.pages.memory_used(0) == 0 == machine.world.memory(os.getpid())

    machine.run(job, work)


def test_nccl_host_memcreate(make_bench: Callable[..., Bench]) -> None:
    """Host memory is not device memory, and no device is looked up for its number (HAMi #2641)."""
    machine = make_bench()
    job = machine.job(memory=CONTEXT)

    def work(driver: Driver) -> None:
        driver.start()
        prop = AllocationProp(type=1, location=(2, 7))
        driver.code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 64 * MIB, ctypes.byref(prop), 0)
        assert job.pages.memory_used(0) == CONTEXT

    machine.run(job, work)


def test_free_unknown_pointer(make_bench: Callable[..., Bench]) -> None:
    """The driver frees pointers of a pool and unknown ones (HAMi's free_raw frees nothing)."""
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        pointer = driver.out("cuMemAllocAsync", 32 * MIB, 0)
        driver.cuStreamSynchronize(0)
        driver.cuMemFree_v2(pointer)
        driver.cuCtxSynchronize()
        assert machine.world.memory(os.getpid()) == CONTEXT == job.pages.memory_used(0)
        assert driver.code("cuMemFree_v2", 0xDEAD000) != 0

    machine.run(job, work)


def test_alloc_without_context(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()

    def work(driver: Driver) -> Any:
        driver.cuInit(0)
        return driver.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 1 << 20)

    assert machine.run(machine.job(), work) == 201, "CUDA_ERROR_INVALID_CONTEXT, as the driver says"


def test_calls_with_32_bit_sizes_are_denied(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()

    def work(driver: Driver) -> Any:
        driver.start()
        return [driver.code(name, ctypes.byref(ctypes.c_uint64()), 4096) for name in ("cuMemAlloc", "cuArrayCreate")]

    assert machine.run(machine.job(), work) == [NOT_SUPPORTED] * 2


def test_foreign_device_cannot_be_used(make_bench: Callable[..., Bench]) -> None:
    """A process may see it if only a variable hides it, but gets no context there."""
    machine = make_bench(devices=2)
    machine.uuids = machine.uuids[:1]
    job = machine.job()

    def work(driver: Driver) -> Any:
        driver.start(0)
        return driver.code("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 1)

    assert machine.run(job, work) == NOT_PERMITTED


def test_each_device_has_its_own_quota(make_bench: Callable[..., Bench]) -> None:
    """The device of the allocation counts, not the thread's (HAMi #188, #311)."""
    machine = make_bench(devices=2)
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start(0)
        driver.out("cuMemCreate", 256 * MIB, ctypes.byref(pinned(1)), 0)
        assert (job.pages.memory_used(0), job.pages.memory_used(1)) == (CONTEXT, 256 * MIB)
        driver.start(1)
        driver.out("cuMemAlloc_v2", 128 * MIB)
        assert (job.pages.memory_used(0), job.pages.memory_used(1)) == (CONTEXT, CONTEXT + 384 * MIB)

    machine.run(job, work)


def test_stream_ordered_memory_is_charged_to_the_device_of_its_stream(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench(devices=2)
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start(1)
        stream = driver.out("cuStreamCreate", 1)
        driver.start(0)
        driver.out("cuMemAllocAsync", 64 * MIB, stream)
        has = [machine.world.memory(os.getpid(), device) for device in (0, 1)]
        assert [job.pages.memory_used(place) for place in (0, 1)] == has == [CONTEXT, CONTEXT + 64 * MIB]

    machine.run(job, work)


def test_quota_can_change_while_the_job_runs(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(memory=QUOTA)
    (turn, go), (told, tell) = os.pipe(), os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        driver.out("cuMemAlloc_v2", 512 * MIB)
        os.write(tell, b".")
        os.read(turn, 1)
        assert driver.free_memory() == (0, CONTEXT + 512 * MIB), "the job keeps its memory"
        assert driver.out("cuDeviceTotalMem_v2", 0) == CONTEXT + 512 * MIB
        assert refused(driver, alloc, 1 * MIB)
        os.write(tell, b".")
        os.read(turn, 1)
        assert driver.free_memory() == (2 * QUOTA - CONTEXT - 512 * MIB, 2 * QUOTA)
        driver.out("cuMemAlloc_v2", 512 * MIB)

    guest = machine.start(job, work)
    for quota in (600 * MIB, 2 * QUOTA):
        os.read(told, 1)
        job.set_memory(0, quota)
        os.write(go, b".")
    guest.result()


def test_driver_error_is_not_charged(make_bench: Callable[..., Bench]) -> None:
    """The driver's errors are passed on, and the charge is undone."""
    machine = make_bench()
    job = machine.job(memory=QUOTA)

    def work(driver: Driver) -> None:
        driver.start()
        assert driver.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), MIB) == 719
        assert job.pages.memory_used(0) == CONTEXT
        pointer = driver.out("cuMemAlloc_v2", MIB)
        assert driver.code("cuMemFree_v2", pointer) == 700
        assert job.pages.memory_used(0) == CONTEXT + MIB, "the memory is still allocated"

    machine.run(job, work, fail="cuMemAlloc_v2:1=719,cuMemFree_v2:1=700")
