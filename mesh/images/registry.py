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
from hashlib import sha256
from hmac import compare_digest
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from mesh.images.blobs import BlobStore, NoRoom, Upload
from mesh.images.engine import Registry
from mesh.images.oci import MAX_MANIFEST_BYTES, Manifest, ManifestError, decode_oci, digest_hash, digest_text
from mesh.rpc.streams import read_within
from mesh.util.errors import MeshError

HOST = "127.0.0.1"
UPLOADS = 64  # open at a time (own choice)
UPLOAD_IDLE_S = 3600  # after which an upload counts as abandoned (own choice)
WRITE_BYTES = 1 << 20  # in one call of a thread
MAX_PAGE = 1000  # tags in one answer (own choice)
SECRET_BYTES = 32
TOKEN_S = 3600  # for which clients keep a token (own choice)
NOBODY = "anonymous"  # the token of clients without a password

NAME = "{name:[a-z0-9._/-]{1,255}}"
_NAME = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")  # distribution spec 1.1
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")  # distribution spec 1.1
_RANGE = re.compile(r"(\d{1,15})-(\d{1,15})")


class RegistryServer:
    """The registry of a node.

    `may_pull` tells whether anybody on this machine may have a manifest or blob; `listed` returns the manifest of an alias;
    `arrival` waits for a blob that other nodes have, and returns whether it is here.
    """

    def __init__(
        self,
        store: BlobStore,
        port_file: Path,
        may_pull: Callable[[bytes], bool],
        listed: Callable[[str], bytes | None],
        arrival: Callable[[bytes], Awaitable[bool]],
    ) -> None:
        self._store, self._port_file = store, port_file
        self._may_pull, self._listed, self._arrival = may_pull, listed, arrival
        self._password = os.urandom(SECRET_BYTES).hex()
        self._uploads: dict[str, Upload] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def open(self, wanted: int) -> None:
        """Serve on this port; 0: that of the last run, if it is free, since engines keep it in the names of images."""
        app = web.Application(middlewares=[self._guarded])
        app.add_routes(
            [
                web.get("/v2/", self._base),
                web.get("/token", self._token),
                web.get(f"/v2/{NAME}/tags/list", self._tags),
                web.post(f"/v2/{NAME}/blobs/uploads/", self._begin),
                web.get(f"/v2/{NAME}/blobs/uploads/{{id}}", self._progress),
                web.patch(f"/v2/{NAME}/blobs/uploads/{{id}}", self._append),
                web.put(f"/v2/{NAME}/blobs/uploads/{{id}}", self._complete),
                web.delete(f"/v2/{NAME}/blobs/uploads/{{id}}", self._abandon),
                web.get(f"/v2/{NAME}/blobs/{{digest}}", self._blob),
                web.get(f"/v2/{NAME}/manifests/{{reference}}", self._get_manifest),
                web.put(f"/v2/{NAME}/manifests/{{reference}}", self._put_manifest),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        for port in [wanted] if wanted else [self._last_port(), 0]:
            with suppress(OSError):
                await web.TCPSite(self._runner, HOST, port).start()
                self.port = int(self._runner.addresses[0][1])
                self._port_file.write_text(str(self.port))
                return
        await self._runner.cleanup()
        raise MeshError(f"port {wanted} of {HOST} is taken: choose another as registry_port in config.toml")

    def _last_port(self) -> int:
        with suppress(OSError, ValueError):
            return max(0, min(65535, int(self._port_file.read_text())))
        return 0

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for upload in self._uploads.values():
            upload.close()

    @property
    def access(self) -> Registry:
        return Registry(f"{HOST}:{self.port}", self._password)

    # --- who may

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.headers.get("Host") not in {f"{HOST}:{self.port}", f"localhost:{self.port}"} or (
                {"Origin", "Sec-Fetch-Site"} & request.headers.keys()
            ):
                _refuse(HTTPStatus.FORBIDDEN, "DENIED", "this registry is for programs on this machine")
            name = request.match_info.get("name", "x")
            if not _NAME.fullmatch(name):
                _refuse(HTTPStatus.BAD_REQUEST, "NAME_INVALID", "not a repository's name")
            if request.method not in {"GET", "HEAD"} and not self._is_owner(request):
                self._challenge(request)
            return await handler(request)
        except ManifestError as error:
            return _problem(HTTPStatus.BAD_REQUEST, "DIGEST_INVALID", str(error))
        except NoRoom as error:
            return _problem(HTTPStatus.INSUFFICIENT_STORAGE, "DENIED", str(error))
        except web.HTTPException as error:
            if error.content_type == "application/json":
                raise
            return _problem(error.status, "UNSUPPORTED", error.reason)

    def _is_owner(self, request: web.Request) -> bool:
        """Return whether the request carries the password."""
        kind, _, words = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "basic":
            with suppress(ValueError):
                words = base64.b64decode(words, validate=True).decode(errors="replace").partition(":")[2]
        return compare_digest(words.encode(errors="replace"), self._password.encode())

    def _challenge(self, request: web.Request) -> NoReturn:
        challenge = f'Bearer realm="http://{request.headers["Host"]}/token",service="campus-mesh"'
        _refuse(
            HTTPStatus.UNAUTHORIZED,
            "UNAUTHORIZED",
            "pushing needs the password of `mesh image registry`",
            {"WWW-Authenticate": challenge},
        )

    async def _base(self, request: web.Request) -> web.Response:
        if not self._is_owner(request) and request.headers.get("Authorization") != f"Bearer {NOBODY}":
            self._challenge(request)
        return web.json_response({}, headers={"Docker-Distribution-API-Version": "registry/2.0"})

    async def _token(self, request: web.Request) -> web.Response:
        """Exchange the password, or none, for a token, as clients of registries expect it."""
        owner = self._is_owner(request)
        if not owner and "Authorization" in request.headers:
            _refuse(HTTPStatus.UNAUTHORIZED, "UNAUTHORIZED", "not the password of `mesh image registry`")
        token = self._password if owner else NOBODY
        return web.json_response({"token": token, "access_token": token, "expires_in": TOKEN_S})

    # --- pulling

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        digest = digest_hash(request.match_info["digest"])
        path = await self._file(request, digest)
        if path is None:
            _refuse(HTTPStatus.NOT_FOUND, "BLOB_UNKNOWN", "this node has no such blob")
        return web.FileResponse(
            path, headers={"Content-Type": "application/octet-stream", "Docker-Content-Digest": digest_text(digest)}
        )

    async def _get_manifest(self, request: web.Request) -> web.Response:
        digest = self._meant(request)
        path = await self._file(request, digest) if digest is not None else None
        if digest is None or path is None:
            _refuse(HTTPStatus.NOT_FOUND, "MANIFEST_UNKNOWN", "this node has no such manifest")
        manifest = await asyncio.to_thread(self._store.manifest, digest)
        if manifest is None:
            _refuse(HTTPStatus.NOT_FOUND, "MANIFEST_UNKNOWN", "this node has no such manifest")
        body = await asyncio.to_thread(path.read_bytes)
        headers = {"Content-Type": manifest.media_type, "Docker-Content-Digest": digest_text(digest)}
        return web.Response(body=body, headers=headers)

    async def _file(self, request: web.Request, digest: bytes) -> Path | None:
        """Return the verified file of a blob that this client may have."""
        if not self._is_owner(request) and not self._may_pull(digest):
            return None
        await self._arrival(digest)
        return await asyncio.to_thread(self._store.use, digest)

    def _meant(self, request: web.Request) -> bytes | None:
        """Return the digest that a reference means: itself, a listed alias, or a name that was pushed."""
        reference = request.match_info["reference"]
        if ":" in reference:
            return digest_hash(reference)
        name = f"{request.match_info['name']}:{reference}"
        return self._store.tags.get(name) or self._listed(name) or self._listed(name.removesuffix(":latest"))

    async def _tags(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        tags = sorted(one.partition(":")[2] for one in self._store.tags if one.partition(":")[0] == name)
        if not tags or not self._is_owner(request):
            _refuse(HTTPStatus.NOT_FOUND, "NAME_UNKNOWN", "nothing was pushed under this name")
        count = request.query.get("n", str(MAX_PAGE))
        last = request.query.get("last", "")
        if not count.isdecimal() or len(count) > 9:
            _refuse(HTTPStatus.BAD_REQUEST, "UNSUPPORTED", "n is a number")
        after = [tag for tag in tags if tag > last]
        page = after[: min(int(count), MAX_PAGE)]
        headers = {}
        if page and len(page) < len(after):
            headers["Link"] = f'</v2/{name}/tags/list?n={len(page)}&last={page[-1]}>; rel="next"'
        return web.json_response({"name": name, "tags": page}, headers=headers)

    # --- pushing

    async def _begin(self, request: web.Request) -> web.Response:
        mount = request.query.get("mount")
        if mount is not None and await asyncio.to_thread(self._store.use, digest_hash(mount)) is not None:
            return self._created(request, "blobs", digest_hash(mount))
        for identity, upload in list(self._uploads.items()):
            if time.monotonic() - upload.used > UPLOAD_IDLE_S and not upload.busy:
                self._uploads.pop(identity).close()
        if len(self._uploads) >= UPLOADS:
            _refuse(HTTPStatus.TOO_MANY_REQUESTS, "TOOMANYREQUESTS", f"{UPLOADS} uploads are open")
        upload = await asyncio.to_thread(self._store.upload)
        identity = upload.path.stem
        self._uploads[identity] = upload
        if "digest" in request.query:
            return await self._finish(request, identity, upload)
        return self._accepted(request, identity, upload, HTTPStatus.ACCEPTED)

    async def _append(self, request: web.Request) -> web.Response:
        identity, upload = self._upload(request)
        await self._receive(request, identity, upload)
        return self._accepted(request, identity, upload, HTTPStatus.ACCEPTED)

    async def _complete(self, request: web.Request) -> web.Response:
        identity, upload = self._upload(request)
        return await self._finish(request, identity, upload)

    async def _finish(self, request: web.Request, identity: str, upload: Upload) -> web.Response:
        digest = digest_hash(request.query.get("digest", ""))
        await self._receive(request, identity, upload)
        self._uploads.pop(identity, None)
        if not await asyncio.to_thread(upload.finish, digest):
            _refuse(HTTPStatus.BAD_REQUEST, "DIGEST_INVALID", "the content does not have this digest")
        return self._created(request, "blobs", digest)

    async def _receive(self, request: web.Request, identity: str, upload: Upload) -> None:
        """Append the body of a request. It must begin where the upload ends."""
        if upload.busy:
            _refuse(HTTPStatus.CONFLICT, "BLOB_UPLOAD_INVALID", "another request writes this upload")
        given = request.headers.get("Content-Range")
        if given is not None:
            found = _RANGE.fullmatch(given)
            if found is None or int(found[1]) != upload.size or int(found[2]) < int(found[1]):
                where = self._accepted(request, identity, upload, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                _refuse(where.status, "BLOB_UPLOAD_INVALID", "not the next part of this upload", dict(where.headers))
        upload.busy = True
        try:
            data = bytearray()
            async for piece in request.content.iter_any():
                data += piece
                if len(data) >= WRITE_BYTES:
                    await asyncio.to_thread(upload.write, bytes(data))
                    data.clear()
            await asyncio.to_thread(upload.write, bytes(data))
        finally:
            upload.busy = False

    async def _progress(self, request: web.Request) -> web.Response:
        if not self._is_owner(request):
            self._challenge(request)
        return self._accepted(request, *self._upload(request), HTTPStatus.NO_CONTENT)

    async def _abandon(self, request: web.Request) -> web.Response:
        identity, upload = self._upload(request)
        del self._uploads[identity]
        await asyncio.to_thread(upload.close)
        return web.Response(status=HTTPStatus.NO_CONTENT)

    def _upload(self, request: web.Request) -> tuple[str, Upload]:
        identity = request.match_info["id"]
        if identity not in self._uploads:
            _refuse(HTTPStatus.NOT_FOUND, "BLOB_UPLOAD_UNKNOWN", "there is no such upload")
        return identity, self._uploads[identity]

    async def _put_manifest(self, request: web.Request) -> web.Response:
        reference, name = request.match_info["reference"], request.match_info["name"]
        body = await read_within(request.content, MAX_MANIFEST_BYTES)
        if body is None:
            _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "SIZE_INVALID", f"over {MAX_MANIFEST_BYTES} bytes")
        digest = sha256(body).digest()
        if ":" in reference and digest_hash(reference) != digest:
            _refuse(HTTPStatus.BAD_REQUEST, "DIGEST_INVALID", "the manifest does not have this digest")
        if ":" not in reference and not _TAG.fullmatch(reference):
            _refuse(HTTPStatus.BAD_REQUEST, "MANIFEST_INVALID", "not a tag")
        try:
            manifest = decode_oci(body)
        except ManifestError as error:
            _refuse(HTTPStatus.BAD_REQUEST, "MANIFEST_INVALID", str(error))
        if not self._complete_here(manifest):
            _refuse(HTTPStatus.BAD_REQUEST, "MANIFEST_BLOB_UNKNOWN", "push what the manifest names first")
        await asyncio.to_thread(self._store.keep, body)
        if ":" not in reference and not await asyncio.to_thread(self._store.tag, f"{name}:{reference}", digest):
            _refuse(HTTPStatus.TOO_MANY_REQUESTS, "TOOMANYREQUESTS", "too many names were pushed")
        return self._created(request, "manifests", digest)

    def _complete_here(self, manifest: Manifest) -> bool:
        """Return whether the blobs of a manifest are here, or any manifest of an index: engines push one machine's."""
        if manifest.manifests:
            return any(self._store.has(one.hash) for one in manifest.manifests)
        return all(self._store.has(one.hash) for one in manifest.blobs)

    def _accepted(self, request: web.Request, identity: str, upload: Upload, status: HTTPStatus) -> web.Response:
        place = f"/v2/{request.match_info['name']}/blobs/uploads/{identity}"
        headers = {"Location": place, "Range": f"0-{max(0, upload.size - 1)}", "Docker-Upload-UUID": identity}
        return web.Response(status=status, headers=headers)

    def _created(self, request: web.Request, kind: str, digest: bytes) -> web.Response:
        place = f"/v2/{request.match_info['name']}/{kind}/{digest_text(digest)}"
        return web.Response(
            status=HTTPStatus.CREATED, headers={"Location": place, "Docker-Content-Digest": digest_text(digest)}
        )


def _problem(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"errors": [{"code": code, "message": text}]}, status=status, headers=headers)


def _refuse(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> NoReturn:
    raise _Refusal(status, msgspec.json.encode({"errors": [{"code": code, "message": text}]}).decode(), headers)


class _Refusal(web.HTTPException):
    """An answer with an error of the protocol."""

    def __init__(self, status: int, text: str, headers: dict[str, str] | None) -> None:
        self.status_code = status
        super().__init__(headers=headers, text=text, content_type="application/json")
