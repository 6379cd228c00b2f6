"""A machine with fake GPUs and a guard, whose jobs the benchmarks watch by the fake driver's own account."""

import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cuda_guard.build import libraries  # noqa: E402
from cuda_guard.guard import GuardedJob  # noqa: E402
from cuda_guard.page import WINDOW_MS  # noqa: E402
from tests.cuda_guard.guests import Bench, Guest, bench  # noqa: E402
from tests.fake.build import build  # noqa: E402
from tests.fake.client import Driver  # noqa: E402
from tests.fake.world import PROFILE_ENV  # noqa: E402

Work = Callable[[Driver], Any]
Row = dict[str, Any]
Party = tuple[float, Work]  # share, workload

SLICING = "time slicing (fake driver)"
SETTLE_S = 0.5  # until predictions and turns are stable
PATIENCE_S = 60.0


def use_profile(name: str) -> None:
    """Give the machines of this process this profile of the fake driver."""
    os.environ[PROFILE_ENV] = name


@contextmanager
def machine(**world: Any) -> Iterator[Bench]:
    base = Path("/dev/shm")
    built, fakes = libraries(ROOT / "build" / "guard"), build(ROOT / "build" / "fake")
    with (
        tempfile.TemporaryDirectory(dir=base if base.is_dir() else None) as name,
        bench(Path(name), built, fakes, **world) as made,
    ):
        yield made


@contextmanager
def at_work(
    node: Bench, parties: Sequence[Party], guarded: bool = True, window_ms: float = WINDOW_MS
) -> Iterator[list[tuple[GuardedJob | None, Guest]]]:
    """Start a job for each party and yield them once all work steadily."""
    jobs = [node.job(share=share, window_ms=window_ms) if guarded else None for share, _ in parties]
    guests = [node.start(job, work) for job, (_, work) in zip(jobs, parties, strict=True)]
    try:
        while not all(node.world.executed_ns(guest.pid) for guest in guests):
            time.sleep(0.01)
        time.sleep(SETTLE_S)
        yield list(zip(jobs, guests, strict=True))
    finally:
        for guest in guests:
            guest.kill(signal.SIGKILL)
            guest.wait()
        for job in jobs:
            if job:
                node.end(job)


def observe(node: Bench, guests: Sequence[Guest], seconds: float, every_s: float) -> list[tuple[float, list[int]]]:
    """Return moments, and what the device had executed of each process by then."""
    seen, begun = [], time.monotonic()
    for n in range(round(seconds / every_s) + 1):
        time.sleep(max(0.0, begun + n * every_s - time.monotonic()))
        seen.append((time.monotonic(), [node.world.executed_ns(guest.pid) for guest in guests]))
    return seen


def between(first: tuple[float, list[int]], last: tuple[float, list[int]]) -> list[float]:
    """Return each process's share of the device between two moments, in per cent."""
    return [(b - a) / (last[0] - first[0]) / 1e7 for a, b in zip(first[1], last[1], strict=True)]


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def answer(guest: Guest, patience_s: float = PATIENCE_S) -> Any:
    """Return the guest's result; None if it has none after this time, when it is ended."""
    if select.select([guest._answer], [], [], patience_s)[0]:
        return guest.result()
    guest.kill(signal.SIGKILL)
    guest.wait()
    return None
