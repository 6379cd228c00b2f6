"""No way to launch leaves the meter: beside captures, as a process ends, in other contexts, without events to be had."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_guard.guests import Bench
from tests.fake.client import NON_BLOCKING, Driver

GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode
ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
KEYS = 1024  # PTHREAD_KEYS_MAX of Linux

pytestmark = pytest.mark.cc


def launch(driver: Driver, kernel: int, times: int, stream: int = 0) -> None:
    """Launch `k_5us_per_arg` with this argument, so that no prediction fits."""
    value = ctypes.c_uint32(times)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, params, None)


def learn(driver: Driver, stream: int = 0) -> int:
    """Return a kernel that the guard has learnt to be short."""
    kernel = driver.kernel("k_5us_per_arg")
    for _ in range(50):
        launch(driver, kernel, 1, stream)
        driver.cuStreamSynchronize(stream)
    return kernel


def charged(machine: Bench, work: Callable[[Driver], Any], *, share: float = 100) -> list[tuple[float, float]]:
    """Return the seconds that are charged for `work`, and those that it took, on each device."""
    job = machine.job(share=share)
    guest = machine.start(job, work)
    guest.result()
    executed = [machine.world.executed_ns(guest.pid, device) / 1e9 for device in range(len(machine.uuids))]
    return [(use.gpu_s, had) for use, had in zip(job.usage(), executed, strict=True)]


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
def test_capture_that_never_ends_leaves_other_work_measured(make_bench: Callable[..., Bench], mode: int) -> None:
    def work(driver: Driver) -> None:
        driver.start()
        stream, captured = driver.out("cuStreamCreate", NON_BLOCKING), driver.out("cuStreamCreate", NON_BLOCKING)
        kernel = learn(driver, stream)
        driver.cuStreamBeginCapture_v2(captured, mode)
        for _ in range(20):
            launch(driver, kernel, 1000, stream)
        time.sleep(0.2)
        status = ctypes.c_int()
        driver.cuStreamIsCapturing(captured, ctypes.byref(status))
        assert status.value == ACTIVE, "the capture is still whole"

    ((told, had),) = charged(make_bench(), work)
    assert had == pytest.approx(0.1, rel=0.1) and told == pytest.approx(had, rel=0.2)


def test_default_stream_is_left_alone_once_a_blocking_stream_joins_a_capture(make_bench: Callable[..., Bench]) -> None:
    """A mark in the default stream would invalidate the capture."""

    def work(driver: Driver) -> None:
        driver.start()
        origin, joined = driver.out("cuStreamCreate", NON_BLOCKING), driver.out("cuStreamCreate", 0)
        kernel, event, graph = learn(driver), driver.out("cuEventCreate", 0), ctypes.c_uint64()
        for _ in range(20):  # in most, the join comes before the reaper's next look
            driver.cuStreamBeginCapture_v2(origin, RELAXED)
            for _ in range(300):  # more than are measured one by one
                launch(driver, kernel, 10)
            driver.cuEventRecord(event, origin)
            driver.cuStreamWaitEvent(joined, event, 0)
            time.sleep(0.005)
            driver.cuEventRecord(event, joined)
            driver.cuStreamWaitEvent(origin, event, 0)
            driver.cuStreamEndCapture(origin, ctypes.byref(graph))

    machine = make_bench()
    machine.run(machine.job(), work)


def test_work_launched_as_the_process_ends_is_charged_and_held_to_its_share(make_bench: Callable[..., Bench]) -> None:
    def work(driver: Driver) -> None:
        driver.start()
        kernel, libc = driver.kernel("k_1ms"), ctypes.CDLL(None)

        def last(nothing: object) -> None:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                for _ in range(20):
                    driver.launch(kernel)
                driver.cuStreamSynchronize(0)

        ended = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(last)
        libc.__cxa_atexit(ended, None, None)  # before the guard's own, so after it
        driver.launch(kernel)
        driver.cuCtxSynchronize()
        libc.exit(0)

    machine = make_bench()
    job = machine.job(share=20)
    guest = machine.start(job, work)
    assert guest.wait() == 0
    told, had = job.usage()[0].gpu_s, machine.world.executed_ns(guest.pid) / 1e9
    assert told == pytest.approx(had, rel=0.1) and 0.02 < had < 0.4


def test_work_is_charged_to_the_device_of_its_stream(make_bench: Callable[..., Bench]) -> None:
    """A kernel of a library is launched in the context of the stream, whatever the thread's is."""

    def work(driver: Driver) -> None:
        driver.start(0)
        driver.cuCtxSetCurrent(driver.out("cuCtxCreate_v2", 0, 1))
        stream = driver.out("cuStreamCreate", NON_BLOCKING)
        driver.start(0)
        kernel = learn(driver)
        for _ in range(20):
            launch(driver, kernel, 1000, stream)
            launch(driver, kernel, 1)
        driver.cuStreamSynchronize(stream)
        driver.cuCtxSynchronize()

    (first, first_had), (second, second_had) = charged(make_bench(devices=2), work)
    assert second == pytest.approx(second_had, rel=0.1) and second_had == pytest.approx(0.1, rel=0.1)
    assert first == pytest.approx(first_had, abs=0.01) and first_had < 0.002


