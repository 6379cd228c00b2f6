"""Nodes with a small uplink budget: urgent checkpoints ignore it, and large submissions show progress."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import finished, mesh, ok, read, running_with_checkpoint, send, until

pytestmark = pytest.mark.e2e
BALLAST = 64_000_000  # bytes; more than the budget allows in the grace and the 30 s after it


@pytest.mark.long
def test_final_checkpoint_ignores_the_uplink_budget_to_meet_its_deadline(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3, upload_mbps=8, grace_s=10.0)
    submitter = stack.nodes[2]
    ok(submitter, "pause")
    order = ("submit", "--ckpt", "ckpts", "--ckpt-mode", "rename", "--replicas", "1")
    job = ok(submitter, *order, "--", sys.executable, "ballast.py", str(BALLAST)).strip()
    first = stack.node(running_with_checkpoint(submitter, job)["node"])
    send(signal.SIGTERM, first)
    until(lambda: not first.running, "the node to have left")
    state = finished(submitter, job)
    assert state["state"] == "done" and [attempt["resumed_step"] for attempt in state["attempts"]] == [None, 2]
    lines = ok(submitter, "logs", job).splitlines()
    (back,) = (line.removeprefix("back ") for line in lines if line.startswith("back "))
    assert f"saved {back}" in lines
    events = read(submitter, "job", "events", job)["events"]
    assert not [event for event in events if event.get("new") == "late"], "no event may call the checkpoint late"


def test_large_submission_shows_progress(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    node = make_stack(2, upload_mbps=8).nodes[0]
    (tmp_path / "data").write_bytes(os.urandom(5_000_000))
    done = mesh(node, "submit", "--workdir", str(tmp_path), "--", "true")
    assert done.returncode == 0
    assert re.search(r"copying the working directory to other nodes: \d\.\d of 4\.8 MiB to node2\n", done.stderr), done
    assert finished(node, done.stdout.strip())["state"] == "done"
