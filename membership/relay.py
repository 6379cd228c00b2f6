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
from membership.reconcile import FrameError, Relayed, RelayMe, Waiting

ANSWER, TOKEN_BYTES = b"R", 16  # begin of the member's connections to its port
ANSWER_S = 5.0  # for an answer of the other side, as for an exchange (own choice)
MAX_JOINED = 128  # connections of one member at a time: more than a campus has nodes (own choice)
MAX_UNREAD = 64 * 1024  # bytes that wait to be sent to a member: it does not read
LINGER_S = 30.0  # for one direction of a connection after the other has ended (own choice)
PIECE_BYTES = 64 * 1024
FRAME_BYTES = 1024  # of the frames of this module
PORTS = 4  # tried for each port lent, since another program or an ending loan may have some


class Relay:
    """Lends the ports above this node's own to at most `most` members; passes at most `mbps` on, for all of them together."""

    def __init__(self, core: Core, bind_host: str, own_port: int, most: int, mbps: float) -> None:
        self.core, self._bind_host, self._own_port = core, bind_host, own_port
        self._most, self._bytes_s = most, mbps * 1e6 / 8
        self._loans: dict[NodeId, asyncio.Task[None]] = {}
        self._free_at = 0.0  # when the link is free again, at that rate

    def __len__(self) -> int:
        return len(self._loans)

    async def close(self) -> None:
        for loan in self._loans.values():
            loan.cancel()
        await asyncio.gather(*self._loans.values(), return_exceptions=True)

    def lend(self, node: NodeId, question: RelayMe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over the stream of a member that asks for a port, until it ends; the member's earlier loan ends now."""
        if node in self._loans:
            self._loans.pop(node).cancel()
        problem = "" if len(self._loans) < self._most else f"it relays for {self._most} nodes, as its owner allows"
        loan = asyncio.create_task(self._lend(question, reader, writer, problem), name="relay")
        if not problem:
            self._loans[node] = loan
        loan.add_done_callback(lambda ended: self._loans.get(node) is ended and self._loans.pop(node))

    def end_former(self) -> None:
        """End the loans of nodes that are no members any more."""
        for node, loan in self._loans.items():
            if not self.core.is_member(node):
                loan.cancel()

    async def _lend(
        self, question: RelayMe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, problem: str
    ) -> None:
        listeners = [] if problem else self._bind()
        port = listeners[0].getsockname()[1] if listeners else 0
        loan = Loan(self, question, writer)
        try:
            loan.start(listeners)
            keep_alive(writer.get_extra_info("socket"))
            await self.tell(writer, Relayed(self.core.nonce(), question.nonce, port, problem or "no port is free"))
            if listeners:
                await reader.read(1)  # its end
        except OSError:
            self.core.counters["relay_broken"] += 1
        finally:
            await loan.close()
            writer.close()

    def _bind(self) -> list[socket.socket]:
        first = self._own_port + 1
        for port in range(first, min(first + PORTS * self._most, 65536)):
            with suppress(OSError):
                return bound_sockets(self._bind_host, port, socket.SOCK_STREAM)
        return []

    async def tell(self, writer: asyncio.StreamWriter, frame: Relayed | Waiting) -> None:
        if writer.transport.get_write_buffer_size() > MAX_UNREAD:
            writer.transport.abort()
            raise ConnectionAbortedError("the member does not read")
        await write_frame(writer, self.core.seal_frame(frame))

    async def pace(self, count: int) -> None:
        """Wait until the link has passed so many bytes on."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._bytes_s
        await asyncio.sleep(self._free_at - now)


class Loan:
    """A port that one member has. Connections that nobody has taken yet are a stranger's: see `listener`."""

    def __init__(self, relay: Relay, question: RelayMe, writer: asyncio.StreamWriter) -> None:
        self._relay, self._question, self._writer = relay, question, writer
        self._acceptor = Acceptor(self._take)
        self._strangers = Strangers(MAX_UNSORTED, MAX_UNSORTED_PER_HOST)
        self._joined: set[asyncio.Task[None]] = set()
        self._waiting: dict[bytes, asyncio.Future[socket.socket]] = {}

    def start(self, listeners: list[socket.socket]) -> None:
        self._acceptor.start(listeners)

    async def close(self) -> None:
        await self._acceptor.close()
        await self._strangers.end()
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)

    def _take(self, connection: socket.socket, host: str) -> None:
        if self._strangers.make_place(host) is None:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, host), name="relayed connection")
        self._strangers.add(task, host)
        task.add_done_callback(self._joined.discard)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        kept = False
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                first = await first_byte(connection)
                if first == ANSWER:
                    kept = await self._answered(connection)
            if first in {TLS, FRAMES} and len(self._joined) < MAX_JOINED:
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
            waiting = Waiting(self._relay.core.nonce(), self._question.nonce, token, host)
            await self._relay.tell(self._writer, waiting)
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait({answered})
            task = asyncio.current_task()
            assert task is not None
            self._strangers.recognize(task)
            self._joined.add(task)
            await self._pass_both(connection, answered.result())
        finally:
            self._waiting.pop(token, None)
            if answered.done():
                answered.result().close()

    async def _pass_both(self, one: socket.socket, other: socket.socket) -> None:
        directions = [asyncio.create_task(self._pass(*ends)) for ends in ((one, other), (other, one))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(directions, timeout=LINGER_S)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        keep_alive(source)
        while piece := await loop.sock_recv(source, PIECE_BYTES):
            await self._relay.pace(len(piece))
            await loop.sock_sendall(sink, piece)
        sink.shutdown(socket.SHUT_WR)


async def use(core: Core, relay: Member, take: Take, lent: Callable[[int], None]) -> None:
    """Have a member relay the connections to this node, until the stream to it ends or it breaks the rules.

    `lent` gets the port at its address, `take` the connections. OSError, TimeoutError, EnvelopeError, FrameError,
    asyncio.IncompleteReadError.
    """
    question = RelayMe(core.nonce())
    async with asyncio.timeout(ANSWER_S) as limit, connected(relay.host, relay.port) as (reader, writer):
        keep_alive(writer.get_extra_info("socket"))
        await write_frame(writer, core.seal_frame(question))
        sender, answer = core.open_frame(await read_frame(reader, FRAME_BYTES))
        if sender != relay.node or not isinstance(answer, Relayed) or answer.answers != question.nonce:
            raise FrameError("the answer does not match the question")
        if not answer.port:
            raise FrameError(answer.problem)
        limit.reschedule(None)
        lent(answer.port)
        fetching: set[asyncio.Task[None]] = set()
        try:
            while True:
                sender, frame = core.open_frame(await read_frame(reader, FRAME_BYTES))
                if sender != relay.node or not isinstance(frame, Waiting) or frame.answers != question.nonce:
                    raise FrameError("the stream of a relay brings something else")
                if len(fetching) < MAX_UNSORTED:
                    task = asyncio.create_task(_fetch(relay.host, answer.port, frame, take))
                    fetching.add(task)
                    task.add_done_callback(fetching.discard)
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
