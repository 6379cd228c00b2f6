"""A member that nobody reaches borrows a port of another one: what passes, who may ask, and what it can cost the relay."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership import relay as relay_module
from membership.addresses import address_group
from membership.config import MAX_RELAYED
from membership.envelope import seal
from membership.framing import connected, read_frame, write_frame
from membership.identity import Identity
from membership.listener import MAX_UNSORTED_PER_HOST, Strangers
from membership.node import MembershipNode
from membership.ratelimit import TokenBuckets
from membership.reconcile import (
    TOKEN_BYTES,
    AnyFrame,
    Done,
    FrameError,
    Relayed,
    RelayMe,
    Waiting,
    decode_frame,
    encode_frame,
)
from membership.relay import ANSWER, Loan, use
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
    """A member that has a port of another one. It echoes what comes in, or serves it as always and advertises the port."""

    def __init__(self, node: MembershipNode, relay: MembershipNode, serves: bool = False) -> None:
        self.port = 0
        self.hosts: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        member = node._core.swim.table.get(relay.identity.node_id)
        assert member is not None
        self._node, self._member, self._serves = node, member, serves

    async def run(self) -> None:
        await use(self._node._core, self._member, self._take, self._lent)

    def _lent(self, port: int) -> None:
        self.port = port
        if self._serves:
            self._node._core.set_address(LOOPBACK, port)

    def _take(self, connection: socket.socket, host: str) -> None:
        self.hosts.append(host)
        if self._serves:
            self._node._listener.take(connection, host)
            return
        self._tasks.append(asyncio.create_task(self._echo(connection)))

    async def _echo(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError), connection:
            while data := await loop.sock_recv(connection, 1 << 16):
                await loop.sock_sendall(connection, data)

    def end(self) -> None:
        """Close all connections that came in."""
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def borrowed(node: MembershipNode, relay: MembershipNode, serves: bool = False) -> AsyncIterator[Borrower]:
    borrower = Borrower(node, relay, serves)
    running = asyncio.create_task(borrower.run())
    try:
        await until(lambda: borrower.port or running.done(), "a port to be lent")
        if serves:
            await until(lambda: relay.address_of(node.identity.node_id) == (LOOPBACK, borrower.port), "its new address")
        yield borrower
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def loan_of(relay: MembershipNode) -> Loan:
    """Return the only loan of a relay."""
    (loan,) = relay._relay._loans.values()
    return loan


@asynccontextmanager
async def asking(
    node: MembershipNode, relay: MembershipNode, host: str = LOOPBACK
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, RelayMe]]:
    """Connect as a member that asks for a port, up to the question that answers the relay's nonce, which is not sent."""
    me = relay.identity.node_id
    async with connected(host, relay.port) as (reader, writer):
        first = RelayMe(node._core.nonce(), me, 0)
        await write_frame(writer, node._core.seal_frame(first))
        _, fresh = relay._core.open_frame(await read_frame(reader))
        assert isinstance(fresh, Done) and fresh.answers == first.nonce
        yield reader, writer, RelayMe(7, me, fresh.nonce)


async def is_over(reader: asyncio.StreamReader) -> None:
    """Wait for the end of a connection, whatever it brings."""
    with suppress(ConnectionResetError):
        await reader.read()


async def is_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed a connection, without a byte more."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""


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
        question = RelayMe(1, relay.identity.node_id, 0)
        await write_frame(writer, seal(stranger, relay.trust.mesh_id, "reconcile", encode_frame(question)))
        assert await reader.read() == b""
    relay._relay._most = 1
    async with borrowed(member, relay, serves=True) as borrower:
        with pytest.raises(FrameError, match="it relays for 1 nodes, as its owner allows"):
            async with asyncio.timeout(PATIENCE_S):
                await Borrower(other, relay).run()
        async with borrowed(member, relay) as again:
            assert again.port and again.port != borrower.port, "the later loan of a member ends the earlier one"
            assert len(relay._relay) == 1
    await until(lambda: len(relay._relay) == 0, "the loans to end")


async def test_member_that_does_not_use_its_port_makes_place(mesh: Mesh) -> None:
    """A member that borrowed at every node kept all their places from those that nobody reaches."""
    relay, member, other = mesh.nodes
    relay._relay._most = 1
    async with borrowed(member, relay) as idle, borrowed(other, relay, serves=True) as borrower:
        assert borrower.port and len(relay._relay) == 1
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, idle.port)
        with pytest.raises(FrameError, match="as its owner allows"):
            await Borrower(member, relay).run()


async def test_node_that_is_relayed_itself_relays_for_nobody(mesh: Mesh) -> None:
    relay, member, other = mesh.nodes
    async with borrowed(relay, other, serves=True):
        with pytest.raises(FrameError, match="no node reaches it itself"):
            await Borrower(member, relay).run()


