"""The data sets of this node: what the mesh has, what is here, how it comes here, and what goes.

A shell around the store (`ckptstore.dataset_store`), the manifests and the rules of eviction. Names are found in what nodes
announce; a manifest is taken from whoever has it, since only its owner can have signed it. Chunks come from several holders at
once, as those of checkpoints do, and a node that has all of them announces that and gives them on.
"""

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ckptstore.dataset import Link, links_of
from ckptstore.dataset_store import DataSets
from ckptstore.errors import BadManifest, CorruptChunk, StoreError
from ckptstore.fetch import Fetch, Request
from ckptstore.messages import ChunkRequest, encode_chunk_request
from ckptstore.receiver import max_stream_bytes
from membership.envelope import EnvelopeError, open_envelope, seal
from membership.identity import Identity, NodeId, short_id
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import TrustError, TrustStore
from mesh.data.eviction import LACKS, PINNED, UNPINNED_S, WHOLE, Kept, keepers, may_rely, order
from mesh.data.manifest import (
    FORMAT_VERSION,
    KIND,
    MAX_SEALED,
    SECTION,
    DataError,
    DataManifest,
    Held,
    Reader,
    check_name,
    check_owner,
    data_id,
    decode_announced,
    decode_manifest,
    encode_announced,
    encode_manifest,
)
from mesh.model.spec import DataNeed
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.parallel_fetch import Pulled, fetched, pulled
from mesh.util.byte_text import amount, part
from placement.advert import MAX_IMAGES
from placement.filters import DataOffer
from placement.request import SHORT_ID

ANNOUNCE_TTL_S = 3600.0
LOOK_S = 2.0  # between looks at what others announce (own choice)
LEARNED = 16  # manifests asked for at a look (own choice)
MAX_KNOWN = 4096  # manifests in memory, and refused ones remembered (own choice)
TIDY_S = 60.0
REMOVAL_S = 30 * 86_400.0  # for which a removal is announced: longer than machines are usually off (own choice)
ASK_S = 5.0  # timeout of a short call on a LAN with loaded machines
ASKED = 16  # holders asked whether they keep a data set (own choice)
SOURCES = 8  # holders asked at a time (own choice)
ROUNDS, RETRY_S = (
    4,
    1.0,
)  # without progress until a fetch is given up; wait before the second, doubled then (own choice)
NODES, CHUNKS = 64, 2048  # pages opened, and chunks fetched, at a time: 8 GiB (own choice)
LEAST_FREE = 1 << 30  # bytes that a fetch leaves free on the disk (own choice)
FETCHES = 2  # data sets at a time; more wait (own choice)
TELL_S = 0.5
AGAIN_S = 30.0  # until a refused manifest is asked for again: certificates may have come since (own choice)

log = logging.getLogger(__name__)

T = TypeVar("T")
Tell = Callable[[str], None]


class FetchFailed(RuntimeError):
    """A data set could not be brought here; the text says why."""


