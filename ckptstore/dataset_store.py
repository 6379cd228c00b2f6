"""Store of data sets on one node: chunks in packs, the sets that need them, and trees of files for guests to read.

ROOT/packs  index.sqlite  tmp  quarantine   as in the store of checkpoints, whose code this is
    /sets/ID                                the sealed manifest of a data set whose chunks are all here
    /trees/ID/                              the files of such a set, read-only
    /members.sqlite                         the chunks of each set; a cache, made again from the pages
    /sources.sqlite                         what has been read of directories that were added (`dataset_adder`)
It is apart from the checkpoints', so that nobody gets a chunk of a private data set who may ask for chunks of checkpoints.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ckptstore.cipher import StateCipher
from ckptstore.collector import CollectReport, collect
from ckptstore.dataset import (
    MAX_LEVELS,
    ChunkList,
    Entry,
    Link,
    Page,
    check_root,
    decode_list,
    decode_page,
    fresh,
    key_of,
    links_of,
)
from ckptstore.encoding import Bytes
from ckptstore.errors import BadManifest, CorruptChunk, MissingChunks, NotFound, QuotaExceeded
from ckptstore.objects import ObjectStore
from ckptstore.pack import write_at
from ckptstore.receiver import Receiver
from ckptstore.tables import open_cache
from ckptstore.tree_writer import TreeWriter
from membership.durable import write_durably

KEEP_PARTIAL_S = (
    86_400.0  # for what was added or fetched in part, so that it can continue the next day; kopia's default
)
FREED_AGE_S = 900.0  # age of a pack that is freed while something else is added or fetched; as for checkpoints
DECODED = 4  # chunks kept while files are written: the bundle of the files in a row, zeros of sparse ones (own choice)
ROWS = 4096  # of a table in one statement
PREFIX = "data/"  # of paths for `TreeWriter`, so that a link at the top cannot lead out
READ_ONLY_FILE, READ_ONLY_DIRECTORY = 0o444, 0o555
OWN_FILE = 0o644

Report = Callable[[int], None]  # bytes done
Part = tuple[bytes, int, int, int]  # of a file: a chunk and its length; offset and length in it


class Member(NamedTuple):
    """A data set that is whole here. `bytes`: of its chunks before encoding."""

    id: bytes
    chunks: int
    bytes: int


class DataSets(ObjectStore):
    """The object store with data sets. Thread-safe; all methods block. `quota_bytes`: of packs and trees together.

    Whatever reads pages or files takes the data set's `cipher`, None for one that is not encrypted. MissingKey if it is another.
    """

    verify_command = "mesh data verify"

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        super().__init__(root, quota_bytes=quota_bytes, foreign_quota_bytes=None)
        self.sets, self.trees = root / "sets", root / "trees"
        with self.disk_errors():
            for directory in (self.sets, self.trees):
                directory.mkdir(exist_ok=True)
            for leftover in self.trees.glob("*.making"):
                remove_tree(leftover)
        self.members = Members(root / "members.sqlite")
        self._busy = 0  # adds and fetches in progress: what they have stored belongs to no set yet

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn a full or read-only disk into DiskFull or ReadOnlyStore, also where a table is written."""
        with super().disk_errors():
            try:
                yield
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                raise OSError(errno.ENOSPC, str(error)) from error

    def close(self) -> None:
        self.members.close()
        super().close()

    # --- sets

    def has(self, identity: bytes) -> bool:
        return (self.sets / identity.hex()).exists()

    def held(self) -> list[bytes]:
        """Return the sets that are here."""
        return [bytes.fromhex(path.name) for path in self.sets.iterdir() if len(path.name) == 64]

    def sealed(self, identity: bytes) -> bytes:
        try:
            return (self.sets / identity.hex()).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"data set {identity.hex()[:12]} is not on this node") from error

    def publish(
        self, identity: bytes, sealed: bytes, root: Link, cipher: StateCipher | None = None, noted: bytes = b""
    ) -> None:
        """Keep a data set whose chunks are all here; durable on return. MissingChunks, BadManifest.

        The tree is walked, unless all its chunks were noted: under its root when this node has made it, or as `noted` says.
        """
        if self.members.complete(noted or key_of(root), identity):
            self._check_here(chunk for chunk, _ in self.members.of(identity))
        else:
            self.enter(identity, root, cipher)
        with self.disk_errors():
            write_durably(self.sets / identity.hex(), sealed)

    def enter(self, identity: bytes, root: Link, cipher: StateCipher | None = None) -> None:
        """Record the chunks of a data set, after its whole tree is walked."""
        self.members.remove(identity)
        for batch in batches(self.chunks(root, cipher), ROWS):
            self._check_here(chunk for chunk, _ in batch)
            self.members.note(identity, batch)
        self.members.complete(identity, identity)

    def _check_here(self, chunks: Iterable[bytes]) -> None:
        missing = self.index.missing(chunks)
        if missing:
            raise MissingChunks(f"{len(missing)} chunks of this data set are not here", missing)

    def known(self) -> dict[bytes, Member]:
        return {member.id: member for member in self.members.all()}

    def belongs(self, identity: bytes, chunks: Sequence[bytes]) -> bool:
        """Tell whether all of these chunks are of a data set that is here, or whose chunks are noted as they come."""
        return len(self.members.among(identity, chunks)) == len(set(chunks))

    def lacks(self, identity: bytes, chunks: Sequence[bytes]) -> list[bytes]:
        """Return those of these chunks that are not here as chunks of a data set."""
        known = self.members.among(identity, chunks)
        missing = set(self.index.missing(known))
        return [chunk for chunk in chunks if chunk not in known or chunk in missing]

    def missing_of(self, identity: bytes) -> list[tuple[bytes, int]]:
        """Return the chunks of a known set that are not here any more, with their lengths."""
        return [row for row in self.members.of(identity) if not self.index.places(row[0])]

    def forget(self, identity: bytes) -> set[str]:
        """Remove a data set, its tree first; return the packs with its chunks, for `free`."""
        self.drop_tree(identity)
        places = [place for chunk, _ in self.members.of(identity) for place in self.index.places(chunk)]
        (self.sets / identity.hex()).unlink(missing_ok=True)
        self.members.remove(identity)
        return {place.pack for place in places}

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Keep chunks that belong to no set yet from being collected."""
        with self.lock:
            self._busy += 1
        try:
            yield
        finally:
            with self.lock:
                self._busy -= 1

    def free(self, now_unix: float, only: Container[str] | None = None) -> CollectReport:
        """Remove chunks of no set: from these packs, or from those that were not touched for a day.

        While something is added or fetched, a pack that it may just have come to rely on stays.
        """
        with self.lock:  # nothing begins to be added meanwhile
            least_s = FREED_AGE_S if self._busy else 0.0
            if not self._busy:
                self.members.keep(self.held())  # the others were given up
        age_s = KEEP_PARTIAL_S if only is None else least_s
        with self.disk_errors():
            return collect(self, self.sets, self.members, min_age_s=age_s, now_unix=now_unix, only=only)

    # --- walking

    def page(self, link: Link, cipher: StateCipher | None = None) -> Page:
        return decode_page(self.chunk(link.id, cipher), link)

    def chunk_list(self, link: Link, cipher: StateCipher | None = None) -> ChunkList:
        return decode_list(self.chunk(link.id, cipher), link)

    def entries(self, link: Link, cipher: StateCipher | None = None, level: int = 0) -> Iterator[tuple[Page, Entry]]:
        """Yield the entries of a directory in order, each with its page."""
        page = self.page(link, cipher)
        if page.children and level >= MAX_LEVELS:  # an honest one has at most 1024 entries a level
            raise BadManifest("a directory of a data set has too many levels of index pages")
        for child in page.children:
            yield from self.entries(child.link, cipher, level + 1)
        for entry in page.entries:
            yield page, entry

    def walk(self, link: Link, cipher: StateCipher | None = None) -> Iterator[tuple[tuple[bytes, ...], Page, Entry]]:
        """Yield every entry below a directory with the directories above it, a directory before what it holds."""
        check_root(link)
        stack: list[tuple[tuple[bytes, ...], Iterator[tuple[Page, Entry]]]] = [((), self.entries(link, cipher))]
        while stack:
            parts, entries = stack[-1]
            found = next(entries, None)
            if found is None:
                stack.pop()
                continue
            page, entry = found
            yield parts, page, entry
            if stat.S_ISDIR(entry.mode):
                stack.append(((*parts, entry.name), self.entries(entry.lists[0], cipher)))

    def chunks(self, root: Link, cipher: StateCipher | None = None) -> Iterator[tuple[bytes, int]]:
        """Yield every chunk below a link with its length, pages included; some more than once.

        What several pages name is walked once, so that few bytes cannot unfold to millions of pages.
        """
        check_root(root)
        stack, seen = [(root, True)], {root}
        while stack:
            link, is_page = stack.pop()
            yield link.id, link.length
            if is_page:
                page = self.page(link, cipher)
                yield from page.chunks
                stack += fresh(links_of(page), seen)
            else:
                yield from self.chunk_list(link, cipher).chunks

    def find(self, root: Link, path: Sequence[bytes], cipher: StateCipher | None = None) -> Entry:
        """Return the entry at a path. NotFound."""
        link, entry = root, None
        for name in path:
            entry = next((entry for _, entry in self.entries(link, cipher) if entry.name == name), None)
            if entry is None or (name is not path[-1] and not stat.S_ISDIR(entry.mode)):
                raise NotFound(f"{os.fsdecode(b'/'.join(path))} is not in this data set")
            link = entry.lists[0] if stat.S_ISDIR(entry.mode) else link
        if entry is None:
            raise NotFound("no path was named")
        return entry

    # --- trees

    def tree(self, identity: bytes) -> Path:
        return self.trees / identity.hex()

    def drop_tree(self, identity: bytes) -> None:
        path = self.tree(identity)
        if path.exists():
            going = path.with_name(f"{path.name}.{os.urandom(4).hex()}.making")
            path.rename(going)
            remove_tree(going)

    def make_tree(
        self, identity: bytes, root: Link, report: Report = lambda done: None, cipher: StateCipher | None = None
    ) -> Path:
        """Write the files of a data set, each chunk verified, unless they are there; return their directory.

        It appears as a whole. Nothing is ever written outside, or over another file of it; modes are read-only.
        """
        path = self.tree(identity)
        if path.exists():
            return path
        making = path.with_name(f"{path.name}.{os.urandom(4).hex()}.making")
        with self.disk_errors():
            making.mkdir(mode=0o700)
            try:
                self._write_tree(making, root, report, cipher)
                _read_only(making)
                _sync(making)
                making.rename(path)
            except BaseException:
                remove_tree(making)
                raise
        return path

    def copy_tree(
        self, new: Path, root: Link, report: Report = lambda done: None, cipher: StateCipher | None = None
    ) -> None:
        """Write the files of a data set, each chunk verified, to a new directory whose owner may change them."""
        with self.disk_errors():
            new.mkdir(mode=0o700)
            self._write_tree(new, root, report, cipher, OWN_FILE)

    def _write_tree(
        self, making: Path, root: Link, report: Report, cipher: StateCipher | None, file_mode: int = READ_ONLY_FILE
    ) -> None:
        """Write files of whole chunks as they come, and after them the parts of chunks, chunk by chunk.

        So no more is decoded than all files and all chunks have, in whatever order the files share bundles.
        """
        done, decoded = 0, lru_cache(DECODED)(lambda one: memoryview(self.chunk(one, cipher)))

        def write(path: str, mode: int, size: int, parts: Iterable[Part]) -> None:
            nonlocal done
            descriptor = tree.file(path, file_mode | mode & 0o111)
            try:
                os.ftruncate(descriptor, size)
                at = 0
                for one, chunk_length, offset, length in parts:
                    data = decoded(one)
                    if len(data) != chunk_length:
                        raise CorruptChunk("a chunk does not have the length that its page says")
                    if data[offset] or any_set(data[offset : offset + length]):  # one of zeros stays a hole
                        write_at(descriptor, data[offset : offset + length], at)
                    at += length
                    done += length
                    report(done)
            finally:
                os.close(descriptor)

        with TreeWriter(making, PREFIX) as tree, contextlib.closing(Bundled(self.tmp)) as bundled:
            for parts, page, entry in self.walk(root, cipher):
                path = PREFIX + os.fsdecode(b"/".join((*parts, entry.name)))
                if stat.S_ISDIR(entry.mode):
                    tree.directory(path, 0o700)
                    continue
                if stat.S_ISLNK(entry.mode):
                    tree.link(path, os.fsdecode(entry.target))
                    continue
                pieces = self._parts(page, entry, cipher)
                if entry.refs and entry.size < page.lengths[entry.refs[0].number]:
                    bundled.put(path, entry.mode, next(pieces))
                    report(done)  # which may raise Stopped
                else:
                    write(path, entry.mode, entry.size, pieces)
            for path, mode, part in bundled:
                write(path, mode, part[3], [part])

    def _parts(self, page: Page, entry: Entry, cipher: StateCipher | None) -> Iterator[Part]:
        for ref in entry.refs:
            yield page.chunk(ref.number), page.lengths[ref.number], ref.offset, ref.length
        for link in entry.lists:
            for one, length in self.chunk_list(link, cipher).chunks:
                yield one, length, 0, length

    # --- space

    def receive(self, max_bytes: int, realm: bytes = b"") -> Receiver:
        """Begin to receive up to `max_bytes` from a peer, of a data set that is encrypted in this realm; empty: in none."""
        with self.disk_errors():
            return Receiver(self, max_bytes, realm=realm)

    def check_quota(self, more: int, foreign: bool = False) -> None:
        if self.quota_bytes is not None and self.stored_bytes() + more > self.quota_bytes:
            raise QuotaExceeded(
                f"the {self.quota_bytes / 2**30:.1f} GiB for data sets (data_quota_gib) are full: raise the limit, or remove "
                "data sets (`mesh data ls`)"
            )


def any_set(data: Bytes) -> bool:
    """Tell whether any byte is not zero."""
    return bytes(data) != bytes(len(data))


class Bundled:
    """Files that are parts of chunks, by chunk. On disk, since a data set has up to 20 million."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{os.urandom(8).hex()}.bundled"
        self._db = sqlite3.connect(self._path)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(
            "CREATE TABLE files (chunk BLOB, number INTEGER, path BLOB, mode INTEGER, whole INTEGER, offset INTEGER, "
            "length INTEGER, PRIMARY KEY (chunk, number)) WITHOUT ROWID"
        )
        self._count = 0

    def close(self) -> None:
        self._db.close()
        self._path.unlink(missing_ok=True)

    def put(self, path: str, mode: int, part: Part) -> None:
        one, *where = part
        self._count += 1
        row = [one, self._count, os.fsencode(path), mode, *where]
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def __iter__(self) -> Iterator[tuple[str, int, Part]]:
        query = "SELECT path, mode, chunk, whole, offset, length FROM files ORDER BY chunk, number"
        for path, mode, *part in self._db.execute(query):
            yield os.fsdecode(path), mode, (part[0], part[1], part[2], part[3])


