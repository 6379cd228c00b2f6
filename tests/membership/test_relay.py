"""A member that nobody reaches borrows a port of another one: what passes, who may ask, and what it can cost the relay."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from membership import relay as relay_module
from membership.envelope import seal
from membership.framing import connected, read_frame, write_frame
from membership.identity import Identity
from membership.listener import MAX_UNSORTED_PER_HOST
from membership.node import MembershipNode
from membership.reconcile import FrameError, Relayed, RelayMe, encode_frame
from membership.relay import ANSWER, TOKEN_BYTES, Loan, use
from membership.trust import make_revocation
from tests.membership.test_node import LOOPBACK, Mesh, until

TLS_HELLO = b"\x16\x03\x01 hello"
ORIGIN = "127.0.0.9"
PATIENCE_S = 20.0


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    await made.start(3)
    yield made
    for node in made.nodes:
        await node.stop()


class Borrower:
    """A member that has a port of another one. It echoes what comes in over TLS, and serves frames as always."""

    def __init__(self, node: MembershipNode, relay: MembershipNode) -> None:
        self.port = 0
        self.hosts: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        member = node._core.swim.table.get(relay.identity.node_id)
        assert member is not None
        self._node, self._member = node, member

    async def run(self) -> None:
        await use(self._node._core, self._member, self._take, self._lent)

    def _lent(self, port: int) -> None:
        self.port = port

    def _take(self, connection: socket.socket, host: str) -> None:
        self.hosts.append(host)
        self._tasks.append(asyncio.create_task(self._echo(connection)))

    async def _echo(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(connection, 1 << 16):
                await loop.sock_sendall(connection, data)
        connection.close()


@asynccontextmanager
async def borrowed(node: MembershipNode, relay: MembershipNode) -> AsyncIterator[Borrower]:
    borrower = Borrower(node, relay)
    running = asyncio.create_task(borrower.run())
    try:
        await until(lambda: borrower.port or running.done(), "a port to be lent")
        yield borrower
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def loan_of(relay: MembershipNode) -> Loan:
    """Return the only loan of a relay."""
    (task,) = relay._relay._loans.values()
    frame = task.get_coro().cr_frame  # type: ignore[union-attr]
    loan = frame.f_locals["loan"]
    assert isinstance(loan, Loan)
    return loan


async def test_others_reach_a_member_by_the_port_of_its_relay(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        assert relay.port < borrower.port <= relay.port + 2 * relay_module.PORTS
        data = TLS_HELLO + bytes(range(256)) * 4096
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port, local_addr=(ORIGIN, 0))
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data, "both ways, and until both ends are closed"
        assert borrower.hosts == [ORIGIN], "the limits of its listener count the host where it came from"
        writer.close()
    await until(lambda: len(relay._relay) == 0, "the loan to end")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(LOOPBACK, borrower.port)


async def test_gossip_reaches_a_relayed_member(mesh: Mesh) -> None:
    relay, member, other = mesh.nodes
    ends: list[asyncio.Task[None]] = []
    ports: list[int] = []
    found = member._core.swim.table.get(relay.identity.node_id)
    assert found is not None
    ends.append(asyncio.create_task(use(member._core, found, member._listener.take, ports.append)))
    await until(lambda: ports, "a port to be lent")
    assert await other._streams.ping(member.identity.node_id, LOOPBACK, ports[0], 5.0) == "acked"
    answer = await other._streams.ask_reached(member.identity.node_id, LOOPBACK, other.port, LOOPBACK, ports[0])
    assert answer.tcp == "acked", "a question, and its answer"
    assert await other._streams.ping(relay.identity.node_id, LOOPBACK, ports[0], 5.0) == "silent", (
        "another node answers"
    )
    ends[0].cancel()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_relay_serves_members_only_and_as_many_as_its_owner_allows(mesh: Mesh) -> None:
    relay, member, other = mesh.nodes
    stranger = Identity.generate()
    async with connected(LOOPBACK, relay.port) as (reader, writer):
        await write_frame(writer, seal(stranger, relay.trust.mesh_id, "reconcile", encode_frame(RelayMe(1))))
        assert await reader.read() == b""
    relay._relay._most = 1
    async with borrowed(member, relay) as borrower:
        with pytest.raises(FrameError, match="it relays for 1 nodes, as its owner allows"):
            async with asyncio.timeout(PATIENCE_S):
                await Borrower(other, relay).run()
        async with borrowed(member, relay) as again:
            assert again.port and again.port != borrower.port, "the later loan of a member ends the earlier one"
            assert len(relay._relay) == 1
    await until(lambda: len(relay._relay) == 0, "the loans to end")


async def test_port_of_a_former_member_is_closed(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        relay.publish_statement(make_revocation(mesh.root, relay.trust, member.identity.node_id, "test", time.time()))
        await until(lambda: len(relay._relay) == 0, "the loan to end")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, borrower.port)


async def test_answer_needs_a_token_and_each_is_good_for_one(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    tokens: list[bytes] = []
    async with borrowed(member, relay) as borrower:
        waiting = loan_of(relay)._waiting

        class Seen(dict[bytes, "asyncio.Future[socket.socket]"]):
            def __setitem__(self, token: bytes, answered: "asyncio.Future[socket.socket]") -> None:
                tokens.append(token)
                super().__setitem__(token, answered)

        loan_of(relay)._waiting = Seen(waiting)
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
        writer.write(TLS_HELLO)
        assert await reader.readexactly(len(TLS_HELLO)) == TLS_HELLO
        for token in (bytes(TOKEN_BYTES), tokens[0], b""):
            false, answer = await asyncio.open_connection(LOOPBACK, borrower.port)
            answer.write(ANSWER + token)
            async with asyncio.timeout(PATIENCE_S):
                assert await false.read() == b"", "it is closed"
            answer.close()
        writer.write(b"more")
        assert await reader.readexactly(4) == b"more"
        writer.close()


async def test_other_protocols_do_not_pass(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
        assert borrower.hosts == []
        writer.close()


async def test_connections_that_a_stranger_holds_open_are_bounded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_JOINED", 3)
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        loan = loan_of(relay)
        silent = [await asyncio.open_connection(LOOPBACK, borrower.port) for _ in range(MAX_UNSORTED_PER_HOST + 8)]
        await until(lambda: len(loan._strangers) == MAX_UNSORTED_PER_HOST, "the places of one host to be taken")
        for _, writer in silent:
            writer.close()
        await until(lambda: not len(loan._strangers), "the places to be free")
        talking = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
            writer.write(TLS_HELLO)
            await reader.readexactly(len(TLS_HELLO))
            talking.append(writer)
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
        writer.write(TLS_HELLO)
        with suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b"", "one too many"
        for one in (*talking, writer):
            one.close()
        await until(lambda: not loan._joined, "the connections to end")


async def test_member_that_fetches_no_connection_holds_none(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    relay, member, _ = mesh.nodes
    async with connected(LOOPBACK, relay.port) as (reader, writer):
        await write_frame(writer, member._core.seal_frame(RelayMe(7)))
        _, answer = relay._core.open_frame(await read_frame(reader))
        assert isinstance(answer, Relayed) and answer.answers == 7
        waiting, other = await asyncio.open_connection(LOOPBACK, answer.port)
        other.write(TLS_HELLO)
        with suppress(ConnectionResetError):
            assert await waiting.read() == b""
        assert not loan_of(relay)._waiting
        other.close()
    await until(lambda: len(relay._relay) == 0, "the loan to end with its stream")


async def test_stream_of_a_member_that_does_not_read_ends(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_UNREAD", -1)
    relay, member, _ = mesh.nodes
    async with connected(LOOPBACK, relay.port) as (reader, writer):
        await write_frame(writer, member._core.seal_frame(RelayMe(7)))
        with suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
    await until(lambda: len(relay._relay) == 0, "the loan to end")


async def test_what_passes_is_held_to_the_rate(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    relay._relay._bytes_s = 1e6
    async with borrowed(member, relay) as borrower:
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
        begun = asyncio.get_running_loop().time()
        data = TLS_HELLO + bytes(100_000)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        assert relay._relay._free_at >= begun + 2 * len(data) / 1e6, "there and back"
        writer.close()


async def test_loan_outlasts_the_time_for_an_answer(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.5)
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        await asyncio.sleep(1.0)
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port)
        writer.write(TLS_HELLO)
        assert await reader.readexactly(len(TLS_HELLO)) == TLS_HELLO
        writer.close()


async def test_relay_that_does_not_answer_is_given_up(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    relay, member, _ = mesh.nodes
    found = member._core.swim.table.get(relay.identity.node_id)
    assert found is not None
    silent = socket.create_server((LOOPBACK, 0))
    imposter = msgspec.structs.replace(found, port=silent.getsockname()[1])
    with pytest.raises(TimeoutError):
        await use(member._core, imposter, lambda connection, host: connection.close(), lambda port: None)
    silent.close()


async def test_relay_that_breaks_the_rules_is_left(mesh: Mesh) -> None:
    relay, member, other = mesh.nodes
    found = member._core.swim.table.get(relay.identity.node_id)
    assert found is not None

    async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, question = other._core.open_frame(await read_frame(reader))
        answer = Relayed(1, question.nonce, 9, "")
        signer = other if honest_key is False else relay
        await write_frame(writer, signer._core.seal_frame(answer))
        await write_frame(writer, signer._core.seal_frame(answer))
        writer.close()

    server = await asyncio.start_server(hostile, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    imposter = msgspec.structs.replace(found, port=port)
    lent: list[int] = []
    honest_key = False
    with pytest.raises(FrameError, match="does not match"):
        await use(member._core, imposter, lambda connection, host: connection.close(), lent.append)
    honest_key = True
    with pytest.raises(FrameError, match="something else"):
        await use(member._core, imposter, lambda connection, host: connection.close(), lent.append)
    assert lent == [9]
    server.close()
