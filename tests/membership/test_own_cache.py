"""The cache for compiled code: others can put nothing into it."""

import os
import stat
from pathlib import Path

import pytest

from membership.own_cache import own_cache


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there", [False, True])
def test_nobody_else_enters_it(base: Path, there: bool) -> None:
    before = os.umask(0)
    try:
        if there:
            (base / "mesh").mkdir()
        assert own_cache("guard") == base / "mesh" / "guard" and own_cache("guard").is_dir()
    finally:
        os.umask(before)
    assert mode(base / "mesh") == 0o700


@pytest.mark.parametrize("open_to", [0o701, 0o710, 0o704, 0o740, 0o720, 0o702])
def test_open_cache_is_closed_to_others(base: Path, open_to: int) -> None:
    own_cache("guard")
    (base / "mesh").chmod(open_to)
    own_cache("guard")
    assert mode(base / "mesh") == 0o700


def test_directory_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared base directory, another user can create it first, or put a link there."""
    own_cache("guard")
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: (base / "mesh").stat().st_uid + 1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            own_cache("guard")
    (base / "mesh").rename(base / "elsewhere")
    (base / "mesh").symlink_to(base / "elsewhere")
    with pytest.raises(PermissionError):
        own_cache("guard")


def test_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(FileNotFoundError):
        own_cache("guard")
