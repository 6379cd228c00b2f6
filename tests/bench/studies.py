"""Rows of `make bench-sim` on studies: sweeps, executors, Python versions, closed forms, and reading of traces."""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.harness import ROOT, not_run, row

POLICIES = ("mesh", "slurm-s0", "slurm-s60", "young-daly", "gpunion", "redundant", "oracle")
SWEEP = """seeds = {seeds}
policies = {policies}
worlds = ["{world}"]

[set]
days = {days}
"""
JOBS, NODES = 20_000, 44
CLOSED_FORMS = ("tests/sim/test_closed_forms.py", "tests/sim/test_network.py")
DIGESTS = """
from sim.campus.replication import replicate_named
from sim.campus.world_files import find_world
for world in ("gpunion-11", "reclaimnet-54", "lab-building"):
    for policy in ("mesh", "young-daly", "gpunion", "redundant"):
        print(world, policy, replicate_named(find_world(world, ["days=4"]), policy, 3).digest)
"""


def swept(executor: str, folder: Path, seeds: int, world: str = "gpunion-11", days: float = 2) -> tuple[bytes, float]:
    """Return the output of a sweep, and the CPU seconds of all its processes."""
    study = folder / f"{executor}.toml"
    study.write_text(SWEEP.format(seeds=seeds, policies=json.dumps(POLICIES), world=world, days=days))
    words = ["debug", "sim", "sweep", str(study), "--executor", executor, "--workers", "2", "--json"]
    before = _children_s()
    done = subprocess.run([sys.executable, "-m", "mesh.cli", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return done.stdout, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def executor_rows() -> list[dict[str, Any]]:
    title, goal = "sweep of 7 policies x 3 seeds: bytes that differ from serial", "0"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = swept("serial", Path(folder), 3)
        for executor in ("process", "dask"):
            name = f"{title}, {executor}"
            if executor == "dask" and find_spec("distributed") is None:
                rows.append(not_run(name, "bytes", goal, "Dask is not installed (pip install 'campus-mesh[dask]')"))
                continue
            found, _ = swept(executor, Path(folder), 3)
            differ = abs(len(alone) - len(found)) + sum(a != b for a, b in zip(alone, found, strict=False))
            rows.append(row(name, [float(differ)], "bytes", goal=goal, met=alone == found))
    return rows


def sweep_rows(seeds: int) -> list[dict[str, Any]]:
    """Measure sweeps. Two processes on two idle cores need half of this CPU time as wall time."""
    title, goal = f"reclaimnet-54, 7 policies x {seeds} paired seeds, two processes: half of their CPU", "<= 10"
    with tempfile.TemporaryDirectory() as folder:
        _, spent = swept("process", Path(folder), seeds, "reclaimnet-54", 60)
    minutes = spent / 2 / 60
    return [row(title, [minutes], "min", goal=f"{goal} for 30 seeds", met=minutes * 30 / seeds <= 10)]


def python_rows(pythons: list[str]) -> list[dict[str, Any]]:
    title, goal = "12 runs: digests that differ between this Python and", "0"
    if not pythons:
        return [
            not_run(f"{title} others", "digests", goal, "name them: --python PATH (with the project's dependencies)")
        ]
    here, rows = _digests(sys.executable), []
    for python in pythons:
        version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        there = _digests(python)
        differ = sum(a != b for a, b in zip(here, there, strict=True))
        rows.append(row(f"{title} {version}", [float(differ)], "digests", goal=goal, met=not differ))
    return rows


def _digests(python: str) -> list[str]:
    seeded = {**os.environ, "PYTHONHASHSEED": str(random.randrange(1, 2**32)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", DIGESTS], cwd=ROOT, env=seeded, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def closed_form_rows() -> list[dict[str, Any]]:
    """Run the closed-form tests; docs/explanation/campus-simulator.md names them. Tolerances are 3 sigma or 1 %."""
    rows = []
    for file in CLOSED_FORMS:
        words = ["-q", "-n", "0", "-p", "no:cacheprovider", file]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        counts = {word.rstrip(","): int(number) for number, word in _pairs(done.stdout.splitlines()[-1].split())}
        passed = counts.get("passed", 0)
        name = {CLOSED_FORMS[0]: "M/M/1, alternating renewal, Young and Daly", CLOSED_FORMS[1]: "max-min shares"}[file]
        rows.append(row(f"closed forms: {name}", [float(passed)], "checks", goal="all", met=done.returncode == 0))
    return rows


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(number, word) for number, word in pairwise(words) if number.isdecimal()]


def import_rows(rounds: int) -> list[dict[str, Any]]:
    from placement.traces import nodes_of_jobs, read_swf

    rng = random.Random(7)
    lines = ["; UnixStartTime: 1356998400"]
    for number in range(JOBS):
        cores, ran = rng.randint(1, 16), rng.randint(60, 90_000)
        nodes = ",".join(str(1000 + rng.randrange(NODES)) for _ in range(cores))
        head = f"{number + 1} {number * 300} {rng.randint(0, 900)} {ran} {cores} -1 -1 {cores} 90000 -1 1 {number % 75}"
        lines.append(f"{head} 1 -1 1 -1 -1 -1 {{{nodes}}}")
    text = "\n".join(lines)
    read, whole = [], []
    for _ in range(rounds):
        begun = time.process_time()
        jobs = read_swf(text)
        read.append(time.process_time() - begun)
        nodes_of_jobs(jobs)
        whole.append(time.process_time() - begun)
    assert len(jobs) == JOBS
    title = f"Standard Workload Format, {JOBS} jobs with their nodes"
    return [
        row(f"{title}: read", read, "s of CPU", goal="< 1", met=max(read) < 1),
        row(f"{title}: read, and absences of {NODES} nodes built", whole, "s of CPU", goal="< 1", met=max(whole) < 1),
    ]
