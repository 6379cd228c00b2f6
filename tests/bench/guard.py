"""Accuracy and overhead of the guard, with a fake CUDA driver whose devices take real time.

The fake driver's own account says what a device did; the guard has no part in it. No other guard runs without a GPU, so the
peer is the fake driver's time slicing without a guard, and for the cost of a call the direct call. `--seconds`: duration of
each share measurement (60). `--only WORDS` runs the parts with these words in their names, `--profile` chooses how harsh the
fake driver is. Takes about an hour; the report is written after each part.
"""

import argparse
import ctypes
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cuda_guard.build import NATIVE, find_compiler, libraries  # noqa: E402
from cuda_guard.page import Pages, Quota  # noqa: E402
from tests.bench import guard_harsh  # noqa: E402
from tests.bench.guard_machine import (  # noqa: E402
    SLICING,
    Party,
    Row,
    Work,
    at_work,
    between,
    machine,
    observe,
    percentile,
    use_profile,
)
from tests.bench.harness import not_run, row, save, write  # noqa: E402
from tests.cuda_guard.allocations import KINDS  # noqa: E402
from tests.cuda_guard.guests import CONTEXT, MIB  # noqa: E402
from tests.cuda_guard.resolution import misresolved, pairs  # noqa: E402
from tests.cuda_guard.test_time import busy  # noqa: E402
from tests.fake.client import CudaError, Driver  # noqa: E402
from tests.fake.profiles import PROFILES  # noqa: E402

IN_FLIGHT_S = (
    0.1  # an allocation granted before the quota fell is made by then: several turns of 8 processes on 2 cores
)


# --- workloads


def on_and_off(seed: int, kernel: str) -> Work:
    """Work for 0.5 to 1.5 s, then rest as long: half of the time on average."""

    def work(driver: Driver) -> None:
        driver.start()
        function, rng = driver.kernel(kernel), Random(seed)
        driver.launch(function)
        while True:
            time.sleep(rng.uniform(0.5, 1.5))
            until = time.monotonic() + rng.uniform(0.5, 1.5)
            while time.monotonic() < until:
                for _ in range(10):
                    driver.launch(function)
            driver.cuCtxSynchronize()

    return work


# --- shares


def ratio(seconds: float) -> list[Row]:
    parties = [(10.0, busy("k_100us")), (90.0, busy("k_100us"))]

    def ratios(guarded: bool, seconds: float) -> tuple[float, list[float]]:
        with machine() as node, at_work(node, parties, guarded) as there:
            seen = observe(node, [guest for _, guest in there], seconds, 2.5)
        each = [large / small for small, large in (between(a, b) for a, b in pairwise(seen))]
        small, large = between(seen[0], seen[-1])
        return large / small, each

    whole, each = ratios(True, seconds)
    found = row(
        f"10:90 over {seconds:g} s, 1 to", each, "", goal="8.7 to 9.3", met=8.7 <= whole <= 9.3, peer=SLICING,
        peer_values=[ratios(False, 5)[0]],
    )  # fmt: skip
    return [{**found, "value": round(whole, 4)}]


def steps(rounds: int) -> list[Row]:
    """Measure the time from setting another share until the last 100 ms are within 3 points of it and stay so for the rest
    of the second.
    """
    every_s, window = 0.005, 20
    taken: dict[str, list[float]] = {"10 to 50": [], "50 to 10": []}
    with machine() as node, at_work(node, [(10, busy("k_100us"))]) as there:
        job, guest = there[0]
        assert job is not None
        for _ in range(rounds):
            for name, share in (("10 to 50", 50.0), ("50 to 10", 10.0)):
                job.set_share(0, share, share)
                seen = observe(node, [guest], 1.0, every_s)
                last = [between(seen[n - window], seen[n])[0] for n in range(window, len(seen))]
                taken[name].append((window + settled(last, share, 3.0)) * every_s * 1000)
    return [
        row(f"step of {name} % settles", values, "ms", goal="<= 300 ms", met=max(values) <= 300)
        for name, values in taken.items()
    ]


def settled(values: Sequence[float], wanted: float, within: float) -> int:
    """Return from which value on all are near the wanted one; their number if the last one is not."""
    return next((n + 1 for n in reversed(range(len(values))) if abs(values[n] - wanted) > within), 0)


def victim(seconds: float, rounds: int) -> list[Row]:
    """Measure what a job with 60 % loses to four others with 10 % each."""
    alone: list[Party] = [(60.0, busy("k_200us"))]
    beside: list[Party] = [*alone, *((10.0, busy(f"k_{us}us")) for us in (50, 100, 300, 500))]

    def throughput(parties: list[Party], guarded: bool) -> float:
        with machine() as node, at_work(node, parties, guarded) as there:
            seen = observe(node, [there[0][1]], seconds, seconds)
        return between(seen[0], seen[-1])[0]

    def loss(guarded: bool) -> float:
        before = throughput(alone, guarded)
        return (1 - throughput(beside, guarded) / before) * 100

    ours = [loss(True) for _ in range(max(1, rounds))]
    met = statistics.median(ours) < 10
    return [
        row("loss of a job with 60 % beside four jobs with 10 %", ours, "%", goal="< 10 %", met=met, peer=SLICING,
            peer_values=[loss(False)])
    ]  # fmt: skip