class Members(Container[bytes]):
    """Which chunks the sets here have. A container of all of them, for the collector."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._connection = open_cache(path, self._connect)

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(
            """
            CREATE TABLE IF NOT EXISTS members (chunk BLOB, data BLOB, length INTEGER, PRIMARY KEY (chunk, data)) WITHOUT ROWID;
            CREATE INDEX IF NOT EXISTS by_data ON members (data);
            CREATE TABLE IF NOT EXISTS sets (data BLOB PRIMARY KEY, chunks INTEGER, bytes INTEGER) WITHOUT ROWID;
            """
        )
        return connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __contains__(self, chunk: object) -> bool:
        with self._lock:
            found = self._connection.execute("SELECT 1 FROM members WHERE chunk = ?", [chunk])
            return found.fetchone() is not None

    def note(self, identity: bytes, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Record some chunks of a set that is not complete yet."""
        rows = [(chunk, identity, length) for chunk, length in chunks]
        with self._lock, self._connection:
            self._connection.executemany("INSERT OR IGNORE INTO members VALUES (?, ?, ?)", rows)

    def complete(self, noted: bytes, identity: bytes) -> int:
        """Give what was noted its name, and return the bytes of its chunks; 0 if nothing was."""
        with self._lock, self._connection:
            count, size = self._connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(length), 0) FROM members WHERE data = ?", [noted]
            ).fetchone()
            if not count:
                return 0
            if noted != identity:
                self._connection.execute("DELETE FROM sets WHERE data = ?", [noted])
                self._connection.execute("DELETE FROM members WHERE data = ?", [identity])
                self._connection.execute("UPDATE members SET data = ? WHERE data = ?", [identity, noted])
            self._connection.execute("INSERT OR REPLACE INTO sets VALUES (?, ?, ?)", [identity, count, size])
        return int(size)

    def keep(self, identities: Iterable[bytes]) -> None:
        """Remove all but these sets."""
        kept, last = set(identities), b""
        while True:
            with self._lock:
                (last,) = self._connection.execute("SELECT MIN(data) FROM members WHERE data > ?", [last]).fetchone()
            if last is None:
                return
            if last not in kept:
                self.remove(last)

    def remove(self, identity: bytes) -> None:
        with self._lock, self._connection:
            self._connection.execute("DELETE FROM sets WHERE data = ?", [identity])
            self._connection.execute("DELETE FROM members WHERE data = ?", [identity])

    def among(self, identity: bytes, chunks: Iterable[bytes]) -> set[bytes]:
        """Return those of these chunks that are of a set."""
        query = "SELECT 1 FROM members WHERE chunk = ? AND data = ?"
        with self._lock:
            return {chunk for chunk in chunks if self._connection.execute(query, [chunk, identity]).fetchone()}

    def of(self, identity: bytes) -> list[tuple[bytes, int]]:
        with self._lock:
            return self._connection.execute("SELECT chunk, length FROM members WHERE data = ?", [identity]).fetchall()

    def all(self) -> list[Member]:
        with self._lock:
            return [Member(*row) for row in self._connection.execute("SELECT data, chunks, bytes FROM sets")]


def batches(items: Iterable[tuple[bytes, int]], size: int) -> Iterator[list[tuple[bytes, int]]]:
    batch: list[tuple[bytes, int]] = []
    for item in items:
        batch.append(item)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def remove_tree(path: Path) -> None:
    """Remove a file, or a tree whose directories are read-only."""
    for _, _, _, descriptor in os.fwalk(path):
        os.fchmod(descriptor, 0o700)
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _read_only(path: Path) -> None:
    for _, _, _, descriptor in os.fwalk(path, topdown=False):
        os.fchmod(descriptor, READ_ONLY_DIRECTORY)


def _sync(path: Path) -> None:
    """Make a tree durable before its name: else a power cut could leave empty files under it."""
    import ctypes

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            os.sync()
    finally:
        os.close(descriptor)
