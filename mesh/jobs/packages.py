"""Packages of environments: those of this node, which it gives to other nodes, and where one build gets those of its lock from.

A package is an archive (a wheel, or a conda package), named by its SHA-256. It comes from this node's own ones, else from other
nodes in pieces, as blobs of images do, else from outside the mesh where the owner allows it. The packages are in a store of
their own: a request for one reads nothing else.

A build asks for packages over HTTP, at a proxy on loopback that knows one host, `HOST`, which has an index (PEP 503) with exactly
the files of the build's lock. So uv's cache, which goes by addresses, holds from one build to the next, and uv reaches no address
but this. The proxy is there for the time of the build, for those who know its password, as the build's own variables have it.
"""

import asyncio
import os
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hmac import compare_digest
from html import escape
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from membership.events import MemberView
from membership.identity import NodeId
from membership.malformed import MALFORMED
from mesh.images.blobs import BlobStore, FetchFailed
from mesh.images.fetcher import BlobFetcher, Origin
from mesh.jobs.package_origins import PackageOrigins
from mesh.model.environment import PackageFile
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.departed import departed
from mesh.rpc.loopback import HOST as LOOPBACK
from mesh.rpc.loopback import LoopbackServer
from mesh.rpc.peer_credentials import is_own
from placement.rendezvous import rank
from placement.zones import subnet

T = TypeVar("T")

ROUTE = "/v1/packages"
MAX_HASHES = 4096  # in one question (own choice); a lock of 500 packages names a third for machines of one kind
MAX_QUESTION_BYTES, MAX_LENGTHS_BYTES = MAX_HASHES * 34 + 16, MAX_HASHES * 9 + 16
AT_ONCE, MOST_ASKED = 8, 64  # nodes asked at a time until one has a package, and for one build (own choice)
ASK_S = 5.0  # for the answer of one (own choice)
PART_OF_QUOTA = 4  # packages that nobody uses take at most a quarter of `env_cache_gib` (own choice)
CONNECTIONS = 64  # uv opens 50

HOST = "packages.invalid"  # nobody has such a name (RFC 6761)
FOR_EVER = {"Cache-Control": "max-age=31536000, immutable"}  # a file is named by its hash
NOT_KEPT = {"Cache-Control": "no-cache"}  # the page about a project is as the lock

_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_question_decoder = msgspec.msgpack.Decoder(Annotated[list[_Hash], msgspec.Meta(max_length=MAX_HASHES)])
_lengths_decoder = msgspec.msgpack.Decoder(Annotated[list[_Length], msgspec.Meta(max_length=MAX_HASHES)])

encode = msgspec.msgpack.encode


def decode_question(data: bytes) -> list[bytes]:
    """Decode the hashes of packages that a node asks for. ValueError if they are not valid."""
    return _decoded(_question_decoder, data)


