"""What this node knows of jobs, on disk: witness cells, submitted jobs, and the events it saw. SQLite in WAL mode.

One connection in one thread; `synchronous=FULL`, so that a cell that `save_cell` has returned from survives a power cut.
A journal that SQLite cannot read is moved aside and reported, never deleted.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from mesh.jobs.effects import Cell

SCHEMA_VERSION = 1
DISK_BYTES = 8  # of a journal's name: no two of a node's journals are ever called alike
EVENTS_KEPT = 20_000  # about 4 MB; older ones are dropped

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (job BLOB PRIMARY KEY, cell BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS submitted (job BLOB PRIMARY KEY, spec BLOB NOT NULL, unix_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, unix_ms INTEGER NOT NULL, job BLOB, actor TEXT NOT NULL, text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS disk (id INTEGER PRIMARY KEY CHECK (id = 0), name BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (unix_ms INTEGER NOT NULL, length_s REAL NOT NULL, ended INTEGER NOT NULL);
"""

T = TypeVar("T")


class JournalError(RuntimeError):
    """The journal cannot be written; the text says why and what to do."""


class Event(msgspec.Struct, frozen=True):
    id: int
    unix_ms: int
    job: bytes | None
    actor: str
    text: str


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved_aside: Path | None = None
        self.disk = b""  # drawn with the journal; another journal is another witness (`ledger.Seat`)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._do(self._open)

    async def close(self) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await self._do(close)
        self._thread.shutdown(wait=False)

    async def save_cell(self, cell: Cell) -> None:
        data = msgspec.msgpack.encode(cell)
        await self._write("INSERT OR REPLACE INTO cells VALUES (?, ?)", cell.job, data)

    async def cells(self) -> tuple[list[Cell], set[bytes]]:
        """Every readable cell, and the jobs of those that are not: they are left alone, and reported as events."""
        rows = await self._do(lambda: self._db.execute("SELECT job, cell FROM cells").fetchall())
        cells: list[Cell] = []
        damaged: set[bytes] = set()
        for job, data in rows:
            try:
                cells.append(_cell_decoder.decode(data))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                await self.record(job, "journal", f"a damaged witness cell was skipped: {error}")
                damaged.add(job)
        return cells, damaged

    async def save_submitted(self, job: bytes, spec: bytes) -> None:
        await self._write("INSERT OR REPLACE INTO submitted VALUES (?, ?, ?)", job, spec, _unix_ms())

    async def submitted(self) -> dict[bytes, bytes]:
        return dict(await self._do(lambda: self._db.execute("SELECT job, spec FROM submitted").fetchall()))

    async def record(self, job: bytes | None, actor: str, text: str) -> None:
        await self._write(
            "INSERT INTO events (unix_ms, job, actor, text) VALUES (?, ?, ?, ?)", _unix_ms(), job, actor, text
        )

    async def events(self, job: bytes | None, after: int, limit: int = 1000) -> list[Event]:
        def read() -> list[Event]:
            where, arguments = "id > ?", [after]
            if job is not None:
                where, arguments = where + " AND job = ?", [after, job]  # type: ignore[list-item]
            query = f"SELECT id, unix_ms, job, actor, text FROM events WHERE {where} ORDER BY id LIMIT ?"
            return [Event(*row) for row in self._db.execute(query, [*arguments, limit])]

        return await self._do(read)

    async def record_session(self, length_s: float, ended: bool) -> None:
        """One stay of this node in the mesh, for its own survival estimate."""
        await self._write("INSERT INTO sessions VALUES (?, ?, ?)", _unix_ms(), length_s, int(ended))

    async def sessions(self) -> list[tuple[float, bool]]:
        rows = await self._do(
            lambda: self._db.execute("SELECT length_s, ended FROM sessions ORDER BY unix_ms DESC LIMIT 1000").fetchall()
        )
        return [(length_s, bool(ended)) for length_s, ended in rows]

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
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise JournalError(
                    f"{self.path} was written by a newer campus-mesh (schema {version}); upgrade this node"
                )
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("INSERT OR IGNORE INTO disk VALUES (0, ?)", [os.urandom(DISK_BYTES)])
            self.disk = connection.execute("SELECT name FROM disk").fetchone()[0]
            connection.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", [EVENTS_KEPT])
        except BaseException:
            connection.close()
            raise
        return connection

    async def _write(self, statement: str, *arguments: object) -> None:
        def write() -> None:
            try:
                self._db.execute(statement, arguments)
            except sqlite3.OperationalError as error:
                raise JournalError(f"{self.path}: {error}. Free some space on its disk.") from error

        await self._do(write)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_cell_decoder = msgspec.msgpack.Decoder(Cell)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
