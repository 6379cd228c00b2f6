"""Relay: a member lends a port to one that others cannot reach, as behind NAT, and passes the connections to it on.

The member keeps a stream to its relay. For each connection to the port, the relay sends a token over that stream; the member
connects to the port and begins with the token, and the relay joins the two. What passes is what passes between nodes anyway:
TLS, and signed frames. So the relay can break a connection off, and not read or change a call.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from membership.addresses import bound_sockets, family_of
from membership.config import MAX_RELAYED
from membership.core import Core
from membership.framing import connected, keep_alive, read_frame, write_frame
from membership.identity import NodeId
from membership.listener import (
    FIRST_BYTE_S,
    FRAMES,
    MAX_UNSORTED,
    MAX_UNSORTED_PER_HOST,
    TLS,
    Acceptor,
    Strangers,
    Take,
    first_byte,
)
from membership.member import Member
from membership.ratelimit import TokenBuckets
from membership.reconcile import TOKEN_BYTES, AnyFrame, Done, FrameError, Relayed, RelayMe, Waiting

ANSWER = b"R"  # begin of the member's connections to its port
ANSWER_S = 5.0  # for an answer of the other side, as for an exchange (own choice)
MAX_JOINED = 256  # connections at a time
MAX_JOINED_PER_HOST = 64  # as many as a member may have (`mesh.rpc.server`)
MAX_UNREAD = 64 * 1024  # bytes that wait to be sent to a member: it does not read
LINGER_S = 5.0  # for one direction of a connection after the other has ended (own choice)
PIECE_BYTES = 16 * 1024  # a ping waits for one of each busy connection of its member
CATCH_UP_S = 0.02  # a timer fires up to some milliseconds late
FRAME_BYTES = 1024  # of the frames of this module
WAITING_S = 500.0  # connections that a member is told of in a second, as many as items of a push-pull
PORTS = 4  # tried for each port lent, since another program or an ending loan may have some


class Relay:
    """Lends the ports above this node's own to at most `most` members; passes at most `mbps` on, for all of them together.

    `host_s`: connections of one host to all these ports that begin in a second; bursts as of packets.
    """

    def __init__(self, core: Core, bind_host: str, own_port: int, most: int, mbps: float, host_s: float) -> None:
        self.core, self._bind_host, self._own_port = core, bind_host, own_port
        self._most, self._bytes_s = most, mbps * 1e6 / 8
        self.strangers = Strangers(MAX_UNSORTED, MAX_UNSORTED_PER_HOST)
        self.joined = Strangers(MAX_JOINED, MAX_JOINED_PER_HOST)
        self._of_host = TokenBuckets(host_s)
        self._loans: dict[NodeId, Loan] = {}
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def share(self) -> float:
        """Bytes per second of each member's connections: the others cannot slow them down."""
        return self._bytes_s / max(1, len(self._loans))

    async def close(self) -> None:
        for loan in self._loans.values():
            loan.end()
        await asyncio.gather(*self._running, return_exceptions=True)

    def lend(self, node: NodeId, question: RelayMe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over the stream of a member that asks for a port, until it ends; the member's earlier loan ends now."""
        self._end(node)
        problem = self._refusal()
        loan = Loan(self, question, writer)
        if not problem:
            self._loans[node] = loan
        task = asyncio.create_task(loan.run(reader, problem), name="relay")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self._loans.get(node) is loan and self._loans.pop(node))

    def end_former(self) -> None:
        """End the loans of nodes that are no members any more."""
        for node in [node for node in self._loans if not self.core.is_member(node)]:
            self._end(node)

    def bind(self) -> list[socket.socket]:
        first = self._own_port + 1
        for port in range(first, min(first + PORTS * self._most, 65536)):
            with suppress(OSError):
                return bound_sockets(self._bind_host, port, socket.SOCK_STREAM)
        return []

    def may_begin(self, host: str) -> bool:
        """Count a connection that begins; False if its host began too many."""
        allowed = self._of_host.allow(host, asyncio.get_running_loop().time())
        self.core.counters["refused_flood"] += not allowed
        return allowed

    def _refusal(self) -> str:
        """Return why no port is lent; empty if one is. A member that does not use its port makes place."""
        me = self.core.swim.table.get(self.core.me)
        if me is None or me.port != self._own_port:
            return "no node reaches it itself"
        if len(self._loans) < self._most:
            return ""
        for node, loan in self._loans.items():
            user = self.core.swim.table.get(node)
            if user is None or not user.present or (user.host, user.port) != (me.host, loan.port):
                self._end(node)
                return ""
        return f"it relays for {self._most} nodes, as its owner allows"

    def _end(self, node: NodeId) -> None:
        if (loan := self._loans.pop(node, None)) is not None:
            loan.end()


