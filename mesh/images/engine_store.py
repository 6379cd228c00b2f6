"""The images on this node's container engine: list, save as layer tars, load.

An image is identified by the SHA-256 of its configuration, its id in the engine's own store. (Docker with containerd's image
store uses manifest digests: such images run if the list has that digest, and are not exchanged.) Nothing is pulled from a
registry. Saving and loading take minutes, each in its own thread, and exit does not wait for them. The SDK (19 MiB, 0.1 s) is
imported at the first call.
"""

import asyncio
import http
import io
import tarfile
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Event
from typing import Any, TypeVar

import msgspec

from mesh.execution.docker.socket import why_silent
from mesh.execution.engine import EngineError
from mesh.images.allowlist import Image, image_hash
from mesh.images.image_manifest import (
    MAX_CONFIG_BYTES,
    ImageManifest,
    Layer,
    archive_manifest,
    archive_names,
    layers_of,
)
from mesh.images.layer_cache import LayerStore
from mesh.util.slow_calls import apart

THREADS = 2  # for short calls
ASK_S = 30.0  # timeout, as of the engine's other calls
SILENT_S = 1800.0  # timeout while an engine saves a large image and sends nothing (own choice)
BLOCK_BYTES = 1 << 20
TAG = "campus-mesh/fetched"  # a name on the engine keeps an image from `docker image prune`
BY_MANIFEST = (
    "the engine keeps images in containerd's image store, where they have other ids than elsewhere: such a node runs what it "
    'has, and neither gives, takes nor signs images ("features": {"containerd-snapshotter": false} in Docker\'s daemon.json; '
    "docs/how-to/images.md)"
)

T = TypeVar("T")


class StoredImage(msgspec.Struct, frozen=True):
    """An image on the engine, with its names and registry digests. `fetched`: its only name is the one that this node gave it."""

    id: bytes
    names: tuple[str, ...]
    manifests: tuple[bytes, ...]
    size: int
    fetched: bool = False

    def is_of(self, image: Image) -> bool:
        """Return whether it has the content of `image`; either digest identifies it."""
        return self.id == image.config or (bool(image.manifest) and self.id == image.manifest)


class Habits(msgspec.Struct, frozen=True):
    """An engine's image store. `by_manifest`: its ids differ from other stores'; `whole`: it only loads complete images."""

    by_manifest: bool = False
    whole: bool = False

    @property
    def problem(self) -> str:
        """Return why its images cannot be exchanged with other nodes; empty if they can."""
        return BY_MANIFEST if self.by_manifest else ""


def habits_of(info: dict[str, Any]) -> Habits:
    """Return the habits of an engine from its `GET /info`."""
    status = [tuple(row) for row in info.get("DriverStatus") or ()]
    return Habits(("driver-type", "io.containerd.snapshotter.v1") in status, "BuildahVersion" in info)


class Stopped(Exception):
    """The work was stopped on request."""


