"""The journal keeps its data across restarts, damage and write errors."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from ckptstore.bandwidth import SavedRate
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.status import ArchivedJob
from mesh.journal import DISK_BYTES, Journal, JournalError, OwnStay, _fair_share
from mesh.model.events import Event
from tests.consensus.worlds import JOB, A, make_witness
from tests.kill_points import Say, killed_at_each_call
from tests.system_calls import system_calls

WITNESS_RECORD: WitnessRecord = make_witness().witness_record


def said(job: bytes | None, seq: int) -> Event:
    return Event(job, seq, unix_ms=seq, kind="state")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


async def test_journal_keeps_the_newest_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.journal.RECEIPTS_KEPT", 3)
    journal = Journal(tmp_path / "receipts.sqlite")
    await journal.open()
    for number in range(5):
        journal.keep_receipt(JOB if number % 2 else A, b"%d" % number)
    assert await journal.receipts(None) == [b"0", b"1", b"2", b"3", b"4"]
    assert await journal.receipts(JOB) == [b"1", b"3"] and await journal.receipts(None, limit=2) == [b"3", b"4"]
    await journal.close()
    journal = Journal(tmp_path / "receipts.sqlite")
    await journal.open()
    assert await journal.receipts(None) == [b"2", b"3", b"4"]
    await journal.close()


async def test_journal_returns_stored_values(journal: Journal) -> None:
    await journal.save_witness_records([WITNESS_RECORD])
    await journal.save_witness_records([WITNESS_RECORD])
    await journal.save_submitted(JOB, b"spec")
    for event in (said(JOB, 1), said(JOB, 1), said(None, 1), said(JOB, 2)):
        journal.record_event(A, event, b"sealed %d" % event.seq)
    for stay in (OwnStay(5000, 6000, ""), OwnStay(1000, 2000, "reclaimed"), OwnStay(5000, 9000, "lost")):
        journal.note_stay(stay)
    assert await journal.witness_records() == ([WITNESS_RECORD], {}) and await journal.submitted(JOB) == b"spec"
    (first, one), (last, two) = await journal.events(JOB, 0)
    assert (one, two) == (b"sealed 1", b"sealed 2"), "each event is stored once"
    assert [sealed for _, sealed in await journal.events(None, first)] == [b"sealed 1", b"sealed 2"]
    assert await journal.events(JOB, 0, limit=1) == [(last, b"sealed 2")]
    await journal.request_delivery("output", JOB, "/home/ada/out")
    assert await journal.requested_deliveries("output") == {JOB: "/home/ada/out"}
    await journal.request_delivery("cache", JOB, "pip,torch")
    assert await journal.requested_deliveries("cache") == {JOB: "pip,torch"}
    await journal.request_delivery("output", JOB, "")
    assert await journal.requested_deliveries("output") == {}
    assert await journal.stays() == [OwnStay(1000, 2000, "reclaimed"), OwnStay(5000, 9000, "lost")], (
        "the latest version of each stay"
    )
    await journal.save_pending_submission(JOB, b"as it was")
    await journal.save_pending_submission(JOB, b"as it is")
    assert await journal.pending_submissions() == [b"as it is"]
    await journal.drop_pending_submission(JOB)
    assert await journal.pending_submissions() == []


async def test_journal_keeps_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.journal.STAYS_KEPT", 3)
    for start in (1, 3, 5, 7, 9):
        journal = Journal(tmp_path / "journal.sqlite")
        await journal.open()
        journal.note_stay(OwnStay(start, start + 1, "reclaimed"))
        await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as kept:
        assert [row[0] for row in kept.execute("SELECT start_ms FROM stays ORDER BY 1")] == [3, 5, 7, 9]
    kept.close()


async def test_journal_keeps_the_newest_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.journal.PEERS", 2)
    clock = iter(range(1000, 9000, 1000))
    monkeypatch.setattr("mesh.journal._unix_ms", lambda: next(clock))
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    for peer in (b"a", b"b", b"c", b"a"):
        journal.note_path(peer, SavedRate(18.0, 0.5, 3))
    assert await journal.paths() == [(b"c", SavedRate(18.0, 0.5, 3), 2.0), (b"a", SavedRate(18.0, 0.5, 3), 1.0)]
    await journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as kept:
        assert [row[0] for row in kept.execute("SELECT peer FROM paths ORDER BY 1")] == [b"a", b"c"]
    kept.close()


async def bounded(directory: Path, monkeypatch: pytest.MonkeyPatch, **bounds: int) -> Journal:
    """Return an open journal with these bounds, which trims often."""
    for name, kept in {**bounds, "TRIM_EVERY": 10}.items():
        monkeypatch.setattr(f"mesh.journal.{name}", kept)
    journal = Journal(directory / "journal.sqlite")
    await journal.open()
    return journal


async def test_node_events_outlast_events_of_busy_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await bounded(tmp_path, monkeypatch, EVENTS_KEPT=3, AUDIT_KEPT=2)
    for number in range(3):
        journal.record_event(A, said(None, number), b"node %d" % number)
    for number in range(20):
        journal.record_event(A, said(JOB, number), b"job %d" % number)
    assert [sealed for _, sealed in await journal.events(b"", 0)] == [b"node 1", b"node 2"], (
        "old events are trimmed while the journal is open"
    )
    assert [sealed for _, sealed in await journal.events(JOB, 0)] == [b"job 17", b"job 18", b"job 19"]
    await journal.close()


@pytest.mark.parametrize("jobs", [1, 4])
async def test_no_job_displaces_the_events_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """A member can report events of their own jobs without end, to witnesses that keep those of others."""
    journal = await bounded(tmp_path, monkeypatch, EVENTS_KEPT=40, EVENTS_OF_NODE=30, EVENTS_SURE=3)
    for number in range(4):
        journal.record_event(A, said(JOB, number), b"job %d" % number)
    for number in range(200):
        for other in range(jobs):
            journal.record_event(A, said(bytes([other]) * 16, number), b"%d of %d" % (number, other))
        if number % 20 == 0:
            await journal.events(None, 0)
    assert len(await journal.events(JOB, 0)) == 4
    newest = [sealed for _, sealed in await journal.events(b"\0" * 16, 0)]
    assert len(newest) == min(30, 36 // jobs) and newest[-1] == b"199 of 0"
    await journal.close()


@pytest.mark.parametrize(
    ("counts", "room", "share"), [((), 5, 0), ((3, 4), 9, 4), ((3, 4), 7, 4), ((3, 9), 7, 4), ((9, 9, 1), 10, 4)]
)
def test_fair_share_is_the_most_that_fits(counts: tuple[int, ...], room: int, share: int) -> None:
    assert _fair_share(counts, room) == share and sum(min(share, count) for count in counts) <= room


async def test_closed_journal_raises(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="closed"):
        await Journal(tmp_path / "j").witness_records()


async def test_disk_id_is_stable_and_unique(tmp_path: Path) -> None:
    names = []
    for path in (tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        journal = Journal(path)
        await journal.open()
        names.append(journal.disk)
        await journal.close()
    assert names[0] == names[1] != names[2] and all(len(name) == DISK_BYTES for name in names)


async def test_damaged_journal_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database" * 500)
    journal = Journal(path)
    await journal.open()
    try:
        assert journal.moved_aside is not None and journal.moved_aside.read_bytes().startswith(b"this is no database")
        await journal.save_witness_records([WITNESS_RECORD])
        assert await journal.witness_records() == ([WITNESS_RECORD], {})
    finally:
        await journal.close()


async def test_journal_with_any_damaged_page_is_moved_aside(tmp_path: Path) -> None:
    """SQLite reads few pages when it opens a file: a node with another damaged one could not start, or ended at a write."""
    journal = Journal(tmp_path / "whole.sqlite")
    await journal.open()
    await journal.save_witness_records(
        [msgspec.structs.replace(WITNESS_RECORD, job=bytes([number]) * 16) for number in range(40)]
    )
    await journal.save_key(A, A)
    await journal.close()
    whole, path = journal.path.read_bytes(), tmp_path / "journal.sqlite"
    for page in range(1, len(whole) // 4096):
        path.write_bytes(whole[: page * 4096] + os.urandom(4096) + whole[(page + 1) * 4096 :])
        journal = Journal(path)
        await journal.open()
        assert journal.moved_aside is not None and await journal.witness_records() == ([], {})
        await journal.close()


async def test_damage_while_it_runs_is_an_error_of_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    await journal.open()
    for number in range(12_000):  # more than SQLite keeps in memory
        journal.keep_receipt(b"j" * 16, number.to_bytes(500))
    await journal.close()
    journal = Journal(path)
    await journal.open()
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(os.urandom(4096))
    journal.keep_receipt(b"j" * 16, b"it is lost")
    await journal.close()
    assert "1 events and receipts are lost" in caplog.text and "malformed" in caplog.text


async def test_damaged_witness_record_is_skipped_kept_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    await journal.open()
    await journal.save_witness_records([WITNESS_RECORD])
    await journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO witness_records VALUES (?, ?)", (b"x" * 16, b"\xff\xfe"))
    connection.close()
    journal = Journal(path)
    await journal.open()
    try:
        witness_records, damaged = await journal.witness_records()
        assert witness_records == [WITNESS_RECORD] and list(damaged) == [b"x" * 16] and "int" in damaged[b"x" * 16]
    finally:
        await journal.close()
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM witness_records").fetchone()
    assert rows == (2,)


async def test_journal_with_newer_schema_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    journal = Journal(path)
    with pytest.raises(JournalError, match="newer"):
        await journal.open()
    assert path.read_bytes() == before


async def test_unwritable_journal_path_error_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="--state"):
        await Journal(tmp_path / "no" / "such" / "directory" / "j").open()


WRITER = """
import asyncio, sys
from pathlib import Path
from mesh.journal import Journal
async def main():
    journal = Journal(Path(sys.argv[1]))
    await journal.open()
    number = 0
    while True:
        await journal.save_submitted(number.to_bytes(16), b"spec")
        print(number, flush=True)
        number += 1
