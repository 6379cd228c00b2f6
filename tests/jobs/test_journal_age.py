"""A journal that was restored from an older copy."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.snapshot import UsedInvites
from membership.trust import ROLES, Grant
from mesh.consensus.disk_age import SECTION, DiskAge, encode_disk_age, is_old_copy
from mesh.jobs.journal_age import JournalAge
from mesh.journal import Journal, JournalError
from tests.consensus.worlds import A, make_witness

WAIT_S = 10.0
NOW = time.time()


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


@pytest.fixture
def invites(tmp_path: Path) -> UsedInvites:
    return opened(tmp_path / "invites")


def opened(path: Path) -> UsedInvites:
    """Return the used invites as a starting daemon opens them."""
    invites = UsedInvites(path)
    invites.read(NOW - 100)
    invites.held = True
    return invites


async def published(mesh: Mesh, journal: Journal, invites: UsedInvites) -> None:
    task = asyncio.create_task(JournalAge(mesh, journal, invites).run())  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        await mesh.published.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_old_copy_of_a_journal_is_another_voter(journal: Journal, invites: UsedInvites, tmp_path: Path) -> None:
    mesh, copy = Mesh(), Journal(tmp_path / "copy.sqlite")
    await journal.save_witness_records([make_witness().witness_record])
    journal._db.execute("VACUUM INTO ?", [str(copy.path)])
    await journal.save_witness_records([make_witness().witness_record])
    await published(mesh, journal, invites)
    await copy.open()
    try:
        assert copy.disk == journal.disk, "a copy has the name of its original"
        assert await JournalAge(mesh, copy, invites).check()  # type: ignore[arg-type]
        assert copy.disk != journal.disk
        assert not await JournalAge(mesh, copy, invites).check(), "once is enough"  # type: ignore[arg-type]
    finally:
        await copy.close()


async def test_journal_that_saved_since_it_was_published_keeps_its_votes(
    journal: Journal, invites: UsedInvites
) -> None:
    mesh, name = Mesh(), journal.disk
    assert not await JournalAge(mesh, journal, invites).check(), "nobody has heard of it"  # type: ignore[arg-type]
    await published(mesh, journal, invites)
    await journal.save_witness_records([make_witness().witness_record])
    assert not await JournalAge(mesh, journal, invites).check()  # type: ignore[arg-type]
    assert journal.disk == name


async def test_machine_that_is_set_back_while_it_runs_stops(journal: Journal, invites: UsedInvites) -> None:
    """Its memory is as old as its journal; after a restart the journal is another voter."""
    mesh = Mesh()
    await mesh.first_contact(0.0)
    mesh.heard = encode_disk_age(DiskAge(journal.disk, 5))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(JournalError, match="earlier state"):
            await JournalAge(mesh, journal, invites).run()  # type: ignore[arg-type]


async def test_used_invite_stays_used_when_an_old_copy_of_the_file_returns(journal: Journal, tmp_path: Path) -> None:
    path, mesh = tmp_path / "invites", Mesh()
    first, second = grant(b"1"), grant(b"2")
    used = opened(path)
    copy = path.read_bytes()
    assert used.take(first, b"a" * 32, NOW)
    await published(mesh, journal, used)
    path.write_bytes(copy)
    restored, name = opened(path), journal.disk
    assert not await JournalAge(mesh, journal, restored).check()  # type: ignore[arg-type]
    assert journal.disk == name, "the journal has forgotten nothing"
    assert not restored.held and restored.count == 1
    for invite in (first, second):
        assert not restored.take(invite, b"b" * 32, NOW)
    again = opened(path)
    assert not again.take(second, b"b" * 32, NOW), "it is void over a restart"
    await JournalAge(mesh, journal, again).check()  # type: ignore[arg-type]
    later = msgspec.structs.replace(grant(b"3"), made_unix=int(time.time()) + 5)
    assert again.take(later, b"b" * 32, NOW), "a new one is not"
    await JournalAge(mesh, journal, opened(path)).check()  # type: ignore[arg-type]
    assert opened(path).take(msgspec.structs.replace(later, uses=2), b"c" * 32, NOW), "it was an old copy once"


async def test_old_copy_of_a_journal_comes_with_old_invites(
    journal: Journal, invites: UsedInvites, tmp_path: Path
) -> None:
    """The whole directory came from a backup, and the uses since were not published yet."""
    mesh = Mesh()
    mesh.heard = encode_disk_age(DiskAge(journal.disk, 5))
    assert await JournalAge(mesh, journal, invites).check()  # type: ignore[arg-type]
    assert not invites.take(grant(b"1"), b"a" * 32, NOW)


async def test_invites_that_are_no_copy_stay_valid(journal: Journal, invites: UsedInvites) -> None:
    mesh = Mesh()
    assert invites.take(grant(b"1"), b"a" * 32, NOW)
    await published(mesh, journal, invites)
    assert invites.take(grant(b"2"), b"a" * 32, NOW), "used since"
    assert not await JournalAge(mesh, journal, invites).check()  # type: ignore[arg-type]
    assert invites.take(grant(b"3"), b"a" * 32, NOW) and invites.count == 3


async def test_machine_whose_invites_are_set_back_while_it_runs_stops(journal: Journal, invites: UsedInvites) -> None:
    mesh = Mesh()
    await mesh.first_contact(0.0)
    mesh.heard = encode_disk_age(DiskAge(journal.disk, 0, 1))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(JournalError, match="earlier state"):
            await JournalAge(mesh, journal, invites).run()  # type: ignore[arg-type]


def grant(key: bytes) -> Grant:
    return Grant(key * 32, "bob", False, ROLES, 1, int(NOW), int(NOW) + 86_400, b"")


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
