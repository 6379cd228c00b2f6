"""A hostile member that attacks the store of a peer: refused, counted and reported by name, without loss."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from ckptstore.cipher import StateCipher
from ckptstore.codec import ZSTD, Encoding, encode
from ckptstore.messages import ChunkRequest, MissingQuery, encode_chunk_request, encode_missing_query
from ckptstore.pack import chunk_name, encode_header, wrap
from membership.config import SwimConfig
from membership.identity import Identity
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.api.client import Client
from mesh.consensus.status import JobStatus, decode_status, encode_status
from mesh.daemon.stack import LOOPBACK, Stack, StackNode
from mesh.model.record import Outcome
from mesh.rpc.client import Address, PeerClient, PeerError
from tests.ckptstore.worlds import frame
from tests.e2e.commands import (
    ENDLESS,
    WAIT_S,
    end_of,
    finished,
    job_state,
    ok,
    read,
    running_with_checkpoint,
    submit_count,
    until,
)

pytestmark = pytest.mark.e2e


class Insider:
    """A caller with the stolen key of a member's daemon."""

    def __init__(self, node: StackNode, victim: StackNode) -> None:
        identity = Identity.load(node.where.key)
        self.victim_id = Identity.load(victim.where.key).node_id
        host, port = "127.0.0.1", int(read(victim, "status")["api_port"])
        mesh_id = TrustStore(node.where.genesis.read_bytes()).mesh_id
        self.peers = PeerClient(identity, mesh_id, lambda _: Address(host, port))

    async def call(self, method: str, path: str, body: bytes = b"") -> bytes:
        return await self.peers.call(self.victim_id, method, path, body)

    async def refused(self, method: str, path: str, body: bytes | AsyncIterator[bytes]) -> tuple[int | None, str]:
        try:
            async with self.peers.stream(self.victim_id, method, path, body) as response:
                await response.read()
        except PeerError as error:
            return error.status, str(error)
        raise AssertionError(f"{method} {path} was accepted")


