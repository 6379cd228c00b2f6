"""Blobs on the disk: whole and verified or not there, within their bounds."""

import os
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import permutations
from pathlib import Path

import pytest

from mesh.images import blobs as blobs_module
from mesh.images.blobs import IDLE_S, MAX_TAGS, PIECE_BYTES, BlobStore, NoRoom
from mesh.images.oci import ManifestError
from tests.images.samples import index_of, manifest_of

DATA = os.urandom(PIECE_BYTES + 1000)  # a multiple of 4
DIGEST = sha256(DATA).digest()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test machines may have little room."""
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, 1 << 40)


def test_part_counts_only_with_its_digest(store: BlobStore, tmp_path: Path) -> None:
    for last in (b"x" * 1000, DATA[PIECE_BYTES:]):
        part = store.part()
        part.write(last, PIECE_BYTES)
        part.write(DATA[:PIECE_BYTES], 0)
        assert not store.has(DIGEST) and part.read(PIECE_BYTES) == last
        assert store.finish(part, DIGEST) == store.has(DIGEST) == (last == DATA[PIECE_BYTES:])
        part.close()
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [DIGEST.hex()]
    assert b"".join(store.pieces(DIGEST, [0, 1])) == DATA and list(store.pieces(b"x" * 32, [0])) == []


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_part_is_hashed_while_it_comes(store: BlobStore, order: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    part, size = store.part(), len(DATA) // 4
    for at in (number * size for number in order):
        part.write(DATA[at : at + size], at)
    monkeypatch.setattr(os, "pread", lambda *_: b"")  # nothing is left to read
    assert store.finish(part, DIGEST) and store.path(DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("again", [0, 1000])
def test_part_that_is_written_again_has_the_hash_of_what_is_there(store: BlobStore, again: int) -> None:
    """A client may send the same part of an upload twice."""
    part = store.part()
    part.write(DATA, 0)
    part.write(b"other", again)
    assert not store.finish(part, DIGEST), "of what was there before"
    part.write(DATA[again:], again)
    assert store.finish(part, DIGEST)


def test_blob_that_just_came_is_not_compared_again(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep(DATA)
    monkeypatch.setattr(blobs_module, "file_digest", lambda *_: pytest.fail("it was compared when it was stored"))
    assert store.use(DIGEST) == store.path(DIGEST)


def test_unfinished_data_does_not_outlive_daemon(store: BlobStore, tmp_path: Path) -> None:
    store.part().write(DATA, 0)
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    again = BlobStore(tmp_path, 1 << 40)
    assert not list((tmp_path / "blobs").iterdir()) and not again.has(DIGEST)


def test_damage_of_disk_is_found_before_use(store: BlobStore, tmp_path: Path) -> None:
    store.keep(DATA)
    store.path(DIGEST).write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert BlobStore(tmp_path, 1 << 40).use(DIGEST) is None and not store.has(DIGEST)


def test_blob_that_changed_after_its_first_use_is_compared_again(store: BlobStore) -> None:
    store.keep(DATA)
    path = store.use(DIGEST)
    assert path is not None and store.size(DIGEST) == len(DATA)
    before = path.stat()
    path.write_bytes(DATA[::-1])
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock is coarse
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.use(DIGEST) is None and store.size(DIGEST) is None


def test_longest_unused_blobs_go_first(store: BlobStore) -> None:
    kept = [store.keep(bytes([number]) * 100) for number in range(4)]
    for age, digest in enumerate(reversed(kept)):
        os.utime(store.path(digest), (time.time() - IDLE_S - 100 - age,) * 2)
    store.bound_bytes = 200
    assert store.use(kept[0]) is not None
    store.trim()
    assert [store.has(digest) for digest in kept] == [True, False, False, True], "use counts"
    store.drop(kept)
    assert not any(map(store.has, kept))
    recent = store.keep(DATA)
    store.trim()
    assert store.has(recent), "it was used a moment ago"


def test_names_outlive_daemon_and_are_bounded(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.tag("a:1", DIGEST) and BlobStore(tmp_path, 1).tags == {"a:1": DIGEST}
    store.tags |= {f"b:{number}": DIGEST for number in range(MAX_TAGS - 1)}
    assert not store.tag("c:1", DIGEST) and store.tag("a:1", None) and store.tag("c:1", DIGEST)
    (tmp_path / "tags.json").write_bytes(b"\xff{")
    assert BlobStore(tmp_path, 1).tags == {}


def test_full_disk_is_an_error(store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 1 << 60)
    part = store.part()
    for write in (lambda: part.write(DATA, 0), lambda: store.keep(DATA)):
        with pytest.raises(NoRoom, match="no space for"):
            write()
    part.close()
    assert not list((tmp_path / "blobs").iterdir())


def test_blob_that_is_no_manifest_is_refused(store: BlobStore) -> None:
    assert store.manifest(DIGEST) is None
    for data in (b"", b"[]", b"{}", b'{"schemaVersion":2}', DATA):
        with pytest.raises(ManifestError):
            store.manifest(store.keep(data))


def test_manifest_that_was_removed_is_not_remembered(store: BlobStore) -> None:
    digest = store.keep(manifest_of(b"{}", []))
    assert store.manifest(digest) is not None
    store.drop([digest])
    assert store.manifest(digest) is None


def test_index_reaches_the_manifests_that_are_here(store: BlobStore) -> None:
    amd, riscv = manifest_of(b"amd", [DATA]), manifest_of(b"riscv", [])
    index = store.keep(index_of(amd64=amd, arm64=amd, riscv64=riscv))
    hashes = [sha256(one).digest() for one in (amd, riscv, b"amd", DATA)]
    assert store.reach(index) == {index, *hashes[:2]} and store.variant(index).blobs == ()
    store.keep(amd)
    assert store.reach(index) == {index, *hashes} and store.variant(index).blobs[0].hash == hashes[2]
    assert store.described(hashes[1]) == (len(riscv), True) and store.described(hashes[3]) == (len(DATA), False)
    assert store.described(index) is None and store.reach(b"x" * 32) == {b"x" * 32}
