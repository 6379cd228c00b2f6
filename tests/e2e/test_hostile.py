"""A member of the mesh that means harm to another's store: refused, counted, told by name, and nothing is lost."""

import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Callable

import pytest

from ckptstore.codec import ZSTD, Coding, encode
from ckptstore.pack import chunk_name, encode_header, wrap
from ckptstore.questions import Order, Question, encode_order, encode_question
from ckptstore.vault import Vault
from membership.identity import Identity
from membership.trust import TrustStore
from mesh.api.peer import Address, PeerClient, PeerError
from mesh.stack import Stack, StackNode
from tests.ckptstore.worlds import frame
from tests.e2e.commands import ok, read, running_with_checkpoint, submit_count, until

pytestmark = pytest.mark.e2e


class Insider:
    """Calls as a member whose daemon's key it has got hold of."""

    def __init__(self, node: StackNode, victim: StackNode) -> None:
        identity = Identity.load(node.where.key)
        self.victim_id = Identity.load(victim.where.key).node_id
        certificate = victim.where.tls.read_text()
        pem = certificate[certificate.index("-----BEGIN CERTIFICATE-----") :]
        fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()
        host, port = "127.0.0.1", int(read(victim, "status")["api_port"])
        mesh_id = TrustStore(node.where.genesis.read_bytes()).mesh_id
        self.peers = PeerClient(identity, mesh_id, lambda _: Address(host, port, fingerprint))

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
    """A chunk that says it has 100 bytes, and would have 4 MiB."""
    header, stored = wrap(chunk_name(bytes(100)), encode(bytes(1 << 22), Coding(ZSTD)), 100, ZSTD, 0, None)
    return encode_header(header) + bytes(stored)


async def test_a_hostile_member_is_refused_counted_and_told(make_stack: Callable[..., Stack]) -> None:
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
        foreign, stored = wrap(chunk_name(b"nonsense", vault := Vault.fresh()), b"nonsense", 8, 0, 0, None, vault)
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
            encode_question(Question((b"short",))),
            encode_order(Order((b"../..",))),
        )
        for body in nonsense:
            for path in ("/v1/chunks/missing", "/v1/chunks/frames"):
                assert (await insider.refused("POST", path, body))[0] == 400
        for path in ("/v1/manifests/../../node.key", "/v1/manifests/" + "ab" * 31, f"/v1/manifests/{'zz' * 32}"):
            assert (await insider.refused("GET", path, b""))[0] in {400, 403, 404}
        assert (await insider.refused("PUT", "/v1/manifests/" + "ab" * 32, b"no manifest"))[0] == 400
        assert (await insider.refused("PUT", "/v1/chunks?of=zz", streamed(b"x")))[0] == 400
        # It is neither the job's runner nor its user's, as far as the certificate goes: all of a stack are one user's.
        unknown = "00" * 16
        assert (await insider.refused("GET", f"/v1/jobs/{unknown}/key", b""))[0] == 403
        assert (await insider.refused("PUT", f"/v1/jobs/{unknown}/share", b"\x90"))[0] == 400
    finally:
        await insider.peers.close()
    until(lambda: "was refused" in ok(witness, "status", "--log"), "its owner to be told")
    assert read(witness, "ckpt", "verify")["bad_chunks"] == 0
    assert running_with_checkpoint(victim, job)["state"] == "running"
    ok(victim, "cancel", job)
