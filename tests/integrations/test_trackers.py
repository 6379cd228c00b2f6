"""Trackers of experiments over a departure, with the real packages: one run, no gap, no duplicate step."""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import end_of, finished, free_port, ok, running_with_checkpoint, start, until
from tests.tiers import FRAMEWORKS_PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.trackers]
WAIT_S = 180.0  # the import of MLflow takes ten seconds, more on a busy machine

# Each prints the runs that it finds, and the steps of all of them, as JSON.
# W&B's file is a log as of LevelDB: blocks of 32 KiB, records with checksum, length and kind (whole, first, middle, last).
OF_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):
    at, begun = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield begun
            begun = b""

runs, steps = set(), []
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.run.run_id:
            runs.add(record.run.run_id)
        if record.history.item:
            steps.append(record.history.step.num)
print(json.dumps([sorted(runs), steps]))
"""
OF_MLFLOW = """
import json
import mlflow
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
steps = [one.step for run in runs for one in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")]
print(json.dumps([[run.data.tags["mesh.job"] for run in runs], steps]))
"""
OF_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps([[], [one.step for one in found.Scalars("loss")]]))
"""


def program(script: str, *words: str, **env: str) -> Any:
    done = subprocess.run(
        [FRAMEWORKS_PYTHON, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def mlflow_server(directory: Path) -> Iterator[str]:
    port = free_port()
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{directory}/runs.db", "--artifacts-destination", str(directory)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([FRAMEWORKS_PYTHON, "-m", "mlflow", *words], stdout=log, stderr=log, cwd=directory)
    try:
        until(lambda: answer(f"http://127.0.0.1:{port}/health"), "MLflow's server", WAIT_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def answer(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=10) as found:
            return bytes(found.read())
    except OSError:
        return b""


def moved(stack: Stack, project: Path, out: Path, kind: str, *words: str, **env: str) -> tuple[str, int]:
    """Run the program, take its first host away, and end it on the next one; return the job, and the steps it has counted."""
    user, variables = stack.nodes[0], [word for pair in env.items() for word in ("-e", "=".join(pair))]
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--out", str(out), *variables, "--")
    end = end_of(stack)
    job = ok(user, *order, str(FRAMEWORKS_PYTHON), "track.py", kind, str(end), *words, cwd=project).strip()
    first = stack.node(running_with_checkpoint(user, job)["node"])
    # A killed one loses steps, which TensorBoard's files then have once, as they came with the checkpoint.
    ok(first, "reclaim", *(["--now"] if kind == "tensorboard" else []))
    running_with_checkpoint(user, job, elsewhere=first.nick)
    if kind == "tensorboard":
        forward = start(user, "job", "forward", job, f"{(port := free_port())}:{words[0]}")
        address = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
        until(lambda: b"loss" in answer(address), "TensorBoard to show the run", WAIT_S)
        forward.terminate()
        forward.communicate(timeout=60)
    end.touch()
    state = finished(user, job)
    log = ok(user, "logs", job)
    assert state["state"] == "done" and len(state["attempts"]) == 2, log
    until(lambda: any("brought home" in line for line in ok(user, "job", "events", job).splitlines()), "the files")
    found = re.search(r"^counted (\d+)$", log, re.MULTILINE)
    assert found is not None, log
    return job, int(found[1])


@pytest.mark.parametrize("kind", ["wandb", pytest.param("mlflow", marks=pytest.mark.slow), "tensorboard"])
def test_moved_job_is_one_run(kind: str, project: Path, tmp_path: Path) -> None:
    sees = [str(FRAMEWORKS_PYTHON.parents[1]), str(tmp_path)]
    with Stack(3, overrides={"slots": 1, "grace_s": 60.0, "process_sees": sees[::-1]}) as stack:
        stack.start_all()
        out = tmp_path / "out"
        if kind == "mlflow":
            with mlflow_server(tmp_path) as address:
                job, count = moved(stack, project, out, kind, MLFLOW_TRACKING_URI=address)
                runs, steps = program(OF_MLFLOW, MLFLOW_TRACKING_URI=address)
        elif kind == "wandb":
            job, count = moved(stack, project, out, kind)
            runs, steps = program(OF_WANDB, str(out / "runs"))
        else:
            job, count = moved(stack, project, out, kind, str(free_port()))
            runs, steps = program(OF_TENSORBOARD, str(out / "runs"))
    assert runs == ([job] if kind != "tensorboard" else [])
    assert sorted(steps) == list(range(1, count + 1)), "no gap, and no step twice"
