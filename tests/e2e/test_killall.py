"""Reclaim by the owner from the command line while the daemon hangs, is stopped or is gone."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack, StackNode
from mesh.gpus.inventory import load_lending
from tests.e2e.commands import (
    descendants,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    state_of,
    submit_count,
    until,
)

pytestmark = pytest.mark.e2e


def guests_of(node: StackNode) -> list[int]:
    assert node.process is not None
    return [pid for pid, line in descendants(node.process.pid) if "count.py" in line and state_of(pid) != "Z"]


def stopped(node: StackNode) -> None:
    send(signal.SIGSTOP, node)
    assert node.process is not None
    pid = node.process.pid
    until(lambda: state_of(pid) == "T", "the daemon to be stopped")


def test_owner_reclaims_a_node_whose_daemon_is_hung_stopped_or_gone(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_count(user, 100_000)
    first = stack.node(running_with_checkpoint(user, job)["node"])
    stopped(first)
    try:
        answer = read(first, "killall")
        assert answer["reclaimed"] == [job] and answer["killed"][0]["left"] == [] and answer["problems"] == []
        assert not guests_of(first) and load_lending(first.where.lending, True).paused
    finally:
        send(signal.SIGCONT, first)
    second = stack.node(running_with_checkpoint(user, job, elsewhere=first.nick)["node"])
    until(
        lambda: read(first, "status")["paused"] and not read(first, "status")["guests"],
        "the daemon to know the reclaim",
    )
    assert second is not first

    stopped(second)
    try:
        answer = read(second, "reclaim", "--now")  # before the other nodes declare it dead
        assert "without the daemon" in answer["by"] and answer["reclaimed"] == [job] and not guests_of(second)
    finally:
        send(signal.SIGCONT, second)
    until(lambda: not read(second, "status")["guests"], "the daemon to know the reclaim")
    until(lambda: job_state(user, job)["state"] == "pending", "the job to wait")
    reasons = [attempt["reason"] for attempt in job_state(user, job)["attempts"]]
    assert all("its owner took the machine back at once" in reason for reason in reasons), reasons

    ok(first, "lend")
    running_with_checkpoint(user, job)
    assert "1 guest killed" in ok(first, "killall"), "killall must also work with a healthy daemon"
    until(
        lambda: read(first, "status")["paused"] and not read(first, "status")["guests"],
        "the daemon to know the reclaim",
    )
    ok(user, "cancel", job)
    finished(user, job)
    assert "no guest was running" in ok(first, "killall")
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert "no guest was running" in ok(first, "killall") and mesh(first, "reclaim", "--now").returncode == 0


def test_killall_without_any_daemon_has_nothing_to_end(tmp_path: Path) -> None:
    done = mesh(tmp_path, "reclaim", "--now")
    assert done.returncode == 3 and "no daemon answers" in done.stderr and " init NAME`" in done.stderr
    assert "no guest was running" in ok(tmp_path, "killall")
    done = mesh(tmp_path / "nowhere", "killall")
    assert done.returncode == 3 and "--state" in done.stderr
