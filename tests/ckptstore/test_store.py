import contextlib
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.checker import verify
from ckptstore.collector import Collected
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
from ckptstore.layout import CHUNK_BYTES
from ckptstore.manifest import (
    Chunk,
    FileEntry,
    Manifest,
    Tree,
    check_link,
    check_path,
    decode_manifest,
    encode_manifest,
    pack_tree,
)
from ckptstore.pack import HEADER_BYTES, Location, ObjectStream, PackWriter, decode_header
from ckptstore.store import SavedManifest
from ckptstore.vault import Vault
from tests.ckptstore.worlds import (
    JOB,
    VAULT,
    chunk_id,
    copy,
    fake_seal,
    fake_unseal,
    frame,
    open_store,
    read_tree,
    save,
    write_tree,
)

NAMES = st.text("abc.-_ é", min_size=1, max_size=6).filter(lambda n: n not in {".", ".."})
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=2).map("/".join), st.binary(max_size=300), max_size=5)


def possible(files: dict[str, bytes]) -> bool:
    return not any(a != b and b.startswith(a + "/") for a in files for b in files)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
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
    assert save(store, tmp_path / "in").new_bytes == 2000 + 2 * HEADER_BYTES
    (tmp_path / "in" / "b").write_bytes(os.urandom(500))
    second = save(store, tmp_path / "in", seq=2)
    assert second.new_bytes == 500 + HEADER_BYTES and second.manifest.total_bytes == 1500


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


