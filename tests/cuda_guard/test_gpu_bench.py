"""The benchmark for real GPUs, run on the fake: each part works, or reports why it cannot be measured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_guard.build import Libraries
from tests.fake.world import World

pytestmark = pytest.mark.cc

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from pathlib import Path
from tests.bench import guard_gpu, harness
from tests.cuda_guard import zoo
harness.BUILD, zoo.PROGRAMS = Path(sys.argv.pop(1)), (zoo.eager, zoo.collectives)  # test_zoo.py runs them all
guard_gpu.CLOSINGS, guard_gpu.PRIMITIVE_TURNS = 5, 1
guard_gpu.shutil.which = lambda program: None  # this machine may run MPS
if "LD_LIBRARY_PATH" not in os.environ:
    guard_gpu.find_driver = lambda: None
guard_gpu.main()
"""
PARTS = (
    "pairs",
    "driver exports",
    "gate closed",
    "of 1 GiB",
    "of 64 GiB",
    "small kernels",
    "Triton",
    "static",
    "NCCL",
    "quota",
    "honest programs",
    "cost of a call",
    "recorded after",
    "slow steps",
    "fills",
    "job in steps",
    "clock",
)


def report(directory: Path, environment: dict[str, str], *options: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    env = {**inherited, **environment, "PYTHONPATH": str(ROOT)}
    quick = ["--seconds", "0.1", "--rounds", "2", "--full", "0", "--lock-clocks"]
    words = [sys.executable, "-c", PROGRAM, str(directory), *quick, "--python", sys.executable, *options]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["measure"]: row for row in json.loads((directory / "guard-gpu.json").read_text())["rows"]}


def test_dry_run_on_the_harsh_double_measures_each_available_part(
    make_world: Callable[..., World], built: Libraries, tmp_path: Path
) -> None:
    world = make_world(profile="harsh")
    driver = {**world.environment(), "LD_LIBRARY_PATH": str(world.fakes.cuda.parent)}
    rows = report(tmp_path, driver, *(word for part in PARTS for word in ("--only", part)))
    missing = {measure: row["why"] for measure, row in rows.items() if row["value"] is None}
    assert rows["calls that the driver exports and the guard does not"]["names"] == []
    assert rows["gate closed -> last kernel done, kernels of 250 us"]["n"] == 5
    assert rows["driver's checkpoint of 1 GiB: lock and checkpoint"]["freed_bytes"] >= 1 << 30
    assert rows["memory over a quota of 2 GiB, by NVML"]["met"]
    assert set(rows["honest programs that the guard stops, refuses or changes"]["left_out"]) == {"collectives"}
    assert rows["an event recorded after a wait is ready"]["at_once"] < 1  # of 200; all of them on the plain one
    for arm in ("time slicing", "ours hard", "ours elastic"):
        row = rows[f"shares 45/30/15, small kernels, {arm}"]
        assert row["n"] == 2 and row["ci95"][0] <= row["value"] <= row["ci95"][1]
    assert set(rows["clock of the multiprocessors while measuring"].values()) >= {1386}
    reasons = {
        "driver's checkpoint of 64 GiB: restore and unlock": "too little memory",
        "shares 45/30/15, small kernels, MPS": "not installed",
        "shares 45/30/15, Triton, ours hard": "the driver alone does no Triton",
        "overhead at 100 %, C with a static cudart": "nvcc is not installed",
        "overhead at 100 %, NCCL on two GPUs": "there is one GPU",
    }
    assert all(why in missing[measure] for measure, why in reasons.items())


def test_every_line_reports_a_missing_driver(tmp_path: Path) -> None:
    rows = report(tmp_path, {})
    assert len(rows) > 30 and {row["why"] for row in rows.values()} == {"no NVIDIA driver"}
