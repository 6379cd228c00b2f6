import contextlib
import errno
import itertools
import mmap
import os
import resource
import shutil
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore import collector, objects, saver, tree_scan
from ckptstore import manifest as manifest_module
from ckptstore import pack as pack_module
from ckptstore import receiver as receiver_module
from ckptstore.checker import verify
from ckptstore.chunker import CHUNK_BYTES
from ckptstore.cipher import StateCipher
from ckptstore.codec import encode
from ckptstore.collector import CollectReport
from ckptstore.encoding import ZSTD, Bytes, Encoding
from ckptstore.errors import (
    BadManifest,
    BadPath,
    CorruptChunk,
    DiskFull,
    FenceError,
    FileChanged,
    MissingChunks,
    NotFound,
    QuotaExceeded,
    StoreError,
    TooLarge,
)
from ckptstore.manifest import (
    MAX_CHUNKS,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
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
from ckptstore.pack import (
    BLOCK_BYTES,
    HEADER_BYTES,
    Location,
    ObjectHeader,
    ObjectStream,
    PackWriter,
    chunk_name,
    decode_header,
    read_at,
    wrap,
)
from ckptstore.store import Fence, SavedManifest, Store
from ckptstore.tree_scan import scan
from tests.ckptstore.worlds import (
    CIPHER,
    JOB,
    Mapping,
    chunk_id,
    copy,
    damage,
    fake_seal,
    fake_unseal,
    feed,
    frame,
    open_store,
    read_tree,
    save,
    write_tree,
)
from tests.descriptors import descriptors_below

NAMES = st.text("abc.-_ é", min_size=1, max_size=6).filter(lambda n: n not in {".", ".."})
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=2).map("/".join), st.binary(max_size=300), max_size=5)


def possible(files: dict[str, bytes]) -> bool:
    return not any(a != b and b.startswith(a + "/") for a in files for b in files)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(TREES.filter(possible))
def test_restored_tree_equals_the_saved_one(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("tree")
    (root / "in").mkdir()
    write_tree(root / "in", files)
    store = open_store(root / "store")
    saved = save(store, root / "in")
    store.restore(saved.id, root / "out", prefix="ckpt")
    assert read_tree(root / "out") == files
    store.close()


@pytest.mark.usefixtures("alone")
def test_what_is_as_in_a_scan_is_left_out(tmp_path: Path) -> None:
    """So a job's result has only what it has added to a cache, wherever it put that. A new owner is no change."""
    root, store = tmp_path / "in", open_store(tmp_path / "store")
    write_tree(
        root, {"same": b"a", "changed": b"a", "times": b"a", "moved/inner": b"a", "owner": b"a", "removed": b"a"}
    )
    (root / "link").symlink_to("same")
    known = scan(root)
    os.chown(root / "owner", os.getuid(), os.getgid())
    (root / "changed").write_bytes(b"longer")
    os.utime(root / "times", ns=(1, 1))
    (root / "moved").rename(root / "place")
    (root / "removed").unlink()
    write_tree(root, {"new": b"n"})
    saved = save(store, root, known={"ckpt": known})
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == {"changed": b"longer", "times": b"a", "place/inner": b"a", "new": b"n"}
    assert not (tmp_path / "out" / "link").is_symlink()
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


@pytest.mark.parametrize("mode", [0o106755, 0o104711, 0o101777])
def test_restore_drops_setuid_setgid_and_sticky_bits_of_a_manifest(mode: int, tmp_path: Path) -> None:
    """A peer writes the manifest, and the host's root may restore it: a setuid file would be a program of root's."""
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"program": b"#!/bin/sh\n", "below/data": b"x"})
    saved = save(store, tmp_path / "in")
    hostile = [
        msgspec.structs.replace(entry, mode=mode if stat.S_ISREG(entry.mode) else 0o047777)
        for entry in saved.manifest.open().files
    ]
    tree = pack_tree(Tree(tuple(hostile)), JOB, saved.manifest.lengths)
    sealed = fake_seal(encode_manifest(msgspec.structs.replace(saved.manifest, seq=2, tree=tree)))
    store.restore(store.accept_manifest(sealed), tmp_path / "out", prefix="ckpt")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").rglob("*")}
    assert modes["program"] == stat.S_IFREG | mode & 0o777 and modes["below"] == stat.S_IFDIR | 0o777


def test_restored_holes_stay_holes_and_count_against_the_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "sparse").open("wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
    saved = save(store, tmp_path / "in")
    with pytest.raises(TooLarge, match="holes count"):
        store.restore(saved.id, tmp_path / "out", prefix="ckpt", limit_bytes=64 << 20)
    assert not (tmp_path / "out").exists()
    store.restore(saved.id, tmp_path / "out", prefix="ckpt", limit_bytes=65 << 20)
    restored = (tmp_path / "out" / "sparse").stat()
    assert restored.st_size == (64 << 20) + 3 and restored.st_blocks * 512 <= CHUNK_BYTES
    assert (tmp_path / "out" / "sparse").read_bytes() == (tmp_path / "in" / "sparse").read_bytes()


def test_restored_entries_count_a_block_each_against_the_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"a": b"", "b/c": b"1"})
    (tmp_path / "in" / "link").symlink_to("a")
    saved, taken = save(store, tmp_path / "in"), 5 * BLOCK_BYTES + 1
    with pytest.raises(TooLarge, match=f"take {taken} bytes"):
        store.restore(saved.id, tmp_path / "out", limit_bytes=taken - 1)
    assert store.restore(saved.id, tmp_path / "out", limit_bytes=taken).disk_bytes == taken


def test_holes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads = open_store(tmp_path / "store"), list[int]()

    def read(descriptor: int, data: memoryview, offset: int) -> int:
        reads.append(offset)
        return read_at(descriptor, data, offset)

    monkeypatch.setattr(saver, "read_at", read)
    (tmp_path / "in").mkdir()
    for name in ("one", "two"):
        with (tmp_path / "in" / name).open("wb") as file:
            file.seek(20 * CHUNK_BYTES)
            file.write(b"data")
            file.truncate(50 * CHUNK_BYTES + 1)
    saved = save(store, tmp_path / "in")
    assert len(reads) == 4, "a whole hole, one of a byte, and the data of each file"
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")


def test_known_chunks_are_not_stored_again(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(1000), "b": os.urandom(1000)})
    store = open_store(tmp_path / "store")
    assert save(store, tmp_path / "in").new_bytes == 2000 + 2 * HEADER_BYTES
    (tmp_path / "in" / "b").write_bytes(os.urandom(500))
    second = save(store, tmp_path / "in", seq=2)
    assert second.new_bytes == 500 + HEADER_BYTES and second.manifest.total_bytes == 1500


