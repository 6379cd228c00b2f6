"""Graphs and captures of the fake driver, as in the real one as far as known."""

import ctypes
import threading
from collections.abc import Callable

import pytest

from tests.fake.child import run
from tests.fake.client import LEGACY, NON_BLOCKING, Driver
from tests.fake.structs import Location, PoolProps
from tests.fake.world import MIB, World

pytestmark = pytest.mark.cc

CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT = 900, 901, 904, 906


class AllocNode(ctypes.Structure):
    _fields_ = (
        ("pool", PoolProps),
        ("access", ctypes.c_void_p),
        ("access_count", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        ("pointer", ctypes.c_uint64),
    )


class KernelNode(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


def device_graphs(driver: Driver) -> tuple[float, float]:
    driver.start()
    short, long = driver.kernel("k_1ms"), driver.kernel("k_3ms")
    graph = driver.out("cuGraphCreate", 0)

    def add(kernel: int, *after: int) -> int:
        node = KernelNode(kernel, 1, 1, 1, 1, 1, 1, 0, None, None)
        return driver.out(
            "cuGraphAddKernelNode", graph, (ctypes.c_void_p * len(after))(*after), len(after), ctypes.byref(node)
        )

    root = add(short)
    add(short, add(short, root), add(long, root))
    whole = driver.out("cuGraphCreate", 0)
    child = driver.out("cuGraphAddChildGraphNode", whole, None, 0, graph)
    driver.out("cuGraphAddChildGraphNode", whole, (ctypes.c_void_p * 1)(child), 1, driver.out("cuGraphClone", graph))
    driver.cuGraphDestroy(graph)

    def took(of: int) -> float:
        start = driver.record()
        driver.cuGraphLaunch(of, 0)
        end = driver.record()
        driver.cuEventSynchronize(end)
        return driver.elapsed_ms(start, end)

    return took(driver.out("cuGraphInstantiateWithFlags", whole, 0)), took(
        driver.out("cuGraphInstantiate_v2", whole, 0, 0, 0)
    )


def test_graph_takes_as_long_as_its_longest_path(world: World) -> None:
    for elapsed in run(world, device_graphs):
        assert elapsed == pytest.approx(10, abs=0.5)


def graph_memory(driver: Driver) -> None:
    driver.start()
    stream = driver.out("cuStreamCreate", NON_BLOCKING)
    free = driver.free_memory()[0]

    def attribute(which: int) -> int:
        value = ctypes.c_uint64()
        driver.cuDeviceGetGraphMemAttribute(0, which, ctypes.byref(value))
        return value.value

    graph = driver.out("cuGraphCreate", 0)
    node = AllocNode(pool=PoolProps(alloc_type=1, location=Location(1, 0)), bytes=8 * MIB)
    driver.out("cuGraphAddMemAllocNode", graph, None, 0, ctypes.byref(node))
    assert node.pointer != 0 and driver.free_memory()[0] == free
    ready = driver.out("cuGraphInstantiateWithFlags", graph, 0)
    assert driver.code("cuGraphInstantiateWithFlags", ctypes.byref(ctypes.c_uint64()), graph, 0) == 1  # one at a time
    assert driver.free_memory()[0] == free
    driver.cuGraphLaunch(ready, stream)
    assert driver.free_memory()[0] == free - 8 * MIB and (attribute(0), attribute(2)) == (8 * MIB, 8 * MIB)
    assert driver.code("cuGraphLaunch", ready, stream) == 1  # its allocations are not freed
    driver.cuDeviceGraphMemTrim(0)
    assert attribute(2) == 8 * MIB
    driver.cuMemFreeAsync(node.pointer, stream)
    assert (attribute(0), attribute(2)) == (8 * MIB, 8 * MIB)
    driver.cuGraphLaunch(ready, stream)
    driver.cuMemFreeAsync(node.pointer, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuDeviceGraphMemTrim(0)
    assert attribute(2) == 0 and driver.free_memory()[0] == free


def test_graph_memory_is_reserved_from_first_launch_until_trimmed(world: World) -> None:
    run(world, graph_memory)


def begin_capture(driver: Driver, mode: int = 0) -> int:
    stream = driver.out("cuStreamCreate", 0)
    driver.cuStreamBeginCapture_v2(stream, mode)
    return stream


def end_capture(driver: Driver, stream: int) -> int:
    graph = ctypes.c_uint64()
    driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    return graph.value


def capture_status(driver: Driver, stream: int) -> int:
    status = ctypes.c_int(-1)
    driver.cuStreamIsCapturing(stream, ctypes.byref(status))
    return status.value


def captured(driver: Driver) -> float:
    driver.start()
    stream, side = begin_capture(driver), driver.out("cuStreamCreate", NON_BLOCKING)
    kernel = driver.kernel("k_2ms")
    driver.launch(kernel, stream)
    fork, join = driver.out("cuEventCreate", 2), driver.out("cuEventCreate", 2)
    driver.cuEventRecord(fork, stream)
    driver.cuStreamWaitEvent(side, fork, 0)
    driver.launch(kernel, side)
    driver.launch(kernel, stream)
    pointer = driver.out("cuMemAllocAsync", MIB, stream)
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuEventRecord(join, side)
    assert capture_status(driver, side) == 1
    driver.cuStreamWaitEvent(stream, join, 0)
    graph = end_capture(driver, stream)
    assert capture_status(driver, side) == 0
    count = ctypes.c_size_t()
    driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    assert count.value == 5
    ready = driver.out("cuGraphInstantiateWithFlags", graph, 0)
    assert driver.code("cuStreamQuery", stream) == 0  # nothing has run yet
    start = driver.record(stream)
    driver.cuGraphLaunch(ready, stream)
    end = driver.record(stream)
    driver.cuStreamSynchronize(stream)
    return driver.elapsed_ms(start, end)


def test_captured_work_runs_when_its_graph_is_launched(world: World) -> None:
    assert 4 <= run(world, captured) < 5


def unsafe_calls(driver: Driver) -> None:
    driver.start()
    done = driver.record()
    driver.cuCtxSynchronize()
    number = ctypes.byref(ctypes.c_uint64())

    def attempt(mode: int, act: Callable[[int], int]) -> tuple[int, int]:
        """Return the status of the call and of the end of the capture."""
        stream = begin_capture(driver, mode)
        code = act(stream)
        return code, driver.code("cuStreamEndCapture", stream, number)

    spoilt = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)
    for mode in (0, 1):
        assert attempt(mode, lambda _: driver.code("cuMemAlloc_v2", number, 1)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuEventQuery", done)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuCtxSynchronize")) == spoilt
    assert attempt(2, lambda _: driver.code("cuMemAlloc_v2", number, 1)) == (0, 0)
    for mode in (0, 1, 2):
        assert attempt(mode, lambda stream: driver.code("cuStreamSynchronize", stream)) == spoilt
        assert attempt(mode, lambda stream: driver.code("cuStreamQuery", stream)) == spoilt
        assert attempt(mode, lambda _: driver.code("cuStreamQuery", LEGACY)) == (CAPTURE_IMPLICIT, CAPTURE_INVALIDATED)

    def in_thread(mode: int) -> Callable[[int], int]:
        def act(_: int) -> int:
            codes: list[int] = []

            def other() -> None:
                driver.start()
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))
                codes.append(driver.code("cuEventQuery", done))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return codes[0]

        return act

    assert attempt(0, in_thread(0)) == spoilt
    assert attempt(0, in_thread(1)) == (0, 0)
    assert attempt(0, in_thread(2)) == (0, 0)
    assert attempt(1, in_thread(0)) == (0, 0)

    stream, side = begin_capture(driver), driver.out("cuStreamCreate", NON_BLOCKING)
    fork = driver.out("cuEventCreate", 2)
    driver.cuEventRecord(fork, stream)
    driver.cuStreamWaitEvent(side, fork, 0)
    driver.launch(driver.kernel("k_1us"), side)
    assert driver.code("cuStreamEndCapture", stream, number) == CAPTURE_UNJOINED


def test_unsafe_calls_invalidate_a_capture_by_its_mode(world: World) -> None:
    run(world, unsafe_calls)
