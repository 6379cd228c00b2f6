"""Streams, events and host functions of the fake driver, as in the real one as far as known."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from tests.fake.child import run
from tests.fake.client import NON_BLOCKING, PER_THREAD, Driver, timed
from tests.fake.world import World

pytestmark = pytest.mark.cc

NOT_READY = 600
MakeWorld = Callable[..., World]


def in_order(driver: Driver) -> tuple[float, float]:
    driver.start()
    stream, kernel = driver.out("cuStreamCreate", NON_BLOCKING), driver.kernel("k_5ms")
    began = time.monotonic()
    driver.launch(driver.kernel("k_200ms"), stream)
    first = driver.record(stream)
    driver.launch(kernel, stream)
    driver.launch(kernel, stream)
    last = driver.record(stream)
    assert driver.code("cuEventQuery", last) == NOT_READY
    assert driver.code("cuStreamQuery", stream) == NOT_READY
    driver.cuStreamSynchronize(stream)
    assert driver.code("cuEventQuery", last) == 0
    return time.monotonic() - began, driver.elapsed_ms(first, last)


def test_stream_is_in_order_and_events_measure_device_time(world: World) -> None:
    took, elapsed = run(world, in_order)
    assert elapsed == pytest.approx(10, abs=0.001)
    assert took >= 0.21


def overlapping(driver: Driver) -> tuple[float, float]:
    driver.start()
    kernel = driver.kernel("k_100ms")
    streams = [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(4)]

    def aside() -> None:
        for stream in streams:
            driver.launch(kernel, stream)
        driver.cuCtxSynchronize()

    def through_default() -> None:
        blocking = driver.out("cuStreamCreate", 0)
        driver.launch(kernel, blocking)
        driver.launch(kernel)
        driver.launch(kernel, blocking)
        driver.cuStreamSynchronize(blocking)

    return timed(aside), timed(through_default)


def test_streams_overlap_except_around_the_default_stream(world: World) -> None:
    aside, through_default = run(world, overlapping)
    assert 0.1 <= aside < 0.4, "one after the other they would take 0.4 s"
    assert through_default >= 0.3


def per_thread(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_200ms")
    driver.launch(kernel, suffix="_ptsz")

    def launch() -> None:
        driver.start()
        driver.launch(kernel, PER_THREAD)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert driver.code("cuStreamQuery", PER_THREAD) == driver.code("cuStreamQuery_ptsz", 0) == NOT_READY
    return timed(driver.cuCtxSynchronize)


def test_threads_have_their_own_default_streams(world: World) -> None:
    assert run(world, per_thread) < 0.38, "one after the other they would take 0.4 s"


def dependent(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_40ms")
    one, other = (driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    start = driver.record(one)
    driver.launch(kernel, one)
    driver.cuStreamWaitEvent(other, driver.record(one), 0)
    driver.launch(kernel, other)
    end = driver.record(other)
    driver.cuEventSynchronize(end)
    return driver.elapsed_ms(start, end)


def test_stream_waits_for_an_event_of_another(world: World) -> None:
    assert run(world, dependent) >= 80


def grids(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_10us_per_block")
    start = driver.record()
    driver.launch(kernel, grid=200)
    end = driver.record()
    driver.cuEventSynchronize(end)
    assert (
        driver.code(
            "cuModuleGetFunction", ctypes.byref(ctypes.c_uint64()), driver.out("cuModuleLoadData", b""), b"gemm"
        )
        == 500
    )
    return driver.elapsed_ms(start, end)


def test_kernel_time_can_depend_on_its_blocks(world: World) -> None:
    assert run(world, grids) == pytest.approx(2, abs=0.3)


def fill_the_queue(driver: Driver) -> tuple[float, float]:
    driver.start()
    kernel, stream = driver.kernel("k_200ms"), driver.out("cuStreamCreate", 0)

    def launch(count: int) -> None:
        for _ in range(count):
            driver.launch(kernel, stream)

    return timed(lambda: launch(16)), timed(lambda: launch(1))


def test_launch_waits_on_a_full_queue(make_world: MakeWorld) -> None:
    room, full = run(make_world(queue_depth=16), fill_the_queue)
    assert room < 0.2 <= room + full


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def host_function(driver: Driver) -> list[int]:
    driver.start()
    stream = driver.out("cuStreamCreate", 0)
    order: list[int] = []
    done = driver.out("cuEventCreate", 0)
    called = threading.Event()

    def function(_: int | None) -> None:
        time.sleep(0.005)
        order.append(driver.code("cuEventQuery", done))
        called.set()

    pointer = CALLBACK(function)
    driver.launch(driver.kernel("k_1ms"), stream)
    driver.cuLaunchHostFunc(stream, pointer, None)
    driver.cuEventRecord(done, stream)
    assert called.wait(60)  # without another call of this thread
    driver.cuStreamSynchronize(stream)
    return [*order, driver.code("cuEventQuery", done)]


def test_host_function_runs_in_stream_order(world: World) -> None:
    assert run(world, host_function) == [NOT_READY, 0]