def test_links_out_of_the_tree_and_special_files_are_refused(tmp_path: Path) -> None:
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


def test_pipe_is_refused_where_the_places_of_its_writer_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    os.mkfifo(tmp_path / "ckpt" / "pipe")
    with pytest.raises(BadPath, match="socket, pipe or device"):
        save(open_store(tmp_path / "store"), tmp_path / "ckpt")


def test_links_are_saved_relative_or_left_out_where_the_places_of_their_writer_are_known(tmp_path: Path) -> None:
    places = {"/mesh/work": "work", "/mesh/ckpt": "ckpt", "/mesh/work/ckpts": "ckpt"}
    kept = {
        "latest": ("/mesh/ckpt/step-5", "step-5"),
        "below/latest": ("/mesh/work/ckpts/step-5", "../step-5"),
        "itself": ("/mesh/ckpt", "."),
        "plain": ("step-5/w", "step-5/w"),
    }
    left_out = {
        "data": "/mesh/work/data",
        "up": "../work/data",
        "other": "/etc/passwd",
        "alike": "/mesh/ckpt2/step-5",
        "out": "/mesh/ckpt/../../etc/passwd",
    }
    write_tree(tmp_path / "ckpt", {"step-5/w": b"x", "below/y": b"y"})
    for name, target in [*((name, target) for name, (target, _) in kept.items()), *left_out.items()]:
        (tmp_path / "ckpt" / name).symlink_to(target)
    os.mkfifo(tmp_path / "ckpt" / "pipe")
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "ckpt", places=places)
    assert sorted(saved.left_out) == sorted(f"ckpt/{name}" for name in (*left_out, "pipe"))
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    links = {
        str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_symlink()
    }
    assert {name: str(path.readlink()) for name, path in links.items()} == {name: to for name, (_, to) in kept.items()}
    assert (tmp_path / "out" / "below" / "latest" / "w").read_bytes() == b"x"


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "..", "a//b", "./a", "a/.", "a\0b", "x" * 5000, "y" * 300])
def test_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(BadPath):
        check_path(path)


@given(st.text("./ab", max_size=12))
def test_accepted_link_stays_inside_the_tree(target: str) -> None:
    try:
        check_link("ckpt/d/link", target)
    except BadPath:
        return
    landed = os.path.normpath(os.path.join("ckpt/d", target))  # noqa: PTH118 - text, not files
    assert landed == "ckpt" or landed.startswith("ckpt/")


def test_file_that_becomes_a_pipe_during_a_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it must not wait for a writer, and no checkpoint may have it: nothing could restore that."""
    write_tree(tmp_path / "in", {"a": b"before"})
    store, file, real = open_store(tmp_path / "store"), tmp_path / "in" / "a", os.open

    def meddle(path: Any, *more: Any, **options: Any) -> int:
        if path == file:
            file.unlink()
            os.mkfifo(file)
        return real(path, *more, **options)

    monkeypatch.setattr(os, "open", meddle)
    with pytest.raises(FileChanged, match="changed while it was being saved"):
        save(store, tmp_path / "in")
    assert store.manifests() == []


def test_file_that_changes_during_a_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "in", {"a": b"before"})
    store = open_store(tmp_path / "store")
    real = store.index.find

    def meddle(identity: bytes) -> object:
        (tmp_path / "in" / "a").write_bytes(b"after!")
        return real(identity)

    monkeypatch.setattr(store.index, "find", meddle)
    with pytest.raises(FileChanged):
        save(store, tmp_path / "in")
    monkeypatch.undo()
    assert store.manifests() == [] and not list((tmp_path / "store" / "tmp").iterdir())


def test_file_written_through_a_mapping_during_a_save_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "in", {"w": bytes(CHUNK_BYTES)})
    with (tmp_path / "in" / "w").open("r+b") as file:
        mapping = Mapping(file.fileno(), CHUNK_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    store = open_store(tmp_path / "store")
    mapping.fill(1)  # its pages are dirty, so that another write changes no time

    def read(*given: Any) -> int:
        mapping.fill(2)
        return read_at(*given)

    monkeypatch.setattr(saver, "read_at", read)
    with pytest.raises(FileChanged, match="changed while it was being saved"):
        save(store, tmp_path / "in")
    monkeypatch.undo()
    save(store, tmp_path / "in")
    mapping.close()


def relink(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


CHANGES: dict[str, Callable[[Path], object]] = {
    "two files": lambda root: write_tree(root, {"a": b"after!", "z": b"after!"}),
    "a new file": lambda root: (root / "below" / "c").touch(),
    "a removed file": lambda root: (root / "z").unlink(),
    "an emptied file": lambda root: (root / "z").write_bytes(b""),
    "another mode": lambda root: (root / "below").chmod(0o700),
    "another file in its place": lambda root: (root / "a").replace(root / "z"),
    "another link": lambda root: (write_tree(root, {"a": b"after!"}), relink(root / "latest", "z")),
    "another directory": lambda root: (root / "below").rename(root / "over"),
    "a removed tree": shutil.rmtree,
}


class Meddler:
    """A program that takes its next step before the n-th call with which a save looks at its tree."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.calls, self.watches = root, 0, False
        self.steps: dict[int, Callable[[Path], object]] = {}
        self.states: list[object] = []
        for module, name in (
            (os, "lstat"),
            (os, "scandir"),
            (os, "open"),
            (os, "fstat"),
            (os, "readlink"),
            (saver, "read_at"),
        ):
            monkeypatch.setattr(module, name, partial(self._before, getattr(module, name)))

    def state(self, root: Path) -> object:
        return {
            str(path.relative_to(root)): (
                path.lstat().st_mode,
                path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes(),
            )
            for path in root.rglob("*")
        }

    def save(self, store: Store, names: str, steps: dict[int, Callable[[Path], object]]) -> SavedManifest | None:
        """Save a tree with these files while the program takes steps; return None if the save noticed one."""
        shutil.rmtree(self.root, ignore_errors=True)
        write_tree(self.root, {name: b"before" for name in names.split()})
        (self.root / "latest").symlink_to("a")
        self.states = [self.state(self.root)]
        self.calls, self.steps, self.watches = 0, dict(steps), True
        try:
            return save(store, self.root)
        except FileChanged:
            return None
        finally:
            self.watches = False

    def _before(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.watches:
            self.watches = False
            if step := self.steps.pop(self.calls, None):
                step(self.root)
                self.states.append(self.state(self.root))
            self.calls, self.watches = self.calls + 1, True
        return call(*arguments, **options)


@pytest.mark.parametrize("change", CHANGES)
def test_tree_is_saved_as_it_was_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Whenever the program changes its tree, what is saved is all from before or all from after."""
    store, meddler, kept, saves = open_store(tmp_path / "store"), Meddler(tmp_path / "in", monkeypatch), set(), 0
    while not saves or not meddler.steps:
        saved = meddler.save(store, "a below/b z", {saves: CHANGES[change]})
        if saved is not None:
            store.restore(saved.id, tmp_path / f"out-{saves}", prefix="ckpt")
            kept.add(meddler.states.index(meddler.state(tmp_path / f"out-{saves}")))
        saves += 1
    assert saves > 20 and kept == ({0} if change == "a removed tree" else {0, 1})


def test_tree_of_a_program_that_writes_file_by_file_is_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, meddler = open_store(tmp_path / "store"), Meddler(tmp_path / "in", monkeypatch)
    assert meddler.save(store, "a z", {}) is not None
    for first, second in ("az", "za"):
        for begin, end in itertools.combinations(range(meddler.calls), 2):
            if begin % 6:
                continue  # all of them take half a minute
            steps = {
                moment: partial(write_tree, files={name: b"after!"}) for moment, name in ((begin, first), (end, second))
            }
            saved = meddler.save(store, "a z", steps)
            if saved is not None:
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                store.restore(saved.id, tmp_path / "out", prefix="ckpt")
                assert meddler.state(tmp_path / "out") in meddler.states, (first, begin, end)


def test_what_a_program_removes_after_it_was_opened_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that saves often removes its checkpoints soon, and a save must not lose that race each time."""
    write_tree(tmp_path / "in", {"a": b"x" * 3 * CHUNK_BYTES})
    store = open_store(tmp_path / "store")

    def read(*given: Any) -> int:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        return read_at(*given)

    monkeypatch.setattr(saver, "read_at", read)
    saved = save(store, tmp_path / "in")
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == {"a": b"x" * 3 * CHUNK_BYTES}


def test_tree_that_changed_since_it_was_found_complete_is_not_saved(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"a"})
    store, found = open_store(tmp_path / "store"), scan(tmp_path / "in")
    write_tree(tmp_path / "in", {"a": b"b"})
    with pytest.raises(FileChanged, match="changed before it could be saved"):
        save(store, tmp_path / "in", scans={"ckpt": found})
    save(store, tmp_path / "in", scans={"ckpt": scan(tmp_path / "in")})


