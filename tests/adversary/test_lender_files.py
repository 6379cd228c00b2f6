"""A hostile lender answers `mesh cp`: what it sends stays below the destination, and within stated bounds."""

import io
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptstore.manifest import MAX_FILES
from mesh.api.file_stream import (
    HEADER_LIMIT,
    NOT_A_STREAM,
    TOO_MANY,
    Data,
    End,
    Entry,
    entries,
    frame,
    packed,
    unpack,
    unpack_file,
)
from mesh.sdk.futures import ANSWER_LIMIT, JobFailed, _answer_files
from mesh.sdk.remote import ANSWER, PICKLE
from mesh.util.errors import MeshError
from tests.adversary.lender import as_stream, device, directory, escaping_tar, file, link, stream

LATER = b"#!/bin/sh\nmore than before\n"
ATTACKS: dict[str, tuple[bytes, ...]] = {
    "parent": (file("out/../../outside/x"),),
    "absolute": (file("/tmp/absolute-of-a-lender"), file("out//x")),
    "dots": (directory("out"), file("out/./../x")),
    "link to the outside": (directory("out"), link("out/l", "../outside"), file("out/l/x")),
    "absolute link": (directory("out"), link("out/l", "/etc"), file("out/l/x")),
    "link inside, then behind it": (directory("out/d"), link("out/l", "d"), file("out/l/x")),
    "link as the top": (link("out", "outside"), file("out/x")),
    "climbing chain": (directory("out/a/b"), link("out/a/b/up", "../.."), link("out/l", "a/b/up/.."), file("out/l/x")),
    "file, then a link in its place": (file("out/f"), link("out/f", "../outside/kept"), file("out/f", LATER)),
    "case of a link": (link("out/Link", "../outside"), file("out/link/x")),
    "device": (directory("out"), device("out/null", stat.S_IFCHR)),
    "pipe": (directory("out"), device("out/pipe", stat.S_IFIFO)),
    "socket": (directory("out"), device("out/socket", stat.S_IFSOCK)),
    "no kind": (directory("out"), device("out/nothing", 0)),
    "setuid": (file("out/program", LATER, 0o6755), directory("out/d", 0o7777)),
    "long name": (file("out/" + "n" * 256),),
    "long path": (file("out/" + "p/" * 2047 + "f"),),
    "deep": (file("out/" + "p/" * 300 + "f"),),
    "empty name": (file(b"out/"), file(b"")),
    "NUL": (file("out/a\0b"),),
    "not UTF-8": (file(b"out/\xff\xfe\x1b[2J"),),
    "duplicates": (*(file("out/same", str(number).encode()) for number in range(50)),),
    "file and directory": (file("out/a"), file("out/a/b")),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("mine")
    (tmp_path / "to").mkdir()
    return tmp_path


def check(place: Path) -> None:
    """Check that nothing has left the directory `to`, and that nothing in it is special."""
    assert sorted(path.name for path in place.iterdir()) == ["outside", "to"]
    assert [path.name for path in (place / "outside").iterdir()] == ["kept"]
    assert (place / "outside" / "kept").read_text() == "mine"
    for where, names, files in os.walk(place / "to"):
        for path in (Path(where, name) for name in [*names, *files]):
            mode = path.lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            assert stat.S_ISLNK(mode) or not mode & 0o7022
            assert Path(os.path.realpath(path)).is_relative_to(place / "to")


def test_copy_has_the_name_that_was_asked_for_and_nothing_beside_it(place: Path) -> None:
    """Regression: the lender chose names in the directory that the user copied to, as `~/.bashrc`."""
    home = place / "to"
    (home / ".bashrc").write_text("mine")
    for attack in (
        (file("out/x"), file(".bashrc", LATER)),
        (file(".bashrc", LATER), file("out/x")),
        (file(".bashrc", LATER),),
    ):
        with suppress(MeshError):
            unpack(stream(*attack), home, "out")
        assert (home / ".bashrc").read_text() == "mine" and {path.name for path in home.iterdir()} == {".bashrc", "out"}
        shutil.rmtree(home / "out", ignore_errors=True)
        (home / "out").unlink(missing_ok=True)
    with pytest.raises(MeshError, match="more than was asked for"):
        unpack(stream(file("out/x"), file(".ssh/authorized_keys", LATER)), home, "out")


@pytest.mark.parametrize("whole", [True, False], ids=["into a directory", "to a new name"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_copy_of_a_hostile_tree_stays_below_its_destination(attack: str, whole: bool, place: Path) -> None:
    target = place / "to" if whole else place / "to" / "new"
    try:
        copied = unpack(stream(*ATTACKS[attack]), target, "out")
    except MeshError as error:
        assert "\x1b" not in str(error).replace("\\x1b", "")
    else:
        assert copied.files + copied.left_out or attack in {"device", "pipe", "socket"}
    check(place)
    assert not Path("/tmp/absolute-of-a-lender").exists()


def test_archive_that_escapes_from_tarfile_stays_inside(place: Path) -> None:
    """Finding 7: the archive of CVE-2025-4517, first by the old way, then by ours."""
    old = place / "old"
    (old / "outside").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(escaping_tar())) as tar, suppress(OSError, tarfile.TarError):
        tar.extractall(old / "to", filter="data")
    if sys.version_info < (3, 11, 13):  # the attack must work where nothing prevents it
        assert (old / "outside" / "newfile").exists()
    subprocess.run(["/bin/rm", "-rf", str(old)], check=True)
    with pytest.raises(MeshError):
        unpack(as_stream(escaping_tar()), place / "to", "out")
    check(place)


def test_user_s_own_links_at_the_destination_are_not_followed(place: Path) -> None:
    (place / "to" / "out").symlink_to(place / "outside")
    with pytest.raises(MeshError, match="cannot write"):
        unpack(stream(file("out/x")), place / "to", "out")
    assert [path.name for path in (place / "outside").iterdir()] == ["kept"]
    (place / "to" / "out").unlink()
    (place / "to" / "out").mkdir()
    (place / "to" / "out" / "kept").symlink_to(place / "outside" / "kept")
    unpack(stream(file("out/kept", b"new")), place / "to", "out")
    assert (place / "to" / "out" / "kept").read_text() == "new"
    check(place)


def test_links_that_lead_out_are_left_out_and_counted(place: Path) -> None:
    frames = [directory("out"), link("out/python", "/usr/bin/python3"), link("out/latest", "a"), file("out/a", b"12")]
    assert unpack(stream(*frames), place / "to", "out") == (1, 2, 1)
    assert (place / "to" / "out" / "latest").read_text() == "12" and not (place / "to" / "out" / "python").is_symlink()


# --- bounds


def test_copy_over_its_limit_ends_before_it_is_written(place: Path) -> None:
    """Finding 12: the apparent size counts, not the data sent."""
    hole = frame(Entry(b"out/hole", stat.S_IFREG | 0o644, size=2**62))
    with pytest.raises(MeshError, match=r"more than 65536 MiB \(holes count\).*--limit"):
        unpack(stream(directory("out"), hole), place / "to", "out")
    assert not (place / "to" / "out" / "hole").exists()
    many = [frame(Entry(b"out/%d" % number, stat.S_IFREG | 0o644, size=300)) for number in range(4)]
    with pytest.raises(MeshError, match="holes count"):
        unpack(stream(*many), place / "to", "out", limit_bytes=1000)
    assert len([*(place / "to" / "out").iterdir()]) == 3


def test_copy_of_too_many_entries_ends() -> None:
    one = frame(Entry(b"out/x", stat.S_IFDIR | 0o755))
    taken = 0
    with pytest.raises(MeshError, match=f"more than {MAX_FILES} entries"):
        for _ in entries(itertools.repeat(one * 1000), 1):
            taken += 1
    assert taken == MAX_FILES


def test_directory_of_many_files_is_sent_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may make ten million, whose names alone would take gigabytes of its host's daemon."""
    (tmp_path / "out" / "d").mkdir(parents=True)
    for number in range(4000):
        (tmp_path / "out" / "d" / f"{number:0200}").touch()
    monkeypatch.setattr("mesh.api.file_stream.SLICE_BYTES", 1 << 10)
    tracemalloc.start()
    try:
        assert sum(1 for _ in entries(packed(tmp_path / "out"), 1)) == 4002
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    monkeypatch.setattr("mesh.api.file_stream.MAX_FILES", 300)
    sent = b"".join(packed(tmp_path / "out"))
    assert sent.endswith(frame(End(TOO_MANY))) and len(sent) < 300 * 600


def test_copy_that_implies_too_many_directories_ends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.file_stream.MAX_FILES", 300)
    frames = [directory(f"out/{number}/" + "/".join("a" * 200)) for number in range(3)]
    with pytest.raises(MeshError, match="entries: copy its directories"):
        unpack(stream(*frames), place / "to", "out")
    assert len([*(place / "to" / "out").iterdir()]) == 2


@pytest.mark.parametrize(
    "frames",
    [
        (b"\xff\xff\xff\xff", b"\0" * HEADER_LIMIT * 2),
        ((HEADER_LIMIT + 1).to_bytes(4, "big"), b"\0" * HEADER_LIMIT * 2),
        (b"\0\0\0\0",),
        (b"\0\0\0\x04\xdf\xff\xff\xff",),
        (frame(Data(0, 5), b"early"),),
        (directory("out"), frame(Data(0, 5), b"of a directory")),
        (frame(Entry(b"f", 0o100644, size=5)), frame(Data(3, 5), b"over!")),
        (frame(Entry(b"f", 0o100644, size=9)), frame(Data(4, 2), b"ab"), frame(Data(0, 2), b"cd")),
        (frame(Entry(b"f", 0o100644, size=2**62)), frame(Data(2**62 - 2, 5), b"12345")),
        (frame(Entry(b"p" * 5000, 0o100644)),),
        (b"<html>no stream</html>",),
    ],
)
def test_malformed_stream_is_refused(frames: tuple[bytes, ...], place: Path) -> None:
    with pytest.raises(MeshError, match=f"{NOT_A_STREAM}|not below|does not stay|complete|cannot write"):
        unpack(stream(*frames), place / "to", "out", limit_bytes=2**63)
    check(place)


def test_header_is_refused_by_its_length_alone() -> None:
    """Nothing of it is read, so nothing is kept in memory."""
    read: list[int] = []

    def pieces() -> Iterator[bytes]:
        yield b"\xff\xff\xff\xff"
        read.append(1)
        yield bytes(1 << 20)

    with pytest.raises(MeshError, match="not a stream"):
        list(entries(pieces(), 1))
    assert not read


def test_copy_that_breaks_off_is_an_error_and_says_why(place: Path) -> None:
    whole = b"".join(stream(file("out/f", b"12345")))
    for length in range(len(whole)):
        with pytest.raises(MeshError, match="complete"):
            unpack(iter([whole[:length]] if length else []), place / "to", "out")
    with pytest.raises(MeshError, match="it went away"):
        unpack(iter([file("out/f"), frame(End("it went away"))]), place / "to", "out")


def test_answer_that_does_not_fit_into_memory_is_refused() -> None:
    """A hole costs the lender nothing, and would cost memory here. Other files of the job are skipped, however large."""
    large = frame(Entry(f"out/{ANSWER}".encode(), stat.S_IFREG | 0o644, size=ANSWER_LIMIT + 1))
    with pytest.raises(JobFailed, match="1024 MiB fit into memory"):
        _answer_files(stream(directory("out"), large))
    other = frame(Entry(b"out/other", stat.S_IFREG | 0o644, size=2**62))
    found = _answer_files(
        stream(directory("out"), other, link(f"out/{PICKLE}", "/etc/passwd"), file(f"out/{ANSWER}", b"{}"))
    )
    assert found == {ANSWER: b"{}"}


# --- a lender's own side

MEASURED = """
import asyncio, os, resource, sys
from pathlib import Path
from types import SimpleNamespace
from mesh.api.handlers.files import FileHandlers

async def main():
    base = Path(sys.argv[1])
    jobs = SimpleNamespace(attempts={b"j": SimpleNamespace(base=base)})
    handlers = FileHandlers(jobs, None, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent = 0
    async for piece in handlers.running_files(b"j", "work"):
        sent += len(piece)
    print(sent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


def test_lender_sends_sparse_and_large_files_in_bounded_memory(tmp_path: Path) -> None:
    """Finding 12: a hole of 2 GiB raised the daemon to 4.3 GB. Measured in a process of its own, with the real handler."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("ckpt", "out"):
        (tmp_path / name).mkdir()
    with (work / "hole").open("wb") as hole:
        hole.truncate(2 << 30)
        hole.seek(1 << 30)
        hole.write(b"in the middle")
    with (work / "large").open("wb") as large:
        for _ in range(128):
            large.write(os.urandom(1 << 20))
    done = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=True)
    sent, grown_kib = map(int, done.stdout.split())
    assert 128 << 20 < sent < 130 << 20
    assert grown_kib < 32 << 10


def test_holes_arrive_as_holes(tmp_path: Path) -> None:
    source = tmp_path / "work"
    source.mkdir()
    with (source / "hole").open("wb") as hole:
        hole.seek(64 << 20)
        hole.write(b"end")
    (source / "empty").touch()
    (source / "full").write_bytes(os.urandom(3_000_001))
    (source / "full").chmod(0o751)
    os.utime(source / "full", (1_000_000, 1_000_000))
    sent = list(packed(source))
    assert sum(map(len, sent)) < 4 << 20 and max(map(len, sent)) <= 3 << 20
    copied = unpack(iter(sent), tmp_path / "copy", "out")
    assert copied == (3, (64 << 20) + 3 + 3_000_001, 0)
    for name in ("hole", "empty", "full"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "copy" / "hole").stat().st_blocks * 512 < 1 << 20
    full = (tmp_path / "copy" / "full").stat()
    assert full.st_mode & 0o777 == 0o751 and full.st_mtime == 1_000_000


def test_single_file_is_written_whole_and_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, size in (("hole", 3 << 20), ("empty", 0), ("full", 0)):
        with (tmp_path / "d" / name).open("wb") as file:
            file.write(b"begin" if name != "empty" else b"")
            file.truncate(size or file.tell())
        written = io.BytesIO()
        assert unpack_file(packed(tmp_path / "d" / name), written.write) == (1, written.tell(), 0)
        assert written.getvalue() == (tmp_path / "d" / name).read_bytes()
    with pytest.raises(MeshError, match="no single file"):
        unpack_file(packed(tmp_path / "d"), io.BytesIO().write)


def test_copy_makes_no_directory_that_was_not_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    with pytest.raises(MeshError, match="is no directory: make it"):
        unpack(packed(tmp_path / "f"), tmp_path / "no" / "such" / "f", "f")
    assert not (tmp_path / "no").exists()


def test_end_of_a_stream_is_within_reach_of_any_piece_size(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    whole = b"".join(packed(tmp_path / "f"))
    for size in (1, 2, 3, 7, len(whole)):
        pieces = (whole[start : start + size] for start in range(0, len(whole), size))
        assert unpack(pieces, tmp_path / f"copy{size}", "out") == (1, 7, 0)
    assert frame(End()) == whole[-len(frame(End())) :]
