"""The images on this node's container engine, Docker or Podman: list, pull from the node's registry, push into it.

Layers, verification and stores are the engine's own business. An image that this node had pulled has the name
`campus-mesh/fetched:ID`, which keeps it from `docker image prune`. Pulls take minutes, each in its own thread, and exit does not
wait for them. The SDK (19 MiB, 0.1 s) is imported at the first call.
"""

import asyncio
import base64
import http
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from mesh.execution.docker.socket import why_silent
from mesh.execution.engine import EngineError
from mesh.images.oci import ManifestError, digest_hash, digest_text
from mesh.util.slow_calls import apart

THREADS = 2  # for short calls
ASK_S = 30.0  # timeout, as of the engine's other calls
SILENT_S = 1800.0  # timeout while an engine packs or unpacks a large layer and sends nothing (own choice)
FETCHED, PUSHED = (
    "campus-mesh/fetched",
    "campus-mesh/pushed",
)  # repositories in the node's registry, and names on the engine

T = TypeVar("T")


class StoredImage(msgspec.Struct, frozen=True):
    """An image on the engine, with its names. `id`: of its configuration, or of its manifest if the engine is Docker with
    containerd's image store. `fetched`: its only names are those that this node gave it."""

    id: bytes
    names: tuple[str, ...]
    size: int
    fetched: bool = False


class Registry(msgspec.Struct, frozen=True):
    """The address of this node's registry, as the engine reaches it, and its password."""

    address: str
    password: str


class ImageEngine:
    """The image store of the engine."""

    def __init__(self, registry: Callable[[], Registry]) -> None:
        self._registry = registry
        self._clients: dict[float, Any] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    async def images(self) -> list[StoredImage]:
        """Return all images. EngineError if the engine does not answer."""
        return await self._call(lambda: [one for row in self._api.images() if (one := _stored(row)) is not None])

    async def find(self, name: str) -> StoredImage | None:
        """Find an image by a name on the engine or by `sha256:...`."""
        return await self._call(lambda: self._find(name))

    async def remove(self, image: StoredImage) -> bool:
        """Remove a fetched image; return whether it is gone. An image that a container uses stays."""
        return await self._call(lambda: self._remove(image))

    async def pull(self, manifest: bytes, tag: str) -> None:
        """Have the engine pull an image from this node's registry, and name it."""
        await self._patiently(lambda answers: self._pull(manifest, tag, answers))

    async def push(self, image: StoredImage, tag: str) -> None:
        """Have the engine push an image into this node's registry as `PUSHED:tag`."""
        await self._patiently(lambda answers: self._push(image, tag, answers))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    # --- in threads

    def _find(self, name: str) -> StoredImage | None:
        import docker.errors

        try:
            return _stored(self._api.inspect_image(name))
        except (docker.errors.ImageNotFound, docker.errors.NullResource):
            return None
        except docker.errors.APIError as error:
            if error.is_client_error():
                return None  # not a valid name
            raise

    def _remove(self, image: StoredImage) -> bool:
        import docker.errors

        try:
            known = self._api.inspect_image(digest_text(image.id))
            for name in (*(known.get("RepoDigests") or ()), *(known.get("RepoTags") or ())):
                if _is_ours(str(name)):
                    self._api.remove_image(name)  # without force: the engine keeps images in use
        except docker.errors.ImageNotFound:
            return True
        except docker.errors.APIError as error:
            if error.response is not None and error.response.status_code == http.HTTPStatus.CONFLICT:
                return False
            raise
        return True

    def _pull(self, manifest: bytes, tag: str, answers: list[Any]) -> None:
        name, digest = f"{self._registry().address}/{FETCHED}", digest_text(manifest)
        if self._is_podman:  # its Docker API takes only registries with TLS
            where = f"{self._patient.base_url}/v4.0.0/libpod/images/pull"
            self._order(where, {"reference": f"{name}@{digest}", "tlsVerify": "false"}, answers)
        else:
            self._order(self._patient._url("/images/create"), {"fromImage": name, "tag": digest}, answers)
        self._api.tag(f"{name}@{digest}", FETCHED, tag)

    def _push(self, image: StoredImage, tag: str, answers: list[Any]) -> None:
        name = f"{self._registry().address}/{PUSHED}"
        self._api.tag(digest_text(image.id), name, tag)
        try:
            parameters = {"tag": tag, "tlsVerify": "false"}  # the latter for Podman
            self._order(self._patient._url("/images/{0}/push", name), parameters, answers)
        finally:
            self._api.remove_image(f"{name}:{tag}", noprune=True)

    def _order(self, where: str, parameters: dict[str, str], answers: list[Any]) -> None:
        """Carry out a pull or a push. EngineError with the engine's reason if it fails."""
        registry = self._registry()
        words = {"username": "mesh", "password": registry.password, "serveraddress": registry.address}
        header = {"X-Registry-Auth": base64.urlsafe_b64encode(msgspec.json.encode(words)).decode()}
        response = self._patient.post(where, params=parameters, headers=header, stream=True, timeout=SILENT_S)
        answers.append(response)
        self._patient._raise_for_status(response)
        for answer in self._patient._stream_helper(response, decode=True):
            problem = answer.get("error") if isinstance(answer, dict) else None
            if problem:
                raise EngineError(f"the engine did not move the image: {problem}")

    @property
    def _is_podman(self) -> bool:
        return any(part.get("Name") == "Podman Engine" for part in self._api.version().get("Components") or ())

    @property
    def _api(self) -> Any:
        return self._client(ASK_S)

    @property
    def _patient(self) -> Any:
        return self._client(SILENT_S)

    def _client(self, timeout_s: float) -> Any:
        import docker

        if timeout_s not in self._clients:
            self._clients[timeout_s] = docker.from_env(timeout=timeout_s)
        return self._clients[timeout_s].api

    async def _patiently(self, work: Callable[[list[Any]], T]) -> T:
        """Run work in a thread; if the caller is cancelled, close the engine's answer, which ends the work."""
        answers: list[Any] = []
        try:
            return await self._answer_of(apart(lambda: work(answers), "image"))
        finally:
            for response in answers:
                response.close()

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._answer_of(asyncio.get_running_loop().run_in_executor(self._threads, work))

    @staticmethod
    async def _answer_of(answer: Awaitable[T]) -> T:
        """Return the engine's answer. EngineError says why there is none."""
        import docker.errors
        import requests

        try:
            return await answer
        except (docker.errors.DockerException, requests.RequestException) as error:
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