def test_reading_begins_once_a_later_write_has_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gives all writes of a tick the same time, so a file that has just been written may change unnoticed."""
    write_tree(tmp_path / "in", {"a": b"a"})
    changed_ns, waited_s = (tmp_path / "in" / "a").stat().st_ctime_ns, list[float]()
    monkeypatch.setattr(tree_scan.time, "time_ns", lambda: changed_ns)
    monkeypatch.setattr(tree_scan.time, "sleep", waited_s.append)
    tree_scan.settled(tmp_path / "in")
    assert waited_s == [tree_scan.TICK_NS / 1e9]
    monkeypatch.setattr(tree_scan.time, "sleep", lambda wait_s: (tmp_path / "in" / "a").chmod(0o600))
    with pytest.raises(FileChanged):
        tree_scan.settled(tmp_path / "in")


def test_trouble_of_a_guest_with_its_own_tree_is_not_that_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed or replaced meanwhile is a change, so the save is tried again; what is closed is named."""
    write_tree(tmp_path / "in", {"d/a": b"a"})
    (tmp_path / "in" / "latest").symlink_to("d")
    store = open_store(tmp_path / "store")
    for name, module, call, code in (
        ("latest", Path, "readlink", errno.ENOENT),
        ("d", os, "scandir", errno.ENOTDIR),
        ("a", os, "open", errno.ELOOP),
        ("a", os, "open", errno.EACCES),
    ):
        real = getattr(module, call)

        def fails(path: Any, *more: Any, real: Any = real, name: str = name, code: int = code, **options: Any) -> Any:
            if str(path).endswith(f"in/{name}") or str(path).endswith(f"in/d/{name}"):
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *more, **options)

        with monkeypatch.context() as broken:
            broken.setattr(module, call, fails)
            with pytest.raises(StoreError) as found:
                save(store, tmp_path / "in")
        if code == errno.EACCES:
            assert str(found.value) == f"{tmp_path}/in/d/a cannot be read: Permission denied"
        else:
            assert isinstance(found.value, FileChanged), name


def test_paths_of_a_tree_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million files with paths of 4 KB would take 8 GB of the memory of their host's daemon."""
    write_tree(tmp_path / "in", {f"{'d' * 200}/{number}": b"" for number in range(10)})
    monkeypatch.setattr(tree_scan, "MOST_PATH_CHARS", 2220)
    assert len(tree_scan.settled(tmp_path / "in")) == 12
    (tmp_path / "in" / "one").touch()
    with pytest.raises(BadManifest, match="more than 2220 characters together"):
        tree_scan.scan(tmp_path / "in")
    store = open_store(tmp_path / "store")
    with pytest.raises(BadManifest, match="more than 2220 characters together"):
        save(store, tmp_path / "in")


