"""What damage costs: bad sectors, flipped bits in packs, lost indexes, clocks that were wrong, collections beside a receive."""

import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore import objects, pack
from ckptstore.checker import verify
from ckptstore.cipher import StateCipher
from ckptstore.codec import encode
from ckptstore.encoding import ZSTD, Encoding
from ckptstore.errors import CorruptChunk, DiskFull, StoreError
from ckptstore.index import Index
from ckptstore.manifest import FORMAT_VERSION, Chunk, FileEntry, Manifest, Tree, encode_manifest, pack_tree
from ckptstore.pack import HEADER_BYTES, Location, chunk_name, encode_header, wrap
from ckptstore.store import SavedManifest, Store
from tests.ckptstore.test_deltas import state
from tests.ckptstore.worlds import CIPHER, JOB, damage, fake_seal, feed, frame, open_store, save, write_tree


def chunk(data: bytes, base: bytes | None = None) -> bytes:
    """Return a chunk as an object of a stream, as a delta if it has a base."""
    encoded = encode(data, Encoding(ZSTD, delta=base is not None), base)
    header, stored = wrap(
        chunk_name(data), encoded, len(data), ZSTD, 0, chunk_name(base).id if base is not None else None
    )
    return encode_header(header) + bytes(stored)


def received(store: Store, *chunks: bytes) -> str:
    """Receive these in one stream; return their pack."""
    before = set(store.packs.iterdir())
    receiver = store.receive(1 << 30)
    for one in chunks:
        feed(receiver, one)
    receiver.finish()
    return (set(store.packs.iterdir()) - before).pop().stem


def manifest_of(*chunks: bytes, seq: int = 1) -> bytes:
    lengths = tuple(map(len, chunks))
    files = tuple(FileEntry(f"ckpt/{n}", 0o100644, len(one), (Chunk(n, bytes(8)),)) for n, one in enumerate(chunks))
    ids = b"".join(chunk_name(one).id for one in chunks)
    tree = pack_tree(Tree(files), JOB, lengths)
    return fake_seal(
        encode_manifest(
            Manifest(
                FORMAT_VERSION, JOB, 0, 1, seq, None, "checkpoint", 0, ids, lengths, len(files), sum(lengths), tree
            )
        )
    )


def place_of(store: Store, identity: bytes) -> tuple[Path, Location]:
    where = store.index.find(identity)
    assert where is not None
    return store.packs / f"{where.pack}.pack", where


def without_index(root: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{root / 'index.sqlite'}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def bad_sector(path: Path, first: int, last: int) -> Iterator[None]:
    """Have the kernel's reads of these bytes of a file fail, as on a disk that cannot read them."""
    inode, real = path.stat().st_ino, os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        size = sum(map(len, buffers))
        if os.fstat(descriptor).st_ino == inode and offset <= last and offset + size > first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack.os, "preadv", preadv)
        yield


