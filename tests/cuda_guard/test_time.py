"""A job's GPU time: its share of a device beside other jobs, the gate, and captures.

Bounds are wide, for slow machines; `make bench-guard` measures the precision.
"""

import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_guard.guard import GuardedJob, share_of
from tests.cuda_guard.guests import Bench, Guest
from tests.fake.client import Driver

UNMATCHED = 903  # CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
FUTEX = {"x86_64": "202", "aarch64": "98"}  # number of the system call

pytestmark = pytest.mark.cc


def busy(kernel: str, stream: bool = False) -> Callable[[Driver], Any]:
    """Launch kernels without end."""

    def work(driver: Driver) -> None:
        driver.start()
        function, own = driver.kernel(kernel), driver.out("cuStreamCreate", 0) if stream else 0
        while True:
            for _ in range(20):
                driver.launch(function, own)

    return work


def until(ready: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := ready()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.001)
    return value


def is_kept(has: list[float], shares: list[float], more: float = 6) -> bool:
    """Check that no job exceeds its share. On a busy machine it may get less, since launching needs CPU time, but some of it."""
    return all(share / 10 < part < share + more for part, share in zip(has, shares, strict=True))


class Runners:
    """Processes that run until the test ends."""

    def __init__(self, machine: Bench) -> None:
        self.machine = machine
        self.guests: list[Guest] = []

    def start(self, job: GuardedJob | None, work: Callable[[Driver], Any]) -> Guest:
        guest = self.machine.start(job, work)
        self.guests.append(guest)
        until(lambda: self.machine.world.executed_ns(guest.pid) > 0, "it to work")
        return guest

    def shares(self, seconds: float) -> list[float]:
        """Return each process's part of the device, in per cent, by the device's own account."""
        before, began = self._executed(), time.monotonic()
        time.sleep(seconds)
        after, took = self._executed(), time.monotonic() - began
        return [(b - a) / took / 1e7 for a, b in zip(before, after, strict=True)]

    def _executed(self) -> list[int]:
        return [self.machine.world.executed_ns(guest.pid) for guest in self.guests]

    def end(self) -> None:
        for guest in self.guests:
            guest.kill(signal.SIGKILL)
            guest.wait()


@pytest.fixture
def runners(make_bench: Callable[..., Bench]) -> Any:
    made = Runners(make_bench())
    yield made
    made.end()


def test_share_is_kept(runners: Runners) -> None:
    """In real time; the precision for many kernels is tested in virtual time."""
    job = runners.machine.job(share=30)
    guest = runners.start(job, busy("k_500us"))
    runners.shares(0.5)
    assert is_kept(runners.shares(2), [30])
    told = job.usage()[0].gpu_s
    assert told == pytest.approx(runners.machine.world.executed_ns(guest.pid) / 1e9, rel=0.2, abs=0.05)


def test_three_jobs_keep_their_shares_together(runners: Runners) -> None:
    for share, kernel in ((45, "k_100us"), (30, "k_300us"), (15, "k_50us")):
        runners.start(runners.machine.job(share=share), busy(kernel))
    runners.shares(0.5)
    assert is_kept(runners.shares(3), [45, 30, 15])


def test_two_jobs_with_the_whole_device_get_equal_parts(runners: Runners) -> None:
    for share in (10, 90):
        runners.start(runners.machine.job(share=share), busy("k_100us"))
    runners.shares(0.5)
    small, large = runners.shares(3)
    assert 5 < large / small < 13


def test_idle_time_is_lent_and_taken_back(runners: Runners) -> None:
    """Up to 90 % is lent, and taken back as soon as the other job works again."""
    machine = runners.machine
    first = machine.job(share=30, limit=90)
    runners.start(first, busy("k_100us"))
    until(lambda: share_of(first.pages, 0) == 90, "the idle time to be lent")
    assert is_kept(runners.shares(1), [90])
    second = machine.job(share=60, limit=60)
    runners.start(second, busy("k_100us"))
    until(lambda: share_of(first.pages, 0) == 30, "it to be taken back")
    runners.shares(0.3)
    assert is_kept(runners.shares(2), [30, 60])
    runners.guests.pop().kill(signal.SIGKILL)
    until(lambda: share_of(first.pages, 0) == 90, "it to be lent again")


