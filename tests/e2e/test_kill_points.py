"""Daemons killed by strace(1) in the middle of a save, a commit, a prune, an end or a recovery: nothing is lost, torn or back."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import (
    end_of,
    exact,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    submit_endless,
    until,
)
from tests.kill_points import killed_before

pytestmark = [pytest.mark.e2e, pytest.mark.strace, pytest.mark.timeout(900)]
KILLED_S = 180.0  # a daemon under strace is slow, and the call has to come by itself (own choice)
PACE_S = 0.1  # so a checkpoint stays for 2 s: one of 0.4 s can be gone before a daemon under strace has opened it


@contextmanager
def killed(stack: Stack, node: StackNode, call: str, *paths: Path) -> Iterator[None]:
    """Kill this daemon before its next such call on these paths; start it again and verify what is in its store."""
    assert node.process is not None
    with killed_before(node.process.pid, call, *paths):
        yield
        until(lambda: not node.running, f"{node.nick} to be killed", KILLED_S)
    assert node.process.returncode == -signal.SIGKILL
    stack.start(node)
    until(lambda: mesh(node, "status").returncode == 0, f"{node.nick} to answer again")
    report = read(node, "ckpt", "verify")
    assert (report["bad_chunks"], report["quarantined"], report["lost"]) == (0, [], {}), "torn"


def superseded(node: StackNode, job: str) -> list[str]:
    """Return checkpoints in this node's store that the job does not need any more."""
    return [row["id"] for row in read(node, "ckpt", "ls", job)["checkpoints"] if row["use"] == "older"]


@pytest.mark.long
def test_host_killed_in_a_save_a_commit_a_prune_and_at_the_end(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_endless(user, end_of(stack), "--replicas", "2", pace_s=PACE_S)

    def host() -> StackNode:
        return stack.node(running_with_checkpoint(user, job)["node"])

    def resumed(act: Callable[[], object], node: StackNode, call: str, *paths: Path) -> None:
        before = job_state(user, job)
        with killed(stack, node, call, *paths):
            act()
            until(lambda: not node.running, f"{node.nick} to be killed", KILLED_S)
            seen = job_state(user, job)
        last = seen if len(seen["attempts"]) == len(before["attempts"]) else before
        until(lambda: len(job_state(user, job)["attempts"]) > len(before["attempts"]), "the next attempt")
        after = running_with_checkpoint(user, job)["attempts"][len(before["attempts"])]
        assert after["resumed_step"] >= last["checkpoint"]["step"], "lost"

    def save() -> None:
        """The guest saves on its own."""

    node = host()
    resumed(save, node, "fsync", node.where.store / "packs")  # before it writes the manifest
    node = host()
    resumed(save, node, "fsync", node.where.store / "manifests")  # before it proposes the commit
    node = host()
    resumed(save, node, "fdatasync", Path(f"{node.where.journal}-wal"))  # before it keeps the commit as a witness

    node = host()
    old = until(lambda: superseded(node, job), "a superseded checkpoint")
    resumed(lambda: mesh(node, "ckpt", "rm", old[0]), node, "unlink", node.where.store / "manifests" / old[0])
    for identity in old:
        mesh(node, "ckpt", "rm", identity)  # the node may have removed it by itself
    with killed(stack, node, "unlink", *(node.where.store / "packs").iterdir()):
        # Until one of these packs has nothing left that is needed: the node prunes and collects by itself, too.
        until(lambda: mesh(node, "ckpt", "gc", "--older", "0s") and not node.running, "a pack to be removed", KILLED_S)
    assert not set(old) & {row["id"] for row in read(node, "ckpt", "ls", job)["checkpoints"]}, "back"

    node = host()
    with killed(stack, node, "fdatasync", Path(f"{node.where.journal}-wal")):  # at a commit, or at the end
        end_of(stack).touch()
    state = finished(user, job)
    assert state["state"] == "done" and exact(user, job)
    for node in stack.nodes:
        until(lambda node=node: job_state(node, job)["state"] == "done", f"{node.nick} to know the end")


def test_node_killed_while_it_recovers_a_job_recovers_it_afterwards(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_endless(user, end_of(stack), "--replicas", "3", pace_s=PACE_S)
    state = running_with_checkpoint(user, job)
    lost = [stack.node(nick) for nick in state["witnesses"] if nick != user.nick]
    send(signal.SIGKILL, *lost)
    until(lambda: job_state(user, job)["state"] == "stranded", "the loss to be noticed")
    step = job_state(user, job)["checkpoint"]["step"]
    for call in ("pwrite64", "fdatasync"):  # before the user's order is written, and after
        until(lambda: job_state(user, job)["state"] == "stranded", "the job to be stranded")
        with killed(stack, user, call, Path(f"{user.where.journal}-wal")):
            mesh(user, "job", "recover", job, "--yes")

    def recovered() -> bool:
        done = mesh(user, "job", "recover", job, "--yes")
        return done.returncode == 0 or "needs no recovery" in done.stderr

    until(recovered, "the job to be recovered")
    state = running_with_checkpoint(user, job)
    assert state["attempts"][-1]["resumed_step"] >= step, "lost"
    end_of(stack).touch()
    assert finished(user, job)["state"] == "done" and exact(user, job)
    stack.start(lost[0])
    until(lambda: mesh(lost[0], "status").returncode == 0, "a lost witness to answer again")
    until(lambda: job_state(lost[0], job)["state"] == "done", "a lost witness to know the end")
