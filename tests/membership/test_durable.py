"""What is on disk survives a power cut: the order of writes, syncs and renames, as the kernel sees it."""

import os
from pathlib import Path

import pytest

from membership.durable import write_durably
from tests.system_calls import system_calls

REPLACE = """
import sys
from pathlib import Path
from membership.durable import write_durably
write_durably(Path(sys.argv[1], "state.json"), b"new")
"""

KEY = """
import sys
from pathlib import Path
from membership.identity import Identity
Identity.generate().save(Path(sys.argv[1], "node.key"))
"""


@pytest.mark.strace
def test_replaced_file_is_synced_before_its_name_and_its_directory_after(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    (home / "state.json").write_bytes(b"old")
    assert system_calls(REPLACE, home) == [
        "write state.new",
        "sync state.new",
        "rename state.new state.json",
        "sync .",
    ]


@pytest.mark.strace
def test_key_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    assert system_calls(KEY, home)[:3] == ["write node.new", "sync node.new", "link node.new node.key"]
    assert (home / "node.key").stat().st_mode & 0o777 == 0o600


def test_replaced_file_is_its_users_alone(tmp_path: Path) -> None:
    """A file of settings may hold the password of an index."""
    (tmp_path / "config.toml").touch(0o600)
    before = os.umask(0)
    try:
        write_durably(tmp_path / "config.toml", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o600
