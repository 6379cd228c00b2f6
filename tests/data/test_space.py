"""Space for data sets on a node: what may go when the quota is full, and what stays."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.dataset_adder import Adder
from mesh.data import space as space_module
from mesh.data.eviction import LACKS, PINNED, UNPINNED_S, WHOLE, keepers
from mesh.data.holdings import Holdings
from mesh.data.manifest import DataManifest, FetchFailed
from mesh.data.space import REMOVAL_S, Space
from mesh.rpc.client import PeerError

ME, OTHER = b"m" * 32, b"o" * 32
NEW = b"n" * 32  # a data set that a guest waits for
SIZE = 300_000
QUOTA = 3 * SIZE
ADA = b"a" * 32
KEEP_S = 100.0


class Here:
    """A node with a real store. Its view of other nodes is set by the test: which node has what, and what it answers."""

    def __init__(self, root: Path) -> None:
        self.known: dict[bytes, DataManifest] = {}
        self.newest: set[bytes] = set()
        self.answers: dict[bytes, bytes | PeerError] = {}  # of the other node
        self.asked: list[bytes] = []
        self.before_answer = lambda identity: None
        self.gone = 0
        directory: Any = SimpleNamespace(
            known=self.known,
            is_newest=lambda identity: identity in self.newest,
            newest_of=lambda key: None,
            sealed=lambda identity: b"sealed",
            holders=lambda identity: [OTHER] if identity in self.answers else [],
        )
        peers: Any = SimpleNamespace(call=self._call)
        self.holdings, self._root = Holdings(root / "data", QUOTA, directory, lambda realm: None), root
        self.holdings.used[NEW] = 1
        self.space = Space(ME, self.holdings, directory, peers, KEEP_S, self._changed)

    def _changed(self) -> None:
        self.gone += 1

    async def _call(self, node: bytes, method: str, path: str, timeout_s: float) -> bytes:
        identity = bytes.fromhex(path.split("/")[3])
        self.asked.append(identity)
        self.before_answer(identity)
        answer = self.answers[identity]
        if isinstance(answer, PeerError):
            raise answer
        return answer

    async def make_room(self, more: int, what: str) -> None:
        async with self.space.room(more, what, NEW), self.space.arrival(more, what, NEW):
            pass

    def add(self, name: str, used_ago_s: float = 0.0, size: int = SIZE) -> bytes:
        """Add a data set of `size` bytes that cannot be compressed."""
        source = self._root / name
        source.mkdir()
        (source / "file").write_bytes(os.urandom(size))
        store, identity = self.holdings.store, name.encode().ljust(32, b".")
        with store.working():
            root = Adder(store, lambda progress: None, False).add(source).root
            store.publish(identity, name.encode(), root)
        self.known[identity] = DataManifest(1, name, "ada", ADA, b"chain", 1, 1000, root, size)
        self.newest.add(identity)
        self.holdings.held.add(identity)
        used = time.time() - used_ago_s
        os.utime(store.sets / identity.hex(), (used, used))
        return identity


@pytest.fixture
async def here(tmp_path: Path) -> Any:
    here = Here(tmp_path)
    await here.holdings.open()
    yield here
    await here.holdings.close()


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    yield


async def test_longest_unused_set_that_another_node_keeps_goes(here: Here) -> None:
    new, old = here.add("new"), here.add("old", used_ago_s=50)
    here.answers = {new: PINNED, old: PINNED}
    await here.make_room(SIZE, "more")
    assert here.holdings.held == {new} and here.gone == 1
    assert not here.holdings.store.has(old) and here.holdings.used_bytes() < 2 * SIZE


@pytest.mark.parametrize("answer", [LACKS, b"", PeerError("it is off"), None])
async def test_set_that_no_other_node_keeps_stays(here: Here, answer: bytes | PeerError | None) -> None:
    sets = {here.add("a"), here.add("b")}
    here.answers = {} if answer is None else dict.fromkeys(sets, answer)
    with pytest.raises(FetchFailed, match=r"data_quota_gib.*pinned, in use, or on no other node"):
        await here.make_room(2 * SIZE, "more")
    assert here.holdings.held == sets


async def test_pinned_set_and_one_in_use_stay(here: Here) -> None:
    pinned, used = here.add("pinned"), here.add("used")
    here.answers = {pinned: PINNED, used: PINNED}
    here.holdings.pin(pinned, True)
    here.holdings.used[used] += 1
    with pytest.raises(FetchFailed):
        await here.make_room(2 * SIZE, "more")
    assert here.holdings.held == {pinned, used} and not here.asked


@pytest.mark.parametrize("how", ["pin", "use"])
async def test_set_pinned_or_used_while_the_other_node_answers_stays(here: Here, how: str) -> None:
    one = here.add("one")
    here.add("other")
    here.answers = {one: PINNED}

    def meanwhile(identity: bytes) -> None:
        if how == "pin":
            here.holdings.pin(identity, True)
        else:
            here.holdings.used[identity] += 1

    here.before_answer = meanwhile  # type: ignore[assignment]
    with pytest.raises(FetchFailed):
        await here.make_room(2 * SIZE, "more")
    assert one in here.asked and one in here.holdings.held


async def test_set_that_was_unpinned_a_moment_ago_is_waited_for(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    one = here.add("one")
    here.add("other")
    here.answers = {one: PINNED}
    here.holdings.pin(one, True)
    here.holdings.pin(one, False)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        here.holdings.unpinned[one] -= seconds

    monkeypatch.setattr(space_module.asyncio, "sleep", sleep)
    await here.make_room(3 * SIZE // 2, "more")
    assert one not in here.holdings.held and len(slept) == 1 and 0 < slept[0] <= UNPINNED_S


async def test_more_than_the_quota_or_the_disk_is_refused_at_once(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = here.add("kept")
    here.answers = {kept: PINNED}
    with pytest.raises(FetchFailed, match="more than this node keeps"):
        await here.make_room(QUOTA + 1, "more")
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=space_module.LEAST_FREE))
    with pytest.raises(FetchFailed, match="the disk has"):
        await here.make_room(1, "more")
    assert kept in here.holdings.held


async def test_promised_room_is_kept_until_it_is_used(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    async with here.space.room(2 * SIZE, "more", NEW) as room:
        with pytest.raises(FetchFailed, match="used by what is on its way"):
            await here.make_room(2 * SIZE, "a second one")
        room.left = SIZE
        here.add("came")
        with pytest.raises(FetchFailed, match="on its way"):
            await here.make_room(2 * SIZE, "a second one")
        free = SimpleNamespace(free=space_module.LEAST_FREE + SIZE)
        monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: free)
        with pytest.raises(FetchFailed, match="the disk has"):
            await here.make_room(1, "a second one")
    await here.make_room(SIZE, "a second one")


async def test_room_on_the_disk_is_promised_to_one_of_two_that_ask_at_once(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, refused = SimpleNamespace(free=space_module.LEAST_FREE + 3 * SIZE), asyncio.Event()
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: free)
    here.holdings.store.quota_bytes = 9 * SIZE

    async def ask() -> None:
        try:
            async with here.space.room(2 * SIZE, "more", NEW):
                async with asyncio.timeout(60):
                    await refused.wait()
        except FetchFailed:
            refused.set()
            raise

    one, two = await asyncio.gather(ask(), ask(), return_exceptions=True)
    assert [one, two].count(None) == 1


async def test_room_ends_at_the_quota_less_what_stays(here: Here) -> None:
    here.holdings.pin(here.add("kept"), True)
    left = QUOTA - here.holdings.used_bytes()
    await here.make_room(left, "more")
    with pytest.raises(FetchFailed, match="are needed; of the"):
        async with here.space.room(left + 1, "more", NEW):
            pass


async def test_set_that_may_go_leaves_the_rest_of_its_room_alone(here: Here) -> None:
    one = here.add("one")
    here.add("stays")
    here.holdings.pin(b"stays".ljust(32, b"."), True)
    here.answers = {one: PINNED}
    with pytest.raises(FetchFailed, match="are needed; of the"):
        async with here.space.room(5 * SIZE // 2, "more", NEW):
            pass


async def test_unused_space_is_found_before_anything_is_evicted(here: Here) -> None:
    one, two = here.add("one", used_ago_s=50), here.add("two")
    here.answers = {one: PINNED, two: PINNED}
    more = QUOTA - here.holdings.used_bytes() + 1
    async with here.space.arrival(more, "a part", NEW):
        assert here.holdings.held == {two} and here.asked == [one], "no more goes than must"
    async with here.space.arrival(QUOTA - here.holdings.used_bytes(), "a part", NEW):
        assert here.holdings.held == {two}
    with pytest.raises(FetchFailed, match="nothing goes for this one"):
        async with here.space.arrival(QUOTA, "a part", b"c" * 32):
            pass
    assert here.holdings.held == {two}


async def test_eviction_that_frees_nothing_is_not_repeated(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.answers = {here.add(name, size=SIZE // 2): PINNED for name in "abcd"}
    monkeypatch.setattr(here.holdings.store, "free", lambda now, packs: None)  # other sets rely on its packs
    with pytest.raises(FetchFailed, match="are needed; of the"):
        async with here.space.arrival(2 * SIZE, "a part", NEW):
            pass
    assert here.gone == 2, "one, and one more after what was unpinned a moment ago"


async def test_unpacked_files_go_before_data_sets(here: Here) -> None:
    one = here.add("one")
    root = here.known[one].root
    assert root is not None
    here.holdings.store.make_tree(one, root)
    here.answers = {one: PINNED}
    await here.make_room(3 * SIZE // 2, "more")
    assert not here.holdings.store.tree(one).exists() and here.holdings.held == {one}


async def test_nothing_goes_for_what_neither_a_guest_nor_this_nodes_user_asked_for(here: Here) -> None:
    """Another node had it fetched. The bytes are a claim of whoever signed the manifest."""
    one, two = here.add("one"), here.add("two")
    root = here.known[one].root
    assert root is not None
    here.holdings.store.make_tree(one, root)
    here.answers = {one: PINNED, two: PINNED}
    claimed = b"c" * 32
    with pytest.raises(FetchFailed, match="nothing goes for this one"):
        async with here.space.room(QUOTA, "a claim", claimed):
            pass
    assert here.holdings.held == {one, two} and here.holdings.store.tree(one).exists() and not here.asked
    here.holdings.pin(claimed, True)
    async with here.space.room(QUOTA - SIZE // 2, "what the user pinned", claimed):
        assert here.holdings.held == {one, two} and not here.asked, "nothing goes before something comes"
        async with here.space.arrival(SIZE // 2, "a part", claimed):
            assert here.holdings.held == {one, two} and not here.holdings.store.tree(one).exists()
            async with here.space.arrival(3 * SIZE // 4, "a part", claimed) as room:
                assert len(here.holdings.held) == 1
                room.left = 0
                async with here.space.arrival(SIZE, "a part", claimed):
                    assert len(here.holdings.held) == 1, "what came is counted on the disk"
        async with here.space.arrival(QUOTA - SIZE // 2, "the rest", claimed):
            assert not here.holdings.held


async def test_files_leave_inodes_free_and_unused_ones_go_first(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = here.add("one", size=1000), here.add("two", size=1000)
    trees = []
    for identity in (one, two):
        root = here.known[identity].root
        assert root is not None
        trees.append(here.holdings.store.make_tree(identity, root))
    here.holdings.used[two] += 1
    disk = SimpleNamespace(f_files=1 << 20)

    def statvfs(path: Path) -> SimpleNamespace:
        made = sum(1 for _ in here.holdings.store.trees.rglob("*"))
        return SimpleNamespace(f_files=disk.f_files, f_favail=space_module.LEAST_INODES + 14 - made)

    monkeypatch.setattr(space_module.os, "statvfs", statvfs)
    async with here.space.room(1, "files", NEW, 10):
        assert trees[0].exists() and trees[1].exists()
        with pytest.raises(FetchFailed, match="they are 4, and the disk has inodes for 2 more"):
            async with here.space.room(1, "files", NEW, 4):
                pass
        assert not trees[0].exists() and trees[1].exists(), "only the files of a set in use stay"
        async with here.space.room(1, "files", NEW, 2):
            pass
    disk.f_files = 0
    async with here.space.room(1, "files", NEW, 1 << 20):
        pass
    monkeypatch.setattr(space_module.os, "statvfs", lambda path: SimpleNamespace(f_files=1, f_favail=0))
    async with here.space.room(1, "bytes", NEW):
        assert trees[1].exists(), "no files, no inodes"


async def test_files_of_the_longest_unused_set_go_first(here: Here) -> None:
    old, new = here.add("old", used_ago_s=50, size=1000), here.add("new", size=1000)
    trees = {}
    for identity in (new, old):
        root = here.known[identity].root
        assert root is not None
        trees[identity] = here.holdings.store.make_tree(identity, root)
    assert await here.space._drop_one_tree()
    assert trees[new].exists() and not trees[old].exists()


async def test_node_answers_for_what_it_has_whole(here: Here) -> None:
    one = here.add("one")
    assert here.space.held_answer(one) == WHOLE and here.space.held_answer(b"?" * 32) == LACKS
    here.holdings.pin(one, True)
    assert here.space.held_answer(one) == PINNED
    here.holdings.damaged.add(one)
    assert here.space.held_answer(one) == LACKS, "others must not rely on it"


@pytest.mark.parametrize(
    ("answer", "last"),
    [(WHOLE, False), (PINNED, False), (LACKS, True), (b"maybe", True), (PeerError("it is off"), True)],
)
async def test_last_copy_is_one_that_no_other_node_confirms(here: Here, answer: bytes | PeerError, last: bool) -> None:
    one = here.add("one")
    assert await here.space.is_last_copy(one), "nobody says that they have it"
    here.answers = {one: answer}
    assert await here.space.is_last_copy(one) is last


async def test_older_versions_and_removals_go_in_time(here: Here) -> None:
    old, fresh, pinned, used = (
        here.add(name, used_ago_s=ago, size=1000)
        for name, ago in [("old", 2 * KEEP_S), ("fresh", 0), ("pinned", 2 * KEEP_S), ("used", 2 * KEEP_S)]
    )
    newest = here.add("newest", used_ago_s=2 * KEEP_S)
    here.newest = {newest}
    here.holdings.pin(pinned, True)
    here.holdings.used[used] += 1
    removed, long_ago = b"r" * 32, b"l" * 32
    for identity, ago_s in ((removed, 0.0), (long_ago, 2 * REMOVAL_S)):
        created = int(time.time() - ago_s)
        self_made = DataManifest(1, "x", "ada", ADA, b"chain", 1, created, None, 0)
        here.known[identity] = self_made
        await here.holdings.keep_statement(identity)
    await here.space.tidy()
    assert here.holdings.held == {fresh, pinned, used, newest, removed}
    assert not here.holdings.store.has(old)


async def test_older_version_that_a_guest_gets_while_another_is_dropped_stays(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {here.add(name, used_ago_s=2 * KEEP_S, size=1000) for name in ("one", "two")}
    here.newest = set()
    begun, go_on, forget = threading.Event(), threading.Event(), here.holdings.store.forget

    def slow(identity: bytes) -> set[str]:
        begun.set()
        assert go_on.wait(60)
        return forget(identity)

    monkeypatch.setattr(here.holdings.store, "forget", slow)
    tidying = asyncio.create_task(here.space.tidy())
    assert await asyncio.to_thread(begun.wait, 60)
    (used,) = old & here.holdings.held  # the other one is being dropped
    here.holdings.used[used] += 1
    go_on.set()
    await tidying
    assert here.holdings.held == {used} and here.holdings.store.held() == [used]


async def test_few_holders_are_asked_those_that_come_before_this_node_first(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, nodes, asked = here.add("one"), [bytes([number]) * 32 for number in range(40)], list[bytes]()

    async def ask(node: bytes, identity: bytes) -> bytes:
        asked.append(node)
        return LACKS

    monkeypatch.setattr(here.space, "_ask_held", ask)
    here.space._directory.holders = lambda identity: nodes  # type: ignore[method-assign]
    before = keepers(one, ME, nodes)
    assert not await here.space._is_kept_elsewhere(one)
    assert asked == [*before, *(node for node in nodes if node not in before)][: space_module.ASKED]
    asked.clear()
    assert await here.space.is_last_copy(one) and len(asked) == space_module.ASKED


async def test_set_that_was_removed_while_a_guest_used_it_goes_in_time(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, removal, freed = here.add("one"), b"r" * 32, list[float]()
    here.known[removal] = DataManifest(1, "one", "ada", ADA, b"chain", 2, int(time.time()), None, 0)
    here.space._directory.newest_of = lambda key: removal  # type: ignore[method-assign]
    here.holdings.used[one] += 1
    await here.space.tidy()
    assert here.holdings.held == {one}
    here.holdings.used[one] -= 1
    await here.space.tidy()
    assert not here.holdings.held
    monkeypatch.setattr(here.holdings.store, "free", freed.append)
    await here.space.tidy()
    assert len(freed) == 1, "what no set needs goes, too"
