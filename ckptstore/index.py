"""Index: chunk id -> place in a pack. A cache in SQLite, rebuilt from the packs whenever it does not match them."""

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptstore.errors import CorruptChunk, DiskFull, StoreError
from ckptstore.pack import HEADER_BYTES, Location, blocks, is_foreign, scan_pack
from ckptstore.tables import open_cache

SCHEMA_VERSION = 5
ADD = """
INSERT INTO chunks VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
SET pack = excluded.pack, offset = excluded.offset, length = excluded.length, base = excluded.base
WHERE chunks.base IS NOT NULL AND (excluded.base IS NULL OR NOT EXISTS
(SELECT 1 FROM chunks AS known_base WHERE known_base.id = chunks.base AND known_base.base IS NULL))
"""  # Of two copies keep the one that is not a delta, so that a base never becomes a delta, else the readable one.


class IndexReader:
    """The index of a store that another process has open. Thread-safe. StoreError if it is damaged while it is open."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _table(self) -> Iterator[sqlite3.Connection]:
        """Use the table alone, in one transaction."""
        with self._lock:
            try:
                with self._connection:
                    yield self._connection
            except sqlite3.DatabaseError as error:
                full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
                words = "free some space" if full else "start the node again, which makes it anew"
                raise (DiskFull if full else StoreError)(f"{self._path}: {error}: {words}") from error

    def find(self, identity: bytes) -> Location | None:
        with self._table() as table:
            row = table.execute("SELECT pack, offset, length, base FROM chunks WHERE id = ?", [identity]).fetchone()
        return Location(*row) if row is not None else None


class Index(IndexReader):
    """Thread-safe. `damaged` names packs whose scan failed when the index was last built."""

    def __init__(self, path: Path, packs: Path) -> None:
        self._path, self._packs = path, packs
        self._lock = threading.Lock()
        self.damaged: list[Path] = []
        self._connection = open_cache(path, _connect)
        if not self._is_current():
            self._rebuild()

    def missing(self, ids: Iterable[bytes]) -> list[bytes]:
        """Return those that cannot be read here, because they or their base are missing."""
        return [identity for identity in dict.fromkeys(ids) if not self.places(identity)]

    def places(self, identity: bytes) -> tuple[Location, ...]:
        """Return the place of a chunk and that of its base if it has one; empty if it cannot be read here."""
        where = self.find(identity)
        if where is None or where.base is None:
            return () if where is None else (where,)
        base = self.find(where.base)
        return () if base is None or base.base is not None else (where, base)

    def with_bases(self, ids: Iterable[bytes]) -> tuple[list[bytes], set[bytes]]:
        """Return these chunks and their bases, each base before its deltas; and the set of the bases."""
        wanted: dict[bytes, None] = {}
        bases: set[bytes] = set()
        for identity in ids:
            where = self.find(identity)
            if where is not None and where.base is not None:
                wanted[where.base] = None
                bases.add(where.base)
            wanted[identity] = None
        return list(wanted), bases

    def add(self, pack: str, locations: dict[bytes, Location], foreign: bool) -> None:
        rows = [(identity, where.pack, where.offset, where.length, where.base) for identity, where in locations.items()]
        with self._table() as table:
            table.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?)", [pack, foreign, self._blocks_of(pack)])
            table.executemany(ADD, rows)

    def move(self, old: str, new: str, locations: dict[bytes, Location], foreign: bool) -> None:
        """Record that these objects of a pack moved to a new one; what the index has elsewhere by now stays there."""
        rows = [
            (where.pack, where.offset, where.length, where.base, identity, old) for identity, where in locations.items()
        ]
        with self._table() as table:
            table.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?)", [new, foreign, self._blocks_of(new)])
            table.executemany("UPDATE chunks SET pack=?, offset=?, length=?, base=? WHERE id=? AND pack=?", rows)

    def drop_pack(self, pack: str) -> None:
        with self._table() as table:
            table.execute("DELETE FROM chunks WHERE pack = ?", [pack])
            table.execute("DELETE FROM packs WHERE name = ?", [pack])

    def knows(self, pack: str) -> bool:
        """Tell whether the objects of a pack are indexed."""
        with self._table() as table:
            return table.execute("SELECT 1 FROM packs WHERE name = ?", [pack]).fetchone() is not None

    def pack_bytes(self, foreign: bool) -> int:
        """Return what the packs take, or only those of other users' jobs."""
        with self._table() as table:
            query = "SELECT COALESCE(SUM(bytes), 0) FROM packs WHERE foreign_user OR NOT ?"
            found: tuple[int] = table.execute(query, [foreign]).fetchone()
        return found[0]

    def _blocks_of(self, pack: str) -> int:
        return blocks((self._packs / f"{pack}.pack").stat().st_size)

    def chunks_of(self, pack: str) -> dict[bytes, Location]:
        with self._table() as table:
            query = "SELECT id, pack, offset, length, base FROM chunks WHERE pack = ?"
            rows = table.execute(query, [pack]).fetchall()
        return {identity: Location(*where) for identity, *where in rows}

    def _is_current(self) -> bool:
        """Return True if exactly the packs on disk are indexed."""
        known = {name for (name,) in self._connection.execute("SELECT name FROM packs")}
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version == SCHEMA_VERSION and known == {path.stem for path in self._packs.glob("*.pack")}

    def _rebuild(self) -> None:
        self._connection.execute("PRAGMA user_version=0")  # until it is complete
        with self._connection:
            self._connection.execute("DELETE FROM chunks")
            self._connection.execute("DELETE FROM packs")
        deltas: dict[Path, dict[bytes, Location]] = {}  # last, so that of two the one whose base is here is kept
        for path in sorted(self._packs.glob("*.pack")):
            locations: dict[bytes, Location] = {}
            try:
                for header, offset in scan_pack(path):
                    length = HEADER_BYTES + header.stored_length
                    locations[header.id] = Location(path.stem, offset, length, header.base)
            except CorruptChunk:
                self.damaged.append(path)
                continue  # known only once it is salvaged, else a crash before that would leave it as it is
            whole = {identity: where for identity, where in locations.items() if where.base is None}
            deltas[path] = {identity: where for identity, where in locations.items() if where.base is not None}
            self.add(path.stem, whole, is_foreign(path))
        for path, found in deltas.items():
            self.add(path.stem, found, is_foreign(path))
        self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        connection.executescript("DROP TABLE IF EXISTS chunks; DROP TABLE IF EXISTS packs;")
    connection.executescript(
        """
        CREATE TABLE IF NOT EXISTS chunks (
            id BLOB PRIMARY KEY, pack TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, base BLOB
        ) WITHOUT ROWID;
        CREATE INDEX IF NOT EXISTS by_pack ON chunks (pack);
        CREATE TABLE IF NOT EXISTS packs (
            name TEXT PRIMARY KEY, foreign_user INTEGER NOT NULL, bytes INTEGER NOT NULL
        ) WITHOUT ROWID;
        """
    )
    return connection
