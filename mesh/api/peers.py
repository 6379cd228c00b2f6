"""What a node answers to other nodes: job messages, chunks, manifests, logs. Signed requests over TLS, nothing else."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from ckptstore.errors import BadManifest, CorruptChunk, FenceError, MissingChunks, NotFound, StoreError
from ckptstore.manifest import MAX_MANIFEST_BYTES
from ckptstore.questions import MAX_IDS, decode_order, decode_question, encode_ids
from ckptstore.receiver import stream_bytes
from membership.envelope import EnvelopeError
from membership.trust import Standing
from mesh.api.auth import HEADER, Gatekeeper, RequestRefused
from mesh.api.errors import ExitCode, MeshError
from mesh.api.files import running_files
from mesh.api.images import ImageApi
from mesh.api.streams import IDLE_S, given, taken
from mesh.api.usage import told_to_peer
from mesh.api.wire import Cargo
from mesh.jobs.deputy import Refused
from mesh.jobs.messages import MAX_MESSAGE_BYTES, MessageError
from mesh.jobs.postman import BATCH_LIMIT, open_mail
from mesh.jobs.shares import decode_share, encode_held
from mesh.jobs.spec import SpecError

if TYPE_CHECKING:
    from mesh.daemon import Daemon

MAX_LOG_PIECE = 1 << 20
MAX_BODY = max(MAX_MANIFEST_BYTES, MAX_MESSAGE_BYTES * BATCH_LIMIT)

log = logging.getLogger(__name__)

T = TypeVar("T")


class PeerApi:
    def __init__(self, daemon: "Daemon", gatekeeper: Gatekeeper) -> None:
        self._daemon = daemon
        self._gatekeeper = gatekeeper
        self._refusals = daemon.jobs.courier.refusals
        self.counters = self._refusals.counters

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
                web.get("/v1/jobs/{job}/key", self._key),
                web.put("/v1/jobs/{job}/share", self._take_share),
                web.get("/v1/jobs/{job}/tunnel/{way}", self._tunnel),
                web.get("/v1/jobs/{job}/control/{name}", self._control),
                web.get("/v1/jobs/{job}/events", self._events),
                web.get("/v1/jobs/{job}/files", self._files),
                web.get("/v1/jobs/{job}/log/{attempt}", self._log),
                web.put("/v1/jobs/{job}/log/{attempt}", self._put_log),
                web.get("/v1/usage", self._usage),
                web.put("/v1/errands/{job}", self._take_errand),
                web.delete("/v1/errands/{job}", self._release_errand),
                *ImageApi(self._daemon, self._admit).routes(),
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

    def _read(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return decode(body)
        except ValueError as error:
            self.counters["refused_malformed"] += 1
            raise web.HTTPBadRequest(text=str(error)) from error

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
        question = self._read(decode_question, body)
        missing = await asyncio.to_thread(self._daemon.store.missing, question.ids, frozenset(question.alone))
        return web.Response(body=encode_ids(missing))

    async def _put_chunks(self, request: web.Request) -> web.Response:
        standing, _ = await self._admit(request, streamed=True)
        try:
            user = bytes.fromhex(request.query.get("of", "")).decode()
        except ValueError as error:
            raise web.HTTPBadRequest(text="not a user's name") from error
        try:
            receiver = await asyncio.to_thread(self._daemon.store.receive, stream_bytes([b""] * MAX_IDS), user)
            with self._daemon.wire.taking(request.transport):
                new = await taken(request.content, receiver)
        except CorruptChunk as error:
            self._refusals.count("chunks", standing.node_id, f"of the chunks that it brought, {error}")
            raise web.HTTPConflict(text=str(error)) from error
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"nothing came for {IDLE_S:g} s") from error
        return web.Response(text=str(new))

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        standing, body = await self._admit(request)
        order = self._read(decode_order, body)
        try:
            frames = await asyncio.to_thread(self._frames_of, order.ids, set(order.have))
        except MissingChunks as error:
            raise web.HTTPNotFound(text=str(error)) from error
        answer = await given(request, self._daemon.wire, frames, Cargo("checkpoint", standing.node_id))
        now, bandwidth = time.monotonic(), self._daemon.jobs.courier.bandwidth
        bandwidth.saw(standing.node_id, answer.size, answer.seconds, answer.held, now)
        return answer.response

    def _frames_of(self, ids: Sequence[bytes], have: set[bytes]) -> Iterator[memoryview]:
        store, asked = self._daemon.store, set(ids)
        needed, _ = store.needed(ids)
        return store.frames([identity for identity in needed if identity in asked or identity not in have])

    async def _put_manifest(self, request: web.Request) -> web.Response:
        standing, body = await self._admit(request)
        try:
            self._daemon.store.unseal(body)
        except EnvelopeError as error:
            self._refusals.count("malformed", standing.node_id, f"it brought a manifest that is none: {error}")
            raise web.HTTPBadRequest(text=f"not a manifest: {error}") from error
        try:
            identity = await asyncio.to_thread(self._daemon.store.accept_manifest, body)
        except FenceError as error:
            self.counters["refused_fenced"] += 1
            raise web.HTTPConflict(text=str(error)) from error
        except BadManifest as error:
            self._refusals.count("malformed", standing.node_id, f"it brought a manifest that is none: {error}")
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

    async def _job(self, request: web.Request) -> bytes:
        """The job that is meant, its record at hand."""
        job = _hex(request.match_info["job"], 16)
        await self._daemon.jobs.past.take_out((job,))
        return job

    async def _spec(self, request: web.Request) -> web.Response:
        await self._admit(request)
        sealed = await self._daemon.job_desk.sealed_spec(await self._job(request))
        if sealed is None:
            raise web.HTTPNotFound(text="this node does not know the job")
        return web.Response(body=sealed)

    async def _cell(self, request: web.Request) -> web.Response:
        await self._admit(request)
        witness = self._daemon.jobs.participant.witnesses.get(await self._job(request))
        if witness is None:
            raise web.HTTPNotFound(text="this node has no record of the job")
        return web.Response(body=msgspec.msgpack.encode(witness.cell))

    async def _key(self, request: web.Request) -> web.Response:
        standing, _ = await self._admit(request)
        held = await self._daemon.jobs.keyring.held_for(await self._job(request), standing)
        if held is None:
            self._refusals.count("foreign", standing.node_id, "it asked for the key of a job that it does not run")
            raise web.HTTPForbidden(text="a job's key is for its user and for who runs it")
        return web.Response(body=encode_held(held))

    async def _take_share(self, request: web.Request) -> web.Response:
        standing, body = await self._admit(request)
        share = self._read(decode_share, body)
        if not await self._daemon.jobs.keyring.take(await self._job(request), standing, share):
            self._refusals.count(
                "foreign", standing.node_id, "it brought a share of the key of a job that is not its own"
            )
            raise web.HTTPForbidden(text="shares of a job's key come from its runner or its user, to its witnesses")
        return web.Response()

    async def _events(self, request: web.Request) -> web.Response:
        await self._admit(request)
        events = await self._daemon.journal.events(_hex(request.match_info["job"], 16), 0)
        return web.Response(body=msgspec.msgpack.encode([sealed for _, sealed in events]))

    async def _files(self, request: web.Request) -> web.StreamResponse:
        standing, _ = await self._admit(request)
        job = _hex(request.match_info["job"], 16)
        runner = self._daemon.jobs.participant.runners.get(job)
        if runner is not None and runner.spec.user != standing.user:
            raise web.HTTPForbidden(text=f"the files are {runner.spec.user}'s")
        try:
            path = bytes.fromhex(request.query.get("path", "")).decode()
            pieces = running_files(self._daemon, job, path)
        except (MeshError, ValueError) as error:
            raise web.HTTPNotFound(text=str(error)) from error
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _tunnel(self, request: web.Request) -> web.WebSocketResponse:
        standing, _ = await self._admit(request)
        job = _hex(request.match_info["job"], 16)
        return await self._daemon.tunnels.to_here(request, job, request.match_info["way"], standing)

    async def _control(self, request: web.Request) -> web.Response:
        standing, _ = await self._admit(request)
        job = _hex(request.match_info["job"], 16)
        try:
            data = self._daemon.tunnels.own_control_file(job, request.match_info["name"], standing)
        except MeshError as error:
            raise _refused(error) from error
        return web.Response(body=data)

    async def _put_log(self, request: web.Request) -> web.Response:
        """A piece of what an attempt prints, from the node that runs it; the answer is how far the copy has come."""
        standing, body = await self._admit(request)
        job = _hex(request.match_info["job"], 16)
        attempt, offset = _number(request.match_info["attempt"]), _number(request.query.get("offset", "0"))
        witness = self._daemon.jobs.participant.witnesses.get(job)
        if witness is None or witness.cell.holder != standing.node_id:
            self.counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text="only the job's runner keeps its log with its witnesses")
        logs, user = self._daemon.jobs.logs, witness.spec.user
        end = await asyncio.to_thread(logs.append_copy, job, attempt, offset, body[:MAX_LOG_PIECE], user)
        return web.Response(text=str(end))

    async def _take_errand(self, request: web.Request) -> web.Response:
        standing, body = await self._admit(request)
        try:
            await self._daemon.deputy.take(standing.node_id, _hex(request.match_info["job"], 16), body)
        except SpecError as error:
            self.counters["refused_foreign"] += 1
            raise web.HTTPBadRequest(text=str(error)) from error
        except Refused as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        return web.Response()

    async def _release_errand(self, request: web.Request) -> web.Response:
        standing, _ = await self._admit(request)
        await self._daemon.deputy.release(standing.node_id, _hex(request.match_info["job"], 16))
        return web.Response()

    async def _usage(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return web.Response(body=await told_to_peer(self._daemon, _number(request.query.get("since", "0"))))

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


def _refused(error: MeshError) -> web.HTTPException:
    kind = web.HTTPForbidden if error.code == ExitCode.REFUSED else web.HTTPNotFound
    return kind(text=str(error))


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