def elastic(seconds: float) -> list[Row]:
    """Compare static shares with shares that may use what others leave, under the same load."""
    loads = [(45.0, on_and_off(1, "k_100us")), (30.0, on_and_off(2, "k_300us")), (15.0, on_and_off(3, "k_50us"))]

    def run(limit: float | None) -> tuple[float, float]:
        with machine() as node:
            jobs = [node.job(share=share, limit=limit) for share, _ in loads]
            guests = [node.start(job, work) for job, (_, work) in zip(jobs, loads, strict=True)]
            while not all(node.world.executed_ns(guest.pid) for guest in guests):
                time.sleep(0.01)
            begun, before = time.monotonic(), (node.world.busy_ns(), node.world.calls("cuLaunchKernel"))
            time.sleep(seconds)
            took, after = time.monotonic() - begun, (node.world.busy_ns(), node.world.calls("cuLaunchKernel"))
            for guest in guests:
                guest.kill(signal.SIGKILL)
                guest.wait()
        return (after[0] - before[0]) / took / 1e7, (after[1] - before[1]) / took

    static, lending = run(None), run(90.0)
    what = "elastic against static shares, three jobs with 50 % load"
    lines = []
    for name, goal, n, unit in (("utilisation", 37, 0, "% of the device"), ("throughput", 26, 1, "kernels/s")):
        gain = (lending[n] / static[n] - 1) * 100
        lines.append(
            row(f"{what}: {name} ({lending[n]:.0f} {unit})", [gain], "% more", goal=f">= +{goal} %", met=gain >= goal,
                peer=f"static, {unit}", peer_values=[static[n]])
        )  # fmt: skip
    return lines


# --- costs


def calls(rounds: int) -> list[Row]:
    """Measure a launch through the guard and directly (guard_call.c)."""
    source = Path(__file__).parent / "guard_call.c"
    compiler = [*find_compiler(), "-std=c11", "-O2", f"-I{NATIVE}", str(source)]
    device = "GPU-00000000-0000-0000-0000-000000000001"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        driver, program = directory / "driver.so", directory / "call"
        subprocess.run([*compiler, "-DDRIVER", "-fPIC", "-shared", "-o", driver], check=True)
        subprocess.run([*compiler, "-o", program, "-ldl"], check=True)
        pages = Pages.create(directory / "pages", (Quota(device),), driver, driver, time.monotonic_ns())
        words = [program, driver, libraries(ROOT / "build" / "guard").cuda, str(2 * rounds)]
        env = {**os.environ, "MESH_GUARD_DIR": str(pages.directory)}
        told = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
        pages.close()
    plain, whole, fast = zip(*([float(word) for word in line.split()] for line in told.splitlines()), strict=True)
    more = [ours - theirs for ours, theirs in zip(fast, plain, strict=True)]
    all_more = [ours - theirs for ours, theirs in zip(whole, plain, strict=True)]
    met = statistics.median(more) <= 6
    lines = (("gate and token", more, "<= 6 ns", met), ("with measuring and portions", all_more, "", None))
    return [
        row(f"cost of a call, {what}", values, "ns", goal=goal, met=good, peer="direct call", peer_values=plain)
        for what, values, goal, good in lines
    ]


# --- bounds


def overshoot(seconds: float) -> list[Row]:
    """Let eight processes race for the rest of a quota with all kinds of allocation, while it falls and rises.

    The driver's own account decides; the guard's plays no part. A job may keep what it had when the quota fell, but what it
    has freed above the quota it may not take again.
    """
    quotas = [8 * CONTEXT + more * MIB for more in (1024, 512, 768)]
    quota, picks = quotas[0], Random(2)
    with machine(memory=65536 * MIB) as node:
        job, ready = node.job(memory=quota), os.pipe()

        def work(driver: Driver) -> int:
            driver.start()
            os.read(ready[0], 1)
            held: list[Callable[[], None]] = []
            rng, refused, until = Random(os.getpid()), 0, time.monotonic() + seconds
            while time.monotonic() < until:
                if held and rng.random() < 0.5:
                    held.pop(rng.randrange(len(held)))()
                    continue
                try:
                    held.append(rng.choice(KINDS)(driver, rng.randrange(1, 150) * 2 * MIB))
                except CudaError:
                    refused += 1
            return refused

        guests = [node.start(job, work) for _ in range(8)]
        while job.usage()[0].processes < 8:
            time.sleep(0.01)
        os.write(ready[1], b"." * 8)

        def account() -> list[int]:
            """Read the driver's account again and again for IN_FLIGHT_S."""
            seen, end = [node.world.used()], time.monotonic() + IN_FLIGHT_S
            while time.monotonic() < end:
                seen.append(node.world.used())
            return seen

        most, ceiling, until = [], quota, time.monotonic() + seconds
        while time.monotonic() < until:
            now = picks.choice(quotas)
            job.set_memory(0, now)
            ceiling = max(now, ceiling)
            most += [max(0, used - ceiling) for used in account()]
            above, ceiling = overshot(now, ceiling, account())
            most += above
        refused = sum(guest.result() for guest in guests)
    what = f"memory above the quota, 8 racing processes, {len(KINDS)} kinds, {refused} refusals"
    return [{**row(what, most, "bytes", goal="0", met=max(most) == 0), "value": max(most)}]


