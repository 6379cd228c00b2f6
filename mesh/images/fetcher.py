"""Fetches blobs: from nodes that have them, in pieces from several at once, else from outside the mesh if its owner allows it.

A blob that is not what its hash says is fetched again from one node at a time, so that it is certain whose pieces were wrong.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from ckptstore.fetch import Fetch, Request
from membership.identity import NodeId
from mesh.images.blobs import PIECE_BYTES, BlobStore, FetchFailed, Part
from mesh.images.messages import encode
from mesh.images.oci import MAX_MANIFEST_BYTES
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.parallel_fetch import fetched
from mesh.rpc.streams import read_within
from mesh.util.shared_task import SharedTask
from placement.rendezvous import rank

SOURCES = 4  # at a time: one fills a link, more make up for slow ones (own choice)
ROUNDS = 4  # without progress until the fetch is given up (own choice)
RETRY_S = 1.0  # before the second round, doubled before each later one (own choice)
PIECE_S = 30.0  # for 4 MiB; a slower source is useless (own choice)
BLOBS = 3  # at a time, as Docker asks for them (make bench-images: one at a time is a fifth slower)
UNFINISHED = 64  # blobs of failed fetches that are continued later (own choice)

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Where a blob may be: nodes, and a way to fetch it from outside the mesh, if there is one.

    Each node comes with the length that it has there; None for that of a manifest, which nobody knows.
    """

    holders: Mapping[NodeId, int | None]
    outside: Callable[[], Awaitable[None]] | None = None


class _Blob:
    """A blob that is fetched, or was until that failed: its pieces, their givers, and what nodes did wrong."""

    def __init__(self) -> None:
        self.fetch: SharedTask | None = None
        self.problem = ""
        self.size: int | None = None  # by which it was begun
        self.part: Part | None = None
        self.givers: dict[int, NodeId] = {}
        self.wrong: tuple[Part, dict[int, NodeId]] | None = None  # while set, one node at a time is asked
        self.unfit: set[NodeId] = set()  # not asked again: they lied
        self.failed: Counter[NodeId] = Counter()  # failures by node; nodes with fewer are asked first

    def close(self) -> None:
        for part in (self.part, self.wrong[0] if self.wrong is not None else None):
            if part is not None:
                part.close()