async def streamed(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def bomb() -> bytes:
    """Return a chunk that declares 100 bytes and decompresses to 4 MiB."""
    header, stored = wrap(chunk_name(bytes(100)), encode(bytes(1 << 22), Encoding(ZSTD)), 100, ZSTD, 0, None)
    return encode_header(header) + bytes(stored)


async def test_hostile_member_is_refused_counted_and_reported(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(3)
    victim = stack.nodes[0]
    job = submit_count(victim, 100_000, "--replicas", "2")
    state = running_with_checkpoint(victim, job)
    host = stack.node(state["node"])
    witness = next(node for node in stack.nodes if node.nick in state["witnesses"] and node is not host)
    evil = next(node for node in stack.nodes if node not in {host, witness})
    insider = Insider(evil, witness)
    await insider.peers.open()
    try:
        before = read(witness, "status")["counters"]
        wrong = frame(b"good")[:-4] + b"evil"
        foreign, stored = wrap(
            chunk_name(b"nonsense", cipher := StateCipher.generate()), b"nonsense", 8, 0, 0, None, cipher
        )
        forged = encode_header(foreign)[:16] + os.urandom(32) + encode_header(foreign)[48:]
        for body in (wrong, bomb(), os.urandom(5000), forged + bytes(stored), frame(b"cut off")[:-1]):
            status, words = await insider.refused("PUT", "/v1/chunks", streamed(body))
            assert status == 409 and words, body[:20]
        after = read(witness, "status")["counters"]
        assert after["refused_chunks"] - before.get("refused_chunks", 0) == 5

        nonsense = (
            b"",
            b"\xc1",
            os.urandom(100),
            encode_missing_query(MissingQuery((b"short",))),
            encode_chunk_request(ChunkRequest((b"../..",))),
        )
        for body in nonsense:
            for path in ("/v1/chunks/missing", "/v1/chunks/frames"):
                assert (await insider.refused("POST", path, body))[0] == 400
        for path in ("/v1/manifests/../../node.key", "/v1/manifests/" + "ab" * 31, f"/v1/manifests/{'zz' * 32}"):
            assert (await insider.refused("GET", path, b""))[0] in {400, 403, 404}
        assert (await insider.refused("PUT", "/v1/manifests/" + "ab" * 32, b"no manifest"))[0] == 400
        assert (await insider.refused("PUT", "/v1/chunks?of=zz", streamed(b"x")))[0] == 400
        # Use an unknown job, since all nodes of a stack belong to one user and could act for its jobs.
        unknown = "00" * 16
        assert (await insider.refused("GET", f"/v1/jobs/{unknown}/key", b""))[0] == 403
        assert (await insider.refused("PUT", f"/v1/jobs/{unknown}/share", b"\x90"))[0] == 400
    finally:
        await insider.peers.close()
    until(lambda: "was refused" in ok(witness, "status", "--log"), "the refusal to be in the status")
    assert read(witness, "ckpt", "verify")["bad_chunks"] == 0
    assert running_with_checkpoint(victim, job)["state"] == "running"
    ok(victim, "cancel", job)


@pytest.mark.long
async def test_false_status_neither_starts_nor_fails_jobs_that_wait(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(5)
    first = submit_count(stack.nodes[0], ENDLESS)
    state = running_with_checkpoint(stack.nodes[0], first)
    then = ok(stack.nodes[0], "submit", "--after", first, "--", "true").strip()
    busy = {state["node"], *state["witnesses"], stack.nodes[0].nick}
    evil = next(node for node in stack.nodes if node.nick not in busy)
    host = stack.node(state["node"])
    ok(evil, "down")
    for kind in ("done", "failed"):
        async with member(evil, stack.nodes[0]) as liar:
            section = f"jobs/{first}"
            true = await told(liar, section)
            outcome = Outcome(kind, "so says mallory", None, None, (), int(time.time() * 1000))
            false = msgspec.structs.replace(true, state=kind, rank=(1, 1 << 40, 0, 0), outcome=outcome)
            liar.publish(section, encode_status(false), 60.0)
            await asyncio.to_thread(until, lambda kind=kind: job_state(stack.nodes[0], first)["state"] == kind, kind)
            since = step_of(host, first)
            await asyncio.to_thread(until, lambda since=since: step_of(host, first) > since + 300, "more steps")
            assert job_state(stack.nodes[0], then)["state"] == "pending"
    ok(stack.nodes[0], "cancel", first)  # the last false status is still there
    ended = await asyncio.to_thread(finished, stack.nodes[0], then)
    assert ended["outcome"]["kind"] == "failed" and "was cancelled" in ended["outcome"]["detail"]


async def test_false_status_brings_nothing_home_and_keeps_nothing_from_it(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    """It could name files of the liar's own, which the Python API would unpickle, or none, so that the true ones never come."""
    stack = make_stack(5)
    asker, end, home = stack.nodes[0], end_of(stack), tmp_path / "home"
    script = f'while [ ! -e {end} ]; do sleep 0.1; done; echo true > "$MESH_OUT_DIR/answer"'
    job = ok(asker, "submit", "--no-workdir", "--out", str(home), "--", "sh", "-c", script).strip()
    await asyncio.to_thread(until, lambda: job_state(asker, job)["state"] == "running", "it to run")
    state = job_state(asker, job)
    busy = {state["node"], *state["witnesses"], asker.nick}
    evil = next(node for node in stack.nodes if node.nick not in busy)
    ok(evil, "down")
    async with member(evil, asker) as liar:
        section = f"jobs/{job}"
        true = await told(liar, section)
        outcome = Outcome("done", "so says mallory", 0, None, (), int(time.time() * 1000))
        liar.publish(
            section,
            encode_status(msgspec.structs.replace(true, state="done", rank=(1, 1 << 40, 0, 0), outcome=outcome)),
            60.0,
        )

        def problem() -> str:
            rows = Client(asker.where.socket).get("/v1/deliveries")["deliveries"]
            return "".join(row["problem"] for row in rows)

        await asyncio.to_thread(until, lambda: job_state(asker, job)["state"] == "done", "the false status")
        await asyncio.to_thread(until, lambda: "most of the job's witnesses" in problem(), "the witnesses to be asked")
    end.touch()
    await asyncio.to_thread(until, (home / "answer").exists, "the true files")
    assert (home / "answer").read_text() == "true\n"


@asynccontextmanager
async def member(node: StackNode, known: StackNode) -> AsyncIterator[MembershipNode]:
    """Take part in the gossip with the key of a member whose daemon has stopped."""
    seed = read(known, "status")["address"]
    trust = TrustStore(node.where.genesis.read_bytes())
    identity, chain = Identity.load(node.where.key), node.where.chain.read_bytes()
    liar = MembershipNode(
        identity, trust, chain, SwimConfig.local(), node.where.gossip, bind_host=LOOPBACK, port=0, seeds=[seed]
    )
    await liar.start()
    try:
        yield liar
    finally:
        await liar.stop()


async def told(node: MembershipNode, section: str) -> JobStatus:
    """Return what an honest node publishes of a job."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = [decode_status(record.body) for record in node.records(section)]
            if status := next(filter(None, found), None):
                return status
            await asyncio.sleep(0.1)


def step_of(host: StackNode, job: str) -> int:
    """Return the step that a guest has told its host."""
    (told,) = (host.where.jobs / job).glob("*/ctl/progress.json")
    return int(msgspec.json.decode(told.read_bytes())["step"])