class Loan:
    """A port that one member has. Connections that nobody has taken yet are a stranger's: see `listener`."""

    def __init__(self, relay: Relay, question: RelayMe, writer: asyncio.StreamWriter) -> None:
        self.port = 0
        self._relay, self._question, self._writer = relay, question, writer
        self._acceptor = Acceptor(self._take)
        self._connections: set[asyncio.Task[None]] = set()
        self._waiting: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._turn, self._free_at = asyncio.Lock(), 0.0  # when its part of the link is free again

    def end(self) -> None:
        self._writer.transport.abort()

    async def run(self, reader: asyncio.StreamReader, problem: str) -> None:
        """Lend a port unless there is a problem, and wait for the end of the member's stream."""
        listeners = [] if problem else self._relay.bind()
        self.port = listeners[0].getsockname()[1] if listeners else 0
        try:
            self._acceptor.start(listeners)
            keep_alive(self._writer.get_extra_info("socket"))
            nonce = self._relay.core.nonce()
            await self._tell(Relayed(nonce, self._question.nonce, self.port, problem or "no port is free"))
            if listeners:
                await reader.read(1)  # its end
        except OSError:
            self._relay.core.counters["relay_broken"] += 1
        finally:
            await self._acceptor.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._writer.close()

    async def _tell(self, frame: Relayed | Waiting) -> None:
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            self.end()
            raise ConnectionAbortedError("the member does not read")
        await write_frame(self._writer, self._relay.core.seal_frame(frame))

    def _take(self, connection: socket.socket, host: str) -> None:
        if self._relay.strangers.make_place(host) is None:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, host), name="relayed connection")
        self._relay.strangers.add(task, host)
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        kept = False
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                first = await first_byte(connection)
                if first == ANSWER:
                    kept = await self._answered(connection)
            if first in {TLS, FRAMES} and self._relay.may_begin(host):
                await self._join(connection, host)
        except (OSError, TimeoutError):
            pass  # the same as for a connection to a node: it ends
        finally:
            if not kept:
                connection.close()

    async def _answered(self, connection: socket.socket) -> bool:
        """Give the member's connection to the one that it is for; False if there is none."""
        begin = await asyncio.get_running_loop().sock_recv(connection, len(ANSWER) + TOKEN_BYTES)
        waiting = self._waiting.pop(begin.removeprefix(ANSWER), None)
        if waiting is None:
            return False
        waiting.set_result(connection)
        return True

    async def _join(self, connection: socket.socket, host: str) -> None:
        token, answered = os.urandom(TOKEN_BYTES), asyncio.get_running_loop().create_future()
        self._waiting[token] = answered
        try:
            await self._tell(Waiting(self._relay.core.nonce(), self._question.nonce, token, host))
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait({answered})
            task = asyncio.current_task()
            assert task is not None
            self._relay.strangers.recognize(task)
            if self._relay.joined.make_place(host) is not None:
                self._relay.joined.add(task, host)
                await self._pass_both(connection, answered.result())
        finally:
            self._waiting.pop(token, None)
            if answered.done():
                answered.result().close()

    async def _pass_both(self, one: socket.socket, other: socket.socket) -> None:
        directions = [asyncio.create_task(self._pass(*ends)) for ends in ((one, other), (other, one))]
        try:
            ended, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            if all(direction.exception() is None for direction in ended):
                await asyncio.wait(directions, timeout=LINGER_S)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        keep_alive(source)
        while piece := await loop.sock_recv(source, PIECE_BYTES):
            await self._pace(len(piece))
            await loop.sock_sendall(sink, piece)
        sink.shutdown(socket.SHUT_WR)

    async def _pace(self, count: int) -> None:
        """Wait for the turn of so many bytes. A connection that ends while it waits has used nothing."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            self._free_at = max(self._free_at, loop.time() - CATCH_UP_S) + count / self._relay.share
            await asyncio.sleep(self._free_at - loop.time())


async def use(core: Core, relay: Member, take: Take, lent: Callable[[int], None]) -> None:
    """Have a member relay the connections to this node, until the stream to it ends or it breaks the rules.

    `lent` gets the port at its address, `take` the connections. OSError, TimeoutError, EnvelopeError, FrameError,
    asyncio.IncompleteReadError.
    """
    buckets = TokenBuckets(WAITING_S)

    async def hear() -> AnyFrame:
        data = await read_frame(
            reader, FRAME_BYTES, lambda length: buckets.allow("", asyncio.get_running_loop().time())
        )
        sender, frame = core.open_frame(data)
        if sender != relay.node:
            raise FrameError("another node answers for the relay")
        return frame

    async with asyncio.timeout(ANSWER_S) as limit, connected(relay.host, relay.port) as (reader, writer):
        keep_alive(writer.get_extra_info("socket"))
        first = RelayMe(core.nonce(), relay.node, 0)
        await write_frame(writer, core.seal_frame(first))
        fresh = await hear()
        if not isinstance(fresh, Done) or fresh.answers != first.nonce:
            raise FrameError("the answer does not match the question")
        question = RelayMe(core.nonce(), relay.node, fresh.nonce)
        await write_frame(writer, core.seal_frame(question))
        answer = await hear()
        if not isinstance(answer, Relayed) or answer.answers != question.nonce:
            raise FrameError("the answer does not match the question")
        if not answer.port:
            raise FrameError(answer.problem)
        if not relay.port < answer.port <= relay.port + PORTS * MAX_RELAYED:
            raise FrameError(f"port {answer.port} is none that a relay lends")
        limit.reschedule(None)
        lent(answer.port)
        fetching: set[asyncio.Task[None]] = set()
        try:
            while True:
                frame = await hear()
                if not isinstance(frame, Waiting) or frame.answers != question.nonce:
                    raise FrameError("the stream of a relay brings something else")
                if len(fetching) < MAX_UNSORTED:
                    task = asyncio.create_task(_fetch(relay.host, answer.port, frame, take))
                    fetching.add(task)
                    task.add_done_callback(fetching.discard)
                await asyncio.sleep(0)  # many frames may have been read ahead
        finally:
            for task in fetching:
                task.cancel()
            await asyncio.gather(*fetching, return_exceptions=True)


async def _fetch(host: str, port: int, waiting: Waiting, take: Take) -> None:
    """Connect to the port, and serve the connection that waits there as one from its own host."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(family_of(host), socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_connect(connection, (host, port))
            await loop.sock_sendall(connection, ANSWER + waiting.token)
    except BaseException as error:
        connection.close()
        if not isinstance(error, OSError | TimeoutError):
            raise
    else:
        take(connection, waiting.host)
