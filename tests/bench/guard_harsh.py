"""Measure the guard's promises on devices that are as inconvenient as real ones: parts of `make bench-guard`."""

import ctypes
import math
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

from cuda_guard.auditor import Auditor, Claim
from cuda_guard.build import find_compiler
from cuda_guard.guard import GuardedJob
from cuda_guard.nvml import Nvml
from cuda_guard.page import ALONE_WINDOW_MS, WINDOW_MS
from tests.bench.guard_machine import (
    PATIENCE_S,
    SLICING,
    Party,
    Row,
    Work,
    answer,
    at_work,
    between,
    machine,
    observe,
    percentile,
)
from tests.bench.harness import row
from tests.cuda_guard import zoo
from tests.cuda_guard.guests import MIB, Bench, Guest
from tests.cuda_guard.test_time import busy
from tests.fake.client import NON_BLOCKING, Driver
from tests.fake.profiles import HARSH

PAPER_POINTS = (
    0.69  # mean error of 45, 30 and 15 % of a T4, constant kernels (the paper that this project follows, its table 6)
)
ACTIVE_S = 0.02  # a job counts as active for so long after its last launch (arbiter.c)
LIMIT = 90.0  # the part of a device that is lent at most
TRAINING_US = (50, 100, 200, 500, 1000, 2000)
# The longest that a kernel is taken to run beyond its nominal time: slow, three sigmas late, at the lowest clock.
LONGEST = HARSH.slow_times * math.exp(3 * HARSH.spread_ppm / 1e6) / (HARSH.clock_least_ppm / 1e6)


# --- shares


def shares(seconds: float) -> list[Row]:
    """Measure three tenants with 45, 30 and 15 %: errors of the whole time and of its seconds, and what they are charged."""
    goals = (45.0, 30.0, 15.0)
    parties: list[Party] = [*zip(goals, (busy("k_100us"), busy("k_300us"), busy("k_50us")), strict=True)]

    def errors(guarded: bool, seconds: float) -> tuple[list[float], list[float], list[float]]:
        with machine() as node, at_work(node, parties, guarded) as there:
            guests, before = [guest for _, guest in there], [charged(job) for job, _ in there]
            seen = observe(node, guests, seconds, 1)
            parts = [
                (charged(job) - paid) * 1e9 / (last - first)
                for (job, _), paid, first, last in zip(there, before, seen[0][1], seen[-1][1], strict=True)
            ]
        whole = [abs(share - goal) for share, goal in zip(between(seen[0], seen[-1]), goals, strict=True)]
        each = [between(a, b) for a, b in pairwise(seen)]
        return whole, [abs(share - goal) for second in each for share, goal in zip(second, goals, strict=True)], parts

    ours, theirs = errors(True, seconds), errors(False, min(seconds, 5))
    mean, worst = statistics.mean(ours[0]), max(ours[1])
    over = row(
        f"shares 45/30/15: mean error over {seconds:g} s",
        ours[0],
        "points",
        goal=f"<= 1.0 points (paper: {PAPER_POINTS}, constant kernels)",
        met=mean <= 1,
        peer=SLICING,
        peer_values=[statistics.mean(theirs[0])],
    )
    second = row("shares 45/30/15: worst second", ours[1], "points", goal="<= 5 points", met=worst <= 5, peer=SLICING,
                 peer_values=[max(theirs[1])])  # fmt: skip
    return [{**over, "value": round(mean, 4)}, {**second, "value": round(worst, 4)}, truth("shares 45/30/15", ours[2])]


def charged(job: GuardedJob | None) -> float:
    """Return the seconds of the device that the guard has charged to the job; 0 without a guard."""
    return job.usage()[0].gpu_s if job else 0.0


def truth(what: str, parts: Sequence[float]) -> Row:
    met = all(0.97 <= part <= 1.03 for part in parts)
    worst = max(parts, key=lambda part: abs(part - 1))
    return {
        **row(f"{what}: charged over true, the worst", parts, "", goal="0.97 to 1.03", met=met),
        "value": round(worst, 4),
    }


