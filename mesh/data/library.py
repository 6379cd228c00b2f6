"""The data sets of this node: adding, removing and checking them, and giving them to guests.

A shell around what the mesh has (`directory`), what is here (`holdings`), how it comes here (`fetcher`), what goes (`space`), and
who can read it (`keys`). A node that has all of a data set announces that and gives it on; so does one that fetches it.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from ckptstore.cipher import StateCipher
from ckptstore.dataset import Link
from ckptstore.dataset_store import batches
from ckptstore.errors import Stopped, StoreError
from membership.envelope import seal
from membership.identity import STATE_FILES, Identity, NodeId
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.data.cache_files import MAX_ENTRIES, Grown, merge
from mesh.data.directory import DataDirectory
from mesh.data.fetcher import CHUNKS, TELL_S, DataFetcher, Tell
from mesh.data.holdings import Holdings
from mesh.data.keys import DataKeys
from mesh.data.manifest import (
    FORMAT_VERSION,
    GROUP,
    KIND,
    SECTION,
    DataError,
    DataManifest,
    FetchFailed,
    Group,
    Held,
    Reader,
    check_name,
    data_id,
    encode_announced,
    encode_manifest,
    statement,
)
from mesh.data.space import Space
from mesh.data.streams import LEAST_BYTES, Guest, MountFailed, Stream, Streams
from mesh.data.streams import problem as streaming_problem
from mesh.model.spec import DataNeed
from mesh.rpc.client import PeerClient
from mesh.util import trees
from mesh.util.byte_text import amount, part
from mesh.util.text import plural
from placement.advert import MAX_IMAGES
from placement.filters import DataOffer
from placement.request import SHORT_ID

ANNOUNCE_TTL_S = 3600.0
LOOK_S = 2.0  # between looks at what others announce (own choice)
TIDY_S = 60.0
FETCH = "fetch"
CACHE_FILES = "cache.making"  # below `trees`, where a start or `mesh down` removes what a kill has left

log = logging.getLogger(__name__)

T = TypeVar("T")
BringsKey = Callable[[], Awaitable[bytes]]  # returns the key of a data set; empty if the job brings none
Check = Callable[[], None]  # to be called often; raises Stopped once the work is to end


class Work:
    """Something that is being done with a data set, in the background. `words`: how far it is."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.words = ""
        self.result: dict[str, object] = {}
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


class Brought(NamedTuple):
    """A data set's files for a guest, in a directory. `stream`: if it is still being fetched. `lent`: names the job's key."""

    need: DataNeed
    path: Path
    guest: Guest
    stream: Stream | None = None
    lent: bytes = b""


class OwnCopy(NamedTuple):
    """A new directory for a copy of a data set that its guest may change, of at most so many bytes."""

    path: Path
    limit_bytes: int


