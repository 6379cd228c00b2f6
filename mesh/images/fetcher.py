"""Fetches images from nodes that have them, in pieces from several at once, while the engine pulls from the node's registry.

One image at a time. A fetch that breaks off keeps its pieces and continues later, until the daemon ends. The list's digest names
the manifest, which names all blobs with their lengths; each is compared with its hash when its last piece has come. If one is
wrong, it is fetched again from one node at a time, so that it is certain whose pieces were wrong.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from hashlib import sha256

from blake3 import blake3

from ckptstore.fetch import Fetch, Request
from membership.identity import NodeId
from mesh.execution.engine import BadImage, EngineError
from mesh.images.allowlist import Image
from mesh.images.blobs import PIECE_BYTES, BlobStore
from mesh.images.messages import encode
from mesh.images.oci import MAX_MANIFEST_BYTES, Descriptor, Manifest, ManifestError
from mesh.images.rules import short
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.parallel_fetch import fetched
from mesh.util.byte_text import part
from placement.rendezvous import rank

SOURCES = 4  # at a time: one fills a link, more make up for slow ones (own choice)
ROUNDS = 4  # without progress until the fetch is given up (own choice)
RETRY_S = 1.0  # before the second round, doubled before each later one (own choice)
PIECE_S = 120.0  # for 4 MiB; a slower source is useless (own choice)
IDLE_S = 20.0  # a stream without data for this long is broken, as for checkpoints
TELL_S = 0.5

log = logging.getLogger(__name__)

Givers = dict[int, tuple[NodeId, bytes]]  # of a blob's pieces: who gave each, and its BLAKE3 hash


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
        self.waiting = 0
        self.kept = False
        self.alone = False  # ask one source at a time
        self.wanted: set[bytes] = {image.manifest}  # the manifests and blobs that it fetches, once they are known
        self.unfit: set[NodeId] = set()  # not asked again: they lied
        self.failed: Counter[NodeId] = Counter()  # failures by node; nodes with fewer are asked first
        self.task: asyncio.Task[None]


class ImageFetcher:
    """Fetches images.

    `holders` returns the nodes that claim to have an image; `blame` reports a node that sent wrong data; `load` has the engine
    pull an image whose manifests are here, while its blobs arrive.
    """

    def __init__(
        self,
        me: NodeId,
        store: BlobStore,
        peers: PeerClient,
        holders: Callable[[bytes], Sequence[NodeId]],
        blame: Callable[[NodeId, str], None],
        load: Callable[[Image], Awaitable[None]],
    ) -> None:
        self._me, self._store, self._peers = me, store, peers
        self._holders, self._blame, self._load = holders, blame, load
        self.pulls: dict[bytes, Pull] = {}
        self.moved = 0  # bytes of pieces that came from other nodes
        self._pieces: dict[bytes, Givers] = {}  # of blobs that are not complete
        self._suspects: dict[bytes, Givers] = {}  # of blobs that were wrong
        self._writing: dict[bytes, asyncio.Task[None]] = {}  # by piece
        self._arrived = asyncio.Event()
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

    async def arrival(self, image: Image, digest: bytes) -> bool:
        """Wait for a blob of an image that is being fetched; return whether it is here."""
        while not self._store.has(digest):
            pull, arrived = self.pulls.get(image.config), self._arrived
            if pull is None or pull.task.done() or (len(pull.wanted) > 1 and digest not in pull.wanted):
                return False
            waiting = asyncio.create_task(arrived.wait(), name="wait for a blob")
            try:
                await asyncio.wait([pull.task, waiting], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        return True

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
            pull.words = "waits until another image has come"
        async with self._turn:
            reasons: dict[str, None] = {}
            round_, done = 0, (0, 0)
            while True:
                try:
                    return await self._round(pull)
                except (FetchFailed, PeerError, TimeoutError, ManifestError) as error:
                    log.info("image %s (%s): %s", pull.name, short(pull.image.config), error)
                    reasons[str(error) or "nobody answered in time"] = None
                    now = (len(pull.unfit), pull.done)
                    round_, done = (1, now) if now > done else (round_ + 1, done)
                    if round_ >= ROUNDS:
                        raise BadImage(
                            f"image {pull.name} ({short(pull.image.config)}) is not on this node, and could not be fetched: "
                            f"{'; '.join(list(reasons)[-2:])}"
                        ) from error
                    pull.words = f"waits to be tried again: {error}"[:200]
                    await asyncio.sleep(RETRY_S * 2 ** (round_ - 1))
                except OSError as error:
                    raise EngineError(f"image {pull.name} could not be kept here: {error}") from error

    async def _round(self, pull: Pull) -> None:
        sources = self._sources(pull)
        manifest = await self._manifest(pull, Descriptor(f"sha256:{pull.image.manifest.hex()}", 0), sources)
        if manifest.manifests:
            chosen = manifest.for_here
            if chosen is None:
                raise BadImage(f"image {pull.name} ({short(pull.image.config)}) is for other machines than this one")
            manifest = await self._manifest(pull, chosen, sources)
            pull.wanted.add(chosen.hash)
        pull.wanted.update(blob.hash for blob in manifest.blobs)
        with self._store.holding([blob.hash for blob in manifest.blobs]):
            await _both(self._gather(pull, manifest, sources), self._load(pull.image))

    def _sources(self, pull: Pull) -> list[NodeId]:
        config = pull.image.config
        holders = [node for node in self._holders(config) if node not in pull.unfit and node != self._me]
        order = [node for node, _ in rank(self._me + config[:16], [(node, 1) for node in holders])]
        order.sort(key=lambda node: pull.failed[node])
        return order[: 1 if pull.alone else SOURCES]

    async def _manifest(self, pull: Pull, wanted: Descriptor, sources: Sequence[NodeId]) -> Manifest:
        """Return a manifest, from the first source that has it if it is not here."""
        known = await asyncio.to_thread(self._store.manifest, wanted.hash)
        reasons = []
        for node in () if known is not None else sources:
            path = f"/v1/images/{pull.image.config.hex()}/blobs/{wanted.hash.hex()}"
            try:
                data = await self._peers.call(node, "GET", path, timeout_s=IDLE_S, answer_bytes=MAX_MANIFEST_BYTES)
            except PeerError as error:
                pull.failed[node] += 1
                reasons.append(str(error))
                continue
            if sha256(data).digest() == wanted.hash:
                await asyncio.to_thread(self._store.keep, data)
                self._tell()
                return await asyncio.to_thread(self._store.manifest, wanted.hash) or self._gone()
            self._caught(pull, node, "the manifest is not what its hash says")
        if known is None and not reasons:
            suffix = ", but for those who gave it wrongly" if pull.unfit else ""
            words = f"image {pull.name} ({short(pull.image.config)}) is not on this node, and nobody has it now{suffix}"
            raise BadImage(words)
        return known or self._gone("; ".join(reasons))

    def _gone(self, words: str = "its manifest was damaged on this disk") -> Manifest:
        raise FetchFailed(words)

    def _caught(self, pull: Pull, node: NodeId, what: str) -> None:
        pull.unfit.add(node)
        self._blame(node, f"of image {short(pull.image.config)}, {what}")

    # --- its pieces

    async def _gather(self, pull: Pull, manifest: Manifest, sources: Sequence[NodeId]) -> None:
        """Fetch all missing blobs into the store."""
        missing = [blob for blob in manifest.blobs if await asyncio.to_thread(self._store.use, blob.hash) is None]
        pull.total = sum(blob.size for blob in missing)
        lacking = {
            piece_id(blob.hash, number): min(PIECE_BYTES, blob.size - number * PIECE_BYTES)
            for blob in missing
            for number in range(max(1, -(-blob.size // PIECE_BYTES)))
            if number not in self._pieces.get(blob.hash, {})
        }
        pull.done = pull.total - sum(lacking.values())
        await asyncio.to_thread(self._store.check_room, pull.total - pull.done)
        for blob in missing:
            if blob.hash not in self._pieces:
                await asyncio.to_thread(self._store.begin, blob.hash, blob.size)
                self._pieces[blob.hash] = {}
        if not missing:
            return
        if not sources:
            raise FetchFailed("nobody has it now")
        counts = {blob.hash: max(1, -(-blob.size // PIECE_BYTES)) for blob in missing}
        for digest, count in counts.items():  # complete, if a fetch ended just before
            if len(self._pieces[digest]) == count:
                await self._finish(pull, digest)

        async def ask(request: Request) -> list[bytes]:
            return await self._receive(pull, request, lacking, counts)

        def fault(source: NodeId, error: BaseException) -> str | None:
            if isinstance(error, PeerError | TimeoutError):
                pull.failed[source] += 1
                return str(error) or "it stands still"
            return None

        try:
            problem = await fetched(Fetch(lacking, sources), ask, fault) if lacking else ""
        finally:
            await asyncio.gather(*self._writing.values(), return_exceptions=True)
        if problem:
            raise FetchFailed(problem)

    async def _receive(
        self, pull: Pull, request: Request, sizes: dict[bytes, int], counts: dict[bytes, int]
    ) -> list[bytes]:
        """Receive the pieces of a request and write each; return those that arrived."""
        path, body = f"/v1/images/{pull.image.config.hex()}/pieces", encode(list(request.ids))
        came: list[bytes] = []
        data = bytearray()
        try:
            async with self._peers.stream(request.source, "POST", path, body) as response:
                for piece in request.ids:
                    until = asyncio.get_running_loop().time() + PIECE_S
                    while len(data) < sizes[piece]:
                        async with asyncio.timeout_at(until), asyncio.timeout(IDLE_S):
                            more = await response.content.readany()
                        if not more:
                            return came
                        self.moved += len(more)
                        data += more
                    content, data = bytes(data[: sizes[piece]]), data[sizes[piece] :]
                    await self._keep(pull, request.source, piece, content, counts)
                    came.append(piece)
        except (PeerError, TimeoutError):
            if not came:
                raise
        return came

    async def _keep(self, pull: Pull, source: NodeId, piece: bytes, content: bytes, counts: dict[bytes, int]) -> None:
        """Write a piece. The writing ends even if the caller is cancelled because another source was faster."""
        givers, number = self._pieces.get(piece[:32]), int.from_bytes(piece[32:])
        if piece not in self._writing:
            if givers is None or number in givers:
                return
            task = asyncio.create_task(self._take(pull, source, piece, content, counts), name="keep a piece")
            self._writing[piece] = task
            task.add_done_callback(lambda task: self._written(piece, task))
        await asyncio.shield(self._writing[piece])

    def _written(self, piece: bytes, task: "asyncio.Task[None]") -> None:
        del self._writing[piece]
        if not task.cancelled():
            task.exception()  # its callers raise it, unless all were cancelled

    async def _take(self, pull: Pull, source: NodeId, piece: bytes, content: bytes, counts: dict[bytes, int]) -> None:
        digest, number = piece[:32], int.from_bytes(piece[32:])
        mark = await asyncio.to_thread(self._write, digest, number, content)
        givers = self._pieces.get(digest)
        if givers is None:
            return  # the blob was wrong
        givers[number] = (source, mark)
        pull.done += len(content)
        pull.words = part(pull.done, pull.total)
        if len(givers) == counts[digest]:
            await self._finish(pull, digest)

    def _write(self, digest: bytes, number: int, content: bytes) -> bytes:
        self._store.write(digest, number, content)
        return blake3(content).digest()

    def _tell(self) -> None:
        """Wake those who wait for a blob."""
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def _finish(self, pull: Pull, digest: bytes) -> None:
        """Complete a blob. FetchFailed if it is wrong."""
        givers = self._pieces.pop(digest)
        if await asyncio.to_thread(self._store.finish, digest):
            before = self._suspects.pop(digest, {})
            for node in {node for number, (node, mark) in before.items() if mark != givers[number][1]}:
                self._caught(pull, node, "a piece is not what its hash says")
            self._tell()
            return
        pull.alone = True
        nodes = {node for node, _ in givers.values()}
        if len(nodes) == 1:
            self._caught(pull, nodes.pop(), f"blob {digest.hex()[:12]} is not what its hash says")
        else:
            self._suspects[digest] = givers
        raise FetchFailed("its pieces are not what their hashes say")


def piece_id(digest: bytes, number: int) -> bytes:
    return digest + number.to_bytes(4)


async def _both(one: Awaitable[None], other: Awaitable[None]) -> None:
    """Run both; if one fails, end the other and raise its error. An error of `one` comes first: it explains the other's."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def _heard(task: "asyncio.Task[None]") -> None:
    """Log an unexpected error of a fetch that no caller awaits."""
    with suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            log.error("%s failed", task.get_name(), exc_info=error)
