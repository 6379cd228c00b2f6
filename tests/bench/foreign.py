"""Time from the start of an owner's program on a GPU until guests can launch nothing there, on fake driver and NVML."""

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from tests.bench.harness import not_run, row
from tests.e2e.commands import until
from tests.e2e.test_presence import WHOLE_GPU, WORK, Owners, log_at, on_gpus_of, policy
from tests.e2e.test_shares import gpu_world, on_gpus, shares, submit
from tests.tiers import cc_problem

TRIALS = 30
MOST_S = 1.5
LOOK_S = 1.0  # between two looks of the node at its GPUs


def foreign(trials: int | None = None) -> Sequence[dict[str, Any]]:
    measure, goal = "foreign GPU process detected to guest launches stopped (fake NVML)", f"<= {MOST_S:g} s"
    if problem := cc_problem():
        return [not_run(measure, "s", goal, problem)]
    taken: list[float] = []
    rng = random.Random(7)
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(prefix="mesh-foreign-") as name:
        base = Path(name)
        try:
            with gpu_world(base, base / "fakes", patch, devices=2) as world:
                (base / "project" / "any.py").write_text(WORK)
                with Stack(1, overrides={"slots": 1}) as stack:
                    stack.start_all()
                    node = stack.nodes[0]
                    until(lambda: shares(node), "the guard to be ready")
                    policy(node, "[gpu]\nsuspend = '10m'\nresume = 0\nidle = 2\n")
                    job = submit(node, world, "any.py", *WHOLE_GPU)
                    until(lambda: (rows := on_gpus(node)) and rows[0].get("launches", 0) > 10, "it to work")
                    device = [f"GPU-{one}" for one in world.uuids].index(on_gpus_of(node, job))
                    for _ in range(trials or TRIALS):
                        time.sleep(rng.uniform(0, LOOK_S))  # start at a random moment between two looks
                        owners = Owners(world, device)
                        shut = until(lambda: log_at(node, "GPU gate closed")[len(taken) :], "the gate to shut")
                        taken.append(shut[0] - owners.began_unix)
                        until(lambda: len(log_at(node, "stage suspended")) == len(taken), "it to stand still")
                        launches = on_gpus(node)[0]["launches"]
                        owners.end()
                        until(lambda before=launches: on_gpus(node)[0]["launches"] > before, "it to go on")
                    node.client.post("/v1/down", {"now": True})
                    until(lambda: not node.running, "the daemon to end")
        finally:
            patch.undo()
    return [row(measure, taken, "s", goal=goal, met=max(taken) <= MOST_S)]