def mixed(us: int, every: int, times: int, at_random: bool) -> Work:
    """Launch one kernel without end, one of every so many launches that many times longer by its parameter."""

    def work(driver: Driver) -> None:
        driver.start()
        kernel, rng, count = driver.kernel(f"k_{us}us_per_arg"), Random(7), 0
        numbers = [ctypes.c_uint32(1), ctypes.c_uint32(times)]
        params = [(ctypes.c_void_p * 1)(ctypes.addressof(number)) for number in numbers]
        while True:
            count += 1
            is_long = rng.randrange(every) == 0 if at_random else count % every == 0
            driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, params[is_long], None)

    return work


def by_block(driver: Driver) -> None:
    """Launch one kernel with blocks of several sizes, which decide its time."""
    driver.start()
    kernel, rng = driver.kernel("k_2us_per_thread"), Random(7)
    while True:
        driver.cuLaunchKernel(kernel, 1, 1, 1, rng.choice((1, 8, 64, 512)), 1, 1, 0, 0, None, None)


def side_by_side(driver: Driver) -> None:
    """Launch into four streams at once."""
    driver.start()
    kernels = [driver.kernel(f"k_{us}us") for us in (30, 70, 150, 400)]
    streams = [driver.out("cuStreamCreate", NON_BLOCKING) for _ in range(4)]
    while True:
        for kernel, stream in zip(kernels, streams, strict=True):
            driver.launch(kernel, stream)


def fills(driver: Driver) -> None:
    """Fill and copy memory of the device, and launch no kernel."""
    driver.start()
    size = 256 * MIB
    one, other = (driver.out("cuMemAlloc_v2", size) for _ in range(2))
    while True:
        driver.cuMemsetD8Async(one, 0, size, 0)
        driver.cuMemcpyDtoDAsync_v2(other, one, size, 0)


MIXES: dict[str, Work] = {
    "constant": mixed(20, 1, 1, False),
    "every 2nd launch 10 times longer": mixed(20, 2, 10, False),
    "one in 2 at random 10 times longer": mixed(20, 2, 10, True),
    "every 8th launch 50 times longer": mixed(20, 8, 50, False),
    "one in 8 at random 50 times longer": mixed(20, 8, 50, True),
    "one in 5 at random 100 times longer": mixed(20, 5, 100, True),
    "every 13th launch 100 times longer": mixed(20, 13, 100, False),
    "by block size": by_block,
    "four streams": side_by_side,
    "fills and copies within the device": fills,
}


def mixes(seconds: float) -> list[Row]:
    """Measure what a job with a share of 30 % gets of the device, and is charged, for each mix of kernels."""
    rows: list[Row] = []
    for what, work in MIXES.items():
        with machine() as node, at_work(node, [(30.0, work)]) as there:
            job, guest = there[0]
            before = charged(job)
            seen = observe(node, [guest], seconds, 1)
            paid, had = charged(job) - before, (seen[-1][1][0] - seen[0][1][0]) / 1e9
        got = between(seen[0], seen[-1])[0]
        each = [between(a, b)[0] for a, b in pairwise(seen)]
        line = row(
            f"share of 30 %, {what}: the device gives", each, "%", goal="28.5 to 31.5 %", met=28.5 <= got <= 31.5
        )
        rows += [{**line, "value": round(got, 4)}, truth(f"share of 30 %, {what}", [paid / had])]
    return rows


# --- jobs that wait


def copied_back(driver: Driver, stream: int, memory: int) -> None:
    driver.cuMemcpyDtoHAsync_v2(ctypes.create_string_buffer(64), memory, 64, stream)
    driver.cuStreamSynchronize(stream)


def copied_at_once(driver: Driver, _: int, memory: int) -> None:
    driver.cuMemcpyDtoH_v2(ctypes.create_string_buffer(64), memory, 64)


def polled(driver: Driver, stream: int, _: int) -> None:
    while driver.code("cuStreamQuery", stream):
        time.sleep(0.0002)


def event_polled(driver: Driver, stream: int, _: int) -> None:
    event = driver.record(stream)
    while driver.code("cuEventQuery", event):
        time.sleep(0.0002)
    driver.cuEventDestroy_v2(event)


def event_awaited(driver: Driver, stream: int, _: int) -> None:
    event = driver.record(stream)
    driver.cuEventSynchronize(event)
    driver.cuEventDestroy_v2(event)


