"""Gang jobs on real daemons: all members start together, and the gang resumes after the loss of one."""

import hashlib
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import (
    ENDLESS,
    WAIT_S,
    count_of,
    end_of,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    start,
    until,
)

pytestmark = pytest.mark.e2e


def submit(
    node: StackNode, nodes: str, *arguments: str, steps: int, end: Path | None = None, options: tuple[str, ...] = ()
) -> str:
    """Submit a gang job and return its id. With `end`, it ends when that file exists."""
    order = ["submit", "--nodes", nodes, "--ckpt", "ckpts", "--ckpt-mode", "rename", "--grace", "10s", *options]
    order += ["--env", f"UNTIL={end}"] if end is not None else []
    return ok(node, *order, "--", sys.executable, "together.py", str(steps), "0.03", *arguments).strip()


def digest(steps: int) -> str:
    """Return the final digest, which does not depend on the number of nodes."""
    text = ""
    for step in range(1, steps + 1):
        total = sum(int(hashlib.sha256(f"{step}/{shard}".encode()).hexdigest()[:8], 16) for shard in range(6))
        text = hashlib.sha256(f"{text}{total}".encode()).hexdigest()
    return text


def last_line(node: StackNode, job: str) -> str:
    return ok(node, "logs", job).splitlines()[-1]


def free(node: StackNode) -> int:
    return sum(row["slots_free"] for row in read(node, "nodes")["nodes"])


def gang_of(state: dict[str, Any]) -> list[str]:
    return [state["node"], *state["gang"]]


