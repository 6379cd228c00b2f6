"""A member of another user sends thousands of generated requests: nothing changes that is not its own, and nothing fails.

`ADVERSARY_REQUESTS` and `ADVERSARY_SEED` choose how many and which (`make adversary`).
"""

import asyncio
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from membership.identity import Identity
from membership.trust import PROVIDER
from mesh.consensus.effects import decode_witness_record
from mesh.daemon.layout import save_membership
from mesh.daemon.stack import Stack, StackNode
from mesh.model.spec import parse_job
from tests.adversary.floods import Cost, Member
from tests.adversary.generator import Generator, Known, Request
from tests.chains import admitted
from tests.e2e.commands import (
    exact,
    finished,
    job_state,
    ok,
    read,
    running_with_checkpoint,
    submit_count,
    submit_endless,
    until,
)

pytestmark = pytest.mark.e2e

COUNT, SEED = int(os.environ.get("ADVERSARY_REQUESTS", "1000")), int(os.environ.get("ADVERSARY_SEED", "1"))
AT_A_TIME = 8
ANSWER_S = 20.0
TABLES = (
    "witness_records",
    "submitted",
    "pending_submissions",
    "shares",
    "requested_outputs",
    "requested_caches",
    "archive",
)
GROWTH_MIB, STATUS_S = 64.0, 5.0  # the benchmark asks for a second


@pytest.fixture
def stack(make_stack: Callable[..., Stack], tmp_path: Path) -> Stack:
    """Three nodes of the test's user, and one of Mallory, who may lend and not submit."""
    stack = Stack(4, overrides={"slots": 1, "grace_s": 10.0, "process_sees": [str(tmp_path)]})
    stack.found()
    first, mallory = stack.nodes[0], stack.nodes[-1]
    founder, node = Identity.load(first.where.key), Identity.load(mallory.where.key).node_id
    genesis, chain = first.where.genesis.read_bytes(), first.where.chain.read_bytes()
    own = admitted(founder, genesis, chain, node, "mallory", "mallory", time.time(), roles=(PROVIDER,))
    save_membership(mallory.where, genesis, own, ())
    make_stack.stacks.append(stack)  # type: ignore[attr-defined]
    stack.start_all()
    return stack


def unchanging(node: StackNode, running: bytes) -> dict[str, str]:
    """Return each thing that a node keeps of jobs, without those of a job that goes on."""
    found: dict[str, str] = {}
    with closing(sqlite3.connect(f"file:{node.where.journal}?mode=ro", uri=True, timeout=10)) as journal:
        for table in TABLES:
            for row in journal.execute(f"SELECT * FROM {table}"):
                if row[0] != running:
                    witness = table == "witness_records"
                    found[f"{table} {row[0].hex()}"] = repr(decode_witness_record(row[1]) if witness else row)
    for file in (node.where.root / "store" / "fences").glob("*"):
        if file.name != running.hex():
            found[f"fence {file.name}"] = file.read_text()
    for row in read(node, "ckpt", "ls")["checkpoints"]:
        if parse_job(row["job"]) != running:
            found[f"checkpoint {row['id']}"] = repr(sorted(row))
    return found


def added(now: dict[str, str], then: dict[str, str]) -> list[str]:
    return [key for key in now.keys() - then.keys() if not key.startswith("archive")]


def beyond_reach(node: StackNode, submit: Callable[[], str], witness: bool = False) -> str:
    """Submit until a job has no witness of Mallory, who could lie about its record (docs/explanation/trust.md), or has one."""
    while True:
        job = submit()
        witnesses = until(lambda: job_state(node, job).get("witnesses"), "the job's witnesses")  # noqa: B023
        if ("mallory" in witnesses) == witness:
            return job
        ok(node, "cancel", job)


