"""The images on this node's Docker engine: which there are, their layers as tars, and putting one there.

An image goes by the SHA-256 of its configuration, which is its id where the engine keeps images in its own store. (Docker with
containerd's image store numbers them by manifest: what it has is run if the list knows that digest, and no more.) Nothing is ever
pulled from a registry. Saving and loading take minutes: each has a thread of its own, for which no exit waits. The SDK (19 MiB,
0.1 s) is imported with the first question, for where there is no engine nobody asks.
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

from mesh.engine.apart import apart
from mesh.engine.engine import EngineError
from mesh.engine.enginesocket import why_silent
from mesh.images.allowlist import Image, image_hash
from mesh.images.docket import MAX_CONFIG_BYTES, Docket, Layer, archive_manifest, archive_names, layers_of
from mesh.images.layers import LayerStore

THREADS = 2  # for questions
ASK_S = 30.0  # as the engine's other calls
SILENT_S = 1800.0  # an engine that saves a large image says nothing for a while; ours
BLOCK_BYTES = 1 << 20
TAG = "campus-mesh/fetched"  # a name on the engine keeps an image from `docker image prune`
BY_MANIFEST = (
    "the engine keeps images in containerd's image store, where they have other ids than elsewhere: such a node runs what it "
    'has, and neither gives, takes nor signs images ("features": {"containerd-snapshotter": false} in Docker\'s daemon.json; '
    "docs/images.md)"
)

T = TypeVar("T")


class StoredImage(msgspec.Struct, frozen=True):
    """As the engine has it: `id`, its names, and the digests by which registries know it. `fetched`: it has no name but the one
    under which this node put it there."""

    id: bytes
    names: tuple[str, ...]
    manifests: tuple[bytes, ...]
    size: int
    fetched: bool = False

    def is_of(self, image: Image) -> bool:
        """Either of the two digests names all of the content."""
        return self.id == image.config or (bool(image.manifest) and self.id == image.manifest)


class Habits(msgspec.Struct, frozen=True):
    """How an engine keeps images. `by_manifest`: they have ids that no other store has; `whole`: it loads no image of which it is
    to find a layer itself."""

    by_manifest: bool = False
    whole: bool = False

    @property
    def problem(self) -> str:
        """Why its images cannot be exchanged with other nodes; empty if they can."""
        return BY_MANIFEST if self.by_manifest else ""


def habits_of(info: dict[str, Any]) -> Habits:
    """Of an engine whose `GET /info` says so."""
    status = [tuple(row) for row in info.get("DriverStatus") or ()]
    return Habits(("driver-type", "io.containerd.snapshotter.v1") in status, "BuildahVersion" in info)


class Stopped(Exception):
    """Somebody has asked for it not to go on."""


class ImageStore:
    def __init__(self) -> None:
        self.habits = Habits()
        self._known = False  # the habits: asked again once the engine has been away
        self._clients: dict[float, Any] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    async def images(self) -> list[StoredImage]:
        """All that are there; from then on `habits` are the engine's. EngineError if it does not answer."""
        try:
            return await self._call(self._images)
        except EngineError:
            self._known = False
            raise

    async def find(self, name: str) -> StoredImage | None:
        """By a name on the engine, or `sha256:...`."""
        return await self._call(lambda: self._find(name))

    async def remove(self, image: StoredImage) -> bool:
        """Whether one that was fetched is gone; not if a container is made of it, running or not."""
        return await self._call(lambda: self._remove(image))

    async def layers(self) -> list[tuple[bytes, ...]]:
        """The layers of each image, lowest first, which one that is loaded need not bring."""
        return await self._call(self._all_layers)

    async def save(self, image: StoredImage, store: LayerStore, told: Callable[[int], None]) -> Docket:
        """Bring its layers into the store. `told` hears in a thread how many bytes have been read."""
        return await self._stoppable(lambda stop: self._save(image, store, told, stop))

    async def load(self, docket: Docket, layers: Collection[Layer], store: LayerStore, wanted: Image) -> StoredImage:
        """Put an image there, of which the engine lacks only these layers, and see that it is the one that was wanted."""
        return await self._stoppable(lambda stop: self._load(docket, layers, store, wanted, stop))

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
                return None  # not a name at all
            raise

    def _remove(self, image: StoredImage) -> bool:
        import docker.errors

        try:
            for name in self._api.inspect_image(_id(image.id)).get("RepoTags") or ():
                if _familiar(str(name)).startswith(f"{TAG}:"):
                    self._api.remove_image(name)  # without force: the engine knows who uses it
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

    def _save(self, image: StoredImage, store: LayerStore, told: Callable[[int], None], stop: Event) -> Docket:
        rootfs = self._api.inspect_image(_id(image.id)).get("RootFS") or {}
        digests = dict.fromkeys(image_hash(str(text)) or b"" for text in rootfs.get("Layers") or ())
        config, found = b"", {}
        with store.holding(digests):
            stream: Any = _Stream(self._patient.get_image(_id(image.id), BLOCK_BYTES), told, stop)
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
            docket = Docket(config, tuple(found[digest] for digest in dict.fromkeys(layers_of(config))))
            store.keep(image.id, docket)
            return docket

    def _load(
        self, docket: Docket, layers: Collection[Layer], store: LayerStore, wanted: Image, stop: Event
    ) -> StoredImage:
        tag = f"{TAG}:{wanted.config.hex()[:32]}"
        answers = self._patient.load_image(_archive(docket, layers, store, tag, stop))
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
        """Whoever is cancelled while he waits for it stops it."""
        stop = Event()
        try:
            return await self._told(apart(lambda: work(stop), "image"))
        finally:
            stop.set()

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._told(asyncio.get_running_loop().run_in_executor(self._threads, work))

    @staticmethod
    async def _told(answer: Awaitable[T]) -> T:
        """What the engine answers, or in words why it does not."""
        import docker.errors
        import requests

        try:
            return await answer
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise EngineError(f"the container engine: {why_silent(error)}") from error
        except tarfile.TarError as error:
            raise EngineError(f"what the engine saves cannot be read: {error}") from error


class _Stream:
    """What the engine sends, as a file to be read."""

    def __init__(self, pieces: Iterable[bytes], told: Callable[[int], None], stop: Event) -> None:
        self._pieces, self._told, self._stop = iter(pieces), told, stop
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
        self._told(self._count)
        return data


def _archive(docket: Docket, layers: Collection[Layer], store: LayerStore, tag: str, stop: Event) -> Iterator[bytes]:
    """What `docker load` takes; layers that the engine has need not be in it."""
    config, names = archive_names(docket)
    for name, content in (("manifest.json", archive_manifest(docket, tag)), (config, docket.config)):
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
    """As Docker writes it: Podman adds where it would look for it."""
    for host in ("docker.io/library/", "docker.io/", "localhost/"):
        name = name.removeprefix(host)
    return name


def _id(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"
