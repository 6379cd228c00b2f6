"""A job whose checkpoint or whose witnesses cannot be had any more goes on: real daemons, real sockets."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptstore.store import Fence
from mesh.daemon.stack import Stack, StackNode
from mesh.model.spec import parse_job
from tests.e2e.commands import (
    count_digest,
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

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]

# Loaded by Python at its start, before any other module.
OLDER_RELEASE = """
import mesh.model.spec

def decode_spec(payload):
    raise mesh.model.spec.SpecError("not a job description: it has an unknown field")

mesh.model.spec.decode_spec = decode_spec
"""


def killed(*nodes: StackNode) -> None:
    send(signal.SIGKILL, *nodes)
    for node in nodes:
        until(lambda node=node: not node.running, f"{node.nick} to end")  # type: ignore[misc]


def started(stack: Stack, node: StackNode) -> None:
    stack.start(node)
    until(lambda: mesh(node, "status").returncode == 0, f"{node.nick} to answer")


def test_job_whose_last_checkpoint_is_lost_continues_from_the_one_before(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit_endless(user, end_of(stack), "--replicas", "2")
    host = stack.node(running_with_checkpoint(user, job)["node"])
    others = [node for node in stack.nodes if node is not host]
    for node in others:
        ok(node, "pause")
    until(lambda: job_state(user, job)["checkpoint"]["seq"] >= 3, "a checkpoint with a predecessor")
    killed(host)
    for node in others:
        until(lambda node=node: job_state(node, job)["state"] == "pending", "the job to wait for a node")  # type: ignore[misc]
    # Both are witnesses, and at least one of them knows the last commit.
    watcher = max(others, key=lambda node: job_state(node, job)["checkpoint"]["seq"])
    last = job_state(watcher, job)["checkpoint"]
    (before,) = [row for row in read(watcher, "ckpt", "ls", job)["checkpoints"] if row["use"] == "predecessor"]
    for node in others:
        mesh(node, "ckpt", "rm", "--force", last["manifest"])
        assert last["manifest"] not in {row["id"] for row in read(node, "ckpt", "ls", job)["checkpoints"]}
    shutil.rmtree(host.where.store)
    started(stack, host)
    state = running_with_checkpoint(watcher, job)
    resumed = state["attempts"][-1]["resumed_step"]
    told = [f"checkpoint {last['seq']} abandoned", f"checkpoint {before['seq']} at step {resumed} committed"]
    until(lambda: all(text in ok(watcher, "job", "events", job) for text in told), "the user to be told")
    end_of(stack).touch()
    assert finished(watcher, job)["state"] == "done" and exact(watcher, job)


def test_node_that_took_a_later_uncommitted_checkpoint_restores_the_committed_one(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    user, host, heir = stack.nodes
    ok(user, "pause")
    killed(heir)

    def dead() -> bool:
        return (heir.nick, "dead") in {(row["nick"], row["state"]) for row in read(user, "nodes")["nodes"]}

    until(dead, "the third node to be declared dead")
    job = submit_endless(user, end_of(stack), "--replicas", "1")
    assert running_with_checkpoint(user, job)["node"] == host.nick
    # What remains of a checkpoint of the next term whose writer died before it was committed.
    fence = heir.where.store / "fences" / parse_job(job).hex()
    fence.write_bytes(msgspec.json.encode(Fence(term=2, config=0)))
    started(stack, heir)
    until(lambda: stack.sees(user, 3), "the third node to be back")
    killed(host)
    step = job_state(user, job)["checkpoint"]["step"]
    state = running_with_checkpoint(user, job, elsewhere=host.nick)
    assert state["node"] == heir.nick and state["attempts"][-1]["resumed_step"] >= step
    end_of(stack).touch()
    assert finished(user, job)["state"] == "done" and exact(user, job)


@pytest.mark.long
def test_two_witnesses_depart_while_the_only_newcomers_cannot_read_the_job(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLDER_RELEASE)
    stack = make_stack(5)
    user = stack.nodes[0]
    job = submit_endless(user, end_of(stack))
    state = running_with_checkpoint(user, job)
    host = stack.node(state["node"])
    old = [node for node in stack.nodes if node is not host and node.nick not in state["witnesses"]]
    assert old
    killed(*old)
    for node in old:
        node.within = ("env", f"PYTHONPATH={tmp_path}")
        started(stack, node)
    until(lambda: stack.sees(host, 5), "the older nodes to be back")
    for leaver in [stack.node(nick) for nick in state["witnesses"] if nick != host.nick][:2]:
        ok(leaver, "down")
        step = job_state(host, job)["step"]
        # 300 steps take longer than a lease.
        until(lambda step=step: (job_state(host, job)["step"] or 0) > step + 300, "the job to go on")  # type: ignore[misc]
    now = job_state(host, job)
    assert now["node"] == host.nick and len(now["attempts"]) == 1
    end_of(stack).touch()
    assert finished(host, job)["state"] == "done"
    # A line about the last checkpoint may follow: the older nodes do not take it.
    lines = ok(host, "logs", job).splitlines()
    (counted,) = [line for line in lines if line.startswith("counted ")]
    assert f"digest {count_digest(int(counted.removeprefix('counted ')))}" in lines
