"""Adder: reads a directory or file into the store of data sets, and builds its pages.

What has been read is kept in a table that mirrors the directory: size, times and inode of each file, and where its bytes are.
So a file that has not changed is not read again, and an add that was killed goes on where its last pack was published. Memory
does not grow with the data set: files are read in pieces, small ones are gathered in bundles, pages are made from the table.

With a key, every chunk and page is encrypted (`cipher`). The table is that of a directory and a key, since the same bytes have
other ids with another key.

Readers get whole chunks. So a bundle is used again only if files of this data set cover all its bytes; else its files are read
into a new one, and what was deleted or replaced is in no chunk of the new version.
"""

import os
import sqlite3
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckptstore.buffers import allocate
from ckptstore.chunker import CHUNK_BYTES, split
from ckptstore.cipher import StateCipher
from ckptstore.codec import choose, encode
from ckptstore.dataset import (
    MAX_BYTES,
    MAX_ENTRIES,
    Entry,
    Link,
    PageMaker,
    Part,
    check_path,
    check_place,
    check_root,
    key_of,
)
from ckptstore.dataset_store import ROWS, DataSets
from ckptstore.encoding import Encoding
from ckptstore.errors import BadPath, FileChanged, TooLarge
from ckptstore.manifest import MAX_DEPTH
from ckptstore.pack import ID_BYTES, PackWriter, chunk_name, next_data, read_at, wrap
from ckptstore.tables import open_cache

THREADS = min(2, os.cpu_count() or 1)  # for hashing and encoding: an add must not take the machine (own choice)
SMALL_BYTES = 512 << 10  # smaller files share bundles (own choice)
# Bundles have up to CHUNK_BYTES (`make bench-data`: a first add of small files takes a fifth longer with bundles of this size).
# Where files change, theirs are packed anew in smaller ones, so that the next change has less to pack (docs/explanation/data.md).
REPACKED_BYTES = 256 << 10
PACK_BYTES = 256 << 20  # a pack is published at this size: what a kill can lose (own choice)
PACK_ROWS = 16_384  # or after so many files
PARTIAL_BYTES = 1 << 30  # a file in progress is noted so often
MOST_NAMES = 1_000_000  # in one directory: a name takes 60 bytes of memory while it is listed (own choice)
SLICE = 4096  # names compared with the table at a time
AT_ONCE = 100  # rows in a statement: other threads cannot run Python between them, and SQLite takes 999 parameters
# A file that changed so short before it was read could change again within the same clock tick (as "racily clean" in git).
SETTLED_NS = 2_000_000_000
PART = struct.Struct(">32sIII")
NOWHERE, UNFINISHED = -1, -2  # instead of a directory's number: a file, and one that is read in part

Report = Callable[["Progress"], None]


class Progress(NamedTuple):
    """Files and bytes seen, and bytes read since they were new or changed."""

    files: int
    bytes: int
    read: int


class Added(NamedTuple):
    """`new_bytes`: written to packs; `chunk_bytes`: of all its chunks, each counted once."""

    root: Link
    files: int
    read_bytes: int
    new_bytes: int
    chunk_bytes: int


class Row(NamedTuple):
    """What the table knows of an entry. `child`: the directory's own number. `parts`: packed `Part`s, or a link's target."""

    name: bytes
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    child: int
    parts: bytes


Times = tuple[int, int, int, int]  # size, mtime_ns, ctime_ns and inode
Bundled = tuple[int, bytes, int, Times, int]  # a file in a bundle: its directory, name, mode and times, its offset


