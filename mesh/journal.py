"""Journal: what this node knows of jobs, on disk: witness records, submissions, events, receipts. SQLite in WAL mode.

One connection in one thread, with `synchronous=FULL`: once `save_witness_records` returns, the records survive a power cut. A
journal with a page that SQLite cannot read at a start is moved aside and reported, never deleted.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ckptstore.bandwidth import PEERS, SavedRate
from ckptstore.tables import check_pages
from membership.malformed import MALFORMED
from mesh.consensus.effects import WitnessRecord, decode_witness_record
from mesh.consensus.participant import LEAST_BYTES
from mesh.consensus.status import ArchivedJob
from mesh.model.events import Event
from mesh.model.spec import format_job

SCHEMA_VERSION = 1
DISK_BYTES = 8  # of a journal's random name
log = logging.getLogger(__name__)

EVENTS_KEPT = 20_000  # about jobs: 4 MB
EVENTS_OF_NODE = 1000  # of one node about one job, which may report without end (own choice)
EVENTS_SURE = 20  # of one job, before those of jobs with more are deleted: its course, without checkpoints (own choice)
EVENTS_READ = 1000  # events about jobs in one answer (own choice)
AUDIT_KEPT = 20_000  # events of the node itself, kept apart so that busy jobs do not displace them (own choice)
NOTED_S = 0.25  # until notes are written without a witness record to go with (own choice)
TRIM_EVERY = 1000  # rows written between trims (own choice)
RECEIPTS_KEPT = 20_000  # about 8 MB
DEPARTURES_KEPT = 500  # of guests: older ones have no weight any more (`placement.schedule.FORGET`)
STAYS_KEPT = 2_000  # about 100 kB: the half-life of 40 days for a node that leaves 50 times a day

_SCHEMA = """
CREATE TABLE IF NOT EXISTS witness_records (job BLOB PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS archive (
    job BLOB PRIMARY KEY, id TEXT NOT NULL, array_id TEXT NOT NULL, name TEXT NOT NULL, ended_ms INTEGER NOT NULL,
    summary BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS archive_names ON archive (name);
CREATE TABLE IF NOT EXISTS archived_of (
    job BLOB PRIMARY KEY, user_key BLOB NOT NULL, created_ms INTEGER NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS archived_users ON archived_of (user_key, created_ms);
CREATE TABLE IF NOT EXISTS dropped (user_key BLOB PRIMARY KEY, until_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (job BLOB PRIMARY KEY, heard_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS workdirs (
    workdir BLOB NOT NULL, job BLOB NOT NULL, over_ms INTEGER, PRIMARY KEY (workdir, job)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS submitted (job BLOB PRIMARY KEY, spec BLOB NOT NULL, unix_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pending_submissions (job BLOB PRIMARY KEY, submission BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, job BLOB NOT NULL, actor BLOB NOT NULL, seq INTEGER NOT NULL, sealed BLOB NOT NULL,
    UNIQUE (job, actor, seq)
);
CREATE TABLE IF NOT EXISTS receipts (id INTEGER PRIMARY KEY, job BLOB NOT NULL, sealed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS requested_outputs (job BLOB PRIMARY KEY, directory TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requested_caches (job BLOB PRIMARY KEY, names TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (realm BLOB PRIMARY KEY, key BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS collected_keys (realm BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shares (job BLOB PRIMARY KEY, shares BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS secrets_shares (job BLOB PRIMARY KEY, shares BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS disk (id INTEGER PRIMARY KEY CHECK (id = 0), name BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS saves (id INTEGER PRIMARY KEY CHECK (id = 0), count INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS count_saves AFTER INSERT ON witness_records
    BEGIN UPDATE saves SET count = count + 1; END;
CREATE TABLE IF NOT EXISTS stays (start_ms INTEGER PRIMARY KEY, end_ms INTEGER NOT NULL, cause TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS departures (id INTEGER PRIMARY KEY, covered INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS paths (
    peer BLOB PRIMARY KEY, mean REAL NOT NULL, variance REAL NOT NULL, count INTEGER NOT NULL, unix_ms INTEGER NOT NULL
) WITHOUT ROWID;
"""

DELIVERIES = {"output": "requested_outputs", "cache": "requested_caches"}
SHARES = {"share": "shares", "secrets-share": "secrets_shares"}  # tables of shares of a job's keys
_KEEP_EVENT = "INSERT OR IGNORE INTO events (job, actor, seq, sealed) VALUES (?, ?, ?, ?)"
_KEEP_STAY = "INSERT OR REPLACE INTO stays VALUES (?, ?, ?)"
_KEEP_DEPARTURE = "INSERT INTO departures (covered) VALUES (?)"
_KEEP_PATH = "INSERT OR REPLACE INTO paths VALUES (?, ?, ?, ?, ?)"
_ARCHIVE = "INSERT OR REPLACE INTO archive VALUES (?, ?, ?, ?, ?, ?)"
_ARCHIVE_OF = (
    "INSERT OR REPLACE INTO archived_of SELECT job, ?, ?, max(?, length(record)) FROM witness_records WHERE job = ?"
)
_OF_A_JOB = ("witness_records", "archive", "archived_of", "shares", "secrets_shares")  # tables with a row of each job
_KEEP_RECEIPT = "INSERT INTO receipts (job, sealed) VALUES (?, ?)"

T = TypeVar("T")
DeliveryKind = Literal["output", "cache"]
Row = tuple[str, tuple[object, ...]]  # a statement and its values
_decode_archived = msgspec.msgpack.Decoder(ArchivedJob).decode


class OwnStay(msgspec.Struct, frozen=True):
    """A stay of this node, in Unix milliseconds. `cause` of its end: `reclaimed` (by its owner), `planned` (announced by its
    owner), `lost` (unknown); empty while it lasts.
    """

    start_ms: int
    end_ms: int
    cause: str


class JournalError(RuntimeError):
    """The journal cannot be written; the text gives the reason and the next step."""


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved_aside: Path | None = None
        self.disk = b""  # created with the journal; another journal is another voter (`record.Voter`)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._notes: list[Row] = []  # still to be written
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()  # somebody waits for the notes
        self._written = 0  # rows since the last trim
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._do(self._open)

    async def close(self) -> None:
        await self._note_now()

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await self._do(close)
        self._thread.shutdown(wait=False)

    async def save_witness_records(self, witness_records: Sequence[WitnessRecord]) -> None:
        """Save these records, and the notes until now, in one transaction with one fsync. Their jobs are not archived then: a
        recovery may overrule an end.
        """
        rows = [(witness_record.job, msgspec.msgpack.encode(witness_record)) for witness_record in witness_records]
        notes, self._notes = self._notes, []
        saves: list[Row] = [("INSERT OR REPLACE INTO witness_records VALUES (?, ?)", row) for row in rows]
        back: list[Row] = [("DELETE FROM archive WHERE job = ?", (job,)) for job, _ in rows]
        await self._write_all([*saves, *back, *notes])
        self._written += len(notes)

    async def saves(self) -> int:
        """Return how many witness records have ever been saved: a copy of the journal knows of fewer than its original."""
        return int((await self._do(lambda: self._db.execute("SELECT count FROM saves").fetchone()))[0])

    async def rename_disk(self) -> None:
        """Make this journal another voter: the promises in it no longer count."""
        name = os.urandom(DISK_BYTES)
        await self._write("UPDATE disk SET name = ?", (name,))
        self.disk = name

    async def witness_records(self) -> tuple[list[WitnessRecord], dict[bytes, str]]:
        """Return the readable witness records of jobs that are not archived, and by job what is wrong with the others, which
        are kept.
        """
        query = "SELECT job, record FROM witness_records WHERE job NOT IN (SELECT job FROM archive)"
        rows = await self._do(lambda: self._db.execute(query).fetchall())
        witness_records: list[WitnessRecord] = []
        damaged: dict[bytes, str] = {}
        for job, data in rows:
            try:
                witness_records.append(decode_witness_record(data))
            except MALFORMED as error:
                damaged[job] = str(error)
        return witness_records, damaged

    async def archive(self, jobs: Sequence[ArchivedJob]) -> None:
        """Archive these finished jobs: their witness records are not read at a start any more (`jobs/archive.py`)."""
        rows: list[Row] = []
        for job in jobs:
            array = format_job(job.array.array) if job.array is not None else ""
            summary = msgspec.msgpack.encode(job)
            rows.append((_ARCHIVE, (job.job, format_job(job.job), array, job.name, job.ended_unix_ms, summary)))
            rows.append((_ARCHIVE_OF, (job.user_key, job.created_unix_ms, LEAST_BYTES, job.job)))
        await self._write_all(rows)

    async def drop_archived(
        self, user_key: bytes, among: Collection[bytes], most_bytes: int
    ) -> tuple[int, list[bytes]]:
        """Delete the archived jobs of a user that are too many: the first that were created, of those `among` these.

        Return them, and until which time of creation (Unix milliseconds) a job of this user may have been deleted.
        """
        query = "SELECT job, created_ms, bytes FROM archived_of JOIN archive USING (job) WHERE user_key = ?"

        def drop() -> tuple[int, list[bytes]]:
            over, total, until_ms = list[bytes](), 0, 0
            for job, created_ms, size in self._db.execute(f"{query} ORDER BY created_ms DESC", [user_key]).fetchall():
                total += size
                if total > most_bytes and job in among:
                    until_ms = max(until_ms, created_ms)
                    over.append(job)
            return until_ms, over

        until_ms, over = await self._do(drop)
        if over:
            rows: list[Row] = [(f"DELETE FROM {table} WHERE job = ?", (job,)) for table in _OF_A_JOB for job in over]
            known = "ON CONFLICT (user_key) DO UPDATE SET until_ms = max(until_ms, excluded.until_ms)"
            await self._write_all([*rows, (f"INSERT INTO dropped VALUES (?, ?) {known}", (user_key, until_ms))])
        return until_ms, over

    async def dropped(self) -> dict[bytes, int]:
        """Return, by the keys of users, until which time of creation a job may have been deleted from the archive."""
        return dict(await self._do(lambda: self._db.execute("SELECT user_key, until_ms FROM dropped").fetchall()))

    async def archived(self) -> list[ArchivedJob]:
        """Return the summaries of all archived jobs."""
        rows = await self._do(lambda: self._db.execute("SELECT summary FROM archive").fetchall())
        return [_decode_archived(summary) for (summary,) in rows]

    async def find_archived(self, text: str, whole: bool, most: int) -> list[bytes]:
        """Return the archived jobs that `text` may mean.

        This is a job or array with this id; else the newest job of that name; else, unless `whole`, the newest array of the name
        before an index; else the jobs whose id, or whose array's id, starts with it; else the newest of each name that starts
        with it. Arrays are whole. `most`: ids or names that are considered.
        """
        begin, array, array_name = text.lower(), text.lower().partition("_")[0], text.rpartition("_")[0]

        def ask(where: str, *values: object) -> list[tuple[bytes, str]]:
            return self._db.execute(f"SELECT job, array_id FROM archive WHERE {where}", values).fetchall()

        def find() -> list[bytes]:
            by_id = "substr(id, 1, ?) = ? LIMIT ?"
            by_array = "array_id <> '' AND substr(array_id, 1, ?) = ? GROUP BY array_id LIMIT ?"
            # The newest job of each name.
            by_beginning = "name <> '' AND substr(name, 1, ?) = ? GROUP BY name HAVING max(ended_ms) LIMIT ?"
            found = ask("id = ? OR array_id = ? LIMIT 1", begin, array)
            found = found or ask("name = ? ORDER BY ended_ms DESC LIMIT 1", text)
            if not found and not whole:
                found = ask("name = ? AND array_id <> '' ORDER BY ended_ms DESC LIMIT 1", array_name)
            if not found and not whole:
                found = ask(by_id, len(begin), begin, most) + ask(by_array, len(array), array, most)
                found = found or ask(by_beginning, len(text), text, most)
            arrays = {array_id for _, array_id in found if array_id}
            members = [job for array_id in sorted(arrays) for job, _ in ask("array_id = ?", array_id)]
            return [*(job for job, array_id in found if not array_id), *members]

        try:
            text.encode()
        except UnicodeEncodeError:  # no name contains such characters
            return []
        return await self._do(find) if text else []

    async def archived_witness_records(self, jobs: Iterable[bytes]) -> list[WitnessRecord]:
        """Return the readable witness records of those of these jobs that are archived."""
        query = "SELECT record FROM witness_records JOIN archive USING (job) WHERE job = ?"
        rows = await self._do(lambda: [row for job in jobs for row in self._db.execute(query, [job])])
        return await asyncio.to_thread(_readable, rows)

    async def archived_witness_records_since(self, unix_ms: int) -> list[WitnessRecord]:
        """Return the readable witness records of archived jobs that ended since then."""
        query = "SELECT record FROM witness_records JOIN archive USING (job) WHERE ended_ms >= ?"
        rows = await self._do(lambda: self._db.execute(query, [unix_ms]).fetchall())
        return await asyncio.to_thread(_readable, rows)

    async def ended(self) -> dict[bytes, int]:
        """Return when this node learned the end of other nodes' jobs with data here (`checkpoints/retention.py`)."""
        return dict(await self._do(lambda: self._db.execute("SELECT job, heard_ms FROM ended").fetchall()))

    async def note_ended(self, heard: Sequence[bytes], gone: Sequence[bytes], unix_ms: int) -> None:
        """Add jobs that have ended now, and remove those without data here or that continue."""
        await self._write("INSERT OR IGNORE INTO ended VALUES (?, ?)", *((job, unix_ms) for job in heard))
        await self._write("DELETE FROM ended WHERE job = ?", *((job,) for job in gone))

    async def workdirs(self) -> list[tuple[bytes, bytes, int | None]]:
        """Return the working directories here with each job that needs them, and when it was over (`checkpoints/workdirs.py`)."""
        return await self._do(lambda: self._db.execute("SELECT workdir, job, over_ms FROM workdirs").fetchall())

    async def save_workdir(self, workdir: bytes, job: bytes, over_ms: int | None) -> None:
        await self._write("INSERT OR REPLACE INTO workdirs VALUES (?, ?, ?)", (workdir, job, over_ms))

    async def drop_workdirs(self, gone: Sequence[bytes]) -> None:
        await self._write("DELETE FROM workdirs WHERE workdir = ?", *((workdir,) for workdir in gone))

    async def save_submitted(self, job: bytes, spec: bytes) -> None:
        await self._write("INSERT OR REPLACE INTO submitted VALUES (?, ?, ?)", (job, spec, _unix_ms()))

    async def submitted(self, job: bytes) -> bytes | None:
        """Return the sealed spec of a job that was submitted here."""
        row = await self._do(lambda: self._db.execute("SELECT spec FROM submitted WHERE job = ?", [job]).fetchone())
        return row[0] if row is not None else None

    async def save_pending_submission(self, job: bytes, submission: bytes) -> None:
        """Save a job that is to be brought to its witnesses (`submission_retry.py`)."""
        await self._write("INSERT OR REPLACE INTO pending_submissions VALUES (?, ?)", (job, submission))

    async def drop_pending_submission(self, job: bytes) -> None:
        await self._write("DELETE FROM pending_submissions WHERE job = ?", (job,))

    async def pending_submissions(self) -> list[bytes]:
        return [
            row[0]
            for row in await self._do(lambda: self._db.execute("SELECT submission FROM pending_submissions").fetchall())
        ]

    def record_event(self, actor: bytes, event: Event, sealed: bytes) -> None:
        """Keep an event. It is written soon, with others: nothing depends on it as on a witness record."""
        self._note(_KEEP_EVENT, (event.job or b"", actor, event.seq, sealed))

    def keep_receipt(self, job: bytes, sealed: bytes) -> None:
        """Keep a receipt of what an attempt used here (`gpus/receipts.py`). It is written soon."""
        self._note(_KEEP_RECEIPT, (job, sealed))

    async def receipts(self, job: bytes | None, limit: int = 1000) -> list[bytes]:
        """Return the sealed receipts of a job, or of all, oldest first; at most the newest `limit`."""
        await self._note_now()
        where, arguments = ("job = ?", [job]) if job is not None else ("1", [])
        query = f"SELECT sealed FROM receipts WHERE {where} ORDER BY id DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [*arguments, limit]).fetchall())
        return [row[0] for row in rows[::-1]]

    async def receipts_before(self, number: int | None, limit: int) -> list[tuple[int, bytes]]:
        """Return the `limit` receipts before `number`, or the newest: their numbers here and their bytes, newest first."""
        await self._note_now()
        query = "SELECT id, sealed FROM receipts WHERE id < ? ORDER BY id DESC LIMIT ?"
        newest = 2**62 if number is None else number
        return await self._do(lambda: self._db.execute(query, [newest, limit]).fetchall())

    def _note(self, statement: str, row: tuple[object, ...]) -> None:
        self._notes.append((statement, row))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_notes(), name="journal notes")

    async def _write_notes(self) -> None:
        """Write the notes that no witness record takes along."""
        while self._notes:
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTED_S):
                    await self._hurry.wait()
            notes, self._notes = self._notes, []
            self._written += len(notes)
            try:
                await self._write_all(notes)
                if self._written >= TRIM_EVERY:
                    self._written = 0
                    await self._do(lambda: _trim(self._db))
            except JournalError as error:
                log.warning("%d events and receipts are lost: %s", len(notes), error)

    async def _note_now(self) -> None:
        if self._writing is not None:
            self._hurry.set()
            try:
                await asyncio.shield(self._writing)  # who waits may be cancelled, the writing not
            finally:
                self._hurry.clear()

    async def events(self, job: bytes | None, after: int, limit: int = EVENTS_READ) -> list[tuple[int, bytes]]:
        """Return the sealed events of a job, or of all, with ids above `after`, oldest first; at most the newest `limit`."""
        await self._note_now()

        def read() -> list[tuple[int, bytes]]:
            where, arguments = "id > ?", [after]
            if job is not None:
                where, arguments = where + " AND job = ?", [after, job]  # type: ignore[list-item]
            query = f"SELECT id, sealed FROM events WHERE {where} ORDER BY id DESC LIMIT ?"
            return self._db.execute(query, [*arguments, limit]).fetchall()[::-1]

        return await self._do(read)

    async def request_delivery(self, kind: DeliveryKind, job: bytes, target: str) -> None:
        """Request that the job's output is brought to a directory when it is done, or what it adds to caches to these; "" ends
        the request.
        """
        if target:
            await self._write(f"INSERT OR REPLACE INTO {DELIVERIES[kind]} VALUES (?, ?)", (job, target))
        else:
            await self._write(f"DELETE FROM {DELIVERIES[kind]} WHERE job = ?", (job,))

    async def requested_deliveries(self, kind: DeliveryKind) -> dict[bytes, str]:
        return dict(await self._do(lambda: self._db.execute(f"SELECT * FROM {DELIVERIES[kind]}").fetchall()))

    async def save_key(self, realm: bytes, key: bytes, collected: bool = False) -> None:
        """Save the key of what a job saves (`checkpoints/keys.py`). `collected` from witnesses: it may be removed."""
        mark: list[Row] = [("INSERT OR IGNORE INTO collected_keys VALUES (?)", (realm,))] if collected else []
        await self._write_all([("INSERT OR REPLACE INTO keys VALUES (?, ?)", (realm, key)), *mark])

    async def collected_keys(self) -> set[bytes]:
        """Return the realms of the keys that were collected from witnesses."""
        rows = await self._do(lambda: self._db.execute("SELECT realm FROM collected_keys").fetchall())
        return {realm for (realm,) in rows}

    async def remove_keys(self, realms: Collection[bytes]) -> None:
        """Remove keys that were collected, with their marks."""
        tables = ("keys", "collected_keys")
        await self._write_all([(f"DELETE FROM {one} WHERE realm = ?", (realm,)) for one in tables for realm in realms])

    async def keys(self) -> dict[bytes, bytes]:
        """Return all saved keys by their realms."""
        return dict(await self._do(lambda: self._db.execute("SELECT realm, key FROM keys").fetchall()))

    async def save_shares(self, job: bytes, shares: Sequence[bytes], kind: str = "share") -> None:
        """Save this node's shares of a key, as a witness. `kind`: `share`, or `secrets-share` of the key of secrets."""
        statement = f"INSERT OR REPLACE INTO {SHARES[kind]} VALUES (?, ?)"
        await self._write(statement, (job, msgspec.msgpack.encode(shares)))

    async def shares(self, kind: str = "share") -> dict[bytes, list[bytes]]:
        rows = await self._do(lambda: self._db.execute(f"SELECT job, shares FROM {SHARES[kind]}").fetchall())
        return {job: msgspec.msgpack.decode(shares, type=list[bytes]) for job, shares in rows}

    def note_stay(self, stay: OwnStay) -> None:
        """Save a stay of this node, or its later end, for its survival estimate. Written soon."""
        self._note(_KEEP_STAY, (stay.start_ms, stay.end_ms, stay.cause))

    async def stays(self) -> list[OwnStay]:
        """Return the newest stays, oldest first. One that is open at a start was cut short at its last known end."""
        await self._note_now()
        query = "SELECT start_ms, end_ms, cause FROM stays ORDER BY start_ms DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [STAYS_KEPT]).fetchall())
        return [OwnStay(*row) for row in rows[::-1]]

    def note_departure(self, covered: bool) -> None:
        """Note that a guest had to leave, and whether a notice saved all its work. Written soon."""
        self._note(_KEEP_DEPARTURE, (int(covered),))

    async def departures(self) -> list[bool]:
        """Return, for each guest that had to leave, oldest first, whether a notice saved all its work."""
        await self._note_now()
        query = "SELECT covered FROM departures ORDER BY id DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [DEPARTURES_KEPT]).fetchall())
        return [bool(covered) for (covered,) in rows[::-1]]

    def note_path(self, peer: bytes, learnt: SavedRate) -> None:
        """Save how fast a peer has taken bytes so far. Written soon."""
        self._note(_KEEP_PATH, (peer, learnt.mean, learnt.variance, learnt.count, _unix_ms()))

    async def paths(self) -> list[tuple[bytes, SavedRate, float]]:
        """The newest ones, oldest first, and how many seconds ago each was heard of."""
        await self._note_now()
        query = "SELECT peer, mean, variance, count, unix_ms FROM paths ORDER BY unix_ms DESC LIMIT ?"
        rows = await self._do(lambda: self._db.execute(query, [PEERS]).fetchall())
        now_ms = _unix_ms()
        return [(row[0], SavedRate(*row[1:4]), max(0.0, (now_ms - row[4]) / 1000)) for row in rows[::-1]]

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
        try:  # it contains keys
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
            check_pages(connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("INSERT OR IGNORE INTO disk VALUES (0, ?)", [os.urandom(DISK_BYTES)])
            connection.execute("INSERT OR IGNORE INTO saves VALUES (0, 0)")
            self.disk = connection.execute("SELECT name FROM disk").fetchone()[0]
            _trim(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _write(self, statement: str, *rows: tuple[object, ...]) -> None:
        """Execute the statement for each of these rows, all or none."""
        await self._write_all([(statement, row) for row in rows])

    async def _write_all(self, rows: Sequence[Row]) -> None:
        """Execute these statements, all or none."""
        if not rows:
            return

        def write() -> None:
            try:
                with self._db as transaction:
                    transaction.execute("BEGIN")
                    for statement, row in rows:
                        transaction.execute(statement, row)
            except sqlite3.IntegrityError:
                raise
            except sqlite3.DatabaseError as error:
                raise JournalError(f"{self.path}: {error}. If its disk is full, free some space.") from error

        await self._do(write)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _readable(rows: Iterable[tuple[bytes]]) -> list[WitnessRecord]:
    witness_records = []
    for (data,) in rows:
        with suppress(*MALFORMED):
            witness_records.append(decode_witness_record(data))
    return witness_records


def _trim(connection: sqlite3.Connection) -> None:
    """Delete the oldest rows of tables that grow without end."""
    _trim_events(connection)
    for table, which, kept in (
        ("events", "job != x''", EVENTS_KEPT),
        ("events", "job = x''", AUDIT_KEPT),
        ("receipts", "1", RECEIPTS_KEPT),
        ("departures", "1", DEPARTURES_KEPT),
    ):
        _keep_newest(connection, table, which, kept)
    newest = "SELECT start_ms FROM stays ORDER BY start_ms DESC LIMIT 1 OFFSET ?"
    connection.execute(f"DELETE FROM stays WHERE start_ms <= ({newest})", [STAYS_KEPT])
    newest = "SELECT unix_ms FROM paths ORDER BY unix_ms DESC LIMIT 1 OFFSET ?"
    connection.execute(f"DELETE FROM paths WHERE unix_ms <= ({newest})", [PEERS])


def _trim_events(connection: sqlite3.Connection) -> None:
    """Delete the oldest events of jobs with most of them: no job displaces the events of others."""
    talkative = "SELECT job, actor FROM events WHERE job != x'' GROUP BY job, actor HAVING count(*) > ?"
    for pair in connection.execute(talkative, [EVENTS_OF_NODE]).fetchall():
        _keep_newest(connection, "events", "job = ? AND actor = ?", EVENTS_OF_NODE, *pair)
    query = "SELECT job, count(*) FROM events WHERE job != x'' GROUP BY job"
    counts: dict[bytes, int] = dict(connection.execute(query).fetchall())
    share = max(EVENTS_SURE, _fair_share(counts.values(), EVENTS_KEPT))
    for job, count in counts.items():
        if count > share:
            _keep_newest(connection, "events", "job = ?", share, job)


def _fair_share(counts: Collection[int], room: int) -> int:
    """Return the largest number that each may have at most, so that all fit into the room."""
    left = len(counts)
    for count in sorted(counts):
        if count * left > room:
            return room // left
        room, left = room - count, left - 1
    return max(counts, default=0)


def _keep_newest(connection: sqlite3.Connection, table: str, which: str, kept: int, *values: object) -> None:
    oldest = f"SELECT id FROM {table} WHERE {which} ORDER BY id DESC LIMIT 1 OFFSET ?"
    connection.execute(f"DELETE FROM {table} WHERE {which} AND id <= ({oldest})", [*values, *values, kept])


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