asyncio.run(main())
"""


async def test_confirmed_writes_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    confirmed = 0
    for line in process.stdout:
        confirmed = int(line)
        if confirmed >= 25:
            os.kill(process.pid, signal.SIGKILL)
            break
    confirmed = max([confirmed, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    journal = Journal(path)
    await journal.open()
    try:
        assert journal.moved_aside is None
        for number in range(confirmed + 1):
            assert await journal.submitted(number.to_bytes(16)) is not None
    finally:
        await journal.close()


def keep_records(root: Path, say: Say) -> None:
    """Keep three versions of a record, the last of them final, and archive the job."""

    async def keep() -> None:
        journal = Journal(root / "journal.sqlite")
        await journal.open()
        for version in range(1, 4):
            await journal.save_witness_records([record_of(version)])
            say(str(version))
        await journal.archive([ArchivedJob(JOB, "", "", None, "done", 1, 1)])
        say("archived")
        await journal.close()

    asyncio.run(keep())


def record_of(version: int) -> WitnessRecord:
    record = msgspec.structs.replace(WITNESS_RECORD.record, version=version)
    return msgspec.structs.replace(WITNESS_RECORD, record=record, final=version == 3)


@pytest.mark.strace
async def test_journal_killed_at_any_call_keeps_what_it_confirmed(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    journal = Journal(first / "journal.sqlite")
    await journal.open()
    await journal.save_witness_records([record_of(0)])
    await journal.close()
    points = 0
    for killed in killed_at_each_call(keep_records, lambda: Path(shutil.copytree(first, tmp_path / str(uuid.uuid4())))):
        journal = Journal(killed.root / "journal.sqlite")
        await journal.open()
        try:
            assert journal.moved_aside is None
            archived = {job.job for job in await journal.archived()}
            records, damaged = await journal.witness_records()
            records += await journal.archived_witness_records(archived)
            least = max([0, *(int(line) for line in killed.said if line.isdigit())])
            assert damaged == {} and records in [[record_of(version)] for version in range(least, 4)], killed
            assert archived == {JOB} or "archived" not in killed.said, killed
        finally:
            await journal.close()
        points += 1
    assert points > 15, "the journal's calls must be followed"


CONFIRMED = """
import asyncio, sys
from pathlib import Path
from mesh.journal import Journal
async def main():
    home = Path(sys.argv[1])
    journal = Journal(home / "journal.sqlite")
    await journal.open()
    for number in range(3):
        await journal.save_submitted(bytes([number]) * 16, b"spec")
        (home / "confirmed").write_bytes(b"x")
    await journal.close()