class ImageStore:
    """The image store of the engine."""

    def __init__(self) -> None:
        self.habits = Habits()
        self._known = False  # the habits are known; asked again after the engine was away
        self._clients: dict[float, Any] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    async def images(self) -> list[StoredImage]:
        """Return all images, and update `habits`. EngineError if the engine does not answer."""
        try:
            return await self._call(self._images)
        except EngineError:
            self._known = False
            raise

    async def find(self, name: str) -> StoredImage | None:
        """Find an image by a name on the engine or by `sha256:...`."""
        return await self._call(lambda: self._find(name))

    async def remove(self, image: StoredImage) -> bool:
        """Remove a fetched image; return whether it is gone. An image that a container uses stays."""
        return await self._call(lambda: self._remove(image))

    async def layers(self) -> list[tuple[bytes, ...]]:
        """Return the layers of each image, lowest first, which a load may leave out."""
        return await self._call(self._all_layers)

    async def save(self, image: StoredImage, store: LayerStore, report: Callable[[int], None]) -> ImageManifest:
        """Save an image's layers into the store. `report` is called in a thread with the bytes read so far."""
        return await self._stoppable(lambda stop: self._save(image, store, report, stop))

    async def load(
        self, image_manifest: ImageManifest, layers: Collection[Layer], store: LayerStore, wanted: Image
    ) -> StoredImage:
        """Load an image of which the engine lacks only these layers, and verify that it is the wanted one."""
        return await self._stoppable(lambda stop: self._load(image_manifest, layers, store, wanted, stop))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    # --- in threads

    def _images(self) -> list[StoredImage]:
        if not self._known:
            self.habits, self._known = habits_of(self._api.info()), True
        return [_stored(row) for row in self._api.images() if image_hash(str(row["Id"])) is not None]

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
            for name in self._api.inspect_image(_id(image.id)).get("RepoTags") or ():
                if _familiar(str(name)).startswith(f"{TAG}:"):
                    self._api.remove_image(name)  # without force: the engine keeps images in use
        except docker.errors.ImageNotFound:
            return True
        except docker.errors.APIError as error:
            if error.response is not None and error.response.status_code == http.HTTPStatus.CONFLICT:
                return False
            raise
        return True

    def _all_layers(self) -> list[tuple[bytes, ...]]:
        import docker.errors

        found = []
        for image in () if self.habits.whole else self._images():
            try:
                rootfs = self._api.inspect_image(_id(image.id)).get("RootFS") or {}
            except docker.errors.ImageNotFound:
                continue
            digests = tuple(image_hash(str(text)) for text in rootfs.get("Layers") or ())
            if None not in digests:
                found.append(tuple(digest for digest in digests if digest is not None))
        return found

    def _save(self, image: StoredImage, store: LayerStore, report: Callable[[int], None], stop: Event) -> ImageManifest:
        rootfs = self._api.inspect_image(_id(image.id)).get("RootFS") or {}
        digests = dict.fromkeys(image_hash(str(text)) or b"" for text in rootfs.get("Layers") or ())
        config, found = b"", {}
        with store.holding(digests):
            stream: Any = _Stream(self._patient.get_image(_id(image.id), BLOCK_BYTES), report, stop)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isreg() else None
                    if content is None:
                        continue
                    if member.size <= MAX_CONFIG_BYTES:
                        small = content.read()
                        config = small if sha256(small).digest() == image.id else config
                        content = io.BytesIO(small)
                    digest, layer = store.take(content, digests)
                    if layer is not None:
                        found[digest] = layer
            if not config or digests.keys() - found.keys():
                raise EngineError(
                    "the engine does not give the image's layers as they were hashed: this node cannot give it to others"
                )
            image_manifest = ImageManifest(config, tuple(found[digest] for digest in dict.fromkeys(layers_of(config))))
            store.keep(image.id, image_manifest)
            return image_manifest

    def _load(
        self, image_manifest: ImageManifest, layers: Collection[Layer], store: LayerStore, wanted: Image, stop: Event
    ) -> StoredImage:
        tag = f"{TAG}:{wanted.config.hex()[:32]}"
        answers = self._patient.load_image(_archive(image_manifest, layers, store, tag, stop))
        problems = [text for answer in answers if (text := answer.get("error") or answer.get("message"))]
        if problems:
            raise EngineError(f"the engine did not take the image: {problems[0]}")
        for digest in filter(None, (wanted.config, wanted.manifest)):
            loaded = self._find(_id(digest))
            if loaded is not None and loaded.is_of(wanted):
                return loaded
        other = self._find(tag)
        if other is not None:
            self._api.remove_image(tag, force=True)
        there = "nothing" if other is None else _id(other.id)
        raise EngineError(
            f"after loading, the engine has {there} in place of {_id(wanted.config)}: it is removed again"
        )

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

    async def _stoppable(self, work: Callable[[Event], T]) -> T:
        """Run work in a thread, and stop it if the caller is cancelled."""
        stop = Event()
        try:
            return await self._answer_of(apart(lambda: work(stop), "image"))
        finally:
            stop.set()

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
        except tarfile.TarError as error:
            raise EngineError(f"what the engine saves cannot be read: {error}") from error


class _Stream:
    """The engine's response as a readable file."""

    def __init__(self, pieces: Iterable[bytes], report: Callable[[int], None], stop: Event) -> None:
        self._pieces, self._report, self._stop = iter(pieces), report, stop
        self._rest, self._count = b"", 0

    def read(self, size: int) -> bytes:
        parts, lacking = [], size
        while lacking:
            if not self._rest:
                if self._stop.is_set():
                    raise Stopped
                self._rest = next(self._pieces, b"")
                if not self._rest:
                    break
            parts.append(self._rest[:lacking])
            self._rest = self._rest[lacking:]
            lacking -= len(parts[-1])
        data = b"".join(parts)
        self._count += len(data)
        self._report(self._count)
        return data


def _archive(
    image_manifest: ImageManifest, layers: Collection[Layer], store: LayerStore, tag: str, stop: Event
) -> Iterator[bytes]:
    """Yield an archive for `docker load`, without layers that the engine has."""
    config, names = archive_names(image_manifest)
    for name, content in (("manifest.json", archive_manifest(image_manifest, tag)), (config, image_manifest.config)):
        yield from _member(name, len(content), (content,))
    for layer in layers:
        yield from _member(names[layer.digest], layer.size, _until(store.blocks(layer), stop))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _until(blocks: Iterator[bytes], stop: Event) -> Iterator[bytes]:
    for block in blocks:
        if stop.is_set():
            raise Stopped
        yield block


def _member(name: str, size: int, content: Iterable[bytes]) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    yield info.tobuf(tarfile.GNU_FORMAT)
    yield from content
    yield bytes(-size % tarfile.BLOCKSIZE)


def _stored(row: dict[str, Any]) -> StoredImage:
    digests = (str(text).rpartition("@")[2] for text in row.get("RepoDigests") or ())
    all_names = {_familiar(str(name)) for name in row.get("RepoTags") or () if "<none>" not in str(name)}
    names = tuple(sorted(name for name in all_names if not name.startswith(f"{TAG}:")))
    return StoredImage(
        id=image_hash(str(row["Id"])) or b"",
        names=names,
        manifests=tuple(sorted({found for text in digests if (found := image_hash(text)) is not None})),
        size=max(0, int(row.get("Size") or 0)),
        fetched=bool(all_names) and not names,
    )


def _familiar(name: str) -> str:
    """Return a name as Docker writes it: Podman adds a registry."""
    for host in ("docker.io/library/", "docker.io/", "localhost/"):
        name = name.removeprefix(host)
    return name


def _id(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"
