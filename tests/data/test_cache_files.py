"""Caches: what a job has added is merged into the newest version, and nothing of it leads out of that."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.errors import TooLarge
from mesh.data import cache_files
from mesh.data.cache_files import Grown, merge


@pytest.fixture
def added(tmp_path: Path) -> Path:
    (tmp_path / "added").mkdir()
    return tmp_path / "added"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A copy of the newest version."""
    root = tmp_path / "cache"
    (root / "directory").mkdir(parents=True)
    (root / "directory" / "old").write_text("old")
    (root / "file").write_text("old")
    (root / "link").symlink_to("directory")
    return root


def test_files_are_added_and_replaced_and_none_is_removed(added: Path, cache: Path) -> None:
    (added / "directory").mkdir()
    (added / "directory" / "new").write_text("newer")
    (added / "file").write_text("new")
    (added / "file").chmod(0)
    (added / "dangling").symlink_to("directory/old")
    assert merge(added, cache) == Grown(3, 5 + 3 + len("directory/old"))
    wanted = {"directory/old": "old", "directory/new": "newer", "file": "new", "dangling": "old", "link/old": "old"}
    assert {name: (cache / name).read_text() for name in wanted} == wanted
    assert (cache / "file").stat().st_mode & 0o777 == 0o644


def test_what_is_there_already_is_not_new(added: Path, cache: Path) -> None:
    (added / "file").write_text("old")
    (added / "link").symlink_to("directory")
    (added / "directory").mkdir()
    assert merge(added, cache) == Grown(0, 0)
    (added / "file").write_text("old")
    (added / "file").chmod(0o755)
    assert merge(added, cache) == Grown(1, 3)
    assert (cache / "file").stat().st_mode & 0o777 == 0o755


def test_no_link_is_followed(added: Path, cache: Path, tmp_path: Path) -> None:
    """The version has a link where the job has a directory, and the other way round."""
    (tmp_path / "outside").mkdir()
    (cache / "link").unlink()
    (cache / "link").symlink_to(tmp_path / "outside")
    (cache / "file").unlink()
    (cache / "file").symlink_to(tmp_path / "outside" / "target")
    (added / "link").mkdir()
    (added / "link" / "inner").write_text("inner")
    (added / "file").write_text("plain")
    (added / "directory").symlink_to(tmp_path / "outside")
    assert merge(added, cache).files == 3
    assert not list((tmp_path / "outside").iterdir())
    assert (cache / "link" / "inner").read_text() == "inner" and not (cache / "link").is_symlink()
    assert (cache / "file").read_text() == "plain" and not (cache / "file").is_symlink()
    assert (cache / "directory").is_symlink()


def test_too_many_entries_are_refused(added: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "MAX_ENTRIES", 5)
    (added / "one").touch()
    assert merge(added, cache).files == 1
    (added / "two").touch()
    with pytest.raises(TooLarge, match="mesh data rm"):
        merge(added, cache)


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to("target")])
def test_names_are_bytes(added: Path, cache: Path, make: Callable[[Path], None]) -> None:
    for name in (b"two\nlines", b"not \xff UTF-8", b"-rf", b"a" * 255):
        make(added / os.fsdecode(name))
    assert merge(added, cache).files == 4
