"""A data set's tree by numbers: the same entries in the same order as a walk, from any place, and hostile pages."""

import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.dataset import Entry, Link, Page, put_page
from ckptstore.dataset_adder import Adder
from ckptstore.dataset_store import DataSets
from ckptstore.dataset_view import TOP, DataView, Lacking
from ckptstore.encoding import Bytes
from ckptstore.errors import BadPath, CorruptChunk, NotFound


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[DataSets, Link]]:
    source, rng = tmp_path / "source", random.Random(2)
    for number in range(2500):  # several pages, and an index page
        path = source / f"{number % 3}" / ("deep" if number % 2 else ".") / f"{number:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(number % 7))
    (source / "empty").mkdir()
    (source / "large").write_bytes(rng.randbytes(70 << 20))  # more chunks than an entry names itself
    store = DataSets(tmp_path / "store")
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
                assert list(view.listing(number, found.number)) == entries[place:]
                assert list(view.listing(number, found.after)) == entries[place + 1 :]
        with pytest.raises(NotFound):
            view.lookup(number, b"nothing")
    assert len(directories) == 1 + 3 + 3 + 1
    with pytest.raises(NotFound):
        view.lookup(view.lookup(TOP, b"large").number, b"a file has no entries")


def test_any_span_of_a_file_is_read(kept: tuple[DataSets, Link], tmp_path: Path) -> None:
    view, rng = view_of(*kept), random.Random(3)
    found, content = view.lookup(TOP, b"large"), (tmp_path / "source" / "large").read_bytes()
    assert found.entry.lists
    for _ in range(200):
        offset, size = rng.randrange(len(content) + 10), rng.choice((1, 4096, 1 << 20, 9 << 20))
        assert b"".join(view.content(found, offset, size)) == content[offset : offset + size]


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


def test_hostile_pages_are_refused() -> None:
    chunks: dict[bytes, bytes] = {}

    def put(data: bytes) -> bytes:
        identity = len(chunks).to_bytes(32, "big")
        chunks[identity] = data
        return identity

    out = Page(entries=(Entry(b"out", stat.S_IFLNK | 0o777, 0, target=b"../../etc/passwd"),))
    view = DataView(put_page(put, out, 0, 1), lambda identity, length: chunks[identity])
    for look in (lambda: view.lookup(TOP, b"out"), lambda: view.at(TOP + 1), lambda: list(view.listing(TOP, 0))):
        with pytest.raises(BadPath):
            look()


def test_chunk_of_another_length_is_refused(kept: tuple[DataSets, Link]) -> None:
    store, root = kept
    short: set[bytes] = set()
    view = DataView(root, lambda identity, length: store.chunk(identity)[: length - (identity in short)])
    found = view.lookup(TOP, b"large")
    short |= {identity for identity, *_ in view.parts(found, 0, 1)}
    with pytest.raises(CorruptChunk):
        view.content(found, 0, 1)
