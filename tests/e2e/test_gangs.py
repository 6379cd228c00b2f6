"""Jobs on several nodes at once, on real daemons: together or not at all, and on again when one is gone."""

import hashlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.stack import Stack, StackNode
from tests.e2e.commands import (
    ENDLESS,
    count_of,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    until,
)

pytestmark = pytest.mark.e2e


def submit(node: StackNode, nodes: str, *arguments: str, steps: int, end: Path | None = None) -> str:
    """`end`: it ends once there is that file."""
    order = ["submit", "--nodes", nodes, "--ckpt", "ckpts", "--ckpt-mode", "rename", "--grace", "10s"]
    order += ["--env", f"UNTIL={end}"] if end is not None else []
    return ok(node, *order, "--", sys.executable, "together.py", str(steps), "0.03", *arguments).strip()


def digest(steps: int) -> str:
    """What it ends with, on however many nodes."""
    text = ""
    for step in range(1, steps + 1):
        total = sum(int(hashlib.sha256(f"{step}/{shard}".encode()).hexdigest()[:8], 16) for shard in range(6))
        text = hashlib.sha256(f"{text}{total}".encode()).hexdigest()
    return text


def last_line(node: StackNode, job: str) -> str:
    return ok(node, "logs", job).splitlines()[-1]


def free(node: StackNode) -> int:
    return sum(row["slots_free"] for row in read(node, "nodes")["nodes"])


def crew(state: dict[str, Any]) -> list[str]:
    return [state["node"], *state["mates"]]


def test_all_have_a_place_or_nobody_has(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit(user, "3", steps=30)
    until(lambda: "2 of the 3 nodes it needs" in job_state(user, job).get("detail", ""), "it to say what is missing")
    assert free(user) == 3 and not any(read(node, "status")["guests"] for node in stack.nodes)
    ok(user, "resume")
    state = until(lambda: (s := job_state(user, job)) and s["state"] == "running" and s, "it to run")
    assert sorted(crew(state)) == ["node1", "node2", "node3"]
    assert finished(user, job)["state"] == "done" and last_line(user, job) == f"digest {digest(30)}"
    until(lambda: free(user) == 3, "every place to be free again")
    refused = mesh(user, "submit", "--nodes", "4", "--no-workdir", "--", "true")
    assert refused.returncode == 6 and "3 of the nodes could run it, and it needs 4" in refused.stderr


def test_a_mate_that_dies_costs_the_steps_since_the_checkpoint_and_one_that_leaves_none(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    end_of = stack.directory / "end"
    job = submit(user, "2..3", steps=ENDLESS, end=end_of)
    state = running_with_checkpoint(user, job)
    assert len(state["mates"]) == 2
    dead = stack.node(state["mates"][0])
    send(signal.SIGKILL, dead)
    after = running_with_checkpoint_again(user, job, attempt=1)
    first = after["attempts"][0]
    assert "lost" in first["reason"] and dead.nick in first["reason"] and first["exit_code"] not in {None, 0}
    assert len(after["mates"]) == 1 and dead.nick not in crew(after), "two are enough"
    ok(stack.node(after["mates"][0]), "reclaim")
    ok(user, "resume")
    running_with_checkpoint_again(user, job, attempt=2)
    end_of.touch()
    end = finished(user, job)
    steps, found = count_of(user, job)
    assert end["state"] == "done" and found == digest(steps)
    second, third = end["attempts"][1:3]
    assert "took the machine back" in second["reason"]
    assert second["last_step"] == third["resumed_step"], "not a step is done twice"


def running_with_checkpoint_again(node: StackNode, job: str, attempt: int) -> dict[str, Any]:
    def there() -> Any:
        state = job_state(node, job)
        last = state["attempts"][-1]
        again = last["number"] >= attempt and state["state"] == "running"
        return again and (state["checkpoint"]["step"] or 0) > (last["resumed_step"] or 0) and state

    state: dict[str, Any] = until(there, "it to go on and to save")
    return state


def test_a_mate_that_fails_is_the_jobs_failure(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit(user, "3", "20", steps=60)
    end = finished(user, job)
    assert end["state"] == "failed" and "exit 3 on node" in end["outcome"]["detail"]
    until(lambda: free(user) == 3, "every place to be free again")


def test_a_cancel_ends_all_of_them(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user = stack.nodes[0]
    job = submit(user, "3", steps=ENDLESS)
    running_with_checkpoint(user, job)
    ok(user, "cancel", job)
    until(lambda: free(user) == 3, "every place to be free again")
    assert not any(read(node, "status")["guests"] for node in stack.nodes)
