"""Orders on data sets, and guests' files: a thread uses the store until it ends, and ends soon once nobody waits for it."""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore import checker, dataset_adder
from ckptstore.cipher import StateCipher
from ckptstore.dataset import Link
from ckptstore.dataset_adder import Adder, Progress
from ckptstore.dataset_store import KEEP_PARTIAL_S, Bundled, DataSets, remove_tree
from ckptstore.errors import QuotaExceeded, Stopped
from ckptstore.fetch import Request
from membership.envelope import OVERHEAD
from membership.identity import STATE_FILES, Identity
from mesh.data import directory, fetcher, space
from mesh.data import library as module
from mesh.data.eviction import LACKS, WHOLE
from mesh.data.holdings import left_in_the_clear
from mesh.data.library import CACHE_FILES, Brought, Cache, Check, DataLibrary, OwnCopy, Work, _finished
from mesh.data.manifest import (
    DataError,
    DataManifest,
    FetchFailed,
    Group,
    Reader,
    decode_announced,
    encode_manifest,
    statement,
)
from mesh.data.streams import Guest, MountFailed
from mesh.model.spec import DataNeed
from placement.request import SHORT_ID
from tests.ckptstore.worlds import feed
from tests.data.test_directory import ADA, BOB, EVE
from tests.data.test_groups import Node

SET, OTHER = b"i" * 32, b"o" * 32
SIZE = 1 << 20
CIPHER, SECRET = StateCipher(b"the key of a private data set..!"), os.urandom(64)


class Endless:
    """Work of ten seconds that reports. `begun` is set with its first report, `ended` by Stopped."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def run(self, report: Callable[[], object]) -> None:
        self.begun.set()
        for _ in range(1000):
            try:
                report()
            except Stopped:
                self.ended.set()
                raise
            time.sleep(0.01)


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[DataLibrary]:
    nobody: Any = SimpleNamespace(
        records=lambda section: [], record=lambda *name: None, members=list, publish=lambda *record: None
    )
    library = DataLibrary(
        tmp_path / "data", 5 * SIZE // 2, 0.0, {}, Identity.generate(), nobody, nobody, nobody, print, lambda: None
    )
    await library.holdings.open()
    yield library
    await library.close()


async def hold(library: DataLibrary, source: Path) -> DataManifest:
    """Have a data set of `SIZE` bytes on the node."""
    source.mkdir()
    (source / "file").write_bytes(os.urandom(SIZE))
    manifest = await add(library.holdings.store, source)
    (library.holdings.store.sets / SET.hex()).write_bytes(bytes(OVERHEAD) + encode_manifest(manifest))
    library.directory.remember(SET, b"sealed", manifest)
    library.holdings.held.add(SET)
    return manifest


async def add(store: DataSets, source: Path) -> DataManifest:
    added = await asyncio.to_thread(lambda: Adder(store, lambda progress: None, False).add(source))
    manifest = DataManifest(1, "pictures", "ada", b"a" * 32, b"", 1, 1, added.root, added.chunk_bytes, (), True)
    await asyncio.to_thread(store.publish, SET, b"sealed", added.root)
    return manifest


def bringing(key: bytes) -> Callable[[], Awaitable[bytes]]:
    async def brings() -> bytes:
        return key

    return brings


async def brought(
    library: DataLibrary, told: Callable[[str], None] = print, identity: bytes = SET, key: bytes = b""
) -> Brought:
    guest = Guest(b"j" * 16, print)
    return await library.bring(DataNeed("ada/pictures", identity), bringing(key), b"b" * 32, guest, told, False)


async def test_order_that_is_cancelled_ends_after_its_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def works(check: Check) -> None:
        begun.set()
        assert go_on.wait(60)

    order = asyncio.create_task(_finished(works))
    assert await asyncio.to_thread(begun.wait, 60)
    try:
        for _ in range(10):
            order.cancel()
            await asyncio.sleep(0)
        assert not order.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await order


async def test_manifest_of_a_set_that_is_fetched_stays_known(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await hold(library, tmp_path / "source")
    other = b"o" * 32
    streamed = b"s" * 32
    for identity in (other, streamed):
        library.directory.remember(identity, b"sealed", manifest)
    library.holdings.used[streamed] += 1
    library.pull(other, manifest)  # nobody has it, so it is tried again
    while not library.fetcher.words(other):
        await asyncio.sleep(0)
    monkeypatch.setattr(directory, "MAX_KNOWN", 3)
    for number in range(4):
        library.directory.remember(bytes([number]) * 32, b"sealed", manifest)
    assert {SET, other, streamed} <= library.directory.known.keys()


async def test_offer_tells_the_speed_of_the_last_fetches(library: DataLibrary) -> None:
    assert library.offer().fetch_mib_s == 0
    library.fetcher.speed.note(1 << 30, 10.0)
    assert library.offer().fetch_mib_s == 102


async def test_fetch_that_its_user_stops_ends_and_is_not_pinned(library: DataLibrary, tmp_path: Path) -> None:
    manifest = await hold(library, tmp_path / "source")
    other = b"o" * 32
    library.directory.remember(other, b"sealed", manifest)
    library.holdings.pin(other, True)
    work = library.pull(other, manifest)  # nobody has it, so it is tried again
    while not library.fetcher.words(other):
        await asyncio.sleep(0)
    await library.stop(work)
    assert work.problem == "it was stopped" and not library.fetcher.words(other)
    assert not library.holdings.pinned(other)
    library.holdings.pin(SET, True)
    await library.stop(library.pull(SET, manifest))
    assert library.holdings.pinned(SET), "it is here"


async def test_daemon_that_stops_ends_an_add(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Endless()
    add = lambda tell: SimpleNamespace(add=lambda path: work.run(lambda: tell(Progress(0, 0, 0))))  # noqa: E731
    monkeypatch.setattr(dataset_adder, "Adder", lambda store, tell, rehash, cipher, private: add(tell))
    library.add("pictures", tmp_path / "source", (), True, False)
    assert await asyncio.to_thread(work.begun.wait, 60)
    await library.close()
    assert work.ended.is_set()


async def test_directory_with_the_key_of_the_node_is_not_added(library: DataLibrary, tmp_path: Path) -> None:
    """A home directory has the state directory in it."""
    (tmp_path / "link").symlink_to(library.holdings.root.parent)
    for path in (library.holdings.root.parent, tmp_path / "link", Path("/")):
        with pytest.raises(DataError, match="the state of this node with its key"):
            library.add("home", path, (), True, False)
    (tmp_path / "state" / "data").mkdir(parents=True)
    (tmp_path / "other").symlink_to(tmp_path / "state")
    library.holdings.root = tmp_path / "other" / "data"
    with pytest.raises(DataError, match="the state of this node with its key"):
        library.add("home", tmp_path / "state", (), True, False)
    assert not library.works


async def test_state_of_no_node_is_added(library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have several, and a home directory copies of some."""
    signed, _ = adding(library, monkeypatch)
    state = tmp_path / "home" / "backup" / "node"
    state.mkdir(parents=True)
    (state / "genesis").touch()
    (state / "data").mkdir()
    for name, path in (("one", tmp_path / "home"), ("two", state / "data")):
        work = library.add(name, path, (), True, False)
        await asyncio.wait([work.task])
        assert not work.problem, "only both files show it"
    (state / "node.key").touch()
    for path in (state, state / "node.key", state / "data"):
        with pytest.raises(DataError, match="in the state directory of a node"):
            library.add("other", path, (), True, False)
    for name in ("one", "other"):
        work = library.add(name, tmp_path / "home", (), True, False)
        await asyncio.wait([work.task])
        assert f"{state} is private" in work.problem
    assert len(signed) == 2


