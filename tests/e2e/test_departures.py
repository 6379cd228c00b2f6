"""A job's hosts, submitter and witnesses leave, die, and come back: real daemons, real signals."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.consensus.status import ArchivedJob
from mesh.daemon.stack import Stack, StackNode
from mesh.journal import Journal
from mesh.model.spec import parse_job
from tests.e2e.commands import (
    descendants,
    end_of,
    exact,
    finished,
    job_state,
    mesh,
    ok,
    read,
    running_with_checkpoint,
    send,
    start,
    state_of,
    submit_count,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e
MakeStack = Callable[..., Stack]


def ended(node: StackNode) -> None:
    until(lambda: not node.running, f"{node.nick} to end")


def counted(stack: Stack, node: StackNode, job: str) -> dict[str, Any]:
    """Wait until the job runs, end its count, check the digest and return the state as this node sees it."""
    running_with_checkpoint(node, job)
    end_of(stack).touch()
    state = finished(node, job)
    assert state["state"] == "done" and exact(node, job)
    return state


def living(stack: Stack) -> StackNode:
    return next(node for node in stack.nodes if node.running)


def rows(node: StackNode) -> dict[str, dict[str, Any]]:
    return {row["nick"]: row for row in read(node, "nodes")["nodes"]}


def test_job_survives_leaving_host_dead_host_and_dead_submitter(make_stack: MakeStack) -> None:
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
    assert state["attempts"][1]["resumed_step"] == saved, "a graceful leave must lose no step"
    assert state["attempts"][2]["resumed_step"] > saved
    shown = rows(left)
    assert shown[first.nick]["state"] == "left" and shown[second.nick]["state"] == "dead"


def test_node_stops_at_once_while_somebody_follows_a_log(make_stack: MakeStack) -> None:
    node = make_stack(1).nodes[0]
    job = ok(node, "submit", "--no-workdir", "--", "sh", "-c", "echo runs; exec sleep 600").strip()
    following = start(node, "logs", "-f", job)
    assert following.stdout is not None and following.stdout.readline() == "runs\n"
    ok(node, "down", "--now", timeout_s=30)
    ended(node)
    following.communicate(timeout=30)
    assert following.returncode == 3


def test_dead_witnesses_are_replaced_in_turn(make_stack: MakeStack) -> None:
    """Five nodes, three witnesses. Kill the two that do not run the job, the second after the first was replaced."""
    stack = make_stack(5)
    job = submit_count(stack.nodes[0], 100_000)
    state = running_with_checkpoint(stack.nodes[0], job)
    host = stack.node(state["node"])
    victims = [nick for nick in state["witnesses"] if nick != host.nick][:2]
    for victim in victims:
        send(signal.SIGKILL, stack.node(victim))
        ended(stack.node(victim))

        def replaced(gone: str = victim) -> bool:
            """Tell whether the new group is settled: each of it has it, or the death of another loses the majority of the old."""
            group = job_state(host, job)["witnesses"]
            if gone in group or len(group) != 3:
                return False
            return all(job_state(stack.node(nick), job)["witnesses"] == group for nick in group)

        until(replaced, f"{victim} to be replaced as a witness", 150)
    assert job_state(host, job)["node"] == host.nick, "the job must stay on its host"
    ok(host, "cancel", job)
    assert finished(host, job)["outcome"]["kind"] == "cancelled"


def test_job_without_witness_majority_freezes_and_resumes_when_one_returns(
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
        until(lambda: "frozen" in ok(watcher, "job", "events", job), "the guest to be frozen")
    stack.start(victims[0])
    counted(stack, watcher, job)


def test_leaving_witness_is_replaced_before_it_stops(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    job = submit_count(stack.nodes[0], 100_000)
    state = running_with_checkpoint(stack.nodes[0], job)
    host = stack.node(state["node"])
    leaver = next(nick for nick in state["witnesses"] if nick != host.nick)
    ok(stack.node(leaver), "down")
    now = job_state(host, job)
    assert leaver not in now["witnesses"] and len(now["witnesses"]) == 3
    until(lambda: rows(host)[leaver]["state"] == "left", "the node to be seen as left")


async def archive_job(path: Path, job: str) -> bool:
    """Archive the job in this journal, as a daemon does with old jobs. Return True if the journal holds its outcome."""
    journal = Journal(path)
    await journal.open()
    archived = [
        ArchivedJob(
            witness_record.job,
            "long-ago",
            "",
            None,
            witness_record.record.outcome.kind,
            witness_record.record.outcome.ended_unix_ms,
            60,
        )
        for witness_record in (await journal.witness_records())[0]
        if witness_record.final and witness_record.record.outcome is not None and witness_record.job == parse_job(job)
    ]
    await journal.archive(archived)
    await journal.close()
    return bool(archived)


def test_every_job_resumes_after_a_power_cut_of_the_whole_mesh(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    done = ok(stack.nodes[0], "submit", "--no-workdir", "--", "true").strip()
    archived = ok(stack.nodes[0], "submit", "--no-workdir", "--name", "long-ago", "--", "echo", "so long").strip()
    for job in (done, archived):
        finished(stack.nodes[0], job)
    job = submit_endless(stack.nodes[0], end_of(stack))
    state = running_with_checkpoint(stack.nodes[0], job)
    for node in stack.nodes:
        send(signal.SIGKILL, node)
    for node in stack.nodes:
        ended(node)
    first, *_ = [node for node in stack.nodes if asyncio.run(archive_job(node.where.journal, archived))]
    stack.start_all()
    for node in (stack.nodes[1], first):
        until(lambda node=node: job_state(node, done).get("state") == "done", "a restarted daemon to know its jobs")  # type: ignore[misc]
    assert "and 1 archived job" in mesh(first, "ps", "-a").stderr
    assert {done, archived} <= {row["job"] for row in read(first, "ps", "--since", "1d")["jobs"]}
    assert "the job is over: done" in ok(first, "describe", archived[:12]), (
        "describe must find an archived job by its id"
    )
    assert ok(first, "logs", "long-ago") == "so long\n" and mesh(first, "wait", archived).returncode == 0
    end = counted(stack, stack.nodes[2], job)
    assert end["attempts"][-1]["resumed_step"] >= state["checkpoint"]["step"]


def test_guest_dies_with_its_daemon(make_stack: MakeStack) -> None:
    stack = make_stack(1)
    node = stack.nodes[0]
    script = "echo $$ > $MESH_OUT_DIR/pid; trap '' TERM HUP; while :; do sleep 0.1; done"
    job = ok(node, "submit", "--no-workdir", "--", "sh", "-c", script).strip()
    until(lambda: job_state(node, job).get("state") == "running", "the job to run")
    guests = until(lambda: [pid for pid in descendants(node.process.pid) if "sleep 0.1" in pid[1]], "the guest to run")  # type: ignore[union-attr]
    send(signal.SIGKILL, node)
    ended(node)
    until(lambda: not any(alive(pid) for pid, _ in guests), "the guest to end")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_owner_reclaims_the_machine_with_and_without_notice(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    job = submit_count(stack.nodes[0], 100_000)
    first = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    answer = read(first, "reclaim")
    assert answer["reclaimed"] == [job] and read(first, "status")["guests"] == [] and read(first, "status")["paused"]
    second = stack.node(running_with_checkpoint(stack.nodes[0], job, elsewhere=first.nick)["node"])
    assert "1 guest killed" in ok(second, "reclaim", "--now")
    third = stack.node(running_with_checkpoint(stack.nodes[0], job, elsewhere=second.nick)["node"])
    assert third not in (first, second), "a reclaimed node must receive no guest"
    reasons = [attempt["reason"] for attempt in job_state(stack.nodes[0], job)["attempts"]]
    assert reasons[:2] == [
        "vacated: its owner took the machine back",
        "vacated: its owner took the machine back at once",
    ]
    ok(third, "reclaim", "--now")
    until(lambda: job_state(stack.nodes[0], job)["state"] == "pending", "the job to wait")
    until(lambda: "paused" in ok(stack.nodes[0], "why", job), "the pause to be known")
    ok(first, "lend")
    running_with_checkpoint(stack.nodes[0], job)
    assert job_state(stack.nodes[0], job)["node"] == first.nick
    ok(stack.nodes[0], "cancel", job)


def test_paused_node_keeps_guests_accepts_no_others_and_persists_the_pause(make_stack: MakeStack) -> None:
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


def test_down_now_kills_guests_and_jobs_resume_on_another_node(make_stack: MakeStack) -> None:
    stack = make_stack(3)
    job = submit_endless(stack.nodes[0], end_of(stack))
    host = stack.node(running_with_checkpoint(stack.nodes[0], job)["node"])
    assert ok(host, "down", "--now").endswith("down\n") and not host.running
    state = counted(stack, living(stack), job)
    assert state["attempts"][0]["reason"] == "vacated: its node leaves at once"


def test_job_that_ignores_its_notice_is_killed_after_its_grace(make_stack: MakeStack) -> None:
    stack = make_stack(2, grace_s=600.0)
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.1; done"
    job = ok(stack.nodes[0], "submit", "--no-workdir", "--", "sh", "-c", script).strip()
    until(lambda: "ready" in ok(stack.nodes[0], "logs", job), "the job to be ready to ignore its notice")
    host = stack.node(job_state(stack.nodes[0], job)["node"])
    answer = read(host, "reclaim", "--grace", "1s")
    assert answer["reclaimed"] == [job] and 1.0 <= answer["seconds"] < 300.0, (
        "the given grace must replace the node's default"
    )
    ok(stack.nodes[0], "cancel", job)


def test_witness_that_lost_its_journal_abstains_until_enrolled_again(make_stack: MakeStack) -> None:
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
    until(lambda: mesh(forgetful, "status").returncode == 0, "the restarted daemon to answer")
    # The host's own record may be one of the three. The job must survive the host's end with the other records.
    host = stack.node(state["node"])
    send(signal.SIGTERM, host)
    ended(host)
    counted(stack, user, job)


def test_job_that_lost_its_witnesses_resumes_on_user_command(make_stack: MakeStack) -> None:
    stack = make_stack(4)
    user = stack.nodes[0]
    ok(user, "pause")
    job = submit_endless(user, end_of(stack), "--replicas", "3")
    state = running_with_checkpoint(user, job)
    lost = [stack.node(nick) for nick in state["witnesses"] if nick != user.nick]
    assert len(lost) == 2
    early = mesh(user, "job", "recover", job, "--yes")
    assert early.returncode == 1 and "needs no recovery" in early.stderr
    for node in lost:  # both at once; one at a time, each would be replaced
        send(signal.SIGKILL, node)
    for node in lost:
        ended(node)
    until(lambda: job_state(user, job)["state"] == "stranded", "the job to be stranded")
    shown = read(user, "job", "recover", job)
    assert user.nick in shown["kept"] and set(shown["lost"]) == {node.nick for node in lost} and not shown["done"]
    assert shown["checkpoint"]["step"] >= 0 and job_state(user, job)["state"] == "stranded", (
        "recover without --yes must not change the job"
    )
    declined = mesh(user, "job", "recover", job)
    assert declined.returncode == 1 and "forks the job's history here" in declined.stderr
    assert "recovered; its record is kept by" in ok(user, "job", "recover", job, "--yes")
    end = counted(stack, user, job)
    assert "its user recovered it from" in ok(user, "job", "events", job)
    # A node that returns with the old record finds that the record no longer counts.
    back = lost[0]
    stack.start(back)
    until(lambda: mesh(back, "status").returncode == 0, "the restarted daemon to answer")
    until(lambda: job_state(back, job).get("state") == "done", "the returned node to know the outcome")
    assert job_state(user, job)["attempts"] == end["attempts"]


def test_guest_of_a_stopped_daemon_is_frozen_when_its_lease_expires(make_stack: MakeStack) -> None:
    """Stop only the daemon: a separate watchdog process enforces the guest's lease."""
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
    until(lambda: read(host, "status")["guests"] == [], "the node to drop its guest, which runs on another node")
