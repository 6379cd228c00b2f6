"""Zone coordinators on real daemons: they hold a job while its witnesses do not answer. Substitute replica nodes."""

import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from mesh.daemon.stack import Stack, StackNode
from tests.e2e.commands import (
    finished,
    job_state,
    ok,
    read,
    running_with_checkpoint,
    send,
    submit_count,
    until,
)

pytestmark = pytest.mark.e2e
ZONE = "127.0.0.0/24"


def told(node: StackNode, job: str, words: str) -> list[str]:
    return [
        event["text"]
        for event in read(node, "job", "events")["events"]
        if event["job"] == job and words in event["text"]
    ]


def submits(node: StackNode) -> dict[str, int]:
    """Return how many jobs each node submits for others, as `node` sees it."""
    (row,) = read(node, "nodes", "--zones")["zones"]
    counts: dict[str, int] = row["submits_for_others"]
    return counts


def test_coordinators_hold_a_job_until_witnesses_return_and_it_runs_once(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(5)
    user, *others = stack.nodes
    (zone,) = read(user, "nodes", "--zones")["zones"]
    assert zone["zone"] == ZONE and len(zone["nodes"]) == 5 and zone["doing"] == "flat"
    assert zone["coordinator"] == zone["line"][0] and {zone["coordinator"]} <= set(zone["nodes"])
    order = {"argv": ["sh", "-c", "echo ran > $MESH_OUT_DIR/ran"], "workdir": None, "on_exit_0": "done"}
    answer: dict[str, Any] = {}
    send(signal.SIGSTOP, *others)
    try:
        submission = Thread(target=lambda: answer.update(user.client.post("/v1/jobs", order, timeout_s=60)))
        submission.start()
        rows = until(lambda: read(user, "ps")["jobs"], "the user's own record")
        witnesses = [node for node in others if node.nick in rows[0]["witnesses"]]
        assert len(witnesses) == 2
        spare = [node for node in others if node not in witnesses]
        send(signal.SIGCONT, *spare)
        submission.join()
        job = answer["job"]
        first = next(node for node in spare if f"{node.nick}, " in answer["warning"])
        (second,) = [node for node in spare if node is not first]
        assert "no majority of its witnesses answers" in answer["warning"] and ZONE in answer["warning"]
        assert f"{first.nick}, " in ok(user, "why", job) and told(first, job, "kept for node1")
        until(lambda: submits(user) == {first.nick: 1}, "the coordinator to announce the job")
        send(signal.SIGKILL, first)
        until(lambda: told(second, job, "kept for node1"), "the next coordinator to take the job")
        assert second.nick in read(user, "why", job)["submitted_by"]
        send(signal.SIGKILL, user)  # only the submission retry holds the job now
        time.sleep(0.5)
    finally:
        send(signal.SIGCONT, *(node for node in others if node.running))
    state = finished(second, job)
    assert state["state"] == "done" and len(state["attempts"]) == 1
    assert told(second, job, "a majority of its witnesses has it now")
    until(lambda: submits(second) == {}, "the coordinator to release the job")


def test_substitute_for_a_chosen_replica_node_is_reported(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(4)
    user, host, chosen, other = stack.nodes
    for node in (user, chosen, other):
        ok(node, "pause")
    job = submit_count(user, 300, "--ckpt-to", chosen.nick, "--replicas", "1", pace_s=0.04)
    assert running_with_checkpoint(user, job)["checkpoint"]["holders"] == [chosen.nick]
    send(signal.SIGSTOP, chosen)
    try:
        words = until(lambda: told(host, job, "in place of"), "a substitute node")
        # The reason depends on the first symptom: the node is gone, it is slow, or a connection to it stalls.
        _, named, why = words[0].partition(f"in place of {chosen.nick}: ")
        assert named and why
        until(lambda: "in place of" in job_state(user, job)["detail"], "the job state to show the substitute")
    finally:
        send(signal.SIGCONT, chosen)
    ok(user, "cancel", job)
