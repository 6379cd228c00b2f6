"""Server for other nodes: only members get past the TLS handshake, and every connection and body counts against a bound.

A connection is a stranger's until its handshake is done (`mesh.rpc.tls`). `Handshakes` limits how many begin in a second, since
each takes a millisecond of the processor. Strangers share few places, and those at one address fewer. When these are full, the
oldest unfinished handshake ends, so that an honest one, which takes milliseconds, gets through a flood. A member holds at most
MAX_PER_PEER connections, and all members together MAX_CONNECTIONS. A connection ends soon after the membership of its node,
whatever it is being answered.
"""

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import NamedTuple, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from membership.identity import Identity, NodeId, short_id
from membership.listener import Acceptor, Strangers
from membership.ratelimit import TokenBuckets
from mesh.rpc.client import CALLS_PER_NODE, KEEPALIVE_S, LOOK_S, TUNNELS_PER_NODE
from mesh.rpc.memory import HELD, MAX_REQUESTS_PER_PEER, Memory
from mesh.rpc.streams import read_within
from mesh.rpc.tls import PeerObject, server_context

HANDSHAKE_S = 5.0  # Nomad's `rpc_handshake_timeout`
MAX_HANDSHAKES, MAX_HANDSHAKES_PER_HOST = 128, 64  # unfinished, at a time (own choice)
# Handshakes per second: 1 % and 5 % of a processor (measured: make bench-adversary).
PER_HOST_S, STRANGERS_S = 10.0, 50.0
MAX_PER_PEER = 64  # more than the client of an honest node opens
MAX_CONNECTIONS = 1024
FILES_KEPT = 256  # descriptors for the journal, the store and guests
KEEPALIVE_CLOSE_S = KEEPALIVE_S + 5  # after the client, which then knows; also the time limit of a request's headers
READ_BYTES = 1 << 17  # a body is read ahead up to twice that, and one piece of 256 KiB more
BODY_S, ANSWER_S = 30.0, 60.0  # for a body and for an answer that are not streams
LINGER_S = 1.0  # reads on after an early answer, so that the caller sees it
COPIES = 2  # of a body while it is read

assert CALLS_PER_NODE + TUNNELS_PER_NODE < MAX_PER_PEER and CALLS_PER_NODE <= MAX_REQUESTS_PER_PEER

log = logging.getLogger(__name__)

Count = Callable[[str], None]


def peer_of(request: web.Request) -> NodeId:
    """Return the node that sends this request. KeyError if the connection is not one of `PeerServer`."""
    tls = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    if not isinstance(tls, PeerObject):
        raise KeyError("not a connection between nodes")
    return tls.peer


def id_in(request: web.Request, name: str, length: int) -> bytes:
    """Return the id of that many bytes, in hex, that the request's path has as `name`; HTTPBadRequest if it is none."""
    try:
        found = bytes.fromhex(request.match_info[name])
    except ValueError as error:
        raise web.HTTPBadRequest(text="not an id") from error
    if len(found) != length:
        raise web.HTTPBadRequest(text="not an id")
    return found


class Handshakes:
    """Limits how many handshakes begin: from each address, and from all addresses at which no member was seen last.

    A member's own handshakes are free up to PER_HOST_S for each member. So strangers elsewhere keep no member out, and members
    that share an address do not use up its share.
    """

    def __init__(self) -> None:
        self._of_host, self._of_peer = TokenBuckets(PER_HOST_S), TokenBuckets(PER_HOST_S)
        self._of_strangers = TokenBuckets(STRANGERS_S)
        self._host_of: dict[NodeId, str] = {}  # one address for each member, so that none can claim many

    def may_begin(self, host: str, now: float) -> bool:
        """Count a handshake that begins; False if it is one too many."""
        member = host in self._host_of.values()
        return self._of_host.allow(host, now) and (member or self._of_strangers.allow("", now))

    def completed(self, host: str, peer: NodeId, now: float) -> None:
        """Note that a member proved its key from this address."""
        if not self._of_peer.allow(peer, now):
            return
        if host not in self._host_of.values():
            self._of_strangers.give_back("")
        self._host_of[peer] = host
        self._of_host.give_back(host)