def called_back(driver: Driver, stream: int, _: int) -> None:
    done = threading.Event()
    function = zoo.CALLBACK(lambda _: done.set())
    driver.cuLaunchHostFunc(stream, function, None)
    done.wait()


Way = Callable[[Driver, int, int], object]  # waits for a stream; the last is memory of the device
WAYS: dict[str, Way] = {
    "stream synchronise": lambda driver, stream, _: driver.cuStreamSynchronize(stream),
    "context synchronise": lambda driver, *_: driver.cuCtxSynchronize(),
    "event synchronise": event_awaited,
    "stream query": polled,
    "event query": event_polled,
    "blocking copy to the host": copied_at_once,
    "copy in the stream": copied_back,
    "function on the host": called_back,
    "no wait": lambda *_: None,
}
PAUSE_S, STEP_LAUNCHES = 0.05, 50


def stepper(wait: Way) -> Work:
    """Launch 5 ms of kernels, wait for them, and rest for 50 ms, without end."""

    def work(driver: Driver) -> None:
        driver.start()
        kernel, memory = driver.kernel("k_100us"), driver.out("cuMemAlloc_v2", MIB)
        stream = driver.out("cuStreamCreate", 0)  # so that copies in the default stream wait for it
        while True:
            for _ in range(STEP_LAUNCHES):
                driver.launch(kernel, stream)
            wait(driver, stream, memory)
            time.sleep(PAUSE_S)

    return work


def ways(seconds: float) -> list[Row]:
    """Measure a job that works in steps beside one that borrows what it leaves, for each way to wait for a step's end.

    The stepper's due is what it uses alone. The borrower's due: its own half while the stepper is active, which it is for
    ACTIVE_S after a step, and all up to the limit otherwise.
    """
    rows: list[Row] = []
    for what, wait in WAYS.items():
        with machine() as node, at_work(node, [(45.0, stepper(wait))], guarded=False) as there:
            seen = observe(node, [there[0][1]], min(seconds, 15), min(seconds, 15))
        due = between(seen[0], seen[-1])[0]
        cycle_s = PAUSE_S / (1 - due / 100)
        lent = 45 + (LIMIT - 45) * max(0.0, 1 - due / 100 - ACTIVE_S / cycle_s)
        with machine() as node:
            jobs = [node.job(share=45, limit=LIMIT) for _ in range(2)]
            guests = [node.start(job, work) for job, work in zip(jobs, (stepper(wait), busy("k_100us")), strict=True)]
            try:
                settle(node, guests)
                seen = observe(node, guests, seconds, 1)
            finally:
                stop(guests)
        has = between(seen[0], seen[-1])
        for who, owed, got in (("stepper", due, has[0]), ("borrower", lent, has[1])):
            line = row(
                f"{who}'s due less what it has, {what}", [owed - got], "points", goal="<= 3 points", met=owed - got <= 3
            )
            rows.append({**line, "due": round(owed, 2), "has": round(got, 2)})
    return rows