class Sender:
    """Sends generated requests to one node and counts the answers by status."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.statuses: Counter[int] = Counter()
        self.failures: list[tuple[int, Request]] = []

    async def send(self, requests: Iterator[Request]) -> None:
        await asyncio.gather(*(self._worker(requests) for _ in range(AT_A_TIME)))

    async def _worker(self, requests: Any) -> None:
        peers = self._member.peers
        assert peers._session is not None
        for request in requests:
            url = peers._url(self._member.victim, request.path)
            try:
                async with (
                    asyncio.timeout(ANSWER_S),
                    peers._session.request(request.method, url, data=request.body) as response,
                ):
                    await response.content.read(1000)
                    status = response.status
            except aiohttp.ClientError:
                status = 0  # the node ended the connection
            except TimeoutError:
                status = -1
            self.statuses[status] += 1
            if status >= 500 or status == -1:
                self.failures.append((status, request))


async def test_generated_requests_of_another_user_change_nothing(stack: Stack) -> None:
    victim, *others, mallory = stack.nodes
    run = asyncio.to_thread
    ended = await run(beyond_reach, victim, lambda: submit_count(victim, 5))
    await run(until, lambda: job_state(victim, ended)["state"] == "done", "the first job to end")
    going = await run(beyond_reach, victim, lambda: submit_count(victim, 100_000, "--replicas", "2"))
    state = await run(running_with_checkpoint, victim, going)
    after = ("submit", "--no-workdir", "--after", going, "--", "true")
    waiting = await run(beyond_reach, victim, lambda: ok(victim, *after).strip())
    await run(until, lambda: job_state(others[0], waiting)["state"] == "pending", "the last job to wait")
    jobs = [parse_job(job) for job in (ended, going, waiting)]
    mine = [victim, *others]
    with closing(sqlite3.connect(f"file:{victim.where.journal}?mode=ro", uri=True)) as journal:
        sealed = [bytes(row[0]) for row in journal.execute("SELECT spec FROM submitted")]
    known = Known(
        jobs,
        [Identity.load(node.where.key).node_id for node in stack.nodes],
        [bytes.fromhex(row["id"]) for row in (await run(read, victim, "ckpt", "ls"))["checkpoints"]],
        sealed,
        (0, 1, 2, 3, 2**40),
    )
    assert len(known.manifests) >= 2 and len(known.sealed) >= 3
    before = [await run(unchanging, node, jobs[1]) for node in mine]
    assert all(before)
    host = stack.node(state["node"])
    for number, target in enumerate((victim, host if host is not victim else others[0])):
        member, cost = Member(mallory, target), Cost(target)
        await member.peers.open()
        sender = Sender(member)
        try:
            await sender.send(Generator(known, SEED + number).requests(COUNT // 2))
        finally:
            await member.peers.close()
        await run(cost.look)
        assert not sender.failures, (len(sender.failures), sender.failures[:3], sender.statuses)
        assert sender.statuses[200] and sender.statuses[400] and sender.statuses[403], sender.statuses
        assert cost.grown_mib < GROWTH_MIB and cost.slowest_s < STATUS_S, (cost.grown_mib, cost.slowest_s)
    for node, then in zip(mine, before, strict=True):
        now = await run(unchanging, node, jobs[1])
        for key in then:
            assert now.get(key) == then[key], key
        # Any member may bring a signed submission to be retried. It goes as soon as the witnesses turn out to have the job.
        await run(until, lambda: not added(unchanging(node, jobs[1]), then), "what was added to go")  # noqa: B023
    seq = job_state(victim, going)["checkpoint"]["seq"]
    await run(until, lambda: job_state(victim, going)["checkpoint"]["seq"] > seq, "the running job to commit")
    stays = [(attempt["node"], attempt["term"]) for attempt in job_state(victim, going)["attempts"]]
    assert stays == [(attempt["node"], attempt["term"]) for attempt in state["attempts"]]
    for job in (going, waiting):
        await run(ok, victim, "cancel", job)


@pytest.mark.long
async def test_generated_messages_of_a_witness_leave_its_running_job_one_history(stack: Stack, tmp_path: Path) -> None:
    """It may make the job stop and start again, but neither end it nor take back what was committed, nor touch another."""
    victim, *others, mallory = stack.nodes
    run, mine = asyncio.to_thread, [victim, *others]
    ended = await run(beyond_reach, victim, lambda: submit_count(victim, 5))
    await run(until, lambda: job_state(victim, ended)["state"] == "done", "the first job to end")
    going = await run(
        beyond_reach, victim, lambda: submit_endless(victim, tmp_path / "end", "--replicas", "2"), witness=True
    )
    state = await run(running_with_checkpoint, victim, going)
    job = parse_job(going)
    with closing(sqlite3.connect(f"file:{victim.where.journal}?mode=ro", uri=True)) as journal:
        sealed = [bytes(row[0]) for row in journal.execute("SELECT spec FROM submitted WHERE job = ?", [job])]
    nodes = [Identity.load(node.where.key).node_id for node in stack.nodes]
    manifests = [bytes.fromhex(row["id"]) for row in (await run(read, victim, "ckpt", "ls"))["checkpoints"]]
    known = Known([job], nodes, manifests, sealed, (0, 1, 2, 3, 2**40))
    before = [await run(unchanging, node, job) for node in mine]
    seq = state["checkpoint"]["seq"]
    targets = [node for node in mine if node.nick in state["witnesses"]]
    for number, target in enumerate(targets):
        member, cost = Member(mallory, target), Cost(target)
        await member.peers.open()
        sender = Sender(member)
        try:
            await sender.send(Generator(known, SEED + number).messages(COUNT // len(targets)))
        finally:
            await member.peers.close()
        await run(cost.look)
        assert not sender.failures, (len(sender.failures), sender.failures[:3], sender.statuses)
        assert sender.statuses[200] and sender.statuses[400], sender.statuses
        assert cost.grown_mib < GROWTH_MIB and cost.slowest_s < STATUS_S, (cost.grown_mib, cost.slowest_s)
        now = await run(job_state, victim, going)
        assert not now["outcome"] and now["checkpoint"]["seq"] >= seq, now
        seq = now["checkpoint"]["seq"]
    for node, then in zip(mine, before, strict=True):
        assert await run(unchanging, node, job) == then, node.nick
    await run(until, lambda: job_state(victim, going)["checkpoint"]["seq"] > seq, "the job to commit again")
    (tmp_path / "end").touch()
    assert (await run(finished, victim, going))["outcome"]["kind"] == "done"
    assert await run(exact, victim, going)
