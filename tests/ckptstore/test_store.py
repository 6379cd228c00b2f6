import os
import resource
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.checker import verify
from ckptstore.errors import (
    BadManifest,
    BadPath,
    CorruptChunk,
    DiskFull,
    FenceError,
    MissingChunks,
    NotFound,
    QuotaExceeded,
    SaveTorn,
    StoreError,
)
from ckptstore.manifest import FileEntry, Manifest, check_link, check_path, decode_manifest, encode_manifest
from ckptstore.pack import CHUNK_BYTES, HEADER_BYTES, ObjectStream, PackWriter, chunk_id, decode_header, encode_header
from tests.ckptstore.worlds import JOB, fake_seal, fake_unseal, open_store, read_tree, save, write_tree

NAMES = st.text("abc.-_ é", min_size=1, max_size=6).filter(lambda n: n not in {".", ".."})
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=2).map("/".join), st.binary(max_size=300), max_size=5)


def possible(files: dict[str, bytes]) -> bool:
    return not any(a != b and b.startswith(a + "/") for a in files for b in files)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(TREES.filter(possible))
def test_a_restored_tree_is_the_saved_one(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("tree")
    (root / "in").mkdir()
    write_tree(root / "in", files)
    store = open_store(root / "store")
    saved = save(store, root / "in")
    store.restore(saved.id, root / "out", prefix="ckpt")
    assert read_tree(root / "out") == files
    store.close()


def test_large_files_links_modes_and_empty_directories_survive(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_tree(source, {"big": os.urandom(CHUNK_BYTES * 2 + 5), "exact": bytes(CHUNK_BYTES), "run.sh": b"#!/bin/sh\n"})
    (source / "run.sh").chmod(0o755)
    (source / "empty").mkdir()
    (source / "link").symlink_to("big")
    store = open_store(tmp_path / "store")
    saved = save(store, source)
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(source)
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "empty").is_dir()
    assert (tmp_path / "out" / "link").readlink() == Path("big")


def test_what_is_known_is_not_stored_again(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(1000), "b": os.urandom(1000)})
    store = open_store(tmp_path / "store")
    assert save(store, tmp_path / "in").new_bytes == 2000
    (tmp_path / "in" / "b").write_bytes(os.urandom(500))
    second = save(store, tmp_path / "in", seq=2)
    assert second.new_bytes == 500 and second.manifest.total_bytes == 1500


def test_links_that_leave_the_tree_and_special_files_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for name, target in [("up", "../outside"), ("absolute", "/etc/passwd")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(target)
        with pytest.raises(BadPath):
            save(store, tmp_path / name)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "fifo")
    with pytest.raises(BadPath, match="pipe"):
        save(store, tmp_path / "pipe")
    assert store.manifests() == []


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "..", "a//b", "./a", "a/.", "a\0b", "x" * 5000, "y" * 300])
def test_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(BadPath):
        check_path(path)


@given(st.text("./ab", max_size=12))
def test_an_accepted_link_stays_inside(target: str) -> None:
    try:
        check_link("ckpt/d/link", target)
    except BadPath:
        return
    landed = os.path.normpath(os.path.join("ckpt/d", target))  # noqa: PTH118 - text, not files
    assert landed == "ckpt" or landed.startswith("ckpt/")


def test_a_file_that_changes_meanwhile_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "in", {"a": b"before"})
    store = open_store(tmp_path / "store")
    real = store.index.find

    def meddle(identity: bytes) -> object:
        (tmp_path / "in" / "a").write_bytes(b"after!")
        return real(identity)

    monkeypatch.setattr(store.index, "find", meddle)
    with pytest.raises(SaveTorn):
        save(store, tmp_path / "in")
    monkeypatch.undo()
    assert store.manifests() == [] and not list((tmp_path / "store" / "tmp").iterdir())


@given(st.binary(max_size=400))
def test_hostile_manifests_are_refused(data: bytes) -> None:
    for sealed in (data, fake_seal(data)):
        with pytest.raises(BadManifest):
            decode_manifest(sealed, fake_unseal)


def manifest(*entries: FileEntry) -> Manifest:
    return Manifest(1, JOB, 0, 1, 1, None, "checkpoint", 0, tuple(entries))


REGULAR, LINK, DIRECTORY = 0o100644, 0o120777, 0o040755


