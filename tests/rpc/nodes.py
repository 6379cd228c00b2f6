"""Nodes on real connections for tests and benchmarks: a store that takes chunks and manifests, as slowly as it is told."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from ckptstore.errors import StoreError
from ckptstore.messages import decode_missing_query, encode_ids
from ckptstore.receiver import Receiver
from ckptstore.store import Store
from membership.identity import Identity
from mesh.checkpoints.loss_estimate import LossEstimate
from mesh.rpc.client import Address, PeerClient
from mesh.rpc.pacing import Wire
from mesh.rpc.server import READ_BYTES, PeerServer
from mesh.rpc.streams import finished, received
from mesh.util.boottime import boot_s
from tests.ckptstore.worlds import open_store

MESH = b"m" * 16
BUFFER_BYTES = 1 << 18  # of a slow keeper's sockets: what the kernel takes is not yet taken


class Link:
    """A link of so many bytes per second, for all connections together."""

    def __init__(self, bps: float) -> None:
        self._bps, self._free_at = bps, time.monotonic()
        self.carried = 0

    async def carry(self, count: int) -> None:
        self.carried += count
        # What was not used is lost, but for what the scheduler took.
        self._free_at = max(self._free_at, time.monotonic() - 0.05) + count / self._bps
        await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))


class Slowly:
    """Yield what arrives on a connection over such a link."""

    def __init__(self, content: Any, link: Link) -> None:
        self._content, self._link = content, link

    async def readany(self) -> bytes:
        data: bytes = await self._content.readany()
        await self._link.carry(len(data))
        return data


def node_named(letter: str) -> Identity:
    """Return the same node for the same letter."""
    return Identity(letter.encode() * 32)


async def serve(
    app: web.Application,
    identity: Identity,
    listener: socket.socket | None = None,
    read_bytes: int = READ_BYTES,
) -> tuple[PeerServer, Address]:
    """Serve an application as a node that anybody may call."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    server = PeerServer(app, identity, MESH, lambda node: "", read_bytes=read_bytes)
    await server.start(listener)
    return server, Address(*listener.getsockname()[:2])


async def taken(content: Any, receiver: Receiver) -> int:
    """Take a stream of chunks as a node does; return how many were new."""
    await received(content, receiver)
    return await finished(receiver)


class Keeper:
    """A node with a store. `manifests` says when each came, in seconds of the loop's clock."""

    def __init__(self, directory: Path, link: Link | None = None, identity: Identity | None = None) -> None:
        self.directory, self.link = directory, link
        self.identity = identity or Identity.generate()
        self.store: Store = open_store(directory / "store")
        self.manifests: dict[bytes, float] = {}

    async def serve(self, host: str = "127.0.0.1") -> Address:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.post("/v1/chunks/missing", self._missing),
                web.put("/v1/chunks", self._chunks),
                web.put("/v1/manifests/{id}", self._manifest),
            ]
        )
        # Reading ahead is the sender's gain: without it a keeper that is slow would seem fast until memory is full.
        ahead = READ_BYTES if self.link is None else BUFFER_BYTES // 4
        sock = socket.create_server((host, 0))
        if self.link is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._server, address = await serve(app, self.identity, sock, ahead)
        return address

    async def close(self) -> None:
        await self._server.close()
        async with asyncio.timeout(60):  # what came of a broken stream is kept by a thread
            while any((self.store.root / "tmp").iterdir()):
                await asyncio.sleep(0.01)
        self.store.close()

    def torn(self) -> int:
        """Checkpoints that are shown and are not whole."""
        infos = self.store.manifests()
        return sum(bool(self.store.missing(self.store.manifest(info.id).chunks)) for info in infos)

    async def _missing(self, request: web.Request) -> web.Response:
        question = decode_missing_query(await request.read())
        missing = await asyncio.to_thread(self.store.missing, question.ids, question.not_delta)
        return web.Response(body=encode_ids(missing))

    async def _chunks(self, request: web.Request) -> web.Response:
        content: Any = request.content if self.link is None else Slowly(request.content, self.link)
        try:
            return web.Response(text=str(await taken(content, self.store.receive(10**12))))
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error

    async def _manifest(self, request: web.Request) -> web.Response:
        try:
            identity = await asyncio.to_thread(self.store.accept_manifest, await request.read())
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error
        self.manifests[identity] = asyncio.get_running_loop().time()
        return web.Response()


async def client_of(addresses: dict[bytes, Address], wire: Wire | None = None) -> PeerClient:
    peers = PeerClient(Identity.generate(), MESH, addresses.get, wire)
    await peers.open()
    return peers


def leaving(window_s: float, percent: int = 100, warn: Callable[[str], None] = lambda text: None) -> LossEstimate:
    """Return the departure of a job that has notice."""
    loss = LossEstimate(percent, warn)
    loss.noticed(boot_s(), window_s)
    return loss