def test_directory_replaced_by_a_link_during_a_save_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a program in a container could make the daemon, which may be root, read files of the host."""
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
    with pytest.raises(FileChanged, match="moved"):
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
        [FileEntry("c/a/up", LINK, 0, (), ".."), FileEntry("c/out", LINK, 0, (), "a/up/..")],
        [FileEntry("c/l", LINK, 0, (), "d"), FileEntry("c/l/f", REGULAR, 0)],
        [FileEntry("c/a", REGULAR, 0), FileEntry("c/a/f", REGULAR, 0)],
        [FileEntry("c", REGULAR, 0), FileEntry("c/f", REGULAR, 0)],
        [FileEntry("c/a/f", REGULAR, 0)],
        [FileEntry("c", DIRECTORY, 0), FileEntry("c/a/b", DIRECTORY, 0)],
        [FileEntry("a", 0o060000, 0)],
        [FileEntry("a", DIRECTORY, 3)],
    ],
)
def test_invalid_trees_are_refused(entries: list[FileEntry]) -> None:
    with pytest.raises(BadManifest):
        pack_tree(Tree(tuple(entries)), JOB, (5,))
    hostile = msgspec.structs.replace(manifest(), tree=msgspec.msgpack.encode(Tree(tuple(entries))))
    with pytest.raises(BadManifest):
        hostile.open()


def manifest(**changed: object) -> Manifest:
    tree = pack_tree(Tree(), JOB, (5,))
    whole = Manifest(2, JOB, 0, 1, 1, None, "checkpoint", 0, b"i" * 32, (5,), 0, 0, tree)
    return msgspec.structs.replace(whole, **changed)


def test_manifest_with_too_many_lengths_or_files_is_refused_before_they_are_decoded() -> None:
    lengths = msgspec.msgpack.encode(manifest(lengths=(5,) * 10_000_000))
    files = msgspec.msgpack.encode([[["a", 0, 0]] * (MAX_FILES + 1)])
    tracemalloc.start()
    try:
        with pytest.raises(BadManifest, match="length <= "):
            decode_manifest(fake_seal(lengths), fake_unseal)
        with pytest.raises(BadManifest, match="length <= "):
            manifest(tree=files).open()
        assert tracemalloc.get_traced_memory()[1] < 3 * len(lengths)
    finally:
        tracemalloc.stop()


def test_decoded_manifests_are_kept_by_what_they_take_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = b"".join(number.to_bytes(32) for number in range(MAX_CHUNKS))
    whole = manifest(ids=ids, lengths=tuple(range(1, MAX_CHUNKS + 1)))
    sealed = fake_seal(encode_manifest(whole))
    del whole, ids
    tracemalloc.start()
    try:
        decoded = decode_manifest(sealed, fake_unseal)[1]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * taken < decoded.memory_bytes < 1.2 * taken
    monkeypatch.setattr("ckptstore.store.KNOWN_BYTES", decoded.memory_bytes)
    store = open_store(tmp_path / "store")
    store._remember(b"one", decoded)
    store._remember(b"two", decoded)
    assert list(store._known) == [b"two"]
    store.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": b"short"}, "ids"),
        ({"ids": b"i" * 64, "lengths": (5, 5)}, "unique"),
        ({"lengths": ()}, "lengths"),
        ({"lengths": (0,)}, "lengths"),
        ({"lengths": (1 << 23,)}, "lengths"),
        ({"realm": b"short"}, "realm"),
        ({"total_bytes": -1}, "size"),
        ({"entries": MAX_FILES + 1}, "at most"),
        ({"ids": bytes(range(32)) * (MAX_CHUNKS + 1), "lengths": (1,) * (MAX_CHUNKS + 1)}, "at most"),
        ({"version": 1}, "upgrade"),
        ({"job": b"short"}, "job"),
        ({"config": -1}, "config"),
        ({"term": -1}, "term"),
        ({"seq": -1}, "seq"),
        ({"parent": b"short"}, "parent"),
        ({"user": "u" * 256}, "user"),
        ({"entries": -1}, "size"),
    ],
)
def test_invalid_manifests_are_refused(changed: dict[str, object], words: str) -> None:
    assert encode_manifest(manifest())
    with pytest.raises(BadManifest, match=words):
        encode_manifest(manifest(**changed))


@given(st.binary(max_size=60))
def test_hostile_list_of_files_is_refused(tree: bytes) -> None:
    with contextlib.suppress(BadManifest):
        assert len(manifest(tree=tree).open().files) <= len(tree)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_hostile_stream_raises_corrupt_chunk(data: bytes, piece: int) -> None:
    stream = ObjectStream()
    count = 0
    try:
        for start in range(0, len(data), piece):
            count += len(list(stream.feed(data[start : start + piece])))
    except CorruptChunk:
        pass
    assert count == 0


@given(st.lists(st.binary(max_size=100), max_size=5), st.integers(1, 70))
def test_stream_gives_its_chunks_in_any_pieces(chunks: list[bytes], piece: int) -> None:
    data = b"".join(frame(chunk) for chunk in chunks)
    stream = ObjectStream()
    out = [pair for start in range(0, len(data), piece) for pair in stream.feed(data[start : start + piece])]
    assert [(header.id, stored) for header, stored in out] == [(chunk_id(chunk), chunk) for chunk in chunks]
    assert stream.clean


@given(st.binary(max_size=40), st.data())
def test_flipped_header_bit_is_found(chunk: bytes, data: st.DataObject) -> None:
    header = bytearray(frame(chunk)[:HEADER_BYTES])
    place = data.draw(st.integers(0, HEADER_BYTES * 8 - 1))
    header[place // 8] ^= 1 << (place % 8)
    with pytest.raises(CorruptChunk):
        decode_header(bytes(header))


def test_manifest_is_accepted_only_with_all_its_chunks(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(3 * 1024 * 1024), "b": os.urandom(100)})
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    saved = save(ours, tmp_path / "in")
    ids = saved.manifest.chunks
    with pytest.raises(MissingChunks):
        theirs.accept_manifest(saved.sealed)
    assert theirs.missing(ids) == list(ids)
    receiver = theirs.receive(10**8)
    for piece in ours.stream(ids):
        for start in range(0, len(piece), 100_000):
            feed(receiver, piece[start : start + 100_000])
    assert receiver.finish() == len(ids)
    assert theirs.accept_manifest(saved.sealed) == saved.id
    theirs.restore(saved.id, tmp_path / "out", prefix="ckpt")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")


def test_wrong_endless_and_truncated_streams_leave_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    good = frame(b"good")
    wrong = good[:-4] + b"evil"
    for data, limit in [(wrong, 1000), (good * 100, 200), (good[:-1], 1000)]:
        receiver = store.receive(limit)
        with pytest.raises(CorruptChunk):
            feed(receiver, data)
            receiver.finish()
        receiver.abort()
    assert store.missing([chunk_id(b"good")]) == [chunk_id(b"good")]
    assert not list((tmp_path / "store" / "packs").iterdir()) and not list((tmp_path / "store" / "tmp").iterdir())


def test_stream_that_ends_inside_a_chunk_leaves_no_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    receiver = store.receive(1000)
    feed(receiver, frame(b"good")[:-1])
    with pytest.raises(CorruptChunk, match="inside a chunk"):
        receiver.finish()
    assert not list((tmp_path / "store" / "tmp").iterdir())


def test_receiver_that_has_ended_takes_nothing_more(tmp_path: Path) -> None:
    """A peer's bytes may still arrive while the call that began the stream is given up."""
    store, good, late = open_store(tmp_path / "store"), frame(b"good"), frame(b"late")
    receiver = store.receive(len(good) + len(late))
    feed(receiver, good)
    assert receiver.keep() == 1 and receiver.keep() == 0
    assert feed(receiver, late) == 0 and receiver.arrived == {chunk_id(b"good")}
    receiver.abort()
    assert store.missing([chunk_id(b"good"), chunk_id(b"late")]) == [chunk_id(b"late")]
    ended = store.receive(len(late))
    ended.abort()
    ended.abort()
    assert feed(ended, late) == 0 and ended.keep() == 0
    exact = store.receive(len(late))
    feed(exact, late)
    assert exact.finish() == 1, "as much as was asked for"