async def test_copy_of_a_question_takes_no_port(mesh: Mesh) -> None:
    """Questions can be read on the network: a copy ended the member's loan, and its sender got the connections."""
    relay, member, other = mesh.nodes
    async with borrowed(member, relay):
        loan = loan_of(relay)
        for signer, changes in (
            (member, {"answers": 6}),
            (member, {"relay": other.identity.node_id}),
            (other, {}),
        ):
            async with asking(member, relay) as (reader, writer, question):
                await write_frame(writer, signer._core.seal_frame(msgspec.structs.replace(question, **changes)))
                await is_closed(reader)
        assert relay.counters["refused_replayed"] == 3
        assert loan_of(relay) is loan


async def test_streams_of_a_member_that_asks_often_at_once_end(mesh: Mesh) -> None:
    """A loan that was replaced before it began left its stream open for as long as the member liked."""
    relay, member, _ = mesh.nodes
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(asking(member, relay)) for _ in range(8)]
        for _, writer, question in streams:
            await write_frame(writer, member._core.seal_frame(question))
        ends = [asyncio.create_task(is_over(reader)) for reader, *_ in streams]
        await until(lambda: sum(end.done() for end in ends) == 7, "all but one to end")
        assert len(relay._relay) == 1
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_port_of_a_former_member_is_closed(mesh: Mesh) -> None:
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        reader, writer = await talk(borrower.port)
        relay.publish_statement(make_revocation(mesh.root, relay.trust, member.identity.node_id, "test", time.time()))
        async with asyncio.timeout(PATIENCE_S):
            await is_over(reader)
        await until(lambda: not relay._relay._running, "the loan to end")
        writer.close()
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


async def talk(port: int, host: str = ORIGIN) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to an echoing member, from this host, and hear its first echo."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(host, 0))
    writer.write(TLS_HELLO)
    assert await reader.readexactly(len(TLS_HELLO)) == TLS_HELLO
    return reader, writer