class PeerServer:
    """Serves an application to the nodes for which `refuse` returns an empty text; `count` counts refusals by reason."""

    def __init__(
        self,
        application: web.Application,
        identity: Identity,
        mesh_id: bytes,
        refuse: Callable[[NodeId], str],
        count: Count = lambda reason: None,
        read_bytes: int = READ_BYTES,
        look_s: float = LOOK_S,
    ) -> None:
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            read_bufsize=read_bytes,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_CLOSE_S,
            lingering_time=LINGER_S,
        )
        self._context = server_context(identity, mesh_id, self._refuse)
        self._refuse_node, self._count = refuse, count
        self._limit = Handshakes()
        self._handshakes = Strangers(MAX_HANDSHAKES, MAX_HANDSHAKES_PER_HOST)
        self._of_peer: Counter[NodeId] = Counter()
        self._connections: set[_Connection] = set()
        self._look_s = look_s
        self._look: asyncio.Task[None] | None = None
        self._max_connections = MAX_CONNECTIONS
        self._acceptor = Acceptor(self.take)

    async def start(self, *listeners: socket.socket) -> None:
        """Serve connections to these bound sockets, which this server closes, and those of `take`."""
        await self._runner.setup()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = min(MAX_CONNECTIONS, max(MAX_PER_PEER, files - FILES_KEPT - MAX_HANDSHAKES))
        if self._max_connections < MAX_CONNECTIONS:
            log.warning(
                "other nodes get at most %d connections, since this process may open only %d files: raise `ulimit -n`",
                self._max_connections,
                files,
            )
        self._acceptor.start(listeners)
        self._look = asyncio.create_task(self._end_former_members(), name="former members")

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        await self._acceptor.close()
        await self._handshakes.end()
        await self._runner.cleanup()

    def take(self, connection: socket.socket, host: str) -> None:
        """Serve a connection that was accepted, from this host (`address_group`); refuse it if there are too many."""
        if self._runner.server is None:  # not yet started, or closed
            connection.close()
            return
        ended = self._handshakes.make_place(host) if self._limit.may_begin(host, time.monotonic()) else None
        if ended != 0:
            self._count("refused_handshakes")
        if ended is None:
            connection.close()
            return
        self._handshakes.add(asyncio.create_task(self._shake_hands(connection, host), name="handshake"), host)

    async def _shake_hands(self, connection: socket.socket, host: str) -> None:
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        try:
            _, protocol = await loop.connect_accepted_socket(
                lambda: _Connection(server(), self._opened, self._closed),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
            self._limit.completed(host, protocol.peer, time.monotonic())
        except ssl.SSLCertVerificationError as error:
            self._count("refused_foreign")
            log.info("refused a connection: %s", error)
        except (OSError, TimeoutError):
            self._count("refused_handshakes")

    def _refuse(self, node: NodeId) -> str:
        if reason := self._refuse_node(node):
            return reason
        if self._of_peer[node] >= MAX_PER_PEER or self._of_peer.total() >= self._max_connections:
            self._count("refused_busy")
            return f"node {short_id(node)} has {self._of_peer[node]} connections, all nodes {self._of_peer.total()}"
        return ""

    async def _end_former_members(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            former = {node: reason for node in self._of_peer if (reason := self._refuse_node(node))}
            for connection in [one for one in self._connections if one.peer in former]:
                log.info("ended a connection: %s", former[connection.peer])
                connection.abort()

    def _opened(self, connection: "_Connection") -> None:
        self._connections.add(connection)
        self._of_peer[connection.peer] += 1

    def _closed(self, connection: "_Connection") -> None:
        peer = connection.peer
        self._connections.discard(connection)
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class _Connection(asyncio.Protocol):
    """Reports the beginning and the end of a connection, and passes all else on to `inner`."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        opened: Callable[["_Connection"], None],
        closed: Callable[["_Connection"], None],
    ) -> None:
        self._inner, self._opened, self._closed = inner, opened, closed
        self.data_received, self.eof_received = inner.data_received, inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = cast(PeerObject, transport.get_extra_info("ssl_object")).peer
        self.abort = cast(asyncio.Transport, transport).abort
        self._opened(self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(self)
        self._inner.connection_lost(exc)


class Bound(NamedTuple):
    """Most bytes of a request's body and of its answer that are held in memory; streams are not."""

    body: int = 0
    answer: int = 0


BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)


def bounded(bounds: Mapping[tuple[str, str], Bound | None], memory: Memory) -> Middleware:
    """Return a middleware that reads the body of a request within its bound, and keeps it in `request[BODY]`.

    `bounds`: by method and path of the route; a route without one streams. HTTP 413 for a longer body, 408 for a slow one.
    """

    @web.middleware
    async def within(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route.resource
        bound = bounds.get((request.method, route.canonical)) if route is not None else Bound()
        if bound is None:
            return await handler(request)
        length = bound.body if request.content_length is None else min(bound.body, request.content_length)
        size = COPIES * length + bound.answer
        async with memory.hold(peer_of(request), size, request.transport) as held:
            request[HELD] = held
            try:
                request[BODY] = await _read(request, bound.body)
                held.waits = False  # but for this node
                response = await handler(request)
            except web.HTTPException as error:
                # The server keeps an error, and with it all frames and their bodies, until the connection's next request.
                response = web.Response(status=error.status, text=error.text)
            request[BODY], held.waits = b"", True
            if isinstance(response, web.Response) and isinstance(response.body, bytes) and bound.answer:
                response.body = BytesIO(response.body)  # sent in pieces: TLS takes a whole body at once, and keeps it
                async with asyncio.timeout(ANSWER_S):
                    await response.prepare(request)
                    await response.write_eof()
            return response

    return within


async def _read(request: web.Request, limit: int) -> bytes:
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            body = await read_within(request.content, limit)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from error
    if body is None:
        raise web.HTTPRequestEntityTooLarge(limit, limit + 1)
    return body