def settle(node: Bench, guests: Sequence[Guest]) -> None:
    """Wait until all work, and a second for first launches."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(node.world.executed_ns(guest.pid) for guest in guests):
        assert time.monotonic() < deadline, "a job does not begin to work"
        time.sleep(0.01)
    time.sleep(1)


def stop(guests: Sequence[Guest]) -> None:
    for guest in guests:
        guest.kill(signal.SIGKILL)
        guest.wait()


def gated(seconds: float) -> list[Row]:
    """Measure work that is queued behind the host, guarded over bare; a hang is a miss."""
    rows = []
    for gate in (zoo.by_function, zoo.by_value, zoo.by_event):
        bare, ours, missed = [], [], 0

        def work(driver: Driver, gate: zoo.Gate = gate) -> float:
            return zoo.gated_s(driver, gate)

        for _ in range(10 if seconds >= 30 else 3):
            with machine() as node:
                bare.append(node.run(None, work))
            with machine() as node:
                took = answer(node.start(node.job(window_ms=ALONE_WINDOW_MS), work), 5)
            ours += [] if took is None else [took]
            missed += took is None
            if missed == 3:
                break
        ratios = [took / statistics.median(bare) for took in ours]
        how = gate.__name__.replace("_", " ")
        rows.append(
            row(
                f"work queued behind the host, {how}, over bare",
                ratios,
                "times",
                goal="<= 1.2 times",
                met=bool(ratios) and statistics.median(ratios) <= 1.2,
                missed=missed,
                peer="bare, s",
                peer_values=bare,
            )
        )
    return rows


# --- costs


def step_times(count: int) -> Work:
    """Return the seconds of steps of 100 kernels of 10 us, which the first step loads."""

    def work(driver: Driver) -> list[float]:
        driver.start()
        kernels, stream, taken = [driver.kernel("k_10us") for _ in range(100)], driver.out("cuStreamCreate", 0), []
        for _ in range(count):
            begun = time.monotonic()
            for kernel in kernels:
                driver.launch(kernel, stream)
            driver.cuStreamSynchronize(stream)
            taken.append(time.monotonic() - begun)
        return taken

    return work


def late_steps(taken: Sequence[float], usual: float) -> int:
    """Return after how many steps the median of three in turn is no more than a fifth above the usual time; all if never."""
    for n in range(len(taken) - 2):
        if statistics.median(taken[n : n + 3]) <= 1.2 * usual:
            return n
    return len(taken)


def first_launches(seconds: float) -> list[Row]:
    """Count the steps that are slow after the step that loads the kernels."""
    count, rows = 100, []
    for share in (100.0, 40.0):
        late = []
        for _ in range(5 if seconds >= 30 else 2):
            with machine(clock_ns=0) as node:
                bare = node.run(None, step_times(count))
            with machine(clock_ns=0) as node:
                job = node.job(share=share, window_ms=ALONE_WINDOW_MS if share == 100 else WINDOW_MS)
                ours = node.run(job, step_times(count))
            late.append(late_steps(ours[1:], statistics.median(bare[-50:]) * 100 / share))
        rows.append(
            row(
                f"slow steps after the first launches, share of {share:g} %",
                late,
                "steps",
                goal="<= 3 steps",
                met=max(late) <= 3,
            )
        )
    return rows


def training(driver: Driver) -> float:
    """Return the seconds of steps, each with a synchronization at its end."""
    driver.start()
    kernels = [driver.kernel(f"k_{us}us") for us in TRAINING_US]

    def step() -> None:
        for kernel in (*kernels, *reversed(kernels), *kernels[:3]):
            driver.launch(kernel)
        driver.cuCtxSynchronize()

    return lasting(step, warmup=15, count=30)


def small_kernels(driver: Driver) -> float:
    driver.start()
    kernel = driver.kernel("k_20us")

    def burst() -> None:
        for _ in range(5000):
            driver.launch(kernel)
        driver.cuCtxSynchronize()

    return lasting(burst, warmup=1, count=3)


def lasting(work: Callable[[], None], warmup: int, count: int) -> float:
    for _ in range(warmup):
        work()
    begun = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - begun


def overhead(seconds: float) -> list[Row]:
    """Measure the overhead for a job with the whole device, in alternating runs with the same seed and a locked clock."""
    rows = []
    for what, work in (
        ("training: kernels of 50 us to 2 ms, a wait after each step", training),
        ("small kernels: 20 us each, one after another", small_kernels),
    ):
        plain, guarded = [], []
        for _ in range(35 if seconds >= 30 else 9):
            with machine(clock_ns=0) as node:
                plain.append(node.run(None, work))
            with machine(clock_ns=0) as node:
                guarded.append(node.run(node.job(window_ms=ALONE_WINDOW_MS), work))
        values = [(ours / theirs - 1) * 100 for ours, theirs in zip(guarded, plain, strict=True)]
        low, high = bootstrap(values)
        line = row(f"overhead at 100 %, {what}", values, "%", goal="<= 1 % (paper: 1.75 %, KubeShare: 2.80 %)",
                   met=statistics.median(values) <= 1, peer="the driver alone, s", peer_values=plain)  # fmt: skip
        rows.append({**line, "ci95": [round(low, 4), round(high, 4)]})
    return rows


def bootstrap(values: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median (percentile bootstrap: Efron and Tibshirani, 1993)."""
    rng = Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[round(rounds * 0.025)], medians[round(rounds * 0.975) - 1]


# --- the gate