def test_work_is_charged_to_the_device_of_a_context_that_comes_and_goes(make_bench: Callable[..., Bench]) -> None:
    def work(driver: Driver) -> None:
        second, _ = driver.start(1), driver.start(0)
        kernel = learn(driver)

        def some() -> None:
            """Let the thread launch without a look at its context, then take device time."""
            for times in (1, 1, 1, 1000):
                launch(driver, kernel, times)

        for _ in range(20):
            some()
            driver.cuCtxPushCurrent_v2(second)
            some()
            driver.cuCtxPopCurrent_v2(None)
            launch(driver, kernel, 1000)
        for context in (driver.start(0), second):
            driver.cuCtxSetCurrent(context)
            driver.cuCtxSynchronize()

    (first, first_had), (second, second_had) = charged(make_bench(devices=2), work)
    assert first == pytest.approx(first_had, rel=0.1) and first_had == pytest.approx(0.2, rel=0.1)
    assert second == pytest.approx(second_had, rel=0.1) and second_had == pytest.approx(0.1, rel=0.1)


def test_capture_that_does_not_begin_leaves_none(make_bench: Callable[..., Bench]) -> None:
    """Beside a capture the guard asks about events in another mode, and looks at each launch."""
    machine = make_bench()

    def work(driver: Driver) -> int:
        driver.start()
        stream, graph = driver.out("cuStreamCreate", NON_BLOCKING), ctypes.c_uint64()
        driver.cuStreamBeginCapture_v2(stream, RELAXED)
        assert driver.code("cuStreamBeginCapture_v2", stream, RELAXED) != 0
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        driver.launch(driver.kernel("k_1ms"))
        asked = machine.world.calls("cuThreadExchangeStreamCaptureMode")
        driver.cuCtxSynchronize()
        return machine.world.calls("cuThreadExchangeStreamCaptureMode") - asked

    assert machine.run(machine.job(), work) == 0


def test_green_contexts_that_end_leave_nothing_in_flight(make_bench: Callable[..., Bench]) -> None:
    """Their streams need not be used with their contexts as the thread's own."""
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> int:
        driver.start()
        whole, part, rest = ((ctypes.c_ubyte * 144)() for _ in range(3))
        driver.cuDeviceGetDevResource(0, whole, 1)
        driver.cuDevSmResourceSplitByCount(part, ctypes.byref(ctypes.c_uint(1)), whole, rest, 0, 64)
        kernel = driver.kernel("k_100us")
        for _ in range(20):  # the reaper may see the end of some before they end
            green = driver.out("cuGreenCtxCreate", driver.out("cuDevResourceGenerateDesc", part, 1), 0, 1)
            driver.launch(kernel, driver.out("cuGreenCtxStreamCreate", green, NON_BLOCKING, 0))
            driver.cuGreenCtxDestroy(green)
        driver.launch(kernel)
        driver.cuCtxSynchronize()
        return int(sum(slot.under_way[0] for slot in job.pages.job.table) != 0)

    assert machine.run(job, work) == 0 and job.usage()[0].launches == 21


def test_reaper_marks_each_device_in_its_own_context(make_bench: Callable[..., Bench]) -> None:
    """The program computes on both devices at once, and then on the host without a call of the driver."""

    def work(driver: Driver) -> None:
        both = [driver.start(device) for device in (1, 0)]
        kernel = learn(driver)
        for _ in range(12):
            for context in both:
                driver.cuCtxSetCurrent(context)
                for times in (20, 20, 6000):
                    launch(driver, kernel, times)
            time.sleep(0.04)
        for context in both:
            driver.cuCtxSetCurrent(context)
            driver.cuCtxSynchronize()

    for told, had in charged(make_bench(devices=2), work, share=90):
        assert told == pytest.approx(had, rel=0.1) and had > 0.3


def test_event_that_cannot_be_recorded_is_not_used_again(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()

    def work(driver: Driver) -> int:
        driver.start()
        driver.launch(driver.kernel("k_100us"))
        driver.cuCtxSynchronize()
        return machine.world.calls("cuEventDestroy_v2")

    assert machine.run(machine.job(), work, fail="cuEventRecord:1=2") == 1


def test_program_without_thread_keys_is_charged_for_the_time_between_its_launches(
    make_bench: Callable[..., Bench],
) -> None:
    def work(driver: Driver) -> None:
        libc, key = ctypes.CDLL(None), ctypes.c_uint()
        libc.pthread_getspecific.restype = ctypes.c_void_p
        while libc.pthread_key_create(ctypes.byref(key), None) == 0:
            assert key.value < KEYS
        of_another = libc.pthread_getspecific(0)
        driver.start()
        kernel = driver.kernel("k_5us_per_arg")
        for _ in range(10):
            launch(driver, kernel, 2000)
            driver.cuCtxSynchronize()
        assert libc.pthread_getspecific(0) == of_another

    ((told, had),) = charged(make_bench(), work)
    assert had == pytest.approx(0.1, rel=0.1) and 0.8 * had < told < 3 * had