async def test_data_set_is_pinned_before_it_is_there(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between leaves no set of the owner's that may go."""
    (tmp_path / "file").write_bytes(b"x")
    manifest = await add(library.holdings.store, tmp_path / "file")
    monkeypatch.setattr(library, "_sign", lambda *version: b"sealed")
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: manifest)
    pinned: list[bool] = []
    publish = library.holdings.store.publish

    def crash(identity: bytes, sealed: bytes, root: Link, cipher: None) -> None:
        pinned.append(library.holdings.pinned(identity))
        publish(identity, sealed, root, cipher)
        raise OSError("the disk is gone")

    monkeypatch.setattr(library.holdings.store, "publish", crash)
    work = library.add("pictures", tmp_path / "file", (), True, False)
    await asyncio.wait([work.task])
    assert work.problem == "the disk is gone" and pinned == [True]


async def test_daemon_that_stops_ends_a_verification(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Endless()
    monkeypatch.setattr(checker, "check_packs", lambda store, tell: work.run(lambda: tell("on its way")))
    library.verify(SET, await hold(library, tmp_path / "source"))
    assert await asyncio.to_thread(work.begun.wait, 60)
    await library.close()
    assert work.ended.is_set()


async def test_guest_that_goes_ends_the_unpacking_of_its_files(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(library, tmp_path / "source")
    work = Endless()
    make: Any = lambda identity, root, report, cipher: work.run(lambda: report(1))  # noqa: E731
    monkeypatch.setattr(library.holdings.store, "make_tree", make)
    guest = asyncio.create_task(brought(library))
    assert await asyncio.to_thread(work.begun.wait, 60)
    guest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guest
    assert work.ended.is_set() and not library.holdings.used[SET]


async def test_data_set_that_is_unpacked_for_long_holds_up_no_other(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await hold(library, tmp_path / "source")
    library.holdings.store.quota_bytes = None
    work = Endless()
    make: Any = lambda identity, root, report, cipher: work.run(lambda: report(1))  # noqa: E731
    real = library.holdings.store.make_tree
    monkeypatch.setattr(library.holdings.store, "make_tree", make)
    slow = asyncio.create_task(brought(library))
    assert await asyncio.to_thread(work.begun.wait, 60)
    monkeypatch.setattr(library.holdings.store, "make_tree", real)
    library.directory.known[OTHER] = manifest
    library.holdings.held.add(OTHER)
    assert (await brought(library, identity=OTHER)).path.is_dir() and not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_guests_that_start_together_share_the_files_of_a_set(library: DataLibrary, tmp_path: Path) -> None:
    """There is room for the chunks and one copy of the files."""
    await hold(library, tmp_path / "source")
    told: list[str] = []
    paths = {one.path for one in await asyncio.gather(*(brought(library, told.append) for _ in range(3)))}
    assert len(paths) == 1 and (paths.pop() / "file").stat().st_size == SIZE
    assert library.holdings.used[SET] == 3 and told.count("makes room") == 1
    assert any(words.startswith("is unpacked: ") for words in told)


async def test_directory_for_a_data_set_is_for_its_readers(library: DataLibrary, tmp_path: Path) -> None:
    """Regression: where the owner offered a directory for it, every job that named a private data set read that."""
    manifest = await hold(library, tmp_path / "source")
    name, reader = manifest.full_name, manifest.user_key
    library.directory.known[SET] = msgspec.structs.replace(manifest, everybody=False)
    library.paths[name] = str(tmp_path)
    library.directory.known[OTHER] = msgspec.structs.replace(manifest, name="other", everybody=True)

    async def path(need: DataNeed, user: bytes) -> Path:
        given = await library.bring(need, bringing(b""), user, Guest(b"j" * 16, print), print, False)
        await library.release(given)
        assert not any(library.holdings.used.values())
        return given.path

    assert await path(DataNeed(name, SET), reader) == tmp_path
    for need, user in ((DataNeed(name, SET), b"e" * 32), (DataNeed(name), reader), (DataNeed(name, OTHER), reader)):
        with pytest.raises(FetchFailed, match=r"is not for this job's user|does not say which version"):
            await path(need, user)
    library.paths["mine"] = str(tmp_path)
    assert await path(DataNeed("mine"), b"e" * 32) == tmp_path, "a name of the owner's own is for all"


async def test_set_with_more_files_than_the_disk_has_inodes_for_is_refused(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a file and its directory."""
    await hold(library, tmp_path / "source")
    blocks = dict.fromkeys(("f_frsize", "f_blocks", "f_bfree", "f_bavail"), 1 << 30)
    full = SimpleNamespace(f_files=1 << 20, f_favail=space.LEAST_INODES + 1, **blocks)
    monkeypatch.setattr(space.os, "statvfs", lambda path: full)
    with pytest.raises(FetchFailed, match="the files of ada/pictures: they are 2, and the disk has inodes for 1 more"):
        await brought(library)
    assert not list(library.holdings.store.trees.iterdir()) and not library.holdings.used[SET]
    full.f_favail += 1
    assert (await brought(library)).path.is_dir()


async def test_guest_that_comes_while_the_files_of_a_set_are_dropped_gets_new_ones(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(library, tmp_path / "source")
    await library.release(await brought(library))
    begun, go_on, drop_tree = threading.Event(), threading.Event(), library.holdings.store.drop_tree

    def slow(identity: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        drop_tree(identity)

    monkeypatch.setattr(library.holdings.store, "drop_tree", slow)
    dropping = asyncio.create_task(library.space._drop_one_tree())
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        guest = asyncio.create_task(brought(library))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not guest.done() and library.holdings.used[SET] == 1, "the next removal finds it in use"
    finally:
        go_on.set()
    path = (await guest).path
    assert await dropping and (path / "file").exists()
    assert not await library.space._drop_one_tree() and (path / "file").exists(), "a guest uses them"


@pytest.mark.parametrize("removal", ["drop", "drop_tree"])
async def test_removal_goes_on_if_nobody_waits_for_it(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removal: str
) -> None:
    """A guest that comes waits for its end, and so does the end of the daemon; nothing else is removed meanwhile."""
    await hold(library, tmp_path / "source")
    await library.release(await brought(library))
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    holdings, drop_tree = library.holdings, library.holdings.store.drop_tree

    def slow(identity: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        drop_tree(identity)
        ended.set()
        raise OSError("the disk is gone")

    monkeypatch.setattr(holdings.store, "drop_tree", slow)
    dropping = asyncio.create_task(getattr(holdings, removal)(SET))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        assert not await holdings.drop(SET) and not await holdings.drop_tree(SET)
        guests = [asyncio.create_task(holdings.gone(SET)) for _ in range(2)]
        dropping.cancel()
        guests[0].cancel()
        closing = asyncio.create_task(holdings.close())
        for _ in range(10):
            await asyncio.sleep(0)
        assert dropping.cancelled() and not guests[1].done() and not closing.done() and not ended.is_set()
    finally:
        go_on.set()
    await guests[1]
    await closing
    assert ended.is_set()
    with pytest.raises(sqlite3.ProgrammingError):
        holdings.store.known()


async def test_files_that_cannot_be_removed_fail_no_guest(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold_encrypted(library, tmp_path / "source")
    guest = await brought(library, key=CIPHER.key)

    def fail(identity: bytes) -> None:
        raise OSError("the disk is read-only")

    with monkeypatch.context() as patched:
        patched.setattr(library.holdings.store, "drop_tree", fail)
        await library.release(guest)
    assert not library.holdings.used[SET] and library.keys.known(CIPHER.realm) is None


async def test_what_is_used_and_may_go_is_counted(library: DataLibrary, tmp_path: Path) -> None:
    manifest = await hold(library, tmp_path / "source")
    holdings, store = library.holdings, library.holdings.store
    mark = store.sets / SET.hex()
    os.utime(mark, (1, 1))
    guest = await brought(library)
    assert mark.stat().st_mtime > 1, "its use is noted"
    used = holdings.used_bytes()
    assert used == store.stored_bytes() + manifest.tree_bytes and holdings.evictable_bytes() == 0
    for other in (OTHER.hex(), "cache.making"):
        (store.trees / other).mkdir()
    assert holdings.used_bytes() == used
    await library.release(guest)
    assert holdings.evictable_bytes() >= used, "encoded, it may take more than its bytes"
    holdings.pin(SET, False)
    assert not holdings.unpinned, "it was not pinned"
    holdings.damaged.add(SET)
    holdings.find_damaged()
    assert holdings.is_whole(SET)
    mark.unlink()
    assert holdings.kept() == [], "it goes at this moment"


async def test_damage_is_not_looked_for_while_a_pack_is_salvaged(library: DataLibrary, tmp_path: Path) -> None:
    await hold(library, tmp_path / "source")
    looked = threading.Event()

    def look() -> None:
        library.holdings.find_damaged()
        looked.set()

    with library.holdings.store.mending:
        index = library.holdings.store.index
        library.holdings.store.index = SimpleNamespace(missing=list)  # type: ignore[assignment]
        looking = asyncio.create_task(asyncio.to_thread(look))
        assert not await asyncio.to_thread(looked.wait, 0.2)
        library.holdings.store.index = index
    await looking
    assert not library.holdings.damaged


async def test_set_that_its_owner_removes_goes_once_no_guest_uses_it(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await hold(library, tmp_path / "source")
    guest = await brought(library)
    removal = DataManifest(1, "pictures", "ada", b"a" * 32, b"", 2, int(time.time()))
    monkeypatch.setattr(library, "_sign", lambda *version: b"removal")
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: removal)
    library.holdings.pin(SET, True)
    await library.remove(manifest)
    await library.space.tidy()
    assert (guest.path / "file").exists() and library.holdings.is_here(SET)
    with pytest.raises(FetchFailed, match="a guest on this node uses it"):
        await library.drop_here(SET)
    await library.release(guest)
    await library.space.tidy()
    assert not guest.path.exists() and not library.holdings.store.has(SET) and not library.holdings.pinned(SET)
    (statement,) = library.holdings.held
    assert library.directory.known[statement] == removal and not library.holdings.is_here(statement)
    with pytest.raises(FetchFailed, match="no node that is there has it"):
        await brought(library, identity=OTHER)


async def test_damaged_chunk_costs_neither_the_set_nor_the_files_of_a_guest(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only copy keeps what is intact, after a restart, too. Once another node has the set, what is damaged comes from it."""
    manifest = await hold(library, tmp_path / "source")
    other = DataSets(tmp_path / "other")
    await add(other, tmp_path / "source")
    holdings, store = library.holdings, library.holdings.store
    guest = await brought(library)
    inode = (guest.path / "file").stat().st_ino
    pack = max(store.packs.iterdir(), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)
        file.seek(SIZE // 2)
        file.write(bytes([byte[0] ^ 1]))
    said = list[bool]()
    monkeypatch.setattr(library, "_announce", lambda: said.append(holdings.is_whole(SET)))
    work = library.verify(SET, manifest)
    await asyncio.wait([work.task])
    assert said == [False], "it is not offered any more"
    assert "1 chunk of ada/pictures cannot be read here" in work.problem
    assert "Give `mesh data verify ada/pictures` again once another node has it" in work.problem
    assert (guest.path / "file").stat().st_ino == inode and (await brought(library)).path == guest.path
    await asyncio.to_thread(store.free, time.time() + 2 * KEEP_PARTIAL_S)
    lacks = store.missing_of(SET)
    assert len(lacks) == 1 < len(store.members.of(SET)) and store.has(SET)
    assert holdings.is_here(SET) and library.space.held_answer(SET) == LACKS

    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: manifest)
    holdings.held, holdings.damaged = set(), set()
    await asyncio.to_thread(holdings._reopen)
    assert holdings.is_here(SET) and not holdings.is_whole(SET)

    asked: list[bytes] = []

    async def pulled(peers: object, request: Request, path: str, body: bytes, receiver: Any) -> Any:
        asked.extend(request.ids)
        for data in other.stream(request.ids):
            feed(receiver, data)
        return list(receiver.arrived), asyncio.create_task(asyncio.to_thread(receiver.keep))

    monkeypatch.setattr(fetcher, "pulled", pulled)
    monkeypatch.setattr(library.directory, "holders", lambda identity: [OTHER])
    work = library.verify(SET, manifest)
    await asyncio.wait([work.task])
    assert not work.problem and work.result["fetched_again"] == 1 and asked == [lacks[0][0]]
    assert said[-1], "it is offered again"
    assert library.space.held_answer(SET) == WHOLE and not store.missing_of(SET)
    assert (guest.path / "file").stat().st_ino == inode and holdings.used[SET] == 2
    other.close()


async def test_room_is_made_for_all_that_is_mended_and_unpacked(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, made, fetched = await hold(library, tmp_path / "source"), list[tuple[str, int]](), list[bytes]()

    async def at_once(identity: bytes, job: bytes | None, wanted: dict[bytes, int]) -> None:
        fetched.extend(wanted)

    def noting(name: str) -> Any:
        @asynccontextmanager
        async def note(more: int, *what: Any) -> AsyncIterator[None]:
            made.append((name, more))
            yield

        return note

    for name in ("room", "arrival"):
        monkeypatch.setattr(library.space, name, noting(name))
    monkeypatch.setattr(module, "CHUNKS", 1)
    monkeypatch.setattr(library.fetcher, "at_once", at_once)
    await library._mend(SET, manifest, [(b"1" * 32, 10), (b"2" * 32, 20)])
    assert made == [("room", 30)] and fetched == [b"1" * 32, b"2" * 32]
    await brought(library)
    assert made[1:] == [("room", manifest.tree_bytes), ("arrival", manifest.tree_bytes)]


@pytest.mark.parametrize("order", ["verify", "pull"])
async def test_order_waits_for_a_removal_that_is_under_way(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    manifest, begun = await hold(library, tmp_path / "source"), threading.Event()

    async def fetch(*words: object) -> None:
        begun.set()

    def check(*words: object) -> Any:
        begun.set()
        return SimpleNamespace(chunks=0, bad_chunks=0)

    monkeypatch.setattr(library.fetcher, "fetch", fetch)
    monkeypatch.setattr(checker, "check_packs", check)
    removal = library.holdings._going[SET] = asyncio.get_running_loop().create_future()
    work = getattr(library, order)(SET, manifest)
    try:
        for _ in range(5):
            await asyncio.to_thread(list)
        assert not begun.is_set()
    finally:
        del library.holdings._going[SET]
        removal.set_result(None)
    await asyncio.wait([work.task])
    assert begun.is_set() and not work.problem


async def test_data_set_that_has_come_is_whole_and_told(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, told = await hold(library, tmp_path / "source"), list[bool]()
    mark = library.holdings.store.sets / SET.hex()
    os.utime(mark, (1, 1))
    library.holdings.damaged.add(SET)
    monkeypatch.setattr(library, "_announce", lambda: told.append(library.holdings.is_whole(SET)))
    library._arrived(SET, b"sealed", manifest)
    assert told == [True] and mark.stat().st_mtime > 1, "as of a use, so that it does not go at once"


async def test_groups_are_learnt_before_a_job_is_refused(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, bob = await hold(library, tmp_path / "source"), Group(b"b" * 32, "bob", "vision")
    library.directory.known[SET] = msgspec.structs.replace(manifest, everybody=False, groups=(bob,))
    with pytest.raises(FetchFailed, match="is not for this job's user"):
        await brought(library)

    async def learn(manifest: DataManifest) -> None:
        group = DataManifest(1, "group:vision", "bob", bob.key[0], b"", 1, 1, readers=(Reader(b"b" * 32, "bob"),))
        library.directory.remember(OTHER, b"sealed", group)

    monkeypatch.setattr(library.directory, "learn_groups", learn)
    assert (await brought(library)).path.is_dir()


@pytest.mark.parametrize(
    ("may", "least", "problem", "fails"),
    [
        (True, 1, "", ""),
        (False, 1, "", ""),
        (True, 1 << 40, "", ""),
        (True, 1, "no FUSE", ""),
        (True, 1, "", "no mount"),
    ],
)
async def test_set_is_streamed_if_that_is_worth_it_and_works(
    library: DataLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    may: bool,
    least: int,
    problem: str,
    fails: str,
) -> None:
    await hold_encrypted(library, tmp_path / "source")
    library.holdings.damaged.add(SET)
    stream, noted = SimpleNamespace(path=tmp_path), list[str]()

    async def join(*words: object) -> object:
        if fails:
            raise MountFailed(fails)
        return stream

    async def fetch(*words: object) -> None:
        library.holdings.damaged.discard(SET)

    monkeypatch.setattr(library.streams, "join", join)
    monkeypatch.setattr(library.fetcher, "fetch", fetch)
    monkeypatch.setattr(module, "LEAST_BYTES", least)
    monkeypatch.setattr(module, "streaming_problem", lambda: problem)
    need, guest = DataNeed("ada/pictures", SET), Guest(b"j" * 16, noted.append)
    given = await library.bring(need, bringing(CIPHER.key), b"b" * 32, guest, print, may)
    assert (given.stream is not None) == (may and least == 1 and not problem and not fails)
    assert given.lent == CIPHER.realm and noted == ([f"{fails}: it is fetched first"] if fails else [])


async def test_files_that_no_guest_uses_are_made_again_after_a_verification(
    library: DataLibrary, tmp_path: Path
) -> None:
    manifest = await hold(library, tmp_path / "source")
    guest = await brought(library)
    await library.release(guest)
    work = library.verify(SET, manifest)
    await asyncio.wait([work.task])
    assert not work.problem and not guest.path.exists()


async def test_withdrawn_reader_gets_no_version_that_is_here(library: DataLibrary, tmp_path: Path) -> None:
    manifest = await hold(library, tmp_path / "source")
    assert (await brought(library)).path.is_dir()
    later = msgspec.structs.replace(manifest, number=manifest.number + 1, everybody=False)
    library.directory.known[OTHER], library.directory._newest[manifest.key] = later, OTHER
    with pytest.raises(FetchFailed, match="is not for this job's user"):
        await brought(library)


async def hold_encrypted(library: DataLibrary, source: Path) -> DataManifest:
    """Have a data set of `SIZE` bytes on the node that only its user may read; a job of user b's has the key."""
    source.mkdir()
    (source / "file").write_bytes(SECRET * (SIZE // len(SECRET)))
    store = library.holdings.store
    added = await asyncio.to_thread(lambda: Adder(store, cipher=CIPHER).add(source))
    readers = (Reader(b"b" * 32, "bob"),)
    manifest = DataManifest(
        1,
        "pictures",
        "ada",
        b"a" * 32,
        b"",
        1,
        1,
        added.root,
        added.chunk_bytes,
        readers,
        False,
        CIPHER.realm,
        CIPHER.prove(statement((b"a" * 32, "pictures"))),
    )
    await asyncio.to_thread(store.publish, SET, b"sealed", added.root, CIPHER)
    (library.holdings.store.sets / SET.hex()).write_bytes(bytes(OVERHEAD) + encode_manifest(manifest))
    library.directory.remember(SET, b"sealed", manifest)
    library.holdings.held.add(SET)
    return manifest


def readable(library: DataLibrary) -> list[Path]:
    """Return the files of the node that have the secret."""
    return [path for path in library.holdings.root.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


async def test_files_of_an_encrypted_set_go_with_its_last_guest(library: DataLibrary, tmp_path: Path) -> None:
    await hold_encrypted(library, tmp_path / "source")
    one = await brought(library, key=CIPHER.key)
    two = await brought(library, key=b"its witnesses are not asked, since the key is here")
    assert readable(library) == [one.path / "file"]
    await library.release(one)
    assert readable(library) == [two.path / "file"] and library.keys.known(CIPHER.realm) is not None
    await library.release(two)
    assert not readable(library) and library.holdings.is_whole(SET) and library.keys.known(CIPHER.realm) is None


async def test_files_of_an_encrypted_set_go_if_its_guest_does_not_come_to_start(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is given up in the moment in which all files are there."""
    await hold_encrypted(library, tmp_path / "source")
    made, go_on, real = threading.Event(), threading.Event(), library.holdings.store.make_tree

    def make(*order: Any) -> None:
        real(*order)
        made.set()
        assert go_on.wait(60)

    monkeypatch.setattr(library.holdings.store, "make_tree", make)
    guest = asyncio.create_task(brought(library, key=CIPHER.key))
    assert await asyncio.to_thread(made.wait, 60) and readable(library)
    guest.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await guest
    assert not readable(library) and library.keys.known(CIPHER.realm) is None and not library.holdings.used[SET]


async def test_files_of_an_encrypted_set_that_a_crash_left_go_at_the_next_start(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await hold_encrypted(library, tmp_path / "source")
    await brought(library, key=CIPHER.key)
    library.holdings.store.tree(OTHER).mkdir()
    (library.holdings.store.tree(OTHER) / "of a set that is not here").write_bytes(SECRET)
    assert len(readable(library)) == len(left_in_the_clear(library.holdings.root)) == 2
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: manifest)
    await asyncio.to_thread(library.holdings._reopen)
    assert not readable(library) and library.holdings.is_whole(SET)


@pytest.mark.parametrize("lost", ["table", "chunks"])
async def test_set_is_entered_again_if_its_table_is_lost(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    manifest = await hold(library, tmp_path / "source")
    holdings, store = library.holdings, library.holdings.store
    before = store.known()
    store.members.remove(SET)
    if lost == "chunks":
        store.index.missing = list  # type: ignore[method-assign]
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: manifest)
    holdings.held = set()
    await asyncio.to_thread(holdings._reopen)
    assert holdings.is_here(SET) == (lost == "table")
    assert lost == "chunks" or store.known() == before


async def test_names_of_files_that_a_crash_left_are_found(library: DataLibrary) -> None:
    """They are on the disk while files are made, in a table."""
    table = Bundled(library.holdings.store.tmp)
    table.put(os.fsdecode(b"data/" + SECRET), 0o644, (SET, 1, 0, 1))
    table._db.commit()
    assert readable(library) == left_in_the_clear(library.holdings.root)
    for path in left_in_the_clear(library.holdings.root):  # as `mesh down` does
        remove_tree(path)
    assert not readable(library)


async def test_files_of_a_set_for_everybody_stay(library: DataLibrary, tmp_path: Path, monkeypatch: Any) -> None:
    manifest = await hold(library, tmp_path / "source")
    guest = await brought(library)
    await library.release(guest)
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: manifest)
    await asyncio.to_thread(library.holdings._reopen)
    assert (guest.path / "file").exists()


@pytest.mark.parametrize("key", [b"", b"another key of 32 bytes........!"])
async def test_job_without_the_key_gets_no_files(library: DataLibrary, tmp_path: Path, key: bytes) -> None:
    await hold_encrypted(library, tmp_path / "source")
    own = SimpleNamespace(user_key=b"l" * 32, user="lender")
    library.keys._membership = SimpleNamespace(credentials=own)  # type: ignore[assignment]
    with pytest.raises(FetchFailed, match=r"a job has to bring its key|it is not the key of ada/pictures"):
        await brought(library, key=key)
    assert not readable(library) and not library.holdings.used[SET] and library.holdings.is_whole(SET)


async def test_damage_of_an_encrypted_set_is_found_without_its_key(library: DataLibrary, tmp_path: Path) -> None:
    manifest = await hold_encrypted(library, tmp_path / "source")
    pack = max(library.holdings.store.packs.iterdir(), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    work = library.verify(SET, manifest)
    await asyncio.wait([work.task])
    assert library.keys.known(CIPHER.realm) is None and work.result["damaged"] == 1
    assert "cannot be read here" in work.problem and library.holdings.is_here(SET)


def adding(library: DataLibrary, monkeypatch: pytest.MonkeyPatch) -> tuple[list[DataManifest], set[bytes]]:
    """Let a library add data sets of ada's; return what it signs, and the nodes that are revoked."""
    own, revoked = SimpleNamespace(user_key=b"a" * 32), set[bytes]()
    library.keys._membership = SimpleNamespace(credentials=own)  # type: ignore[assignment]
    library.keys._trust = SimpleNamespace(seen=dict, revoked=revoked)  # type: ignore[assignment]
    signed: list[DataManifest] = []

    def sign(
        name: str,
        root: Link,
        readers: tuple[Reader, ...],
        everybody: bool,
        chunk_bytes: int,
        cipher: StateCipher,
        cache: bool,
    ) -> bytes:
        number, realm = len(signed), b"" if cipher is None else cipher.realm
        signed.append(
            DataManifest(1, name, "ada", b"a" * 32, b"", number, 1, root, chunk_bytes, readers, everybody, realm)
        )
        return bytes([number])

    monkeypatch.setattr(library, "_sign", sign)
    monkeypatch.setattr(library.directory, "opened", lambda identity, sealed: signed[sealed[0]])
    return signed, revoked


async def test_data_set_is_encrypted_unless_it_is_for_everybody(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(SECRET * 100)
    signed, _ = adding(library, monkeypatch)
    for everybody in (False, True):
        work = library.add("pictures", tmp_path / "file", (), everybody, False)
        await asyncio.wait([work.task])
        assert not work.problem
        assert bool(signed[-1].realm) is not everybody and bool(readable(library)) is everybody


async def own_copy(library: DataLibrary, place: Path, limit_bytes: int = 1 << 30) -> Path:
    """Give a guest a copy of its own, as of a cache."""
    need, guest = DataNeed("ada/pictures", SET, cache=True), Guest(b"j" * 16, print)
    copy = OwnCopy(place, limit_bytes)
    given = await library.bring(need, bringing(CIPHER.key), b"a" * 32, guest, print, False, copy)
    await library.release(given)
    return given.path


async def test_copy_of_a_guest_is_its_own(library: DataLibrary, tmp_path: Path) -> None:
    """What a guest does with its copy reaches neither another copy nor the files that guests share; nor does the node keep it."""
    await hold_encrypted(library, tmp_path / "source")
    library.paths = {"ada/pictures": "/etc"}  # it stands for the data set, but not for a cache
    one, two = await own_copy(library, tmp_path / "one"), await own_copy(library, tmp_path / "two")
    assert not readable(library) and not library.holdings.used[SET] and library.keys.known(CIPHER.realm) is None
    with (one / "file").open("r+b") as file:
        file.write(b"changed by a guest")
    (one / "new").touch()
    library.paths = {}
    shared = await brought(library, key=CIPHER.key)
    for root in (two, shared.path):
        assert SECRET in (root / "file").read_bytes() and not (root / "new").exists()
    assert (one / "file").stat().st_nlink == 1
    mark = library.holdings.store.sets / SET.hex()
    os.utime(mark, (1, 1))
    await own_copy(library, tmp_path / "three")
    assert mark.stat().st_mtime > 1, "its use is noted"
    await library.release(shared)


async def test_copy_takes_no_more_than_its_guest_has_left(library: DataLibrary, tmp_path: Path) -> None:
    manifest = await hold_encrypted(library, tmp_path / "source")
    with pytest.raises(FetchFailed, match="max_disk_gib"):
        await own_copy(library, tmp_path / "one", manifest.tree_bytes - 1)
    assert not (tmp_path / "one").exists() and not library.holdings.used[SET]
    assert (await own_copy(library, tmp_path / "one", manifest.tree_bytes)).exists()


@pytest.mark.parametrize("fails", ["no cache", "restore", "add"])
async def test_write_back_that_fails_leaves_nothing(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    manifest, seen = await hold_encrypted(library, tmp_path / "source"), list[str]()
    manifest = msgspec.structs.replace(manifest, cache=fails != "no cache", readers=())
    library.directory.remember(SET, b"sealed", manifest)
    library._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=b"a" * 32))  # type: ignore[assignment]
    monkeypatch.setattr(library.keys, "known", lambda realm: CIPHER)

    async def resolve(name: str) -> tuple[bytes, DataManifest]:
        return SET, manifest

    async def restore(place: Path) -> None:
        if fails == "restore":
            raise OSError("no node gives it")
        place.mkdir()
        (place / "added").write_text("added")

    async def add(work: object, name: str, path: Path, *rest: object) -> None:
        seen.extend(sorted(one.name for one in path.iterdir()))
        assert rest[-1] == Cache(SET)
        raise OSError("the disk is full")

    monkeypatch.setattr(library.directory, "resolve", resolve)
    monkeypatch.setattr(library, "_add", add)
    with pytest.raises(
        (DataError, OSError), match={"no cache": "is no cache", "restore": "no node", "add": "full"}[fails]
    ):
        await library.write_back("pictures", restore)
    assert seen == (["added", "file"] if fails == "add" else [])
    assert not readable(library) and not list((library.holdings.root / "trees").iterdir())
    assert library.holdings.is_whole(SET) and not library.holdings.used[SET]


async def test_write_back_keeps_to_the_quota(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=b"a" * 32))  # type: ignore[assignment]
    monkeypatch.setattr(library.keys, "for_version", lambda name, readers, groups: CIPHER)

    async def resolve(name: str) -> None:
        return None

    async def restore(place: Path) -> None:
        place.mkdir()
        (place / "large").write_bytes(os.urandom(3 * SIZE))

    monkeypatch.setattr(library.directory, "resolve", resolve)
    with pytest.raises(QuotaExceeded, match="data_quota_gib"):
        await library.write_back("filled", restore)
    assert not list((library.holdings.root / "trees").iterdir()) and not library.holdings.held


@pytest.mark.parametrize("root", [None, Link(b"r" * 32, 100, 5, 1)])
async def test_cache_that_has_changed_meanwhile_is_merged_anew(
    library: DataLibrary, monkeypatch: pytest.MonkeyPatch, root: Link | None
) -> None:
    """Else the files that its owner removed would be back, or those that another node added would be gone."""
    signed, _ = adding(library, monkeypatch)
    library._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=b"a" * 32))  # type: ignore[assignment]
    other, real = DataManifest(1, "filled", "ada", b"a" * 32, b"", 7, 1, root, 105, cache=True), Adder.add

    async def resolve(name: str) -> None:
        return None

    async def restore(place: Path) -> None:
        place.mkdir()
        (place / "file").write_bytes(b"new")

    def overtaken(adder: Adder, path: Path) -> Any:
        library.directory.remember(b"other", b"sealed", other)
        return real(adder, path)

    monkeypatch.setattr(library.directory, "resolve", resolve)
    monkeypatch.setattr(library, "_announce", lambda: None)
    monkeypatch.setattr(Adder, "add", overtaken)
    with pytest.raises(DataError, match="added to it meanwhile, or it was removed"):
        await library.write_back("filled", restore)
    assert not signed and not library.holdings.held
    monkeypatch.setattr(Adder, "add", real)
    assert (await library.write_back("filled", restore)).files == 1 and len(signed) == 1


@pytest.mark.parametrize("removed", [False, True])
async def test_cache_begins_anew_only_once_it_is_removed(
    library: DataLibrary, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """A node that was restarted knows only the versions that nodes announce."""
    signed, _ = adding(library, monkeypatch)
    library._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=b"a" * 32))  # type: ignore[assignment]

    async def resolve(name: str) -> None:
        return None

    async def restore(place: Path) -> None:
        place.mkdir()
        (place / "file").write_bytes(b"new")

    monkeypatch.setattr(library.directory, "resolve", resolve)
    monkeypatch.setattr(library, "_announce", lambda: None)
    if removed:
        gone = DataManifest(1, "filled", "ada", b"a" * 32, b"", 7, 1, None, cache=True)
        library.directory.remember(b"gone", b"sealed", gone)
        assert (await library.write_back("filled", restore, SET)).files == 1 and signed
    else:
        with pytest.raises(FetchFailed, match="no node that is there says what is in filled now"):
            await library.write_back("filled", restore, SET)
        assert not signed


async def test_version_that_a_revocation_overtakes_is_not_signed(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading may take hours. The node that is revoked meanwhile may have the key that it began with."""
    (tmp_path / "file").write_bytes(SECRET * 100)
    signed, revoked = adding(library, monkeypatch)
    real = Adder.add

    def overtaken(adder: Adder, path: Path) -> Any:
        revoked.add(b"?" * 32)
        return real(adder, path)

    monkeypatch.setattr(Adder, "add", overtaken)
    first = library.add("pictures", tmp_path / "file", (), False, False)
    await asyncio.wait([first.task])
    assert "was revoked meanwhile: add it again" in first.problem and not signed
    second = library.add("pictures", tmp_path / "file", (), False, False)
    await asyncio.wait([second.task])
    assert not second.problem and signed[-1].realm


# --- with members, certificates and signatures


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.library.open()
    yield node
    await node.library.close()


async def added(node: Node, path: Path, *readers: Reader | Group, everybody: bool = False) -> bytes:
    """Add a data set of ada's, and return its id."""
    work = node.library.add("pictures", path, readers, everybody, False)
    await asyncio.wait([work.task])
    assert not work.problem
    return bytes.fromhex(str(work.result["id"]))


async def test_data_set_of_this_user_is_signed_as_it_is_meant(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SECRET * 100)
    bob, eve = node.user(BOB), node.user(EVE)
    node.hears_group(BOB, "vision", EVE, number=5)
    vision = Group(bob.key, "bob", "vision")
    directory, keys = node.library.directory, node.library.keys
    first = directory.known[await added(node, tmp_path / "file", bob, vision)]
    assert (first.readers, first.groups, first.everybody, first.cache, first.left_out) == ((bob,), (vision,), *[0] * 3)
    assert time.time() - 60 <= first.created_unix <= time.time() and keys.known(first.realm) is not None
    kept = keys._kept[first.realm]
    assert (set(kept.readers), kept.groups) == ({bob.key, eve.key}, ((vision.key, 5),))
    future = node.hears(ADA, "pictures", 10**15)
    third = directory.known[await added(node, tmp_path / "file", everybody=True)]
    assert third.number == 10**15 + 1 > directory.known[future].number, "another machine's clock was ahead"
    assert third.everybody and not third.realm and not third.readers


async def test_data_set_that_goes_is_announced_no_more(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SECRET * 100)
    library, identity = node.library, await added(node, tmp_path / "file")
    await library.drop_here(identity)
    assert not decode_announced(node.announced).sets and not library.holdings.store.has(identity)
    manifest = library.directory.known[again := await added(node, tmp_path / "file")]
    await library.remove(manifest)
    (removal,) = decode_announced(node.announced).sets
    assert removal.number > manifest.number and library.directory.known[removal.id].removes
    assert not library.holdings.store.has(again) and library.holdings.held == {removal.id}


async def test_newest_version_of_this_user_is_pinned_alone(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SECRET * 100)
    old, new = await added(node, tmp_path / "file"), await added(node, tmp_path / "file")
    holdings = node.library.holdings
    assert holdings.held == {old, new} and not holdings.pinned(old) and holdings.pinned(new)


async def test_data_set_of_this_user_is_here_again_after_a_restart(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SECRET * 100)
    identity = await added(node, tmp_path / "file")
    node.library.holdings.store.members.remove(identity)  # what is in it has to be read again, with its key
    await node.library.close()
    with pytest.raises(sqlite3.ProgrammingError):
        node.library.holdings.store.known()
    node.announced = b""
    node.start()
    await node.library.open()
    assert node.library.holdings.is_whole(identity)
    assert [one.id for one in decode_announced(node.announced).sets] == [identity]


async def test_what_is_here_is_announced_when_it_changes_and_before_it_expires(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, said, changes = node.library, list[bytes](), list[None]()
    membership: Any = library._membership
    monkeypatch.setattr(membership, "publish", lambda section, body, ttl_s: said.append(body))
    monkeypatch.setattr(library, "_changed", lambda: changes.append(None))
    library._announce()
    assert not said, "there is nothing to tell"
    old, new = (node.hears(BOB, name, number) for name, number in (("old", 1), ("new", 2)))
    library.holdings.held = {old, new}
    for _ in range(2):
        library._announce()
    assert [one.id for one in decode_announced(said[-1]).sets] == [new, old] and len(said) == len(changes) == 1
    library.holdings.damaged = {old}
    monkeypatch.setattr(library.fetcher, "coming", lambda: [old])
    library._announce()
    told = decode_announced(said[-1])
    assert [one.id for one in told.sets] == [new] and told.coming == (old,) and len(changes) == 2
    begun = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: begun + module.ANNOUNCE_TTL_S / 2)
    for _ in range(2):
        library._announce()
    assert len(said) == 3 and said[2] == said[1]
    monkeypatch.setattr(library.fetcher, "coming", list)
    library.holdings.held = set()
    library._announce()
    assert not decode_announced(said[-1]).sets and len(said) == 4, "the last one has gone"


async def test_offer_has_what_is_whole_here_and_what_the_owner_has_elsewhere(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = node.library
    sets = {name: node.hears(BOB, name, number) for number, name in enumerate(("here", "damaged", "elsewhere", "else"))}
    library.holdings.held = {sets["here"], sets["damaged"]}
    library.holdings.damaged = {sets["damaged"]}
    library.paths = {"bob/elsewhere": str(tmp_path), "else": str(tmp_path)}
    offer = library.offer()
    assert {*offer.data_ids} == {sets["here"][:SHORT_ID], sets["elsewhere"][:SHORT_ID]} and offer.data_paths == (
        "else",
    )
    monkeypatch.setattr(module, "MAX_IMAGES", 1)
    assert library.offer().data_ids == (sets["elsewhere"][:SHORT_ID],), "the newest"


async def test_only_the_newest_word_of_its_owner_removes_a_data_set(node: Node) -> None:
    held, library = node.library.holdings.held, node.library
    held.add(version := node.hears(BOB, "pictures", 3))
    for late in (node.hears(BOB, "pictures", 2, root=None, chunk_bytes=0), node.hears(BOB, "pictures", 4)):
        await library._heard(library.directory.known[late])
        assert held == {version}
    unknown = node.hears(BOB, "voices", root=None, chunk_bytes=0)
    await library._heard(library.directory.known[unknown])
    assert held == {version}, "it is no news here that this is gone"


async def test_parts_of_the_library_open_and_end_in_order(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    done, library = list[str](), node.library
    for what in ("streams", "fetcher", "holdings"):
        part, close = getattr(library, what), getattr(library, what).close

        async def closes(what: str = what, close: Callable[[], Awaitable[None]] = close) -> None:
            done.append(what)
            await close()

        monkeypatch.setattr(part, "close", closes)

    async def opens() -> None:
        done.append("opened")

    await library.close()
    assert done == ["streams", "fetcher", "holdings"], "a stream fetches, and what is fetched comes into the store"
    node.start()
    monkeypatch.setattr(node.library.streams, "open", opens)
    await node.library.open()
    assert done[3:] == ["opened"]


async def test_library_looks_at_what_others_have_and_tidies(
    library: DataLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def noting(name: str) -> Callable[..., Any]:
        async def note(*words: object) -> None:
            seen.append(name)

        return note

    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(library.directory, "learn", noting("learn"))
    monkeypatch.setattr(library.holdings, "keep_groups", noting("groups"))
    monkeypatch.setattr(library.space, "tidy", noting("tidy"))
    monkeypatch.setattr(library, "_announce", lambda: seen.append("announce"))
    library._membership = SimpleNamespace(credentials=SimpleNamespace(user_key=b"a" * 32))  # type: ignore[assignment]
    for tidy_s, rounds in ((3600.0, ["learn", "groups", "announce"]), (0.0, ["learn", "groups", "announce", "tidy"])):
        monkeypatch.setattr(module, "TIDY_S", tidy_s)
        seen.clear()
        running = asyncio.create_task(library.run())
        while len(seen) < 12:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert seen[:12] == rounds * (12 // len(rounds))


async def test_orders_are_one_at_a_time_and_kept_for_a_while(
    library: DataLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()

    async def waits(work: Work) -> None:
        await go_on.wait()

    async def fails(work: Work) -> None:
        raise ValueError

    one = library.begin("verify", "x", waits)
    assert library.begin("verify", "x", fails) is one and one.problem == ""
    caplog.set_level("INFO")
    for number in range(70):
        failed = library.begin("verify", str(number), fails)
        await asyncio.wait([failed.task])
    assert failed.problem == "ValueError" and "verify data set 69: " in caplog.text
    assert len(library.works) == 64 and library.works["verify", "x"] is one
    go_on.set()
    await one.task
    assert library.begin("verify", "x", fails) is not one


async def test_data_sets_are_added_one_at_a_time(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = list[str](), asyncio.Event()

    async def add(work: Work, name: str, *rest: object) -> None:
        began.append(name)
        await go_on.wait()

    monkeypatch.setattr(library, "_add", add)
    bob, path = Reader(b"b" * 32, "bob"), tmp_path / "file"
    first = library.add("pictures", path, (bob,), False, False)
    assert library.add("pictures", path, (bob,), False, False) is first
    for other in (
        (path.with_name("other"), (bob,), False, False),
        (path, (), False, False),
        (path, (bob,), False, True),
    ):
        with pytest.raises(DataError, match="is being added already"):
            library.add("pictures", *other)
    with pytest.raises(DataError):
        library.add("../pictures", path, (), False, False)
    second = library.add("voices", path, (), False, False)
    while not second.words and len(began) < 2:
        await asyncio.sleep(0)
    assert began == ["pictures"] and second.words == "waits until another data set is added"
    go_on.set()
    await asyncio.wait([first.task, second.task])
    assert began == ["pictures", "voices"]
    again = library.add("pictures", path.with_name("other"), (), False, False)
    assert again is not first
    await again.task


@pytest.mark.parametrize("rehash", [False, True])
async def test_chunks_that_are_not_published_yet_stay(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehash: bool
) -> None:
    """What is written belongs to no data set until all of it is there."""
    (tmp_path / "file").write_bytes(SECRET * 100)
    adding(library, monkeypatch)
    store, real, seen = library.holdings.store, Adder.__init__, list[tuple[int, bool]]()

    def begins(adder: Adder, store: DataSets, tell: Any, rehash: bool, *rest: Any) -> None:
        seen.append((store._busy, rehash))
        real(adder, store, tell, rehash, *rest)

    monkeypatch.setattr(Adder, "__init__", begins)
    work = library.add("pictures", tmp_path / "file", (), True, rehash)
    await asyncio.wait([work.task])
    assert not work.problem and seen == [(1, rehash)] and store._busy == 0


async def test_cache_is_a_private_data_set_that_grows(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = list[Path]()

    async def restore(place: Path) -> None:
        restored.append(place)
        assert place.parent.stat().st_mode & 0o077 == 0
        place.mkdir()
        (place / "file").write_bytes(b"new")
        for name in STATE_FILES:  # a job may call its files as it likes
            (place / name).write_bytes(b"new")

    left = node.library.holdings.store.trees / CACHE_FILES
    left.mkdir()
    (left / "of a run that was killed").touch()
    async with node.library._adding:
        writing = asyncio.create_task(node.library.write_back("filled", restore))
        for _ in range(5):
            await asyncio.to_thread(list)
        assert not restored, "something is being added"
    assert (await writing).files == 1 + len(STATE_FILES)
    ((identity, manifest),) = node.library.directory.newest()
    assert manifest.cache and manifest.realm and not manifest.everybody and not manifest.readers
    assert (await node.library.write_back("filled", restore, identity)).files == 0
    assert node.library.directory.newest() == [(identity, manifest)], "nothing is new"
    assert not node.library.holdings.used[identity]
    free = SimpleNamespace(free=2 * manifest.tree_bytes - 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: free)
    with pytest.raises(FetchFailed, match="max_disk_gib"):
        await node.library.write_back("filled", restore, identity)


async def test_job_is_told_what_this_node_cannot_give_it(library: DataLibrary, tmp_path: Path) -> None:
    library.paths = {"mine": str(tmp_path / "gone")}
    guest = Guest(b"j" * 16, print)
    for need, words in ((DataNeed("mine"), "at a path that is no directory"), (DataNeed("other"), "does not offer")):
        with pytest.raises(FetchFailed, match=words):
            await library.bring(need, bringing(b""), b"b" * 32, guest, print, False)
    library.paths = {"mine": str(tmp_path)}
    await library.release(await library.bring(DataNeed("mine"), bringing(b""), b"b" * 32, guest, print, False))
    assert not +library.holdings.used


@pytest.mark.parametrize("error", [QuotaExceeded("no room"), DataError("it is damaged"), OSError("the disk is gone")])
async def test_files_that_cannot_be_made_are_a_reason_for_the_job(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await hold(library, tmp_path / "source")

    def fail(*order: object) -> None:
        raise error

    monkeypatch.setattr(library.holdings.store, "make_tree", fail)
    with pytest.raises(FetchFailed, match=f"data set ada/pictures: {error}"):
        await brought(library)
    assert not library.holdings.used[SET]


async def test_missing_data_is_fetched_by_the_rights_of_its_job(
    library: DataLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, jobs = await hold(library, tmp_path / "source"), list[bytes | None]()

    async def fetch(identity: bytes, manifest: DataManifest, job: Callable[[], bytes | None], tell: object) -> None:
        jobs.append(job())
        library.holdings.damaged.discard(identity)

    monkeypatch.setattr(library.fetcher, "fetch", fetch)
    library.holdings.damaged.add(SET)
    await library.release(await brought(library))
    library.holdings.damaged.add(SET)
    await library.release(await brought(library))
    assert jobs == [b"j" * 16], "the files are there"
    monkeypatch.setattr(library.keys, "known", lambda realm: None)
    library.directory.known[SET] = msgspec.structs.replace(manifest, cache=True)
    await own_copy(library, tmp_path / "one")
    assert jobs == [b"j" * 16] * 2
    await own_copy(library, tmp_path / "two")
    assert jobs == [b"j" * 16] * 2
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    await own_copy(library, tmp_path / "three")
    monkeypatch.setattr(module, "MAX_ENTRIES", 0)
    with pytest.raises(FetchFailed, match="it is no cache"):
        await own_copy(library, tmp_path / "four")