class BlobFetcher:
    """Fetches blobs of one kind, from the route `path` of other nodes.

    `origin` tells where a blob may be, for a client that asked for it below this name; FetchFailed if it may not be fetched.
    `blame` reports a node that sent wrong data.
    """

    def __init__(
        self,
        me: NodeId,
        store: BlobStore,
        peers: PeerClient,
        path: str,
        origin: Callable[[bytes, str], Origin],
        blame: Callable[[NodeId, str], None],
    ) -> None:
        self._me, self._store, self._peers, self._path = me, store, peers, path
        self._origin, self._blame = origin, blame
        self.moved = 0  # bytes of blobs that came from other nodes
        self._blobs: dict[bytes, _Blob] = {}
        self._turn = asyncio.Semaphore(BLOBS)
        self._requesting = asyncio.Lock()  # pieces of one blob after the other, as engines unpack layers

    async def bring(self, digest: bytes, name: str = "") -> None:
        """Wait until a blob is here. FetchFailed on failure. The fetch ends when nobody waits for it."""
        while not self._store.has(digest):
            blob = self._blobs.setdefault(digest, _Blob())
            if blob.fetch is None or blob.fetch.task.done():  # it may have been cancelled before it began
                blob.fetch = SharedTask(self._fetch(digest, blob, name), f"blob {digest.hex()[:12]}")
            await blob.fetch.wait()

    def state(self, digest: bytes) -> tuple[int, str]:
        """Return how many bytes of an unfinished blob are here, and why its last fetch failed."""
        blob = self._blobs.get(digest)
        return (0, "") if blob is None else (len(blob.givers) * PIECE_BYTES, blob.problem)

    async def close(self) -> None:
        """End all fetches, and remove what came of blobs that are not whole."""
        await asyncio.gather(*(blob.fetch.end() for blob in self._blobs.values() if blob.fetch is not None))
        while self._blobs:
            self._blobs.popitem()[1].close()

    async def _fetch(self, digest: bytes, blob: _Blob, name: str) -> None:
        idle, done, blob.problem = 0, (0, 0), ""
        try:
            async with self._turn:
                while not self._store.has(digest):
                    try:
                        await self._round(digest, blob, name)
                    except (PeerError, TimeoutError) as error:
                        blob.problem = str(error) or "nobody answered in time"
                        log.info("blob %s: %s", digest.hex()[:12], blob.problem)
                        now = (len(blob.unfit), len(blob.givers))
                        idle, done = (1, now) if now > done else (idle + 1, done)
                        if idle >= ROUNDS:
                            raise FetchFailed(blob.problem) from error
                        await asyncio.sleep(RETRY_S * 2 ** (idle - 1))
        except (FetchFailed, OSError) as error:
            blob.problem = str(error)
            raise FetchFailed(blob.problem) from error
        finally:
            blob.fetch = None
            idle_ones = [one for one, other in self._blobs.items() if other.fetch is None]
            for one in [digest] if self._store.has(digest) else idle_ones[: max(0, len(idle_ones) - UNFINISHED)]:
                self._blobs.pop(one).close()

    async def _round(self, digest: bytes, blob: _Blob, name: str) -> None:
        origin = self._origin(digest, name)
        holders = [node for node in origin.holders if node not in blob.unfit and node != self._me]
        order = [node for node, _ in rank(self._me + digest[:16], [(node, 1) for node in holders])]
        # A length that is too small costs least until that is found out.
        order.sort(key=lambda node: (blob.failed[node], origin.holders[node] or 0))
        try:
            if order:
                size = origin.holders[order[0]]
                sources = [node for node in order if origin.holders[node] == size]  # others lie, or it does
                return await self._gather(digest, blob, size, sources[: 1 if blob.wrong else SOURCES])
        except (PeerError, TimeoutError):
            if origin.outside is None:
                raise
        if origin.outside is None:
            raise FetchFailed("nobody has it now" + (", but for those who gave it wrongly" if blob.unfit else ""))
        return await origin.outside()

    async def _gather(self, digest: bytes, blob: _Blob, size: int | None, sources: Sequence[NodeId]) -> None:
        """Fetch the missing pieces of a blob, and complete it. A manifest of unknown length is one piece."""
        if blob.part is None or blob.size != size:
            if blob.part is not None:
                blob.part.close()
            blob.part, blob.givers, blob.size = await asyncio.to_thread(self._store.part), {}, size
        part, givers = blob.part, blob.givers
        numbers = range(max(1, -(-(size or 0) // PIECE_BYTES)))
        missing = {
            number.to_bytes(4): min(PIECE_BYTES, (size or 0) - number * PIECE_BYTES)
            for number in numbers
            if number not in givers
        }
        plan, turn = Fetch(missing, sources), AsyncExitStack()
        writing: list[asyncio.Future[None]] = []

        async def ask(request: Request) -> list[bytes]:
            path, came = f"{self._path}/{digest.hex()}", list[bytes]()
            body = encode([int.from_bytes(one) for one in request.ids])
            if plan.all_requested:
                await turn.aclose()
            try:
                async with self._peers.stream(request.source, "POST", path, body) as response:
                    for one in request.ids:
                        async with asyncio.timeout(PIECE_S):
                            if size is None:
                                data = await read_within(response.content, MAX_MANIFEST_BYTES) or b""
                                if not data:
                                    raise PeerError("it sends nothing, or no end")
                            else:
                                data = await response.content.readexactly(missing[one])
                        self.moved += len(data)
                        number = int.from_bytes(one)
                        if number not in givers:  # another source was not faster
                            givers[number] = request.source
                            writing.append(
                                asyncio.ensure_future(asyncio.to_thread(part.write, data, number * PIECE_BYTES))
                            )
                            await asyncio.shield(writing[-1])
                        came.append(one)
            except (PeerError, TimeoutError, asyncio.IncompleteReadError):
                if not came:
                    raise
            return came

        def fault(source: NodeId, error: BaseException) -> str | None:
            blob.failed[source] += 1
            if isinstance(error, asyncio.IncompleteReadError):
                return "it broke off"
            return str(error) or "it stands still" if isinstance(error, PeerError | TimeoutError) else None

        try:
            async with turn:
                if len(missing) > 1:  # one piece is soon there
                    await turn.enter_async_context(self._requesting)
                problem = await fetched(plan, ask, fault) if missing else ""
        finally:
            failures = [one for one in await asyncio.gather(*writing, return_exceptions=True) if one is not None]
            if failures:  # the disk is full: it is not known which pieces are here
                blob.part, blob.givers = None, {}
                part.close()
        if problem:
            raise PeerError(problem)
        await self._finish(digest, blob, part)

    async def _finish(self, digest: bytes, blob: _Blob, part: Part) -> None:
        """Complete a blob, and blame those whose pieces were wrong. PeerError if it is wrong."""
        wrong, givers = blob.wrong, blob.givers
        right = await asyncio.to_thread(self._store.finish, part, digest)
        if right and wrong is not None:
            for number, node in wrong[1].items():
                at = number * PIECE_BYTES
                if node not in blob.unfit and wrong[0].read(at) != part.read(at):
                    self._caught(digest, blob, node, "a piece is not what its hash says")
        if right:
            return
        blob.part, blob.givers = None, {}
        if len(nodes := set(givers.values())) == 1:
            self._caught(digest, blob, nodes.pop(), "it is not what its hash says")
            part.close()
        else:
            if wrong is not None:
                wrong[0].close()
            blob.wrong = (part, givers)
        raise PeerError("its pieces are not what their hashes say")

    def _caught(self, digest: bytes, blob: _Blob, node: NodeId, what: str) -> None:
        blob.unfit.add(node)
        self._blame(node, f"of the blob {digest.hex()[:12]}, {what}")