def twenty(tmp_path: Path) -> tuple[Store, SavedManifest, list[tuple[bytes, Location]], Path]:
    """Return a checkpoint of twenty chunks in one pack."""
    write_tree(tmp_path / "in", {f"{number:02}": os.urandom(50_000) for number in range(20)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (path,) = store.packs.iterdir()
    chunks = sorted(store.index.chunks_of(path.stem).items(), key=lambda one: one[1].offset)
    return store, saved, chunks, path


@pytest.mark.parametrize("place", ["header", "bytes"])
def test_bad_sector_costs_one_chunk_and_ends_no_verification(tmp_path: Path, place: str) -> None:
    store, saved, chunks, path = twenty(tmp_path)
    lost, where = chunks[7]
    at = where.offset + (10 if place == "header" else HEADER_BYTES + 10)
    with bad_sector(path, at, at):
        with pytest.raises(CorruptChunk, match="run `mesh ckpt verify`"):
            store.chunk(lost)
        report = verify(store)
    assert report.quarantined == (path.name,) and report.damaged_manifests == (saved.id,)
    assert store.missing(saved.manifest.chunks) == [lost]
    store.close()


def test_bad_sector_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    store, saved, chunks, path = twenty(tmp_path)
    store.close()
    without_index(store.root)
    with bad_sector(path, chunks[7][1].offset, chunks[7][1].offset):
        store = open_store(store.root)
    assert store.missing(saved.manifest.chunks) == [chunks[7][0]]
    store.close()


def test_unreadable_manifest_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, saved, _, _ = twenty(tmp_path)
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == saved.id.hex():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert verify(store).quarantined == (saved.id.hex(),)
    store.close()


@pytest.mark.parametrize("indexed", [True, False])
def test_damaged_headers_cost_one_chunk_each(tmp_path: Path, indexed: bool) -> None:
    store, saved, chunks, path = twenty(tmp_path)
    for number in (0, 4, 5, 19):
        damage(path, chunks[number][1].offset + 20)
    if indexed:
        verify(store)
    else:
        store.close()
        without_index(store.root)
        store = open_store(store.root)
    assert set(store.missing(saved.manifest.chunks)) == {chunks[number][0] for number in (0, 4, 5, 19)}
    store.close()


def test_search_behind_a_damaged_header_follows_no_bytes_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may hold whole objects, false headers of any length, and so many that the search must end."""
    whole = frame(b"an object in a chunk")
    false = encode_header(wrap(chunk_name(b"x"), b"y" * 300_000, 300_000, 0, 0, None)[0])
    store = open_store(tmp_path / "store")
    name = received(store, frame(b"first"), frame(whole + 3 * false + bytes(1000)), frame(b"last"))
    path, where = place_of(store, chunk_name(whole + 3 * false + bytes(1000)).id)
    damage(path, where.offset)
    shutil.copytree(store.root, tmp_path / "other")
    verify(store)
    inner = chunk_name(b"an object in a chunk").id
    assert store.missing([chunk_name(b"first").id, inner, chunk_name(b"last").id]) == []
    store.close()
    monkeypatch.setattr(objects, "FALSE_HEADERS", 2)
    other = open_store(tmp_path / "other")
    assert verify(other).quarantined == (f"{name}.pack",)
    assert other.missing([chunk_name(b"first").id, chunk_name(b"last").id]) == [chunk_name(b"last").id]
    other.close()


def test_rebuilt_index_names_the_copy_whose_base_is_here(tmp_path: Path) -> None:
    """Packs have random names, so they are read in any order."""
    base = os.urandom(20_000)
    lost = bytes([base[0] ^ 3]) + base[1:]
    data = bytes([base[0] ^ 1]) + base[1:]
    store = open_store(tmp_path / "store")
    gone = received(store, chunk(lost))
    orphan = received(store, chunk(data, lost), chunk(os.urandom(100)))
    (store.packs / f"{gone}.pack").unlink()
    store.index.drop_pack(gone)
    packs = [orphan, received(store, chunk(base)), received(store, chunk(data, base))]
    store.accept_manifest(manifest_of(data))
    store.close()
    for number, order in enumerate(itertools.permutations(packs)):
        root = tmp_path / str(number)
        shutil.copytree(store.root, root)
        without_index(root)
        for place, name in enumerate(order):
            (root / "packs" / f"{name}.pack").rename(root / "packs" / f"{place:032x}.pack")
        again = open_store(root)
        assert again.missing([chunk_name(data).id]) == []
        again.close()


def test_rebuild_that_breaks_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = os.urandom(20_000)
    data = bytes([base[0] ^ 1]) + base[1:]
    store = open_store(tmp_path / "store")
    store.index.drop_pack(received(store, chunk(base), chunk(data, base)))
    store.close()
    real = Index.add

    def add(index: Index, name: str, locations: dict[bytes, Location], foreign: bool) -> None:
        if any(where.base for where in locations.values()):
            raise KeyboardInterrupt
        real(index, name, locations, foreign)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Index, "add", add)
        open_store(store.root)
    store = open_store(store.root)
    assert store.missing([chunk_name(data).id]) == []
    store.close()


def test_collection_beside_a_receive_keeps_the_newer_place_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is a delta arrives once more, standing alone and with deltas on it, while its pack is rewritten."""
    base = os.urandom(20_000)
    moved = bytes([base[0] ^ 1]) + base[1:]
    onto = bytes([moved[0], moved[1] ^ 1]) + moved[2:]
    store = open_store(tmp_path / "store")
    received(store, chunk(base))
    received(store, chunk(moved, base), *(chunk(os.urandom(30_000)) for _ in range(3)))
    store.accept_manifest(manifest_of(base, moved))
    for path in store.packs.iterdir():
        os.utime(path, (0, 0))
    coming, real, newer = store.receive(1 << 30), store.object, list[bytes]()
    feed(coming, chunk(moved) + chunk(onto, moved))
    for path in store.packs.iterdir():
        os.utime(path, (0, 0))

    def during(identity: bytes) -> Any:
        found = real(identity)
        if not newer:
            newer.append(b"")
            coming.finish()
            newer[0] = store.accept_manifest(manifest_of(onto, seq=2))
            for path in store.packs.iterdir():
                os.utime(path, (0, 0))
        return found

    monkeypatch.setattr(store, "object", during)
    assert store.collect(min_age_s=900.0, now_unix=1e6).packs == 1
    monkeypatch.undo()
    store.restore(newer[0], tmp_path / "out", prefix="ckpt")
    assert (tmp_path / "out" / "0").read_bytes() == onto
    store.close()


@pytest.mark.parametrize(("ahead_s", "collected"), [(10 * 365 * 86_400.0, True), (60.0, False)])
def test_pack_touched_by_a_clock_that_was_ahead_is_collected(tmp_path: Path, ahead_s: float, collected: bool) -> None:
    """One that is touched a little later than now has been touched while the collection runs."""
    store, saved, _, path = twenty(tmp_path)
    store.forget(saved.id)
    os.utime(path, (1e9 + ahead_s, 1e9 + ahead_s))
    assert store.collect(min_age_s=0.0, now_unix=1e9).packs == collected
    store.close()


def test_pack_that_the_index_does_not_know_is_not_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the index was full after the intact chunks of a damaged pack had been copied."""
    store, saved, chunks, path = twenty(tmp_path)
    damage(path, chunks[3][1].offset)

    def full(*given: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as filled, pytest.raises(sqlite3.OperationalError):
        filled.setattr(store.index, "add", full)
        verify(store)
    store.collect(min_age_s=0.0, now_unix=1e11)
    store.close()
    store = open_store(store.root)
    assert store.missing(saved.manifest.chunks) == [chunks[3][0]]
    store.close()


def test_damaged_page_of_the_index_has_it_made_anew(tmp_path: Path) -> None:
    """The pages that a start reads were whole, so it stayed damaged: every save that met the page failed, for ever."""
    store, saved, *_ = twenty(tmp_path)
    store.close()
    index = store.root / "index.sqlite"
    whole = index.read_bytes()
    for page in range(1, len(whole) // 4096):
        index.write_bytes(whole[: page * 4096] + os.urandom(4096) + whole[(page + 1) * 4096 :])
        store = open_store(store.root)
        store.restore(saved.id, tmp_path / f"out-{page}", prefix="ckpt")
        assert store.collect(min_age_s=0.0, now_unix=1e11).packs == 0
        store.close()


def test_index_that_cannot_be_written_leaves_no_pack(tmp_path: Path) -> None:
    store, saved, *_ = twenty(tmp_path)
    packs = set(store.packs.iterdir())
    write_tree(tmp_path / "in", {f"{number:03}": os.urandom(100) for number in range(300)})
    store.index._connection.execute("PRAGMA max_page_count=1")
    with pytest.raises(DiskFull, match="database or disk is full: free some space"):
        save(store, tmp_path / "in", seq=2)
    assert set(store.packs.iterdir()) == packs and not list(store.tmp.iterdir())
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    store.index._connection.execute("DROP TABLE chunks")
    with pytest.raises(StoreError, match="start the node again, which makes it anew"):
        save(store, tmp_path / "in", seq=2)
    assert set(store.packs.iterdir()) == packs and not list(store.tmp.iterdir())
    store.close()


@pytest.mark.parametrize("cipher", [None, CIPHER])
def test_damaged_base_fails_no_save(tmp_path: Path, cipher: StateCipher | None) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"step-1/model.safetensors": state(1)})
    first = save(store, tmp_path / "in", cipher=cipher)
    write_tree(tmp_path / "in", {"step-1/model.safetensors": state(2)})
    same = save(open_store(tmp_path / "scratch"), tmp_path / "in", cipher=cipher).manifest.chunks
    for identity in set(first.manifest.chunks) - set(same):
        path, where = place_of(store, identity)
        damage(path, where.offset + where.length - 5)
    second = save(store, tmp_path / "in", seq=2, parent=first.id, cipher=cipher)
    store.restore(second.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert (tmp_path / "out" / "step-1" / "model.safetensors").read_bytes() == state(2)
    damage(store.manifest_files / second.id.hex(), 40)
    store.close()
    store = open_store(tmp_path / "store")  # it has not read that manifest yet
    write_tree(tmp_path / "in", {"step-1/model.safetensors": state(3)})
    save(store, tmp_path / "in", seq=3, parent=second.id, cipher=cipher)
    store.close()
