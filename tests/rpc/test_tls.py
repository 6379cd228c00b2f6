"""Mutual TLS between nodes: each end is exactly the node that it says, and nobody else gets past the handshake."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from membership.identity import Identity
from mesh.rpc.tls import PeerObject, certificate, client_context, node_name, server_context
from tests.adversary.neighbour import forged, plain_context, tls_context

MESH = b"m" * 16
HOST, MEMBER, STRANGER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


class Host:
    """A server that records its peers, and what they sent."""

    def __init__(self) -> None:
        self.peers: list[bytes] = []
        self.taken = b""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("ssl_object")
        assert isinstance(peer, PeerObject)
        self.peers.append(peer.peer)
        self.taken += await reader.read(100)
        writer.write(b"answer")
        writer.close()


@asynccontextmanager
async def serving(identity: Identity = HOST) -> AsyncIterator[Host]:
    host = Host()
    context = server_context(identity, MESH, lambda node: "" if node == MEMBER.node_id else "not a member")
    async with await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=context) as server:
        host.port = server.sockets[0].getsockname()[1]
        yield host


async def ask(host: Host, context: ssl.SSLContext, expected: bytes = HOST.node_id) -> bytes:
    """Send a request and return the answer: empty if the server ends the connection."""
    name = node_name(expected)
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port, ssl=context, server_hostname=name)
    try:
        writer.write(b"request")
        return await reader.read()
    except (ConnectionError, ssl.SSLError):
        return b""
    finally:
        writer.close()


async def test_member_and_host_prove_their_keys_to_each_other() -> None:
    async with serving() as host:
        assert await ask(host, client_context(MEMBER, MESH)) == b"answer"
        assert host.peers == [MEMBER.node_id] and host.taken == b"request"


@pytest.mark.parametrize(
    ("what", "extensions", "serial"),
    [
        ("the member's name, the stranger's key", b"", b"\x02"),
        ("an extension more", bytes.fromhex("a3133011300f0603551d130101ff040530030101ff"), b"\x02"),
        ("another serial number", b"", b"\x03"),
    ],
)
async def test_forged_certificate_is_refused_in_the_handshake(
    what: str, extensions: bytes, serial: bytes, tmp_path: Path
) -> None:
    key = STRANGER if "stranger" in what else MEMBER
    made = forged(MESH, MEMBER.node_id, key, extensions, serial)
    assert made != certificate(MEMBER.node_id, MESH)
    async with serving() as host:
        assert await ask(host, tls_context(made, key, tmp_path)) == b""
        assert not host.peers and not host.taken


async def test_certificate_of_a_member_is_useless_without_its_key(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLError):  # the library itself will not present a certificate for another key
        tls_context(certificate(MEMBER.node_id, MESH), STRANGER, tmp_path)


@pytest.mark.parametrize("who", ["stranger", "member of another mesh", "no certificate"])
async def test_stranger_is_refused_in_the_handshake(who: str) -> None:
    contexts = {
        "stranger": lambda: client_context(STRANGER, MESH),
        "member of another mesh": lambda: client_context(MEMBER, b"o" * 16),
        "no certificate": plain_context,
    }
    context = contexts[who]()
    context.verify_mode = ssl.CERT_NONE
    async with serving() as host:
        with suppress(ssl.SSLError, ConnectionError):
            assert await ask(host, context) == b""
        assert not host.peers and not host.taken


async def test_older_tls_is_refused() -> None:
    context = client_context(MEMBER, MESH)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving() as host:
        with suppress(ssl.SSLError, ConnectionError):
            assert await ask(host, context) == b""
        assert not host.peers and not host.taken


async def test_no_connection_can_be_resumed_without_its_key() -> None:
    async with serving() as host:
        name = node_name(HOST.node_id)
        context = client_context(MEMBER, MESH)
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port, ssl=context, server_hostname=name)
        writer.write(b"request")
        assert await reader.read() == b"answer"
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        writer.close()


def test_key_is_left_in_no_open_file() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    client_context(MEMBER, MESH)
    assert set(Path("/proc/self/fd").iterdir()) <= before


async def test_client_sends_nothing_to_another_node_at_the_address() -> None:
    async with serving(STRANGER) as host:
        with pytest.raises(ssl.SSLCertVerificationError, match="the answering node is"):
            await ask(host, client_context(MEMBER, MESH))
        assert not host.taken


async def test_client_sends_nothing_to_a_forger_in_the_name_of_the_node(tmp_path: Path) -> None:
    host = Host()
    forger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = tls_context(forged(MESH, HOST.node_id, STRANGER), STRANGER, tmp_path)
    del made
    forger.load_cert_chain(next(tmp_path.glob("*.pem")))

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.taken += await reader.read(100)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=forger) as server:
        host.port = server.sockets[0].getsockname()[1]
        with pytest.raises(ssl.SSLCertVerificationError, match="not that of a node of this mesh"):
            await ask(host, client_context(MEMBER, MESH))
    assert not host.taken


def test_certificate_follows_from_node_and_mesh() -> None:
    assert certificate(HOST.node_id, MESH) == certificate(HOST.node_id, MESH)
    assert len({certificate(node, mesh) for node in (HOST.node_id, MEMBER.node_id) for mesh in (MESH, b"o" * 16)}) == 4