asyncio.run(main())
"""


@pytest.mark.strace
def test_each_write_is_synced_before_it_is_confirmed(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    calls = system_calls(CONFIRMED, home)
    confirmed = [place for place, call in enumerate(calls) if call == "write confirmed"]
    assert len(confirmed) == 3
    for before, place in zip([0, *confirmed], confirmed, strict=False):
        written = [call for call in calls[before:place] if call.endswith(" journal.sqlite-wal")]
        assert written[-1] == "sync journal.sqlite-wal"
        assert "write journal.sqlite-wal" in written


async def test_notes_are_written_with_the_next_record_or_soon(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()

    def written() -> int:
        with closing(sqlite3.connect(journal.path)) as db:
            return int(db.execute("SELECT count(*) FROM events").fetchone()[0])

    journal.record_event(A, said(JOB, 1), b"first")
    assert written() == 0
    await journal.save_witness_records([WITNESS_RECORD])
    assert written() == 1
    journal.record_event(A, said(JOB, 2), b"second")
    async with asyncio.timeout(60):
        while written() < 2:
            await asyncio.sleep(0.01)
    journal.record_event(A, said(JOB, 3), b"third")
    assert len(await journal.events(JOB, 0)) == 3, "who reads them does not wait for that"
    journal.record_event(A, said(JOB, 4), b"fourth")
    await journal.close()
    assert written() == 4


async def test_records_are_saved_all_or_none(tmp_path: Path) -> None:
    """A row that SQLite refuses takes the others of its call with it."""
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    try:
        with pytest.raises(sqlite3.IntegrityError):
            await journal._write("INSERT INTO keys VALUES (?, ?)", (b"a", b"key"), (b"a", b"again"))
        assert await journal.keys() == {}
    finally:
        await journal.close()


async def test_keys_and_shares_are_private_and_survive_restarts(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.touch(mode=0o644)
    for _ in range(2):
        journal = Journal(path)
        await journal.open()
        await journal.save_key(b"realm", b"key")
        await journal.save_shares(b"j" * 16, [b"one", b"two"])
        assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
        await journal.close()
    await journal_is(path, {b"realm": b"key"}, {b"j" * 16: [b"one", b"two"]})


async def journal_is(path: Path, keys: dict[bytes, bytes], shares: dict[bytes, list[bytes]]) -> None:
    journal = Journal(path)
    await journal.open()
    assert await journal.keys() == keys and await journal.shares() == shares
    await journal.close()
