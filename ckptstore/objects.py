"""Object store: chunks in packs, found by an index, within quotas.

It knows nothing of manifests. The order of every write is restic's: temporary file, fsync, rename, fsync of the directory.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ckptstore.buffers import keep_freed_memory
from ckptstore.cipher import StateCipher
from ckptstore.encoding import Bytes
from ckptstore.errors import CorruptChunk, DiskFull, MissingChunks, QuotaExceeded, ReadOnlyStore, StoreError
from ckptstore.index import Index, IndexReader
from ckptstore.pack import (
    HEADER_BYTES,
    PACK_HEADER_BYTES,
    Location,
    ObjectHeader,
    PackWriter,
    check_stored,
    decode_header,
    is_foreign,
    next_magic,
    open_chunk,
    read_pack,
)

FALSE_HEADERS = 1024  # of a damaged pack: what a hostile chunk holds costs at most seconds of hashing (own choice)
LEAST_FREE, LEAST_SHARE = 1 << 30, 20  # bytes left free on the disk, of a small one a twentieth (own choice)


class ObjectReader:
    """Reads chunks, also while another process writes the store. Thread-safe; all methods block."""

    verify_command = "mesh ckpt verify"

    def __init__(self, packs: Path, index: IndexReader) -> None:
        self.packs, self.index = packs, index

    def chunk(self, identity: bytes, cipher: StateCipher | None = None) -> Bytes:
        """Return a chunk, verified. Raises CorruptChunk, MissingChunks or MissingKey."""
        header, data = self.object(identity)
        base = None
        if header.base is not None:
            base_header, base_data = self.object(header.base)
            base = open_chunk(base_header, base_data[HEADER_BYTES:], None, cipher)
        return open_chunk(header, data[HEADER_BYTES:], base, cipher)

    def object(self, identity: bytes) -> tuple[ObjectHeader, memoryview]:
        """Return a chunk's verified header, and the whole object, whose stored bytes are not verified."""
        where, descriptor = self._open_pack(identity)
        try:
            view = read_pack(descriptor, where.length, where.offset)
            header = decode_header(view[:HEADER_BYTES])
            if len(view) < where.length or header.id != identity or header.stored_length != where.length - HEADER_BYTES:
                raise CorruptChunk("the object at this place is not the one in the index")
        except CorruptChunk as error:
            raise CorruptChunk(f"a chunk in pack {where.pack} is damaged: run `{self.verify_command}`") from error
        finally:
            os.close(descriptor)
        return header, view

    def _open_pack(self, identity: bytes) -> tuple[Location, int]:
        where = self.index.find(identity)
        while where is not None:
            try:
                return where, os.open(self.packs / f"{where.pack}.pack", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                before, where = where, self.index.find(identity)  # the collector may have rewritten its pack
                if where == before:
                    raise MissingChunks("a pack is missing in this store", [identity]) from error
        raise MissingChunks("a chunk is not in this store", [identity])


class ObjectStore(ObjectReader):
    """Thread-safe; all methods block. `quota_bytes` limits all packs, `foreign_quota_bytes` those of other users' jobs."""

    index: Index

    def __init__(self, root: Path, *, quota_bytes: int | None, foreign_quota_bytes: int | None) -> None:
        keep_freed_memory()
        self.root = root
        self.quota_bytes, self.foreign_quota_bytes = quota_bytes, foreign_quota_bytes
        packs, self.tmp, self.quarantine = root / "packs", root / "tmp", root / "quarantine"
        self.lock, self.keeping, self.mending = threading.Lock(), threading.Lock(), threading.Lock()
        self.incoming = set[PackWriter]()  # packs that are being written
        self._rooms: dict[bool, tuple[int, int | None]] = {}  # of the quotas, after so many packs were published
        self.published = 0  # packs, since this was opened
        with self.disk_errors():
            for directory in (packs, self.tmp, self.quarantine):
                directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.tmp.iterdir():
                leftover.unlink()
            super().__init__(packs, Index(root / "index.sqlite", packs))
            for path in self.index.damaged:
                self.salvage(path)

    def close(self) -> None:
        self.index.close()

    # --- exchange with peers

    def missing(self, ids: Sequence[bytes], not_delta: Collection[bytes] = ()) -> list[bytes]:
        """Return which of these chunks are missing here, or are stored as deltas although in `not_delta`.

        The others are held for a while (see `hold`), so that the peer need not send them.
        """
        held: set[str] = set()
        missing = []
        for identity in dict.fromkeys(ids):
            where = self.hold(identity, held)
            if where is None or (where.base is not None and identity in not_delta):
                missing.append(identity)
        return missing

    def with_bases(self, ids: Sequence[bytes]) -> tuple[list[bytes], set[bytes]]:
        """Return these chunks and their bases here, each base before its deltas; and the set of the bases."""
        return self.index.with_bases(ids)

    def stream_size(self, ids: Sequence[bytes]) -> int:
        """Return the bytes of `stream(ids)`."""
        places = map(self.index.find, ids)
        return sum(where.length for where in places if where is not None)

    def stream(self, ids: Sequence[bytes]) -> Iterator[memoryview]:
        """Return the objects of these chunks, to send to a peer; MissingChunks before the first one if any is missing."""
        missing = [identity for identity in ids if self.index.find(identity) is None]
        if missing:
            raise MissingChunks(f"{len(missing)} of the requested chunks are not in this store", missing)
        return self._stream(ids)

    def _stream(self, ids: Sequence[bytes]) -> Iterator[memoryview]:
        for identity in ids:
            header, data = self.object(identity)
            check_stored(header, data[HEADER_BYTES:])
            yield data

    # --- upkeep

    def hold(self, identity: bytes, held: set[str]) -> Location | None:
        """Return where a chunk is if it can be read here, and keep its pack and its base's from being collected for a while.

        `held` remembers the packs already held over several calls.
        """
        with self.lock:
            places = self.index.places(identity)
            for pack in {place.pack for place in places} - held:
                try:
                    os.utime(self.packs / f"{pack}.pack")
                except FileNotFoundError:
                    return None
                held.add(pack)
            return places[0] if places else None

    def is_intact(self, header: ObjectHeader, stored: Bytes) -> bool:
        """Tell whether an object decodes to the bytes of its id.

        Of an encrypted one, and of a delta whose base cannot be read here, only the stored bytes can be verified.
        """
        try:
            check_stored(header, stored)
            if header.encrypted:
                return True
            base = None
            if header.base is not None:
                try:
                    base = self.chunk(header.base)
                except StoreError:
                    return True
            open_chunk(header, stored, base)
        except CorruptChunk:
            return False
        return True

    def salvage(self, path: Path) -> None:
        """Copy the intact objects of a damaged pack to a new one, and move the damaged one to `quarantine`."""
        with self.mending, contextlib.suppress(FileNotFoundError):  # collected meanwhile, or salvaged by another call
            writer = PackWriter(self.tmp, self.packs, is_foreign(path))
            try:
                self._copy_intact(path, writer)
                writer.sync()
                with self.lock:
                    path.stat()
                    writer.publish()
                    path.rename(self.quarantine / path.name)
                    self.index.drop_pack(path.stem)
                    if writer.locations:
                        self.index.add(writer.name, writer.locations, writer.foreign)
            finally:
                writer.abort()

    def _copy_intact(self, path: Path, writer: PackWriter) -> None:
        """Copy intact objects. Behind a damaged header, search for the next one, which may be bytes of a chunk.

        So from there on only intact objects tell where the next begins, and false ones are bounded.
        """
        with path.open("rb") as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            offset: int | None = PACK_HEADER_BYTES
            lost, false = False, 0
            while offset is not None and offset < size and false < FALSE_HEADERS:
                with contextlib.suppress(CorruptChunk):
                    header = decode_header(read_pack(descriptor, HEADER_BYTES, offset))
                    intact = self._copy_object(descriptor, header, offset, writer)
                    if intact or not lost:
                        offset += HEADER_BYTES + header.stored_length
                        continue
                    false += 1
                offset, lost = next_magic(descriptor, offset + 1), True

    def _copy_object(self, descriptor: int, header: ObjectHeader, offset: int, writer: PackWriter) -> bool:
        """Copy an object if it is intact; tell whether it is."""
        with contextlib.suppress(CorruptChunk):
            stored = read_stored(descriptor, header, offset)
            if self.is_intact(header, stored):
                writer.add(header, stored)
                return True
        return False

    def publish_pack(self, writer: PackWriter) -> None:
        try:
            writer.publish()
            if writer.locations:
                self.index.add(writer.name, writer.locations, writer.foreign)
                self.published += 1
        except BaseException:
            writer.withdraw()  # else each try again would leave another pack
            raise

    # --- quotas and errors

    def check_room(self) -> None:
        """Raise DiskFull if little of the disk is free: what else is on it, such as the journal, needs that."""
        disk = os.statvfs(self.root)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        least = min(LEAST_FREE, total // LEAST_SHARE)
        if free < least:
            raise DiskFull(f"{self._full}; its last {least >> 20} MiB stay free for what else is on it")

    @property
    def _full(self) -> str:
        return f"the disk of {self.root} is full: free some space; earlier checkpoints are safe"

    def check_incoming(self, foreign: bool) -> None:
        """Raise QuotaExceeded or DiskFull if what is being written at the same time exceeds a quota or the disk."""
        self.check_room()
        incoming = sum(pack.bytes_written for pack in tuple(self.incoming) if pack.foreign or not foreign)
        published, room = self._rooms.get(foreign, (-1, None))
        if published != self.published or (room is not None and incoming > room):
            room = self.remaining_quota(foreign)  # summing up all packs takes milliseconds
            self._rooms[foreign] = self.published, room
        if room is not None and incoming > room:
            self.check_quota(incoming, foreign)

    def stored_bytes(self) -> int:
        return self.index.pack_bytes(foreign=False)

    def foreign_bytes(self) -> int:
        """Return the bytes of packs that belong to other users' jobs."""
        return self.index.pack_bytes(foreign=True)

    def remaining_quota(self, foreign: bool = True) -> int | None:
        """Return the bytes that may still be stored here, by peers for other users if `foreign`; None if there is no quota."""
        limits = [] if self.quota_bytes is None else [self.quota_bytes - self.stored_bytes()]
        if foreign and self.foreign_quota_bytes is not None:
            limits.append(self.foreign_quota_bytes - self.foreign_bytes())
        return max(0, min(limits)) if limits else None

    def check_quota(self, more: int, foreign: bool = False) -> None:
        """Raise QuotaExceeded if `more` bytes would exceed a quota."""
        limit = self.foreign_quota_bytes if foreign else None
        if limit is not None and self.foreign_bytes() + more > limit:
            raise QuotaExceeded(
                f"this node's {limit / 2**30:.1f} GiB for other users' jobs (foreign_quota_gib) are full: raise the limit"
            )
        if self.quota_bytes is not None and self.stored_bytes() + more > self.quota_bytes:
            raise QuotaExceeded(
                f"the store's {self.quota_bytes / 2**30:.1f} GiB (store_quota_gib) are full and nothing was saved: raise "
                "the limit or delete checkpoints"
            )

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn a full or read-only disk into DiskFull or ReadOnlyStore."""
        try:
            yield
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise DiskFull(self._full) from error
            if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
                raise ReadOnlyStore(f"cannot write in {error.filename or self.root}: {error.strerror}") from error
            raise


def read_stored(descriptor: int, header: ObjectHeader, offset: int) -> memoryview:
    """Read the stored bytes of the object at `offset` of a pack. CorruptChunk if the disk cannot give them."""
    return read_pack(descriptor, header.stored_length, offset + HEADER_BYTES)
