"""Files that a guest may leave in its control directory, and the daemon's handling of them."""

import os
from pathlib import Path

import pytest

from mesh.execution.control_files import put_file, read_file


def test_regular_file_is_read_up_to_limit(tmp_path: Path) -> None:
    put_file(tmp_path / "file", b"x" * 100)
    assert read_file(tmp_path / "file", 100) == b"x" * 100 and len(read_file(tmp_path / "file", 10)) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_device_is_not_read_and_others_may_not_write_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is not a regular file"):
        read_file(Path("/dev/zero"), 100)
    before = os.umask(0)
    try:
        put_file(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["link", "endless", "pipe", "directory", "nothing"])
def test_other_files_are_refused_without_blocking(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "progress.json"
    make(kind, path)
    with pytest.raises(OSError):
        read_file(path, 100)


@pytest.mark.parametrize("kind", ["link", "endless", "pipe", "directory", "nothing"])
def test_put_replaces_any_entry_and_touches_no_other(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ctl" / "notice.json"
    path.parent.mkdir()
    make(kind, path)
    (tmp_path / "ctl" / ".notice.tmp").symlink_to(tmp_path / "host")
    put_file(path, b"told")
    assert not path.is_symlink() and path.read_bytes() == b"told"
    assert not (tmp_path / "host").exists() or (tmp_path / "host").read_text() == "the host's"


def make(kind: str, path: Path) -> None:
    host = path.parents[1] / "host" if path.parent.name == "ctl" else path.parent / "host"
    if kind == "link":
        host.write_text("the host's")
        path.symlink_to(host)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
        (path / "inside").touch()
