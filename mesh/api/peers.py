"""What a node answers to other nodes: job messages, chunks, manifests, logs. Signed requests over TLS, nothing else."""

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ckptstore.errors import FenceError, MissingChunks, NotFound, StoreError
from ckptstore.manifest import MAX_MANIFEST_BYTES
from ckptstore.receiver import stream_bytes
from membership.envelope import EnvelopeError
from membership.trust import Standing
from mesh.api.auth import HEADER, Gatekeeper, RequestRefused
from mesh.jobs.messages import MAX_MESSAGE_BYTES, MessageError
from mesh.jobs.postman import BATCH_LIMIT, open_mail

if TYPE_CHECKING:
    from mesh.daemon import Daemon

MAX_IDS = 1_000_000  # chunks of one question: 4 TB
MAX_BODY = max(MAX_MANIFEST_BYTES, MAX_MESSAGE_BYTES * BATCH_LIMIT)

log = logging.getLogger(__name__)
_ids_decoder = msgspec.msgpack.Decoder(list[bytes])


class PeerApi:
    def __init__(self, daemon: "Daemon", gatekeeper: Gatekeeper) -> None:
        self._daemon = daemon
        self._gatekeeper = gatekeeper
        self.counters: Counter[str] = Counter()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/v1/messages", self._messages),
                web.post("/v1/chunks/missing", self._missing),
                web.put("/v1/chunks", self._put_chunks),
                web.post("/v1/chunks/frames", self._frames),
                web.put("/v1/manifests/{id}", self._put_manifest),
                web.get("/v1/manifests/{id}", self._get_manifest),
                web.get("/v1/jobs/{job}/spec", self._spec),
                web.get("/v1/jobs/{job}/cell", self._cell),
                web.get("/v1/jobs/{job}/log/{attempt}", self._log),
            ]
        )
        return app

    async def _admit(self, request: web.Request, *, streamed: bool = False) -> tuple[Standing, bytes]:
        """The caller and the body. A streamed body is left in the request; its bytes must prove themselves."""
        body = b"" if streamed else await request.read()
        try:
            standing = self._gatekeeper.admit(
                request.headers.get(HEADER), request.method, request.path_qs, None if streamed else body, time.time()
            )
        except RequestRefused as refusal:
            self.counters[f"refused_{refusal.reason}"] += 1
            raise web.HTTPForbidden(text=str(refusal)) from refusal
        return standing, body

    async def _messages(self, request: web.Request) -> web.Response:
        standing, body = await self._admit(request)
        try:
            messages = open_mail(body)
            for data in messages[:BATCH_LIMIT]:
                if not self._daemon.jobs.deliver(standing.node_id, data):
                    raise web.HTTPServiceUnavailable(text="this node has too much to do")
        except (msgspec.MsgspecError, UnicodeDecodeError, MessageError) as error:
            self.counters["refused_malformed"] += 1
            raise web.HTTPBadRequest(text=f"not job messages: {error}") from error
        return web.Response()

    async def _missing(self, request: web.Request) -> web.Response:
        _, body = await self._admit(request)
        missing = await asyncio.to_thread(self._daemon.store.missing, _ids(body))
        return web.Response(body=msgspec.msgpack.encode(missing))

    async def _put_chunks(self, request: web.Request) -> web.Response:
        await self._admit(request, streamed=True)
        receiver = None
        try:
            receiver = await asyncio.to_thread(self._daemon.store.receive, stream_bytes([b""] * MAX_IDS))
            while data := await request.content.readany():
                await asyncio.to_thread(receiver.feed, data)
            new = await asyncio.to_thread(receiver.finish)
        except StoreError as error:
            self.counters["refused_chunks"] += 1
            raise web.HTTPConflict(text=str(error)) from error
        finally:
            if receiver is not None:
                await asyncio.to_thread(receiver.abort)
        return web.Response(text=str(new))

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        _, body = await self._admit(request)
        try:
            frames = await asyncio.to_thread(self._daemon.store.frames, _ids(body))
        except MissingChunks as error:
            raise web.HTTPNotFound(text=str(error)) from error
        response = web.StreamResponse()
        await response.prepare(request)
        while (piece := await asyncio.to_thread(next, frames, None)) is not None:
            for start in range(0, len(piece), 1 << 20):
                await response.write(piece[start : start + (1 << 20)])
        await response.write_eof()
        return response

    async def _put_manifest(self, request: web.Request) -> web.Response:
        standing, body = await self._admit(request)
        try:
            signer, _ = self._daemon.store.unseal(body)
        except EnvelopeError as error:
            self.counters["refused_malformed"] += 1
            raise web.HTTPBadRequest(text=f"not a manifest: {error}") from error
        if signer != standing.node_id:
            self.counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text="a manifest is brought by the node that signed it")
        try:
            identity = await asyncio.to_thread(self._daemon.store.accept_manifest, body)
        except FenceError as error:
            self.counters["refused_fenced"] += 1
            raise web.HTTPConflict(text=str(error)) from error
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error
        if identity.hex() != request.match_info["id"]:
            raise web.HTTPBadRequest(text="the manifest is not the one named")
        return web.Response()

    async def _get_manifest(self, request: web.Request) -> web.Response:
        await self._admit(request)
        try:
            sealed = await asyncio.to_thread(self._daemon.store.sealed, _hex(request.match_info["id"], 32))
        except (NotFound, StoreError) as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=sealed)

    async def _spec(self, request: web.Request) -> web.Response:
        await self._admit(request)
        sealed = await self._daemon.desk.sealed_spec(_hex(request.match_info["job"], 16))
        if sealed is None:
            raise web.HTTPNotFound(text="this node does not know the job")
        return web.Response(body=sealed)

    async def _cell(self, request: web.Request) -> web.Response:
        await self._admit(request)
        witness = self._daemon.jobs.participant.witnesses.get(_hex(request.match_info["job"], 16))
        if witness is None:
            raise web.HTTPNotFound(text="this node has no record of the job")
        return web.Response(body=msgspec.msgpack.encode(witness.cell))

    async def _log(self, request: web.Request) -> web.StreamResponse:
        standing, _ = await self._admit(request)
        job = _hex(request.match_info["job"], 16)
        attempt, offset = _number(request.match_info["attempt"]), _number(request.query.get("offset", "0"))
        owner = await asyncio.to_thread(self._daemon.jobs.logs.owner, job)
        if owner is None:
            raise web.HTTPNotFound(text="the job has not run here, or long ago")
        if standing.user != owner:
            raise web.HTTPForbidden(text=f"the log is {owner}'s")
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in self._daemon.logs.tail(job, attempt, offset, follow=request.query.get("follow") == "1"):
            await response.write(piece)
        await response.write_eof()
        return response


def _ids(body: bytes) -> list[bytes]:
    try:
        ids = _ids_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f"not a list of chunk ids: {error}") from error
    if len(ids) > MAX_IDS or any(len(identity) != 32 for identity in ids):
        raise web.HTTPBadRequest(text="not a list of chunk ids")
    return ids


def _hex(text: str, length: int) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text="not an id") from error
    if len(value) != length:
        raise web.HTTPBadRequest(text="not an id")
    return value


def _number(text: str) -> int:
    if not text.isdigit() or len(text) > 15:
        raise web.HTTPBadRequest(text="not a number")
    return int(text)
