"""What a guest may leave in its control directory, and what the daemon makes of it."""

import os
from pathlib import Path

import pytest

from mesh.jobs.ctlfiles import put_file, read_file


def test_a_plain_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    put_file(tmp_path / "file", b"x" * 100)
    assert read_file(tmp_path / "file", 100) == b"x" * 100 and len(read_file(tmp_path / "file", 10)) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["link", "endless", "pipe", "directory", "nothing"])
def test_nothing_else_is_read_or_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "progress.json"
    make(kind, path)
    with pytest.raises(OSError):
        read_file(path, 100)


@pytest.mark.parametrize("kind", ["link", "endless", "pipe", "directory", "nothing"])
def test_what_is_put_takes_the_place_of_anything_and_touches_nothing_else(tmp_path: Path, kind: str) -> None:
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
