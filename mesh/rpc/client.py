"""Client of other nodes, over mutual TLS (`mesh.rpc.tls`). Whatever a node answers is bounded here before it is kept."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from membership.addresses import is_endpoint
from membership.identity import Identity, NodeId, short_id
from membership.malformed import MALFORMED
from mesh.rpc.frame_connection import MESSAGE_LIMIT, Line
from mesh.rpc.memory import MAX_REQUESTS_PER_PEER
from mesh.rpc.pacing import Lane, PacedBody, Wire
from mesh.rpc.streams import IDLE_S, read_within
from mesh.rpc.tls import client_context, node_name
from mesh.util.versions import WIRE

CONNECT_TIMEOUT_S = 3.0  # a peer on a LAN answers in milliseconds, or it is gone
CALL_TIMEOUT_S = 20.0
KEEPALIVE_S = 30.0
LOOK_S = 2.0  # between two looks for former members; a tunnel tells its user within 0.5 s why it ends (own choice)
CALLS_PER_NODE, TUNNELS_PER_NODE = (
    MAX_REQUESTS_PER_PEER,
    40,
)  # connections; together below `mesh.rpc.server.MAX_PER_PEER`
TUNNELS = 256  # open at a time from this node (own choice)
READ_BYTES = 1 << 20  # read buffer of a stream; 64 KiB is half as fast (own measurement)
ANSWER_BYTES = 4 << 20  # of a call, unless it says otherwise (as for a frame of the gossip)


class PeerError(RuntimeError):
    """A peer could not be reached or refused; the text names the peer and the reason."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A node's published address data. Later versions may add fields."""

    api_port: int  # 0: the one that it advertises to all
    version: str
    disk: bytes = b""  # the name of its journal (`mesh.model.record.Voter`)
    wire: int = WIRE


_facts_decoder = msgspec.msgpack.Decoder(Facts)


def decode_facts(body: bytes) -> Facts | None:
    """Decode facts; None if they are malformed."""
    try:
        return _facts_decoder.decode(body)
    except MALFORMED:
        return None


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int