def decode_lengths(data: bytes) -> list[int]:
    """Decode the answer: the length of each package, 0 if it is not there. ValueError if it is not valid."""
    return _decoded(_lengths_decoder, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not understood: {error}") from error


class Neighbours(NamedTuple):
    """Other nodes as sources of packages.

    `there` returns those that may be asked, the nearest first; `blame` reports one that sent wrong data.
    """

    me: NodeId
    peers: PeerClient
    there: Callable[[], Sequence[NodeId]]
    blame: Callable[[NodeId, str], None]


def nearest(members: Iterable[MemberView], me: NodeId, own_host: str) -> list[NodeId]:
    """Return the other members that are there: those of this node's subnet first, each part in an order of this node's own."""
    near = {
        member.node_id: subnet(member.host) == subnet(own_host)
        for member in members
        if member.present and member.state != "unreachable" and member.node_id != me
    }
    order = [node for node, _ in rank(me, [(node, 1) for node in near])]
    return sorted(order, key=lambda node: not near[node])


class Packages:
    """The packages of one node. `gives`: whether it gives them to other nodes."""

    def __init__(
        self, root: Path, most_bytes: int, origins: PackageOrigins, gives: bool, neighbours: Neighbours
    ) -> None:
        self.store = BlobStore(root, most_bytes // PART_OF_QUOTA, 0.0)
        self.most_bytes, self.origins, self.neighbours = most_bytes, origins, neighbours
        self._gives = gives
        self._build: Build | None = None
        me, peers, _, blame = neighbours
        self.fetcher = BlobFetcher(me, self.store, peers, ROUTE, self._origin, blame)

    # --- for other nodes

    def lengths(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the length of each of these packages that this node gives, 0 for others. Blocks."""
        return [(self.store.size(one) or 0) if self._gives else 0 for one in hashes]

    def given(self, digest: bytes, pieces: Sequence[int]) -> Iterator[bytes] | None:
        """Return pieces of a package; None if this node does not give it. Blocks."""
        if not self._gives or self.store.use(digest) is None:
            return None
        return self.store.pieces(digest, pieces)

    # --- for builds of this node

    @asynccontextmanager
    async def serve(
        self, files: Sequence[PackageFile], tell: Callable[[int], None] = lambda came: None
    ) -> AsyncIterator["Build"]:
        """Serve these files to one build, until it is over. One build at a time. `tell` hears how many it has got."""
        build = self._build = Build(self, files, tell)
        try:
            await build.open()
            yield build
        finally:
            self._build = None
            await build.close()
            await self.fetcher.close()

    def _origin(self, digest: bytes, name: str) -> Origin:
        if self._build is None:
            raise FetchFailed("its build is over")
        return self._build.origin(digest)


class _Question:
    """Which of these packages other nodes have: nodes that are not asked yet, and what the others answered."""

    def __init__(self, hashes: Sequence[bytes], nodes: Sequence[NodeId]) -> None:
        self.hashes, self.nodes = hashes, deque(nodes)
        self.holders: dict[bytes, dict[NodeId, int]] = {one: {} for one in hashes}
        self.asking = asyncio.Lock()


class Build:
    """What one build gets packages from. `problems`: why it did not get some."""

    def __init__(self, packages: Packages, files: Sequence[PackageFile], tell: Callable[[int], None]) -> None:
        self._packages, self._tell, self.problems = packages, tell, list[str]()
        self._came = set[bytes]()
        self._files = {file.sha256: file for file in files}
        self._projects: dict[str, list[PackageFile]] = {}
        for file in files:
            self._projects.setdefault(file.place, []).append(file)
        self._named = f"build:{os.urandom(32).hex()}"
        self._server = LoopbackServer(CONNECTIONS, is_own)
        nodes = packages.neighbours.there()[:MOST_ASKED]
        machine = os.uname().machine
        asked = [file.sha256 for file in self._files.values() if file.fits(machine)]
        self._questions: dict[bytes, _Question] = {}
        for start in range(0, len(asked), MAX_HASHES):
            question = _Question(asked[start : start + MAX_HASHES], nodes)
            self._questions |= dict.fromkeys(question.hashes, question)

    async def open(self) -> None:
        app = web.Application(middlewares=[departed, self._guarded])
        app.add_routes([web.get("/simple/{project}/", self._page), web.get("/{sha256}/{name}", self._file)])
        if not await self._server.open(app, [0]):
            raise FetchFailed(f"no port of {LOOPBACK} is free")

    async def close(self) -> None:
        await self._server.close()

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the variables by which a program finds this proxy, and no other one."""
        proxy = f"http://{self._named}@{LOOPBACK}:{self._server.port}"
        names = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": ""}
        return {**names, **{name.lower(): value for name, value in names.items()}}

    # --- the proxy

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Proxy-Authorization", "").encode(errors="replace")
        if not compare_digest(shown, b"Basic " + b64encode(self._named.encode())):
            raise web.HTTPForbidden
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        files = self._projects.get(request.match_info["project"], ())
        links = (f'<a href="/{file.sha256.hex()}/{quote(file.name)}">{escape(file.name)}</a>\n' for file in files)
        text = f"<!DOCTYPE html>\n<html><body>\n{''.join(links)}</body></html>\n"
        return web.Response(text=text, content_type="text/html", headers=NOT_KEPT)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        try:
            file = self._files[bytes.fromhex(request.match_info["sha256"])]
        except (KeyError, ValueError) as error:
            raise web.HTTPNotFound from error
        try:
            path = await self._path(file)
            self._came.add(file.sha256)
            self._tell(len(self._came))
            return web.FileResponse(path, headers=FOR_EVER)
        except (FetchFailed, OSError) as error:
            refusal = self._packages.origins.refusal(file)
            self.problems.append(f"{file.name}: {error}{'; ' if refusal else ''}{refusal}")
            raise web.HTTPNotFound from error

    # --- finding

    async def _path(self, file: PackageFile) -> Path:
        """Return the file of a package, which is fetched unless it is here. FetchFailed."""
        store, again = self._packages.store, False
        while (path := await asyncio.to_thread(store.use, file.sha256)) is None:
            more = await self._ask(file.sha256, again)
            try:
                await self._packages.fetcher.bring(file.sha256)
            except FetchFailed:
                if not more:
                    raise
            again = True
        return path

    async def _ask(self, digest: bytes, again: bool) -> bool:
        """Ask nodes until one has a package, and, with `again`, one that has not been asked; return whether more are left."""
        question = self._questions.get(digest)
        if question is None:
            return False
        async with question.asking:
            while question.nodes and (again or not question.holders[digest]):
                again = False
                some = [question.nodes.popleft() for _ in range(min(AT_ONCE, len(question.nodes)))]
                await asyncio.gather(*(self._ask_node(node, question) for node in some))
            return bool(question.nodes)

    async def _ask_node(self, node: NodeId, question: _Question) -> None:
        try:
            answer = await self._packages.neighbours.peers.call(
                node, "POST", ROUTE, encode(question.hashes), ASK_S, MAX_LENGTHS_BYTES
            )
            lengths = decode_lengths(answer)
        except (PeerError, ValueError):  # an older version has no such call
            return
        for digest, length in zip(question.hashes, lengths, strict=False):
            if 0 < length <= self._packages.most_bytes:
                question.holders[digest][node] = length

    def origin(self, digest: bytes) -> Origin:
        """Return where a package of this build may be."""
        file, question = self._files.get(digest), self._questions.get(digest)
        if file is None:
            raise FetchFailed("its build is over")
        packages = self._packages
        fetch = partial(packages.origins.bring, file, packages.store, packages.most_bytes)
        holders = question.holders[digest] if question is not None else {}
        return Origin(holders, None if packages.origins.refusal(file) else fetch)
