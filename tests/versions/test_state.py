"""State directories of older releases are migrated; those of newer releases are refused and left unchanged."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.identity import Identity
from membership.trust import found_mesh
from mesh.daemon.config import Settings
from mesh.daemon.daemon import Daemon
from mesh.daemon.layout import Layout, save_membership
from mesh.journal import SCHEMA_VERSION, Journal, JournalError
from mesh.util.errors import ConfigError
from mesh.util.versions import STATE, claim_state


def test_state_of_an_older_release_is_migrated(tmp_path: Path) -> None:
    version = tmp_path / "version"
    for before in (None, "0\n", f"{STATE}\n"):
        if before is not None:
            version.write_text(before)
        claim_state(version)
        assert version.read_text() == f"{STATE}\n"


@given(st.binary(max_size=30))
def test_invalid_version_file_is_refused_and_left_unchanged(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    version = tmp_path_factory.mktemp("state") / "version"
    version.write_bytes(data)
    try:
        claim_state(version)
    except ConfigError:
        assert version.read_bytes() == data
    else:
        assert int(data) <= STATE == int(version.read_text())


def test_daemon_refuses_newer_state_with_a_message_and_changes_nothing(tmp_path: Path) -> None:
    where = Layout(tmp_path)
    identity = Identity.generate()
    save_membership(where, *found_mesh(identity, "m", "n", "ada", 1e9), ())
    identity.save(where.key)
    where.version.write_text(f"{STATE + 1}\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    async def start() -> None:
        await Daemon(where, Settings(bind="127.0.0.1", port=0, api_port=0, mdns=False)).start()

    with pytest.raises(ConfigError, match=rf"newer campus-mesh \(state {STATE + 1}; this one knows {STATE}\).*Upgrade"):
        asyncio.run(start())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


async def test_journal_of_a_newer_schema_is_refused_with_a_message(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    newer.close()
    journal = Journal(path)
    with pytest.raises(JournalError, match=rf"newer campus-mesh \(schema {SCHEMA_VERSION + 1}\); upgrade"):
        await journal.open()
    await journal.close()
    assert journal.moved_aside is None


def test_version_of_the_next_release_is_newer(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(f"{STATE + 1}\n")
    with pytest.raises(ConfigError, match="newer"):
        claim_state(version)
    assert version.read_text() == f"{STATE + 1}\n"


@pytest.mark.parametrize("text", ["1" * 5000, "٣", "-1", "1 2", ""])
def test_what_is_no_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "version").write_text(text)
    with pytest.raises(ConfigError, match="which is not a version"):
        claim_state(tmp_path / "version")
    (tmp_path / "version").unlink()
    (tmp_path / "version").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        claim_state(tmp_path / "version")
