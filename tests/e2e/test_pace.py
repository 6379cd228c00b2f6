"""A node whose uplink has a small budget leaves: what must go with it does not keep to that."""

import signal
import sys
from collections.abc import Callable

import pytest

from mesh.stack import Stack
from tests.e2e.commands import finished, ok, read, running_with_checkpoint, send, until

pytestmark = pytest.mark.e2e
BALLAST = 64_000_000  # more than the budget lets through in the grace and the half minute after it


def test_a_last_checkpoint_leaves_by_its_deadline_whatever_the_budget(make_stack: Callable[..., Stack]) -> None:
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
    events = read(submitter, "events", job)["events"]
    assert not [event for event in events if event.get("new") == "late"], "nothing was known of the link"
