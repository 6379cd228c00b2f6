"""A journal that was restored from an older copy."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.consensus.disk_age import SECTION, DiskAge, encode_disk_age, is_old_copy
from mesh.jobs.journal_age import JournalAge
from mesh.journal import Journal, JournalError
from tests.consensus.worlds import A, make_witness

WAIT_S = 10.0


class Mesh:
    """What other nodes have heard of this one, and will be told in `first_contact`."""

    def __init__(self) -> None:
        self.identity: Any = SimpleNamespace(node_id=A)
        self.heard: bytes | None = None
        self.in_contact = False
        self.published = asyncio.Event()

    async def first_contact(self, within_s: float) -> None:
        self.in_contact = True

    def record(self, node: bytes, section: str) -> Any:
        known = self.in_contact and (node, section) == (A, SECTION) and self.heard is not None
        return SimpleNamespace(body=self.heard) if known else None

    def publish(self, section: str, body: bytes, ttl_s: float) -> None:
        self.heard = body
        self.published.set()


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


async def published(mesh: Mesh, journal: Journal) -> None:
    task = asyncio.create_task(JournalAge(mesh, journal).run())  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        await mesh.published.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_old_copy_of_a_journal_is_another_voter(journal: Journal, tmp_path: Path) -> None:
    mesh, copy = Mesh(), Journal(tmp_path / "copy.sqlite")
    await journal.save_witness_records([make_witness().witness_record])
    journal._db.execute("VACUUM INTO ?", [str(copy.path)])
    await journal.save_witness_records([make_witness().witness_record])
    await published(mesh, journal)
    await copy.open()
    try:
        assert copy.disk == journal.disk, "a copy has the name of its original"
        assert await JournalAge(mesh, copy).check()  # type: ignore[arg-type]
        assert copy.disk != journal.disk
        assert not await JournalAge(mesh, copy).check(), "once is enough"  # type: ignore[arg-type]
    finally:
        await copy.close()


async def test_journal_that_saved_since_it_was_published_keeps_its_votes(journal: Journal) -> None:
    mesh, name = Mesh(), journal.disk
    assert not await JournalAge(mesh, journal).check(), "nobody has heard of it"  # type: ignore[arg-type]
    await published(mesh, journal)
    await journal.save_witness_records([make_witness().witness_record])
    assert not await JournalAge(mesh, journal).check()  # type: ignore[arg-type]
    assert journal.disk == name


async def test_machine_that_is_set_back_while_it_runs_stops(journal: Journal) -> None:
    """Its memory is as old as its journal; after a restart the journal is another voter."""
    mesh = Mesh()
    await mesh.first_contact(0.0)
    mesh.heard = encode_disk_age(DiskAge(journal.disk, 5))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(JournalError, match="earlier state"):
            await JournalAge(mesh, journal).run()  # type: ignore[arg-type]


async def test_renamed_journal_keeps_its_name_and_its_records(journal: Journal, tmp_path: Path) -> None:
    await journal.save_witness_records([make_witness().witness_record])
    first = journal.disk
    await journal.rename_disk()
    again = Journal(tmp_path / "again.sqlite")
    journal._db.execute("VACUUM INTO ?", [str(again.path)])
    await again.open()
    try:
        assert again.disk == journal.disk != first
        assert await again.saves() == 1 and len((await again.witness_records())[0]) == 1
    finally:
        await again.close()


@pytest.mark.parametrize("heard", [None, b"", b"\xc1", encode_disk_age(DiskAge(b"another", 9))])
def test_nothing_readable_about_this_disk_makes_it_no_copy(heard: bytes | None) -> None:
    assert not is_old_copy(DiskAge(b"a disk", 3), heard)