def test_restore_makes_parents_and_leaves_no_file_open(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {f"{number}": b"x" for number in range(20)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    store.restore(saved.id, tmp_path / "made" / "below" / "out", prefix="ckpt")
    assert descriptors_below(tmp_path / "made") == []
    assert read_tree(tmp_path / "made" / "below" / "out") == read_tree(tmp_path / "in")


def test_replaced_writer_is_refused(tmp_path: Path) -> None:
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


def test_fence_moves_only_for_a_writer_that_is_vouched_for(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")

    def sealed(seq: int, term: int) -> bytes:
        return fake_seal(encode_manifest(manifest(ids=b"", lengths=(), seq=seq, term=term)))

    store.accept_manifest(sealed(1, 5))
    for fence in ("check", "ignore"):
        assert store.accept_manifest(sealed(2, 1 << 40), fence)
        assert store.fence(JOB) == Fence(5, 0)
    with pytest.raises(FenceError, match="replaced"):
        store.accept_manifest(sealed(3, 4), "check")
    assert store.accept_manifest(sealed(3, 4), "ignore"), "it was asked for by its id"
    assert store.accept_manifest(sealed(4, 6), "raise") and store.fence(JOB) == Fence(6, 0)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"{}", b'{"term":'])
def test_damaged_fence_lets_no_writer_in(damage: bytes, tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": b"x"})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in", seq=1, term=5)
    fence = tmp_path / "store" / "fences" / JOB.hex()
    fence.write_bytes(damage)
    for term in (4, 6):
        with pytest.raises(FenceError, match="remove the file"):
            save(store, tmp_path / "in", seq=2, term=term)
    assert fence.read_bytes() == damage
    fence.unlink()
    save(store, tmp_path / "in", seq=2, term=6)


PLACES = {  # offset of a byte of each class in an object
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


def test_object_that_decodes_to_another_chunk_is_found(tmp_path: Path) -> None:
    """The checksum of its stored bytes is right: they were damaged before they were compressed."""
    store = open_store(tmp_path / "store")
    writer = PackWriter(store.tmp, store.packs)
    stored = encode(b"evil" * 100, Encoding(ZSTD))
    writer.add(*wrap(chunk_name(b"good" * 100), stored, 400, ZSTD, 0, None))
    store.publish_pack(writer)
    report = verify(store)
    assert len(report.quarantined) == 1 and report.bad_chunks == 1 and not list(store.packs.iterdir())


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["open", "sealed"])
@pytest.mark.parametrize("place", PLACES)
def test_every_class_of_damage_is_found_and_the_rest_is_kept(
    place: str, cipher: StateCipher | None, tmp_path: Path
) -> None:
    rest = os.urandom(5000)
    write_tree(tmp_path / "in", {"a": os.urandom(5000), "b": rest})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in", cipher=cipher)
    copied = open_store(tmp_path / "copied")
    copy(store, copied, saved)
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    second = 16 + (pack.stat().st_size - 16) // 2
    damage(pack, second + PLACES[place], 4)
    with pytest.raises(StoreError):
        store.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert not (tmp_path / "out").exists(), "I3: all or nothing"
    report = verify(store)
    assert report.quarantined == (pack.name,) and report.damaged_manifests == (saved.id,)
    assert (tmp_path / "store" / "quarantine" / pack.name).exists()
    assert store.missing(saved.manifest.chunks) == [saved.manifest.chunks[1]], "the intact chunk is kept"
    with pytest.raises(StoreError):
        store.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    copy(copied, store, saved)
    store.restore(saved.id, tmp_path / "out", prefix="ckpt", cipher=cipher)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
    store.close()
    copied.close()


@pytest.mark.parametrize("place", [0, 8, 9, 10, 13])
def test_pack_with_a_damaged_header_is_quarantined(place: int, tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(500)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    damage(pack, place, 2)
    report = verify(store)
    assert report.quarantined == (pack.name,) and report.damaged_manifests == ()
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")
    store.close()


def test_damaged_header_costs_one_chunk(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {name: os.urandom(500) for name in "abc"})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = store.packs.iterdir()
    chunks = sorted(store.index.chunks_of(pack.stem).items(), key=lambda chunk: chunk[1].offset)
    damage(pack, chunks[1][1].offset)
    verify(store)
    assert store.missing(saved.manifest.chunks) == [chunks[1][0]]
    store.close()


def test_damaged_pack_is_salvaged_once_by_calls_at_the_same_time(tmp_path: Path) -> None:
    """The jobs of an array share a working directory, and find its damage together."""
    write_tree(tmp_path / "in", {name: os.urandom(500) for name in "abc"})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = store.packs.iterdir()
    damage(pack, store.index.chunks_of(pack.stem)[saved.manifest.chunks[0]].offset + HEADER_BYTES)
    first, both = threading.Event(), list[None]()
    real = store.is_intact

    def together(*given: Any) -> bool:
        if not first.is_set():
            first.set()
            other.start()
        return real(*given)

    other = threading.Thread(target=lambda: both.append(store.salvage(pack)))
    store.is_intact = together  # type: ignore[method-assign]
    both.append(store.salvage(pack))
    other.join()
    assert both == [None, None] and store.missing(saved.manifest.chunks) == [saved.manifest.chunks[0]]
    assert len(list(store.packs.iterdir())) == 1 and not list(store.tmp.iterdir())
    store.close()


def test_salvage_keeps_nobody_waiting_while_it_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(500), "b": os.urandom(500)})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in")
    (pack,) = store.packs.iterdir()
    held, real_intact, real_fsync = list[bool](), store.is_intact, os.fsync

    def intact(*given: Any) -> bool:
        held.append(store.lock.locked())
        return real_intact(*given)

    def fsync(descriptor: int) -> None:
        if store.lock.locked() and stat.S_ISREG(os.fstat(descriptor).st_mode):
            assert synced, "the pack is durable before the lock is taken"
        synced.append(descriptor)
        real_fsync(descriptor)

    synced = list[int]()
    store.is_intact = intact  # type: ignore[method-assign]
    monkeypatch.setattr(os, "fsync", fsync)
    store.salvage(pack)
    assert held and not any(held)
    with store.lock, store.wanted([b"x" * 32]):
        pass
    store.close()


