"""Fetching of data sets: chunks come from several holders at once, and from nodes that are fetching the same data set."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from ckptstore.cipher import StateCipher
from ckptstore.dataset import Link, fresh, links_of
from ckptstore.errors import BadManifest, CorruptChunk
from ckptstore.fetch import Fetch, Request
from ckptstore.messages import (
    ChunkRequest,
    MissingQuery,
    decode_ids,
    encode_chunk_request,
    encode_missing_query,
)
from ckptstore.pack import ID_BYTES
from ckptstore.receiver import max_stream_bytes
from membership.identity import NodeId, short_id
from mesh.data.directory import ASK_S, SOURCES, DataDirectory
from mesh.data.holdings import Holdings
from mesh.data.manifest import DataManifest, FetchFailed
from mesh.data.space import Room, Space
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.parallel_fetch import Pulled, Swarm, fetched_chunks, pulled
from mesh.util.byte_text import amount, part
from mesh.util.shared_task import SharedTask

ROUNDS, RETRY_S = (
    4,
    1.0,
)  # without progress until a fetch is given up; wait before the second, doubled then (own choice)
NODES, CHUNKS = 64, 2048  # pages opened, and chunks fetched, at a time: 8 GiB (own choice)
FETCHES = 2  # data sets at a time for jobs, and as many that other nodes or the user ordered; more wait (own choice)
TELL_S = 0.5
QUERY_BYTES = CHUNKS * (ID_BYTES + 2) + 64  # of a question about so many chunks, and of its answer
LEAST_GIVEN_ON = 64 << 20  # bytes of a data set that is given on while it comes (own choice)
LEAST_MEASURED = 64 << 20  # bytes until a speed is known (own choice)
HALF_LIFE = 1 << 30  # bytes in which a speed is half forgotten (own choice)
COMING_S = 1.0  # for which a chunk on its way is awaited, and other fetches give way to an awaited one (own choice)

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
Whose = Callable[[], bytes | None]  # the job by whose rights chunks are requested now; None: by this node's user's


@dataclass
class Progress:
    """The progress of a fetch of `size` bytes: a text, what has arrived, whether there is room for all of it, and who waits."""

    size: int
    words: str = "waits until other data sets have come"
    came: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[Whose] = field(default_factory=list)

    def job(self) -> bytes | None:
        """Return a job that still waits, if there is one."""
        return next((job for whose in self.waiting if (job := whose()) is not None), None)


class Speed:
    """The speed of recent fetches, from any nodes."""

    def __init__(self) -> None:
        self._bytes = self._took_s = 0.0

    def note(self, size: int, took_s: float) -> None:
        kept = 0.5 ** (size / HALF_LIFE)
        self._bytes, self._took_s = self._bytes * kept + size, self._took_s * kept + took_s

    @property
    def mib_s(self) -> int:
        """Return whole MiB per second, at least 1; 0 while too little has come."""
        if self._bytes < LEAST_MEASURED or not self._took_s:
            return 0
        return max(1, int(self._bytes / self._took_s) >> 20)


class DataFetcher:
    """`cipher` finds the key of a data set (`DataKeys.cipher`); `blame` reports a node that sent wrong data; `begins` is called
    when chunks of one begin to come, `arrived` with each that is whole here.
    """

    def __init__(
        self,
        holdings: Holdings,
        directory: DataDirectory,
        space: Space,
        peers: PeerClient,
        cipher: Callable[[bytes, DataManifest], Awaitable[StateCipher | None]],
        blame: Callable[[NodeId, str], None],
        begins: Callable[[], None],
        arrived: Callable[[bytes, bytes, DataManifest], None],
    ) -> None:
        self._holdings, self._directory, self._space, self._peers = holdings, directory, space, peers
        self.speed = Speed()
        self.cipher, self._blame, self._begins, self._arrived = cipher, blame, begins, arrived
        self._fetches: dict[bytes, tuple[SharedTask, Progress]] = {}
        self._running = Counter[bool]()  # fetches that a job here waits for (True), and others
        self._changed = asyncio.Condition()  # who waits for a turn asks again
        self.streamed = Counter[bytes]()  # data sets that are read as they come
        self._plans: dict[bytes, Fetch] = {}
        self._urgent, self._calm = 0, asyncio.Event()  # fetches at once; set while there are none
        self._calm.set()
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # chunks on their way: done once they are here, or are not

    async def close(self) -> None:
        await asyncio.gather(*(shared.end() for shared, _ in list(self._fetches.values())))

    async def fetch(self, identity: bytes, manifest: DataManifest, whose: Whose, tell: Tell) -> None:
        """Bring all chunks of a data set here. FetchFailed. It ends when nobody waits for it any more."""
        found = self._fetches.get(identity)
        if found is None or found[0].task.done():
            progress = Progress(manifest.chunk_bytes)
            work = self._fetch(progress, identity, manifest)
            found = SharedTask(work, f"fetch data set {manifest.full_name}"), progress
            self._fetches[identity] = found
        shared, progress = found
        progress.waiting.append(whose)
        try:
            async with self._changed:
                self._changed.notify_all()
            await shared.wait(lambda: tell(progress.words), TELL_S)
        finally:
            progress.waiting.remove(whose)
            over = shared.task.done() or shared.task.cancelling()
            if over and self._fetches.get(identity) is found:
                del self._fetches[identity]
        if shared.task.cancelled():
            raise FetchFailed("the fetch was stopped: this node is leaving")

    def words(self, identity: bytes) -> str:
        """Return how far the fetch of a data set is; empty if none is under way."""
        found = self._fetches.get(identity)
        return found[1].words if found is not None and not found[0].task.done() else ""

    def coming(self) -> list[bytes]:
        """Return the large data sets that this node is fetching, and whose chunks it already gives to others."""
        return sorted(
            identity
            for identity, (shared, progress) in self._fetches.items()
            if progress.size >= LEAST_GIVEN_ON and progress.begun.is_set() and not shared.task.done()
        )

    async def begun(self, identity: bytes) -> None:
        """Wait until there is room for a data set whose fetch is under way."""
        await self._fetches[identity][1].begun.wait()

    async def at_once(self, identity: bytes, job: bytes | None, wanted: Mapping[bytes, int]) -> int:
        """Fetch some chunks, given with their lengths, before all others; return the bytes that came. FetchFailed.

        What is on its way is not requested a second time.
        """
        coming = {one: self._coming[one] for one in wanted if one in self._coming}
        with self._holdings.store.working():
            fresh = {one: length for one, length in wanted.items() if one not in coming}
            begun = asyncio.ensure_future(self._at_once(identity, job, fresh))
            try:
                if coming:
                    await asyncio.wait(coming.values(), timeout=COMING_S)
                return await self._at_once(identity, job, {one: wanted[one] for one in coming}) + await begun
            finally:
                begun.cancel()
                await asyncio.gather(begun, return_exceptions=True)

    async def _at_once(self, identity: bytes, job: bytes | None, wanted: Mapping[bytes, int]) -> int:
        missing = await asyncio.to_thread(self._holdings.store.missing, list(wanted))
        some = {one: wanted[one] for one in missing}
        if some:
            self._urgent += 1
            self._calm.clear()
            try:
                async with self._space.arrival(sum(some.values()), self._directory.known[identity].full_name, identity):
                    await self._get(identity, lambda: job, some, {}, lambda got: None, urgent=True)
            finally:
                self._urgent -= 1
                if not self._urgent:
                    self._calm.set()
            if (plan := self._plans.get(identity)) is not None:
                plan.came(some)
        return sum(some.values())

    @asynccontextmanager
    async def _turn(self, progress: Progress) -> AsyncIterator[None]:
        """Wait for a turn. What a job of this node waits for has turns of its own: other nodes can order any number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running[progress.job() is not None] < FETCHES)
            for_job = progress.job() is not None
            self._running[for_job] += 1
        try:
            yield
        finally:
            self._running[for_job] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _fetch(self, progress: Progress, identity: bytes, manifest: DataManifest) -> None:
        async with self._turn(progress), self._space.room(manifest.chunk_bytes, manifest.full_name, identity) as room:
            progress.begun.set()
            self._begins()
            sealed = self._directory.sealed(identity)
            assert sealed is not None
            failed: dict[NodeId, str] = {}
            rounds = 0
            while True:
                before = progress.came
                try:
                    cipher = await self.cipher(identity, manifest)
                    with self._holdings.store.working():
                        await self._round(progress, room, identity, manifest, cipher, failed)
                        assert manifest.root is not None
                        await asyncio.to_thread(
                            self._holdings.store.publish, identity, sealed, manifest.root, cipher, identity
                        )
                    break
                except FetchFailed as error:
                    log.info("data set %s: %s", manifest.full_name, error)
                    failed.clear()  # the next round asks them again
                    rounds = 1 if progress.came > before else rounds + 1
                    if rounds >= ROUNDS:
                        raise
                    progress.words = f"waits to be tried again: {error}"[:200]
                    await asyncio.sleep(RETRY_S * 2 ** (rounds - 1))
                except BadManifest as error:
                    raise FetchFailed(f"data set {manifest.full_name} is not valid: {error}") from error
            log.info("data set %s came: %s", manifest.full_name, amount(progress.came))
            self._arrived(identity, sealed, manifest)

    async def _round(
        self,
        progress: Progress,
        room: Room,
        identity: bytes,
        manifest: DataManifest,
        cipher: StateCipher | None,
        failed: dict[NodeId, str],
    ) -> None:
        """Walk the tree and fetch what is missing in the order of its files, pages first."""
        assert manifest.root is not None
        stack, wanted, seen = [(manifest.root, True)], dict[bytes, int](), {manifest.root}
        passed, before, total = 0, progress.came, max(1, manifest.chunk_bytes)

        async def have(batch: Mapping[bytes, int]) -> None:
            nonlocal passed
            missing = await asyncio.to_thread(self._holdings.store.missing, list(batch))
            lacks = sum(batch[one] for one in missing)
            if progress.came - before + lacks > manifest.chunk_bytes:
                raise BadManifest(f"it holds more than the {amount(manifest.chunk_bytes)} that its manifest says")
            await asyncio.to_thread(self._holdings.store.members.note, identity, batch.items())
            passed += sum(batch.values()) - lacks
            for start in range(0, len(missing), CHUNKS):
                some = {one: batch[one] for one in missing[start : start + CHUNKS]}
                size = sum(some.values())
                async with self._space.arrival(size, manifest.full_name, identity) as arrival:

                    def tell(got: int, passed: int = passed, size: int = size, arrival: Room = arrival) -> None:
                        arrival.left = size - got
                        room.left = max(0, manifest.chunk_bytes - passed - got)
                        progress.words = f"{manifest.full_name}: {part(min(passed + got, total), total)}"

                    began = time.monotonic()
                    await self._get(identity, progress.job, some, failed, tell)
                    self.speed.note(size, time.monotonic() - began)
                    tell(size)
                passed += size
                progress.came += size

        while stack or wanted:
            if stack and len(wanted) < CHUNKS:
                nodes, stack = stack[:NODES], stack[NODES:]
                await have({link.id: link.length for link, _ in nodes})
                links, chunks = await asyncio.to_thread(self._opened_links, nodes, seen, cipher)
                stack = links + stack
                wanted |= chunks
            else:
                batch, wanted = wanted, {}
                await have(batch)

    def _opened_links(
        self, nodes: Sequence[tuple[Link, bool]], seen: set[Link], cipher: StateCipher | None
    ) -> tuple[list[tuple[Link, bool]], dict[bytes, int]]:
        links: list[tuple[Link, bool]] = []
        chunks: dict[bytes, int] = {}
        for link, is_page in nodes:
            if is_page:
                page = self._holdings.store.page(link, cipher)
                links += fresh(links_of(page), seen)
                chunks |= dict(page.chunks)
            else:
                chunks |= dict(self._holdings.store.chunk_list(link, cipher).chunks)
        return links, chunks

    async def _get(
        self,
        identity: bytes,
        whose: Whose,
        missing: Mapping[bytes, int],
        failed: dict[NodeId, str],
        tell: Callable[[int], None],
        urgent: bool = False,
    ) -> None:
        """Fetch some chunks from several holders at once: of those that do not lend now, whose owners may be at work, only what
        the others do not give. FetchFailed if they do not have them all.
        """
        holders = [node for node in self._directory.holders(identity) if node not in failed]
        random.shuffle(holders)  # small fetches ask the first ones alone
        lending = [node for node in holders if self._directory.lends(node)]
        spared = [node for node in holders if node not in lending]
        swarm = self._swarm(identity, whose, failed, urgent)
        if not holders and not swarm.nodes():
            why = "; ".join(dict.fromkeys(failed.values())) or "no node that is there has it whole"
            raise FetchFailed(f"{self._directory.known[identity].full_name}: {why}")

        async def pull(request: Request) -> Pulled:
            if not urgent:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._calm.wait(), COMING_S)
            return await self._pull(identity, whose(), request)

        def fault(source: NodeId, error: BaseException) -> str | None:
            if isinstance(error, CorruptChunk):
                self._blame(source, f"of data set {identity.hex()[:12]}, {error}")
            if not isinstance(error, PeerError | CorruptChunk | TimeoutError | OSError):
                return None
            failed[source] = str(error) or "no answer in time"
            return failed[source]

        size, problem = sum(missing.values()), ""
        for sources in [some for some in (lending, spared) if some] or [[]]:
            left = await asyncio.to_thread(self._holdings.store.missing, list(missing)) if problem else list(missing)
            wanted = {one: missing[one] for one in left}

            def told(got: int, before: int = size - sum(wanted.values())) -> None:
                tell(before + got)

            plan = Fetch(wanted, sources[:SOURCES], urgent or self.streamed[identity] > 0, random.Random())
            if not urgent:
                self._plans[identity] = plan
            try:
                problem = await fetched_chunks(plan, pull, fault, told, swarm)
            finally:
                if not urgent:
                    del self._plans[identity]
            if not problem:
                return
        raise FetchFailed(problem)

    def _swarm(self, identity: bytes, whose: Whose, failed: Mapping[NodeId, str], urgent: bool) -> Swarm:
        """Return those who fetch the same data set. One that has nothing of what is urgent is not asked about that again."""

        def nodes() -> list[NodeId]:
            there = [node for node in self._directory.fetching(identity) if node not in failed]
            return random.sample(there, len(there))

        async def ask(node: NodeId, ids: Sequence[bytes]) -> set[bytes]:
            query, path = encode_missing_query(MissingQuery(tuple(ids))), _path(identity, "missing", whose())
            answer = await self._peers.call(node, "POST", path, query, timeout_s=ASK_S, answer_bytes=QUERY_BYTES)
            try:
                has = set(ids).difference(decode_ids(answer))
            except ValueError as error:
                raise PeerError(f"node {short_id(node)} does not say which chunks it lacks: {error}") from error
            if urgent and not has:
                raise PeerError(f"node {short_id(node)} does not have it yet")
            return has

        return Swarm(nodes, ask)

    async def _pull(self, identity: bytes, job: bytes | None, request: Request) -> Pulled:
        realm = self._directory.known[identity].realm
        receiver = await asyncio.to_thread(self._holdings.store.receive, max_stream_bytes(request.ids), realm)
        path = _path(identity, "chunks", job)
        coming = asyncio.get_running_loop().create_future()
        self._coming |= dict.fromkeys(request.ids, coming)

        def over(_: object = None) -> None:
            self._coming = {one: other for one, other in self._coming.items() if other is not coming}
            coming.set_result(None)

        try:
            body = encode_chunk_request(ChunkRequest(request.ids))
            arrived, finish = await pulled(self._peers, request, path, body, receiver)
        except BaseException:
            over()
            raise
        finish.add_done_callback(over)
        return arrived, finish


def _path(identity: bytes, what: str, job: bytes | None) -> str:
    return f"/v1/data/{identity.hex()}/{what}" + (f"?job={job.hex()}" if job is not None else "")
