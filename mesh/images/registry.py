"""The node's registry: the OCI distribution protocol 1.1, pull and push, on loopback, for the engines and tools of this machine.

Without the password, a client can pull the images that may run on this node, and nothing else: other users and guests of the
machine can reach the port too. Pushes need the password, which is new at each start and is given out on the daemon's socket. Web
pages are refused by the Host, Origin and Sec-Fetch-Site of their requests. A blob is served only whole and verified.
"""

import asyncio
import base64
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import NoReturn

from aiohttp import web
from aiohttp.typedefs import Handler

from mesh.images.blobs import BlobStore, FetchFailed, NoRoom, Part
from mesh.images.engine import Registry
from mesh.images.oci import MAX_MANIFEST_BYTES, ManifestError, decode_oci, digest_hash, digest_text
from mesh.rpc.departed import departed
from mesh.rpc.loopback import HOST, LoopbackServer, heard
from mesh.rpc.streams import read_within
from mesh.util.errors import MeshError
from mesh.util.other_network import has_own_network, listen_in
from mesh.util.processes import Process
from mesh.util.slow_calls import apart

CONNECTIONS = 64  # open at a time (own choice); an engine opens about six
UPLOADS = 64  # open at a time (own choice)
UPLOAD_IDLE_S = 3600  # after which an upload counts as abandoned (own choice)
WRITE_BYTES = 1 << 20  # in one call of a thread
MAX_PAGE = 1000  # tags in one answer (own choice)
NOBODY = "anonymous"  # the token of clients without a password
TOKEN_S = 3600  # for which clients keep a token (own choice)

_NAME = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")  # distribution spec 1.1
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")  # distribution spec 1.1
_RANGE = re.compile(r"(\d{1,15})-(\d{1,15})")


class _Upload:
    """A blob that a client pushes."""

    def __init__(self, part: Part) -> None:
        self.part, self.size, self.used, self.busy = part, 0, time.monotonic(), False


