"""Servers outside the mesh that this node's owner has named, as sources of blobs: registries, and indexes of packages.

The owner may name a server at any address. It may send this node on only to servers that the owner has named, or by TLS to public
addresses, so that it does not reach services of this machine and its network through the daemon.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit
from urllib.request import proxy_bypass

import aiohttp
from aiohttp.connector import AddrInfoType, SocketFactoryType

from mesh.images.blobs import BlobStore, FetchFailed
from mesh.network.addresses import NotPublic, checked

CONNECT_S, IDLE_S = 10.0, 30.0  # of a connection (own choice)
SLOWEST_BPS = 64 << 10  # bytes per second; a slower server is useless (own choice)
REDIRECTS = 5  # of one answer (own choice); registries have one or two
WRITE_BYTES = 1 << 20  # in one call of a thread


class Outside:
    """The servers that an owner has named, by the starts of their URLs.

    `proxies`: those of this machine, by the scheme of URLs, and below `no` the hosts without one.
    """

    def __init__(self, named: Sequence[str], proxies: Mapping[str, str] = {}) -> None:
        self.named, self._proxies = tuple(named), dict(proxies)
        self._tls: ssl.SSLContext | None = None  # with the machine's authorities, which take 50 ms to read

    @asynccontextmanager
    async def visit(self, limit: int) -> AsyncIterator["Visit"]:
        """Open connections for some requests, each with an answer of at most `limit` bytes."""
        timeout = aiohttp.ClientTimeout(IDLE_S + limit / SLOWEST_BPS, sock_connect=CONNECT_S, sock_read=IDLE_S)
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        async with _session(self._tls, timeout) as own, _session(self._tls, timeout, _public_socket) as public:
            yield Visit(self.named, own, public, limit, self._proxies)


class Visit:
    """Requests to servers that the owner has named, and to where these send this node."""

    def __init__(
        self,
        named: tuple[str, ...],
        own: aiohttp.ClientSession,
        public: aiohttp.ClientSession,
        limit: int,
        proxies: dict[str, str],
    ) -> None:
        self._named, self._own, self._public, self._limit, self._proxies = named, own, public, limit, proxies

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str], secret: tuple[str, str] = ("", "")
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask, and follow redirects. `secret`: the start of the URLs that get this `Authorization`, and no others."""
        for _ in range(REDIRECTS + 1):
            session, sent = self._public, dict(headers)
            if secret[1] and url.startswith(secret[0]):
                sent["Authorization"] = secret[1]
            if url.startswith(self._named):
                session = self._own
            elif not url.startswith("https://"):
                raise FetchFailed("it sends this node to an address without TLS")
            proxy = self._proxy(url)
            if proxy is not None:  # it looks the address up, and is the owner's
                session = self._own
            async with session.get(url, headers=sent, allow_redirects=False, proxy=proxy) as response:
                if response.status not in {301, 302, 303, 307, 308}:
                    yield response
                    return
                url = urljoin(url, response.headers.get("Location", ""))
        raise FetchFailed(f"it redirects more than {REDIRECTS} times")

    def _proxy(self, url: str) -> str | None:
        parts = urlsplit(url)
        if proxy_bypass(parts.hostname or "", self._proxies):
            return None
        return self._proxies.get(parts.scheme)

    async def keep(self, response: aiohttp.ClientResponse, store: BlobStore, digest: bytes) -> None:
        """Store the answer as a blob, if it has this hash."""
        if response.status != 200:
            raise FetchFailed(f"it answers {response.status}")
        part, at = await asyncio.to_thread(store.part), 0
        try:
            async for data in response.content.iter_chunked(WRITE_BYTES):
                if at + len(data) > self._limit:
                    raise FetchFailed(f"it sends over {self._limit} bytes")
                await asyncio.to_thread(part.write, data, at)
                at += len(data)
            if not await asyncio.to_thread(store.finish, part, digest):
                raise FetchFailed("what it sends is not what its hash says")
        finally:
            part.close()


def _session(
    tls: ssl.SSLContext, timeout: aiohttp.ClientTimeout, socket_of: SocketFactoryType | None = None
) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=tls, socket_factory=socket_of)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


def _public_socket(wanted: AddrInfoType) -> socket.socket:
    """Make the socket for an address that was looked up; NotPublic unless it is public."""
    family, kind, protocol, _, (address, *_) = wanted
    if not checked([str(address)]):
        raise NotPublic(errno.EACCES, f"{address} is not public, and this node's owner has not named its host")
    return socket.socket(family, kind, protocol)
