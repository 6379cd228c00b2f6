"""Blobs on the disk: whole and verified or not there, within their bounds."""

import os
import time
from hashlib import sha256
from pathlib import Path

import pytest

from mesh.images import blobs as blobs_module
from mesh.images.blobs import IDLE_S, MAX_TAGS, PIECE_BYTES, BlobStore, NoRoom
from mesh.images.oci import ManifestError
from tests.images.samples import manifest_of

DATA = os.urandom(PIECE_BYTES + 1000)
DIGEST = sha256(DATA).digest()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test machines may have little room."""
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, 1 << 40)


def test_upload_counts_only_with_its_digest(store: BlobStore, tmp_path: Path) -> None:
    wrong, right = store.upload(), store.upload()
    for upload in (wrong, right):
        upload.write(DATA[:10])
        upload.write(DATA[10:])
    assert not store.has(DIGEST) and not wrong.finish(b"x" * 32) and not store.has(DIGEST)
    assert right.finish(DIGEST) and store.use(DIGEST) == store.path(DIGEST)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [DIGEST.hex()]
    assert store.read(DIGEST, 0) + store.read(DIGEST, 1) == DATA


def test_unfinished_data_does_not_outlive_daemon(store: BlobStore, tmp_path: Path) -> None:
    store.upload().write(DATA)
    store.begin(DIGEST, len(DATA))
    store.write(DIGEST, 0, DATA[:PIECE_BYTES])
    assert len(list((tmp_path / "blobs").iterdir())) == 2
    again = BlobStore(tmp_path, 1 << 40)
    assert not list((tmp_path / "blobs").iterdir()) and not again.has(DIGEST)


def test_fetched_blob_counts_once_it_has_its_hash(store: BlobStore) -> None:
    for last in (b"x" * 1000, DATA[PIECE_BYTES:]):
        store.begin(DIGEST, len(DATA))
        store.write(DIGEST, 1, last)
        store.write(DIGEST, 0, DATA[:PIECE_BYTES])
        assert not store.has(DIGEST)
        assert store.finish(DIGEST) == store.has(DIGEST) == (last == DATA[PIECE_BYTES:])


def test_damage_of_disk_is_found_before_use(store: BlobStore, tmp_path: Path) -> None:
    store.keep(DATA)
    store.path(DIGEST).write_bytes(DATA[:-1] + b"!")
    assert BlobStore(tmp_path, 1 << 40).use(DIGEST) is None and not store.has(DIGEST)


def test_longest_unused_blobs_go_first_unless_held(store: BlobStore) -> None:
    kept = [store.keep(bytes([number]) * 100) for number in range(4)]
    for age, digest in enumerate(reversed(kept)):
        os.utime(store.path(digest), (time.time() - IDLE_S - 100 - age,) * 2)
    store.bound_bytes = 200
    with store.holding(kept[:1]):
        store.drop(kept[:1])
        store.trim()
    assert [store.has(digest) for digest in kept] == [True, False, False, True]
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


def test_full_disk_is_an_error(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 1 << 60)
    upload = store.upload()
    for write in (lambda: upload.write(DATA), lambda: store.keep(DATA), lambda: store.check_room(1)):
        with pytest.raises(NoRoom, match="no space for"):
            write()
    assert not store.has(DIGEST)


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