class RegistryServer:
    """The registry of a node.

    `may_pull` tells whether anybody on this machine may have a manifest or blob; `listed` returns the manifest of an alias;
    `bring` fetches a blob that is not here, for a client that may push below the name that it asked for (FetchFailed).
    """

    def __init__(
        self,
        store: BlobStore,
        port_file: Path,
        may_pull: Callable[[bytes], bool],
        listed: Callable[[str], bytes | None],
        bring: Callable[[bytes, str], Awaitable[None]],
    ) -> None:
        self._store, self._port_file = store, port_file
        self._may_pull, self._listed, self._bring = may_pull, listed, bring
        self._password = os.urandom(32).hex()
        self._uploads: dict[str, _Upload] = {}
        self._server = LoopbackServer(CONNECTIONS)
        self._beside: Process | None = None
        self._entering = asyncio.Lock()
        self.port = 0

    async def open(self, wanted: int) -> None:
        """Serve on this port; 0: that of the last run, if it is free, since engines keep it in the names of images."""
        app, name = web.Application(middlewares=[departed, self._guarded]), "/v2/{name:[a-z0-9._/-]{1,255}}"
        app.add_routes(
            [
                web.get("/v2/", self._base),
                web.get("/token", self._token),
                web.get(f"{name}/tags/list", self._tags),
                web.post(f"{name}/blobs/uploads/", self._upload),
                web.route("*", f"{name}/blobs/uploads/{{id}}", self._upload),
                web.get(f"{name}/blobs/{{digest}}", self._blob),
                web.get(f"{name}/manifests/{{reference}}", self._blob),
                web.put(f"{name}/manifests/{{reference}}", self._put_manifest),
                web.delete(f"{name}/manifests/{{reference}}", self._forget),
            ]
        )
        last = 0
        with suppress(OSError, ValueError):
            last = max(0, min(65535, int(self._port_file.read_text())))
        if not await self._server.open(app, [wanted] if wanted else [last, 0]):
            raise MeshError(f"port {wanted} of {HOST} is taken: choose another as registry_port in config.toml")
        self.port = self._server.port
        self._port_file.write_text(str(self.port))

    async def close(self) -> None:
        await self._server.close()
        for upload in self._uploads.values():
            upload.part.close()

    async def let_in(self, process: Process) -> None:
        """Listen in the network of a process too, if it has one of its own: a rootless Docker's. OSError if that cannot be."""
        async with self._entering:
            if self._beside != process and has_own_network(process.pid):
                await self._server.listen_also(await apart(partial(listen_in, process, self.port), "registry"))
                self._beside = process

    @property
    def access(self) -> Registry:
        return Registry(f"{HOST}:{self.port}", self._password, self.let_in)

    # --- who may

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.headers.get("Host") not in {f"{HOST}:{self.port}", f"localhost:{self.port}"} or (
                {"Origin", "Sec-Fetch-Site"} & request.headers.keys()
            ):
                raise _Refusal(403, "DENIED", "this registry is for programs on this machine")
            if not _NAME.fullmatch(request.match_info.get("name", "x")):
                raise _Refusal(400, "NAME_INVALID", "not a repository's name")
            if (request.method not in {"GET", "HEAD"} or "id" in request.match_info) and not self._is_owner(request):
                self._challenge(request)
            return await handler(request)
        except _Refusal as error:
            problem = error
        except ManifestError as error:
            problem = _Refusal(400, "DIGEST_INVALID", str(error))
        except NoRoom as error:
            problem = _Refusal(507, "DENIED", str(error))
        except web.HTTPException as error:
            problem = _Refusal(error.status, "UNSUPPORTED", error.reason)
        answer = {"errors": [{"code": problem.code, "message": problem.text}]}
        return web.json_response(answer, status=problem.status, headers=problem.headers)

    def _is_owner(self, request: web.Request) -> bool:
        """Return whether the request carries the password."""
        kind, _, words = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "basic":
            with suppress(ValueError):
                words = base64.b64decode(words, validate=True).decode(errors="replace").partition(":")[2]
        return compare_digest(words.encode(errors="replace"), self._password.encode())

    def _challenge(self, request: web.Request) -> NoReturn:
        challenge = f'Bearer realm="http://{request.headers["Host"]}/token",service="campus-mesh"'
        words = "pushing needs the password of `mesh image registry`"
        raise _Refusal(401, "UNAUTHORIZED", words, {"WWW-Authenticate": challenge})

    async def _base(self, request: web.Request) -> web.Response:
        if not self._is_owner(request) and request.headers.get("Authorization") != f"Bearer {NOBODY}":
            self._challenge(request)
        return web.json_response({}, headers={"Docker-Distribution-API-Version": "registry/2.0"})

    async def _token(self, request: web.Request) -> web.Response:
        """Exchange the password, or none, for a token, as clients of registries expect it."""
        owner = self._is_owner(request)
        if not owner and "Authorization" in request.headers:
            raise _Refusal(401, "UNAUTHORIZED", "not the password of `mesh image registry`")
        token = self._password if owner else NOBODY
        return web.json_response({"token": token, "access_token": token, "expires_in": TOKEN_S})

    # --- pulling

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        """Serve a blob, or a manifest by its digest, an alias of the list, or a name that was pushed."""
        name, reference = request.match_info["name"], request.match_info.get("reference")
        kind, owner = "BLOB" if reference is None else "MANIFEST", self._is_owner(request)
        digest = self._meant(name, reference or request.match_info["digest"])
        if digest is None or not (owner or self._may_pull(digest)):
            raise _Refusal(404, f"{kind}_UNKNOWN", "this node has nothing of that digest or name to give")
        try:
            await self._bring(digest, name if owner else "")
        except FetchFailed as error:
            raise _Refusal(404, f"{kind}_UNKNOWN", f"it could not be fetched: {error}") from error
        path = await asyncio.to_thread(self._store.use, digest)
        headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest_text(digest)}
        if reference is not None and path is not None:
            manifest = await asyncio.to_thread(self._store.manifest, digest)
            headers["Content-Type"] = manifest.media_type if manifest is not None else ""
        if path is None:
            raise _Refusal(404, f"{kind}_UNKNOWN", "it was damaged on this node's disk, and is removed")
        return web.FileResponse(path, headers=headers)

    def _meant(self, name: str, reference: str) -> bytes | None:
        if ":" in reference:
            return digest_hash(reference)
        tag = f"{name}:{reference}"
        return self._store.tags.get(tag) or self._listed(tag) or self._listed(tag.removesuffix(":latest"))

    async def _tags(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        tags = sorted(one.partition(":")[2] for one in self._store.tags if one.partition(":")[0] == name)
        if not tags or not self._is_owner(request):
            raise _Refusal(404, "NAME_UNKNOWN", "nothing was pushed under this name")
        count, last = request.query.get("n", str(MAX_PAGE)), request.query.get("last", "")
        if not re.fullmatch("[0-9]{1,9}", count):
            raise _Refusal(400, "UNSUPPORTED", "n is a number")
        after = [tag for tag in tags if tag > last]
        page = after[: min(int(count), MAX_PAGE)]
        more = bool(page) and len(page) < len(after)
        link = f'</v2/{name}/tags/list?n={len(page)}&last={page[-1]}>; rel="next"' if more else ""
        return web.json_response({"name": name, "tags": page}, headers={"Link": link} if more else {})

    # --- pushing

    async def _upload(self, request: web.Request) -> web.Response:
        """Begin an upload, or mount a blob; append to an upload; tell its state, complete or end it."""
        method, query = request.method, request.query
        if method == "POST":
            if "mount" in query and await asyncio.to_thread(self._store.use, digest_hash(query["mount"])) is not None:
                return _created(request, "blobs", digest_hash(query["mount"]))
            identity = await self._begin()
        else:
            identity = request.match_info["id"]
        upload = self._uploads.get(identity)
        if upload is None:
            raise _Refusal(404, "BLOB_UPLOAD_UNKNOWN", "there is no such upload")
        if method == "DELETE":
            await asyncio.to_thread(self._uploads.pop(identity).part.close)
            return web.Response(status=204)
        if method not in {"POST", "PATCH", "PUT", "GET"}:
            raise web.HTTPMethodNotAllowed(method, ["GET", "PATCH", "PUT", "DELETE"])
        place = f"/v2/{request.match_info['name']}/blobs/uploads/{identity}"
        digest = digest_hash(query.get("digest", "")) if method == "PUT" or "digest" in query else None
        if method != "GET":
            await self._receive(request, upload, place)
        if digest is None:
            headers = {"Location": place, "Range": f"0-{max(0, upload.size - 1)}", "Docker-Upload-UUID": identity}
            return web.Response(status=204 if method == "GET" else 202, headers=headers)
        del self._uploads[identity]
        try:
            if not await asyncio.to_thread(self._store.finish, upload.part, digest, True):
                raise _Refusal(400, "DIGEST_INVALID", "the content does not have this digest")
        finally:
            await asyncio.to_thread(upload.part.close)
        return _created(request, "blobs", digest)

    async def _begin(self) -> str:
        for identity, upload in list(self._uploads.items()):
            if time.monotonic() - upload.used > UPLOAD_IDLE_S and not upload.busy:
                self._uploads.pop(identity).part.close()
        if len(self._uploads) >= UPLOADS:
            raise _Refusal(429, "TOOMANYREQUESTS", f"{UPLOADS} uploads are open")
        identity = os.urandom(16).hex()
        self._uploads[identity] = _Upload(self._store.part())
        return identity

    async def _receive(self, request: web.Request, upload: _Upload, place: str) -> None:
        """Append the body of a request. It must begin where the upload ends."""
        if upload.busy:
            raise _Refusal(409, "BLOB_UPLOAD_INVALID", "another request writes this upload")
        if (given := request.headers.get("Content-Range")) is not None:
            found = _RANGE.fullmatch(given)
            if found is None or int(found[1]) != upload.size or int(found[2]) < int(found[1]):
                headers = {"Location": place, "Range": f"0-{max(0, upload.size - 1)}"}
                raise _Refusal(416, "BLOB_UPLOAD_INVALID", "not the next part of this upload", headers)
        upload.busy = True
        try:
            data = bytearray()
            while piece := await heard(request.content.readany()):
                data += piece
                if len(data) >= WRITE_BYTES:
                    await self._write(upload, data)
            await self._write(upload, data)
        finally:
            upload.busy = False

    async def _write(self, upload: _Upload, data: bytearray) -> None:
        await asyncio.to_thread(upload.part.write, bytes(data), upload.size)
        upload.size, upload.used = upload.size + len(data), time.monotonic()
        data.clear()

    async def _put_manifest(self, request: web.Request) -> web.Response:
        reference, name = request.match_info["reference"], request.match_info["name"]
        body = await heard(read_within(request.content, MAX_MANIFEST_BYTES))
        if body is None:
            raise _Refusal(413, "SIZE_INVALID", f"over {MAX_MANIFEST_BYTES} bytes")
        digest = sha256(body).digest()
        if ":" in reference and digest_hash(reference) != digest:
            raise _Refusal(400, "DIGEST_INVALID", "the manifest does not have this digest")
        if ":" not in reference and not _TAG.fullmatch(reference):
            raise _Refusal(400, "MANIFEST_INVALID", "not a tag")
        try:
            manifest = decode_oci(body)
        except ManifestError as error:
            raise _Refusal(400, "MANIFEST_INVALID", str(error)) from error
        here = [self._store.has(one.hash) for one in (*manifest.manifests, *manifest.blobs)]
        if not (any(here) if manifest.manifests else all(here)):  # engines push one machine's manifest of an index
            raise _Refusal(400, "MANIFEST_BLOB_UNKNOWN", "push what the manifest names first")
        await asyncio.to_thread(self._store.keep, body)
        if ":" not in reference and not await asyncio.to_thread(self._store.tag, f"{name}:{reference}", digest):
            raise _Refusal(429, "TOOMANYREQUESTS", "too many names were pushed")
        return _created(request, "manifests", digest)

    async def _forget(self, request: web.Request) -> web.Response:
        """Forget a name that was pushed, or a manifest with its names in this repository. Its blobs go when space is short."""
        name, reference = request.match_info["name"], request.match_info["reference"]
        digest = digest_hash(reference) if ":" in reference else None
        if digest is not None and self._may_pull(digest):
            raise _Refusal(405, "UNSUPPORTED", "this image may run here: `mesh image deny` refuses it")
        tags = {tag: known for tag, known in self._store.tags.items() if tag.partition(":")[0] == name}
        gone = [tag for tag, known in tags.items() if tag == f"{name}:{reference}" or known == digest]
        if not gone:
            raise _Refusal(404, "MANIFEST_UNKNOWN", "nothing was pushed under this name")
        for tag in gone:
            await asyncio.to_thread(self._store.tag, tag, None)
        if digest is not None:
            await asyncio.to_thread(self._store.drop, [digest])
        return web.Response(status=202)


def _created(request: web.Request, kind: str, digest: bytes) -> web.Response:
    headers = {
        "Location": f"/v2/{request.match_info['name']}/{kind}/{digest_text(digest)}",
        "Docker-Content-Digest": digest_text(digest),
    }
    return web.Response(status=201, headers=headers)


class _Refusal(Exception):
    """An error of the protocol."""

    def __init__(self, status: int, code: str, text: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.code, self.text, self.headers = status, code, text, headers
