"""The images on this node's container engine, Docker or Podman: list, pull from the node's registry, push into it.

Layers, verification and stores are the engine's own business. An image that this node had pulled has the name
`campus-mesh/fetched:ID`, which keeps it from `docker image prune`. Each call has its own thread, since pulls take minutes; exit
does not wait for them. The SDK (19 MiB, 0.1 s) is imported at the first call.
"""

import base64
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from mesh.execution.docker.socket import engine_process, why_silent
from mesh.execution.engine import EngineError
from mesh.images.oci import ManifestError, digest_hash, digest_text
from mesh.util.processes import Process
from mesh.util.slow_calls import apart

ASK_S = 30.0  # timeout, as of the engine's other calls
SILENT_S = 1800.0  # timeout while an engine packs or unpacks a large layer and sends nothing (own choice)
FETCHED, PUSHED = "campus-mesh/fetched", "campus-mesh/pushed"  # repositories in the registry, and names on the engine

T = TypeVar("T")


class StoredImage(msgspec.Struct, frozen=True):
    """An image on the engine, with its names. `id`: of its configuration, or of its manifest if the engine is Docker with
    containerd's image store. `fetched`: its only names are those that this node gave it."""

    id: bytes
    names: tuple[str, ...]
    size: int
    fetched: bool = False


class Registry(msgspec.Struct, frozen=True):
    """The address of this node's registry, its password, and what lets a process reach it in any network (OSError)."""

    address: str
    password: str
    let_in: Callable[[Process], Awaitable[None]]


class ImageEngine:
    """The image store of the engine. EngineError if it does not answer, or fails."""

    def __init__(self, registry: Callable[[], Registry]) -> None:
        self._registry = registry
        self._known: Any = None

    @property
    def _api(self) -> Any:
        import docker

        if self._known is None:
            self._known = docker.from_env(timeout=ASK_S).api
        return self._known

    def close(self) -> None:
        if self._known is not None:
            self._known.close()

    async def images(self) -> list[StoredImage]:
        return await self._call(lambda: [one for row in self._api.images() if (one := _stored(row)) is not None])

    async def find(self, name: str) -> StoredImage | None:
        """Find an image by a name on the engine or by `sha256:...`."""
        return await self._call(lambda: _stored(self._api.inspect_image(name)), absent=(None,))

    async def remove(self, image: StoredImage) -> bool:
        """Remove a fetched image; return whether it is gone. An image that a container uses stays."""
        return await self._call(lambda: self._remove(image), absent=(True,))

    async def pull(self, manifest: bytes, tag: str) -> None:
        """Have the engine pull an image from this node's registry, and name it."""
        await self._order(lambda answers: self._pull(manifest, tag, answers))

    async def push(self, image: StoredImage, tag: str) -> None:
        """Have the engine push an image into this node's registry as `PUSHED:tag`."""
        await self._order(lambda answers: self._push(image, tag, answers))

    # --- in threads

    def _remove(self, image: StoredImage) -> bool:
        import docker.errors

        known = self._api.inspect_image(digest_text(image.id))
        if self._api.containers(all=True, filters={"ancestor": image.id.hex()}):
            return False  # containerd's image store would remove it from below a container
        for name in (*(known.get("RepoDigests") or ()), *(known.get("RepoTags") or ())):
            if _is_ours(str(name)):
                with suppress(docker.errors.ImageNotFound):  # it went with another name
                    self._api.remove_image(name)  # without force: the engine keeps images in use
        return True

    def _pull(self, manifest: bytes, tag: str, answers: list[Any]) -> None:
        name, digest = f"{self._registry().address}/{FETCHED}", digest_text(manifest)
        if any(part.get("Name") == "Podman Engine" for part in self._api.version().get("Components") or ()):
            # Its Docker API takes only registries with TLS.
            where = f"{self._api.base_url}/v4.0.0/libpod/images/pull"
            self._post(where, {"reference": f"{name}@{digest}", "tlsVerify": "false"}, answers)
        else:
            self._post(self._api._url("/images/create"), {"fromImage": name, "tag": digest}, answers)
        self._api.tag(f"{name}@{digest}", FETCHED, tag)

    def _push(self, image: StoredImage, tag: str, answers: list[Any]) -> None:
        name = f"{self._registry().address}/{PUSHED}"
        self._api.tag(digest_text(image.id), name, tag)
        try:
            parameters = {"tag": tag, "tlsVerify": "false"}  # the latter for Podman
            self._post(self._api._url("/images/{0}/push", name), parameters, answers)
        finally:
            self._api.remove_image(f"{name}:{tag}", noprune=True)

    def _post(self, where: str, parameters: dict[str, str], answers: list[Any]) -> None:
        """Carry out a pull or a push. EngineError with the engine's reason if it fails."""
        registry = self._registry()
        words = {"username": "mesh", "password": registry.password, "serveraddress": registry.address}
        header = {"X-Registry-Auth": base64.urlsafe_b64encode(msgspec.json.encode(words)).decode()}
        response = self._api.post(where, params=parameters, headers=header, stream=True, timeout=SILENT_S)
        answers.append(response)
        self._api._raise_for_status(response)
        for answer in self._api._stream_helper(response, decode=True):
            problem = answer.get("error") if isinstance(answer, dict) else None
            if problem:
                raise EngineError(f"the engine did not move the image: {problem}")

    async def _order(self, work: Callable[[list[Any]], None]) -> None:
        """Carry out a pull or push; if the caller is cancelled, close the engine's answer, which ends the work."""
        answers: list[Any] = []
        try:
            engine = await apart(engine_process, "image")
            if engine is not None:
                await self._registry().let_in(engine)
        except OSError as error:
            raise EngineError(f"the container engine does not reach this node's registry: {error}") from error
        try:
            await self._call(lambda: work(answers))
        finally:
            for response in answers:
                response.close()

    @staticmethod
    async def _call(work: Callable[[], T], *, absent: tuple[T, ...] = ()) -> T:
        """Return what the engine answers; `absent`, if given, if it has no such image or the name is not valid."""
        import docker.errors
        import requests

        try:
            return await apart(work, "image")
        except (docker.errors.DockerException, requests.RequestException) as error:
            status = error.status_code if isinstance(error, docker.errors.APIError) else None
            if absent and (status in {400, 404} or isinstance(error, docker.errors.NullResource)):
                return absent[0]
            raise EngineError(f"the container engine: {why_silent(error)}") from error


def _stored(row: dict[str, Any]) -> StoredImage | None:
    """Return an image of the engine's answer; None if it has no SHA-256 id."""
    all_names = [str(name) for name in row.get("RepoTags") or () if "<none>" not in str(name)]
    names = sorted({_familiar(name) for name in all_names if not _is_ours(name)})
    ours = any(_is_ours(str(name)) for name in (*all_names, *(row.get("RepoDigests") or ())))
    try:
        digest = digest_hash(str(row["Id"]))
    except ManifestError:
        return None
    return StoredImage(digest, tuple(names), max(0, int(row.get("Size") or 0)), ours and not names)


def _familiar(name: str) -> str:
    """Return a name as Docker writes it: Podman adds a registry."""
    for host in ("docker.io/library/", "docker.io/", "localhost/"):
        name = name.removeprefix(host)
    return name


def _is_ours(name: str) -> bool:
    host, _, path = _familiar(name).partition("/")
    return _familiar(name).startswith(f"{FETCHED}:") or (
        host.startswith("127.0.0.1:") and path.startswith((f"{FETCHED}@", f"{FETCHED}:", f"{PUSHED}:", f"{PUSHED}@"))
    )