def closings(seconds: float) -> list[Row]:
    """Measure the time from closing the gate until the last launched kernel has ended."""
    rows: list[Row] = []
    count = 250 if seconds >= 30 else 30
    for window_ms in (WINDOW_MS, ALONE_WINDOW_MS):
        with machine() as node, at_work(node, [(100, busy("k_100us"))], window_ms=window_ms) as there:
            job, guest = there[0]
            assert job is not None
            taken = close_often(node, job, [guest], window_ms, count)
        most = window_ms + 0.1 * LONGEST
        rows.append(closed(f"window {window_ms:g} ms", taken, most, f"window + one kernel, at most {most:.1f} ms"))
    return rows


def closed(what: str, taken: Sequence[float], most: float, goal: str) -> Row:
    p99 = percentile(taken, 0.99)
    line = row(f"gate closed -> last kernel done (P99), {what}", taken, "ms", goal=f"<= {goal}", met=p99 <= most)
    return {**line, "value": round(p99, 4), "p50": round(statistics.median(taken), 4)}


QUIET_S, GIVE_UP_S = 0.016, 0.5  # the devices are idle after the window and this; those that spin are given up


def close_often(node: Bench, job: GuardedJob, guests: Sequence[Guest], window_ms: float, count: int) -> list[float]:
    """Return the ms from closing the gate to the end of the job's last work, by the devices' own account."""
    taken: list[float] = []
    rng, devices = Random(1), range(node.world.devices)
    for _ in range(count):
        time.sleep(rng.uniform(0.01, 0.03))
        begun = last = node.world.now_ns()
        job.set_gate(closed=True)
        while node.world.now_ns() < min(last + (window_ms / 1e3 + QUIET_S) * 1e9, begun + GIVE_UP_S * 1e9):
            time.sleep(0.002)
            last = max(begun, *(node.world.last_ns(guest.pid, device) for guest in guests for device in devices))
        job.set_gate(closed=False)
        taken.append((last - begun) / 1e6)
    return taken


def rank(device: int, group: int) -> Work:
    """Work as a rank of a gang with one GPU each: some kernels, then a collective, without end."""

    def work(driver: Driver) -> None:
        driver.start(device)
        kernel, reduce, stream = driver.kernel("k_200us"), driver.kernel("k_1ms_of2"), driver.out("cuStreamCreate", 1)
        number = ctypes.c_uint32(group)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(number))
        while True:
            for _ in range(3):
                driver.launch(kernel, stream)
            driver.cuLaunchKernel(reduce, 1, 1, 1, 1, 1, 1, 0, stream, params, None)
            driver.cuStreamSynchronize(stream)

    return work