@pytest.mark.parametrize(
    "entries",
    [
        [FileEntry("a/../../b", REGULAR, 0)],
        [FileEntry("a", REGULAR, 0), FileEntry("a", REGULAR, 0)],
        [FileEntry("a", REGULAR, 5)],
        [FileEntry("a", REGULAR, 5, (b"short",))],
        [FileEntry("c/l", LINK, 0, (), "../x")],
        [FileEntry("c/l", LINK, 0, (), "d"), FileEntry("c/l/f", REGULAR, 0)],
        [FileEntry("a", 0o060000, 0)],
        [FileEntry("a", DIRECTORY, 3)],
    ],
)
def test_impossible_manifests_are_refused(entries: list[FileEntry]) -> None:
    with pytest.raises(BadManifest):
        encode_manifest(manifest(*entries))


@given(st.binary(max_size=200), st.integers(1, 50))
def test_hostile_streams_end_in_corrupt_chunk(data: bytes, piece: int) -> None:
    stream = ObjectStream()
    count = 0
    try:
        for start in range(0, len(data), piece):
            count += len(list(stream.feed(data[start : start + piece])))
    except CorruptChunk:
        pass
    assert count == 0


@given(st.lists(st.binary(max_size=100), max_size=5), st.integers(1, 70))
def test_a_stream_gives_its_chunks_in_any_pieces(chunks: list[bytes], piece: int) -> None:
    data = b"".join(encode_header(chunk_id(chunk), len(chunk)) + chunk for chunk in chunks)
    stream = ObjectStream()
    out = [pair for start in range(0, len(data), piece) for pair in stream.feed(data[start : start + piece])]
    assert out == [(chunk_id(chunk), chunk) for chunk in chunks] and stream.clean


@given(st.binary(max_size=40), st.data())
def test_a_flipped_header_bit_is_found(chunk: bytes, data: st.DataObject) -> None:
    header = bytearray(encode_header(chunk_id(chunk), len(chunk)))
    place = data.draw(st.integers(0, HEADER_BYTES * 8 - 1))
    header[place // 8] ^= 1 << (place % 8)
    with pytest.raises(CorruptChunk):
        decode_header(bytes(header))


def test_chunks_travel_and_only_whole_checkpoints_are_accepted(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(3 * 1024 * 1024), "b": os.urandom(100)})
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    saved = save(ours, tmp_path / "in")
    ids = saved.manifest.chunks
    with pytest.raises(MissingChunks):
        theirs.accept_manifest(saved.sealed)
    assert theirs.missing(ids) == ids
    receiver = theirs.receive(10**8)
    for frame in ours.frames(ids):
        for start in range(0, len(frame), 100_000):
            receiver.feed(frame[start : start + 100_000])
    assert receiver.finish() == len(ids)
    assert theirs.accept_manifest(saved.sealed) == saved.id
    theirs.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")


def test_wrong_endless_and_cut_streams_leave_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    good = encode_header(chunk_id(b"good"), 4) + b"good"
    wrong = encode_header(chunk_id(b"good"), 4) + b"evil"
    for data, limit in [(wrong, 1000), (good * 100, 200), (good[:-1], 1000)]:
        receiver = store.receive(limit)
        with pytest.raises(CorruptChunk):
            receiver.feed(data)
            receiver.finish()
        receiver.abort()
    assert store.missing([chunk_id(b"good")]) == [chunk_id(b"good")]
    assert not list((tmp_path / "store" / "packs").iterdir()) and not list((tmp_path / "store" / "tmp").iterdir())


def test_a_replaced_writer_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"x"})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in", seq=1, term=5)
    with pytest.raises(FenceError, match="replaced"):
        save(store, tmp_path / "in", seq=2, term=4)
    store.close()
    again = open_store(tmp_path / "store")
    with pytest.raises(FenceError):
        save(again, tmp_path / "in", seq=2, term=4)
    save(again, tmp_path / "in", seq=2, term=4, job=b"k" * 16)


