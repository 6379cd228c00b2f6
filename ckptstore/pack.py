"""Packs: files of self-describing objects, and the stream of objects that peers exchange (docs/ckptstore-format.md).

A reader trusts nothing: lengths are bounded before anything is allocated, headers carry their own check, stored bytes theirs, and
whoever decodes a chunk compares its hash with its id. Sealed chunks can be checked without their key (`vault`).
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from ckptstore.coding import PLANES, RAW, WIDTHS, ZSTD, Bytes
from ckptstore.errors import CorruptChunk, Locked
from ckptstore.failpoints import failpoint
from ckptstore.layout import CHUNK_BYTES
from ckptstore.vault import SEALED_BYTES, Name, Vault, check_sealed

PACK_MAGIC = b"MESHPACK\x00\x02"
PACK_HEADER_BYTES = 16
OBJECT_MAGIC = b"MOBJ"
ID_BYTES = 32
HEADER_BYTES = 104
STORED_CHECK_BYTES = 16
MAX_STORED = CHUNK_BYTES + 64 * 1024
NO_BASE = bytes(ID_BYTES)


class ObjectHeader(msgspec.Struct, frozen=True):
    """`base` is the chunk whose XOR with this one is stored; `stored_check` begins the hash of the stored bytes, or of those that
    are signed if they are `sealed`."""

    id: bytes
    codec: int
    width: int
    raw_length: int
    stored_length: int
    base: bytes | None
    stored_check: bytes
    sealed: bool = False

    @property
    def plain(self) -> bool:
        """Whether the chunk itself is stored."""
        return self.codec == RAW and self.base is None and not self.sealed

    @property
    def meaning(self) -> bytes:
        """What a sealed chunk's signature covers besides its bytes."""
        return _meaning(self.id, self.codec, self.width, self.raw_length, self.base)


class Location(msgspec.Struct, frozen=True):
    """Where an object lies, header and all, and what it needs to be read."""

    pack: str
    offset: int
    length: int
    base: bytes | None = None


def chunk_name(data: Bytes, vault: Vault | None = None) -> Name:
    return Name(blake3(data).digest()) if vault is None else vault.name(data)


def wrap(
    name: Name,
    encoded: Bytes,
    raw_length: int,
    codec: int,
    width: int,
    base: bytes | None,
    vault: Vault | None = None,
) -> tuple[ObjectHeader, Bytes]:
    """A chunk that is encoded like this as an object: its header and the bytes to store."""
    stored, plain = encoded, codec == RAW and base is None
    if vault is not None:
        stored, digest = vault.seal(name, _meaning(name.id, codec, width, raw_length, base), encoded)
    else:
        digest = name.id if plain else blake3(stored).digest()
    check = digest[:STORED_CHECK_BYTES]
    return ObjectHeader(name.id, codec, width, raw_length, len(stored), base, check, vault is not None), stored


def _meaning(identity: bytes, codec: int, width: int, raw_length: int, base: bytes | None) -> bytes:
    return bytes([codec, width]) + raw_length.to_bytes(4, "big") + identity + (base or NO_BASE)


def encode_header(header: ObjectHeader) -> bytes:
    head = b"".join(
        [
            OBJECT_MAGIC,
            bytes([header.codec, header.width, header.sealed, 0]),
            header.raw_length.to_bytes(4, "big"),
            header.stored_length.to_bytes(4, "big"),
            header.id,
            header.base or NO_BASE,
            header.stored_check,
        ]
    )
    return head + blake3(head).digest(8)


def decode_header(data: Bytes) -> ObjectHeader:
    """The header of an object; CorruptChunk if any bit of it is wrong."""
    head, check = bytes(data[:96]), bytes(data[96:HEADER_BYTES])
    if len(data) < HEADER_BYTES or head[:4] != OBJECT_MAGIC or blake3(head).digest(8) != check:
        raise CorruptChunk("not an object header")
    codec, width = head[4], head[5]
    raw_length, stored_length = int.from_bytes(head[8:12], "big"), int.from_bytes(head[12:16], "big")
    fits = width in WIDTHS if codec == PLANES else codec in {RAW, ZSTD} and width == 0
    if not fits or head[6] > 1 or head[7]:
        raise CorruptChunk(f"codec {codec} of width {width} is not one this version knows")
    more = SEALED_BYTES if head[6] else 0
    longer = stored_length - more if codec == RAW else raw_length
    if raw_length > CHUNK_BYTES or not more <= stored_length <= MAX_STORED or longer != raw_length:
        raise CorruptChunk("an object's lengths are impossible")
    base = head[48:80] if head[48:80] != NO_BASE else None
    header = ObjectHeader(head[16:48], codec, width, raw_length, stored_length, base, head[80:96], bool(head[6]))
    if header.plain and header.stored_check != header.id[:STORED_CHECK_BYTES]:
        raise CorruptChunk("an object's check does not fit its id")
    return header


def check_stored(header: ObjectHeader, stored: Bytes) -> None:
    """CorruptChunk unless these are the bytes that were stored. Says nothing of what they decode to, if they are not sealed."""
    if len(stored) != header.stored_length:
        raise CorruptChunk("an object's stored bytes are damaged")
    digest = check_sealed(header.id, header.meaning, stored) if header.sealed else blake3(stored).digest()
    if digest[:STORED_CHECK_BYTES] != header.stored_check:
        raise CorruptChunk("an object's stored bytes are damaged")


