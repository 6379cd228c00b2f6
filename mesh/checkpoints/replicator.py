"""Replicator: carries checkpoints between stores; the I/O around `ckptstore.replication` and `ckptstore.fetch`.

A copy asks which chunks are missing, streams those, and hands over the manifest; the peer answers after its fsync. A fetch
does the reverse from several holders at once. A repeated copy sends only what is still missing. Copies go in the background
unless the job has to leave (`departure_transfers.py`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from ckptstore.bandwidth import Bandwidth
from ckptstore.checker import check_packs
from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.fetch import Fetch, Request
from ckptstore.manifest import MAX_MANIFEST_BYTES, decode_manifest, manifest_id
from ckptstore.messages import (
    MAX_IDS_BYTES,
    ChunkRequest,
    MissingQuery,
    decode_ids,
    encode_chunk_request,
    encode_missing_query,
)
from ckptstore.pacing import Background, Pace
from ckptstore.receiver import max_stream_bytes
from ckptstore.replication import CopyTo, Replication, Settled, Substitute
from ckptstore.store import Store
from membership.identity import NodeId, short_id
from mesh.checkpoints.departure_transfers import Departure, Departures, Stream
from mesh.checkpoints.loss_estimate import LossEstimate, Urgency
from mesh.images.messages import decode_fetching
from mesh.journal import Journal
from mesh.model.spec import JobSpec
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.pacing import Cargo, Lane, Wire
from mesh.rpc.parallel_fetch import Pulled, fetched_chunks, pulled
from mesh.rpc.refusals import Refusals
from mesh.rpc.streams import IDLE_S, sliced
from mesh.util.boottime import boot_s
from mesh.util.byte_text import part

COPY_TIMEOUT_S = 3600.0
REFUSED, NOT_FOUND = 403, 404  # HTTP
LOOK_S = 0.5  # between looks at running copies: there may be notice, and its deadline may pass (own choice)
SLOW_AFTER_S, SLOW_BYTES_S = (
    5.0,
    1 << 20,
)  # a peer slower than a tenth of Fast Ethernet gets a second beside it (own choice)

log = logging.getLogger(__name__)

T = TypeVar("T")


class FetchError(RuntimeError):
    """A checkpoint could not be fetched; the text tells which nodes were asked and why each failed.

    `unsure`: the nodes that may have it all the same; the others answered that they do not have it whole.
    """

    def __init__(self, text: str, unsure: Set[NodeId] = frozenset()) -> None:
        super().__init__(text)
        self.unsure = frozenset(unsure)


class Expected(NamedTuple):
    """What a fetched manifest must state: its job and user, and a signer who may have signed it."""

    job: bytes
    user: str
    may_sign: Callable[[NodeId], bool] = lambda signer: True

    @classmethod
    def of(cls, job: bytes, spec: JobSpec) -> "Expected":
        """Return what is expected of all that a job saves: a node that its user lets run it has signed it."""
        return cls(job, spec.user, spec.allows)


class Replicated(msgspec.Struct, frozen=True):
    holders: tuple[NodeId, ...]
    short: str
    substitutes: tuple[Substitute, ...]


class Sent(NamedTuple):
    """The progress of copies: bytes sent, bytes in total, and nodes."""

    sent: int = 0
    size: int = 0
    nodes: int = 0


class Transfer:
    """One copy to one peer, in the background or as a part of a departure."""

    def __init__(self, departure: Departure | None = None, share: Callable[[], float] = lambda: 1.0) -> None:
        self._departure, self._share = departure, share
        self._stack = ExitStack()
        self._lane: Lane | None = None
        self._stream: Stream | None = None
        self._size = 0
        self._came = False
        self._promised_bps: float | None = None

    @property
    def held(self) -> bool:
        """Tell whether this node, not the peer, limits the speed."""
        waits = self._stream is not None and self._stream.waits
        return waits or (self._lane is not None and self._lane.held)

    @property
    def stood_aside(self) -> bool:
        return self._stream is not None and self._stream.stood_aside

    @property
    def sent(self) -> tuple[int, int]:
        """Return bytes sent and in total; both 0 before the stream starts, and once it has failed."""
        if self._lane is not None:
            return min(self._lane.sent, self._size), self._size
        return (self._size, self._size) if self._came else (0, 0)

    @contextmanager
    def lane(self, wire: Wire, cargo: Cargo, promised_bps: float | None) -> Iterator[Lane]:
        """Start the stream, to a peer with this promised speed."""
        self._size, self._promised_bps = cargo.size, promised_bps
        try:
            with self._stack:
                self._lane = wire.lane(self._pace(0), cargo)
                yield self._lane
            self._came = True
        finally:
            self._lane = self._stream = None

    def hurry(self, departure: Departure) -> None:
        """The job has notice: join its departure."""
        self._departure = departure
        if self._lane is not None:
            self._lane.pace = self._pace(self._lane.sent)
            self._lane.tick()

    async def in_turn(self, pieces: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
        async for piece in pieces:
            if self._stream is not None:
                await self._stream.turn()
            yield piece
        if self._stream is not None:
            self._stream.rests()

    def _pace(self, sent: int) -> Pace:
        if self._departure is None:
            return Background(self._share)
        self._stream = self._stack.enter_context(self._departure.stream(self._size, self._promised_bps, sent))
        return self._stream.pace


class Copies:
    """The copies of one checkpoint to several peers."""

    def __init__(self, departures: Departures, share: Callable[[], float] = lambda: 1.0) -> None:
        self._departures, self._share = departures, share
        self._stack = ExitStack()
        self._departure: Departure | None = None
        self.transfers: dict[NodeId, Transfer] = {}

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def transfer(self, peer: NodeId) -> Transfer:
        self.transfers[peer] = Transfer(self._departure, self._share)
        return self.transfers[peer]

    def hurry(self, urgency: Urgency) -> None:
        """All copies must be complete by the deadline."""
        if self._departure is None:
            self._departure = self._stack.enter_context(self._departures.departure(urgency))
            for transfer in self.transfers.values():
                transfer.hurry(self._departure)

    @property
    def sent(self) -> Sent:
        parts = [transfer.sent for transfer in self.transfers.values() if transfer.sent[1]]
        return Sent(sum(sent for sent, _ in parts), sum(size for _, size in parts), len(parts))

    @property
    def over(self) -> bool:
        """Tell whether the deadline has passed."""
        return self._departure is not None and boot_s() >= self._departure.urgency.deadline_s


class Replicator:
    """Sends and fetches checkpoints. `warn` informs the node's owner of peers that send invalid data."""

    def __init__(
        self,
        peers: PeerClient,
        store: Store,
        journal: Journal | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._peers = peers
        self._store = store
        self._journal = journal
        self.bandwidth = Bandwidth() if journal is None else Bandwidth(journal.note_path)
        self.refusals = Refusals(warn)
        self.departures = Departures()

    @property
    def budget_bps(self) -> float | None:
        """Return the limit for background traffic, in bytes per second; None is no limit."""
        return self._peers.wire.budget_bps

    async def restore(self) -> None:
        """Recall the paths measured before a restart."""
        now = time.monotonic()
        for peer, learnt, ago_s in await self._journal.paths() if self._journal is not None else ():
            self.bandwidth.restore(peer, learnt, now - ago_s)

    async def replicate(
        self,
        manifest: bytes,
        chosen: Sequence[NodeId],
        fallback: Sequence[NodeId],
        want: int,
        gone: Mapping[NodeId, str] | None = None,
        loss: LossEstimate | None = None,
        tell: Callable[[Sent], None] = lambda sent: None,
    ) -> Replicated:
        """Bring a checkpoint to the disks of `want` peers, the user's choice first except the nodes that are `gone`; report
        progress. CorruptChunk if a chunk is damaged here: from then on it is missing here, and can be stored or fetched again.

        Copies go in the background until the job of this `loss` estimate gets notice.
        """
        plan = Replication(chosen, fallback, want, gone)
        share = (lambda: 1.0) if loss is None else (lambda: loss.share)
        with Copies(self.departures, share) as copies, ExitStack() as stack:
            if loss is not None:
                stack.enter_context(loss.heard_by(copies.hurry, boot_s()))
            return await self._replicate(plan, manifest, copies, tell)

    async def _replicate(
        self, plan: Replication, manifest: bytes, copies: Copies, tell: Callable[[Sent], None]
    ) -> Replicated:
        size = (await asyncio.to_thread(self._store.manifest, manifest)).total_bytes
        patience_s = SLOW_AFTER_S + size / SLOW_BYTES_S
        clock = asyncio.get_running_loop().time
        running: dict[asyncio.Task[None], NodeId] = {}
        slow_at: dict[NodeId, float] = {}
        actions = plan.start()
        try:
            while True:
                for action in actions:
                    if isinstance(action, Settled):
                        return Replicated(action.holders, action.short, tuple(plan.substitutes))
                    copy = self._copy(action, manifest, copies.transfer(action.peer))
                    task = asyncio.create_task(copy, name=f"copy to {short_id(action.peer)}")
                    running[task] = action.peer
                    slow_at[action.peer] = clock() + patience_s
                pause = max(0.0, min((at - clock() for at in slow_at.values()), default=LOOK_S))
                done, _ = await asyncio.wait(running, timeout=min(LOOK_S, pause), return_when=asyncio.FIRST_COMPLETED)
                tell(copies.sent)
                actions = []
                for task in done:
                    peer = running.pop(task)
                    slow_at.pop(peer, None)
                    error = task.exception()
                    if error is None:
                        actions += plan.durable(peer)
                    elif isinstance(error, CorruptChunk):  # on this disk, so no other peer helps
                        await self._mend(manifest)
                        raise error
                    elif isinstance(error, PeerError | StoreError | TimeoutError | OSError):
                        actions += plan.retry_elsewhere(peer, str(error) or type(error).__name__)
                    else:
                        raise error
                for peer in [peer for peer, at in slow_at.items() if at <= clock()]:
                    if copies.transfers[peer].held:
                        slow_at[peer] = clock() + patience_s
                        continue
                    del slow_at[peer]
                    actions += plan.slow(peer, f"is too slow: it had not taken it after {patience_s:.0f} s")
                if copies.over and not actions:
                    actions = plan.enough("there was no more time")
        finally:
            for task in running:
                task.cancel()

    async def fetch(
        self,
        manifest: bytes,
        holders: Sequence[NodeId],
        expected: Expected,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Fetch a checkpoint with all its chunks into the local store, and report progress; FetchError if no holders have it
        whole, or if it is not as expected: the signer of a manifest may name any job and user, and would choose the quota.
        """
        if await asyncio.to_thread(self._complete, manifest):
            return
        sealed, sources = await self._fetch_manifest(manifest, holders)
        signer, wanted = await asyncio.to_thread(decode_manifest, sealed, self._store.unseal)
        if (expected.job, expected.user) != (wanted.job, wanted.user):
            raise FetchError("it is not of this job and user")
        if not expected.may_sign(signer):
            raise FetchError("it is signed by a node that the job's user does not let run it")
        missing = set(await asyncio.to_thread(self._store.missing, wanted.chunks))
        have = await asyncio.to_thread(self._store.base_candidates, wanted.job) if missing else ()
        plan = Fetch({identity: size for identity, size in wanted.sizes.items() if identity in missing}, sources)
        total = plan.left_bytes
        unsure: set[NodeId] = set()

        async def pull(request: Request) -> Pulled:
            return await self._pull(request, have, wanted.user)

        def fault(source: NodeId, error: BaseException) -> str | None:
            if isinstance(error, CorruptChunk):
                self.refusals.count("chunks", source, f"of what was fetched from it, {error}")
            elif not _lacks_it(error):
                unsure.add(source)
            return str(error) if isinstance(error, PeerError | CorruptChunk | TimeoutError | OSError) else None

        with self._store.wanted(wanted.chunks):
            problem = await fetched_chunks(plan, pull, fault, lambda got: tell(part(got, total)))
            if problem:
                raise FetchError(problem, unsure)
            await asyncio.to_thread(self._store.accept_manifest, sealed, "ignore")

    async def mended(self, manifest: bytes, fetch: Callable[[], Awaitable[object]], read: Callable[[], T]) -> T:
        """Return what `read` returns; if it finds a chunk of the checkpoint damaged here, `fetch` that first."""
        try:
            return await asyncio.to_thread(read)
        except CorruptChunk as error:
            log.warning("%s: what is damaged is fetched again", error)
            await self._mend(manifest)
            await fetch()
            return await asyncio.to_thread(read)

    async def _mend(self, manifest: bytes) -> None:
        """Quarantine what is damaged here of a checkpoint, so that it counts as missing."""
        await asyncio.to_thread(lambda: check_packs(self._store, only=self._store.packs_of(manifest)))

    def _complete(self, manifest: bytes) -> bool:
        try:
            return self._store.has(manifest) and not self._store.missing(self._store.manifest(manifest).chunks)
        except StoreError:
            return False

    async def _fetch_manifest(self, manifest: bytes, holders: Sequence[NodeId]) -> tuple[bytes, list[NodeId]]:
        """Fetch the sealed manifest from the first holder that has it; every holder is a source of chunks until it fails."""
        reasons: list[str] = []
        unsure: set[NodeId] = set()
        if self._store.has(manifest):
            return await asyncio.to_thread(self._store.sealed_manifest, manifest), list(holders)
        for holder in holders:
            try:
                path = f"/v1/manifests/{manifest.hex()}"
                sealed = await self._peers.call(holder, "GET", path, answer_bytes=MAX_MANIFEST_BYTES)
            except PeerError as error:
                reasons.append(str(error))
                unsure |= set() if _lacks_it(error) else {holder}
                continue
            if manifest_id(sealed) != manifest:
                self.refusals.count(
                    "manifests", holder, "it was asked for a checkpoint, and answered with something else"
                )
                reasons.append(f"node {short_id(holder)} answered with something else")
                continue
            return sealed, [holder, *(other for other in holders if other != holder)]
        raise FetchError("; ".join(reasons) or "no node is known to have it", unsure)

    async def _copy(self, action: CopyTo, manifest: bytes, transfer: Transfer) -> None:
        sealed = await asyncio.to_thread(self._store.sealed_manifest, manifest)
        await self.send_chunks(action.peer, manifest, transfer)
        await self._peers.call(action.peer, "PUT", f"/v1/manifests/{manifest.hex()}", sealed)

    async def bring_image(self, peer: NodeId, image: bytes) -> bool:
        """Have a node fetch an image of the mesh's list. True if it has the image, or refuses orders of this node."""
        try:
            answer = await self._peers.call(peer, "POST", f"/v1/images/{image.hex()}/fetch")
            return decode_fetching(answer).here
        except PeerError as error:
            if error.status != REFUSED:
                raise
            return True
        except ValueError as error:
            raise PeerError(f"node {short_id(peer)} answered nonsense: {error}") from error

    async def bring_data(self, peer: NodeId, data: bytes) -> bool:
        """Have a node fetch a data set. True if it has it, or refuses to: it fetches it when the job comes."""
        try:
            return await self._peers.call(peer, "POST", f"/v1/data/{data.hex()}/fetch") == b"whole"
        except PeerError as error:
            if error.status not in {REFUSED, NOT_FOUND}:
                raise
            return True

    async def send_chunks(self, peer: NodeId, manifest: bytes, transfer: Transfer | None = None) -> None:
        """Send `peer` the chunks that it lacks of a checkpoint; it keeps them for a while without the manifest."""
        whole = await asyncio.to_thread(self._store.manifest, manifest)
        chunks, bases = await asyncio.to_thread(self._store.with_bases, whole.chunks)
        question = encode_missing_query(MissingQuery(tuple(chunks), tuple(bases)))
        path = "/v1/chunks/missing"
        answer = await self._peers.call(peer, "POST", path, question, IDLE_S, MAX_IDS_BYTES)
        try:
            missing = set(decode_ids(answer))
        except ValueError as error:
            raise PeerError(f"node {short_id(peer)} answered nonsense: {error}") from error
        wanted = [identity for identity in chunks if identity in missing]
        if wanted:
            size = await asyncio.to_thread(self._store.stream_size, wanted)
            frames = await asyncio.to_thread(self._store.stream, wanted)
            path = f"/v1/chunks?of={whole.user.encode().hex()}&job={whole.job.hex()}"
            async with asyncio.timeout(COPY_TIMEOUT_S + size / self._peers.wire.least_bps):
                cargo, broken = Cargo(whole.kind, peer, whole.job, size), list[StoreError]()
                try:
                    await self._send(peer, path, cargo, sliced(_noting(frames, broken)), transfer or Transfer())
                except PeerError as error:
                    if broken:
                        raise broken[0] from error
                    raise

    async def _send(
        self, peer: NodeId, path: str, cargo: Cargo, pieces: AsyncIterator[memoryview], transfer: Transfer
    ) -> None:
        begun = time.monotonic()
        with transfer.lane(self._peers.wire, cargo, self.bandwidth.promised_bps(peer)) as lane:
            async with lane:
                await self._peers.send(peer, path, transfer.in_turn(pieces), lane)
            if not transfer.stood_aside:
                now = time.monotonic()
                self.bandwidth.record(peer, cargo.size, now - begun, lane.held, now)

    async def _pull(self, request: Request, have: tuple[bytes, ...], user: str) -> Pulled:
        receiver = await asyncio.to_thread(self._store.receive, max_stream_bytes(request.ids), user != self._store.user)
        body = encode_chunk_request(ChunkRequest(request.ids, have))
        return await pulled(self._peers, request, "/v1/chunks/frames", body, receiver)


def _noting(frames: Iterator[memoryview], broken: list[StoreError]) -> Iterator[memoryview]:
    """Yield frames, and note an error of the store, which the client takes for one of the connection."""
    try:
        yield from frames
    except StoreError as error:
        broken.append(error)
        raise


def _lacks_it(error: BaseException) -> bool:
    """Tell whether a peer has answered that it does not have what was asked for."""
    return isinstance(error, PeerError) and error.status == NOT_FOUND