def gangs(seconds: float) -> list[Row]:
    """Measure the gate for a job with a process for each of two GPUs, and whether two such jobs both go on."""
    count = 100 if seconds >= 30 else 20
    with machine(devices=2) as node:
        job = node.job(window_ms=WINDOW_MS)
        guests = [node.start(job, rank(device, 1)) for device in range(2)]
        try:
            settle_on(node, guests)
            taken = close_often(node, job, guests, WINDOW_MS, count)
        finally:
            stop(guests)
    most = WINDOW_MS + 0.2 * LONGEST + 1.0 * LONGEST
    rows = [closed("a gang on two GPUs", taken, most, f"window + one kernel + one collective, at most {most:.1f} ms")]
    with machine(devices=2) as node:
        jobs = [node.job(share=45) for _ in range(2)]
        guests = [node.start(job, rank(device, group)) for group, job in enumerate(jobs, 2) for device in range(2)]
        try:
            settle_on(node, guests)
            launched = [[job.usage()[0].launches for job in jobs]]
            for _ in range(round(seconds)):
                time.sleep(1)
                launched.append([job.usage()[0].launches for job in jobs])
        finally:
            stop(guests)
    least = [min(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(launched)]
    line = row("two gangs on the same two GPUs: launches of the slower one in each second", least, "launches", goal="> 0",
               met=min(least) > 0)  # fmt: skip
    return [*rows, {**line, "value": min(least)}]


def settle_on(node: Bench, guests: Sequence[Guest]) -> None:
    """Wait until each guest has worked on one of the devices."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(any(node.world.executed_ns(guest.pid, d) for d in range(node.world.devices)) for guest in guests):
        assert time.monotonic() < deadline, "a gang does not begin to work"
        time.sleep(0.01)
    time.sleep(1)


# --- honest programs


def audited(seconds: float) -> list[Row]:
    """Count the honest jobs that the audit, which reads NVML, would pause. They work for at least 15 s."""
    flagged, seen_busy = [], []
    loads: dict[str, Work] = {
        "k_100us": busy("k_100us"),
        "k_1ms": busy("k_1ms"),
        **{name: MIXES[name] for name in list(MIXES)[5:9]},
    }
    for work in loads.values():
        with machine() as node, at_work(node, [(30.0, work)]) as there, nvml_of(node) as nvml:
            job, guest = there[0]
            assert job is not None
            auditor, kinds = Auditor(), set()
            until = time.monotonic() + max(15.0, min(seconds, 30))
            while time.monotonic() < until:
                time.sleep(1)
                charges = {pid: used[0] for pid, used in job.charges().items()}
                claim = Claim("job", node.uuids[0], frozenset({guest.pid}), charges, job.context_bytes(0), share=30.0)
                report = auditor.audit(nvml.sample(), [claim], time.monotonic())
                kinds |= {finding.kind for finding in report.findings}
                seen_busy += [found.busy for found in report.measured.values() if found.busy is not None]
            flagged.append(len(kinds))
    lines = row("honest jobs with 30 % that the audit would pause", flagged, "jobs", goal="0", met=not any(flagged))
    busiest = row("utilisation of a job with 30 % by NVML", seen_busy, "%", goal="", met=None)
    return [{**lines, "value": sum(map(bool, flagged))}, busiest]


class nvml_of:
    """The fake NVML of a machine: a copy, as a library stays with its first world."""

    def __init__(self, node: Bench) -> None:
        self._node = node

    def __enter__(self) -> Nvml:
        self._directory = tempfile.mkdtemp()
        own = Path(shutil.copy(self._node.world.fakes.nvml, self._directory))
        os.environ["FAKE_GPU_WORLD"] = str(self._node.world.path)
        self._nvml = Nvml(self._node.uuids, own)
        return self._nvml

    def __exit__(self, *_: object) -> None:
        self._nvml.close()
        del os.environ["FAKE_GPU_WORLD"]
        shutil.rmtree(self._directory)


def honest(seconds: float) -> list[Row]:
    """Run the zoo with and without the guard and count the programs that hang, are refused or compute something else."""
    wrong: dict[str, str] = {}
    with machine(devices=2) as node:
        for program in zoo.PROGRAMS:
            expected = answer(node.start(None, program))
            job = node.job(memory=4096 * MIB, share=60)
            try:
                got = answer(node.start(job, program), 10)
            except AssertionError as error:
                got, wrong[program.__name__] = expected, str(error).strip().splitlines()[-1]
            node.end(job)
            if got != expected:
                wrong[program.__name__] = "hangs" if got is None else "computes something else"
        for kind in zoo.C_PROGRAMS:
            job = node.job(memory=4096 * MIB, share=60)
            with tempfile.TemporaryDirectory() as directory:
                path = zoo.compiled(Path(directory), kind, node.world.fakes.cuda, find_compiler())
                base = {**os.environ, **node.environment(None), "LD_LIBRARY_PATH": str(node.world.fakes.cuda.parent)}
                bare, ours = (
                    subprocess.run(
                        [path], env={**base, **env}, capture_output=True, text=True, timeout=10, check=False
                    ).stdout
                    for env in ({}, job.process_env())
                )
            if ours != bare or not ours:
                wrong[kind] = "computes something else"
            elif job.usage()[0].launches == 0:
                wrong[kind] = "is not guarded"
            node.end(job)
    count = len(zoo.PROGRAMS) + len(zoo.C_PROGRAMS)
    line = row(f"honest programs of {count} that hang, are refused, changed or not guarded", [len(wrong)], "programs", goal="0",
               met=not wrong)  # fmt: skip
    return [{**line, "n": count, "programs": wrong}]


PARTS: dict[str, Callable[[float], list[Row]]] = {
    "shares": shares,
    "mixes": mixes,
    "ways": ways,
    "gated": gated,
    "first launches": first_launches,
    "overhead": overhead,
    "closings": closings,
    "gangs": gangs,
    "audited": audited,
    "honest": honest,
}