def test_gang_starts_only_when_all_members_have_a_place(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit(user, "3", steps=30)
    until(
        lambda: "2 of the 3 nodes it needs" in job_state(user, job).get("detail", ""),
        "the job to report the missing nodes",
    )
    assert free(user) == 3 and not any(read(node, "status")["guests"] for node in stack.nodes)
    ok(user, "lend")
    state = until(lambda: (s := job_state(user, job)) and s["state"] == "running" and s, "the job to run")
    assert sorted(gang_of(state)) == ["node1", "node2", "node3"]
    assert finished(user, job)["state"] == "done" and last_line(user, job) == f"digest {digest(30)}"
    until(lambda: free(user) == 3, "all slots to be free")
    refused = mesh(user, "submit", "--nodes", "4", "--no-workdir", "--", "true")
    assert refused.returncode == 6 and "3 of the nodes could run it, and it needs 4" in refused.stderr


def test_dead_gang_member_costs_steps_and_a_leaving_member_costs_none(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit(user, "2..3", steps=ENDLESS, end=end_of(stack))
    state = running_with_checkpoint(user, job)
    assert len(state["gang"]) == 2
    dead = stack.node(state["gang"][0])
    send(signal.SIGKILL, dead)
    after = running_with_checkpoint_again(user, job, attempt=1)
    first = after["attempts"][0]
    assert "lost" in first["reason"] and dead.nick in first["reason"] and first["exit_code"] not in {None, 0}
    assert len(after["gang"]) == 1 and dead.nick not in gang_of(after), "the gang must continue with two members"
    ok(stack.node(after["gang"][0]), "reclaim")
    ok(user, "lend")
    running_with_checkpoint_again(user, job, attempt=2)
    end_of(stack).touch()
    end = finished(user, job)
    steps, found = count_of(user, job)
    assert end["state"] == "done" and found == digest(steps)
    second, third = end["attempts"][1:3]
    assert "took the machine back" in second["reason"]
    assert second["last_step"] == third["resumed_step"], "no step may run twice"


def running_with_checkpoint_again(node: StackNode, job: str, attempt: int) -> dict[str, Any]:
    def there() -> Any:
        state = job_state(node, job)
        last = state["attempts"][-1]
        again = last["number"] >= attempt and state["state"] == "running"
        return again and (state["checkpoint"]["step"] or 0) > (last["resumed_step"] or 0) and state

    state: dict[str, Any] = until(there, "the job to resume and to commit a checkpoint")
    return state


def test_failed_gang_member_fails_the_job(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit(user, "3", "20", steps=60)
    end = finished(user, job)
    assert end["state"] == "failed" and ": exit 3; see `mesh logs --rank " in end["outcome"]["detail"]
    until(lambda: free(user) == 3, "all slots to be free")


def test_gang_is_not_done_before_its_last_rank(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    stack = make_stack(2)
    user, go_on = stack.nodes[0], tmp_path / "go-on"
    program = f"[ $RANK = 0 ] || {{ until [ -e {go_on} ]; do sleep 0.1; done; exit 4; }}"
    job = ok(user, "submit", "--nodes", "2", "--no-workdir", "--", "sh", "-c", program).strip()
    waits = until(
        lambda: (s := job_state(user, job)) and "rank 0 has ended" in s.get("detail", "") and s, "rank 0 to end"
    )
    assert waits["state"] == "running" and waits["gang"][0] in waits["detail"]
    go_on.touch()
    end = finished(user, job)
    assert end["state"] == "failed" and end["outcome"]["exit_code"] == 4
    assert f"rank 1 on {waits['gang'][0]}: exit 4" in end["outcome"]["detail"]
    until(lambda: free(user) == 2, "all slots to be free")


def test_cancel_ends_all_gang_members(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit(user, "3", steps=ENDLESS)
    running_with_checkpoint(user, job)
    ok(user, "cancel", job)
    until(lambda: free(user) == 3, "all slots to be free")
    assert not any(read(node, "status")["guests"] for node in stack.nodes)


def test_output_of_each_rank_can_be_read(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    stack = make_stack(4)
    user, go_on = stack.nodes[0], tmp_path / "go-on"
    ok(user, "pause")
    program = f"echo rank $RANK begins; until [ -e {go_on} ]; do sleep 0.1; done; echo rank $RANK goes on;"
    program += " [ $RANK = 2 ] || exec sleep 600; echo its data is damaged; exit 3"
    job = ok(user, "submit", "--nodes", "3", "--grace", "10s", "--no-workdir", "--", "sh", "-c", program).strip()
    follower = start(user, "logs", "-f", "--rank", "1", job)
    assert follower.stdout is not None and follower.stdout.readline() == "rank 1 begins\n"
    hosts = [stack.node(nick) for nick in gang_of(job_state(user, job))]
    for rank in range(3):
        until(lambda rank=rank: ok(user, "logs", "--rank", str(rank), job) == f"rank {rank} begins\n", "its output")
        text = f"rank {rank} begins\n"
        until(
            lambda text=text: any(text in path.read_text() for path in user.where.logs.rglob("*.copy")),
            "a copy of the log with a witness",
        )
    go_on.touch()
    end = finished(user, job)
    assert end["outcome"]["exit_code"] == 3
    points_to = f"rank 2 on {hosts[2].nick}: exit 3; see `mesh logs --rank 2 {job[:8]}`"
    assert points_to in end["outcome"]["detail"]
    told = ok(user, "why", job).split("see `mesh ", 1)[1].split("`")[0]
    assert mesh(None, *shlex.split(told)).stdout.startswith("rank 2 begins\n"), "the command is about the same daemon"
    assert ok(user, "logs", "--rank", "2", "-n", "1", job) == "its data is damaged\n"
    rest, _ = follower.communicate(timeout=WAIT_S)
    assert follower.returncode == 0 and f"{points_to}: 10 s to save" in rest, "its notice names the rank that failed"
    none = mesh(user, "logs", "--rank", "3", job)
    assert none.returncode == 4 and "has no rank 3: it has ranks 0 to 2" in none.stderr
    send(signal.SIGKILL, hosts[0], hosts[2])
    for rank in (0, 2):  # from what a witness or the result has: rank 1's node, a witness, must not answer with its own
        kept = until(lambda rank=rank: ok(user, "logs", "--rank", str(rank), job), "what is kept of its output")
        assert kept.startswith(f"rank {rank} begins\n")