class Cache(NamedTuple):
    """A cache to sign. `before`: the newest version that its new one was made from; it may be the cache's removal."""

    before: bytes | None


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
        self.paths = dict(paths)
        self._identity, self._trust, self._membership, self._changed = identity, trust, membership, changed
        self.directory = DataDirectory(trust, membership, peers, self._needs, blame, self._heard)
        self.keys = DataKeys(root / "keys", identity, trust, membership, peers, self.directory)
        self.holdings = Holdings(root, quota_bytes, self.directory, self.keys.known)
        self.space = Space(identity.node_id, self.holdings, self.directory, peers, keep_s, self._announce)
        self.fetcher = DataFetcher(
            self.holdings, self.directory, self.space, peers, self.keys.cipher, blame, self._announce, self._arrived
        )
        self.streams = Streams(self.holdings, self.fetcher)
        self.works: dict[tuple[str, str], Work] = {}
        self._adding = asyncio.Semaphore(1)
        self._making = WeakValueDictionary[bytes, asyncio.Lock]()  # while the files of a data set are made
        self._announced, self._announced_at = b"", 0.0

    # --- life

    async def open(self) -> None:
        """Open the store, and know again what is in it."""
        await asyncio.to_thread(self.keys.open)
        await self.holdings.open()
        await self.streams.open()
        self._announce()

    async def run(self) -> None:
        tidy_at = time.monotonic() + TIDY_S
        while True:
            await asyncio.sleep(LOOK_S)
            await self.directory.learn()
            await self.holdings.keep_groups(self._membership.credentials.user_key)
            self._announce()
            if time.monotonic() >= tidy_at:
                tidy_at = time.monotonic() + TIDY_S
                await self.space.tidy()

    async def close(self) -> None:
        for work in self.works.values():
            work.task.cancel()
        await asyncio.gather(*(work.task for work in self.works.values()), return_exceptions=True)
        await self.streams.close()
        await self.fetcher.close()
        await self.holdings.close()

    # --- what there is

    def _needs(self, identity: bytes) -> bool:
        return self.holdings.needs(identity) or bool(self.fetcher.words(identity))

    def path_of(self, manifest: DataManifest) -> str | None:
        """Return the owner's directory that stands for a data set on this node."""
        return self.paths.get(manifest.full_name)

    def offer(self) -> DataOffer:
        """Return the advert's part about data sets."""
        here = {one for one in self.holdings.held if self.holdings.is_whole(one)}
        here |= {identity for identity, manifest in self.directory.newest() if self.path_of(manifest) is not None}
        newest = sorted(here, key=lambda one: -self.directory.known[one].number)[:MAX_IMAGES]
        names = sorted(name for name in self.paths if "/" not in name)
        return DataOffer(
            tuple(sorted(identity[:SHORT_ID] for identity in newest)), tuple(names), self.fetcher.speed.mib_s
        )

    async def _heard(self, manifest: DataManifest) -> None:
        """Drop what its owner has removed; `tidy` drops what guests still use."""
        identity = self.directory.newest_of(manifest.key)
        assert identity is not None
        if not self.directory.known[identity].removes:
            return
        if versions := self.holdings.versions(manifest.key, identity):
            await self.holdings.keep_statement(identity)
        for old in versions:
            if await self.holdings.drop(old):
                log.info("data set %s is dropped: its owner has removed it", manifest.full_name)

    def _announce(self) -> None:
        """Publish what is here, newest first, when it changes and before it expires; of groups those of this user first."""
        rows, groups = list[Held](), list[Held]()
        for identity in self.holdings.held - self.holdings.damaged:
            manifest = self.directory.known[identity]
            row = Held(identity, manifest.user_key, manifest.user, manifest.name, manifest.number)
            (groups if manifest.is_group else rows).append(row)
        coming = self.fetcher.coming()
        rows.sort(key=lambda held: (-held.number, held.id))
        groups.sort(key=lambda held: (held.user_key != self._membership.credentials.user_key, -held.number, held.id))
        body = encode_announced(rows, coming, groups)
        now = time.monotonic()
        if body != self._announced or now - self._announced_at > ANNOUNCE_TTL_S / 4:
            if self._announced or rows or coming or groups:
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

    async def stop(self, work: Work) -> None:
        """End something in the background; what has come of it is kept for a while. What was fetched to be kept is not pinned."""
        work.task.cancel()
        await asyncio.wait([work.task])
        if work.kind == FETCH and not self.holdings.is_here(bytes.fromhex(work.name)):
            self.holdings.pin(bytes.fromhex(work.name), False)

    def add(self, name: str, path: Path, readers: tuple[Reader | Group, ...], everybody: bool, rehash: bool) -> Work:
        """Add a directory or file as the newest version of one of this user's data sets. DataError, at the latest when the state
        directory of a node is found in it.

        It is encrypted unless it is for everybody.
        """
        check_name(name)
        state, real = self.holdings.root.resolve().parent, path.resolve()
        if state.is_relative_to(real):
            raise DataError(
                f"{path} holds {state}, the state of this node with its key: name the directory with the data"
            )
        if any(all((above / file).exists() for file in STATE_FILES) for above in (real, *real.parents)):
            raise DataError(f"{path} is in the state directory of a node: name the directory with the data")
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

    async def write_back(self, name: str, restore: Callable[[Path], Awaitable[object]], had: bytes = b"") -> Grown:
        """Add what a job has added to one of this user's caches as its next version; return what is new in that.

        `restore` writes it to a new directory. `had`: the version that the job had, if there was one. FetchFailed, DataError,
        StoreError, OSError; the version before stands then.
        """
        place, own = self.holdings.store.trees / CACHE_FILES, self._membership.credentials
        async with self._adding:
            await asyncio.to_thread(trees.remove, place)
            try:
                place.mkdir(mode=0o700)
                await restore(place / "added")
                found = await self.directory.resolve(name)
                before = self._own_newest(name)
                if found is None:
                    if had and before is None:  # this node has started since, and nobody who has it is there
                        raise FetchFailed(f"no node that is there says what is in {name} now")
                    (place / name).mkdir()
                elif not found[1].cache:
                    raise DataError(f"{found[1].full_name} is no cache: it was added with `mesh data add`")
                else:
                    need = DataNeed(found[1].full_name, found[0], cache=True)
                    copy = OwnCopy(place / name, shutil.disk_usage(place).free // 2)
                    guest = Guest(None, lambda words: log.info("cache %s: %s", name, words))
                    await self.release(
                        await self.bring(need, _no_key, own.user_key, guest, lambda words: None, False, copy)
                    )
                grown = await asyncio.to_thread(merge, place / "added", place / name)
                if grown.files:
                    await self._add(Work("add", name), name, place / name, (), False, False, Cache(before))
                return grown
            finally:
                await asyncio.to_thread(trees.remove, place)

    async def _add(
        self,
        work: Work,
        name: str,
        path: Path,
        readers: tuple[Reader | Group, ...],
        everybody: bool,
        rehash: bool,
        cache: Cache | None = None,
    ) -> None:
        from ckptstore.dataset_adder import Added, Adder, Progress  # late: it needs zstd

        users = [one.key for one in readers if isinstance(one, Reader)]
        groups = [one for one in readers if isinstance(one, Group)]

        async def drawn() -> StateCipher:
            return await asyncio.to_thread(self.keys.for_version, name, users, groups)

        cipher = None if everybody else await drawn()

        def read(check: Check) -> Added:
            def tell(progress: Progress) -> None:
                check()
                work.at(f"{progress.files} files, {amount(progress.bytes)}, {amount(progress.read)} of that read")

            return Adder(self.holdings.store, tell, rehash, cipher, () if cache is not None else STATE_FILES).add(path)

        begun = time.monotonic()
        with self.holdings.store.working():
            added = await _finished(read)
            work.at("is signed")
            if cipher is not None and cipher.key != (await drawn()).key:
                raise DataError(
                    "somebody who could have its key was left out or was revoked meanwhile: add it again, with another key"
                )
            if cache is not None and self._own_newest(name) != cache.before:
                raise DataError("another node has added to it meanwhile, or it was removed")
            sealed = self._sign(name, added.root, readers, everybody, added.chunk_bytes, cipher, cache is not None)
            identity = data_id(sealed)
            manifest = self.directory.opened(identity, sealed)
            await asyncio.to_thread(self.holdings.pin, identity, True)  # first: a crash must not leave it unpinned
            await asyncio.to_thread(self.holdings.store.publish, identity, sealed, added.root, cipher)
        self._arrived(identity, sealed, manifest)
        work.result = {
            "id": identity.hex(),
            "bytes": added.root.size,
            "files": added.root.entries,
            "read_bytes": added.read_bytes,
            "new_bytes": added.new_bytes,
            "seconds": round(time.monotonic() - begun, 3),
        }
        for old in self.holdings.versions(manifest.key, identity):
            self.holdings.pin(old, False)

    def _sign(
        self,
        name: str,
        root: Link | None,
        readers: tuple[Reader | Group, ...],
        everybody: bool,
        chunk_bytes: int = 0,
        cipher: StateCipher | None = None,
        cache: bool = False,
    ) -> bytes:
        own, now, newest = self._membership.credentials, time.time(), self._own_newest(name)
        before = None if newest is None else self.directory.known[newest]
        number = int(now * 1000) if before is None else max(int(now * 1000), before.number + 1)
        users = tuple(one for one in readers if isinstance(one, Reader))
        left_out = 0
        if name.startswith(GROUP):
            stay = before is not None and {one.key for one in before.readers} <= {one.key for one in users}
            left_out = before.left_out if before is not None and stay else number
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
            users,
            everybody,
            b"" if cipher is None else cipher.realm,
            b"" if cipher is None else cipher.prove(statement((own.user_key, name))),
            cache,
            tuple(one for one in readers if isinstance(one, Group)),
            left_out,
        )
        return seal(self._identity, self._trust.mesh_id, KIND, encode_manifest(manifest))

    def _own_newest(self, name: str) -> bytes | None:
        return self.directory.newest_of((self._membership.credentials.user_key, name))

    def _arrived(self, identity: bytes, sealed: bytes, manifest: DataManifest) -> None:
        self.directory.remember(identity, sealed, manifest)
        self.holdings.held.add(identity)
        self.holdings.damaged.discard(identity)
        self.holdings.touch(identity)
        self._announce()

    async def remove(self, manifest: DataManifest) -> None:
        """Sign that a data set of this user is removed, and drop it here; other nodes drop it when they hear of it.

        Where guests use it, it goes after them, by `tidy`.
        """
        identity = self._sign_statement(manifest.name, ())
        await self.holdings.keep_statement(identity)
        for old in self.holdings.versions(manifest.key, identity):
            await self.holdings.drop(old)
        self._announce()

    def _sign_statement(self, name: str, members: tuple[Reader, ...]) -> bytes:
        sealed = self._sign(name, None, members, False)
        identity = data_id(sealed)
        self.directory.remember(identity, sealed, self.directory.opened(identity, sealed))
        return identity

    async def set_group(self, name: str, members: tuple[Reader, ...]) -> None:
        """Sign who is in a group of this user from now on; nobody is in one that is removed. DataError."""
        self._sign_statement(GROUP + name, members)
        await self.holdings.keep_groups(self._membership.credentials.user_key)
        self._announce()

    async def drop_here(self, identity: bytes) -> None:
        """Drop a data set on this node only. FetchFailed if a guest uses it."""
        if not await self.holdings.drop(identity):
            raise FetchFailed("a guest on this node uses it, or it is being verified: wait until that is over")
        self._announce()

    def verify(self, identity: bytes, manifest: DataManifest) -> Work:
        """Read every chunk here, and fetch again those of a data set that are damaged; nothing else of it is removed."""

        async def do(work: Work) -> None:
            from ckptstore.checker import VerifyReport, check_packs

            store = self.holdings.store

            def read(check: Check) -> tuple[VerifyReport, list[tuple[bytes, int]]]:
                def tell(words: str) -> None:
                    check()
                    work.at(words)

                packs = check_packs(store, tell)
                self.holdings.find_damaged()
                return packs, store.missing_of(identity)

            self.holdings.used[identity] += 1  # it stays meanwhile
            try:
                await self.holdings.gone(identity)
                packs, missing = await _finished(read)
                self._announce()
                work.result = {"chunks": packs.chunks, "damaged": packs.bad_chunks, "fetched_again": 0}
                if missing:
                    work.at(f"fetches {plural(len(missing), 'damaged chunk')} again")
                    await self._mend(identity, manifest, missing)
                    work.result["fetched_again"] = len(missing)
            finally:
                await self.holdings.unused(identity)
            await self.holdings.drop_tree(identity)

        return self.begin("verify", manifest.full_name, do)

    async def _mend(self, identity: bytes, manifest: DataManifest, missing: Sequence[tuple[bytes, int]]) -> None:
        """Fetch the chunks that a data set here lacks. FetchFailed; what is here stays."""
        name = manifest.full_name
        try:
            async with self.space.room(sum(length for _, length in missing), name, identity):
                for batch in batches(missing, CHUNKS):
                    await self.fetcher.at_once(identity, None, dict(batch))
        except (FetchFailed, StoreError, OSError) as error:
            raise FetchFailed(
                f"{plural(len(missing), 'chunk')} of {name} cannot be read here, and could not be fetched: {error}. The rest "
                f"stays, and other nodes are not offered it. Give `mesh data verify {name}` again once another node has it, "
                "or, if it is yours, add its files again"
            ) from error
        self.holdings.damaged.discard(identity)
        self._announce()

    def pull(self, identity: bytes, manifest: DataManifest) -> Work:
        """Fetch a data set to this node, whether or not a job needs it."""

        async def do(work: Work) -> None:
            await self.holdings.gone(identity)
            await self.fetcher.fetch(identity, manifest, lambda: None, work.at)

        return self.begin(FETCH, identity.hex(), do)

    # --- for guests

    async def _readable(self, need: DataNeed, user_key: bytes) -> DataManifest:
        """Return the manifest of what a job asks for. FetchFailed if its user may not read that, or nobody gives it."""
        manifest = await self.directory.manifest(need.manifest)
        await self.directory.learn_groups(manifest)
        if not self.directory.may_read(need.manifest, user_key):
            raise FetchFailed(f"data set {manifest.full_name} is not for this job's user")
        return manifest

    async def bring(
        self,
        need: DataNeed,
        key: BringsKey,
        user_key: bytes,
        guest: Guest,
        tell: Tell,
        may_stream: bool,
        copy: OwnCopy | None = None,
    ) -> Brought:
        """Return a data set's files for a guest of a user, until `release`. FetchFailed. `key`: opens what its job brings.

        A large one that is not here is streamed if the guest may take it so and this machine can; else it is fetched first. With
        a `copy` they are written there, and what the guest does with them concerns nobody else.
        """
        own = None if copy is not None else self.paths.get(need.name)
        if own is not None:
            of_the_mesh = "/" in need.name
            if of_the_mesh and not (need.manifest and (await self._readable(need, user_key)).full_name == need.name):
                raise FetchFailed(f"the job does not say which version of {need.name} it may read")
            if not await asyncio.to_thread(Path(own).is_dir):
                raise FetchFailed(f"this node's owner offers {need.name} at a path that is no directory")
            return Brought(need, Path(own), guest)
        if not need.manifest:
            raise FetchFailed(f"this node does not offer data set {need.name}")
        self.holdings.used[need.manifest] += 1
        lent = b""
        try:
            await self.holdings.gone(need.manifest)
            manifest = await self._readable(need, user_key)
            if manifest.realm:
                known = self.keys.known(manifest.realm)
                lent = self.keys.lend(manifest, await key() if known is None else known.key)
            if copy is not None:
                await self._copy(need.manifest, manifest, guest, tell, copy)
                return Brought(need, copy.path, guest, None, lent)
            tree = self.holdings.store.tree(need.manifest)
            if not self.holdings.is_whole(need.manifest) and not tree.exists():
                if may_stream and manifest.chunk_bytes >= LEAST_BYTES and not streaming_problem():
                    try:
                        stream = await self.streams.join(need.manifest, manifest, guest, tell)
                        return Brought(need, stream.path, guest, stream, lent)
                    except MountFailed as error:
                        guest.note(f"{error}: it is fetched first")
                await self.fetcher.fetch(need.manifest, manifest, lambda: guest.job, tell)
            if not tree.exists():
                async with self._making.setdefault(need.manifest, asyncio.Lock()):
                    if not tree.exists():  # it may have been made for another guest meanwhile
                        await self._unpack(need.manifest, manifest, tell)
            self.holdings.touch(need.manifest)
            return Brought(need, tree, guest, None, lent)
        except BaseException as error:
            self.keys.give_back(lent)
            await self.holdings.unused(need.manifest)
            if isinstance(error, StoreError | DataError | OSError):
                raise FetchFailed(f"data set {need.name}: {error}") from error
            raise

    async def _unpack(self, identity: bytes, manifest: DataManifest, tell: Tell) -> None:
        assert manifest.root is not None
        root, what = manifest.root, f"the files of {manifest.full_name}"
        cipher = await self.keys.cipher(identity, manifest)
        tell("makes room")
        size, space = manifest.tree_bytes, self.space
        async with space.room(size, what, identity, root.entries + 1), space.arrival(size, what, identity):
            await _unpacked(
                lambda report: self.holdings.store.make_tree(identity, root, report, cipher), manifest.size, tell
            )

    async def _copy(self, identity: bytes, manifest: DataManifest, guest: Guest, tell: Tell, copy: OwnCopy) -> None:
        root = manifest.root
        if root is None or root.entries > MAX_ENTRIES:
            raise FetchFailed(f"{manifest.full_name} has more than {MAX_ENTRIES} files, or none: it is no cache")
        if manifest.tree_bytes > copy.limit_bytes:
            raise FetchFailed(
                f"the copy of {manifest.full_name} takes {amount(manifest.tree_bytes)}, and there is room for "
                f"{amount(max(0, copy.limit_bytes))} (max_disk_gib, or the disk)"
            )
        if not self.holdings.is_whole(identity):
            await self.fetcher.fetch(identity, manifest, lambda: guest.job, tell)
        cipher = await self.keys.cipher(identity, manifest)
        await _unpacked(
            lambda report: self.holdings.store.copy_tree(copy.path, root, report, cipher), manifest.size, tell
        )
        self.holdings.touch(identity)

    async def release(self, brought: Brought) -> None:
        """A guest that `bring` served is gone."""
        if brought.stream is not None:
            await self.streams.leave(brought.stream, brought.guest)
        self.keys.give_back(brought.lent)
        if brought.need.manifest and (brought.need.cache or brought.need.name not in self.paths):
            await self.holdings.unused(brought.need.manifest)


async def _no_key() -> bytes:
    return b""


async def _unpacked(unpack: Callable[[Callable[[int], None]], object], size: int, tell: Tell) -> None:
    """Unpack in a thread, which reports the bytes done."""
    done = 0

    def work(check: Check) -> None:
        def report(count: int) -> None:
            nonlocal done
            check()
            done = count

        unpack(report)

    await _finished(work, lambda: tell(f"is unpacked: {part(done, size)}"))


async def _finished(work: Callable[[Check], T], report: Callable[[], None] = lambda: None) -> T:
    """Run work in a thread; wait for its end even if cancelled, since it uses the store. What it gets then raises Stopped."""
    stopped = False

    def check() -> None:
        if stopped:
            raise Stopped("nobody waits for it any more, or the daemon stops")

    task = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        while not task.done():
            report()
            await asyncio.wait([task], timeout=TELL_S)
    except BaseException:
        stopped = True
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        task.exception()
        raise
    return task.result()


def _heard(task: asyncio.Task[None]) -> None:
    """Take the task's error, which whoever waits for it gets, too."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("%s: %s", task.get_name(), error)