def overshot(quota: int, ceiling: int, seen: Sequence[int]) -> tuple[list[int], int]:
    """Return by how many bytes each reading exceeds the ceiling, and the ceiling after the last one: it follows the readings
    down to the quota.
    """
    above = []
    for used in seen:
        above.append(max(0, used - ceiling))
        ceiling = max(quota, min(ceiling, used))
    return above, ceiling


def recalls(count: int) -> list[Row]:
    """Measure how fast lent memory comes back when the owner of its guarantee starts a job.

    The two times are until the borrower is refused more, and from the borrower's release until the whole guarantee is free.
    """
    refused_ms, back_ms = [], []
    with machine(memory=8192 * MIB) as node:
        borrower, (heard, say), (turn, go) = node.job(memory=1024 * MIB, memory_limit=6144 * MIB), os.pipe(), os.pipe()

        def work(driver: Driver) -> None:
            driver.start()
            while True:
                large = driver.out("cuMemAlloc_v2", 5000 * MIB)
                os.write(say, struct.pack("d", time.monotonic()))
                while not driver.code("cuMemAlloc_v2", ctypes.byref(small := ctypes.c_uint64()), 2 * MIB):
                    driver.cuMemFree_v2(small)
                os.write(say, struct.pack("d", time.monotonic()))
                driver.cuMemFree_v2(large)
                os.write(say, struct.pack("d", time.monotonic()))
                os.read(turn, 1)

        def told() -> float:
            return float(struct.unpack("d", os.read(heard, 8))[0])

        guest = node.start(borrower, work)
        for _ in range(count):
            told()
            begun = time.monotonic()
            newcomer = node.job(memory=6500 * MIB)
            refused_ms.append((told() - begun) * 1000)
            freed = told()
            while not newcomer.has_guarantee:
                time.sleep(0.0002)
            back_ms.append((time.monotonic() - freed) * 1000)
            node.end(newcomer)
            while borrower.memory_limit(0) != 6144 * MIB:
                time.sleep(0.0002)
            os.write(go, b".")
        guest.kill(signal.SIGKILL)
        guest.wait()
    lease = "<= 20 ms (one lease)"
    what = (
        ("lender's job starts -> borrower refused (P99)", refused_ms),
        ("borrower frees -> guarantee available (P99)", back_ms),
    )
    tails = [(text, taken, percentile(taken, 0.99)) for text, taken in what]
    return [
        {**row(f"memory lent: {text}", taken, "ms", goal=lease, met=p99 <= 20), "value": round(p99, 4)}
        for text, taken, p99 in tails
    ]


def resolution() -> list[Row]:
    wanted = pairs()
    what, goal = "(name, version) pairs resolved correctly", "all of cuda.h's"
    if not wanted:
        return [not_run(what, "pairs", goal, "nvidia-cuda-runtime, which has the header, is not installed")]
    with machine(profile="plain", driver_version=13050) as node:  # its addresses tell which calls are meant
        fake = node.world.fakes.cuda
        wrong = node.run(node.job(), lambda driver: misresolved(driver, fake))
    good = len(wanted) - len({(name, version) for name, version, *_ in wrong})
    return [row(what, [good], "pairs", goal=f"{goal} ({len(wanted)})", met=good == len(wanted))]


# --- the report

Part = Callable[[float], list[Row]]


def rounds_of(seconds: float) -> int:
    return 7 if seconds >= 30 else 3


PARTS: dict[str, Part] = {
    **guard_harsh.PARTS,
    "ratio": lambda seconds: ratio(min(seconds, 20)),
    "calls": lambda seconds: calls(rounds_of(seconds)),
    "overshoot": overshoot,
    "recalls": lambda seconds: recalls(100 if seconds >= 30 else 30),
    "steps": lambda seconds: steps(rounds_of(seconds)),
    "victim": lambda seconds: victim(min(seconds, 5), rounds_of(seconds) // 2),
    "elastic": lambda seconds: elastic(min(seconds, 30)),
    "resolution": lambda seconds: resolution(),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", action="append", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="harsh")
    options = parser.parse_args()
    use_profile(options.profile)
    todo = [name for name in PARTS if any(words in name for words in options.only or [""])]
    if not todo:
        parser.error(f"no part's name contains {' or '.join(options.only)}")
    rows: list[Row] = []
    for name in todo:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += PARTS[name](options.seconds)
        except (AssertionError, CudaError) as error:  # a program failed, which no honest one may
            rows.append({**not_run(name, "", "", str(error).strip()[-300:]), "met": False})
        except (OSError, subprocess.SubprocessError) as error:
            rows.append(not_run(name, "", "", repr(error)[:300]))
        save("guard", rows, profile=options.profile)
    write("guard", rows, profile=options.profile)


if __name__ == "__main__":
    main()
