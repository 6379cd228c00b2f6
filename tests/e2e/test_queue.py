"""Order of waiting jobs on real daemons."""

from collections.abc import Callable

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import job_state, ok, until

pytestmark = pytest.mark.e2e


def submit(node: StackNode, *options: str, seconds: str = "60") -> str:
    return ok(node, "submit", "--no-workdir", *options, "--", "sleep", seconds).strip()


def runs(node: StackNode, job: str) -> bool:
    return job_state(node, job).get("state") == "running"


def heard_to_wait(job: str, *nodes: StackNode) -> bool:
    """Return True if all these nodes know from the leader that the job waits. A witness knows earlier that it is pending."""
    return all("no node can run it now" in job_state(node, job).get("detail", "") for node in nodes)


def test_higher_priority_job_starts_first_despite_later_submission(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    user, *hosts = stack.nodes
    ok(user, "pause")
    ok(hosts[1], "pause")
    running = submit(hosts[0])
    until(lambda: runs(user, running), "the only slot to be taken")
    low = submit(user, "--priority", "10")
    until(lambda: heard_to_wait(low, *stack.nodes), "the low-priority job to wait")
    high = submit(hosts[1], "--priority", "90")
    until(lambda: heard_to_wait(high, *stack.nodes), "the high-priority job to wait")
    ok(user, "cancel", running)
    until(lambda: runs(user, high), "the high-priority job to run")
    # It may have asked for the slot by an advert from before; then it is refused and waits again.
    until(lambda: job_state(user, low)["state"] == "pending", "the low-priority job to wait still")
    assert runs(user, high)
    ok(user, "cancel", high)
    until(lambda: runs(user, low), "the low-priority job to run")
    ok(user, "cancel", low)