class Adder:
    """Adds one directory or file, encrypted with `cipher` if there is one. `report` is called now and then, in the adder's
    thread, and may raise Stopped. A directory with all files of these `private` names is refused at any depth.
    """

    def __init__(
        self,
        store: DataSets,
        report: Report = lambda progress: None,
        rehash: bool = False,
        cipher: StateCipher | None = None,
        private: Collection[str] = (),
    ) -> None:
        self._store, self._report, self._rehash, self._cipher = store, report, rehash, cipher
        self._private = {os.fsencode(name) for name in private}
        self._sources = Sources(store.root / "sources.sqlite")
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dataset")
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="dataset packs")
        self._publishing: Future[None] | None = None
        self._writer = PackWriter(store.tmp, store.packs)
        self._rows: list[tuple[object, ...]] = []  # to be written to the table
        self._bundle_bytes = CHUNK_BYTES  # of those being filled
        self._bundle: memoryview | None = None
        self._bundled: list[Bundled] = []
        self._filled = 0
        self._bundles: deque[tuple[Future[bytes] | None, int, list[Bundled]]] = deque()  # being stored
        self._held: set[str] = set()
        self._known: set[bytes] = set()
        self._zeros: dict[int, bytes] = {}
        self._set = os.urandom(ID_BYTES)  # stands for the data set until its root is known
        self._members: dict[bytes, int] = {}  # chunks of its pages, with their lengths
        self._files = self._bytes = self._read = self._new = 0

    def add(self, path: Path) -> Added:
        """Return the root of the data set. FileChanged, BadPath, TooLarge, OSError; what was stored stays for the next add."""
        source = os.fsencode(os.path.realpath(path))
        with self._store.working(), self._store.disk_errors():
            try:
                top = self._sources.top(source, b"" if self._cipher is None else self._cipher.realm)
                directory = source
                if Path(os.fsdecode(source)).is_dir():
                    self._scan(top, source, ())
                else:
                    directory, name = os.path.split(source)
                    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    try:
                        self._scan_slice(top, descriptor, [name], None, None, ())
                    finally:
                        os.close(descriptor)
                self._publish()
                self._await_published()  # the rest is made from the table
                self._repack(top, directory, self._uncovered(top))
                link = self._build(top, ())
                check_root(link)
                self._publish()
                self._await_published()
                self._note_members()
                chunk_bytes = self._store.members.complete(self._set, key_of(link))
            finally:
                self._close()
        return Added(link, self._files, self._read, self._new, chunk_bytes)

    def _close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._publisher.shutdown()
        self._writer.abort()
        self._sources.close()

    # --- reading

    def _scan(self, directory: int, path: bytes, parts: tuple[bytes, ...]) -> None:
        """Bring the table up to date with one directory and those in it."""
        if len(parts) >= MAX_DEPTH:
            raise BadPath(f"{os.fsdecode(path)} is nested more than {MAX_DEPTH} levels deep")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            names = sorted(os.fsencode(name) for name in os.listdir(descriptor))  # noqa: PTH208
            if len(names) > MOST_NAMES:
                raise TooLarge(f"{os.fsdecode(path)} holds more than {MOST_NAMES} files: use directories in it")
            if self._private and self._private.issubset(names):
                raise BadPath(
                    f"{os.fsdecode(path)} is private, with its {' and '.join(map(os.fsdecode, sorted(self._private)))}"
                )
            check_path(parts, max(names, key=len, default=b""))
            inner: list[tuple[bytes, int]] = []
            for start in range(0, max(1, len(names)), SLICE):
                some = names[start : start + SLICE]
                low = names[start - 1] if start else None
                high = names[start + SLICE - 1] if start + SLICE < len(names) else None
                inner += self._scan_slice(directory, descriptor, some, low, high, parts)
            del names
        finally:
            os.close(descriptor)
        for name, child in inner:
            self._scan(child, path + b"/" + name, (*parts, name))

    def _scan_slice(
        self,
        directory: int,
        descriptor: int,
        names: Sequence[bytes],
        low: bytes | None,
        high: bytes | None,
        parts: tuple[bytes, ...],
    ) -> list[tuple[bytes, int]]:
        """Compare some names with the table, and read what is new; return the directories among them with their numbers."""
        known = {row.name: row for row in self._sources.between(directory, low, high)}
        inner: list[tuple[bytes, int]] = []
        for name in names:
            info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            row = known.pop(name, None)
            if stat.S_ISDIR(info.st_mode):
                child = row.child if row is not None and stat.S_ISDIR(row.mode) else self._sources.next_child()
                if row is None or row.mode != info.st_mode:
                    self._row(directory, Row(name, info.st_mode, 0, 0, 0, 0, child, b""))
                inner.append((name, child))
                self._count(0)
                continue
            if row is not None and stat.S_ISDIR(row.mode):
                self._sources.remove(directory, row)
                row = None
            if stat.S_ISLNK(info.st_mode):
                target = os.fsencode(os.readlink(name, dir_fd=descriptor))
                check_place(parts, Entry(name, info.st_mode, 0, (), (), target))
                if row is None or (row.mode, row.parts) != (info.st_mode, target):
                    self._row(directory, Row(name, info.st_mode, 0, 0, 0, 0, NOWHERE, target))
            elif stat.S_ISREG(info.st_mode):
                if row is None or not self._is_current(row, info):
                    self._file(directory, descriptor, name, info, row)
            else:
                raise BadPath(
                    f"{os.fsdecode(name)} is a socket, pipe or device: only files, directories and links are data"
                )
            self._count(info.st_size if stat.S_ISREG(info.st_mode) else 0)
        for row in known.values():
            self._sources.remove(directory, row)
        return inner

    def _count(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        if self._files > MAX_ENTRIES or self._bytes > MAX_BYTES:
            raise TooLarge(f"a data set holds at most {MAX_ENTRIES} entries and {MAX_BYTES >> 40} TiB")
        if self._files % 256 == 0:
            self._report(Progress(self._files, self._bytes, self._read))

    def _is_current(self, row: Row, info: os.stat_result) -> bool:
        """Tell whether a file is the one in the table and its chunks are still here."""
        if self._rehash or row.child != NOWHERE or row[2:6] != _times(info):
            return False
        return all(self._is_here(part.id) for part in unpack(row.parts))

    def _is_here(self, chunk: bytes) -> bool:
        if chunk not in self._known:
            if self._store.hold(chunk, self._held) is None:
                return False
            if len(self._known) >= 1 << 17:
                self._known.clear()
            self._known.add(chunk)
        return True

    def _file(self, directory: int, place: int, name: bytes, info: os.stat_result, row: Row | None) -> None:
        """Read a file that was found like this. FileChanged if it is another one, or changes meanwhile."""
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place)
        try:
            if info.st_size < SMALL_BYTES:
                self._small(directory, descriptor, name, info)
            else:
                self._large(directory, descriptor, name, info, row)
        finally:
            os.close(descriptor)

    def _small(self, directory: int, descriptor: int, name: bytes, info: os.stat_result) -> None:
        size, times = info.st_size, _times(info)
        settled = _settled(times)
        if self._filled + size > self._bundle_bytes:
            self._end_bundle()
            self._publish_if_full()
        if size:
            if self._bundle is None:
                self._bundle = allocate(CHUNK_BYTES)
            if read_at(descriptor, self._bundle[self._filled : self._filled + size], 0) < size:
                raise FileChanged(f"{os.fsdecode(name)} was truncated while it was being added")
        _check_unchanged(descriptor, name, times)
        self._bundled.append((directory, name, info.st_mode, settled, self._filled))
        self._filled += size
        self._read += size
        if len(self._bundled) >= PACK_ROWS:
            self._end_bundle()
            self._publish_if_full()

    def _end_bundle(self) -> None:
        """Store the bundle, in a thread; its files get their parts once its id is known."""
        if not self._bundled:
            return
        future: Future[bytes] | None = None
        if self._bundle is not None and self._filled:
            future = self._pool.submit(self._put, self._bundle[: self._filled], None)
        self._bundles.append((future, self._filled, self._bundled))
        self._bundle, self._bundled, self._filled = None, [], 0
        if len(self._bundles) > THREADS:
            self._settle_bundle()

    def _settle_bundle(self) -> None:
        future, length, bundled = self._bundles.popleft()
        chunk = future.result() if future is not None else b""
        for directory, name, mode, times, offset in bundled:
            parts = PART.pack(chunk, length, offset, times[0]) if times[0] else b""
            self._rows.append((directory, name, mode, *times, NOWHERE, parts))

    def _large(self, directory: int, descriptor: int, name: bytes, info: os.stat_result, row: Row | None) -> None:
        """Read a file chunk by chunk. What a killed add has read of it is not read again unless it changed since."""
        times = _settled(_times(info))
        pieces = split(lambda length, offset: os.pread(descriptor, length, offset), info.st_size)
        parts = bytearray()
        if row is not None and not self._rehash and row.child == UNFINISHED and row[2:6] == _times(info):
            parts += _whole_prefix(row.parts, [piece.length for piece in pieces], self._is_here)
        encoding: Encoding | None = None
        data_at, noted = 0, 0
        waiting: deque[tuple[int, Future[bytes]]] = deque()

        def take() -> None:
            length, future = waiting.popleft()
            parts.extend(PART.pack(future.result(), length, 0, length))

        try:
            for piece in pieces[len(parts) // PART.size :]:
                if data_at <= piece.offset:
                    data_at = next_data(descriptor, piece.offset, info.st_size)
                if data_at >= piece.offset + piece.length:
                    future = self._zero(piece.length)
                else:
                    data = allocate(piece.length)
                    if read_at(descriptor, data, piece.offset) < piece.length:
                        raise FileChanged(f"{os.fsdecode(name)} was truncated while it was being added")
                    encoding = encoding or choose(data, None, ())
                    future = self._pool.submit(self._put, data, encoding)
                    self._read += piece.length
                waiting.append((piece.length, future))
                if len(waiting) > THREADS:
                    take()
                self._report(Progress(self._files, self._bytes + piece.offset, self._read))
                if self._writer.bytes_written >= PACK_BYTES or piece.offset - noted >= PARTIAL_BYTES:
                    noted = piece.offset
                    while waiting:
                        take()
                    self._row(directory, Row(name, info.st_mode, *times, UNFINISHED, bytes(parts)))
                    self._publish()
            while waiting:
                take()
        finally:
            for _, future in waiting:  # no thread may use the buffers after this returns
                future.cancelled() or future.exception()
        _check_unchanged(descriptor, name, _times(info))
        self._row(directory, Row(name, info.st_mode, *times, NOWHERE, bytes(parts)))
        self._publish_if_full()

    def _zero(self, length: int) -> Future[bytes]:
        """Return the chunk of zeros of this length, stored once."""
        future: Future[bytes] = Future()
        if length not in self._zeros or not self._is_here(self._zeros[length]):
            self._zeros[length] = self._put(bytes(length), None)
            self._known.add(self._zeros[length])
        future.set_result(self._zeros[length])
        return future

    def _put(self, data: memoryview | bytes, encoding: Encoding | None) -> bytes:
        """Store a chunk unless it is here; `encoding`: None to choose it."""
        chunk = chunk_name(data, self._cipher)
        if self._store.hold(chunk.id, self._held) is None:
            encoding = encoding or choose(data, None, ())
            encoded = encode(data, encoding, None)
            if len(encoded) >= len(data):
                encoded, encoding = data, Encoding()
            self._writer.add(*wrap(chunk, encoded, len(data), encoding.codec, encoding.width, None, self._cipher))
        return chunk.id

    def _row(self, directory: int, row: Row) -> None:
        self._rows.append((directory, *row))

    def _publish_if_full(self) -> None:
        if self._writer.bytes_written >= PACK_BYTES or len(self._rows) >= PACK_ROWS:
            self._publish()

    def _publish(self) -> None:
        """Begin to make durable what was read; reading goes on meanwhile, one pack ahead at most."""
        self._end_bundle()
        while self._bundles:
            self._settle_bundle()
        self._await_published()
        self._report(Progress(self._files, self._bytes, self._read))
        self._new += self._writer.bytes_written
        self._store.check_quota(self._writer.bytes_written)
        writer, rows = self._writer, self._rows
        self._rows, self._writer = [], PackWriter(self._store.tmp, self._store.packs)
        self._publishing = self._publisher.submit(self._make_durable, writer, rows)

    def _make_durable(self, writer: PackWriter, rows: Sequence[tuple[object, ...]]) -> None:
        """Publish the pack, and only then write the rows that name its chunks."""
        self._store.publish_pack(writer)
        if rows:
            self._sources.write(rows)

    def _await_published(self) -> None:
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            publishing.result()

    # --- packing anew

    def _uncovered(self, top: int) -> set[bytes]:
        """Return the chunks with bytes that no file of the table has. Files are visited in the order in which they were read."""
        covered: dict[bytes, int] = {}  # bytes from the beginning of a chunk, until it is whole
        left = [top]
        while left:
            inner: list[int] = []
            for _, mode, _, child, packed in self._sources.made(left.pop()):
                if stat.S_ISDIR(mode):
                    inner.append(child)
                elif stat.S_ISREG(mode):
                    for chunk, chunk_length, offset, length in PART.iter_unpack(packed):
                        end = covered.get(chunk, 0)
                        if offset == end:
                            end += length
                        if end < chunk_length:
                            covered[chunk] = end
                        else:
                            covered.pop(chunk, None)
            left += reversed(inner)
        return set(covered)

    def _repack(self, directory: int, path: bytes, chunks: set[bytes]) -> None:
        """Read the files that lie in these chunks into others."""
        if not chunks:
            return
        self._bundle_bytes = REPACKED_BYTES
        left = [(directory, path)]
        while left:
            directory, path = left.pop()
            inner: list[tuple[int, bytes]] = []
            files: list[tuple[bytes, int, int]] = []
            for name, mode, size, child, packed in self._sources.made(directory):
                if stat.S_ISDIR(mode):
                    inner.append((child, path + b"/" + name))
                elif stat.S_ISREG(mode) and packed[:ID_BYTES] in chunks:
                    files.append((name, mode, size))
            left += reversed(inner)
            if not files:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name, mode, size in files:
                    info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if (info.st_mode, info.st_size) != (mode, size):
                        raise FileChanged(f"{os.fsdecode(name)} changed while it was being added: add it again")
                    self._file(directory, descriptor, name, info, None)
            finally:
                os.close(descriptor)
        self._publish()
        self._await_published()

    # --- building

    def _build(self, directory: int, parts: tuple[bytes, ...]) -> Link:
        """Make the pages of a directory from the table."""
        maker = PageMaker(self._put_page)
        for name, mode, size, child, packed in self._sources.made(directory):
            if stat.S_ISDIR(mode):
                link = self._build(child, (*parts, name))
                maker.add(Entry(name, mode, link.size, (), (link,)))
            elif stat.S_ISLNK(mode):
                maker.add(Entry(name, mode, 0, (), (), packed))
            else:
                found = unpack(packed)
                for part in found:
                    self._members[part.id] = part.chunk_length
                maker.file(name, mode, size, found)
        return maker.finish()

    def _put_page(self, data: bytes) -> bytes:
        chunk = self._put(data, None)
        self._members[chunk] = len(data)
        if len(self._members) >= ROWS:
            self._note_members()
        if self._writer.bytes_written >= PACK_BYTES:
            self._publish()
        return chunk

    def _note_members(self) -> None:
        self._store.members.note(self._set, self._members.items())
        self._members.clear()


class Sources:
    """The table of what has been read, of every directory that was added from."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # rows are written in a thread
        self._db = open_cache(path, self._connect)
        found = self._db.execute("SELECT last FROM numbers").fetchone()
        if found is None:
            self._db.execute("INSERT INTO numbers VALUES (0)")
            self._db.commit()
        self._last = found[0] if found is not None else 0

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA cache_size=-8000")  # 8 MB
        connection.executescript(
            """
            CREATE TABLE IF NOT EXISTS tops (path BLOB PRIMARY KEY, directory INTEGER) WITHOUT ROWID;
            CREATE TABLE IF NOT EXISTS entries (
                directory INTEGER, name BLOB, mode INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, inode INTEGER,
                child INTEGER, parts BLOB, PRIMARY KEY (directory, name)
            ) WITHOUT ROWID;
            CREATE TABLE IF NOT EXISTS numbers (last INTEGER);
            """
        )
        return connection

    def close(self) -> None:
        self._db.close()

    def next_child(self) -> int:
        self._last += 1
        return self._last

    def top(self, path: bytes, realm: bytes) -> int:
        """Return the number of a directory that is added with a key, or without one (no realm)."""
        path = b"\0".join([path, realm]) if realm else path
        found = self._db.execute("SELECT directory FROM tops WHERE path = ?", [path]).fetchone()
        if found is not None:
            return int(found[0])
        directory = self.next_child()
        with self._db:
            self._db.execute("INSERT INTO tops VALUES (?, ?)", [path, directory])
            self._db.execute("UPDATE numbers SET last = ?", [self._last])
        return directory

    def between(self, directory: int, low: bytes | None, high: bytes | None) -> Iterator[Row]:
        """Yield the entries after `low`, up to `high`."""
        query = f"SELECT {COLUMNS} FROM entries WHERE directory = ? AND name > ?"
        bounds: list[object] = [directory, low or b""]
        if high is not None:
            query, bounds = query + " AND name <= ?", [*bounds, high]
        with self._lock:
            return map(Row._make, self._db.execute(query, bounds).fetchall())

    def made(self, directory: int) -> Iterator[tuple[bytes, int, int, int, bytes]]:
        """Yield what its page says of each entry: name, mode, size, child, parts."""
        query = "SELECT name, mode, size, child, parts FROM entries WHERE directory = ? ORDER BY name"
        return self._db.cursor().execute(query, [directory])

    def write(self, rows: Sequence[tuple[object, ...]]) -> None:
        one = f"({', '.join('?' * WIDTH)})"
        with self._lock, self._db:
            for start in range(0, len(rows), AT_ONCE):
                some = rows[start : start + AT_ONCE]
                values = ", ".join([one] * len(some))
                self._db.execute(f"INSERT OR REPLACE INTO entries VALUES {values}", list(chain.from_iterable(some)))
            self._db.execute("UPDATE numbers SET last = ?", [self._last])

    def remove(self, directory: int, row: Row) -> None:
        """Remove an entry and all below it."""
        left = [row.child] if stat.S_ISDIR(row.mode) else []
        with self._lock, self._db:
            self._db.execute("DELETE FROM entries WHERE directory = ? AND name = ?", [directory, row.name])
            while left:
                inner = left.pop()
                found = self._db.execute("SELECT child FROM entries WHERE directory = ? AND child > 0", [inner])
                left += [child for (child,) in found]
                self._db.execute("DELETE FROM entries WHERE directory = ?", [inner])


COLUMNS = ", ".join(Row._fields)
WIDTH = 1 + len(Row._fields)


def unpack(parts: bytes) -> list[Part]:
    return [Part(*found) for found in PART.iter_unpack(parts)]


def _times(info: os.stat_result) -> Times:
    return (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def _settled(times: Times) -> Times:
    """Return the times of a file that is about to be read; no change time if it changed only now, so that it is read again."""
    return times if times[2] < time.time_ns() - SETTLED_NS else (*times[:2], 0, times[3])


def _check_unchanged(descriptor: int, name: bytes, before: Times) -> None:
    if _times(os.fstat(descriptor)) != before:
        raise FileChanged(
            f"{os.fsdecode(name)} changed while it was being added: add it again once nothing writes there"
        )


def _whole_prefix(packed: bytes, lengths: Sequence[int], is_here: Callable[[bytes], bool]) -> bytes:
    """Return the known parts from the beginning of a file whose chunks are still here and fit its pieces."""
    count = 0
    for part, length in zip(unpack(packed), lengths, strict=False):
        if part.length != length or not is_here(part.id):
            break
        count += 1
    return packed[: count * PART.size]