def test_share_changes_while_the_job_runs(runners: Runners) -> None:
    job = runners.machine.job(share=10)
    runners.start(job, busy("k_100us"))
    for share in (10, 50, 10):
        job.set_share(0, share, share)
        runners.shares(0.3)
        assert is_kept(runners.shares(1), [share])


def test_all_processes_of_a_job_draw_from_one_share(runners: Runners) -> None:
    job = runners.machine.job(share=30)
    for _ in range(3):
        runners.start(job, busy("k_100us"))
    runners.shares(0.5)
    assert is_kept([sum(runners.shares(2))], [30])


def test_overlapping_streams_are_charged_once(runners: Runners) -> None:
    """Two streams of one process run concurrently: the union of their times counts."""

    def work(driver: Driver) -> None:
        driver.start()
        function, streams = driver.kernel("k_1ms"), [driver.out("cuStreamCreate", 1) for _ in range(2)]
        while True:
            for stream in streams:
                driver.launch(function, stream)

    job = runners.machine.job(share=40)
    guest = runners.start(job, work)
    runners.shares(0.5)
    assert is_kept(runners.shares(2), [40])
    assert job.usage()[0].gpu_s == pytest.approx(runners.machine.world.executed_ns(guest.pid) / 1e9, rel=0.25)


def test_job_that_waits_after_each_launch_is_held_to_its_share(runners: Runners) -> None:
    """HAMi #2863: it was never throttled."""

    def work(driver: Driver) -> None:
        driver.start()
        function = driver.kernel("k_2ms")
        while True:
            driver.launch(function)
            driver.cuStreamSynchronize(0)

    runners.start(runners.machine.job(share=25), work)
    runners.shares(0.5)
    assert is_kept(runners.shares(2), [25])


def test_threads_of_a_process_draw_from_one_share(runners: Runners) -> None:
    def work(driver: Driver) -> None:
        context, function = driver.start(), driver.kernel("k_200us")

        def churn() -> None:
            driver.cuCtxSetCurrent(context)
            stream = driver.out("cuStreamCreate", 1)
            while True:
                driver.launch(function, stream)

        for _ in range(4):
            threading.Thread(target=churn, daemon=True).start()
        time.sleep(600)

    runners.start(runners.machine.job(share=30), work)
    runners.shares(0.5)
    assert is_kept(runners.shares(2), [30], more=10)


# --- the gate


def test_nothing_starts_at_a_closed_gate_and_work_in_flight_ends_soon(runners: Runners) -> None:
    job = runners.machine.job(window_ms=4)
    guest = runners.start(job, busy("k_100us"))
    world = runners.machine.world
    runners.shares(0.3)
    before = world.executed_ns(guest.pid)
    job.set_gate(closed=True)
    until(lambda: world.pending(guest.pid) == 0, "what was under way to end")
    done = world.executed_ns(guest.pid)
    assert done - before < 15e6, "at most the window and a kernel, with a margin for a slow machine"
    launches = world.calls("cuLaunchKernel")
    time.sleep(0.1)
    assert world.executed_ns(guest.pid) == done and world.calls("cuLaunchKernel") == launches
    job.set_gate(closed=False)
    until(lambda: world.executed_ns(guest.pid) > done + 10e6, "it to go on")


def waits_in_futex(pid: int) -> bool:
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == FUTEX[platform.machine()]