def test_every_class_of_damage_is_found_and_the_rest_is_kept(tmp_path: Path) -> None:
    for number, place in enumerate(["magic", "header", "id", "length", "payload"]):
        root = tmp_path / str(number)
        write_tree(root / "in", {"a": b"A" * 5000, "b": b"B" * 5000})
        store = open_store(root / "store")
        saved = save(store, root / "in")
        (pack,) = (root / "store" / "packs").iterdir()
        data = bytearray(pack.read_bytes())
        second = 16 + HEADER_BYTES + 5000
        offset = {
            "magic": second,
            "header": second + 50,
            "id": second + 20,
            "length": second + 9,
            "payload": second + 900,
        }
        data[offset[place]] ^= 4
        pack.write_bytes(bytes(data))
        if place == "payload":
            with pytest.raises(CorruptChunk):
                store.restore(saved.id, root / "out", prefix="ckpt")
            assert not (root / "out").exists(), "I3: all or nothing"
        report = verify(store)
        assert report.quarantined == (pack.name,) and report.damaged_manifests == (saved.id,)
        assert (root / "store" / "quarantine" / pack.name).exists()
        lost = store.missing(saved.manifest.chunks)
        assert lost == [chunk_id(b"B" * 5000)], f"{place}: the good chunk is kept"
        with pytest.raises(StoreError):
            store.restore(saved.id, root / "out", prefix="ckpt")
        receiver = store.receive(10**6)
        receiver.feed(encode_header(lost[0], 5000) + b"B" * 5000)
        receiver.finish()
        store.restore(saved.id, root / "out", prefix="ckpt")
        store.close()


def test_the_index_is_only_a_cache(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"A" * 500})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    store.close()
    index = tmp_path / "store" / "index.sqlite"
    for ruin in (index.unlink, lambda: index.write_bytes(b"not a database at all" * 100)):
        for suffix in ("-wal", "-shm"):
            Path(f"{index}{suffix}").unlink(missing_ok=True)
        ruin()
        store = open_store(tmp_path / "store")
        assert store.missing(saved.manifest.chunks) == []
        store.close()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"A" * 5000})
    store = open_store(tmp_path / "store")
    first = save(store, tmp_path / "in")
    (tmp_path / "in" / "a").write_bytes(os.urandom(3_000_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DiskFull, match="earlier checkpoints are safe"):
            save(store, tmp_path / "in", seq=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.restore(first.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == {"a": b"A" * 5000}
    assert save(store, tmp_path / "in", seq=2).new_bytes == 3_000_000


def test_a_quota_is_kept(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    store = open_store(tmp_path / "store", quota_bytes=4000)
    with pytest.raises(QuotaExceeded, match="nothing was saved"):
        save(store, tmp_path / "in")
    assert store.manifests() == []


def test_pruning_never_touches_what_may_yet_be_committed(tmp_path: Path) -> None:
    """After commit 2 of term 1, terms 2 and 3 each replicated a third checkpoint that was never decided."""
    store = open_store(tmp_path / "store")
    saved = {}
    for seq, term in ((1, 1), (2, 1), (3, 2), (3, 3)):
        write_tree(tmp_path / "in", {"a": os.urandom(100)})
        saved[seq, term] = save(store, tmp_path / "in", seq=seq, term=term).id
    assert store.prune(JOB, committed_seq=2, keep=2) == []
    assert store.prune(JOB, committed_seq=2, keep=1) == [saved[1, 1]]
    assert {info.id for info in store.manifests(JOB)} == {saved[2, 1], saved[3, 2], saved[3, 3]}


def test_collection_keeps_what_is_reachable_young_or_being_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    first = save(store, tmp_path / "in", seq=1)
    (tmp_path / "in" / "a").write_bytes(os.urandom(5000))
    second = save(store, tmp_path / "in", seq=2)
    assert store.prune(JOB, committed_seq=2, keep=1) == [first.id]
    assert store.collect(min_age_s=600, now_unix=time.time()).packs == 0, "too young"
    receiver = store.receive(1000)
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 0, "something is being written"
    receiver.abort()
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1
    store.restore(second.id, tmp_path / "out", prefix="ckpt")
    with pytest.raises(NotFound):
        store.manifest(first.id)


def test_savers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            root = tmp_path / f"in{number}"
            write_tree(root, {"own": os.urandom(50_000), "shared": b"S" * 70_000})
            saved = save(store, root, job=bytes([number]) * 16)
            store.restore(saved.id, tmp_path / f"out{number}", prefix="ckpt")
            assert read_tree(tmp_path / f"out{number}") == read_tree(root)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and len(store.manifests()) == 6


def test_a_pack_without_objects_is_not_published(tmp_path: Path) -> None:
    for name in ("tmp", "packs"):
        (tmp_path / name).mkdir()
    PackWriter(tmp_path / "tmp", tmp_path / "packs").publish()
    assert not list((tmp_path / "packs").iterdir()) and not list((tmp_path / "tmp").iterdir())
