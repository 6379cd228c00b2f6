"""What this node knows of jobs, on disk: witness cells, submitted jobs, events it saw, receipts it gave. SQLite in WAL mode.

One connection in one thread; `synchronous=FULL`, so that a cell that `save_cell` has returned from survives a power cut.
A journal that SQLite cannot read is moved aside and reported, never deleted.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptstore.bandwidth import PEERS, Learnt
from mesh.jobs.effects import Cell, decode_cell
from mesh.jobs.events import Event
from mesh.jobs.spec import format_job
from mesh.jobs.status import PastJob

SCHEMA_VERSION = 2  # 2: events are signed
DISK_BYTES = 8  # of a journal's name: no two of a node's journals are ever called alike
log = logging.getLogger(__name__)

EVENTS_KEPT = 20_000  # about jobs: 4 MB; older ones are dropped
AUDIT_KEPT = 20_000  # events of the node itself, so that busy jobs do not push them out; ours
TRIM_EVERY = 1000  # rows written; ours
RECEIPTS_KEPT = 20_000  # about 8 MB
DEPARTURES_KEPT = 500  # of guests: older ones weigh nothing any more (`placement.schedule.FORGET`)
STAYS_KEPT = 2_000  # about 100 kB: 40 days, after which one counts half, of a node that leaves 50 times a day

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (job BLOB PRIMARY KEY, cell BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS past (
    job BLOB PRIMARY KEY, id TEXT NOT NULL, array_id TEXT NOT NULL, name TEXT NOT NULL, ended_ms INTEGER NOT NULL,
    past BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS past_names ON past (name);
CREATE TABLE IF NOT EXISTS over (job BLOB PRIMARY KEY, heard_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS submitted (job BLOB PRIMARY KEY, spec BLOB NOT NULL, unix_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS errands (job BLOB PRIMARY KEY, errand BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, job BLOB NOT NULL, actor BLOB NOT NULL, seq INTEGER NOT NULL, sealed BLOB NOT NULL,
    UNIQUE (job, actor, seq)
);
CREATE TABLE IF NOT EXISTS receipts (id INTEGER PRIMARY KEY, job BLOB NOT NULL, sealed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS wanted (job BLOB PRIMARY KEY, directory TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (realm BLOB PRIMARY KEY, key BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shares (job BLOB PRIMARY KEY, shares BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS disk (id INTEGER PRIMARY KEY CHECK (id = 0), name BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS stays (start_ms INTEGER PRIMARY KEY, end_ms INTEGER NOT NULL, cause TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS departures (id INTEGER PRIMARY KEY, covered INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS paths (
    peer BLOB PRIMARY KEY, mean REAL NOT NULL, variance REAL NOT NULL, count INTEGER NOT NULL, unix_ms INTEGER NOT NULL
) WITHOUT ROWID;
"""

_KEEP_EVENT = "INSERT OR IGNORE INTO events (job, actor, seq, sealed) VALUES (?, ?, ?, ?)"
_KEEP_STAY = "INSERT OR REPLACE INTO stays VALUES (?, ?, ?)"
_KEEP_DEPARTURE = "INSERT INTO departures (covered) VALUES (?)"
_KEEP_PATH = "INSERT OR REPLACE INTO paths VALUES (?, ?, ?, ?, ?)"
_PUT_AWAY = "INSERT OR REPLACE INTO past VALUES (?, ?, ?, ?, ?, ?)"
_KEEP_RECEIPT = "INSERT INTO receipts (job, sealed) VALUES (?, ?)"

# Stays were kept without their beginning until 0.1.0 was out.
_SESSIONS_TO_STAYS = """
BEGIN;
INSERT OR IGNORE INTO stays
    SELECT CAST(unix_ms - length_s * 1000 AS INTEGER), unix_ms, 'reclaimed' FROM sessions WHERE length_s > 0;
DROP TABLE sessions;
COMMIT;
"""

T = TypeVar("T")
_decode_past = msgspec.msgpack.Decoder(PastJob).decode


class OwnStay(msgspec.Struct, frozen=True):
    """Of this node, in Unix milliseconds. `cause` of its end: `reclaimed` (its owner took it back), `planned` (as he had said
    beforehand), `lost` (nobody could say); empty while it goes on."""

    start_ms: int
    end_ms: int
    cause: str


