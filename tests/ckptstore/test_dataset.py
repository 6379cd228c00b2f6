"""Data sets: what is added comes back byte for byte; only changes are read and stored; hostile pages are refused."""

import functools
import os
import random
import stat
import subprocess
import time
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptstore import dataset_adder
from ckptstore.dataset import (
    LIST_CHUNKS,
    MAX_ENTRIES,
    PAGE_ENTRIES,
    Child,
    ChunkList,
    Entry,
    Link,
    Page,
    PageMaker,
    Part,
    Ref,
    check_place,
    check_root,
    decode_list,
    decode_page,
    encode,
)
from ckptstore.dataset_adder import Added, Adder, Progress
from ckptstore.dataset_store import KEEP_PARTIAL_S, DataSets
from ckptstore.errors import (
    BadManifest,
    BadPath,
    CorruptChunk,
    DiskFull,
    FileChanged,
    MissingChunks,
    QuotaExceeded,
    Stopped,
    StoreError,
    TooLarge,
)
from ckptstore.pack import PackWriter, chunk_name, wrap
from tests.ckptstore.worlds import damage
from tests.system_calls import system_calls

ID = b"\1" * 32
FILE, DIRECTORY, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


@pytest.fixture
def store(tmp_path: Path) -> DataSets:
    return DataSets(tmp_path / "data")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with small and large files, holes, an empty file and directory, links, and names that are not UTF-8."""
    root, rng = tmp_path / "source", random.Random(1)
    for directory in range(4):
        (root / f"class{directory}").mkdir(parents=True)
        for number in range(100):
            (root / f"class{directory}" / f"{number}.jpg").write_bytes(rng.randbytes(rng.randrange(2000)))
    (root / "large").write_bytes(rng.randbytes(24 << 20))
    with (root / "sparse").open("wb") as file:
        file.seek(90 << 20)
        file.write(b"end")
    (root / "empty").touch()
    (root / "nothing").mkdir()
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "class0" / "up").symlink_to("../class1/0.jpg")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"raw name")
    return root


def age(root: Path) -> None:
    """Wait until no file has changed so recently that it would be read again."""
    for directory, _, names in os.walk(root):
        for name in names:
            settled = os.lstat(Path(directory) / name).st_ctime_ns + dataset_adder.SETTLED_NS
            while time.time_ns() <= settled:
                time.sleep(0.05)


def same(left: Path, right: Path) -> bool:
    return subprocess.run(["diff", "-r", "--no-dereference", left, right], check=False).returncode == 0


def test_added_directory_comes_back_and_only_changes_are_read_and_stored(store: DataSets, source: Path) -> None:
    age(source)
    first = Adder(store).add(source)
    assert first.root.size == sum(p.stat().st_size for p in source.rglob("*") if p.is_file() and not p.is_symlink())
    assert first.read_bytes < 30 << 20, "holes are not read"
    store.publish(ID, b"sealed", first.root)
    tree = store.make_tree(ID, first.root)
    assert same(source, tree) and (tree / "class0" / "up").readlink() == Path("../class1/0.jpg")
    assert (tree / "run").stat().st_mode & 0o777 == 0o555 and (tree / "large").stat().st_mode & 0o777 == 0o444
    assert (tree / "class1").stat().st_mode & 0o777 == 0o555
    assert (tree / "sparse").stat().st_blocks < 10_000, "a hole stays a hole"

    again = Adder(store).add(source)
    assert (again.root, again.read_bytes, again.new_bytes) == (first.root, 0, 0)
    (source / "class2" / "7.jpg").write_bytes(b"changed")
    (source / "class3" / "8.jpg").unlink()
    (source / "run").chmod(0o644)
    changed = Adder(store).add(source)
    small = sum(p.lstat().st_size for p in source.rglob("*") if p.is_file() and p.name not in ("large", "sparse", "up"))
    assert changed.read_bytes == small, "what changed, and its bundle"
    assert changed.new_bytes < small + 150_000, "one page of two directories, and the top"
    store.publish(b"\2" * 32, b"sealed", changed.root)
    assert same(source, store.make_tree(b"\2" * 32, changed.root))
    (source / "class1").rename(source / "other")
    (source / "class1").write_text("a file where a directory was")
    assert same(source, published(store, Adder(store).add(source)))

    for identity in store.held():
        store.forget(identity)
    assert store.free(time.time() + 1e6).bytes > 9 << 20 and store.stored_bytes() == 0
    assert list(store.trees.iterdir()) == []


def content(store: DataSets, root: Link) -> bytes:
    """Return what a reader can get."""
    return b"".join(bytes(store.chunk(chunk)) for chunk, _ in store.chunks(root))


@pytest.mark.parametrize("name", [b"class1/a", b"class1/z", b"deep"])
@pytest.mark.parametrize("happens", ["deleted", "replaced", "a link", "large", "a directory"])
def test_what_a_file_held_before_is_in_no_chunk(store: DataSets, source: Path, name: bytes, happens: str) -> None:
    secret, file = os.urandom(100), source / os.fsdecode(name)
    file.write_bytes(secret)
    age(source)
    assert secret in content(store, Adder(store).add(source).root)
    file.unlink()
    if happens == "replaced":
        file.write_bytes(b"other")
    elif happens == "a link":
        file.symlink_to("run")
    elif happens == "large":
        file.write_bytes(bytes(dataset_adder.SMALL_BYTES))
    elif happens == "a directory":
        file.mkdir()
    added = Adder(store).add(source)
    assert secret not in content(store, added.root)
    assert same(source, published(store, added))
    age(source)
    settled = Adder(store).add(source)
    again = Adder(store).add(source)
    assert (again.root, again.read_bytes, again.new_bytes) == (settled.root, 0, 0)


def test_a_file_that_changes_again_makes_a_small_bundle_be_read_anew(store: DataSets, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(100):
        (source / str(number)).write_bytes(os.urandom(20_000))
    age(source)
    Adder(store).add(source)
    read = []
    for number in (50, 60):
        (source / str(number)).write_bytes(os.urandom(20_000))
        age(source)
        added = Adder(store).add(source)
        read.append(added.read_bytes)
        assert same(source, published(store, added))
    assert read[0] == 100 * 20_000
    assert 20_000 < read[1] <= dataset_adder.REPACKED_BYTES + 20_000


def test_equal_bundles_of_which_files_were_deleted_are_told_from_a_whole_one(
    store: DataSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that are left have as many bytes as the chunk that both directories share, and not all of its bytes."""
    monkeypatch.setattr(dataset_adder, "CHUNK_BYTES", 200)
    source, (kept, secret) = tmp_path / "source", (os.urandom(100), os.urandom(100))
    for directory in ("one", "two"):
        (source / directory).mkdir(parents=True)
        (source / directory / "kept").write_bytes(kept)
        (source / directory / "secret").write_bytes(secret)
    age(source)
    first = Adder(store).add(source)
    assert secret in content(store, first.root) and first.chunk_bytes < 600, "one chunk, and pages"
    for directory in ("one", "two"):
        (source / directory / "secret").unlink()
    added = Adder(store).add(source)
    assert secret not in content(store, added.root)
    assert same(source, published(store, added))


