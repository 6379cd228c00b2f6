"""Jobs that wait, on real daemons: who goes first when a place becomes free."""

from collections.abc import Callable

import pytest

from mesh.stack import Stack, StackNode
from tests.e2e.commands import job_state, ok, until

pytestmark = pytest.mark.e2e


def submit(node: StackNode, *options: str, seconds: str = "60") -> str:
    return ok(node, "submit", "--no-workdir", *options, "--", "sleep", seconds).strip()


def runs(node: StackNode, job: str) -> bool:
    return job_state(node, job).get("state") == "running"


def heard_to_wait(job: str, *nodes: StackNode) -> bool:
    """Whether all these nodes have heard from its steward that it waits; a witness knows before that it is pending."""
    return all("no node can run it now" in job_state(node, job).get("detail", "") for node in nodes)


def test_the_higher_priority_goes_first_though_it_came_later(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user, *hosts = stack.nodes
    ok(user, "pause")
    ok(hosts[1], "pause")
    running = submit(hosts[0])
    until(lambda: runs(user, running), "the only place to be taken")
    low = submit(user, "--priority", "10")
    until(lambda: heard_to_wait(low, *stack.nodes), "the low one to wait")
    high = submit(hosts[1], "--priority", "90")
    until(lambda: heard_to_wait(high, *stack.nodes), "the high one to wait")
    ok(user, "cancel", running)
    until(lambda: runs(user, high), "the high one to run")
    assert job_state(user, low)["state"] == "pending"
    ok(user, "cancel", high)
    until(lambda: runs(user, low), "the low one to run at last")
    ok(user, "cancel", low)