class JournalError(RuntimeError):
    """The journal cannot be written; the text says why and what to do."""


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved_aside: Path | None = None
        self.disk = b""  # drawn with the journal; another journal is another witness (`ledger.Seat`)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._notes: list[tuple[str, tuple[object, ...]]] = []  # statements and rows that are not written yet
        self._writing: asyncio.Task[None] | None = None
        self._written = 0  # notes since the oldest were dropped
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._do(self._open)

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await self._do(close)
        self._thread.shutdown(wait=False)

    async def save_cells(self, cells: Sequence[Cell]) -> None:
        """All of them, in one transaction and with one fsync."""
        rows = [(cell.job, msgspec.msgpack.encode(cell)) for cell in cells]
        await self._write("INSERT OR REPLACE INTO cells VALUES (?, ?)", *rows)

    async def cells(self) -> tuple[list[Cell], dict[bytes, str]]:
        """Every readable cell of a job that is not put away, and what is wrong with those that are not, by job: they are left
        alone."""
        query = "SELECT job, cell FROM cells WHERE job NOT IN (SELECT job FROM past)"
        rows = await self._do(lambda: self._db.execute(query).fetchall())
        cells: list[Cell] = []
        damaged: dict[bytes, str] = {}
        for job, data in rows:
            try:
                cells.append(decode_cell(data))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                damaged[job] = str(error)
        return cells, damaged

    async def put_away(self, jobs: Sequence[PastJob]) -> None:
        """The cells of these, which are over, need not be read at a start any more (`past.py`)."""
        rows = [
            (
                past.job,
                format_job(past.job),
                format_job(past.array.array) if past.array is not None else "",
                past.name,
                past.ended_unix_ms,
                msgspec.msgpack.encode(past),
            )
            for past in jobs
        ]
        await self._write(_PUT_AWAY, *rows)

    async def past(self) -> list[PastJob]:
        """All that are put away."""
        rows = await self._do(lambda: self._db.execute("SELECT past FROM past").fetchall())
        return [_decode_past(past) for (past,) in rows]

    async def past_like(self, text: str, whole: bool, most: int) -> list[bytes]:
        """Those of them whose id, or whose array's, begins so, each array whole; else the newest of that name, or else, if that
        need not be `whole`, of each name that begins so. `most`: ids, or names, that are looked at."""
        begin, array = text.lower(), text.lower().partition("_")[0]

        def ask(where: str, *values: object) -> list[tuple[bytes, str]]:
            return self._db.execute(f"SELECT job, array_id FROM past WHERE {where}", values).fetchall()

        def find() -> list[bytes]:
            by_id = "substr(id, 1, ?) = ? LIMIT ?"
            by_array = "array_id <> '' AND substr(array_id, 1, ?) = ? GROUP BY array_id LIMIT ?"
            by_beginning = (
                "name <> '' AND substr(name, 1, ?) = ? GROUP BY name HAVING max(ended_ms) LIMIT ?"  # the newest of each
            )
            found = ask(by_id, len(begin), begin, most) + ask(by_array, len(array), array, most)
            found = found or ask("name = ? ORDER BY ended_ms DESC LIMIT 1", text)
            if not found and not whole:
                found = ask(by_beginning, len(text), text, most)
            arrays = {array_id for _, array_id in found if array_id}
            members = [job for array_id in sorted(arrays) for job, _ in ask("array_id = ?", array_id)]
            return [*(job for job, array_id in found if not array_id), *members]

        try:
            text.encode()
        except UnicodeEncodeError:  # nothing is called by bytes that are no text
            return []
        return await self._do(find) if text else []

    async def past_cells(self, jobs: Iterable[bytes]) -> list[Cell]:
        """The cells of those among these that are put away, but for damaged ones."""
        query = "SELECT cell FROM cells JOIN past USING (job) WHERE job = ?"
        rows = await self._do(lambda: [row for job in jobs for row in self._db.execute(query, [job])])
        return await asyncio.to_thread(_readable, rows)

    async def past_cells_since(self, unix_ms: int) -> list[Cell]:
        """The same of all that have ended since then."""
        query = "SELECT cell FROM cells JOIN past USING (job) WHERE ended_ms >= ?"
        rows = await self._do(lambda: self._db.execute(query, [unix_ms]).fetchall())
        return await asyncio.to_thread(_readable, rows)

    async def over(self) -> dict[bytes, int]:
        """Jobs of others of which something is kept here, and when it was heard that they are over (`remains.py`)."""
        return dict(await self._do(lambda: self._db.execute("SELECT job, heard_ms FROM over").fetchall()))

    async def note_over(self, heard: Sequence[bytes], gone: Sequence[bytes], unix_ms: int) -> None:
        """Add these, as heard of now; nothing is kept of those any more, or they go on."""
        await self._write("INSERT OR IGNORE INTO over VALUES (?, ?)", *((job, unix_ms) for job in heard))
        await self._write("DELETE FROM over WHERE job = ?", *((job,) for job in gone))

    async def save_submitted(self, job: bytes, spec: bytes) -> None:
        await self._write("INSERT OR REPLACE INTO submitted VALUES (?, ?, ?)", (job, spec, _unix_ms()))

    async def submitted(self, job: bytes) -> bytes | None:
        """What was submitted here, sealed."""
        row = await self._do(lambda: self._db.execute("SELECT spec FROM submitted WHERE job = ?", [job]).fetchone())
        return row[0] if row is not None else None

    async def save_errand(self, job: bytes, errand: bytes) -> None:
        """A job to be brought to its witnesses (`errands.py`)."""
        await self._write("INSERT OR REPLACE INTO errands VALUES (?, ?)", (job, errand))

    async def drop_errand(self, job: bytes) -> None:
        await self._write("DELETE FROM errands WHERE job = ?", (job,))

    async def errands(self) -> list[bytes]:
        return [row[0] for row in await self._do(lambda: self._db.execute("SELECT errand FROM errands").fetchall())]

    def record(self, actor: bytes, event: Event, sealed: bytes) -> None:
        """Keep an event. It is written soon, with others: nobody relies on it as on a cell."""
        self._note(_KEEP_EVENT, (event.job or b"", actor, event.seq, sealed))

    def keep_receipt(self, job: bytes, sealed: bytes) -> None:
        """Of what an attempt used here (`mesh/provider/receipts.py`). It is written soon."""
        self._note(_KEEP_RECEIPT, (job, sealed))

    async def receipts(self, job: bytes | None, limit: int = 1000) -> list[bytes]:
        """The sealed receipts of a job, or of all, oldest first; at most the newest `limit`."""
        if self._writing is not None:
            await self._writing
        where, arguments = ("job = ?", [job]) if job is not None else ("1", [])
        query = f"SELECT sealed FROM receipts WHERE {where} ORDER BY id DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [*arguments, limit]).fetchall())
        return [row[0] for row in rows[::-1]]

    async def receipts_before(self, number: int | None, limit: int) -> list[tuple[int, bytes]]:
        """The `limit` receipts before that one, or the newest: their numbers here and their bytes, newest first."""
        if self._writing is not None:
            await self._writing
        query = "SELECT id, sealed FROM receipts WHERE id < ? ORDER BY id DESC LIMIT ?"
        newest = 2**62 if number is None else number
        return await self._do(lambda: self._db.execute(query, [newest, limit]).fetchall())

    def _note(self, statement: str, row: tuple[object, ...]) -> None:
        self._notes.append((statement, row))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_notes(), name="journal notes")

    async def _write_notes(self) -> None:
        while self._notes:
            notes, self._notes = self._notes, []
            try:
                for statement in dict.fromkeys(statement for statement, _ in notes):
                    await self._write(statement, *(row for other, row in notes if other == statement))
                self._written += len(notes)
                if self._written >= TRIM_EVERY:
                    self._written = 0
                    await self._do(lambda: _trim(self._db))
            except JournalError as error:
                log.warning("%d events and receipts are lost: %s", len(notes), error)

    async def events(self, job: bytes | None, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """The sealed events of a job, or of all, after the one of this id, oldest first; at most the newest `limit`."""
        if self._writing is not None:
            await self._writing

        def read() -> list[tuple[int, bytes]]:
            where, arguments = "id > ?", [after]
            if job is not None:
                where, arguments = where + " AND job = ?", [after, job]  # type: ignore[list-item]
            query = f"SELECT id, sealed FROM events WHERE {where} ORDER BY id DESC LIMIT ?"
            return self._db.execute(query, [*arguments, limit]).fetchall()[::-1]

        return await self._do(read)

    async def want(self, job: bytes, directory: str) -> None:
        """Its results are to be brought to this directory when it is done; "" when they have been."""
        if directory:
            await self._write("INSERT OR REPLACE INTO wanted VALUES (?, ?)", (job, directory))
        else:
            await self._write("DELETE FROM wanted WHERE job = ?", (job,))

    async def wanted(self) -> dict[bytes, str]:
        return dict(await self._do(lambda: self._db.execute("SELECT job, directory FROM wanted").fetchall()))

    async def save_key(self, realm: bytes, key: bytes) -> None:
        """The key of what a job saves (`keyring.py`)."""
        await self._write("INSERT OR REPLACE INTO keys VALUES (?, ?)", (realm, key))

    async def keys(self) -> list[bytes]:
        return [row[0] for row in await self._do(lambda: self._db.execute("SELECT key FROM keys").fetchall())]

    async def save_shares(self, job: bytes, shares: Sequence[bytes]) -> None:
        """This node's shares of a key, as a witness."""
        await self._write("INSERT OR REPLACE INTO shares VALUES (?, ?)", (job, msgspec.msgpack.encode(shares)))

    async def shares(self) -> dict[bytes, list[bytes]]:
        rows = await self._do(lambda: self._db.execute("SELECT job, shares FROM shares").fetchall())
        return {job: msgspec.msgpack.decode(shares, type=list[bytes]) for job, shares in rows}

    def note_stay(self, stay: OwnStay) -> None:
        """When this node was lent, for its own survival estimate; again as long as it is, with another end. Written soon."""
        self._note(_KEEP_STAY, (stay.start_ms, stay.end_ms, stay.cause))

    async def stays(self) -> list[OwnStay]:
        """The newest ones, oldest first. One that is still open when a daemon starts was cut short, at its last known end."""
        if self._writing is not None:
            await self._writing
        query = "SELECT start_ms, end_ms, cause FROM stays ORDER BY start_ms DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [STAYS_KEPT]).fetchall())
        return [OwnStay(*row) for row in rows[::-1]]

    def note_departure(self, covered: bool) -> None:
        """A guest had to go; whether a notice saved all its work. Written soon."""
        self._note(_KEEP_DEPARTURE, (int(covered),))

    async def departures(self) -> list[bool]:
        """Of each guest that had to go, oldest first: whether a notice saved all its work."""
        if self._writing is not None:
            await self._writing
        query = "SELECT covered FROM departures ORDER BY id DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [DEPARTURES_KEPT]).fetchall())
        return [bool(covered) for (covered,) in rows[::-1]]

    def note_path(self, peer: bytes, learnt: Learnt) -> None:
        """How fast that peer has taken bytes until now. Written soon."""
        self._note(_KEEP_PATH, (peer, learnt.mean, learnt.variance, learnt.count, _unix_ms()))

    async def paths(self) -> list[tuple[bytes, Learnt, float]]:
        """The newest ones, oldest first, and how many seconds ago each was heard of."""
        if self._writing is not None:
            await self._writing
        query = "SELECT peer, mean, variance, count, unix_ms FROM paths ORDER BY unix_ms DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [PEERS]).fetchall())
        now_ms = _unix_ms()
        return [(row[0], Learnt(*row[1:4]), max(0.0, (now_ms - row[4]) / 1000)) for row in rows[::-1]]

    # --- in the journal's thread

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError("the journal is closed")
        return self._connection

    def _open(self) -> None:
        try:
            self._connection = self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(
                    f"{self.path}: {error}. Is the disk full or read-only? Free some space, or name another "
                    "state directory with --state."
                ) from error
            aside = self.path.with_suffix(f".damaged-{_unix_ms()}")
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                Path(str(self.path) + suffix).unlink(missing_ok=True)
            self.moved_aside = aside
            self._connection = self._connect()

    def _connect(self) -> sqlite3.Connection:
        try:  # there are keys in it
            self.path.touch(mode=0o600)
            self.path.chmod(0o600)
        except OSError as error:
            raise sqlite3.OperationalError(f"{error.strerror}: {self.path.name}") from error
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise JournalError(
                    f"{self.path} was written by a newer campus-mesh (schema {version}); upgrade this node"
                )
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            if version == 1:
                connection.execute("DROP TABLE events")
            connection.executescript(_SCHEMA)
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone():
                connection.executescript(_SESSIONS_TO_STAYS)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("INSERT OR IGNORE INTO disk VALUES (0, ?)", [os.urandom(DISK_BYTES)])
            self.disk = connection.execute("SELECT name FROM disk").fetchone()[0]
            _trim(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _write(self, statement: str, *rows: tuple[object, ...]) -> None:
        """Execute it for each of these rows, all or none."""

        def write() -> None:
            try:
                with self._db as transaction:
                    transaction.execute("BEGIN")
                    transaction.executemany(statement, rows)
            except sqlite3.OperationalError as error:
                raise JournalError(f"{self.path}: {error}. Free some space on its disk.") from error

        await self._do(write)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _readable(rows: Iterable[tuple[bytes]]) -> list[Cell]:
    cells = []
    for (data,) in rows:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            cells.append(decode_cell(data))
    return cells


def _trim(connection: sqlite3.Connection) -> None:
    """Drop the oldest of what grows without end."""
    for table, which, kept in (
        ("events", "job != x''", EVENTS_KEPT),
        ("events", "job = x''", AUDIT_KEPT),
        ("receipts", "1", RECEIPTS_KEPT),
        ("departures", "1", DEPARTURES_KEPT),
    ):
        oldest = f"SELECT id FROM {table} WHERE {which} ORDER BY id DESC LIMIT 1 OFFSET ?"
        connection.execute(f"DELETE FROM {table} WHERE {which} AND id <= ({oldest})", [kept])
    newest = "SELECT start_ms FROM stays ORDER BY start_ms DESC LIMIT 1 OFFSET ?"
    connection.execute(f"DELETE FROM stays WHERE start_ms <= ({newest})", [STAYS_KEPT])
    newest = "SELECT unix_ms FROM paths ORDER BY unix_ms DESC LIMIT 1 OFFSET ?"
    connection.execute(f"DELETE FROM paths WHERE unix_ms <= ({newest})", [PEERS])


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