def open_chunk(header: ObjectHeader, stored: Bytes, base: Bytes | None, vault: Vault | None = None) -> Bytes:
    """The chunk, verified against its id; Locked if it is sealed and the key is not this one."""
    from ckptstore.codec import decode

    if (base is None) != (header.base is None):
        raise CorruptChunk("a delta without its base")
    if header.sealed:
        if vault is None:
            raise Locked("a chunk is sealed, and its key is not here")
        stored = vault.open(header.meaning, stored)
    data = decode(stored, header.codec, header.width, header.raw_length, base)
    if chunk_name(data, vault if header.sealed else None).id != header.id:
        raise CorruptChunk("a chunk does not have the bytes its id says")
    return data


class PackWriter:
    """Writes one pack in `tmp`, and publishes it whole. `add` may be called by several threads at once. `foreign`: its chunks
    are of jobs of other users than the node's own."""

    def __init__(self, tmp: Path, packs: Path, foreign: bool = False) -> None:
        self.name = os.urandom(16).hex()
        self.foreign = foreign
        self._temporary = tmp / f"{self.name}.pack"
        self._final = packs / f"{self.name}.pack"
        self._lock = threading.Lock()
        self._file = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._open = True
        write_at(self._file, PACK_MAGIC + _kind(foreign), 0)
        self._end = PACK_HEADER_BYTES
        self.locations: dict[bytes, Location] = {}
        self.raw_bytes = 0  # of its chunks, before they were encoded

    @property
    def bytes_written(self) -> int:
        """Of objects, with their headers."""
        return self._end - PACK_HEADER_BYTES

    def add(self, header: ObjectHeader, stored: Bytes) -> bool:
        """Write an object, once; whether it is new. All calls must have returned before `publish`."""
        failpoint("pack-write")
        length = HEADER_BYTES + len(stored)
        with self._lock:
            if header.id in self.locations:
                return False
            offset = self._end
            self.locations[header.id] = Location(self.name, offset, length, header.base)
            self._end += length
            self.raw_bytes += header.raw_length
        write_at(self._file, encode_header(header), offset)
        write_at(self._file, stored, offset + HEADER_BYTES)
        return True

    def read(self, identity: bytes) -> tuple[ObjectHeader, bytearray]:
        """An object that was added."""
        where = self.locations[identity]
        header = decode_header(os.pread(self._file, HEADER_BYTES, where.offset))
        stored = bytearray(header.stored_length)
        read_at(self._file, stored, where.offset + HEADER_BYTES)
        return header, stored

    def publish(self) -> None:
        """Make the pack durable and visible; without objects there is nothing to publish."""
        if not self.locations:
            self.abort()
            return
        failpoint("pack-before-fsync")
        os.fsync(self._file)
        self._close()
        failpoint("pack-before-rename")
        self._temporary.rename(self._final)
        failpoint("pack-after-rename")
        sync_directory(self._final.parent)

    def abort(self) -> None:
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)


def scan_pack(path: Path) -> Iterator[tuple[ObjectHeader, int]]:
    """Each object's header and where it begins, as far as they can be told; CorruptChunk where they cannot.

    Payloads are not read: that is `verify`'s work.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(PACK_HEADER_BYTES) not in {PACK_MAGIC + _kind(False), PACK_MAGIC + _kind(True)}:
            raise CorruptChunk(f"{path.name} is not a pack of version 2")
        offset = PACK_HEADER_BYTES
        while offset < size:
            header = decode_header(file.read(HEADER_BYTES))
            if offset + HEADER_BYTES + header.stored_length > size:
                raise CorruptChunk(f"{path.name} is cut off at {size}")
            yield header, offset
            offset += HEADER_BYTES + header.stored_length
            file.seek(offset)


def is_foreign(path: Path) -> bool:
    """Whether a pack is marked so; False if that cannot be told."""
    with path.open("rb") as file:
        return file.read(PACK_HEADER_BYTES)[len(PACK_MAGIC) :] == _kind(True)


def _kind(foreign: bool) -> bytes:
    return bytes([foreign]) + bytes(5)


class ObjectStream:
    """Takes a stream of objects in pieces of any size; gives the header and the stored bytes of each that is whole.

    Stored bytes are checked here unless they are the chunk itself: those whoever takes them compares with their id."""

    def __init__(self) -> None:
        self._header: ObjectHeader | None = None
        self._buffer = bytearray(HEADER_BYTES)
        self._filled = 0

    def feed(self, data: Bytes) -> Iterator[tuple[ObjectHeader, bytearray]]:
        """CorruptChunk at the first object that is damaged; the stream is of no more use then."""
        view = memoryview(data)
        while view or self._filled == len(self._buffer):
            take = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + take] = view[:take]
            self._filled, view = self._filled + take, view[take:]
            if self._filled < len(self._buffer):
                return
            whole, self._filled = self._buffer, 0
            if self._header is None:
                self._header = decode_header(whole)
                self._buffer = bytearray(self._header.stored_length)
            else:
                header, self._header = self._header, None
                self._buffer = bytearray(HEADER_BYTES)
                if not header.plain:  # its id is the hash of these very bytes, and whoever takes it compares them
                    check_stored(header, whole)
                yield header, whole

    @property
    def clean(self) -> bool:
        """Whether the stream stands between two objects."""
        return self._header is None and not self._filled


def read_at(descriptor: int, buffer: bytearray | memoryview, offset: int) -> int:
    """Fill the buffer from there on, as far as the file goes; how many bytes there were."""
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def write_at(descriptor: int, data: Bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