def test_a_directory_that_becomes_a_link_meanwhile_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in a container would have the daemon, which may be root, read files of its host."""
    write_tree(tmp_path / "in", {"a/secret": b"own"})
    write_tree(tmp_path / "host", {"secret": b"the host's"})
    store = open_store(tmp_path / "store")
    real = os.open

    def meddle(path: object, *arguments: int, **options: int) -> int:
        if str(path).endswith("in/a/secret"):
            (tmp_path / "in" / "a").rename(tmp_path / "moved")
            (tmp_path / "in" / "a").symlink_to(tmp_path / "host")
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptstore.saver.os.open", meddle)
    with pytest.raises(SaveTorn, match="moved"):
        save(store, tmp_path / "in")
    monkeypatch.undo()
    assert store.manifests() == []


@given(st.binary(max_size=400))
def test_hostile_manifests_are_refused(data: bytes) -> None:
    for sealed in (data, fake_seal(data)):
        with pytest.raises(BadManifest):
            decode_manifest(sealed, fake_unseal)


REGULAR, LINK, DIRECTORY = 0o100644, 0o120777, 0o040755


@pytest.mark.parametrize(
    "entries",
    [
        [FileEntry("a/../../b", REGULAR, 0)],
        [FileEntry("a", REGULAR, 0), FileEntry("a", REGULAR, 0)],
        [FileEntry("a", REGULAR, 4)],
        [FileEntry("a", REGULAR, 5, (Chunk(0, b"short"),))],
        [FileEntry("a", REGULAR, 5, (Chunk(1, b"8 bytes."),))],
        [FileEntry("a", REGULAR, 5, (Chunk(-1, b"8 bytes."),))],
        [FileEntry("a", REGULAR, 6, (Chunk(0, b"8 bytes."),))],
        [FileEntry("c/l", LINK, 0, (), "../x")],
        [FileEntry("c/l", LINK, 0, (), "d"), FileEntry("c/l/f", REGULAR, 0)],
        [FileEntry("a", 0o060000, 0)],
        [FileEntry("a", DIRECTORY, 3)],
    ],
)
def test_impossible_trees_are_refused(entries: list[FileEntry]) -> None:
    with pytest.raises(BadManifest):
        pack_tree(Tree(tuple(entries)), JOB, (5,))
    hostile = msgspec.structs.replace(manifest(), tree=msgspec.msgpack.encode(Tree(tuple(entries))))
    with pytest.raises(BadManifest):
        hostile.open()


def manifest(**changed: object) -> Manifest:
    tree = pack_tree(Tree(), JOB, (5,))
    whole = Manifest(2, JOB, 0, 1, 1, None, "checkpoint", 0, b"i" * 32, (5,), 0, 0, tree)
    return msgspec.structs.replace(whole, **changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": b"short"}, "each once"),
        ({"ids": b"i" * 64, "lengths": (5, 5)}, "each once"),
        ({"lengths": ()}, "lengths"),
        ({"lengths": (0,)}, "lengths"),
        ({"lengths": (1 << 23,)}, "lengths"),
        ({"realm": b"short"}, "realm"),
        ({"total_bytes": -1}, "size"),
        ({"version": 1}, "upgrade"),
    ],
)
def test_impossible_manifests_are_refused(changed: dict[str, object], words: str) -> None:
    assert encode_manifest(manifest())
    with pytest.raises(BadManifest, match=words):
        encode_manifest(manifest(**changed))


@given(st.binary(max_size=60))
def test_a_hostile_list_of_files_is_refused(tree: bytes) -> None:
    with contextlib.suppress(BadManifest):
        assert len(manifest(tree=tree).open().files) <= len(tree)


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
    data = b"".join(frame(chunk) for chunk in chunks)
    stream = ObjectStream()
    out = [pair for start in range(0, len(data), piece) for pair in stream.feed(data[start : start + piece])]
    assert [(header.id, stored) for header, stored in out] == [(chunk_id(chunk), chunk) for chunk in chunks]
    assert stream.clean


@given(st.binary(max_size=40), st.data())
def test_a_flipped_header_bit_is_found(chunk: bytes, data: st.DataObject) -> None:
    header = bytearray(frame(chunk)[:HEADER_BYTES])
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
    assert theirs.missing(ids) == list(ids)
    receiver = theirs.receive(10**8)
    for piece in ours.frames(ids):
        for start in range(0, len(piece), 100_000):
            receiver.feed(piece[start : start + 100_000])
    assert receiver.finish() == len(ids)
    assert theirs.accept_manifest(saved.sealed) == saved.id
    theirs.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")


def test_wrong_endless_and_cut_streams_leave_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    good = frame(b"good")
    wrong = good[:-4] + b"evil"
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


PLACES = {  # where a byte of a class lies, from the beginning of an object
    "magic": 0,
    "codec": 4,
    "width": 5,
    "sealed": 6,
    "zero": 7,
    "length": 9,
    "length stored": 13,
    "id": 20,
    "base": 50,
    "check of the bytes": 85,
    "check of the header": 100,
    "bytes": HEADER_BYTES + 900,
}


@pytest.mark.parametrize("vault", [None, VAULT], ids=["open", "sealed"])
@pytest.mark.parametrize("place", PLACES)
def test_every_class_of_damage_is_found_and_the_rest_is_kept(place: str, vault: Vault | None, tmp_path: Path) -> None:
    rest = os.urandom(5000)
    write_tree(tmp_path / "in", {"a": os.urandom(5000), "b": rest})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in", vault=vault)
    copied = open_store(tmp_path / "copied")
    copy(store, copied, saved)
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    second = 16 + (len(data) - 16) // 2
    data[second + PLACES[place]] ^= 4
    pack.write_bytes(bytes(data))
    with pytest.raises(StoreError):
        store.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=vault)
    assert not (tmp_path / "out").exists(), "I3: all or nothing"
    report = verify(store)
    assert report.quarantined == (pack.name,) and report.damaged_manifests == (saved.id,)
    assert (tmp_path / "store" / "quarantine" / pack.name).exists()
    assert store.missing(saved.manifest.chunks) == [saved.manifest.chunks[1]], "the good chunk is kept"
    with pytest.raises(StoreError):
        store.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=vault)
    copy(copied, store, saved)
    store.restore(saved.id, tmp_path / "out", prefix="ckpt", vault=vault)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
    store.close()
    copied.close()


@pytest.mark.parametrize("place", [0, 8, 9, 10, 13])
def test_a_pack_whose_first_bytes_are_damaged_is_put_away(place: int, tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(500)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[place] ^= 2
    pack.write_bytes(bytes(data))
    report = verify(store)
    assert report.quarantined == (pack.name,) and report.damaged_manifests == (saved.id,)
    again = save(store, tmp_path / "in", seq=2)
    store.restore(again.id, tmp_path / "out", prefix="ckpt")
    store.close()


def test_what_goes_while_it_is_looked_at_is_no_trouble(tmp_path: Path) -> None:
    """A link that leads nowhere is what is listed, and gone when it is opened."""
    write_tree(tmp_path / "in", {"a": os.urandom(500)})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in")
    before = store.stored_bytes(), verify(store)
    for gone in (store.packs / f"{'0' * 32}.pack", store.manifest_files / ("0" * 64)):
        gone.symlink_to(tmp_path / "nowhere")
    assert (store.stored_bytes(), verify(store)) == before
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
    assert save(store, tmp_path / "in", seq=2).new_bytes == 3_000_000 + HEADER_BYTES


def test_a_quota_is_kept(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    store = open_store(tmp_path / "store", quota_bytes=4000)
    with pytest.raises(QuotaExceeded, match="nothing was saved"):
        save(store, tmp_path / "in")
    assert store.manifests() == []


def test_what_peers_bring_of_other_users_has_its_own_quota(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(ours, tmp_path / "in")
    theirs.user, theirs.foreign_quota_bytes = "eve", 4000
    assert theirs.room() == 4000
    for user, fits in (("", False), ("ada", False), ("eve", True), (None, True)):
        receiver = theirs.receive(10**6, user)
        for piece in ours.frames(saved.manifest.chunks):
            receiver.feed(piece)
        if fits:
            assert receiver.finish() in {0, 1}
        else:
            with pytest.raises(QuotaExceeded, match="foreign_quota_gib"):
                receiver.finish()
    assert theirs.foreign_bytes() == 0
    theirs.foreign_quota_bytes = 10_000
    write_tree(tmp_path / "in", {"a": os.urandom(6000)})
    copied = save(ours, tmp_path / "in", seq=2)
    receiver = theirs.receive(10**6, "ada")
    for piece in ours.frames(copied.manifest.chunks):
        receiver.feed(piece)
    receiver.finish()
    theirs.accept_manifest(copied.sealed)
    for ruin in (lambda: None, (tmp_path / "theirs" / "index.sqlite").unlink):
        theirs.close()
        ruin()
        theirs = open_store(tmp_path / "theirs")
        assert 6000 < theirs.foreign_bytes() < 6400, "it is known after a restart, and without the index"
    theirs.user, theirs.foreign_quota_bytes = "eve", 10_000
    assert 0 < (theirs.room() or 0) < 4000
    theirs.forget(copied.id)
    theirs.collect(min_age_s=0, now_unix=time.time() + 10)
    assert theirs.foreign_bytes() == 0


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
    for pack in (tmp_path / "store" / "packs").iterdir():
        os.utime(pack, (0, 0))
    assert store.missing(first.manifest.chunks) == []
    assert store.collect(min_age_s=600, now_unix=time.time()).packs == 0, "a peer was told that it is here"
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1
    store.restore(second.id, tmp_path / "out", prefix="ckpt")
    with pytest.raises(NotFound):
        store.manifest(first.id)


def test_a_pack_of_which_little_is_reached_is_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"large": os.urandom(90_000), "small": os.urandom(5000)})
    first = save(store, tmp_path / "in", seq=1)
    (tmp_path / "in" / "large").write_bytes(os.urandom(90_000))
    second = save(store, tmp_path / "in", seq=2)
    later = time.time() + 1000
    assert store.collect(min_age_s=0, now_unix=later) == Collected(0, 0), "all of it is reached"
    store.forget(first.id)
    done = store.collect(min_age_s=0, now_unix=later)
    assert done.packs == 1 and 90_000 < done.bytes < 91_000
    assert store.collect(min_age_s=0, now_unix=later) == Collected(0, 0)
    for _ in range(2):
        store.restore(second.id, tmp_path / "out", prefix="ckpt")
        assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
        shutil.rmtree(tmp_path / "out")
        store.close()
        (tmp_path / "store" / "index.sqlite").unlink()
        store = open_store(tmp_path / "store")


def test_what_is_relied_on_while_it_is_collected_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save finds a chunk of a pack at the moment in which that was found to be of no use."""
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    store.forget(save(store, tmp_path / "in", seq=1).id)
    found = store.index.chunks_of
    again: list[SavedManifest] = []

    def meanwhile(pack: str) -> dict[bytes, Location]:
        chunks = found(pack)
        again.append(save(store, tmp_path / "in", seq=2))
        return chunks

    monkeypatch.setattr(store.index, "chunks_of", meanwhile)
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 0
    assert again[0].new_bytes == 0
    store.restore(again[0].id, tmp_path / "out", prefix="ckpt")


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
