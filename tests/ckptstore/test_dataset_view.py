"""A data set's tree by numbers: the same entries in the same order as a walk, from any place, and hostile pages."""

import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore import dataset_view
from ckptstore.dataset import MAX_ENTRIES, MAX_LEVELS, Child, ChunkList, Entry, Link, Page, Ref, encode, put_page
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
from ckptstore.dataset_view import TOP, DataView, Lacking
from ckptstore.encoding import Bytes
from ckptstore.errors import BadManifest, BadPath, CorruptChunk, NotFound


class Chunks(dict[bytes, bytes]):
    """Chunks by the ids that they get in turn."""

    def put(self, data: bytes) -> bytes:
        identity = len(self).to_bytes(32, "big")
        self[identity] = data
        return identity


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, rng = tmp_path_factory.mktemp("view") / "source", random.Random(2)
    for number in range(2500):  # several pages, and an index page
        path = source / f"{number % 3}" / ("deep" if number % 2 else ".") / f"{number:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(number % 7))
    (source / "empty").mkdir()
    (source / "large").write_bytes(rng.randbytes(70 << 20))  # more chunks than an entry names itself
    return source


@pytest.fixture(scope="module")
def kept(source: Path) -> Iterator[tuple[DataSets, Link]]:
    store = DataSets(source.parent / "store")
    with store.working():
        root = Adder(store, lambda progress: None, False).add(source).root
    yield store, root
    store.close()


def view_of(store: DataSets, root: Link) -> DataView:
    return DataView(root, lambda identity, length: store.chunk(identity))


def test_numbers_follow_the_walk(kept: tuple[DataSets, Link]) -> None:
    view, walked = view_of(*kept), list(kept[0].walk(kept[1]))
    assert len(walked) == kept[1].entries
    for number, (parts, _, entry) in enumerate(walked, TOP + 1):
        found = view.at(number)
        assert (found.number, found.parts, found.entry) == (number, (*parts, entry.name), entry)
    for outside in (0, TOP, TOP + 1 + len(walked)):
        with pytest.raises(NotFound):
            view.at(outside)


def test_directories_are_listed_from_any_entry_and_names_are_found(kept: tuple[DataSets, Link]) -> None:
    view = view_of(*kept)
    directories = [TOP]
    for number in directories:
        entries = list(view.listing(number, 0))
        directories += [found.number for found in entries if stat.S_ISDIR(found.entry.mode)]
        names = [found.entry.name for found in entries]
        assert sorted(names) == names
        for place, found in enumerate(entries):
            assert view.lookup(number, found.entry.name) == found
            if place % 100 == 0:
                assert view.at(found.number) == found
                assert list(view.listing(number, found.number)) == entries[place:]
                assert list(view.listing(number, found.after)) == entries[place + 1 :]
        with pytest.raises(NotFound):
            view.lookup(number, b"nothing")
    assert len(directories) == 1 + 3 + 3 + 1
    with pytest.raises(NotFound):
        list(view.listing(TOP, TOP + 2))  # an entry of its first directory
    with pytest.raises(NotFound):
        view.lookup(view.lookup(TOP, b"large").number, b"a file has no entries")


def test_any_span_of_a_file_is_read(kept: tuple[DataSets, Link], source: Path) -> None:
    view, rng = view_of(*kept), random.Random(3)
    found, content = view.lookup(TOP, b"large"), (source / "large").read_bytes()
    assert found.entry.lists
    for _ in range(200):
        offset, size = rng.randrange(len(content) + 10), rng.choice((1, 4096, 1 << 20, 9 << 20))
        assert b"".join(view.content(found, offset, size)) == content[offset : offset + size]
        assert all(length for *_, length in view.parts(found, offset, size)), "no chunk that it does not need"
    for small in view.listing(view.lookup(TOP, b"1").number, 0):
        if stat.S_ISREG(small.entry.mode):
            content = (source / "1" / small.entry.name.decode()).read_bytes()
            for offset in (0, 1):
                assert b"".join(view.content(small, offset, 99)) == content[offset:]


def test_what_is_not_here_is_asked_for(kept: tuple[DataSets, Link]) -> None:
    store, root = kept
    here: set[bytes] = set()

    def give(identity: bytes, length: int) -> Bytes:
        if identity not in here:
            raise Lacking(identity, length)
        return store.chunk(identity)

    view, asked = DataView(root, give), list[tuple[bytes, int]]()
    while True:
        try:
            found = view.lookup(TOP, b"large")
            assert len(b"".join(view.content(found, 0, 1))) == 1
            break
        except Lacking as lacking:
            asked.append((lacking.id, lacking.length))
            here.add(lacking.id)
    assert asked[0] == (root.id, root.length) and 3 <= len(asked) <= 5
    assert set(asked) <= set(store.chunks(root))