def test_what_an_interrupted_add_had_read_is_in_no_chunk(
    store: DataSets, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = os.urandom(100)
    (source / "class0" / "secret").write_bytes(secret)
    age(source)
    monkeypatch.setattr(dataset_adder, "PACK_ROWS", 50)

    def stop(progress: Progress) -> None:
        if progress.files > 300:
            raise Stopped

    with pytest.raises(Stopped):
        Adder(store, stop).add(source)
    (source / "class0" / "secret").unlink()
    added = Adder(store).add(source)
    assert secret not in content(store, added.root)
    assert same(source, published(store, added))


def published(store: DataSets, added: Added) -> Path:
    identity = os.urandom(32)
    store.publish(identity, b"sealed", added.root)
    return store.make_tree(identity, added.root)


def test_one_file_is_a_data_set(store: DataSets, source: Path) -> None:
    tree = published(store, Adder(store).add(source / "large"))
    assert (tree / "large").read_bytes() == (source / "large").read_bytes() and len(list(tree.iterdir())) == 1


def test_stopped_add_continues_where_it_was(store: DataSets, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_adder, "PACK_BYTES", 4 << 20)
    age(source)

    def stop(progress: Progress) -> None:
        if progress.read > 20 << 20:
            raise Stopped

    with pytest.raises(Stopped):
        Adder(store, stop).add(source)
    assert list(store.tmp.iterdir()) == []
    assert store.free(time.time() + KEEP_PARTIAL_S / 2).bytes == 0, "what was stored waits for the next add"
    rest = Adder(store).add(source)
    assert rest.read_bytes < 18 << 20
    assert same(source, published(store, rest))


def test_rows_are_written_after_the_pack_that_they_name(
    store: DataSets, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: PackWriter) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(store, "publish_pack", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            Adder(store).add(source)
    sources = dataset_adder.Sources(store.root / "sources.sqlite")
    assert list(sources.between(1, None, None)) == []
    sources.close()
    assert same(source, published(store, Adder(store).add(source)))


def test_file_that_changed_just_before_it_was_read_is_read_again(store: DataSets, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    Adder(store).add(file)
    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Within a clock tick nothing tells the two apart; the table must not trust what it read so early.
    assert (published(store, Adder(store).add(file)) / "file").read_bytes() == b"two"
    rows = list(dataset_adder.Sources(store.root / "sources.sqlite").between(1, None, None))
    assert rows and all(row.ctime_ns == 0 for row in rows)


def test_chunks_that_were_collected_are_read_again(store: DataSets, source: Path) -> None:
    Adder(store).add(source)
    assert store.free(time.time() + 1e6).packs
    assert same(source, published(store, Adder(store).add(source)))


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "class0/../../outside", "../source/large"])
def test_link_out_of_the_set_is_refused(store: DataSets, source: Path, target: str) -> None:
    (source / "bad").symlink_to(target)
    with pytest.raises(BadPath, match="link"):
        Adder(store).add(source)


def test_pipe_is_refused_and_a_file_that_grows_too(store: DataSets, source: Path) -> None:
    def grow(progress: Progress) -> None:
        if progress.read > 6 << 20:
            with (source / "large").open("ab") as file:
                file.write(b"more")

    with pytest.raises(FileChanged, match="large changed while it was being added"):
        Adder(store, grow).add(source)
    os.mkfifo(source / "pipe")
    with pytest.raises(BadPath, match="pipe is a socket, pipe or device"):
        Adder(store).add(source)


def test_file_that_is_replaced_before_it_is_opened_is_refused(
    store: DataSets, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def replaced(path: Any, flags: int, *more: Any, **where: Any) -> int:
        if path == b"empty":
            (source / "empty").unlink()
            os.mkfifo(source / "empty")
        return open_file(path, flags, *more, **where)

    with monkeypatch.context() as racing, pytest.raises(FileChanged):
        racing.setattr(os, "open", replaced)
        Adder(store).add(source)


def test_quota_stops_an_add(tmp_path: Path, source: Path) -> None:
    store = DataSets(tmp_path / "small", quota_bytes=1 << 20)
    with pytest.raises(QuotaExceeded, match="data_quota_gib"):
        Adder(store).add(source)


def test_table_that_finds_no_room_is_a_full_disk(store: DataSets, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(2000):
        (many / f"{number:040}").write_bytes(b"x")
    adder = Adder(store)
    pages = adder._sources._db.execute("PRAGMA page_count").fetchone()[0]
    adder._sources._db.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(DiskFull, match="is full"):
        adder.add(many)
    assert Adder(store).add(many).files == 2000


@pytest.mark.parametrize(("bound", "most"), [("MAX_ENTRIES", 3), ("MAX_BYTES", 4)])
def test_add_of_too_much_is_refused(
    store: DataSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    root = tmp_path / "much"
    (root / "directory").mkdir(parents=True)
    (root / "link").symlink_to("directory")
    (root / "file").write_bytes(b"four")
    monkeypatch.setattr(dataset_adder, bound, most)
    Adder(store).add(root)
    monkeypatch.setattr(dataset_adder, bound, most - 1)
    with pytest.raises(TooLarge, match="a data set holds at most"):
        Adder(store).add(root)
    if bound == "MAX_ENTRIES":  # directories count too
        for name in ("link", "file"):
            (root / name).unlink()
        for number in range(most):
            (root / str(number)).mkdir()
        with pytest.raises(TooLarge, match="a data set holds at most"):
            Adder(store).add(root)


def test_set_with_a_missing_or_damaged_chunk_is_not_published_or_written(store: DataSets, source: Path) -> None:
    added = Adder(store).add(source)
    store.publish(ID, b"sealed", added.root)
    pack = max(store.packs.glob("*.pack"), key=lambda path: path.stat().st_size)
    damage(pack, pack.stat().st_size // 2)
    with pytest.raises(StoreError):
        store.make_tree(ID, added.root)
    assert list(store.trees.iterdir()) == []
    store.salvage(pack)
    assert store.missing_of(ID)
    with pytest.raises(MissingChunks):
        store.publish(b"\3" * 32, b"sealed", added.root)
    assert not store.has(b"\3" * 32)

    added = Adder(store).add(source)
    where = store.index.find(added.root.id)
    assert where is not None
    store.index.drop_pack(where.pack)
    with pytest.raises(MissingChunks):
        store.publish(b"\3" * 32, b"sealed", added.root)
    assert not store.has(b"\3" * 32)


# --- pages


class Kept:
    """Keeps what a PageMaker puts."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}

    def __call__(self, data: bytes) -> bytes:
        identity = chunk_name(data).id
        self.data[identity] = data
        return identity


def directory(names: list[bytes]) -> tuple[Kept, Link]:
    kept = Kept()
    maker = PageMaker(kept)
    for name in sorted(names):
        maker.file(name, FILE, 5, [Part(b"c" * 32, 9, 2, 5)])
    return kept, maker.finish()


def names_of(kept: Kept, link: Link) -> list[bytes]:
    page = decode_page(kept.data[link.id], link)
    return [entry.name for entry in page.entries] + [n for child in page.children for n in names_of(kept, child.link)]


@pytest.mark.parametrize("count", [0, 1, 2, 255, 5_000, 60_000])
def test_pages_hold_every_name_once_and_a_new_name_changes_few(count: int) -> None:
    rng = random.Random(count)
    names = sorted({b"%08d" % rng.randrange(10**8) for _ in range(count)})
    kept, link = directory(names)
    assert names_of(kept, link) == names and (link.entries, link.size) == (len(names), 5 * len(names))
    more, _ = directory([*names, b"50000000x"])
    new = [data for identity, data in more.data.items() if identity not in kept.data]
    assert len(new) <= 6 and sum(map(len, new)) < 300_000


def test_large_file_has_lists() -> None:
    kept = Kept()
    maker = PageMaker(kept)
    parts = [Part(number.to_bytes(32, "big"), 1 << 20, 0, 1 << 20) for number in range(LIST_CHUNKS + 5)]
    maker.file(b"f", FILE, len(parts) << 20, parts)
    link = maker.finish()
    (entry,) = decode_page(kept.data[link.id], link).entries
    found = [one for part in entry.lists for one, _ in decode_list(kept.data[part.id], part).chunks]
    assert found == [part.id for part in parts]


def ref(offset: int = 0, length: int = 5, number: int = 0) -> Ref:
    return Ref(number, offset, length)


def f(name: bytes = b"a", size: int = 5, refs: tuple[Ref, ...] = (ref(),), mode: int = FILE, **more: object) -> Entry:
    return Entry(name, mode, size, refs, **more)  # type: ignore[arg-type]


CHUNK = {"ids": b"c" * 32, "lengths": (9,)}
SUB = Link(b"d" * 32, 10, 7, 3)
BAD_PAGES = {
    "twice": Page(**CHUNK, entries=(f(), f())),
    "out of order": Page(**CHUNK, entries=(f(b"b"), f(b"a"))),
    "up": Page(**CHUNK, entries=(f(b".."),)),
    "here": Page(**CHUNK, entries=(f(b"."),)),
    "slash": Page(**CHUNK, entries=(f(b"a/b"),)),
    "absolute": Page(**CHUNK, entries=(f(b"/etc"),)),
    "NUL": Page(**CHUNK, entries=(f(b"a\0b"),)),
    "no name": Page(**CHUNK, entries=(f(b""),)),
    "long name": Page(**CHUNK, entries=(f(b"n" * 256),)),
    "device": Page(**CHUNK, entries=(f(mode=stat.S_IFCHR | 0o666),)),
    "pipe": Page(**CHUNK, entries=(f(mode=stat.S_IFIFO | 0o666, refs=(), size=0),)),
    "behind its chunk": Page(**CHUNK, entries=(f(refs=(ref(5, 5),)),)),
    "no such chunk": Page(**CHUNK, entries=(f(refs=(ref(number=1),)),)),
    "empty part": Page(**CHUNK, entries=(f(refs=(ref(0, 0),), size=0),)),
    "parts of chunks": Page(**CHUNK, entries=(f(refs=(ref(0, 9), ref(0, 1)), size=10),)),
    "many chunks": Page(**CHUNK, entries=(f(refs=(ref(0, 9),) * 17, size=17 * 9),)),
    "size": Page(**CHUNK, entries=(f(size=6),)),
    "huge size": Page(**CHUNK, entries=(f(size=2**52),)),
    "huge chunk": Page(ids=b"c" * 32, lengths=(1 << 30,), entries=(f(),)),
    "ids": Page(ids=b"c" * 31, lengths=(9,), entries=(f(),)),
    "directory without page": Page(entries=(Entry(b"d", DIRECTORY, 0),)),
    "directory with two": Page(entries=(Entry(b"d", DIRECTORY, 14, (), (SUB, SUB)),)),
    "file with entries": Page(entries=(Entry(b"f", FILE, 7, (), (SUB,)),)),
    "link without target": Page(entries=(Entry(b"l", LINK, 0),)),
    "link with content": Page(**CHUNK, entries=(Entry(b"l", LINK, 5, (ref(),), (), b"a"),)),
    "both": Page(**CHUNK, entries=(f(),), children=(Child(b"x", SUB), Child(b"y", SUB))),
    "one child": Page(children=(Child(b"x", SUB),)),
    "children out of order": Page(children=(Child(b"y", SUB), Child(b"x", SUB))),
    "short link": Page(children=(Child(b"x", Link(b"d", 10, 7, 3)), Child(b"y", SUB))),
    "long page": Page(children=(Child(b"x", Link(b"d" * 32, 1 << 30, 7, 3)), Child(b"y", SUB))),
    "many": Page(entries=tuple(Entry(b"%05d" % n, FILE, 0) for n in range(PAGE_ENTRIES + 1))),
}


@pytest.mark.parametrize("page", BAD_PAGES.values(), ids=BAD_PAGES.keys())
def test_hostile_page_is_refused(page: Page) -> None:
    data = encode(page)
    links = [child.link for child in page.children]
    size = sum(entry.size for entry in page.entries) + sum(link.size for link in links)
    entries = sum(1 + sum(one.entries for one in e.lists) for e in page.entries) + sum(link.entries for link in links)
    with pytest.raises(BadManifest):
        decode_page(data, Link(ID, len(data), size, entries))


def test_page_that_holds_more_than_its_link_says_is_refused() -> None:
    data = encode(Page(**CHUNK, entries=(f(),)))
    assert decode_page(data, Link(ID, len(data), 5, 1))
    for link in (Link(ID, len(data), 4, 1), Link(ID, len(data), 5, 2), Link(ID, len(data) - 1, 5, 1)):
        with pytest.raises(BadManifest):
            decode_page(data, link)
    for data in (b"", b"\x91\x01", os.urandom(50), encode([1, 2, 3, 4]), encode({"ids": b""})):
        with pytest.raises(BadManifest):
            decode_page(data, Link(ID, len(data), 0, 0))
    for bad in (ChunkList(b"c" * 32, (5, 5)), ChunkList(b"", ()), ChunkList(b"c" * 32, (1 << 23,))):
        data = encode(bad)
        with pytest.raises(BadManifest):
            decode_list(data, Link(ID, len(data), sum(bad.lengths), 0))


def test_links_and_depth_are_bounded_by_their_place() -> None:
    inside = Entry(b"l", LINK, 0, (), (), b"../x")
    check_place((b"d",), inside)
    for parts, target in (((), b"../x"), ((b"d",), b"../../x"), ((b"d",), b"/x"), ((b"d",), b"x/../../../y")):
        with pytest.raises(BadPath):
            check_place(parts, msgspec.structs.replace(inside, target=target))
    with pytest.raises(BadPath, match="nested too deep"):
        check_place((b"d",) * 256, Entry(b"f", FILE, 0))


def put_page(store: DataSets, writer: PackWriter, page: Page, entries: int) -> Link:
    data = encode(page)
    chunk = chunk_name(data)
    writer.add(*wrap(chunk, data, len(data), 0, 0, None))
    return Link(chunk.id, len(data), 0, entries)


def unfolding(store: DataSets, levels: int, wide: int) -> Link:
    """Store a tree in which each page names the one below it `wide` times."""
    writer = PackWriter(store.tmp, store.packs)
    link = put_page(store, writer, Page(entries=(Entry(b"f", FILE, 0),)), 1)
    for _ in range(levels):
        entries = tuple(Entry(b"%03d" % n, DIRECTORY, 0, (), (link,)) for n in range(wide))
        link = put_page(store, writer, Page(entries=entries), wide * (1 + link.entries))
    store.publish_pack(writer)
    return link


def test_tree_that_unfolds_without_end_is_refused(store: DataSets) -> None:
    """Each page names the one below it a thousand times; the totals of its link say so, or it is refused."""
    link = unfolding(store, 3, 1000)
    assert link.entries > MAX_ENTRIES
    with pytest.raises(BadManifest, match="holds at most"):
        check_root(link)
    with pytest.raises(BadManifest, match="holds at most"):
        store.make_tree(ID, link)
    lying = msgspec.structs.replace(link, entries=1000)
    with pytest.raises(BadManifest, match="does not hold what its link says"):
        store.make_tree(ID, lying)
    assert list(store.trees.iterdir()) == []


def test_tree_that_leads_out_or_too_deep_is_refused(store: DataSets) -> None:
    writer = PackWriter(store.tmp, store.packs)
    bad = Page(entries=(Entry(b"l", LINK, 0, (), (), b"../../x"),))
    out = put_page(store, writer, Page(entries=(Entry(b"d", DIRECTORY, 0, (), (put_page(store, writer, bad, 1),)),)), 2)
    deep = put_page(store, writer, Page(entries=(Entry(b"f", FILE, 0),)), 1)
    for _ in range(300):
        deep = put_page(store, writer, Page(entries=(Entry(b"d", DIRECTORY, 0, (), (deep,)),)), 1 + deep.entries)
    store.publish_pack(writer)
    for link in (out, deep):
        with pytest.raises(BadPath):
            store.make_tree(ID, link)
    assert list(store.trees.iterdir()) == []


MAKE_TREE = """
import sys
from pathlib import Path
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
store = DataSets(Path(sys.argv[1]))
store.make_tree(b"i" * 32, Adder(store).add(Path(sys.argv[2])).root)
"""


@pytest.mark.strace
def test_tree_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "data").mkdir()
    calls = system_calls(MAKE_TREE, tmp_path / "data", str(tmp_path / "file"))
    named = next(call for call in calls if call.startswith("rename trees/"))
    before = calls[: calls.index(named)]
    _, making, _ = named.split()
    assert f"sync {making}" in before
    assert before.index(f"write {making}/file") < before.index(f"sync {making}")


def test_tree_that_was_being_made_at_a_crash_is_removed(store: DataSets) -> None:
    left = store.trees / "half.making"
    (left / "inner").mkdir(parents=True)
    (left / "inner" / "file").write_bytes(b"half")
    (left / "inner").chmod(0o500)
    DataSets(store.root)
    assert list(store.trees.iterdir()) == []


def test_damaged_table_of_members_is_made_anew(store: DataSets, source: Path) -> None:
    added = Adder(store).add(source)
    store.publish(ID, b"sealed", added.root)
    store.close()
    (store.root / "members.sqlite").write_bytes(b"no database" * 1000)
    again = DataSets(store.root)
    assert again.known() == {} and again.held() == [ID]
    again.enter(ID, added.root)
    assert again.known()[ID].bytes == added.chunk_bytes


def test_damaged_table_of_sources_is_made_anew(store: DataSets, source: Path) -> None:
    added = Adder(store).add(source)
    table = store.root / "sources.sqlite"
    whole = table.read_bytes()
    for page in range(1, len(whole) // 4096):
        table.write_bytes(whole[: page * 4096] + os.urandom(4096) + whole[(page + 1) * 4096 :])
        assert Adder(store).add(source).root == added.root


def test_page_that_many_pages_name_is_walked_once(store: DataSets) -> None:
    link = unfolding(store, 3, 200)
    assert 10_000_000 < link.entries < MAX_ENTRIES
    assert len(list(islice(store.chunks(link), 10))) == 4
    store.enter(ID, link)
    assert store.known()[ID].bytes < 1 << 20


def test_index_pages_without_entries_are_refused(store: DataSets) -> None:
    """Totals do not bound a walk of pages that hold nothing."""
    writer = PackWriter(store.tmp, store.packs)
    link = put_page(store, writer, Page(), 0)
    for _ in range(3):
        link = put_page(store, writer, Page(children=tuple(Child(b"%02d" % n, link) for n in range(100))), 0)
    store.publish_pack(writer)
    enter, make = functools.partial(store.enter, ID), functools.partial(store.make_tree, ID)
    for walk in (enter, make, lambda link: list(store.walk(link))):
        with pytest.raises(BadManifest, match="is empty"):
            walk(link)


def test_chunks_of_an_add_stay_until_it_is_given_up(store: DataSets, source: Path) -> None:
    walked = DataSets(store.root.parent / "walked")
    added, other = Adder(store).add(source), Adder(walked).add(source)
    walked.enter(ID, other.root)
    assert added.chunk_bytes == walked.known()[ID].bytes, "what was noted is what a walk finds"
    assert store.free(time.time() + 1e6).packs and store.known() == {}

    with store.working():
        added = Adder(store).add(source)
        assert store.free(time.time() + 1e6).packs == 0
        store.publish(ID, b"sealed", added.root)
    assert store.free(time.time() + 1e6).packs == 0 and list(store.known()) == [ID]
    assert sorted(store.members.of(ID)) == sorted(walked.members.of(ID))


def test_chunks_that_files_use_in_turn_are_decoded_once(store: DataSets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the files, no more is decoded than the chunks and the files of whole chunks have.

    So nobody gets hours of work for few bytes. No data set is refused for it: files that are added to a directory day after
    day lie in as many bundles, in turn.
    """
    writer = PackWriter(store.tmp, store.packs)
    chunks = [chunk_name(bytes([number]) * 9) for number in range(8)]
    for number, chunk in enumerate(chunks):
        writer.add(*wrap(chunk, bytes([number]) * 9, 9, 0, 0, None))
    files = tuple(f(b"%02d" % number, 5, (ref(number % 5, 5, number % 8),)) for number in range(40))
    data = encode(Page(b"".join(chunk.id for chunk in chunks), (9,) * 8, files))
    page = chunk_name(data)
    writer.add(*wrap(page, data, len(data), 0, 0, None))
    store.publish_pack(writer)
    read, real = [], store.chunk
    monkeypatch.setattr(store, "chunk", lambda one, cipher: read.append(one) or real(one, cipher))  # type: ignore[func-returns-value]
    tree = store.make_tree(ID, Link(page.id, len(data), 40 * 5, 40))
    assert (tree / "37").read_bytes() == b"\5" * 5 and len(read) == 8 + 1
    assert list(store.tmp.iterdir()) == []


def test_chunk_of_another_length_is_refused(store: DataSets) -> None:
    writer = PackWriter(store.tmp, store.packs)
    chunk = chunk_name(b"short")
    writer.add(*wrap(chunk, b"short", 5, 0, 0, None))
    data = encode(Page(chunk.id, (9,), (f(refs=(ref(3, 5),)),)))
    page = chunk_name(data)
    writer.add(*wrap(page, data, len(data), 0, 0, None))
    store.publish_pack(writer)
    with pytest.raises(CorruptChunk, match="does not have the length"):
        store.make_tree(ID, Link(page.id, len(data), 5, 1))


def test_space_of_a_set_that_goes_is_free_at_once_unless_another_or_an_add_needs_it(
    store: DataSets, source: Path
) -> None:
    first = Adder(store).add(source)
    store.publish(ID, b"sealed", first.root)
    (source / "large").unlink()
    rest = Adder(store).add(source)
    store.publish(b"\2" * 32, b"sealed", rest.root)
    packs = store.forget(ID)
    with store.working():
        assert store.free(time.time(), packs).bytes == 0, "what an add relies on was touched a moment ago"
    assert store.free(time.time(), packs).bytes > 20 << 20
    assert same(source, store.make_tree(b"\2" * 32, rest.root))
    assert store.free(time.time(), store.forget(b"\2" * 32)).packs and store.stored_bytes() == 0
