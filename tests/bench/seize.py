"""Time from the owner's order until no process of a guest is alive, even if all other parts hang.

The order goes to the kill switch's own socket, as `mesh reclaim --now` sends it, without the start of its Python. The kernel
reports the end of a process (pidfd).
"""

import asyncio
import contextlib
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.harness import not_run, row
from tests.container_images import import_busybox
from tests.dockerd import Dockerd, dockerd
from tests.execution.place import Place, fresh_mark
from tests.tiers import dockerd_problem

TRIALS = 100
GOAL = "p99 < 250 ms, max < 1 s"
MEASURE = "reclaim --now to no guest process alive (%s)"
WAIT_S = 30.0


def seize(trials: int | None = None) -> Sequence[dict[str, Any]]:
    trials = trials or TRIALS
    rows: list[dict[str, Any]] = []
    for state in ("idle", "loop blocked"):
        rows += _rows("process", state, asyncio.run(_trials("process", state, trials)))
    if problem := dockerd_problem():
        return [
            *rows,
            *(not_run(MEASURE % f"docker, {state}", "ms", GOAL, problem) for state in ("idle", "loop blocked")),
        ]
    with dockerd() as engine:
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = engine.host
        try:
            image = import_busybox()
            for state in ("idle", "loop blocked", "engine stopped"):
                rows += _rows("docker", state, asyncio.run(_trials("docker", state, trials, engine, image)))
        finally:
            os.environ.pop("DOCKER_HOST")
            if before is not None:
                os.environ["DOCKER_HOST"] = before
    return rows


def _rows(kind: str, state: str, taken_ms: Sequence[float]) -> list[dict[str, Any]]:
    p99 = sorted(taken_ms)[math.ceil(len(taken_ms) * 0.99) - 1]
    what = MEASURE % f"{kind}, {state}"
    return [
        {
            **row(f"{what}: p99", taken_ms, "ms", goal=GOAL, met=p99 < 250 and max(taken_ms) < 1000),
            "value": round(p99, 2),
        },
        row(f"{what}: median", taken_ms, "ms", goal="", met=None),
    ]


async def _trials(
    kind: str, state: str, trials: int, engine: Dockerd | None = None, image: str | None = None
) -> list[float]:
    taken = []
    with tempfile.TemporaryDirectory(prefix="mesh-seize-") as name:
        for number in range(trials):
            root = Path(name) / str(number)
            root.mkdir()
            taken.append(await _trial(Place(root, kind, image), state, engine))
    return taken


async def _trial(place: Place, state: str, engine: Dockerd | None) -> float:
    """Return milliseconds."""
    assert (await place.bench.engine.availability()).ok
    await place.guest(fresh_mark())
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(_watched(pid)) for pid in await place.bench.guests[0].pids()]
        if state == "engine stopped":
            assert engine is not None
            stack.enter_context(engine.hanging())
        order = threading.Thread(target=place.press)
        poller = select.poll()
        for end in ends:
            poller.register(end, select.POLLIN)
        begun = time.perf_counter()
        order.start()
        left = set(ends)
        if state == "loop blocked":
            while left:  # directly on the loop, which has nothing else to do
                left -= _ended(poller, left)
        else:
            while left:
                left -= await asyncio.to_thread(_ended, poller, set(left))
        took = (time.perf_counter() - begun) * 1e3
        await asyncio.to_thread(order.join, WAIT_S)
    for guest in place.bench.guests:
        await guest.wait()
    await place.bench.engine.close()
    place.switch.close()
    return took


def _ended(poller: select.poll, left: set[int]) -> set[int]:
    over = {number for number, _ in poller.poll(WAIT_S * 1e3)} & left
    assert over, "a guest is still alive"
    for number in over:
        poller.unregister(number)
    return over


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def escapes(trials: int | None = None) -> Sequence[dict[str, Any]]:
    """Run the tests of tests/execution/test_escapes.py once on a real engine; each tries several escapes."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/execution/test_escapes.py",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    return [escaped(done.stdout, done.returncode, done.stderr[-200:])]


def escaped(output: str, code: int, errors: str = "") -> dict[str, Any]:
    """Return the row of one pytest run. A failure is an escape; an error is a trial that shows nothing, so the goal is not
    met, nor is it met by a run that pytest itself did not call good.
    """
    measure, goal = "container escape attempts that succeed, host unharmed", "0"
    counts: Counter[str] = Counter()
    for count, word in re.findall(r"(\d+) (passed|failed|errors?)\b", (output.splitlines() or [""])[-1]):
        counts[word.removesuffix("s")] += int(count)
    tried = counts["passed"] + counts["failed"]
    if not tried and not counts["error"]:
        return not_run(measure, "escapes", goal, (output.strip() or errors)[-200:])
    found = row(
        measure, [float(counts["failed"])], "escapes", goal=goal, met=code == 0 and not counts["failed"],
        missed=counts["error"],
    )  # fmt: skip
    return {**found, "n": tried + counts["error"]}