@pytest.mark.parametrize("most", [1, 128])
def test_pages_and_lists_are_kept_decoded_within_a_bound(
    kept: tuple[DataSets, Link], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(dataset_view, "MAX_OPENED", most)
    store, root = kept
    asked = list[bytes]()

    def give(identity: bytes, length: int) -> Bytes:
        asked.append(identity)
        return store.chunk(identity)

    view = DataView(root, give)
    for _ in range(2):
        before = len(asked)
        large = view.lookup(TOP, b"large")
        view.content(large, 0, 1)
        view.content(large, large.entry.size - 1, 1)
        view.lookup(view.lookup(TOP, b"0").number, b"00000")
    assert (len(asked) - before > 2) == (most == 1), "of the file's chunks the view keeps none"


@pytest.mark.parametrize("most", [1, 128])
def test_files_of_several_chunks_or_lists_are_read_in_order(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(dataset_view, "MAX_OPENED", most)
    chunks, asked = Chunks(), list[bytes]()

    def give(identity: bytes, length: int) -> bytes:
        assert length == len(chunks[identity])
        asked.append(identity)
        return chunks[identity]

    ids = [chunks.put(data) for data in (b"ab", b"cde", b"f", b"ghij")]
    refs, lists = tuple(Ref(number, 0, length) for number, length in enumerate((2, 3, 1, 4))), list[Link]()
    for first, lengths in ((0, (2, 3)), (2, (1, 4))):
        data = encode(ChunkList(b"".join(ids[first : first + 2]), lengths))
        lists.append(Link(chunks.put(data), len(data), sum(lengths), 0))
    mode = stat.S_IFREG | 0o644
    entries = (Entry(b"lists", mode, 10, lists=tuple(lists)), Entry(b"refs", mode, 10, refs))
    root = put_page(chunks.put, Page(b"".join(ids), (2, 3, 1, 4), entries), 20, 2)
    view = DataView(root, give)
    for name in (b"lists", b"refs"):
        found = view.lookup(TOP, name)
        for offset in range(12):
            for size in range(12):
                assert b"".join(view.content(found, offset, size)) == b"abcdefghij"[offset : offset + size]
                assert all(length for *_, length in view.parts(found, offset, size))
    assert (asked.count(lists[0].id) > 1) == (most == 1)
    places = [number for number, length in enumerate((2, 3, 1, 4)) for _ in range(length)]
    for offset in range(10):
        for size in range(1, 11 - offset):
            view = DataView(root, give)
            found = view.lookup(TOP, b"lists")
            asked.clear()
            view.content(found, offset, size)
            needed = {ids[place] for place in places[offset : offset + size]}
            needed |= {lists[place // 2].id for place in places[offset : offset + size]}
            assert set(asked) == needed and len(asked) == len(needed)


def test_index_pages_have_a_bound() -> None:
    chunks = Chunks()

    def leaf(name: bytes) -> Link:
        return put_page(chunks.put, Page(entries=(Entry(name, stat.S_IFREG | 0o644, 0),)), 0, 1)

    link = leaf(b"a")
    for levels in range(1, MAX_LEVELS + 2):
        link = put_page(chunks.put, Page(children=(Child(b"a", link), Child(b"b", leaf(b"b")))), 0, levels + 1)
        view = DataView(link, lambda identity, length: chunks[identity])
        for look in (DataView.at, lambda view, first: view.lookup(first - 1, b"a")):
            if levels <= MAX_LEVELS:
                assert look(view, TOP + 1).entry.name == b"a"
            else:
                with pytest.raises(BadManifest, match="too many levels"):
                    look(view, TOP + 1)
    with pytest.raises(BadManifest, match="at most"):
        DataView(Link(link.id, link.length, 0, MAX_ENTRIES + 1), lambda identity, length: chunks[identity])


def test_hostile_pages_are_refused() -> None:
    chunks = Chunks()

    out = Page(entries=(Entry(b"out", stat.S_IFLNK | 0o777, 0, target=b"../../etc/passwd"),))
    view = DataView(put_page(chunks.put, out, 0, 1), lambda identity, length: chunks[identity])
    for look in (lambda: view.lookup(TOP, b"out"), lambda: view.at(TOP + 1), lambda: list(view.listing(TOP, 0))):
        with pytest.raises(BadPath):
            look()


@pytest.mark.parametrize("more", [-1, 1])
def test_chunk_of_another_length_is_refused(kept: tuple[DataSets, Link], more: int) -> None:
    store, root = kept
    wrong: set[bytes] = set()

    def give(identity: bytes, length: int) -> Bytes:
        return (bytes(store.chunk(identity)) + b"?")[: length + more * (identity in wrong)]

    view = DataView(root, give)
    found = view.lookup(TOP, b"large")
    wrong |= {identity for identity, *_ in view.parts(found, 0, 1)}
    with pytest.raises(CorruptChunk):
        view.content(found, 0, 1)
