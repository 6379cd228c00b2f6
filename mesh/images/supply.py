"""Brings images here from nodes that have them: which nodes, in pieces from several at once, whole and right, onto the engine.

One image at a time. What has come of one stays when it breaks off, and is gone on with; nothing is believed that does not lead to
the hash on the mesh's list. No registry is ever asked.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from blake3 import blake3

from ckptstore.fetch import Fetch, Request
from membership.identity import NodeId, short_id
from mesh.amount import part
from mesh.api.fetching import fetched
from mesh.api.peer import PeerClient, PeerError
from mesh.engine.engine import BadImage, EngineError
from mesh.engine.imagestore import ImageStore, StoredImage
from mesh.images.allowlist import Image
from mesh.images.docket import (
    Docket,
    DocketError,
    Layer,
    Place,
    decode_docket,
    largest_agreement,
    lengths,
    new_layers,
    places,
)
from mesh.images.layers import LayerStore, NoRoom
from mesh.images.questions import MAX_ANSWER_BYTES, Offer, decode_answer, decode_offer, encode
from mesh.images.rules import short
from placement.rendezvous import rank

ASKED = 8  # of those who have it, whether they could give it now; ours
SOURCES = 4  # at once: one fills a link, more make up for slow ones; ours
ROUNDS = 4  # without getting any further, and it is given up; ours
RETRY_S = 1.0  # before the second round, twice as long before each later one; ours
ASK_S = 5.0  # a LAN's answer, on a loaded machine
POLL_S = 0.5  # of a node whose engine saves the image
SAVE_S = 1800.0  # in which an engine has saved an image; ours
STILL_S = 120.0  # in which a saving engine gets no further: it hangs; ours
PIECE_S = 120.0  # for 4 MiB: slower is of no use; ours
IDLE_S = 20.0  # a stream that stands still this long is broken, as for checkpoints
TELL_S = 0.5
TIMES_SIZE, MORE_BYTES = 8, 256 << 20  # tars of many small files are larger than what an engine counts; ours

log = logging.getLogger(__name__)


class FetchFailed(RuntimeError):
    """A round that came to nothing; the text says who was asked, and why each failed."""


class Lied(RuntimeError):
    """What a node gave is not what it said it was."""


class Pull:
    """One image on its way here. `kept`: it goes on although no job waits for it. `words` say how far it is."""

    def __init__(self, image: Image, name: str) -> None:
        self.image, self.name = image, name
        self.words = "is looked for on other nodes"
        self.done = self.total = 0
        self.sources: tuple[NodeId, ...] = ()
        self.waiting = 0
        self.kept = False
        self.whole = False  # all layers have to come, also those that the engine seems to have
        self.unfit: set[NodeId] = set()  # who are not asked again: those who lied, or have it larger than there is room
        self.failed: Counter[NodeId] = Counter()  # who comes after the others from now on
        self.task: asyncio.Task[None]

    def at(self, words: str) -> None:
        self.words = words


class Supply:
    """`holders` gives the nodes that say they have an image; `blame` tells of one that gave something wrong; `arrived` is called
    when an image has come."""

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

    async def bring(self, image: Image, name: str, told: Callable[[str], None] = lambda words: None) -> None:
        """Have it on the engine; BadImage or EngineError if that cannot be. It ends when nobody waits for it any more."""
        pull = self.begin(image, name)
        pull.waiting += 1
        try:
            while not pull.task.done():
                told(pull.words)
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
        """The same without waiting for it."""
        pull = self.pulls.get(image.config)
        if pull is None or pull.task.done():
            pull = self.pulls[image.config] = Pull(image, name)
            pull.task = asyncio.create_task(self._bring(pull), name=f"image {short(image.config)}")
            pull.task.add_done_callback(_heard)
        return pull

    def keep_only(self, images: Container[bytes]) -> None:
        """Stop what may not come any more."""
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
        docket = await asyncio.to_thread(self._layers.docket, config)
        vouchers: list[NodeId] = []
        if docket is None:
            docket, vouchers = await self._ask(pull)
        pull.sources = tuple(vouchers)
        known = [] if pull.whole else await self._engine.layers()
        lacking = new_layers(docket, known)
        with self._layers.holding([layer.digest for layer in docket.layers]):
            await self._fetch(pull, docket, lacking, vouchers)
            pull.at("is loaded into the engine")
            try:
                return await self._engine.load(docket, lacking, self._layers, pull.image)
            except EngineError as error:
                if not all([await asyncio.to_thread(self._layers.sound, layer) for layer in lacking]):
                    raise FetchFailed("some of its layers were damaged on this disk") from error
                if pull.whole or len(lacking) == len(docket.layers):
                    raise
                pull.whole = True  # a layer that it had is gone
                raise FetchFailed(str(error)) from error

    # --- who gives it

    async def _ask(self, pull: Pull) -> tuple[Docket, list[NodeId]]:
        """What it is made of, and who says so; the least busy of those who have it."""
        config = pull.image.config
        weighed = [(node, 1) for node in self._holders(config) if node not in pull.unfit and node != self._me]
        asked = [node for node, _ in rank(self._me + config[:16], weighed)][:ASKED]
        if not asked:
            said = ", but for those who gave it wrongly" if pull.unfit else ""
            raise BadImage(f"image {pull.name} ({short(config)}) is not on this node, and nobody has it now{said}")
        offers = await asyncio.gather(*(self._offer(node, config) for node in asked))
        able = [(node, offer) for node, offer in zip(asked, offers, strict=True) if isinstance(offer, Offer)]
        if not able:
            raise FetchFailed("; ".join(str(offer) for offer in offers))
        able.sort(key=lambda pair: (pull.failed[pair[0]], not pair[1].ready, pair[1].busy))
        best, offer = able[0]
        ready = [node for node, offer in able if offer.ready and pull.failed[node] == pull.failed[best]]
        chosen = ready[:SOURCES] if offer.ready else [best]  # one engine that saves it is enough
        answers = await asyncio.gather(*(self._docket(pull, node) for node in chosen), return_exceptions=True)
        dockets: dict[NodeId, bytes] = {}
        for node, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, bytes):
                dockets[node] = answer
            elif isinstance(answer, PeerError | TimeoutError | ValueError):
                pull.failed[node] += 1
            else:
                raise answer
        if not dockets:
            raise FetchFailed("; ".join(str(answer) or "no answer in time" for answer in answers))
        data, givers = largest_agreement(dockets)
        return decode_docket(data, config), givers

    async def _offer(self, node: NodeId, config: bytes) -> Offer | str:
        try:
            return decode_offer(await self._peers.call(node, "GET", f"/v1/images/{config.hex()}", timeout_s=ASK_S))
        except (PeerError, ValueError) as error:
            return str(error)

    async def _docket(self, pull: Pull, node: NodeId) -> bytes:
        """PeerError or TimeoutError if it does not give one; DocketError, and blame, if it gives none of that image."""
        config, far = pull.image.config, -1
        clock = asyncio.get_running_loop().time
        until, end = clock() + STILL_S, clock() + SAVE_S
        while True:
            try:
                answer = decode_answer(await self._read(node, f"/v1/images/{config.hex()}/docket", MAX_ANSWER_BYTES))
                if answer.docket:
                    docket = await asyncio.to_thread(decode_docket, answer.docket, config)
                    if pull.image.size and docket.size > TIMES_SIZE * pull.image.size + MORE_BYTES:
                        raise DocketError(f"the docket speaks of {docket.size} bytes: far more than the image has")
                    return answer.docket
            except DocketError as error:
                self._caught(pull, node, str(error))
                raise
            if answer.done > far:
                far, until = answer.done, clock() + STILL_S
            if clock() > min(until, end):
                raise TimeoutError(f"node {short_id(node)} does not get on with saving it")
            pull.at(f"is saved by node {short_id(node)}: {part(answer.done, answer.total)}")
            await asyncio.sleep(POLL_S)

    async def _read(self, node: NodeId, path: str, limit: int) -> bytes:
        data = bytearray()
        async with asyncio.timeout(IDLE_S * 3), self._peers.stream(node, "GET", path, b"") as response:
            while piece := await response.content.readany():
                data += piece
                if len(data) > limit:
                    raise PeerError(f"node {short_id(node)} answers more than there can be")
        return bytes(data)

    def _caught(self, pull: Pull, node: NodeId, what: str) -> None:
        pull.unfit.add(node)
        self._blame(node, f"of image {short(pull.image.config)}, {what}")

    # --- its pieces

    async def _fetch(self, pull: Pull, docket: Docket, lacking: Sequence[Layer], sources: Sequence[NodeId]) -> None:
        """All lacking layers, whole and right, in the store."""
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
            pull.unfit.update(sources)  # it may be the docket that is too large, not the disk that is too full
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
        await asyncio.to_thread(self._layers.keep, pull.image.config, docket)

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
        """What has come of a request, each piece compared and written."""
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
    """Somebody may look at how it ended later, or nobody."""
    with suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            log.error("%s failed", task.get_name(), exc_info=error)
