"""The owner's last word, by the command line, where the daemon hangs, is stopped or is gone."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.provider.inventory import load_lending
from mesh.stack import Stack, StackNode
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
    until(lambda: state_of(pid) == "T", "it to stand still")


def test_a_node_is_its_owners_again_whatever_its_daemon_does(make_stack: Callable[..., Stack]) -> None:
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
    until(lambda: read(first, "status")["paused"] and not read(first, "status")["guests"], "it to know")
    assert second is not first

    stopped(second)
    try:
        answer = read(second, "reclaim", "--now")  # before the others take it for dead
        assert "without the daemon" in answer["by"] and answer["reclaimed"] == [job] and not guests_of(second)
    finally:
        send(signal.SIGCONT, second)
    until(lambda: not read(second, "status")["guests"], "it to know")
    until(lambda: job_state(user, job)["state"] == "pending", "the job to wait")
    reasons = [attempt["reason"] for attempt in job_state(user, job)["attempts"]]
    assert all("its owner took the machine back at once" in reason for reason in reasons), reasons

    ok(first, "resume")
    running_with_checkpoint(user, job)
    assert "1 guests have gone" in ok(first, "killall"), "a daemon that is well takes no harm"
    until(lambda: read(first, "status")["paused"] and not read(first, "status")["guests"], "it to know")
    ok(user, "cancel", job)
    finished(user, job)
    assert "no guest was alive" in ok(first, "killall")
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert "no guest was alive" in ok(first, "killall") and mesh(first, "reclaim", "--now").returncode == 0


def test_where_no_daemon_ever_ran_there_is_nothing_to_end(tmp_path: Path) -> None:
    done = mesh(tmp_path, "reclaim", "--now")
    assert done.returncode == 3 and "mesh up" in done.stderr
    assert "no guest was alive" in ok(tmp_path, "killall")
    done = mesh(tmp_path / "nowhere", "killall")
    assert done.returncode == 3 and "--state" in done.stderr
