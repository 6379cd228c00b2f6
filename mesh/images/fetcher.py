"""Fetches images from nodes that have them, in pieces from several at once, and loads them into the engine.

One image at a time. A fetch that breaks off keeps its pieces and continues later. Everything is verified against the hash on the
mesh's list. No registry is ever asked.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from blake3 import blake3

from ckptstore.fetch import Fetch, Request
from membership.identity import NodeId, short_id
from mesh.execution.engine import BadImage, EngineError
from mesh.images.allowlist import Image
from mesh.images.engine_store import ImageStore, StoredImage
from mesh.images.image_manifest import (
    ImageManifest,
    ImageManifestError,
    Layer,
    Place,
    decode_image_manifest,
    largest_agreement,
    lengths,
    new_layers,
    places,
)
from mesh.images.layer_cache import LayerStore, NoRoom
from mesh.images.messages import MAX_ANSWER_BYTES, Offer, decode_answer, decode_offer, encode
from mesh.images.rules import short
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.parallel_fetch import fetched
from mesh.util.byte_text import part
from placement.rendezvous import rank

ASKED = 8  # holders asked for an offer (own choice)
SOURCES = 4  # at a time: one fills a link, more make up for slow ones (own choice)
ROUNDS = 4  # without progress until the fetch is given up (own choice)
RETRY_S = 1.0  # before the second round, doubled before each later one (own choice)
ASK_S = 5.0  # timeout of a short call on a LAN with loaded machines
POLL_S = 0.5  # between polls of a node whose engine saves the image
SAVE_S = 1800.0  # for an engine to save an image (own choice)
STILL_S = 120.0  # without progress, a saving engine counts as hung (own choice)
PIECE_S = 120.0  # for 4 MiB; a slower source is useless (own choice)
IDLE_S = 20.0  # a stream without data for this long is broken, as for checkpoints
TELL_S = 0.5
TIMES_SIZE, MORE_BYTES = 8, 256 << 20  # tars of many small files are larger than the engine's count (own choice)

log = logging.getLogger(__name__)


class FetchFailed(RuntimeError):
    """A round failed; the text names the nodes that were asked and why each failed."""


class Lied(RuntimeError):
    """A node sent data that does not match its hash."""


class Pull:
    """A fetch in progress. `kept`: it continues even if no job waits for it. `words`: its progress."""

    def __init__(self, image: Image, name: str) -> None:
        self.image, self.name = image, name
        self.words = "is looked for on other nodes"
        self.done = self.total = 0
        self.sources: tuple[NodeId, ...] = ()
        self.waiting = 0
        self.kept = False
        self.whole = False  # fetch all layers, even those that the engine seems to have
        self.unfit: set[NodeId] = set()  # not asked again: they lied, or their image is larger than the free space
        self.failed: Counter[NodeId] = Counter()  # failures by node; nodes with fewer are asked first
        self.task: asyncio.Task[None]

    def at(self, words: str) -> None:
        self.words = words


class ImageFetcher:
    """Fetches images.

    `holders` returns the nodes that claim to have an image; `blame` reports a node that sent wrong data; `arrived` is called
    with a loaded image.
    """

    def __init__(
        self,
        me: NodeId,
        engine: ImageStore,
        layers: LayerStore,
        peers: PeerClient,
        holders: Callable[[bytes], Sequence[NodeId]],
        blame: Callable[[NodeId, str], None],
        arrived: Callable[[StoredImage], None],
    ) -> None:
        self._me, self._engine, self._layers, self._peers = me, engine, layers, peers
        self._holders, self._blame, self._arrived = holders, blame, arrived
        self.pulls: dict[bytes, Pull] = {}
        self._turn = asyncio.Semaphore()

    async def bring(self, image: Image, name: str, report: Callable[[str], None] = lambda words: None) -> None:
        """Fetch an image onto the engine. BadImage or EngineError on failure. The fetch ends when no caller waits for it."""
        pull = self.begin(image, name)
        pull.waiting += 1
        try:
            while not pull.task.done():
                report(pull.words)
                await asyncio.wait([pull.task], timeout=TELL_S)
            if pull.task.cancelled():
                raise EngineError(
                    f"image {name} is not fetched any more: this node is leaving, or the image may not be run here now"
                )
            pull.task.result()
        finally:
            pull.waiting -= 1
            if not pull.waiting and not pull.kept:
                pull.task.cancel()

    def begin(self, image: Image, name: str) -> Pull:
        """Start a fetch without waiting for it."""
        pull = self.pulls.get(image.config)
        if pull is None or pull.task.done():
            pull = self.pulls[image.config] = Pull(image, name)
            pull.task = asyncio.create_task(self._bring(pull), name=f"image {short(image.config)}")
            pull.task.add_done_callback(_heard)
        return pull

    def keep_only(self, images: Container[bytes]) -> None:
        """Stop fetches of images that are no longer allowed."""
        for config, pull in self.pulls.items():
            if config not in images and not pull.task.done():
                pull.task.cancel()

    async def close(self) -> None:
        for pull in self.pulls.values():
            pull.task.cancel()
        await asyncio.gather(*(pull.task for pull in self.pulls.values()), return_exceptions=True)

    async def _bring(self, pull: Pull) -> None:
        if self._turn.locked():
            pull.at("waits until another image has come")
        async with self._turn:
            reasons: dict[str, None] = {}
            round_, done = 0, 0
            while True:
                try:
                    loaded = await self._round(pull)
                except (FetchFailed, PeerError, TimeoutError) as error:
                    log.info("image %s (%s): %s", pull.name, short(pull.image.config), error)
                    reasons[str(error) or "nobody answered in time"] = None
                    round_, done = (1, pull.done) if pull.done > done else (round_ + 1, done)
                    if round_ >= ROUNDS:
                        raise BadImage(
                            f"image {pull.name} ({short(pull.image.config)}) is not on this node, and could not be fetched: "
                            f"{'; '.join(list(reasons)[-2:])}"
                        ) from error
                    pull.at(f"waits to be tried again: {error}"[:200])
                    await asyncio.sleep(RETRY_S * 2 ** (round_ - 1))
                except OSError as error:
                    raise EngineError(f"image {pull.name} could not be kept here: {error}") from error
                else:
                    self._arrived(loaded)
                    return

    async def _round(self, pull: Pull) -> StoredImage:
        config = pull.image.config
        image_manifest = await asyncio.to_thread(self._layers.image_manifest, config)
        vouchers: list[NodeId] = []
        if image_manifest is None:
            image_manifest, vouchers = await self._ask(pull)
        pull.sources = tuple(vouchers)
        known = [] if pull.whole else await self._engine.layers()
        lacking = new_layers(image_manifest, known)
        with self._layers.holding([layer.digest for layer in image_manifest.layers]):
            await self._fetch(pull, image_manifest, lacking, vouchers)
            pull.at("is loaded into the engine")
            try:
                return await self._engine.load(image_manifest, lacking, self._layers, pull.image)
            except EngineError as error:
                if not all([await asyncio.to_thread(self._layers.sound, layer) for layer in lacking]):
                    raise FetchFailed("some of its layers were damaged on this disk") from error
                if pull.whole or len(lacking) == len(image_manifest.layers):
                    raise
                pull.whole = True  # a layer that it had is gone
                raise FetchFailed(str(error)) from error

    # --- who gives it

    async def _ask(self, pull: Pull) -> tuple[ImageManifest, list[NodeId]]:
        """Ask the least busy holders for the manifest; return it with the nodes that gave it."""
        config = pull.image.config
        weighed = [(node, 1) for node in self._holders(config) if node not in pull.unfit and node != self._me]
        asked = [node for node, _ in rank(self._me + config[:16], weighed)][:ASKED]
        if not asked:
            suffix = ", but for those who gave it wrongly" if pull.unfit else ""
            raise BadImage(f"image {pull.name} ({short(config)}) is not on this node, and nobody has it now{suffix}")
        offers = await asyncio.gather(*(self._offer(node, config) for node in asked))
        able = [(node, offer) for node, offer in zip(asked, offers, strict=True) if isinstance(offer, Offer)]
        if not able:
            raise FetchFailed("; ".join(str(offer) for offer in offers))
        able.sort(key=lambda pair: (pull.failed[pair[0]], not pair[1].ready, pair[1].busy))
        best, offer = able[0]
        ready = [node for node, offer in able if offer.ready and pull.failed[node] == pull.failed[best]]
        chosen = ready[:SOURCES] if offer.ready else [best]  # one engine that saves it is enough
        answers = await asyncio.gather(*(self._image_manifest(pull, node) for node in chosen), return_exceptions=True)
        image_manifests: dict[NodeId, bytes] = {}
        for node, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, bytes):
                image_manifests[node] = answer
            elif isinstance(answer, PeerError | TimeoutError | ValueError):
                pull.failed[node] += 1
            else:
                raise answer
        if not image_manifests:
            raise FetchFailed("; ".join(str(answer) or "no answer in time" for answer in answers))
        data, givers = largest_agreement(image_manifests)
        return decode_image_manifest(data, config), givers

    async def _offer(self, node: NodeId, config: bytes) -> Offer | str:
        try:
            return decode_offer(await self._peers.call(node, "GET", f"/v1/images/{config.hex()}", timeout_s=ASK_S))
        except (PeerError, ValueError) as error:
            return str(error)

    async def _image_manifest(self, pull: Pull, node: NodeId) -> bytes:
        """Ask a node for the manifest. PeerError or TimeoutError if there is none; ImageManifestError if it is wrong."""
        config, far = pull.image.config, -1
        clock = asyncio.get_running_loop().time
        until, end = clock() + STILL_S, clock() + SAVE_S
        while True:
            try:
                path = f"/v1/images/{config.hex()}/manifest"
                answer = decode_answer(
                    await self._peers.call(node, "GET", path, timeout_s=IDLE_S * 3, answer_bytes=MAX_ANSWER_BYTES)
                )
                if answer.image_manifest:
                    image_manifest = await asyncio.to_thread(decode_image_manifest, answer.image_manifest, config)
                    if pull.image.size and image_manifest.size > TIMES_SIZE * pull.image.size + MORE_BYTES:
                        raise ImageManifestError(
                            f"the image manifest speaks of {image_manifest.size} bytes: far more than the image has"
                        )
                    return answer.image_manifest
            except ImageManifestError as error:
                self._caught(pull, node, str(error))
                raise
            if answer.done > far:
                far, until = answer.done, clock() + STILL_S
            if clock() > min(until, end):
                raise TimeoutError(f"node {short_id(node)} does not get on with saving it")
            pull.at(f"is saved by node {short_id(node)}: {part(answer.done, answer.total)}")
            await asyncio.sleep(POLL_S)

    def _caught(self, pull: Pull, node: NodeId, what: str) -> None:
        pull.unfit.add(node)
        self._blame(node, f"of image {short(pull.image.config)}, {what}")

    # --- its pieces

    async def _fetch(
        self, pull: Pull, image_manifest: ImageManifest, lacking: Sequence[Layer], sources: Sequence[NodeId]
    ) -> None:
        """Fetch all lacking layers into the store and verify them."""
        missing = [layer for layer in lacking if not await asyncio.to_thread(self._layers.has, layer)]
        sizes, where = lengths(missing), places(missing)
        pull.at("is compared with what is here of it")
        have = {piece for layer in missing for piece in await asyncio.to_thread(self._layers.begun, layer)}
        left = {piece: size for piece, size in sizes.items() if piece not in have}
        pull.total = sum(layer.size for layer in lacking)
        pull.done = pull.total - sum(size * len(where[piece]) for piece, size in left.items())
        try:
            await asyncio.to_thread(self._layers.check_room, pull.total - pull.done)
        except NoRoom as error:
            pull.unfit.update(sources)  # perhaps the manifest is too large, not the disk too full
            if sources and not pull.unfit.issuperset(self._holders(pull.image.config)):
                raise FetchFailed(str(error)) from error
            raise
        if left:
            pull.at(part(pull.done, pull.total))
            await self._gather(pull, left, where, sources)
        pull.at("is compared with its hashes")
        for layer in missing:
            if not await asyncio.to_thread(self._layers.finish, layer):
                for node in sources:
                    self._caught(pull, node, f"layer {layer.digest.hex()[:12]} is not what its hash says")
                raise FetchFailed("its layers are not what their hashes say")
        await asyncio.to_thread(self._layers.keep, pull.image.config, image_manifest)

    async def _gather(
        self, pull: Pull, left: dict[bytes, int], where: dict[bytes, list[Place]], sources: Sequence[NodeId]
    ) -> None:
        async def ask(request: Request) -> list[bytes]:
            return await self._pieces(pull, request, left, where)

        def fault(source: NodeId, error: BaseException) -> str | None:
            if isinstance(error, Lied):
                self._caught(pull, source, str(error))
                return str(error)
            if isinstance(error, PeerError | TimeoutError):
                pull.failed[source] += 1
                return str(error) or "it stands still"
            return None

        problem = await fetched(Fetch(left, sources), ask, fault)
        if problem:
            raise FetchFailed(problem)

    async def _pieces(
        self, pull: Pull, request: Request, left: dict[bytes, int], where: dict[bytes, list[Place]]
    ) -> list[bytes]:
        """Receive the pieces of a request, verify and write each; return those that arrived."""
        path, body = f"/v1/images/{pull.image.config.hex()}/pieces", encode(list(request.ids))
        came: list[bytes] = []
        data = bytearray()
        try:
            async with self._peers.stream(request.source, "POST", path, body) as response:
                for piece in request.ids:
                    until = asyncio.get_running_loop().time() + PIECE_S
                    while len(data) < left[piece]:
                        async with asyncio.timeout_at(until), asyncio.timeout(IDLE_S):
                            more = await response.content.readany()
                        if not more:
                            return came
                        data += more
                    content, data = bytes(data[: left[piece]]), data[left[piece] :]
                    await asyncio.to_thread(self._keep, piece, content, where[piece])
                    came.append(piece)
                    pull.done = min(pull.total, pull.done + len(content) * len(where[piece]))
                    pull.at(part(pull.done, pull.total))
        except (PeerError, TimeoutError):
            if not came:
                raise
        return came

    def _keep(self, piece: bytes, content: bytes, wanted: Sequence[Place]) -> None:
        if blake3(content).digest() != piece:
            raise Lied("a piece is not what its hash says")
        for digest, offset in wanted:
            self._layers.write(digest, offset, content)


def _heard(task: "asyncio.Task[None]") -> None:
    """Log an unexpected error of a fetch that no caller awaits."""
    with suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            log.error("%s failed", task.get_name(), exc_info=error)