def test_salvage_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(500), "b": os.urandom(500)})
    store = open_store(tmp_path / "store")
    saved = save(store, tmp_path / "in")
    (pack,) = store.packs.iterdir()
    before = descriptors_below(tmp_path)

    intact = iter([True])

    def fails(*given: Any) -> bool:
        for answer in intact:
            return answer
        raise OSError(errno.EIO, "the disk fails")  # at the second chunk, so the first is written

    monkeypatch.setattr(store, "is_intact", fails)
    with pytest.raises(OSError, match="the disk fails"):
        store.salvage(pack)
    assert list(store.packs.iterdir()) == [pack] and not list(store.tmp.iterdir())
    assert descriptors_below(tmp_path) == before and not store.missing(saved.manifest.chunks)
    store.close()


def test_pack_that_is_collected_while_it_is_salvaged_does_not_come_back(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(500)})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in")
    (pack,) = store.packs.iterdir()
    store.is_intact = lambda *given: pack.unlink() is None  # type: ignore[method-assign]
    store.salvage(pack)
    assert not list(store.packs.iterdir()) and not list(store.tmp.iterdir())
    store.close()


def test_files_removed_during_a_scan_are_ignored(tmp_path: Path) -> None:
    """A dangling link simulates a file that disappears between listing and opening."""
    write_tree(tmp_path / "in", {"a": os.urandom(500)})
    store = open_store(tmp_path / "store")
    save(store, tmp_path / "in")
    before = store.stored_bytes(), verify(store)
    for gone in (store.packs / f"{'0' * 32}.pack", store.manifest_files / ("0" * 64)):
        gone.symlink_to(tmp_path / "nowhere")
    assert (store.stored_bytes(), verify(store)) == before
    store.close()


def test_index_is_rebuilt_from_the_packs(tmp_path: Path) -> None:
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


def test_full_disk_keeps_earlier_checkpoints(tmp_path: Path) -> None:
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


def test_what_no_manifest_can_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "store")
    for name, words in (
        ("sparse", "more than 1 TiB"),
        ("caf\udce9", r"the name ckpt/caf\\xe9 is not UTF-8"),
        ("a" * 200, "over the limit"),
    ):
        source = tmp_path / "in"
        source.mkdir()
        with monkeypatch.context() as bounded:
            if words == "over the limit":
                bounded.setattr(manifest_module, "MAX_MANIFEST_BYTES", 300)
            with (source / name).open("wb") as file:
                file.truncate((8 << 40) if name == "sparse" else 5)
            with pytest.raises(BadManifest, match=words):
                save(store, source)
        shutil.rmtree(source)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("caf\udce9")
    with pytest.raises(BadPath, match="is not UTF-8"):
        save(store, tmp_path / "in")
    assert not [*store.packs.iterdir(), *store.tmp.iterdir(), *store.manifest_files.iterdir()]


def test_number_of_files_is_bounded_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "MAX_FILES", 3)
    write_tree(tmp_path / "in", {name: b"" for name in "abc"})
    with pytest.raises(BadManifest, match="more than 3 files"):
        save(open_store(tmp_path / "store"), tmp_path / "in")


def test_quota_ends_a_stream_that_exceeds_it(tmp_path: Path) -> None:
    theirs = open_store(tmp_path / "theirs", quota_bytes=100_000)
    one, two = theirs.receive(10**9), theirs.receive(10**9)
    with pytest.raises(QuotaExceeded):
        for _ in range(100):
            feed(one, frame(os.urandom(1000)))
            feed(two, frame(os.urandom(1000)))
    taken = sum(path.stat().st_size for path in theirs.tmp.iterdir())
    assert 90_000 < taken < 105_000, "what comes in at the same time counts together"
    for receiver in (one, two):
        receiver.abort()
    assert not theirs.incoming
    three, four = theirs.receive(10**9), theirs.receive(10**9)
    for receiver in (three, four):
        for _ in range(40):
            feed(receiver, frame(os.urandom(1000)))
    assert three.finish() == 40
    with pytest.raises(QuotaExceeded):
        for _ in range(40):
            feed(four, frame(os.urandom(1000)))


def test_save_beyond_the_quota_ends_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = open_store(tmp_path / "store", quota_bytes=1_000_000), list[int]()
    write = pack_module.write_at
    monkeypatch.setattr(
        pack_module, "write_at", lambda file, data, offset: written.append(len(data)) or write(file, data, offset)
    )
    write_tree(tmp_path / "in", {f"{number:02}": os.urandom(300_000) for number in range(50)})
    other = store.receive(10**9)
    feed(other, frame(os.urandom(500_000)))
    with pytest.raises(QuotaExceeded, match="store_quota_gib"):
        save(store, tmp_path / "in")
    assert sum(written) <= 1_000_000, "what is saved and what comes in at the same time count together"
    other.abort()
    assert not store.incoming and not list(store.tmp.iterdir()) and not list(store.packs.iterdir())
    assert not store.manifests()
    write_tree(tmp_path / "small", {"file": os.urandom(900_000)})
    save(store, tmp_path / "small")
    store.close()


def test_number_of_chunks_of_a_stream_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "MOST_OBJECTS", 3)
    receiver = open_store(tmp_path / "theirs").receive(10**9)
    with pytest.raises(CorruptChunk, match="more than 3 chunks"):
        for _ in range(4):
            feed(receiver, frame(os.urandom(8)))


def test_stream_that_ends_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store", quota_bytes=1_000_000)
    ends, other = store.receive(1 << 30, foreign=True), store.receive(1 << 30, foreign=True)
    feed(ends, frame(os.urandom(600_000)))
    real = store.publish_pack

    def meanwhile(writer: PackWriter) -> None:
        real(writer)
        feed(other, frame(os.urandom(100_000)))

    monkeypatch.setattr(store, "publish_pack", meanwhile)
    assert ends.finish() == 1
    monkeypatch.undo()
    assert other.finish() == 1
    store.close()