async def test_silent_connections_of_a_stranger_are_bounded(mesh: Mesh) -> None:
    relay, member, other = mesh.nodes
    async with borrowed(member, relay) as one, borrowed(other, relay) as another:
        silent = [
            await asyncio.open_connection(LOOPBACK, port)
            for port in (one.port, another.port)
            for _ in range(MAX_UNSORTED_PER_HOST // 2 + 8)
        ]
        await until(lambda: len(relay._relay.strangers) == MAX_UNSORTED_PER_HOST, "the places of one host to be taken")
        for _, writer in silent:
            writer.close()
        await until(lambda: not len(relay._relay.strangers), "the places to be free")


async def test_connections_that_a_stranger_holds_keep_no_other_out(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 connections that were never closed took all places of a member for half a minute."""
    monkeypatch.setattr("membership.listener.HONEST_S", 0.0)
    relay, member, other = mesh.nodes
    relay._relay.joined = Strangers(6, 4)
    async with borrowed(member, relay) as one, borrowed(other, relay) as another:
        kept = [await talk(one.port) for _ in range(2)]
        held = [await talk(one.port, "127.0.0.8") for _ in range(4)]
        held += [await talk(another.port, "127.0.0.8") for _ in range(4)]
        assert len(relay._relay.joined) == 6, "of all ports together"
        kept.append(await talk(another.port))
        for reader, writer in kept:
            writer.write(b"more")
            assert await reader.readexactly(4) == b"more"
        for _, writer in (*kept, *held):
            writer.close()
        await until(lambda: not len(relay._relay.joined), "the connections to end")


async def test_connections_that_begin_are_limited_by_host(mesh: Mesh) -> None:
    """A stranger that closed each connection at once had a relay and its member shake hands without end."""
    relay, member, _ = mesh.nodes
    relay._relay._of_host = TokenBuckets(1e-6, 3.0)
    async with borrowed(member, relay) as borrower:
        for _ in range(3):
            _, writer = await talk(borrower.port, "127.0.0.8")
            writer.close()
        reader, writer = await asyncio.open_connection(LOOPBACK, borrower.port, local_addr=("127.0.0.8", 0))
        writer.write(TLS_HELLO)
        await is_closed(reader)
        assert relay.counters["refused_flood"] == 1
        _, other = await talk(borrower.port)
        for one in (writer, other):
            one.close()


async def test_connection_whose_other_side_is_reset_ends_at_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 1e6)
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        _, writer = await talk(borrower.port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: not len(relay._relay.joined), "the connection to end")


async def test_half_open_connection_ends(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LINGER_S", 0.1)
    relay, member, _ = mesh.nodes
    async with borrowed(member, relay) as borrower:
        reader, writer = await talk(borrower.port)
        borrower.end()
        assert await reader.read() == b""
        await until(lambda: not len(relay._relay.joined), "the connection to end, though one side is open")
        writer.close()


async def test_member_that_fetches_no_connection_holds_none(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    relay, member, _ = mesh.nodes
    async with asking(member, relay) as (reader, writer, question):
        await write_frame(writer, member._core.seal_frame(question))
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
    async with asking(member, relay) as (reader, writer, question):
        await write_frame(writer, member._core.seal_frame(question))
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
        passed_at = begun + 2 * len(data) / 1e6  # there and back
        assert loan_of(relay)._free_at >= passed_at - relay_module.CATCH_UP_S
        writer.close()


async def test_what_waits_for_one_member_holds_no_other_up(mesh: Mesh) -> None:
    """One queue for all members let a transfer to one of them delay the pings of another."""
    relay, member, other = mesh.nodes
    relay._relay._bytes_s = 1e6
    async with borrowed(member, relay) as one, borrowed(other, relay) as another:
        slow, quick = await talk(one.port), await talk(another.port)
        loan = relay._relay._loans[member.identity.node_id]
        relay._relay._bytes_s = 2.0  # so a piece of one byte takes a second of each member
        slow[1].write(b"a piece")
        await until(loan._turn.locked, "a piece to wait")
        relay._relay._bytes_s = 1e6
        quick[1].write(b"ping")
        assert await quick[0].readexactly(4) == b"ping"
        assert loan._turn.locked()
        for _, writer in (slow, quick):
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


@asynccontextmanager
async def hostile_relay(
    relay: MembershipNode, answer: Callable[[RelayMe], Iterable[tuple[MembershipNode, AnyFrame]]]
) -> AsyncIterator[int]:
    """Serve a port at which a relay answers the member's second question by these frames of these signers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, first = relay._core.open_frame(await read_frame(reader))
        await write_frame(writer, relay._core.seal_frame(Done(5, first.nonce)))
        _, question = relay._core.open_frame(await read_frame(reader))
        assert isinstance(question, RelayMe) and (question.relay, question.answers) == (relay.identity.node_id, 5)
        for signer, frame in answer(question):
            await write_frame(writer, signer._core.seal_frame(frame))
        await is_over(reader)
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_relay_that_breaks_the_rules_is_left(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "WAITING_S", 10.0)
    relay, member, other = mesh.nodes
    found = member._core.swim.table.get(relay.identity.node_id)
    assert found is not None
    lent: list[int] = []

    def lends(question: RelayMe, offset: int = 1) -> Relayed:
        return Relayed(1, question.nonce, port + offset, "")

    def waits(question: RelayMe, **changes: Any) -> Waiting:
        return msgspec.structs.replace(Waiting(1, question.nonce, bytes(TOKEN_BYTES), ORIGIN), **changes)

    cases: list[tuple[str, Callable[[RelayMe], Iterable[tuple[MembershipNode, AnyFrame]]]]] = [
        ("another node", lambda question: [(other, lends(question))]),
        ("does not match", lambda question: [(relay, Relayed(1, question.nonce + 1, port + 1, ""))]),
        ("none that a relay lends", lambda question: [(relay, lends(question, 0))]),
        ("none that a relay lends", lambda question: [(relay, lends(question, relay_module.PORTS * MAX_RELAYED + 1))]),
        ("something else", lambda question: [(relay, lends(question))] * 2),
        ("something else", lambda question: [(relay, lends(question)), (relay, waits(question, answers=1))]),
        ("impossible", lambda question: [(relay, lends(question)), (relay, waits(question, host="lab.example.edu"))]),
        ("impossible", lambda question: [(relay, lends(question)), (relay, waits(question, token=b"PUSH a b"))]),
        ("no room", lambda question: [(relay, lends(question)), *[(relay, waits(question))] * 100]),
    ]
    for problem, answer in cases:
        async with hostile_relay(relay, answer) as port:
            imposter = msgspec.structs.replace(found, port=port)
            with pytest.raises(FrameError, match=problem):
                async with asyncio.timeout(PATIENCE_S):
                    await use(member._core, imposter, lambda connection, host: connection.close(), lent.append)
    assert len(lent) == 5


@given(
    st.text(max_size=60) | st.from_regex(r"[0-9a-f:.]{0,50}(/[0-9]{1,3})?"),
    st.just(bytes(TOKEN_BYTES)) | st.binary(max_size=40),
)
def test_connection_that_waits_names_a_host_and_a_token(host: str, token: bytes) -> None:
    frame = encode_frame(Waiting(1, 2, token, host))
    try:
        decode_frame(frame)
    except FrameError:
        return
    assert len(token) == TOKEN_BYTES and ip_network(host).prefixlen in {32, 64}


def test_connection_that_waits_may_come_from_both_families() -> None:
    for host in ("192.0.2.7", "2001:db8::7"):
        decode_frame(encode_frame(Waiting(1, 2, bytes(TOKEN_BYTES), address_group(host))))