def test_copies_wait_at_the_gate_and_signals_do_not_open_it(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()
    reading, writing = os.pipe()

    def work(driver: Driver) -> None:
        driver.start()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        pointer = driver.out("cuMemAlloc_v2", 1 << 20)
        data = ctypes.create_string_buffer(16)
        os.write(writing, b"r")
        until(lambda: job.pages.policy.gate & 1, "the gate to close")
        driver.cuMemcpyHtoD_v2(pointer, data, 16)

    guest = machine.start(job, work)
    os.read(reading, 1)
    job.set_gate(closed=True)
    for _ in range(20):
        until(lambda: waits_in_futex(guest.pid) or machine.world.calls("cuMemcpyHtoD_v2"), "the guest to wait")
        guest.kill(signal.SIGUSR1)
        time.sleep(0.005)
    assert machine.world.calls("cuMemcpyHtoD_v2") == 0
    job.set_gate(closed=False)
    guest.result()
    assert machine.world.calls("cuMemcpyHtoD_v2") == 1


def test_guest_cannot_open_its_gate(make_bench: Callable[..., Bench]) -> None:
    """The policy is mapped read-only: a write ends the process and leaves the policy unchanged."""
    machine = make_bench()
    job = machine.job()
    job.set_gate(closed=True)

    def work(driver: Driver) -> None:
        driver.cuInit(0)
        maps = [line for line in open("/proc/self/maps") if line.rstrip().endswith("/policy")]  # noqa: SIM115, PTH123
        written = [line for line in maps if line.split()[1].startswith("r--")]
        assert len(written) == 1
        ctypes.memset(int(written[0].split("-")[0], 16) + 24, 0, 4)

    assert machine.start(job, work).wait() == -signal.SIGSEGV
    assert job.pages.policy.gate & 1


def test_stopped_daemon_does_not_block_turns(runners: Runners) -> None:
    """Without a daemon turns are ignored, and shares still hold."""
    machine = runners.machine
    jobs = [machine.job(share=40), machine.job(share=40)]
    for job in jobs:
        runners.start(job, busy("k_100us"))
    runners.shares(0.5)
    for job in jobs:
        machine.guard._host.leave(job.pages)
    runners.shares(1.5)
    for share in runners.shares(2):
        assert 15 < share < 60


# --- capture


def test_guard_leaves_a_capture_whole(make_bench: Callable[..., Bench]) -> None:
    """HAMi #1360: a call that a capture forbids would invalidate it. Captured launches run later and are charged then."""
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> Any:
        driver.start()
        stream, function = driver.out("cuStreamCreate", 1), driver.kernel("k_1ms")
        for _ in range(10):
            driver.launch(function, stream)
        driver.cuStreamBeginCapture_v2(stream, 0)
        begun = machine.world.calls("cuEventRecord")
        for _ in range(50):
            driver.launch(function, stream)
        time.sleep(0.02)  # the reaper looks at what was launched before
        assert machine.world.calls("cuEventRecord") == begun
        graph = ctypes.c_uint64()
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        driver.cuStreamSynchronize(stream)
        before = machine.world.executed_ns(os.getpid())
        executable = driver.out("cuGraphInstantiateWithFlags", graph, 0)
        for _ in range(3):
            driver.cuGraphLaunch(executable, stream)
        driver.cuStreamSynchronize(stream)
        return machine.world.executed_ns(os.getpid()) - before

    executed = machine.run(job, work)
    assert executed == pytest.approx(150e6, rel=0.1)
    assert job.usage()[0].gpu_s == pytest.approx(0.16, rel=0.3)


def test_capture_ends_only_on_the_stream_where_it_began(make_bench: Callable[..., Bench]) -> None:
    """A stream that joined the capture cannot end it. Work beside it is measured by calls that do not invalidate it."""
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> None:
        driver.start()
        origin, joined, other = (driver.out("cuStreamCreate", 1) for _ in range(3))
        function, graph, event = driver.kernel("k_100us"), ctypes.c_uint64(), driver.out("cuEventCreate", 0)
        driver.cuStreamBeginCapture_v2(origin, 0)
        driver.cuEventRecord(event, origin)
        driver.cuStreamWaitEvent(joined, event, 0)
        assert driver.code("cuStreamEndCapture", joined, ctypes.byref(graph)) == UNMATCHED
        asked = machine.world.calls("cuEventQuery")
        for _ in range(100):
            driver.launch(function, other)
        until(lambda: machine.world.executed_ns(os.getpid()) >= 9_000_000, "the work beside it")
        time.sleep(0.02)
        assert machine.world.calls("cuEventQuery") > asked
        driver.cuEventRecord(event, joined)
        driver.cuStreamWaitEvent(origin, event, 0)
        driver.cuStreamEndCapture(origin, ctypes.byref(graph))
        driver.cuCtxSynchronize()

    machine.run(job, work)
    assert job.usage()[0].launches == 100 and job.usage()[0].gpu_s == pytest.approx(0.01, rel=0.3)


def test_unmeasurable_work_is_charged_as_predicted(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> None:
        driver.start()
        function = driver.kernel("k_100us")
        for _ in range(3):
            driver.launch(function)
        driver.cuCtxSynchronize()

    machine.run(job, work, fail="cuEventCreate:1=2")
    assert job.usage()[0].launches == 3 and job.usage()[0].gpu_s >= 0.0003


def test_graph_launch_is_charged(runners: Runners) -> None:
    """HAMi #1445: graphs were not limited."""

    def work(driver: Driver) -> None:
        driver.start()
        stream, function, graph = driver.out("cuStreamCreate", 1), driver.kernel("k_50us"), ctypes.c_uint64()
        driver.cuStreamBeginCapture_v2(stream, 0)
        for _ in range(20):
            driver.launch(function, stream)
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        executable = driver.out("cuGraphInstantiateWithFlags", graph, 0)
        while True:
            driver.cuGraphLaunch(executable, stream)

    runners.start(runners.machine.job(share=30), work)
    runners.shares(0.5)
    assert is_kept(runners.shares(2), [30])


def test_ptds_flag(make_bench: Callable[..., Bench]) -> None:
    """A program built with a default stream per thread gets its own stream, not the legacy one (HAMi ignored the flag)."""
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> Any:
        driver.start()
        function = driver.kernel("k_1ms")
        _, address = driver.address("cuLaunchKernel", 7000, 2)
        assert address == driver.export("cuLaunchKernel_ptsz") != driver.export("cuLaunchKernel")
        driver.launch(function, suffix="_ptsz")
        driver.cuCtxSynchronize()
        return machine.world.calls("cuLaunchKernel_ptsz"), machine.world.calls("cuLaunchKernel")

    assert machine.run(job, work) == (1, 0)


def test_extended_and_cooperative_launches_are_charged(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()

    class Config(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
            ("stream", ctypes.c_void_p),
            ("attrs", ctypes.c_void_p),
            ("count", ctypes.c_uint),
        ]

    def work(driver: Driver) -> None:
        driver.start()
        function, config = driver.kernel("k_1ms"), Config(1, 1, 1, 1, 1, 1)
        for _ in range(20):
            driver.cuLaunchKernelEx(ctypes.byref(config), function, None, None)
            driver.cuLaunchCooperativeKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, None)
        driver.cuCtxSynchronize()

    machine.run(job, work)
    usage = job.usage()[0]
    assert usage.launches == 40 and usage.gpu_s == pytest.approx(0.04, rel=0.3)


def test_grid_of_any_size_is_counted_correctly(make_bench: Callable[..., Bench]) -> None:
    """HAMi multiplied its three sizes in 32 bits."""
    machine = make_bench()
    job = machine.job(share=50)

    def work(driver: Driver) -> None:
        driver.start()
        function = driver.kernel("k_1ms")
        for _ in range(5):
            driver.call("cuLaunchKernel", function, 2**31 - 1, 65535, 65535, 1, 1, 1, 0, 0, None, None)
        driver.cuCtxSynchronize()

    machine.run(job, work)
    assert job.usage()[0].gpu_s == pytest.approx(0.005, rel=0.6)


def test_stream_destroyed_with_unmeasured_work(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job()

    def work(driver: Driver) -> None:
        driver.start()
        function = driver.kernel("k_100us")
        for _ in range(50):
            stream = driver.out("cuStreamCreate", 1)
            for _ in range(3):
                driver.launch(function, stream)
            driver.cuStreamDestroy_v2(stream)
        driver.cuCtxSynchronize()

    machine.run(job, work)
    assert job.usage()[0].launches == 150


def test_context_destroyed_midway_leaves_nothing_in_flight(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(share=50)

    def work(driver: Driver) -> None:
        driver.cuInit(0)
        for _ in range(5):
            context = driver.out("cuCtxCreate_v2", 0, 0)
            function = driver.kernel("k_1ms")
            for _ in range(5):
                driver.launch(function)
            driver.cuCtxDestroy_v2(context)
        assert all(slot.under_way[0] == 0 for slot in job.pages.job.table)

    machine.run(job, work)


def test_child_forked_while_others_launch(make_bench: Callable[..., Bench]) -> None:
    machine = make_bench()
    job = machine.job(share=50)

    def work(driver: Driver) -> None:
        driver.start()
        function = driver.kernel("k_100us")
        for _ in range(5):
            for _ in range(50):
                driver.launch(function)
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        driver.cuCtxSynchronize()

    machine.run(job, work)
    assert job.usage()[0].launches == 250
