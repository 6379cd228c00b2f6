"""The index: chunk id -> where it lies. A cache in SQLite, rebuilt from the packs whenever it does not fit them."""

import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

from ckptstore.errors import CorruptChunk
from ckptstore.pack import Location, scan_pack

SCHEMA_VERSION = 1


class Index:
    """Thread-safe. `damaged` names packs whose scan failed when the index was last built."""

    def __init__(self, path: Path, packs: Path) -> None:
        self._path = path
        self._packs = packs
        self._lock = threading.Lock()
        self.damaged: list[Path] = []
        try:
            self._connection = self._connect()
            fits = self._fits()
        except sqlite3.DatabaseError:
            self._remove()
            self._connection = self._connect()
            fits = False
        if not fits:
            self._rebuild()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def find(self, identity: bytes) -> Location | None:
        with self._lock:
            row = self._connection.execute(
                "SELECT pack, offset, length FROM chunks WHERE id = ?", [identity]
            ).fetchone()
        return Location(*row) if row is not None else None

    def missing(self, ids: Iterable[bytes]) -> list[bytes]:
        return [identity for identity in dict.fromkeys(ids) if self.find(identity) is None]

    def add(self, pack: str, locations: dict[bytes, Location]) -> None:
        rows = [(identity, where.pack, where.offset, where.length) for identity, where in locations.items()]
        with self._lock, self._connection:
            self._connection.execute("INSERT OR REPLACE INTO packs VALUES (?)", [pack])
            self._connection.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?)", rows)

    def drop_pack(self, pack: str) -> None:
        with self._lock, self._connection:
            self._connection.execute("DELETE FROM chunks WHERE pack = ?", [pack])
            self._connection.execute("DELETE FROM packs WHERE name = ?", [pack])

    def chunks_of(self, pack: str) -> list[bytes]:
        with self._lock:
            rows = self._connection.execute("SELECT id FROM chunks WHERE pack = ?", [pack]).fetchall()
        return [identity for (identity,) in rows]

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(
            """
            CREATE TABLE IF NOT EXISTS chunks (
                id BLOB PRIMARY KEY, pack TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL
            ) WITHOUT ROWID;
            CREATE INDEX IF NOT EXISTS by_pack ON chunks (pack);
            CREATE TABLE IF NOT EXISTS packs (name TEXT PRIMARY KEY) WITHOUT ROWID;
            """
        )
        return connection

    def _fits(self) -> bool:
        """Whether exactly the packs on disk are indexed."""
        known = {name for (name,) in self._connection.execute("SELECT name FROM packs")}
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version == SCHEMA_VERSION and known == {path.stem for path in self._packs.glob("*.pack")}

    def _rebuild(self) -> None:
        with self._connection:
            self._connection.execute("DELETE FROM chunks")
            self._connection.execute("DELETE FROM packs")
        for path in sorted(self._packs.glob("*.pack")):
            locations: dict[bytes, Location] = {}
            try:
                for header, offset in scan_pack(path):
                    locations[header.id] = Location(path.stem, offset, header.stored_length)
            except CorruptChunk:
                self.damaged.append(path)
            self.add(path.stem, locations)
        self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(str(self._path) + suffix).unlink(missing_ok=True)