class PeerClient:
    """Calls other nodes. `lookup` returns a node's address from its gossiped facts, or None; `wire` paces streamed bodies.

    Streams and tunnels end soon after `refuse` returns a reason for their node, as those to `PeerServer` do.
    """

    def __init__(
        self,
        identity: Identity,
        mesh_id: bytes,
        lookup: Callable[[NodeId], Address | None],
        wire: Wire | None = None,
        refuse: Callable[[NodeId], str] = lambda node: "",
        look_s: float = LOOK_S,
    ) -> None:
        self.wire = wire or Wire()
        self._refuse, self._look_s = refuse, look_s
        self._used: dict[asyncio.Timeout, NodeId] = {}  # streams and tunnels
        self._look: asyncio.Task[None] | None = None
        self._identity = identity
        self._mesh_id = mesh_id
        self._lookup = lookup
        self._session: aiohttp.ClientSession | None = None
        self._tunnels: aiohttp.ClientSession | None = None  # separate: long connections must not use up those of calls
        self._resolver = _Addresses()

    async def open(self) -> None:
        self._session = self._make_session(256, CALLS_PER_NODE)
        self._tunnels = self._make_session(TUNNELS, TUNNELS_PER_NODE)
        self._look = asyncio.create_task(self._end_former_members(), name="calls to former members")

    def _make_session(self, connections: int, per_node: int) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        connector = aiohttp.TCPConnector(
            limit=connections,
            limit_per_host=per_node,
            keepalive_timeout=KEEPALIVE_S,
            ssl=client_context(self._identity, self._mesh_id),
            resolver=self._resolver,
            use_dns_cache=False,
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            skip_auto_headers=["Accept-Encoding", "User-Agent"],
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        for session in (self._session, self._tunnels):
            if session is not None:
                await session.close()

    async def call(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
        answer_bytes: int = ANSWER_BYTES,
    ) -> bytes:
        """Make a small call; return the whole answer. PeerError also if it has over `answer_bytes`.

        The peer may get the call twice: a kept connection can end in use.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._read(node, method, path, body, answer_bytes)
                except PeerError as error:
                    if not isinstance(error.__cause__, aiohttp.ServerDisconnectedError):
                        raise
                return await self._read(node, method, path, body, answer_bytes)
        except TimeoutError as error:
            raise PeerError(f"node {short_id(node)} did not answer within {timeout_s:g} s") from error

    async def send(self, node: NodeId, path: str, body: AsyncIterator[bytes | memoryview], lane: Lane) -> None:
        """Send a body as a stream that `lane` paces; its answer counts for nothing. PeerError as `call`."""
        await self._read(node, "PUT", path, body, ANSWER_BYTES, lane)

    async def _read(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes | memoryview],
        limit: int,
        lane: Lane | None = None,
    ) -> bytes:
        async with self.stream(node, method, path, body, lane) as response:
            answer = await read_within(response.content, limit)
        if answer is not None:
            return answer
        raise PeerError(f"node {short_id(node)} answers {method} {path.partition('?')[0]} with over {limit} bytes")

    @asynccontextmanager
    async def stream(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes | memoryview],
        lane: Lane | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a call with a streamed answer, perhaps with a streamed body paced by `lane`. PeerError on failure, also if no
        answer begins within IDLE_S; one to a streamed body may come after all of it.
        """
        url = self._url(node, path)
        assert self._session is not None
        data: Any = body if lane is None or isinstance(body, bytes) else PacedBody(body, lane)
        begins = asyncio.timeout(IDLE_S if isinstance(body, bytes) else None)
        try:
            async with self._while_member(node), AsyncExitStack() as stack:
                async with begins:
                    response = await stack.enter_async_context(self._session.request(method, url, data=data))
                    if response.status != HTTPStatus.OK:
                        text = (await response.content.read(2000)).decode(errors="replace")
                        raise PeerError(f"node {short_id(node)} answered {response.status}: {text}", response.status)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            if begins.expired():
                raise PeerError(f"node {short_id(node)} did not answer within {IDLE_S:g} s") from error
            raise _broken(node, url, error) from error

    @asynccontextmanager
    async def tunnel(self, node: NodeId, path: str) -> AsyncIterator[Line]:
        """Open a connection for frames, for the duration of the block. PeerError on failure."""
        url = self._url(node, path)
        assert self._tunnels is not None
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                connection = await self._tunnels.ws_connect(url, max_msg_size=MESSAGE_LIMIT, compress=0)
        except aiohttp.WSServerHandshakeError as error:
            raise PeerError(f"node {short_id(node)} answered {error.status}", error.status) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(node, url, error) from error
        line = Line(connection)
        try:
            async with self._while_member(node):
                yield line
        finally:
            await line.close()

    @asynccontextmanager
    async def _while_member(self, node: NodeId) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as limit:
                self._used[limit] = node
                yield
        except TimeoutError as error:
            if limit.expired():
                raise PeerError(self._refuse(node)) from error
            raise
        finally:
            self._used.pop(limit, None)

    async def _end_former_members(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            former = [limit for limit, node in self._used.items() if self._refuse(node)]
            for limit in [one for one in former if not one.expired()]:
                limit.reschedule(asyncio.get_running_loop().time())

    def _url(self, node: NodeId, path: str) -> str:
        """Return the URL of a call, with the node's name as its host. PeerError if no address is known."""
        address = self._lookup(node)
        if address is None or self._session is None or not is_endpoint(address.host, address.port):
            raise PeerError(f"no address is known for node {short_id(node)}")
        name = node_name(node)
        self._resolver.hosts[name] = address.host
        return f"https://{name}:{address.port}{path}"


class _Addresses(AbstractResolver):
    """Resolves node names. Connections are kept by name, so none is used for another node that has taken over an address."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        numeric = socket.AI_NUMERICHOST  # never asks a name server, so it does not block
        found = socket.getaddrinfo(self.hosts[host], port, type=socket.SOCK_STREAM, flags=numeric)
        return [
            ResolveResult(hostname=host, host=str(sockaddr[0]), port=port, family=family, proto=proto, flags=0)
            for family, _, proto, _, sockaddr in found
        ]

    async def close(self) -> None:
        self.hosts.clear()


async def _refuse_redirect(*_: object) -> None:
    """Refuse to follow a redirect: it would send the request to an address that the peer chooses."""
    raise aiohttp.ClientError("it answered with a redirect")


def _broken(node: NodeId, url: str, error: Exception) -> PeerError:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return PeerError(f"another node answers at the address of node {short_id(node)}: {error.certificate_error}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return PeerError(
            f"node {short_id(node)} closed the connection: it is busy, or does not know this node as a member"
        )
    return PeerError(f"node {short_id(node)}: {error or 'it does not answer'}")