def test_quota_is_enforced(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    store = open_store(tmp_path / "store", quota_bytes=4000)
    with pytest.raises(QuotaExceeded, match="nothing was saved"):
        save(store, tmp_path / "in")
    assert store.manifests() == []
    write_tree(tmp_path / "names", {f"{number:0200}": b"" for number in range(100)})
    with pytest.raises(QuotaExceeded):
        save(store, tmp_path / "names")  # the manifest counts, too
    assert store.manifests() == []


def test_part_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(ours, tmp_path / "in")
    write_tree(tmp_path / "in", {"b": b""})
    named = save(ours, tmp_path / "in", seq=2)
    receiver = theirs.receive(10**6, foreign=True)
    for piece in ours.stream(saved.manifest.chunks):
        feed(receiver, piece)
    receiver.finish()
    monkeypatch.setattr(objects, "LEAST_FREE", 1 << 62)
    monkeypatch.setattr(objects, "LEAST_SHARE", 1)  # all of it
    receiver = theirs.receive(10**6, foreign=True)
    write_tree(tmp_path / "in", {"c": os.urandom(5000)})
    with monkeypatch.context() as roomy:
        roomy.setattr(objects, "LEAST_FREE", 0)
        more = save(ours, tmp_path / "in", seq=3)
    with pytest.raises(DiskFull, match="stay free"):
        for piece in ours.stream(more.manifest.chunks):
            feed(receiver, piece)
    with pytest.raises(DiskFull):
        theirs.accept_manifest(named.sealed)
    assert theirs.manifests() == []
    monkeypatch.setattr(objects, "LEAST_FREE", 0)
    theirs.accept_manifest(named.sealed)
    ours.close()
    theirs.close()


def test_foreign_chunks_have_their_own_quota(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(ours, tmp_path / "in")
    theirs.user, theirs.foreign_quota_bytes = "eve", 4000
    assert theirs.remaining_quota() == 4000
    for foreign in (True, False):
        receiver = theirs.receive(10**6, foreign)
        with contextlib.nullcontext() if not foreign else pytest.raises(QuotaExceeded, match="foreign_quota_gib"):
            for piece in ours.stream(saved.manifest.chunks):
                feed(receiver, piece)
            assert receiver.finish() in {0, 1}
        receiver.abort()
    assert theirs.foreign_bytes() == 0
    theirs.foreign_quota_bytes = 20_000
    write_tree(tmp_path / "in", {"a": os.urandom(6000)})
    copied = save(ours, tmp_path / "in", seq=2)
    receiver = theirs.receive(10**6, foreign=True)
    for piece in ours.stream(copied.manifest.chunks):
        feed(receiver, piece)
    receiver.finish()
    theirs.accept_manifest(copied.sealed)
    for ruin in (lambda: None, (tmp_path / "theirs" / "index.sqlite").unlink):
        theirs.close()
        ruin()
        theirs = open_store(tmp_path / "theirs")
        theirs.user = "eve"
        assert theirs.foreign_bytes() == 3 * BLOCK_BYTES, "it is known after a restart, also without the index"
    theirs.foreign_quota_bytes = 14_000
    assert 0 < (theirs.remaining_quota() or 0) < 4000
    theirs.forget(copied.id)
    theirs.collect(min_age_s=0, now_unix=time.time() + 10)
    assert theirs.foreign_bytes() == 0


def test_chunks_of_the_nodes_own_user_are_not_foreign(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(ours, tmp_path / "in")
    theirs.user, theirs.foreign_quota_bytes = "eve", 4000
    receiver = theirs.receive(10**6)
    for piece in ours.stream(saved.manifest.chunks):
        feed(receiver, piece)
    assert receiver.finish() == 1 and theirs.foreign_bytes() == 0


def test_one_file_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"sub/a": b"first", "sub/b": os.urandom(9000)})
    saved = save(store, tmp_path / "in")
    for name in ("a", "b"):
        assert (
            b"".join(map(bytes, store.read_file(saved.id, f"ckpt/sub/{name}")))
            == (tmp_path / "in" / "sub" / name).read_bytes()
        )
    for path in ("ckpt/sub", "ckpt/sub/c", "sub/a"):
        with pytest.raises(NotFound, match="not a file"):
            list(store.read_file(saved.id, path))


def offered(store: Store, count: int, tree_bytes: int = 0) -> list[bytes]:
    """Offer a store manifests of other users' jobs; return those that it took."""
    taken = []
    for number in range(count):
        sealed = fake_seal(
            encode_manifest(manifest(ids=b"", lengths=(), seq=number, tree=b"t" * tree_bytes, user="ada"))
        )
        with contextlib.suppress(QuotaExceeded):
            taken.append(store.accept_manifest(sealed))
    return taken


@pytest.mark.parametrize("tree_bytes", [0, 3 * BLOCK_BYTES])
def test_manifests_count_into_the_quotas(tree_bytes: int, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", quota_bytes=40 * BLOCK_BYTES)
    store.user, store.foreign_quota_bytes = "eve", 20 * BLOCK_BYTES
    taken = offered(store, 30, tree_bytes)
    assert len(taken) == (20 if tree_bytes == 0 else 5)
    assert store.foreign_bytes() == store.stored_bytes() == 20 * BLOCK_BYTES
    store.forget(taken[0])
    assert offered(store, 1, tree_bytes) == taken[:1], "what was forgotten counts no more"
    store.foreign_quota_bytes, store.quota_bytes = None, 24 * BLOCK_BYTES
    assert len(offered(store, 30, tree_bytes)) == (24 if tree_bytes == 0 else 6), "the quota of all binds, too"


def test_manifests_in_memory_are_bounded_in_number_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.store.KNOWN_MANIFESTS", 10)
    monkeypatch.setattr("ckptstore.store.KNOWN_BYTES", 100_000)
    store = open_store(tmp_path / "store")
    small, large = offered(store, 20), offered(store, 20, 30_000)
    for identity in (*small, *large, *large):
        store.manifest(identity)
        assert len(store._known) <= 10 and store._known_bytes <= 100_000
        assert store._known_bytes == sum(known.memory_bytes for known in store._known.values())
    assert len(store._known) == 3, "three large ones fit"
    assert len(store.manifests()) == 40, "all are listed, from what is kept of each"


def test_manifest_that_is_too_large_is_not_decoded(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert offered(store, 1, MAX_MANIFEST_BYTES - 1024)
    with pytest.raises(BadManifest, match="over the limit"):
        offered(store, 1, MAX_MANIFEST_BYTES)


def test_forget_old_keeps_checkpoints_that_may_be_committed(tmp_path: Path) -> None:
    """After commit 2 of term 1, terms 2 and 3 each replicated a third checkpoint that was never committed."""
    store = open_store(tmp_path / "store")
    saved = {}
    for seq, term in ((1, 1), (2, 1), (3, 2), (3, 3)):
        write_tree(tmp_path / "in", {"a": os.urandom(100)})
        saved[seq, term] = save(store, tmp_path / "in", seq=seq, term=term).id
    assert store.forget_old(JOB, needed=()) == [] == store.forget_old(JOB, needed=(1, 2))
    assert store.forget_old(JOB, needed=(2,)) == [saved[1, 1]]
    assert {info.id for info in store.manifests(JOB)} == {saved[2, 1], saved[3, 2], saved[3, 3]}
    last = save(store, tmp_path / "in", seq=4, term=3).id
    assert store.forget_old(JOB, needed=(2, 4)) == [saved[3, 2], saved[3, 3]], "an older predecessor is kept by more"
    assert {info.id for info in store.manifests(JOB)} == {saved[2, 1], last}


def test_collection_keeps_reachable_young_and_held_packs(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    first = save(store, tmp_path / "in", seq=1)
    (tmp_path / "in" / "a").write_bytes(os.urandom(5000))
    second = save(store, tmp_path / "in", seq=2)
    assert store.forget_old(JOB, needed=(2,)) == [first.id]
    assert store.collect(min_age_s=600, now_unix=time.time()).packs == 0, "the pack is too young"
    for pack in (tmp_path / "store" / "packs").iterdir():
        os.utime(pack, (0, 0))
    assert store.missing(first.manifest.chunks) == []
    assert store.collect(min_age_s=600, now_unix=time.time()).packs == 0, "a peer relies on the chunk being here"
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1
    store.restore(second.id, tmp_path / "out", prefix="ckpt")
    with pytest.raises(NotFound):
        store.manifest(first.id)


def test_pack_with_little_reachable_data_is_rewritten(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"large": os.urandom(90_000), "small": os.urandom(5000)})
    first = save(store, tmp_path / "in", seq=1)
    (tmp_path / "in" / "large").write_bytes(os.urandom(90_000))
    second = save(store, tmp_path / "in", seq=2)
    later = time.time() + 1000
    assert store.collect(min_age_s=0, now_unix=later) == CollectReport(0, 0), "all chunks are reachable"
    store.forget(first.id)
    done = store.collect(min_age_s=0, now_unix=later)
    assert done.packs == 1 and 90_000 < done.bytes < 91_000
    assert store.collect(min_age_s=0, now_unix=later) == CollectReport(0, 0)
    for _ in range(2):
        store.restore(second.id, tmp_path / "out", prefix="ckpt")
        assert read_tree(tmp_path / "out") == read_tree(tmp_path / "in")
        shutil.rmtree(tmp_path / "out")
        store.close()
        (tmp_path / "store" / "index.sqlite").unlink()
        store = open_store(tmp_path / "store")


def test_pack_held_during_its_collection_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save finds a chunk of a pack at the moment the collector finds the pack unreachable."""
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
    assert again[0].new_bytes == 0 and not list(store.tmp.iterdir())
    store.restore(again[0].id, tmp_path / "out", prefix="ckpt")


def littered(store: Store, source: Path) -> SavedManifest:
    """Make one pack that nothing needs, and one that is needed in part; return what needs that."""
    write_tree(source, {"large": os.urandom(90_000), "small": os.urandom(5000)})
    sparse = save(store, source, seq=1)
    (source / "large").write_bytes(os.urandom(90_000))
    kept = save(store, source, seq=2)
    write_tree(source, {"large": os.urandom(70_000)})
    dead = save(store, source, seq=3)
    for saved in (sparse, dead):
        store.forget(saved.id)
    return kept


def test_full_disk_keeps_no_collection_from_freeing_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    littered(store, tmp_path / "in")

    def full(*asked: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(collector, "PackWriter", full)
        with pytest.raises(DiskFull):
            store.collect(min_age_s=0, now_unix=time.time() + 1000)
    assert len(list(store.packs.iterdir())) == 2, "what nothing needs is gone"
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1


def test_two_collections_at_once_remove_the_same_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    kept = littered(store, tmp_path / "in")
    done: list[CollectReport] = []
    checked = collector.check_stored

    def meanwhile(header: ObjectHeader, stored: Bytes) -> None:
        monkeypatch.setattr(collector, "check_stored", checked)
        done.append(store.collect(min_age_s=0, now_unix=time.time() + 1000))

    monkeypatch.setattr(collector, "check_stored", meanwhile)
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1
    assert done[0].packs == 1 and not list(store.tmp.iterdir())
    store.restore(kept.id, tmp_path / "out", prefix="ckpt")


def test_chunks_that_are_fetched_are_kept_until_their_manifest_comes(tmp_path: Path) -> None:
    ours, theirs = open_store(tmp_path / "ours"), open_store(tmp_path / "theirs")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(ours, tmp_path / "in")
    with theirs.wanted(saved.manifest.chunks):
        receiver = theirs.receive(10**6)
        for piece in ours.stream(saved.manifest.chunks):
            feed(receiver, piece)
        receiver.finish()
        assert theirs.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 0
    assert theirs.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 1


def test_accepted_manifest_holds_its_chunks_against_a_running_collection(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"a": os.urandom(5000)})
    saved = save(store, tmp_path / "in")
    store.forget(saved.id)
    for pack in store.packs.iterdir():
        os.utime(pack, (0, 0))
    store.accept_manifest(saved.sealed)
    seen_before: set[bytes] = set()
    collector.collect(store, store.manifest_files, seen_before, min_age_s=600, now_unix=time.time())
    store.restore(saved.id, tmp_path / "out", prefix="ckpt")


def test_manifest_that_is_damaged_or_forgotten_meanwhile_ends_no_collection(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    kept = littered(store, tmp_path / "in")
    lost = save(store, tmp_path / "in", seq=4)
    assert len(store.manifests()) == 2
    damage(store.manifest_files / lost.id.hex(), 40)
    store._drop_known(lost.id)
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000).packs == 2
    store.restore(kept.id, tmp_path / "out", prefix="ckpt")


def test_pack_with_a_damaged_chunk_is_not_rewritten(tmp_path: Path) -> None:
    """`verify` judges it; a copy would look new."""
    store = open_store(tmp_path / "store")
    write_tree(tmp_path / "in", {"large": os.urandom(90_000), "small": os.urandom(5000)})
    first = save(store, tmp_path / "in", seq=1)
    (pack,) = store.packs.glob("*.pack")
    (tmp_path / "in" / "large").write_bytes(os.urandom(90_000))
    save(store, tmp_path / "in", seq=2)
    store.forget(first.id)
    small = min(store.index.chunks_of(pack.stem).values(), key=lambda where: where.length)
    damage(pack, small.offset + small.length - 1)
    assert store.collect(min_age_s=0, now_unix=time.time() + 1000) == CollectReport(0, 0)
    assert pack.exists() and not list(store.tmp.iterdir())


def test_concurrent_saves_do_not_interfere(tmp_path: Path) -> None:
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


def test_empty_pack_is_not_published(tmp_path: Path) -> None:
    for name in ("tmp", "packs"):
        (tmp_path / name).mkdir()
    PackWriter(tmp_path / "tmp", tmp_path / "packs").publish()
    assert not list((tmp_path / "packs").iterdir()) and not list((tmp_path / "tmp").iterdir())
