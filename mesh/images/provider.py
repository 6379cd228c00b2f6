"""Gives images to other nodes. Layers are saved from the engine at the first request and stay for a while as files."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mesh.execution.engine import EngineError
from mesh.images.engine_store import ImageStore, StoredImage
from mesh.images.image_manifest import ImageManifest, Layer, encode_image_manifest
from mesh.images.layer_cache import DamagedLayer, LayerStore
from mesh.images.messages import Answer, Offer
from mesh.images.rules import short

AT_ONCE = 8  # streams; more would slow all of them (own choice)
INDEXES_KEPT = 8

log = logging.getLogger(__name__)


class NotGiven(Exception):
    """This node does not give an image; the text says why."""


class TooBusy(Exception):
    """This node is giving too many images now."""


class Saving:
    """An image that the engine is saving. `done` is updated from a thread."""

    def __init__(self, image: StoredImage) -> None:
        self.image = image
        self.done = 0
        self.task: asyncio.Task[ImageManifest]

    def count_read(self, count: int) -> None:
        self.done = count


class ImageProvider:
    """Gives images. `stored` finds an image on the engine that may be given to others."""

    def __init__(self, engine: ImageStore, layers: LayerStore, stored: Callable[[bytes], StoredImage | None]) -> None:
        self._engine, self._layers, self._stored = engine, layers, stored
        self._savings: dict[bytes, Saving] = {}
        self._turn = asyncio.Semaphore()
        self._indexes: OrderedDict[bytes, dict[bytes, tuple[Layer, int]]] = OrderedDict()
        self.busy = 0

    async def offer(self, config: bytes) -> Offer:
        self._wanted(config)
        return Offer(
            await asyncio.to_thread(self._layers.image_manifest, config) is not None, self.busy + len(self._running())
        )

    async def answer(self, config: bytes) -> Answer:
        """Return the manifest, or the progress; the first request makes the engine save the image."""
        image = self._wanted(config)
        image_manifest = await asyncio.to_thread(self._layers.image_manifest, config)
        if image_manifest is not None:
            await asyncio.to_thread(self._layers.used, [layer.digest for layer in image_manifest.layers])
            return Answer(encode_image_manifest(image_manifest))
        saving = self._savings.get(config)
        if saving is not None and saving.task.done() and not saving.task.cancelled():
            del self._savings[config]  # the next request may try again
            error = saving.task.exception()
            if error is not None:
                raise NotGiven(f"it could not be saved: {error}") from error
            return Answer(encode_image_manifest(saving.task.result()))
        if saving is None or saving.task.done():
            saving = self._savings[config] = Saving(image)
            saving.task = asyncio.create_task(self._save(saving), name=f"save image {short(config)}")
            saving.task.add_done_callback(_heard)
        return Answer(done=saving.done, total=max(saving.done, image.size))

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for the duration of the block."""
        if self.busy >= AT_ONCE:
            raise TooBusy("this node gives images to enough others now")
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    async def pieces(self, config: bytes, wanted: Sequence[bytes]) -> Iterator[bytes]:
        """Return an iterator over these pieces, to be read in a thread. It ends early at a missing or damaged piece."""
        self._wanted(config)
        image_manifest = await asyncio.to_thread(self._layers.image_manifest, config)
        if image_manifest is None:
            raise NotGiven("its layers are not at hand any more")
        index = self._index(config, image_manifest)
        if any(piece not in index for piece in wanted):
            raise NotGiven("the image has no such pieces")
        await asyncio.to_thread(self._layers.used, {index[piece][0].digest for piece in wanted})
        return self._read([index[piece] for piece in wanted])

    async def close(self) -> None:
        for saving in self._savings.values():
            saving.task.cancel()
        await asyncio.gather(*(saving.task for saving in self._savings.values()), return_exceptions=True)

    def _wanted(self, config: bytes) -> StoredImage:
        image = self._stored(config)
        if image is None:
            raise NotGiven("this node does not give that image")
        if self._engine.habits.problem:
            raise NotGiven(f"this node gives no image: {self._engine.habits.problem}")
        return image

    def _running(self) -> list[Saving]:
        return [saving for saving in self._savings.values() if not saving.task.done()]

    async def _save(self, saving: Saving) -> ImageManifest:
        async with self._turn:
            return await self._engine.save(saving.image, self._layers, saving.count_read)

    def _index(self, config: bytes, image_manifest: ImageManifest) -> dict[bytes, tuple[Layer, int]]:
        index = self._indexes.get(config)
        if index is None:
            index = {piece: (layer, at) for layer in image_manifest.layers for at, piece in enumerate(layer.hashes)}
            self._indexes[config] = index
            if len(self._indexes) > INDEXES_KEPT:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(config)
        return index

    def _read(self, places: Sequence[tuple[Layer, int]]) -> Iterator[bytes]:
        for layer, number in places:
            try:
                yield self._layers.read(layer, number)
            except (DamagedLayer, OSError) as error:
                log.warning("a transfer of an image ends early: %s", error)
                return


def _heard(task: "asyncio.Task[ImageManifest]") -> None:
    with suppress(asyncio.CancelledError):
        error = task.exception()
        if isinstance(error, EngineError | OSError):
            log.info("%s: %s", task.get_name(), error)
        elif error is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
