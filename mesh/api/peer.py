"""Calls to other nodes: signed requests over TLS 1.3, pinned to the certificate each node publishes in its `facts`."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from membership.identity import Identity, NodeId, short_id
from mesh.api.auth import HEADER, sign_request
from mesh.api.line import MESSAGE_LIMIT, Line
from mesh.api.wire import Lane, PacedBody, Wire
from mesh.versions import WIRE

PINS_KEPT = 4096
CONNECT_TIMEOUT_S = 3.0  # a LAN peer answers in milliseconds; this one is gone
CALL_TIMEOUT_S = 20.0
TUNNELS = 256  # at once from this node; ours
READ_BYTES = 1 << 20  # of a stream at once, on both sides; with 64 KiB half as fast (own measurement)


class PeerError(RuntimeError):
    """A peer could not be reached or refused; the text names the peer and the reason."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What a node publishes about how to reach it. Later versions may add fields."""

    api_port: int
    fingerprint: bytes
    version: str
    disk: bytes = b""  # names its journal (`mesh.jobs.ledger.Seat`)
    wire: int = WIRE


_facts_decoder = msgspec.msgpack.Decoder(Facts)


def decode_facts(body: bytes) -> Facts | None:
    """None for what another version, or an enemy, may have said."""
    try:
        return _facts_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    fingerprint: bytes


class PeerClient:
    """`lookup` gives a node's address from the gossiped facts, or None while it is not known; `wire` is what bodies share."""

    def __init__(
        self,
        identity: Identity,
        mesh_id: bytes,
        lookup: Callable[[NodeId], Address | None],
        wire: Wire | None = None,
    ) -> None:
        self.wire = wire or Wire()
        self._identity = identity
        self._mesh_id = mesh_id
        self._lookup = lookup
        self._session: aiohttp.ClientSession | None = None
        self._tunnels: aiohttp.ClientSession | None = None  # they last, and must not take the place of calls
        self._pins: dict[bytes, aiohttp.Fingerprint] = {}  # one object a fingerprint: connections are kept by it

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=256, limit_per_host=16, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BYTES)
        self._tunnels = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=TUNNELS), timeout=timeout)

    async def close(self) -> None:
        for session in (self._session, self._tunnels):
            if session is not None:
                await session.close()

    async def call(
        self, node: NodeId, method: str, path: str, body: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
    ) -> bytes:
        """A small signed call; the whole answer. Every one may come twice: a kept connection can end just as it is used."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._read(node, method, path, body)
                except PeerError as error:
                    if not isinstance(error.__cause__, aiohttp.ServerDisconnectedError):
                        raise
                return await self._read(node, method, path, body)
        except TimeoutError as error:
            raise PeerError(f"node {short_id(node)} did not answer within {timeout_s:g} s") from error

    async def _read(self, node: NodeId, method: str, path: str, body: bytes) -> bytes:
        async with self.stream(node, method, path, body) as response:
            return await response.read()

    def _pin(self, fingerprint: bytes) -> aiohttp.Fingerprint:
        if len(self._pins) >= PINS_KEPT:
            self._pins.clear()
        return self._pins.setdefault(fingerprint, aiohttp.Fingerprint(fingerprint))

    @asynccontextmanager
    async def stream(
        self,
        node: NodeId,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes | memoryview],
        lane: Lane | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A signed call whose answer, and perhaps body, is streamed: at the pace of `lane`. PeerError on anything but success."""
        url, pin, signed = self._signed(node, method, path, body if isinstance(body, bytes) else None)
        assert self._session is not None
        data = body if lane is None or isinstance(body, bytes) else PacedBody(body, lane)
        arguments: dict[str, Any] = {"data": data, "headers": {HEADER: signed}}
        try:
            async with self._session.request(method, url, ssl=pin, **arguments) as response:
                if response.status >= 400:
                    text = (await response.content.read(2000)).decode(errors="replace")
                    raise PeerError(f"node {short_id(node)} answered {response.status}: {text}", response.status)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(node, url, error) from error

    @asynccontextmanager
    async def tunnel(self, node: NodeId, path: str) -> AsyncIterator[Line]:
        """A connection for frames, kept until the block is left. PeerError if it cannot be had."""
        url, pin, signed = self._signed(node, "GET", path, b"")
        assert self._tunnels is not None
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                socket = await self._tunnels.ws_connect(
                    url, ssl=pin, headers={HEADER: signed}, max_msg_size=MESSAGE_LIMIT, compress=0
                )
        except aiohttp.WSServerHandshakeError as error:
            raise PeerError(f"node {short_id(node)} answered {error.status}", error.status) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(node, url, error) from error
        line = Line(socket)
        try:
            yield line
        finally:
            await line.close()

    def _signed(self, node: NodeId, method: str, path: str, body: bytes | None) -> tuple[str, aiohttp.Fingerprint, str]:
        """Where to, whose certificate it must be, and the header that says who calls; PeerError if it is nowhere."""
        address = self._lookup(node)
        if address is None or self._session is None:
            raise PeerError(f"no address is known for node {short_id(node)}")
        now, nonce = int(time.time()), os.urandom(16)
        signed = sign_request(self._identity, self._mesh_id, node, method, path, body, nonce, now)
        host = f"[{address.host}]" if ":" in address.host else address.host
        return f"https://{host}:{address.port}{path}", self._pin(address.fingerprint), signed


def _broken(node: NodeId, url: str, error: Exception) -> PeerError:
    if isinstance(error, aiohttp.ServerFingerprintMismatch):
        return PeerError(f"node {short_id(node)} shows another certificate than it published")
    return PeerError(f"node {short_id(node)} at {url.split('/')[2]}: {error or 'it does not answer'}")