class Work:
    """Something that is being done with a data set, in the background. `words`: how far it is."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.words = ""
        self.result: dict[str, object] = {}
        self.stopped = False
        self.source: object = None
        self.task: asyncio.Task[None]

    def at(self, words: str) -> None:
        self.words = words

    @property
    def problem(self) -> str:
        """Return why it failed; empty while it goes on, and if it succeeded."""
        if not self.task.done():
            return ""
        if self.task.cancelled():
            return "it was stopped"
        error = self.task.exception()
        return str(error) or type(error).__name__ if error is not None else ""


class DataLibrary:
    """The data sets of one node.

    `paths`: local directories of the owner's that stand for data sets, by name. `blame` reports a node that sent wrong data;
    `changed` is called when what this node has changes.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int | None,
        keep_s: float,
        paths: Mapping[str, str],
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        peers: PeerClient,
        blame: Callable[[NodeId, str], None],
        changed: Callable[[], None],
    ) -> None:
        self._root, self._quota_bytes, self._keep_s = root, quota_bytes, keep_s
        self.paths = dict(paths)
        self._identity, self._me, self._trust = identity, identity.node_id, trust
        self._membership, self._peers, self._blame, self._changed = membership, peers, blame, changed
        self.known: dict[bytes, DataManifest] = {}
        self._sealed: dict[bytes, bytes] = {}
        self._newest: dict[tuple[bytes, str], bytes] = {}
        self._refused: dict[bytes, tuple[str, float]] = {}  # why, until when it is not asked for again
        self._seen: dict[NodeId, tuple[Record, tuple[Held, ...]]] = {}
        self._held: set[bytes] = set()
        self._used: Counter[bytes] = Counter()
        self._unpinned: dict[bytes, float] = {}  # since when
        self.works: dict[tuple[str, str], Work] = {}
        self._fetches: dict[bytes, Work] = {}
        self._waiting: Counter[bytes] = Counter()
        self._adding, self._fetching, self._making = asyncio.Semaphore(1), asyncio.Semaphore(FETCHES), asyncio.Lock()
        self._freeing = asyncio.Lock()
        self._announced, self._announced_at = b"", 0.0

    # --- life

    async def open(self) -> None:
        """Open the store, and know again what is in it."""
        self.store = await asyncio.to_thread(DataSets, self._root, self._quota_bytes)
        (self._root / "pinned").mkdir(exist_ok=True)
        await asyncio.to_thread(self._reopen)
        self._announce()

    def _reopen(self) -> None:
        entered = self.store.known()
        for identity in self.store.held():
            try:
                sealed = self.store.sealed(identity)
                manifest = self._opened(identity, sealed)
                if manifest.root is not None and identity not in entered:
                    self.store.enter(identity, manifest.root)
            except (DataError, StoreError, OSError) as error:
                log.warning("data set %s is not offered: %s", identity.hex()[:12], error)
                continue
            self._remember(identity, sealed, manifest)
            self._held.add(identity)

    async def run(self) -> None:
        tidy_at = time.monotonic() + TIDY_S
        while True:
            await asyncio.sleep(LOOK_S)
            await self._learn()
            self._announce()
            if time.monotonic() >= tidy_at:
                tidy_at = time.monotonic() + TIDY_S
                await self._tidy()

    async def close(self) -> None:
        works = [*self.works.values(), *self._fetches.values()]
        for work in works:
            work.stopped = True
            work.task.cancel()
        await asyncio.gather(*(work.task for work in works), return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    # --- what there is

    def _opened(self, identity: bytes, sealed: bytes) -> DataManifest:
        """Return a manifest that its owner has signed. DataError."""
        if data_id(sealed) != identity:
            raise DataError("the manifest is not the one that was named")
        try:
            signer, payload = open_envelope(sealed, self._trust.mesh_id, KIND)
            manifest = decode_manifest(payload)
            credentials = self._trust.read_chain(manifest.chain)
        except (EnvelopeError, TrustError) as error:
            raise DataError(f"the data set's owner is not a member of this mesh: {error}") from error
        check_owner(manifest, signer, credentials, self._trust.holder(manifest.user, time.time()))
        return manifest

    def _remember(self, identity: bytes, sealed: bytes, manifest: DataManifest) -> None:
        while len(self.known) >= MAX_KNOWN:
            spare = next((one for one in self.known if one not in self._held and not self._used[one]), None)
            if spare is None:
                break
            del self.known[spare], self._sealed[spare]
            self._newest = {key: one for key, one in self._newest.items() if one != spare}
        self.known[identity], self._sealed[identity] = manifest, sealed
        newest = self._newest.get(manifest.key)
        if newest is None or (self.known[newest].number, newest) < (manifest.number, identity):
            self._newest[manifest.key] = identity

    def claims(self) -> Iterator[tuple[NodeId, Held]]:
        """Yield what the other nodes that are there announce."""
        there = {member.node_id for member in self._membership.members() if member.present}
        for record in self._membership.records(SECTION):
            if record.section != SECTION or record.node not in there or record.node == self._me:
                continue
            seen = self._seen.get(record.node)
            if seen is None or seen[0] is not record:
                try:
                    seen = (record, decode_announced(record.body))
                except DataError as error:
                    log.info("node %s: %s", short_id(record.node), error)
                    seen = (record, ())
                self._seen[record.node] = seen
            for held in seen[1]:
                yield record.node, held

    def holders(self, identity: bytes) -> list[NodeId]:
        """Return the other nodes that say they have a data set whole."""
        return [node for node, held in self.claims() if held.id == identity]

    def is_here(self, identity: bytes) -> bool:
        return identity in self._held and self.known[identity].root is not None

    def sealed(self, identity: bytes) -> bytes | None:
        return self._sealed.get(identity)

    def path_of(self, manifest: DataManifest) -> str | None:
        """Return the owner's directory that stands for a data set on this node."""
        return self.paths.get(manifest.full_name)

    def pinned(self, identity: bytes) -> bool:
        return (self._root / "pinned" / identity.hex()).exists()

    def newest(self) -> list[tuple[bytes, DataManifest]]:
        """Return the newest known version of each data set that is not removed."""
        found = [(identity, self.known[identity]) for identity in self._newest.values()]
        return sorted(
            (one for one in found if one[1].root is not None), key=lambda one: (one[1].full_name, one[1].user_key)
        )

    def is_newest(self, identity: bytes) -> bool:
        return self._newest.get(self.known[identity].key) == identity

    def offer(self) -> DataOffer:
        """Return the advert's part about data sets."""
        here = {one for one in self._held if self.known[one].root is not None}
        here |= {identity for identity, manifest in self.newest() if self.path_of(manifest) is not None}
        newest = sorted(here, key=lambda one: -self.known[one].number)[:MAX_IMAGES]
        names = sorted(name for name in self.paths if "/" not in name)
        return DataOffer(tuple(sorted(identity[:SHORT_ID] for identity in newest)), tuple(names))

    async def resolve(self, name: str) -> tuple[bytes, DataManifest] | None:
        """Return the newest version of `NAME` of this node's user, or of `USER/NAME`; None if there is none."""
        own = self._membership.credentials
        user, slash, last = name.rpartition("/")
        await self._learn((user or own.user, last))
        holder = self._trust.holder(user, time.time()) if slash else None
        key = own.user_key if not slash or user == own.user else holder.key if holder is not None else b""
        identity = self._newest.get((key, last))
        if identity is None or self.known[identity].root is None:
            return None
        return identity, self.known[identity]

    async def _learn(self, wanted: tuple[str, str] | None = None) -> None:
        """Ask for manifests that are announced and newer than those known; of one name (user, name) if it is `wanted`."""
        unknown: dict[bytes, list[NodeId]] = {}
        for node, held in self.claims():
            newest = self._newest.get((held.user_key, held.name))
            if held.id in self.known or (wanted and wanted != (held.user, held.name)):
                continue
            if self._refused.get(held.id, ("", 0.0))[1] > time.monotonic():
                continue
            if newest is None or (self.known[newest].number, newest) < (held.number, held.id):
                unknown.setdefault(held.id, []).append(node)
        some = list(unknown.items())[:LEARNED]
        await asyncio.gather(*(self._ask_manifest(identity, nodes) for identity, nodes in some))

    async def _ask_manifest(self, identity: bytes, nodes: Sequence[NodeId]) -> None:
        for node in nodes[:SOURCES]:
            try:
                sealed = await self._peers.call(
                    node, "GET", f"/v1/data/{identity.hex()}", timeout_s=ASK_S, answer_bytes=MAX_SEALED
                )
                manifest = self._opened(identity, sealed)
            except PeerError as error:
                log.info("data set %s: %s", identity.hex()[:12], error)
                continue
            except DataError as error:
                self._blame(node, f"of data set {identity.hex()[:12]}, {error}")
                while len(self._refused) >= MAX_KNOWN:
                    del self._refused[next(iter(self._refused))]
                self._refused[identity] = (str(error), time.monotonic() + AGAIN_S)
                return
            self._remember(identity, sealed, manifest)
            await self._heard(manifest)
            return

    async def _heard(self, manifest: DataManifest) -> None:
        """Drop what its owner has removed."""
        identity = self._newest[manifest.key]
        if self.known[identity].root is not None:
            return
        for old in [one for one in self._held if self.known[one].key == manifest.key and one != identity]:
            if not self._used[old]:
                log.info("data set %s is dropped: its owner has removed it", manifest.full_name)
                await self._drop(old)
                await asyncio.to_thread(write_sealed, self.store, identity, self._sealed[identity])
                self._held.add(identity)

    def _announce(self) -> None:
        """Publish what is here, newest first, when it changes and before it expires."""
        rows = [
            Held(identity, manifest.user_key, manifest.user, manifest.name, manifest.number)
            for identity in self._held
            for manifest in (self.known[identity],)
        ]
        body = encode_announced(sorted(rows, key=lambda held: (-held.number, held.id)))
        now = time.monotonic()
        if body != self._announced or now - self._announced_at > ANNOUNCE_TTL_S / 4:
            if self._announced or rows:
                self._membership.publish(SECTION, body, ANNOUNCE_TTL_S)
            self._announced, self._announced_at = body, now
            self._changed()

    # --- orders of this node's user

    def begin(self, kind: str, name: str, do: Callable[[Work], Coroutine[Any, Any, None]]) -> Work:
        """Start something in the background, or return what is under way already."""
        work = self.works.get((kind, name))
        if work is None or work.task.done():
            while len(self.works) >= 64 and (over := next((k for k, w in self.works.items() if w.task.done()), None)):
                del self.works[over]
            work = self.works[kind, name] = Work(kind, name)
            work.task = asyncio.create_task(do(work), name=f"{kind} data set {name}")
            work.task.add_done_callback(_heard)
        return work

    def add(self, name: str, path: Path, readers: tuple[Reader, ...], everybody: bool, rehash: bool) -> Work:
        """Add a directory or file as the newest version of one of this user's data sets. DataError."""
        check_name(name)
        source = (path, readers, everybody, rehash)
        going = self.works.get(("add", name))
        if going is not None and not going.task.done() and going.source != source:
            raise DataError(
                f"data set {name} is being added already, from another path or for other readers: wait for that"
            )

        async def do(work: Work) -> None:
            if self._adding.locked():
                work.at("waits until another data set is added")
            async with self._adding:
                await self._add(work, name, path, readers, everybody, rehash)

        work = self.begin("add", name, do)
        work.source = source
        return work

    async def _add(
        self, work: Work, name: str, path: Path, readers: tuple[Reader, ...], everybody: bool, rehash: bool
    ) -> None:
        from ckptstore.dataset_adder import Adder, Progress, Stopped  # it needs numpy

        def tell(progress: Progress) -> None:
            if work.stopped:
                raise Stopped("the daemon stops")
            work.at(f"{progress.files} files, {amount(progress.bytes)}, {amount(progress.read)} of that read")

        begun = time.monotonic()
        with self.store.working():
            added = await _finished(asyncio.to_thread(lambda: Adder(self.store, tell, rehash).add(path)))
            work.at("is signed")
            chunk_bytes = await asyncio.to_thread(self.store.measure, added.root)
            sealed = self._sign(name, added.root, readers, everybody, chunk_bytes)
            identity = data_id(sealed)
            manifest = self._opened(identity, sealed)
            await asyncio.to_thread(self.store.publish, identity, sealed, added.root)
        self._arrived(identity, sealed, manifest)
        await asyncio.to_thread(self.pin, identity, True)
        work.result = {
            "id": identity.hex(),
            "bytes": added.root.size,
            "files": added.root.entries,
            "read_bytes": added.read_bytes,
            "new_bytes": added.new_bytes,
            "seconds": round(time.monotonic() - begun, 3),
        }
        for old in [one for one in self._held if self.known[one].key == manifest.key and one != identity]:
            self.pin(old, False)

    def _sign(
        self, name: str, root: Link | None, readers: tuple[Reader, ...], everybody: bool, chunk_bytes: int = 0
    ) -> bytes:
        own, now = self._membership.credentials, time.time()
        before = self._newest.get((own.user_key, name))
        number = int(now * 1000)
        if before is not None:
            number = max(number, self.known[before].number + 1)
        manifest = DataManifest(
            FORMAT_VERSION,
            name,
            own.user,
            own.user_key,
            self._membership.chain,
            number,
            int(now),
            root,
            chunk_bytes,
            readers,
            everybody,
        )
        return seal(self._identity, self._trust.mesh_id, KIND, encode_manifest(manifest))

    def _arrived(self, identity: bytes, sealed: bytes, manifest: DataManifest) -> None:
        self._remember(identity, sealed, manifest)
        self._held.add(identity)
        self._touch(identity)
        self._announce()

    async def remove(self, manifest: DataManifest) -> None:
        """Sign that a data set of this user is removed, and drop it here; other nodes drop it when they hear of it."""
        sealed = self._sign(manifest.name, None, (), False)
        identity = data_id(sealed)
        gone = self._opened(identity, sealed)
        await asyncio.to_thread(write_sealed, self.store, identity, sealed)
        for old in [one for one in self._held if self.known[one].key == manifest.key]:
            await self._drop(old)
        self._arrived(identity, sealed, gone)

    async def drop_here(self, identity: bytes) -> None:
        """Drop a data set on this node only. FetchFailed if a guest uses it."""
        if self._used[identity]:
            raise FetchFailed("a guest on this node uses it: wait until its job has left")
        await self._drop(identity)
        self._announce()

    async def _drop(self, identity: bytes) -> None:
        """Drop a data set, and free the space of its chunks that no other needs."""
        self._held.discard(identity)
        packs = await asyncio.to_thread(self.store.forget, identity)
        await asyncio.to_thread(self.store.free, time.time(), packs)
        self.pin(identity, False)

    def pin(self, identity: bytes, pinned: bool) -> None:
        mark = self._root / "pinned" / identity.hex()
        if pinned:
            mark.touch()
        elif mark.exists():
            self._unpinned[identity] = time.monotonic()
            mark.unlink(missing_ok=True)

    def verify(self, identity: bytes, manifest: DataManifest) -> Work:
        """Read every chunk of a data set here, and fetch again what is damaged."""

        async def do(work: Work) -> None:
            from ckptstore.checker import check_packs

            if not self._used[identity]:
                await asyncio.to_thread(self.store.drop_tree, identity)  # it is made again at its next use
            packs = await asyncio.to_thread(lambda: check_packs(self.store, work.at))
            missing = await asyncio.to_thread(self.store.missing_of, identity)
            work.result = {"chunks": packs.chunks, "damaged": packs.bad_chunks, "fetched_again": 0}
            if missing:
                work.at(f"{len(missing)} damaged chunks are fetched again")
                self._held.discard(identity)
                await asyncio.to_thread(self.store.forget, identity)  # its other chunks stay for a day
                self._announce()
                await self.fetch(identity, manifest, None, work.at)
                work.result["fetched_again"] = len(missing)

        return self.begin("verify", manifest.full_name, do)

    def pull(self, identity: bytes, manifest: DataManifest) -> Work:
        """Fetch a data set to this node, whether or not a job needs it."""

        async def do(work: Work) -> None:
            await self.fetch(identity, manifest, None, work.at)

        return self.begin("fetch", identity.hex(), do)

    # --- for guests

    async def bring(self, need: DataNeed, job: bytes, tell: Tell = lambda words: None) -> Path:
        """Return a directory with a data set's files on this node, after fetching them if needed. FetchFailed.

        It stays until `release` is called as often as this.
        """
        own = self.paths.get(need.name)
        if own is not None:
            if not await asyncio.to_thread(Path(own).is_dir):
                raise FetchFailed(f"this node's owner offers {need.name} at a path that is no directory")
            return Path(own)
        if not need.manifest:
            raise FetchFailed(f"this node does not offer data set {need.name}")
        self._used[need.manifest] += 1
        try:
            manifest = await self._manifest(need.manifest)
            if not self.is_here(need.manifest):
                await self.fetch(need.manifest, manifest, job, tell)
            assert manifest.root is not None
            root, size = manifest.root, manifest.size
            if not self.store.tree(need.manifest).exists():
                async with self._making:
                    tell("makes room")
                    await self._make_room(size, f"the files of {manifest.full_name}")
                    done = 0

                    def report(count: int) -> None:
                        nonlocal done
                        done = count

                    making = asyncio.create_task(
                        asyncio.to_thread(self.store.make_tree, need.manifest, root, report), name="make a tree"
                    )
                    while not making.done():
                        tell(f"is unpacked: {part(done, size)}")
                        await asyncio.wait([asyncio.shield(making)], timeout=TELL_S)
                    making.result()
            self._touch(need.manifest)
            return self.store.tree(need.manifest)
        except BaseException as error:
            self._used[need.manifest] -= 1
            if isinstance(error, StoreError | DataError | OSError):
                raise FetchFailed(f"data set {need.name}: {error}") from error
            raise

    def release(self, need: DataNeed) -> None:
        """A guest that `bring` served is gone."""
        if need.manifest and need.name not in self.paths:
            self._used[need.manifest] -= 1

    def _touch(self, identity: bytes) -> None:
        with suppress(OSError):
            os.utime(self.store.sets / identity.hex())

    async def _manifest(self, identity: bytes) -> DataManifest:
        if identity not in self.known:
            holders = self.holders(identity)
            if not holders:
                raise FetchFailed("no node that is there has it: `mesh data ls`")
            await self._ask_manifest(identity, holders)
        if identity not in self.known:
            raise FetchFailed(self._refused.get(identity, ("no node gives its manifest", 0.0))[0])
        return self.known[identity]

    # --- fetching

    async def fetch(self, identity: bytes, manifest: DataManifest, job: bytes | None, tell: Tell) -> None:
        """Bring all chunks of a data set here. FetchFailed. It ends when nobody waits for it any more."""
        work = self._fetches.get(identity)
        if work is None or work.task.done():
            work = self._fetches[identity] = Work("fetch", manifest.full_name)
            doing = work
            work.task = asyncio.create_task(
                self._fetch(doing, identity, manifest, job), name=f"fetch data set {manifest.full_name}"
            )
            work.task.add_done_callback(_heard)
        self._waiting[identity] += 1
        try:
            while not work.task.done():
                tell(work.words)
                await asyncio.wait([work.task], timeout=TELL_S)
            if work.task.cancelled():
                raise FetchFailed("the fetch was stopped: this node is leaving")
            work.task.result()
        finally:
            self._waiting[identity] -= 1
            if not self._waiting[identity]:
                work.task.cancel()
                self._fetches.pop(identity, None)

    def fetch_words(self, identity: bytes) -> str:
        """Return how far the fetch of a data set is; empty if none is under way."""
        work = self._fetches.get(identity)
        return work.words if work is not None and not work.task.done() else ""

    async def _fetch(self, work: Work, identity: bytes, manifest: DataManifest, job: bytes | None) -> None:
        work.at("waits until other data sets have come")
        async with self._fetching:
            await self._make_room(manifest.chunk_bytes, manifest.full_name)
            failed: dict[NodeId, str] = {}
            rounds, done = 0, 0
            while True:
                try:
                    with self.store.working():
                        came = await self._round(work, identity, manifest, job, failed, done)
                        assert manifest.root is not None
                        await asyncio.to_thread(self.store.publish, identity, self._sealed[identity], manifest.root)
                    break
                except FetchFailed as error:
                    log.info("data set %s: %s", manifest.full_name, error)
                    came_so_far = int(str(work.result.get("came", 0)))
                    rounds = 1 if came_so_far > done else rounds + 1
                    done = came_so_far
                    if rounds >= ROUNDS:
                        raise
                    work.at(f"waits to be tried again: {error}"[:200])
                    await asyncio.sleep(RETRY_S * 2 ** (rounds - 1))
                except BadManifest as error:
                    raise FetchFailed(f"data set {manifest.full_name} is not valid: {error}") from error
            log.info("data set %s came: %s", manifest.full_name, amount(came))
            self._arrived(identity, self._sealed[identity], manifest)

    async def _round(
        self,
        work: Work,
        identity: bytes,
        manifest: DataManifest,
        job: bytes | None,
        failed: dict[NodeId, str],
        before: int,
    ) -> int:
        """Walk the tree and fetch what is missing, pages first; return the bytes that came."""
        assert manifest.root is not None
        stack, wanted = [(manifest.root, True)], dict[bytes, int]()
        passed, came, total = 0, before, max(1, manifest.chunk_bytes)

        async def have(batch: Mapping[bytes, int]) -> None:
            nonlocal passed, came
            missing = await asyncio.to_thread(self.store.missing, list(batch))
            passed += sum(batch.values()) - sum(batch[one] for one in missing)
            for start in range(0, len(missing), CHUNKS):
                some = {one: batch[one] for one in missing[start : start + CHUNKS]}

                def tell(got: int, passed: int = passed) -> None:
                    work.at(f"{manifest.full_name}: {part(min(passed + got, total), total)}")

                await self._get(identity, job, some, failed, tell)
                passed, came = passed + sum(some.values()), came + sum(some.values())
                work.result["came"] = came

        while stack or wanted:
            if stack and len(wanted) < CHUNKS:
                nodes, stack = stack[-NODES:], stack[:-NODES]
                await have({link.id: link.length for link, _ in nodes})
                links, chunks = await asyncio.to_thread(self._opened_links, nodes)
                stack += links
                wanted |= chunks
            else:
                batch, wanted = wanted, {}
                await have(batch)
        return came

    def _opened_links(self, nodes: Sequence[tuple[Link, bool]]) -> tuple[list[tuple[Link, bool]], dict[bytes, int]]:
        links: list[tuple[Link, bool]] = []
        chunks: dict[bytes, int] = {}
        for link, is_page in nodes:
            if is_page:
                page = self.store.page(link)
                links += links_of(page)
                chunks |= dict(page.chunks)
            else:
                chunks |= dict(self.store.chunk_list(link).chunks)
        return links, chunks

    async def _get(
        self,
        identity: bytes,
        job: bytes | None,
        missing: Mapping[bytes, int],
        failed: dict[NodeId, str],
        tell: Callable[[int], None],
    ) -> None:
        """Fetch some chunks from several holders at once; FetchFailed if they do not have them all."""
        holders = [node for node in self.holders(identity) if node not in failed][:SOURCES]
        if not holders:
            why = "; ".join(dict.fromkeys(failed.values())) or "no node that is there has it whole"
            failed.clear()  # a later round asks them again
            raise FetchFailed(f"{self.known[identity].full_name}: {why}")
        plan = Fetch(missing, holders)
        total = plan.left_bytes
        finishing: list[asyncio.Task[int]] = []  # so that no source waits for this disk

        async def ask(request: Request) -> Sequence[bytes]:
            arrived, finish = await self._pull(identity, job, request)
            finishing.append(finish)
            tell(total - plan.left_bytes)
            return arrived

        def fault(source: NodeId, error: BaseException) -> str | None:
            if isinstance(error, CorruptChunk):
                self._blame(source, f"of data set {identity.hex()[:12]}, {error}")
            if not isinstance(error, PeerError | CorruptChunk | TimeoutError | OSError):
                return None
            failed[source] = str(error) or "no answer in time"
            return failed[source]

        try:
            problem = await fetched(plan, ask, fault)
            if problem:
                raise FetchFailed(problem)
            await asyncio.gather(*finishing)
        finally:
            await asyncio.gather(*finishing, return_exceptions=True)

    async def _pull(self, identity: bytes, job: bytes | None, request: Request) -> Pulled:
        receiver = await asyncio.to_thread(self.store.receive, max_stream_bytes(request.ids))
        path = f"/v1/data/{identity.hex()}/chunks" + (f"?job={job.hex()}" if job is not None else "")
        return await pulled(self._peers, request, path, encode_chunk_request(ChunkRequest(request.ids)), receiver)

    # --- space

    async def _make_room(self, more: int, what: str) -> None:
        """Evict until `more` bytes fit the quota. FetchFailed if they do not, or the disk has no room for them."""
        async with self._freeing:
            free = (await asyncio.to_thread(shutil.disk_usage, self._root)).free
            if free < more + LEAST_FREE:
                raise FetchFailed(f"{what}: {amount(more)} are needed and the disk has {amount(free)} free")
            if self._quota_bytes is None:
                return
            if more > self._quota_bytes:
                quota = amount(self._quota_bytes)
                raise FetchFailed(f"{what}: {amount(more)} are more than this node keeps ({quota}, data_quota_gib)")
            for step in (self._drop_one_tree, self._evict_one, self._await_unpinned, self._evict_one):
                used = await asyncio.to_thread(self.used_bytes)
                while used + more > self._quota_bytes and await step():
                    before, used = used, await asyncio.to_thread(self.used_bytes)
                    if used >= before:  # its packs are still relied on: evicting more would not help now
                        break
            if used + more > self._quota_bytes:
                raise FetchFailed(
                    f"{what}: {amount(more)} are needed; of the {amount(self._quota_bytes)} for data sets (data_quota_gib) "
                    f"{amount(used)} are used by what is pinned, in use, or on no other node"
                )

    def used_bytes(self) -> int:
        """Return the bytes of all packs and trees."""
        trees = [bytes.fromhex(path.name) for path in self.store.trees.iterdir() if len(path.name) == 64]
        return self.store.stored_bytes() + sum(self.known[one].size for one in trees if one in self.known)

    def kept(self) -> list[Kept]:
        """Return what is here, for eviction."""
        sizes = self.store.known()
        found = []
        for identity in self._held:
            if self.known[identity].root is None:
                continue
            with suppress(FileNotFoundError):
                used_unix = (self.store.sets / identity.hex()).stat().st_mtime
                size = sizes[identity].bytes if identity in sizes else 0
                newest = self.is_newest(identity)
                in_use = self._used[identity] > 0
                found.append(Kept(identity, size, used_unix, self.pinned(identity), in_use, not newest))
        return found

    async def _drop_one_tree(self) -> bool:
        """Drop the files of the longest unused set: they can be made again from its chunks."""
        for one in sorted(self.kept(), key=lambda kept: kept.used_unix):
            if not one.in_use and self.store.tree(one.id).exists():
                await asyncio.to_thread(self.store.drop_tree, one.id)
                return True
        return False

    async def _evict_one(self) -> bool:
        """Evict one set that another node keeps; tell whether there was one."""
        for one in order(self.kept()):
            if self._unpinned.get(one.id, 0.0) > time.monotonic() - UNPINNED_S:
                continue
            if await self._is_kept_elsewhere(one.id) and not self._used[one.id] and not self.pinned(one.id):
                log.info("data set %s is evicted: the quota is full", self.known[one.id].full_name)
                await self._drop(one.id)
                self._announce()
                return True
        return False

    async def _await_unpinned(self) -> bool:
        """Wait until what was unpinned a moment ago may be evicted."""
        since = [self._unpinned[one.id] for one in order(self.kept()) if one.id in self._unpinned]
        left = max(since, default=-UNPINNED_S) + UNPINNED_S - time.monotonic()
        if since and left > 0:
            await asyncio.sleep(left)
        return False

    async def _is_kept_elsewhere(self, identity: bytes) -> bool:
        """Ask the holders, those first that come before this node."""
        holders = self.holders(identity)
        before = keepers(identity, self._me, holders)
        for node in [*before, *(node for node in holders if node not in before)][:ASKED]:
            if may_rely(identity, self._me, node, await self._ask_held(node, identity)):
                return True
        return False

    async def _ask_held(self, node: NodeId, identity: bytes) -> bytes:
        with suppress(PeerError):
            return await self._peers.call(node, "GET", f"/v1/data/{identity.hex()}/held", timeout_s=ASK_S)
        return LACKS

    def held_answer(self, identity: bytes) -> bytes:
        """Return what this node answers about a data set."""
        if not self.is_here(identity):
            return LACKS
        return PINNED if self.pinned(identity) else WHOLE

    async def is_last_copy(self, identity: bytes) -> bool:
        """Tell whether no other node confirms that it has a data set whole."""
        answers = [await self._ask_held(node, identity) for node in self.holders(identity)[:ASKED]]
        return not any(answer in {WHOLE, PINNED} for answer in answers)

    async def _tidy(self) -> None:
        """Drop older versions after some days, and what no set needs."""
        now = time.time()
        for one in self.kept():
            if one.superseded and not one.pinned and not one.in_use and one.used_unix < now - self._keep_s:
                log.info("an older version of data set %s is dropped", self.known[one.id].full_name)
                await self._drop(one.id)
        for old in [one for one in self._held if self.known[one].root is None]:
            if self.known[old].created_unix < now - REMOVAL_S:
                await self._drop(old)
        await asyncio.to_thread(self.store.free, now)


def write_sealed(store: DataSets, identity: bytes, sealed: bytes) -> None:
    """Keep the statement that a data set is removed."""
    from membership.durable import write_durably

    write_durably(store.sets / identity.hex(), sealed)


async def _finished(doing: Awaitable[T]) -> T:
    """Wait for a thread's work to its end, even if the wait is cancelled: it uses the store."""
    task = asyncio.ensure_future(doing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _heard(task: asyncio.Task[None]) -> None:
    """Take the task's error, which whoever waits for it gets, too."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("%s: %s", task.get_name(), error)
