"""The journal keeps what it was given, over restarts, damage, and disks that refuse."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ckptstore.bandwidth import Learnt
from mesh.jobs.effects import Cell
from mesh.jobs.events import Event
from mesh.jobs.journal import DISK_BYTES, SCHEMA_VERSION, Journal, JournalError, OwnStay
from tests.jobs.worlds import JOB, A, make_witness

CELL: Cell = make_witness().cell


def said(job: bytes | None, seq: int) -> Event:
    return Event(job, seq, unix_ms=seq, kind="state")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


async def test_the_newest_receipts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.jobs.journal.RECEIPTS_KEPT", 3)
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


async def test_it_gives_back_what_it_got(journal: Journal) -> None:
    await journal.save_cells([CELL])
    await journal.save_cells([CELL])
    await journal.save_submitted(JOB, b"spec")
    for event in (said(JOB, 1), said(JOB, 1), said(None, 1), said(JOB, 2)):
        journal.record(A, event, b"sealed %d" % event.seq)
    for stay in (OwnStay(5000, 6000, ""), OwnStay(1000, 2000, "reclaimed"), OwnStay(5000, 9000, "lost")):
        journal.note_stay(stay)
    assert await journal.cells() == ([CELL], {}) and await journal.submitted(JOB) == b"spec"
    (first, one), (last, two) = await journal.events(JOB, 0)
    assert (one, two) == (b"sealed 1", b"sealed 2"), "each once"
    assert [sealed for _, sealed in await journal.events(None, first)] == [b"sealed 1", b"sealed 2"]
    assert await journal.events(JOB, 0, limit=1) == [(last, b"sealed 2")]
    await journal.want(JOB, "/home/ada/out")
    assert await journal.wanted() == {JOB: "/home/ada/out"}
    await journal.want(JOB, "")
    assert await journal.wanted() == {}
    assert await journal.stays() == [OwnStay(1000, 2000, "reclaimed"), OwnStay(5000, 9000, "lost")], "the last word"
    await journal.save_errand(JOB, b"as it was")
    await journal.save_errand(JOB, b"as it is")
    assert await journal.errands() == [b"as it is"]
    await journal.drop_errand(JOB)
    assert await journal.errands() == []


async def test_the_newest_stays_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.jobs.journal.STAYS_KEPT", 3)
    for start in (1, 3, 5, 7, 9):
        journal = Journal(tmp_path / "journal.sqlite")
        await journal.open()
        journal.note_stay(OwnStay(start, start + 1, "reclaimed"))
        await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as kept:
        assert [row[0] for row in kept.execute("SELECT start_ms FROM stays ORDER BY 1")] == [3, 5, 7, 9]
    kept.close()


async def test_the_paths_heard_of_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.jobs.journal.PEERS", 2)
    clock = iter(range(1000, 9000, 1000))
    monkeypatch.setattr("mesh.jobs.journal._unix_ms", lambda: next(clock))
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    for peer in (b"a", b"b", b"c", b"a"):
        journal.note_path(peer, Learnt(18.0, 0.5, 3))
    assert await journal.paths() == [(b"c", Learnt(18.0, 0.5, 3), 2.0), (b"a", Learnt(18.0, 0.5, 3), 1.0)]
    await journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as kept:
        assert [row[0] for row in kept.execute("SELECT peer FROM paths ORDER BY 1")] == [b"a", b"c"]
    kept.close()


async def test_sessions_of_an_older_journal_are_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE sessions (unix_ms INTEGER NOT NULL, length_s REAL NOT NULL, ended INTEGER NOT NULL)")
        old.executemany(
            "INSERT INTO sessions VALUES (?, ?, 1)", [(9_000_000, 2.5), (20_000_000, 100.0), (30_000_000, -4.0)]
        )
        old.execute("PRAGMA user_version=2")
    old.close()
    for _ in range(2):
        journal = Journal(path)
        await journal.open()
        assert await journal.stays() == [
            OwnStay(8_997_500, 9_000_000, "reclaimed"),
            OwnStay(19_900_000, 20_000_000, "reclaimed"),
        ]
        await journal.close()


async def test_what_is_about_the_node_outlasts_what_busy_jobs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kept in (("EVENTS_KEPT", 3), ("AUDIT_KEPT", 2), ("TRIM_EVERY", 10)):
        monkeypatch.setattr(f"mesh.jobs.journal.{name}", kept)
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    for number in range(3):
        journal.record(A, said(None, number), b"node %d" % number)
    for number in range(20):
        journal.record(A, said(JOB, number), b"job %d" % number)
    assert [sealed for _, sealed in await journal.events(b"", 0)] == [b"node 1", b"node 2"], "while it runs"
    assert [sealed for _, sealed in await journal.events(JOB, 0)] == [b"job 17", b"job 18", b"job 19"]
    await journal.close()


@pytest.mark.parametrize("release", ["schema-1", "schema-2"])
async def test_a_journal_of_an_older_release_is_brought_up(tmp_path: Path, release: str) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript((Path(__file__).parent / "journals" / f"{release}.sql").read_text())
    old.close()
    for _ in range(2):
        journal = Journal(path)
        await journal.open()
        assert await journal.cells() == ([CELL], {}) and await journal.submitted(JOB) == b"spec"
        assert await journal.stays() == [OwnStay(8_997_500, 9_000_000, "reclaimed")]
        assert await journal.keys() == [b"key"] and await journal.wanted() == {JOB: "/home/ada/out"}
        # Events of the first schema are signed by nobody, and are dropped.
        assert len(await journal.events(JOB, 0)) == len(await journal.receipts(None)) == int(release == "schema-2")
        journal.record(A, said(JOB, 7), b"new")
        assert (await journal.events(JOB, 0))[-1][1] == b"new"
        await journal.close()
        with sqlite3.connect(path) as now:
            now.execute("DELETE FROM events WHERE sealed = x'6e6577'")
            assert now.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        now.close()


async def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="closed"):
        await Journal(tmp_path / "j").cells()


async def test_a_journal_keeps_its_name_and_another_one_has_another(tmp_path: Path) -> None:
    names = []
    for path in (tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        journal = Journal(path)
        await journal.open()
        names.append(journal.disk)
        await journal.close()
    assert names[0] == names[1] != names[2] and all(len(name) == DISK_BYTES for name in names)


async def test_a_damaged_file_is_moved_aside_and_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database" * 500)
    journal = Journal(path)
    await journal.open()
    try:
        assert journal.moved_aside is not None and journal.moved_aside.read_bytes().startswith(b"this is no database")
        await journal.save_cells([CELL])
        assert await journal.cells() == ([CELL], {})
    finally:
        await journal.close()


async def test_a_damaged_cell_is_skipped_kept_and_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    await journal.open()
    await journal.save_cells([CELL])
    await journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO cells VALUES (?, ?)", (b"x" * 16, b"\xff\xfe"))
    connection.close()
    journal = Journal(path)
    await journal.open()
    try:
        cells, damaged = await journal.cells()
        assert cells == [CELL] and list(damaged) == [b"x" * 16] and "int" in damaged[b"x" * 16]
    finally:
        await journal.close()
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM cells").fetchone()
    assert rows == (2,)


async def test_a_newer_schema_is_left_alone(tmp_path: Path) -> None:
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


async def test_a_place_that_cannot_be_written_is_told_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="--state"):
        await Journal(tmp_path / "no" / "such" / "directory" / "j").open()


WRITER = """
import asyncio, sys
from pathlib import Path
from mesh.jobs.journal import Journal
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


async def test_what_was_confirmed_survives_a_kill(tmp_path: Path) -> None:
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


async def test_keys_and_shares_are_kept_from_others_eyes_and_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.touch(mode=0o644)
    for _ in range(2):
        journal = Journal(path)
        await journal.open()
        await journal.save_key(b"realm", b"key")
        await journal.save_shares(b"j" * 16, [b"one", b"two"])
        assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
        await journal.close()
    await journal_is(path, [b"key"], {b"j" * 16: [b"one", b"two"]})


async def journal_is(path: Path, keys: list[bytes], shares: dict[bytes, list[bytes]]) -> None:
    journal = Journal(path)
    await journal.open()
    assert await journal.keys() == keys and await journal.shares() == shares
    await journal.close()
