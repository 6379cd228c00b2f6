"""The API for other nodes: job messages, chunks, manifests, logs, images, packages."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ckptstore.errors import BadManifest, CorruptChunk, FenceError, MissingChunks, NotFound, StoreError
from ckptstore.manifest import MAX_MANIFEST_BYTES, decode_manifest, manifest_id
from ckptstore.messages import MAX_IDS, MAX_IDS_BYTES, decode_chunk_request, decode_missing_query, encode_ids
from ckptstore.pack import MAX_STORED
from ckptstore.receiver import max_stream_bytes
from ckptstore.store import FenceUse, Store
from membership.identity import NodeId
from membership.malformed import MALFORMED
from membership.node import MembershipNode
from membership.ratelimit import TokenBuckets
from membership.trust import Credentials, TrustStore
from mesh.api.handlers.data import DataProvider
from mesh.api.handlers.files import FileHandlers
from mesh.api.handlers.images import how_far
from mesh.api.handlers.logs import LogReader, framed
from mesh.api.handlers.lookup import JobLookup
from mesh.api.handlers.tunnels import Tunnels
from mesh.api.handlers.usage import UsageHandlers
from mesh.checkpoints.key_shares import decode_share, encode_held
from mesh.checkpoints.keys import Keyring
from mesh.consensus.messages import MAX_MESSAGE_BYTES, MessageError
from mesh.data.library import DataLibrary
from mesh.execution.engine import EngineError
from mesh.images.allowlist import image_hash
from mesh.images.library import Library, NotGiven
from mesh.images.messages import decode_pieces, encode
from mesh.images.rules import short
from mesh.jobs.authority import is_user, may_order_image, runs
from mesh.jobs.log_times import decode_piece
from mesh.jobs.message_sender import BATCH_BYTES, BATCH_LIMIT, decode_batch
from mesh.jobs.packages import MAX_LENGTHS_BYTES, MAX_QUESTION_BYTES, ROUTE, Packages, decode_question
from mesh.jobs.service import JobService
from mesh.jobs.submission_retry import Refused, SubmissionRetry
from mesh.jobs.vouching import Refused as NotVouched
from mesh.journal import Journal
from mesh.model.spec import JOB_ID_BYTES, SpecError
from mesh.rpc.departed import departed
from mesh.rpc.memory import Memory
from mesh.rpc.pacing import Wire
from mesh.rpc.server import BODY, COPIES, READ_BYTES, Bound, bounded, id_in, peer_of
from mesh.rpc.streams import IDLE_S, finished, given, received
from mesh.util.errors import ExitCode, MeshError

MAX_LOG_PIECE = 1 << 20
MAX_KEY = 1 << 16  # of a message with shares of a key
SECRETS_CALLS_PER_S = 16.0  # of one node, 128 at once: 64 jobs of it may start together (own choice)
MAX_EVENTS = 4 << 20
MAX_RECORDS = 2 << 20
PEER_BYTES = COPIES * MAX_MANIFEST_BYTES  # for the requests of one peer; all peers together have twice that

# At a time; others wait. A node sends one for each of its jobs (own choice).
UPLOADS, UPLOADS_PER_PEER = 16, 4
# Decoded at a time, one of a member: they take a thread, and a processor for up to seconds (own choice). As many blobs are
# compared with their hashes: one of 100 GiB takes minutes at its first use, and manifests do not wait for that.
MANIFESTS = 2
UPLOAD_BYTES = 3 * MAX_STORED + 4 * READ_BYTES  # chunks that are stored, wait and come, and what is read ahead

log = logging.getLogger(__name__)

T = TypeVar("T")


class PeerHandlers:
    """`accepts`: users whose requests for images this node follows, besides its own user."""

    def __init__(
        self,
        trust: TrustStore,
        membership: MembershipNode,
        journal: Journal,
        store: Store,
        jobs: JobService,
        submissions: SubmissionRetry,
        library: Library,
        wire: Wire,
        accepts: Sequence[str],
        lookup: JobLookup,
        logs: LogReader,
        files: FileHandlers,
        tunnels: Tunnels,
        usage: UsageHandlers,
        data: DataLibrary,
        packages: Packages,
    ) -> None:
        self._data = DataProvider(trust, membership, data, jobs, wire, tuple(accepts))
        self._trust, self._membership, self._journal = trust, membership, journal
        self._store, self._jobs, self._submissions = store, jobs, submissions
        self._library, self._wire, self._accepts, self._packages = library, wire, accepts, packages
        self._lookup, self._logs, self._job_files = lookup, logs, files
        self._tunnels, self._usage_handlers = tunnels, usage
        self._refusals = jobs.replicator.refusals
        self._counters = self._refusals.counters
        self._secrets_calls = TokenBuckets(SECRETS_CALLS_PER_S)
        self._uploads = Memory(UPLOADS_PER_PEER * UPLOAD_BYTES, UPLOADS * UPLOAD_BYTES)
        self._manifests, self._blobs = Memory(1, MANIFESTS), Memory(1, MANIFESTS)

    def application(self) -> web.Application:
        """Return the application. A route without a bound streams its body, its answer or both."""
        ids, manifest = Bound(MAX_IDS_BYTES), Bound(MAX_MANIFEST_BYTES)
        routes: list[tuple[str, str, Handler, Bound | None]] = [
            ("POST", "/v1/messages", self._messages, Bound(BATCH_BYTES + MAX_MESSAGE_BYTES)),
            ("POST", "/v1/chunks/missing", self._missing, Bound(MAX_IDS_BYTES, answer=MAX_IDS_BYTES)),
            ("PUT", "/v1/chunks", self._put_chunks, None),
            ("POST", "/v1/chunks/frames", self._frames, ids),
            ("PUT", "/v1/manifests/{id}", self._put_manifest, manifest),
            ("GET", "/v1/manifests/{id}", self._get_manifest, Bound(answer=MAX_MANIFEST_BYTES)),
            ("GET", "/v1/jobs/{job}/spec", self._spec, Bound(answer=MAX_MESSAGE_BYTES)),
            ("GET", "/v1/jobs/{job}/witness-record", self._witness_record, Bound(answer=MAX_MESSAGE_BYTES)),
            ("GET", "/v1/jobs/{job}/key", self._key, Bound()),
            ("PUT", "/v1/jobs/{job}/share", self._take_share, Bound(MAX_KEY)),
            ("GET", "/v1/jobs/{job}/secrets-key", self._secrets_key, Bound()),
            ("PUT", "/v1/jobs/{job}/secrets-share", self._take_secrets_share, Bound(MAX_KEY)),
            ("GET", "/v1/jobs/{job}/tunnel/{way}", self._tunnel, None),
            ("GET", "/v1/jobs/{job}/control/{name}", self._control, Bound(answer=MAX_MESSAGE_BYTES)),
            ("GET", "/v1/jobs/{job}/events", self._events, Bound(answer=MAX_EVENTS)),
            ("GET", "/v1/jobs/{job}/files", self._files, None),
            ("GET", "/v1/jobs/{job}/log/{attempt}/{node}", self._log, None),
            ("PUT", "/v1/jobs/{job}/log/{attempt}", self._put_log, Bound(MAX_LOG_PIECE)),
            ("GET", "/v1/usage", self._usage, Bound(answer=MAX_RECORDS)),
            ("PUT", "/v1/submissions/{job}", self._keep_submission, Bound(MAX_MESSAGE_BYTES)),
            ("DELETE", "/v1/submissions/{job}", self._release_submission, Bound()),
            ("POST", "/v1/images/blobs/{hash}", self._image_blob, Bound(MAX_RECORDS)),
            ("GET", "/v1/images/{hash}/fetch", self._image_fetching, Bound()),
            ("POST", "/v1/images/{hash}/fetch", self._fetch_image, Bound()),
            ("POST", ROUTE, self._which_packages, Bound(MAX_QUESTION_BYTES, answer=MAX_LENGTHS_BYTES)),
            ("POST", f"{ROUTE}/{{hash}}", self._package, Bound(MAX_RECORDS)),
            *self._data.routes(self._admit),
        ]
        bounds = {(method, path): bound for method, path, _, bound in routes}
        app = web.Application(middlewares=[departed, bounded(bounds, Memory(PEER_BYTES, 2 * PEER_BYTES))])
        app.add_routes([web.route(method, path, handler) for method, path, handler, _ in routes])
        return app

    async def _admit(self, request: web.Request) -> tuple[Credentials, bytes]:
        """Return the caller and the body of its request, empty if it is a stream."""
        credentials = self._trust.credentials(peer_of(request), time.time())
        if credentials is None:  # since it has connected
            self._counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text="the sender is no longer a member of this mesh")
        return credentials, request.get(BODY, b"")

    def _read(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return decode(body)
        except ValueError as error:
            self._counters["refused_malformed"] += 1
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _messages(self, request: web.Request) -> web.Response:
        credentials, body = await self._admit(request)
        messages = self._read(decode_batch, body)
        answer = web.Response()
        for data in messages[:BATCH_LIMIT]:  # one that is refused, as of a newer version, takes no other with it
            if not await self._jobs.room_for(credentials.node_id):
                return web.Response(status=503, text="too many messages of this node wait to be handled")
            try:
                if not self._jobs.deliver(credentials.node_id, data):
                    answer = web.Response(status=503, text="this node has too much to do")
            except (MessageError, *MALFORMED) as error:
                self._counters["refused_malformed"] += 1
                answer = web.Response(status=400, text=f"not job messages: {error}")
        return answer

    async def _missing(self, request: web.Request) -> web.Response:
        credentials, body = await self._admit(request)
        question = self._read(decode_missing_query, body)
        look = partial(self._store.missing, question.ids, frozenset(question.not_delta))
        missing = await self._in_turn(credentials.node_id, look)
        return web.Response(body=encode_ids(missing))

    async def _put_chunks(self, request: web.Request) -> web.Response:
        credentials, _ = await self._admit(request)
        own = await self._is_own(request, credentials)
        try:
            async with self._uploads.hold(credentials.node_id, UPLOAD_BYTES, request.transport) as held:
                receiver = await asyncio.to_thread(self._store.receive, max_stream_bytes([b""] * MAX_IDS), not own)
                with self._wire.taking(request.transport):
                    await received(request.content, receiver)
                held.waits = False  # but for this node's disk
                new = await finished(receiver)
        except CorruptChunk as error:
            self._refusals.count("chunks", credentials.node_id, f"of the chunks that it brought, {error}")
            raise web.HTTPConflict(text=str(error)) from error
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"nothing came for {IDLE_S:g} s") from error
        return web.Response(text=str(new))

    async def _is_own(self, request: web.Request, caller: Credentials) -> bool:
        """Tell whether chunks are for a job of this node's user: a node of that user says so, or the job's runner.

        Others could evade the quota for the data of other users' jobs by a false name.
        """
        try:
            user = bytes.fromhex(request.query.get("of", "")).decode()
            job = bytes.fromhex(request.query.get("job", ""))
        except ValueError as error:
            raise web.HTTPBadRequest(text="not a user's name and a job") from error
        if user != self._store.user:
            return False
        user_key = self._membership.credentials.user_key
        if is_user(caller, user_key):
            return True
        spec = await self._jobs.vouching.read_by_runner(job, caller.node_id) if len(job) == JOB_ID_BYTES else None
        return spec is not None and spec.user_key == user_key

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        credentials, body = await self._admit(request)
        order = self._read(decode_chunk_request, body)
        try:
            frames, size = await asyncio.to_thread(self._frames_of, order.ids, set(order.have))
        except MissingChunks as error:
            raise web.HTTPNotFound(text=str(error)) from error
        answer = await given(request, self._wire, frames, "checkpoint", credentials.node_id, size)
        now, bandwidth = time.monotonic(), self._jobs.replicator.bandwidth
        bandwidth.record(credentials.node_id, answer.size, answer.seconds, answer.held, now)
        return answer.response

    def _frames_of(self, ids: Sequence[bytes], have: set[bytes]) -> tuple[Iterator[memoryview], int]:
        store, asked = self._store, set(ids)
        needed = [identity for identity in store.with_bases(ids)[0] if identity in asked or identity not in have]
        return store.stream(needed), store.stream_size(needed)

    async def _put_manifest(self, request: web.Request) -> web.Response:
        credentials, body = await self._admit(request)
        identity, sender = manifest_id(body), credentials.node_id
        if identity.hex() != request.match_info["id"]:
            raise web.HTTPBadRequest(text="the manifest is not the one named")
        try:
            signer, manifest = await self._in_turn(sender, lambda: decode_manifest(body, self._store.unseal))
        except BadManifest as error:
            self._refusals.count("malformed", sender, f"it brought a manifest that is none: {error}")
            raise web.HTTPBadRequest(text=f"not a manifest: {error}") from error
        try:
            vouched = await self._jobs.vouching.judge(sender, identity, signer, manifest)
            fence: FenceUse = "raise" if vouched else "check"
            await self._in_turn(sender, lambda: self._store.accept_manifest(body, fence))
        except NotVouched as error:
            self._refusals.count("foreign", credentials.node_id, f"it brought a manifest that was refused: {error}")
            raise web.HTTPForbidden(text=str(error)) from error
        except FenceError as error:
            self._counters["refused_fenced"] += 1
            raise web.HTTPConflict(text=str(error)) from error
        except BadManifest as error:
            self._refusals.count("malformed", credentials.node_id, f"it brought a manifest that is none: {error}")
            raise web.HTTPConflict(text=str(error)) from error
        except StoreError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.Response()

    async def _in_turn(self, sender: NodeId, work: Callable[[], T], turns: Memory | None = None) -> T:
        """Work on a member's manifest or list of chunks, in a thread, in its turn, or in one of these `turns`."""
        async with (turns or self._manifests).hold(sender, 1) as held:
            held.waits = False
            working = asyncio.create_task(asyncio.to_thread(work), name="work on a manifest")
            try:
                return await asyncio.shield(working)
            finally:
                # A thread goes on if the member leaves, and so does its turn.
                await asyncio.gather(working, return_exceptions=True)

    async def _get_manifest(self, request: web.Request) -> web.Response:
        await self._admit(request)
        try:
            sealed = await asyncio.to_thread(self._store.sealed_manifest, id_in(request, "id", 32))
        except (NotFound, StoreError) as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=sealed)

    async def _job(self, request: web.Request) -> bytes:
        """Return the job in the path, after loading its record from the archive."""
        job = id_in(request, "job", 16)
        await self._jobs.archive.take_out((job,))
        return job

    async def _spec(self, request: web.Request) -> web.Response:
        await self._admit(request)
        sealed = await self._lookup.sealed_spec(await self._job(request))
        if sealed is None:
            raise web.HTTPNotFound(text="this node does not know the job")
        return web.Response(body=sealed)

    async def _witness_record(self, request: web.Request) -> web.Response:
        await self._admit(request)
        witness = self._jobs.participant.witnesses.get(await self._job(request))
        if witness is None:
            raise web.HTTPNotFound(text="this node has no record of the job")
        return web.Response(body=msgspec.msgpack.encode(witness.witness_record))

    async def _key(self, request: web.Request) -> web.Response:
        return await self._held(request, self._jobs.keyring)

    async def _secrets_key(self, request: web.Request) -> web.Response:
        self._take_turn(request)
        return await self._held(request, self._jobs.secrets_keyring)

    def _take_turn(self, request: web.Request) -> None:
        if not self._secrets_calls.allow(peer_of(request), time.monotonic()):
            raise web.HTTPServiceUnavailable(text="this node makes too many calls for keys of secrets")

    async def _held(self, request: web.Request, keyring: Keyring) -> web.Response:
        credentials, _ = await self._admit(request)
        held = await keyring.held_for(await self._job(request), credentials)
        if held is None:
            self._refusals.count("foreign", credentials.node_id, "it asked for the key of a job that it does not run")
            raise web.HTTPForbidden(text="a job's key is for its user and for who runs it")
        return web.Response(body=encode_held(held))

    async def _take_share(self, request: web.Request) -> web.Response:
        return await self._store_share(request, self._jobs.keyring)

    async def _take_secrets_share(self, request: web.Request) -> web.Response:
        self._take_turn(request)
        return await self._store_share(request, self._jobs.secrets_keyring)

    async def _store_share(self, request: web.Request, keyring: Keyring) -> web.Response:
        credentials, body = await self._admit(request)
        share = self._read(decode_share, body)
        if not await keyring.store_share(await self._job(request), credentials, share):
            self._refusals.count(
                "foreign", credentials.node_id, "it brought a share of the key of a job that is not its own"
            )
            raise web.HTTPForbidden(text="shares of a job's key come from its runner or its user, to its witnesses")
        return web.Response()

    async def _events(self, request: web.Request) -> web.Response:
        await self._admit(request)
        events = await self._journal.events(id_in(request, "job", 16), 0)
        return web.Response(body=msgspec.msgpack.encode([sealed for _, sealed in events]))

    async def _files(self, request: web.Request) -> web.StreamResponse:
        credentials, _ = await self._admit(request)
        job = id_in(request, "job", 16)
        attempt = self._jobs.attempts.get(job)  # as the runner, or as a member of its gang
        if attempt is None:
            raise web.HTTPNotFound(text="the job does not run here")
        if not is_user(credentials, attempt.spec.user_key):
            self._counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text=f"the files are {attempt.spec.user}'s")
        try:
            path = bytes.fromhex(request.query.get("path", "")).decode()
            pieces = self._job_files.running_files(job, path)
        except (MeshError, ValueError) as error:
            raise web.HTTPNotFound(text=str(error)) from error
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def _tunnel(self, request: web.Request) -> web.WebSocketResponse:
        credentials, _ = await self._admit(request)
        job = id_in(request, "job", 16)
        return await self._tunnels.to_here(request, job, request.match_info["way"], credentials)

    async def _control(self, request: web.Request) -> web.Response:
        credentials, _ = await self._admit(request)
        job = id_in(request, "job", 16)
        try:
            data = self._tunnels.own_control_file(job, request.match_info["name"], credentials)
        except MeshError as error:
            raise _refused(error) from error
        return web.Response(body=data)

    async def _put_log(self, request: web.Request) -> web.Response:
        """Store a piece of an attempt's log from a node that runs it; answer with the length of the copy."""
        credentials, body = await self._admit(request)
        job = id_in(request, "job", 16)
        attempt = _number(request.match_info["attempt"])
        witness = self._jobs.participant.witnesses.get(job)
        if witness is None or not runs(credentials.node_id, (known := witness.witness_record).holder, known.record):
            self._counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text="only nodes that run the job keep its logs with its witnesses")
        piece, user = self._read(decode_piece, body), witness.spec.user_key
        end = await asyncio.to_thread(self._jobs.logs.append_copy, job, attempt, credentials.node_id, piece, user)
        return web.Response(text=str(end))

    async def _keep_submission(self, request: web.Request) -> web.Response:
        credentials, body = await self._admit(request)
        try:
            await self._submissions.take(credentials.node_id, id_in(request, "job", 16), body)
        except SpecError as error:
            self._counters["refused_foreign"] += 1
            raise web.HTTPBadRequest(text=str(error)) from error
        except Refused as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        return web.Response()

    async def _release_submission(self, request: web.Request) -> web.Response:
        credentials, _ = await self._admit(request)
        await self._submissions.release(credentials.node_id, id_in(request, "job", 16))
        return web.Response()

    async def _usage(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return web.Response(body=await self._usage_handlers.told_to_peer(_number(request.query.get("since", "0"))))

    async def _log(self, request: web.Request) -> web.StreamResponse:
        credentials, _ = await self._admit(request)
        job = id_in(request, "job", 16)
        attempt, node = _number(request.match_info["attempt"]), id_in(request, "node", 32)
        offset = _number(request.query.get("offset", "0"))
        owner = await asyncio.to_thread(self._jobs.logs.owner, job)
        if owner is None:
            raise web.HTTPNotFound(text="the job has not run here, or long ago")
        if not is_user(credentials, owner):
            self._counters["refused_foreign"] += 1
            raise web.HTTPForbidden(text="the log is another user's")
        response = web.StreamResponse()
        await response.prepare(request)
        follow, since_ms = request.query.get("follow") == "1", _number(request.query.get("since", "0"))
        async for piece in self._logs.tail(job, attempt, node, offset, follow, since_ms):
            await response.write(framed(piece))
        await response.write_eof()
        return response

    # --- images

    async def _image_blob(self, request: web.Request) -> web.StreamResponse:
        """Give pieces of a manifest or blob."""
        credentials, body = await self._admit(request)
        try:
            digest, numbers = _hash(request), decode_pieces(body)
            pieces = await self._in_turn(credentials.node_id, lambda: self._library.given(digest, numbers), self._blobs)
            return (await given(request, self._wire, pieces, "image", credentials.node_id)).response
        except NotGiven as error:
            raise web.HTTPNotFound(text=str(error)) from error
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _fetch_image(self, request: web.Request) -> web.Response:
        """Start to fetch an image for another node; its user could cause the same by submitting a job."""
        credentials, _ = await self._admit(request)
        config, accepts = _hash(request), tuple(self._accepts)
        if not may_order_image(credentials, self._membership.credentials, accepts):
            raise web.HTTPForbidden(text=f"this node takes nothing of {credentials.user}")
        image = self._library.rules.shared.get(config)
        if image is None:
            known = self._library.rules.judge(self._library.name_of(config), config)
            raise web.HTTPForbidden(text=known.words or f"image {short(config)} is not on the mesh's list")
        try:
            await self._library.fetch(image, self._library.name_of(config))
        except EngineError as error:
            raise web.HTTPForbidden(text=str(error)) from error
        return self._how_far(config)

    async def _image_fetching(self, request: web.Request) -> web.Response:
        await self._admit(request)
        return self._how_far(_hash(request))

    def _how_far(self, config: bytes) -> web.Response:
        return web.Response(body=encode(how_far(self._library, config)))

    # --- packages of environments

    async def _which_packages(self, request: web.Request) -> web.Response:
        """Answer which packages this node gives, to a member who knows their hashes."""
        credentials, body = await self._admit(request)
        hashes = self._read(decode_question, body)
        lengths = await self._in_turn(credentials.node_id, lambda: self._packages.lengths(hashes))
        return web.Response(body=encode(lengths))

    async def _package(self, request: web.Request) -> web.StreamResponse:
        """Give pieces of a package, to a member who knows its hash."""
        credentials, body = await self._admit(request)
        digest, numbers = id_in(request, "hash", 32), self._read(decode_pieces, body)
        pieces = await self._in_turn(credentials.node_id, lambda: self._packages.given(digest, numbers), self._blobs)
        if pieces is None:
            raise web.HTTPNotFound(text="this node does not give that package, or does not have it")
        return (await given(request, self._wire, pieces, "package", credentials.node_id)).response


def _refused(error: MeshError) -> web.HTTPException:
    kind = web.HTTPForbidden if error.code == ExitCode.REFUSED else web.HTTPNotFound
    return kind(text=str(error))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise web.HTTPBadRequest(text="not a number")
    return int(text)


def _hash(request: web.Request) -> bytes:
    found = image_hash(f"sha256:{request.match_info['hash']}")
    if found is None:
        raise web.HTTPBadRequest(text="not an image's hash")
    return found
