"""A job's hosts, submitter and witnesses leave, die, and come back: real daemons, real signals."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.jobs.journal import Journal
from mesh.jobs.spec import parse_job
from mesh.jobs.status import PastJob
from mesh.stack import Stack, StackNode
from tests.e2e.commands import (
    descendants,
    exact,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    state_of,
    submit_count,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]


def ended(node: StackNode) -> None:
    until(lambda: not node.running, f"{node.nick} to end")


def end_of(stack: Stack) -> Path:
    """The file that ends this stack's counting job."""
    return stack.directory / "end"


def counted(stack: Stack, node: StackNode, job: str) -> dict[str, Any]:
    """Once it goes on, let the count end; how it did, as this node knows it."""
    running_with_checkpoint(node, job)
    end_of(stack).touch()
    state = finished(node, job)
    assert state["state"] == "done" and exact(node, job)
    return state


def living(stack: Stack) -> StackNode:
    return next(node for node in stack.nodes if node.running)


def rows(node: StackNode) -> dict[str, dict[str, Any]]:
    return {row["nick"]: row for row in read(node, "nodes")["nodes"]}


def test_host_leaves_host_dies_submitter_dies_and_the_count_is_exact(make_stack: MakeStack) -> None:
    stack = make_stack(5)
    submitter = stack.nodes[4]
    ok(submitter, "pause")
    job = submit_endless(submitter, end_of(stack), "--replicas", "3")
    first = stack.node(running_with_checkpoint(submitter, job)["node"])
    send(signal.SIGTERM, first)
    ended(first)
    second = stack.node(running_with_checkpoint(submitter, job, elsewhere=first.nick)["node"])
    send(signal.SIGKILL, second)
    ended(second)
    third = running_with_checkpoint(submitter, job, elsewhere=second.nick)["node"]
    until(lambda: second.nick not in job_state(stack.node(third), job)["witnesses"], "the dead witness to be replaced")
    send(signal.SIGKILL, submitter)
    ended(submitter)
    left = living(stack)
    state = counted(stack, left, job)
    reasons = [attempt["reason"] for attempt in state["attempts"]]
    assert reasons[0] == "vacated: its node leaves" and reasons[-1] == "done"
    assert any(reason in {"node lost", "lease expired"} for reason in reasons[1:-1])
    saved = state["attempts"][0]["last_step"]
    assert state["attempts"][1]["resumed_step"] == saved, "a graceful leave loses no step"
    assert state["attempts"][2]["resumed_step"] > saved
    shown = rows(left)
    assert shown[first.nick]["state"] == "left" and shown[second.nick]["state"] == "dead"


def test_witnesses_that_die_are_replaced_one_after_the_other(make_stack: MakeStack) -> None:
    """Five nodes, three witnesses; the two that do not run the job are killed, each after the one before was replaced."""
    stack = make_stack(5)
    job = submit_count(stack.nodes[0], 100_000)
    state = running_with_checkpoint(stack.nodes[0], job)
    host = stack.node(state["node"])
    victims = [nick for nick in state["witnesses"] if nick != host.nick][:2]
    for victim in victims:
        send(signal.SIGKILL, stack.node(victim))
        ended(stack.node(victim))

        def replaced(gone: str = victim) -> bool:
            now = job_state(host, job)
            return gone not in now["witnesses"] and len(now["witnesses"]) == 3

        until(replaced, f"{victim} to be replaced as a witness")
    assert job_state(host, job)["node"] == host.nick, "the job itself stayed where it was"
    ok(host, "cancel", job)
    assert finished(host, job)["outcome"]["kind"] == "cancelled"


def test_without_a_majority_of_witnesses_a_job_stands_still_says_so_and_goes_on_when_one_is_back(
    make_stack: MakeStack,
) -> None:
    stack = make_stack(4)
    job = submit_endless(stack.nodes[0], end_of(stack))
    state = running_with_checkpoint(stack.nodes[0], job)
    victims = [stack.node(nick) for nick in state["witnesses"] if nick != state["node"]][:2]
    watcher = next(node for node in stack.nodes if node not in victims)
    for victim in victims:
        send(signal.SIGKILL, victim)
    until(lambda: job_state(watcher, job)["state"] == "stranded", "the loss of the majority to be noticed")
    assert "nodes that keep its record are gone" in ok(watcher, "why", job)
    if state["node"] == watcher.nick:
        until(lambda: "frozen" in ok(watcher, "events", job), "the guest to be frozen")
    stack.start(victims[0])
    counted(stack, watcher, job)


