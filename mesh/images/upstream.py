"""Public registries as a source of blobs, by digest, where the owner allows it (`image_registries`). Off by default.

An image on the list whose name there is its name in a registry (`ghcr.io/lab/tool:1`, or `library/python:3.12` in any of them) is
looked for below that name. What a registry sends is compared with its digest, and ends at the length that the manifest gives.

The owner may name a registry at any address. It may send this node on only to registries that the owner has named, or to public
addresses, so that it does not reach services of this machine and its network through the daemon.
"""

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlencode, urljoin

import aiohttp
import msgspec
from aiohttp.connector import AddrInfoType, SocketFactoryType

from membership.malformed import MALFORMED
from mesh.images.allowlist import user_of
from mesh.images.blobs import BlobStore
from mesh.images.oci import MAX_MANIFEST_BYTES, TYPES, digest_text
from mesh.network.addresses import NotPublic, checked
from mesh.rpc.streams import read_within

CONNECT_S, IDLE_S = 10.0, 30.0  # of a connection (own choice)
SLOWEST_BPS = 64 << 10  # bytes per second; a slower registry is useless (own choice)
REDIRECTS = 5  # of one answer (own choice); registries have one or two
TOKEN_BYTES = 1 << 16  # of the answer with a token (own choice)
WRITE_BYTES = 1 << 20  # in one call of a thread
HOSTS = {"docker.io": "registry-1.docker.io"}  # names of registries that are not their addresses
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # without TLS, as Docker does

_challenge = re.compile(r'(realm|service|scope)="([^"]*)"')


class FetchFailed(RuntimeError):
    """The blob cannot be had; the text says why."""


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class Upstream:
    """The registries that the owner allows, by host and perhaps port."""

    def __init__(self, registries: Sequence[str]) -> None:
        self._registries = tuple(registries)
        self._tls: ssl.SSLContext | None = None  # with the machine's authorities, which take 50 ms to read

    def places(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the registries and repositories where images of these names may be."""
        found = []
        for name in names:
            if user_of(name) is not None:
                continue
            path = re.sub(r"(@sha256:[0-9a-f]+|:[^:/]*)$", "", name)
            host, _, rest = path.partition("/")
            named = rest != "" and (host == "localhost" or "." in host or ":" in host)
            for registry in self._registries if path else ():
                if not named or host == registry:
                    repository = rest if named else path
                    short = registry == "docker.io" and "/" not in repository
                    found.append((registry, f"library/{repository}" if short else repository))
        return list(dict.fromkeys(found))

    async def bring(
        self, store: BlobStore, places: Sequence[tuple[str, str]], digest: bytes, size: int | None, is_manifest: bool
    ) -> None:
        """Fetch a blob from the first place that has it. FetchFailed on failure; OSError if the disk is full."""
        limit = MAX_MANIFEST_BYTES if size is None else size
        timeout = aiohttp.ClientTimeout(IDLE_S + limit / SLOWEST_BPS, sock_connect=CONNECT_S, sock_read=IDLE_S)
        reasons = []
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        async with _session(self._tls, timeout) as own, _session(self._tls, timeout, _public_socket) as public:
            for registry, repository in places:
                what = "manifests" if is_manifest else "blobs"
                try:
                    source = _Source(_start(registry), tuple(map(_start, self._registries)), own, public)
                    await source.fetch(f"v2/{repository}/{what}/{digest_text(digest)}", store, digest, limit)
                    return
                except (aiohttp.ClientError, TimeoutError, FetchFailed, ValueError, *MALFORMED) as error:
                    reasons.append(f"{registry}/{repository}: {str(error) or 'it does not answer'}")
        raise FetchFailed("; ".join(reasons))


def _start(registry: str) -> str:
    """Return the start of a registry's URLs."""
    return f"{'http' if LOOPBACK.fullmatch(registry) else 'https'}://{HOSTS.get(registry, registry)}/"


class _Source:
    """A registry: the start of its URLs, those of all that the owner has named, the session for these, and the one for where
    else it sends this node.
    """

    def __init__(
        self, registry: str, named: tuple[str, ...], own: aiohttp.ClientSession, public: aiohttp.ClientSession
    ) -> None:
        self._registry, self._named, self._own, self._public = registry, named, own, public

    async def fetch(self, path: str, store: BlobStore, digest: bytes, limit: int) -> None:
        url, token = f"{self._registry}{path}", ""
        async with self._get(url) as response:
            if response.status == 401:
                token = await self._token(response.headers.get("WWW-Authenticate", ""))
            else:
                await self._keep(response, store, digest, limit)
        if token:
            async with self._get(url, token) as response:
                await self._keep(response, store, digest, limit)

    @asynccontextmanager
    async def _get(self, url: str, token: str = "") -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask, and follow redirects. Only the registry itself gets the token."""
        for _ in range(REDIRECTS + 1):
            session, headers = self._public, {"Accept": ", ".join(sorted(TYPES))}
            if url.startswith(self._registry) and token:
                headers["Authorization"] = f"Bearer {token}"
            if url.startswith(self._named):
                session = self._own
            elif not url.startswith("https://"):
                raise FetchFailed("it sends this node to an address without TLS")
            async with session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status not in {301, 302, 303, 307, 308}:
                    yield response
                    return
                url = urljoin(url, response.headers.get("Location", ""))
        raise FetchFailed(f"it redirects more than {REDIRECTS} times")

    async def _token(self, challenge: str) -> str:
        """Get the token that a registry gives to anybody."""
        asked = dict(_challenge.findall(challenge))
        realm = asked.pop("realm", "")
        if not challenge.startswith("Bearer ") or not realm.startswith(("https://", *self._named)):
            raise FetchFailed("it wants a password")
        async with self._get(f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}") as response:
            answer = msgspec.json.decode(await read_within(response.content, TOKEN_BYTES) or b"", type=_Token)
        return answer.token or answer.access_token or "none"

    async def _keep(self, response: aiohttp.ClientResponse, store: BlobStore, digest: bytes, limit: int) -> None:
        if response.status != 200:
            raise FetchFailed(f"it answers {response.status}")
        part, at = await asyncio.to_thread(store.part), 0
        try:
            async for data in response.content.iter_chunked(WRITE_BYTES):
                if at + len(data) > limit:
                    raise FetchFailed(f"it sends over {limit} bytes")
                await asyncio.to_thread(part.write, data, at)
                at += len(data)
            if not await asyncio.to_thread(part.finish, digest):
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
        raise NotPublic(errno.EACCES, f"{address} is not public, and its host not in image_registries")
    return socket.socket(family, kind, protocol)
