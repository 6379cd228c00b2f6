"""A hostile member that attacks the store of a peer: refused, counted and reported by name, without loss."""

import os
from collections.abc import AsyncIterator, Callable

import pytest

from ckptstore.cipher import StateCipher
from ckptstore.codec import ZSTD, Encoding, encode
from ckptstore.messages import ChunkRequest, MissingQuery, encode_chunk_request, encode_missing_query
from ckptstore.pack import chunk_name, encode_header, wrap
from membership.identity import Identity
from membership.trust import TrustStore
from mesh.daemon.stack import Stack, StackNode
from mesh.rpc.client import Address, PeerClient, PeerError
from tests.ckptstore.worlds import frame
from tests.e2e.commands import ok, read, running_with_checkpoint, submit_count, until

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