def test_a_witness_that_leaves_is_replaced_before_it_goes(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    job = submit_count(stack.nodes[0], 100_000)
    state = running_with_checkpoint(stack.nodes[0], job)
    host = stack.node(state["node"])
    leaver = next(nick for nick in state["witnesses"] if nick != host.nick)
    ok(stack.node(leaver), "down")
    now = job_state(host, job)
    assert leaver not in now["witnesses"] and len(now["witnesses"]) == 3
    until(lambda: rows(host)[leaver]["state"] == "left", "its farewell to be heard")


async def put_away(path: Path, job: str) -> bool:
    """As a daemon does once it has been over for long, and a thousand others after it; whether this one has heard of its end."""
    journal = Journal(path)
    await journal.open()
    past = [
        PastJob(cell.job, "long-ago", "", None, cell.ledger.outcome.kind, cell.ledger.outcome.ended_unix_ms, 60)
        for cell in (await journal.cells())[0]
        if cell.final and cell.ledger.outcome is not None and cell.job == parse_job(job)
    ]
    await journal.put_away(past)
    await journal.close()
    return bool(past)


def test_after_a_power_cut_of_the_whole_mesh_every_job_goes_on(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    done = ok(stack.nodes[0], "submit", "--no-workdir", "--", "true").strip()
    past = ok(stack.nodes[0], "submit", "--no-workdir", "--name", "long-ago", "--", "echo", "so long").strip()
    for job in (done, past):
        finished(stack.nodes[0], job)
    job = submit_endless(stack.nodes[0], end_of(stack))
    state = running_with_checkpoint(stack.nodes[0], job)
    for node in stack.nodes:
        send(signal.SIGKILL, node)
    for node in stack.nodes:
        ended(node)
    first, *_ = [node for node in stack.nodes if asyncio.run(put_away(node.where.journal, past))]
    stack.start_all()
    for node in (stack.nodes[1], first):
        until(lambda node=node: job_state(node, done).get("state") == "done", "a restarted daemon to know its jobs")  # type: ignore[misc]
    assert "and 1 that were over before" in mesh(first, "ps", "-a").stderr
    assert {done, past} <= {row["job"] for row in read(first, "ps", "--since", "1d")["jobs"]}
    assert "the job is over: done" in ok(first, "describe", past[:12]), "it is found when it is named"
    assert ok(first, "logs", "long-ago") == "so long\n" and mesh(first, "wait", past).returncode == 0
    end = counted(stack, stack.nodes[2], job)
    assert end["attempts"][-1]["resumed_step"] >= state["checkpoint"]["step"]


def test_a_guest_dies_with_its_daemon(make_stack: MakeStack) -> None:
    stack = make_stack(1)
    node = stack.nodes[0]
    script = "echo $$ > $MESH_OUT_DIR/pid; trap '' TERM HUP; while :; do sleep 0.1; done"
    job = ok(node, "submit", "--no-workdir", "--", "sh", "-c", script).strip()
    until(lambda: job_state(node, job).get("state") == "running", "the job to run")
    guests = until(lambda: [pid for pid in descendants(node.process.pid) if "sleep 0.1" in pid[1]], "its guest")  # type: ignore[union-attr]
    send(signal.SIGKILL, node)
    ended(node)
    until(lambda: not any(alive(pid) for pid, _ in guests), "its guest to end")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_owner_takes_the_machine_back_with_notice_and_at_once(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    job = submit_count(stack.nodes[0], 100_000)
    first = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    answer = read(first, "reclaim")
    assert answer["reclaimed"] == [job] and read(first, "status")["guests"] == [] and read(first, "status")["paused"]
    second = stack.node(running_with_checkpoint(stack.nodes[0], job, elsewhere=first.nick)["node"])
    assert "1 guests have gone" in ok(second, "reclaim", "--now")
    third = stack.node(running_with_checkpoint(stack.nodes[0], job, elsewhere=second.nick)["node"])
    assert third not in (first, second), "who was reclaimed gets no guests"
    reasons = [attempt["reason"] for attempt in job_state(stack.nodes[0], job)["attempts"]]
    assert reasons[:2] == [
        "vacated: its owner took the machine back",
        "vacated: its owner took the machine back at once",
    ]
    ok(third, "reclaim", "--now")
    until(lambda: job_state(stack.nodes[0], job)["state"] == "pending", "the job to wait")
    until(lambda: "paused" in ok(stack.nodes[0], "why", job), "the pause to be known")
    ok(first, "resume")
    running_with_checkpoint(stack.nodes[0], job)
    assert job_state(stack.nodes[0], job)["node"] == first.nick
    ok(stack.nodes[0], "cancel", job)


def test_a_pause_takes_no_new_guest_keeps_the_old_and_is_remembered(make_stack: MakeStack) -> None:
    stack = make_stack(2, slots=2)
    job = submit_count(stack.nodes[0], 100_000)
    host = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    other = next(node for node in stack.nodes if node is not host)
    assert "1 guest still runs" in ok(host, "pause")
    until(lambda: not rows(other)[host.nick]["lending"], "the pause to spread")
    second = submit_count(stack.nodes[0], 100_000)
    assert running_with_checkpoint(stack.nodes[0], second)["node"] == other.nick
    assert job_state(stack.nodes[0], job)["node"] == host.nick
    for each in (job, second):
        ok(stack.nodes[0], "cancel", each)
    send(signal.SIGKILL, host)
    ended(host)
    stack.start(host)
    until(lambda: mesh(host, "status").returncode == 0, "the daemon to answer")
    assert read(host, "status")["paused"]


def test_down_now_kills_guests_and_they_go_on_elsewhere(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    job = submit_endless(stack.nodes[0], end_of(stack))
    host = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    assert ok(host, "down", "--now").endswith("down\n") and not host.running
    state = counted(stack, living(stack), job)
    assert state["attempts"][0]["reason"] == "vacated: its node leaves at once"


def test_a_job_that_ignores_its_notice_is_killed_when_its_grace_is_over(make_stack: MakeStack) -> None:
    stack = make_stack(2, grace_s=600.0)
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.1; done"
    job = ok(stack.nodes[0], "submit", "--no-workdir", "--", "sh", "-c", script).strip()
    until(lambda: "ready" in ok(stack.nodes[0], "logs", job), "it to be able to ignore one")
    host = stack.node(job_state(stack.nodes[0], job)["node"])
    answer = read(host, "reclaim", "--grace", "1s")
    assert answer["reclaimed"] == [job] and 1.0 <= answer["seconds"] < 300.0, "not its node's usual grace"
    ok(stack.nodes[0], "cancel", job)


def test_a_witness_that_lost_its_journal_is_no_witness_until_it_is_asked_again(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_endless(user, end_of(stack))
    state = running_with_checkpoint(user, job)
    forgetful = stack.node(next(nick for nick in state["witnesses"] if nick not in {user.nick, state["node"]}))
    send(signal.SIGKILL, forgetful)
    ended(forgetful)
    for path in forgetful.where.root.glob("journal.sqlite*"):
        path.unlink()
    stack.start(forgetful)
    until(lambda: mesh(forgetful, "status").returncode == 0, "it to be back")
    # Of the three, the host's own record may be one: its end must be survived with what is left.
    host = stack.node(state["node"])
    send(signal.SIGTERM, host)
    ended(host)
    counted(stack, user, job)


def test_a_job_whose_witnesses_are_gone_goes_on_when_its_user_says_so(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_endless(user, end_of(stack), "--replicas", "3")
    state = running_with_checkpoint(user, job)
    lost = [stack.node(nick) for nick in state["witnesses"] if nick != user.nick]
    assert len(lost) == 2
    early = mesh(user, "recover", job, "--yes")
    assert early.returncode == 1 and "goes on by itself" in early.stderr
    for node in lost:  # both at once: one after the other would be replaced
        send(signal.SIGKILL, node)
    for node in lost:
        ended(node)
    until(lambda: job_state(user, job)["state"] == "stranded", "the job to be stranded")
    shown = read(user, "recover", job)
    assert user.nick in shown["kept"] and set(shown["lost"]) == {node.nick for node in lost} and not shown["done"]
    assert shown["checkpoint"]["step"] >= 0 and job_state(user, job)["state"] == "stranded", "it was only asked"
    declined = mesh(user, "recover", job)
    assert declined.returncode == 1 and "history forks here" in declined.stderr
    assert "goes on; its record is kept by" in ok(user, "recover", job, "--yes")
    end = counted(stack, user, job)
    assert "its user made it go on" in ok(user, "events", job)
    # Whoever comes back with the old record finds that it does not count any more.
    back = lost[0]
    stack.start(back)
    until(lambda: mesh(back, "status").returncode == 0, "it to be back")
    until(lambda: job_state(back, job).get("state") == "done", "the one that came back to hear of the end")
    assert job_state(user, job)["attempts"] == end["attempts"]


def test_the_guest_of_a_stopped_daemon_stands_still_when_its_lease_is_over(make_stack: MakeStack) -> None:
    """SIGSTOP to the daemon alone: what holds the guest to its lease is a process of its own."""
    stack = make_stack(4)
    job = submit_endless(stack.nodes[0], end_of(stack))
    host = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    watcher = next(node for node in stack.nodes if node is not host)
    send(signal.SIGSTOP, host)
    assert host.process is not None
    guests = [pid for pid, command in descendants(host.process.pid) if "count.py" in command]
    try:
        until(lambda: guests and all(state_of(pid) == "T" for pid in guests), "the guest to be stopped")
        moved = running_with_checkpoint(watcher, job, elsewhere=host.nick)
    finally:
        send(signal.SIGCONT, host)
    assert counted(stack, watcher, job)["attempts"][-1]["node"] == moved["node"]
    until(lambda: rows(watcher)[host.nick]["state"] == "alive", "the stopped node to be back")
    until(lambda: read(host, "status")["guests"] == [], "it to know that its guest has gone on elsewhere")
