"""The bytes of a checkpoint's chunks: pack files of self-describing objects, and the stream of objects between peers.

docs/reference/ckptstore-format.md shows every byte; `manifest.py` has the list of files that the chunks belong to.

A reader trusts nothing: it bounds lengths before it allocates, headers and stored bytes carry checksums, and a decoded chunk is
compared with its id. Encrypted chunks can be verified without their key (`cipher`).
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from ckptstore.buffers import allocate
from ckptstore.chunker import CHUNK_BYTES
from ckptstore.cipher import ENCRYPTION_BYTES, REALM_BYTES, Name, StateCipher, check_encrypted
from ckptstore.encoding import PLANES, RAW, WIDTHS, ZSTD, Bytes
from ckptstore.errors import CorruptChunk, MissingKey

PACK_MAGIC = b"MESHPACK\x00\x02"
PACK_HEADER_BYTES = 16
BLOCK_BYTES = 4096  # the least that a file counts for: a block and an inode of most file systems
OBJECT_MAGIC = b"MOBJ"
ID_BYTES = 32
HEADER_BYTES = 104
STORED_CHECK_BYTES = 16
MAX_STORED = CHUNK_BYTES + 64 * 1024
NO_BASE = bytes(ID_BYTES)
UNREADABLE = {errno.EIO, errno.EUCLEAN, errno.EBADMSG}  # a bad sector, and sums of file systems that do not match
SEARCHED_BYTES = 1 << 20  # read at once to find a magic (own choice)


class ObjectHeader(msgspec.Struct, frozen=True):
    """`base`: the chunk to which this one is a delta. `stored_check`: the first bytes of the hash of the stored bytes, or of what
    the realm signed if the chunk is `encrypted`."""

    id: bytes
    codec: int
    width: int
    raw_length: int
    stored_length: int
    base: bytes | None
    stored_check: bytes
    encrypted: bool = False

    @property
    def plain(self) -> bool:
        """True if the stored bytes are the chunk itself."""
        return self.codec == RAW and self.base is None and not self.encrypted

    @property
    def meaning(self) -> bytes:
        """The header fields that the signature of an encrypted chunk covers."""
        return _meaning(self.id, self.codec, self.width, self.raw_length, self.base)


class Location(msgspec.Struct, frozen=True):
    """Place of an object, header included, and the base that it needs."""

    pack: str
    offset: int
    length: int
    base: bytes | None = None


def blocks(size: int) -> int:
    """Return what a file of this size takes of a disk."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def chunk_name(data: Bytes, cipher: StateCipher | None = None) -> Name:
    return Name(blake3(data).digest()) if cipher is None else cipher.name(data)


def wrap(
    name: Name,
    encoded: Bytes,
    raw_length: int,
    codec: int,
    width: int,
    base: bytes | None,
    cipher: StateCipher | None = None,
) -> tuple[ObjectHeader, Bytes]:
    """Return the header and the stored bytes of an encoded chunk."""
    stored, plain = encoded, codec == RAW and base is None
    if cipher is not None:
        stored, digest = cipher.encrypt_chunk(name, _meaning(name.id, codec, width, raw_length, base), encoded)
    else:
        digest = name.id if plain else blake3(stored).digest()
    check = digest[:STORED_CHECK_BYTES]
    return ObjectHeader(name.id, codec, width, raw_length, len(stored), base, check, cipher is not None), stored


def _meaning(identity: bytes, codec: int, width: int, raw_length: int, base: bytes | None) -> bytes:
    return bytes([codec, width]) + raw_length.to_bytes(4, "big") + identity + (base or NO_BASE)


def encode_header(header: ObjectHeader) -> bytes:
    head = b"".join(
        [
            OBJECT_MAGIC,
            bytes([header.codec, header.width, header.encrypted, 0]),
            header.raw_length.to_bytes(4, "big"),
            header.stored_length.to_bytes(4, "big"),
            header.id,
            header.base or NO_BASE,
            header.stored_check,
        ]
    )
    return head + blake3(head).digest(8)


def decode_header(data: Bytes) -> ObjectHeader:
    """Decode an object header; CorruptChunk if any bit of it is wrong."""
    head, check = bytes(data[:96]), bytes(data[96:HEADER_BYTES])
    if len(data) < HEADER_BYTES or head[:4] != OBJECT_MAGIC or blake3(head).digest(8) != check:
        raise CorruptChunk("not an object header")
    codec, width = head[4], head[5]
    raw_length, stored_length = int.from_bytes(head[8:12], "big"), int.from_bytes(head[12:16], "big")
    fits = width in WIDTHS if codec == PLANES else codec in {RAW, ZSTD} and width == 0
    if not fits or head[6] > 1 or head[7]:
        raise CorruptChunk(f"codec {codec} of width {width} is unknown to this version")
    overhead = ENCRYPTION_BYTES if head[6] else 0
    encoded_length = stored_length - overhead if codec == RAW else raw_length
    if raw_length > CHUNK_BYTES or not overhead <= stored_length <= MAX_STORED or encoded_length != raw_length:
        raise CorruptChunk("the lengths of an object are invalid")
    base = head[48:80] if head[48:80] != NO_BASE else None
    header = ObjectHeader(head[16:48], codec, width, raw_length, stored_length, base, head[80:96], bool(head[6]))
    if header.plain and header.stored_check != header.id[:STORED_CHECK_BYTES]:
        raise CorruptChunk("the checksum of an object does not match its id")
    return header


def check_stored(header: ObjectHeader, stored: Bytes) -> None:
    """Raise CorruptChunk unless these are the bytes that were stored.

    This proves that they decode to the right chunk only if they are encrypted.
    """
    if len(stored) != header.stored_length:
        raise CorruptChunk("an object's stored bytes are damaged")
    digest = check_encrypted(header.id, header.meaning, stored) if header.encrypted else blake3(stored).digest()
    if digest[:STORED_CHECK_BYTES] != header.stored_check:
        raise CorruptChunk("an object's stored bytes are damaged")


def open_chunk(header: ObjectHeader, stored: Bytes, base: Bytes | None, cipher: StateCipher | None = None) -> Bytes:
    """Decode a chunk and verify it against its id. CorruptChunk, or MissingKey if it is encrypted with another key.

    With a key, a chunk that is not encrypted is refused like one with another key.
    """
    from ckptstore.codec import decode

    if (base is None) != (header.base is None):
        raise CorruptChunk("a delta without its base")
    if header.encrypted and cipher is None:
        raise MissingKey("a chunk is encrypted, and this node does not have the key")
    if cipher is not None:
        stored = cipher.decrypt_chunk(header.meaning, stored)
    data = decode(stored, header.codec, header.width, header.raw_length, base)
    if chunk_name(data, cipher).id != header.id:
        raise CorruptChunk("a chunk does not match its id")
    return data


def realm_of(header: ObjectHeader, stored: Bytes) -> bytes:
    """Return what names the key of a chunk; empty if it is not encrypted."""
    return bytes(memoryview(stored)[:REALM_BYTES]) if header.encrypted else b""


StoredObject = tuple[ObjectHeader, memoryview]  # with its stored bytes


class PackWriter:
    """Writes a pack in `tmp`, then publishes it as a whole. `add` may be called from several threads.

    `foreign`: its chunks belong to jobs of other users than the node's own. `grown` is called before each object is written, with
    the object counted, and may refuse it; then the pack can only be aborted. The file is made with the first object, so a
    writer without objects owns nothing.
    """

    def __init__(self, tmp: Path, packs: Path, foreign: bool = False, grown: Callable[[], None] = lambda: None) -> None:
        self.name = os.urandom(16).hex()
        self.foreign, self._grown = foreign, grown
        self._temporary = tmp / f"{self.name}.pack"
        self._final = packs / f"{self.name}.pack"
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = PACK_HEADER_BYTES
        self.locations: dict[bytes, Location] = {}
        self.raw_bytes = 0  # size of the chunks before encoding

    @property
    def bytes_written(self) -> int:
        """Bytes of all objects, headers included."""
        return self._end - PACK_HEADER_BYTES

    def add(self, header: ObjectHeader, stored: Bytes) -> bool:
        """Write an object; False if it is in this pack already. All calls must have returned before `publish`."""
        length = HEADER_BYTES + len(stored)
        with self._lock:
            if header.id in self.locations:
                return False
            offset = self._end
            self.locations[header.id] = Location(self.name, offset, length, header.base)
            self._end += length
            self.raw_bytes += header.raw_length
        self._grown()
        with self._lock:
            file = self._file = self._begun() if self._file is None else self._file
        write_at(file, encode_header(header), offset)
        write_at(file, stored, offset + HEADER_BYTES)
        return True

    def _begun(self) -> int:
        file = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            write_at(file, PACK_MAGIC + _kind(self.foreign), 0)
        except BaseException:
            os.close(file)
            self._temporary.unlink()
            raise
        return file

    def read(self, identity: bytes) -> tuple[ObjectHeader, bytearray]:
        """Read back an object that was added."""
        where, file = self.locations[identity], self._file
        assert file is not None
        header = decode_header(os.pread(file, HEADER_BYTES, where.offset))
        stored = bytearray(header.stored_length)
        read_at(file, stored, where.offset + HEADER_BYTES)
        return header, stored

    def sync(self) -> None:
        """Make the objects durable, so that `publish` takes no longer than a rename."""
        if self._file is not None:
            os.fsync(self._file)

    def publish(self) -> None:
        """Make the pack durable and visible; an empty one is removed."""
        if not self.locations:
            self.abort()
            return
        self.sync()
        self._close()
        self._temporary.rename(self._final)
        sync_directory(self._final.parent)

    def abort(self) -> None:
        self._close()
        self._temporary.unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the pack, even if it is published: no index knows it."""
        self.abort()
        self._final.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def scan_pack(path: Path) -> Iterator[tuple[ObjectHeader, int]]:
    """Yield each object's header and offset; CorruptChunk at the first invalid header.

    Stored bytes are not read; `verify` does that.
    """
    with path.open("rb") as file:
        size, descriptor = os.fstat(file.fileno()).st_size, file.fileno()
        if bytes(read_pack(descriptor, PACK_HEADER_BYTES, 0)) not in {
            PACK_MAGIC + _kind(False),
            PACK_MAGIC + _kind(True),
        }:
            raise CorruptChunk(f"{path.name} is not a pack of version 2")
        offset = PACK_HEADER_BYTES
        while offset < size:
            header = decode_header(read_pack(descriptor, HEADER_BYTES, offset))
            if offset + HEADER_BYTES + header.stored_length > size:
                raise CorruptChunk(f"{path.name} is cut off at {size}")
            yield header, offset
            offset += HEADER_BYTES + header.stored_length


def next_magic(descriptor: int, offset: int) -> int | None:
    """Return where the next object of a pack may begin, over parts that the disk cannot read; None at its end."""
    size, skipped = os.fstat(descriptor).st_size, 4096
    while offset < size:
        try:
            part = read_pack(descriptor, SEARCHED_BYTES, offset)
        except CorruptChunk:
            offset, skipped = offset + skipped, 2 * skipped  # a disk tries each bad sector for seconds
            continue
        found = bytes(part).find(OBJECT_MAGIC)
        if found >= 0:
            return offset + found
        offset += max(1, len(part) - len(OBJECT_MAGIC) + 1)
    return None


def is_foreign(path: Path) -> bool:
    """Return True if the pack is marked as foreign."""
    with path.open("rb") as file, contextlib.suppress(CorruptChunk):
        return bytes(read_pack(file.fileno(), PACK_HEADER_BYTES, 0)[len(PACK_MAGIC) :]) == _kind(True)
    return False


def _kind(foreign: bool) -> bytes:
    return bytes([foreign]) + bytes(5)


class ObjectStream:
    """Parses a stream of objects that arrives in pieces of any size. Headers are verified, stored bytes are not."""

    def __init__(self) -> None:
        self._header: ObjectHeader | None = None
        self._buffer = allocate(HEADER_BYTES)
        self._filled = 0

    def feed(self, data: Bytes) -> Iterator[StoredObject]:
        """Yield each completed object. CorruptChunk at a damaged header, which ends the stream."""
        view = memoryview(data)
        while view:
            space = self.space()
            taken = min(len(view), len(space))
            space[:taken], view = view[:taken], view[taken:]
            found = self.advance(taken)
            if found is not None:
                yield found

    def space(self) -> memoryview:
        """Return the memory for the next bytes, which `advance` counts."""
        return self._buffer[self._filled :]

    def advance(self, count: int) -> StoredObject | None:
        """Take the bytes that were written to `space`; return the object that they complete. CorruptChunk as `feed`."""
        self._filled += count
        if self._filled < len(self._buffer):
            return None
        whole, self._filled = self._buffer, 0
        if self._header is None:
            self._header = decode_header(whole)
            whole = self._buffer = allocate(self._header.stored_length)
            if whole:
                return None
        header, self._header = self._header, None
        self._buffer = allocate(HEADER_BYTES)
        return header, whole

    @property
    def clean(self) -> bool:
        """True between two objects."""
        return self._header is None and not self._filled


def next_data(descriptor: int, offset: int, size: int) -> int:
    """Return where the next bytes are that are no hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        return offset  # the file system knows no holes


def read_at(descriptor: int, buffer: bytearray | memoryview, offset: int) -> int:
    """Fill the buffer from `offset`, up to the end of the file; return the number of bytes read."""
    filled = os.preadv(descriptor, [buffer], offset)
    while 0 < filled < len(buffer):
        count = os.preadv(descriptor, [memoryview(buffer)[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def read_pack(descriptor: int, length: int, offset: int) -> memoryview:
    """Read these bytes of a pack, fewer at its end. CorruptChunk if the disk cannot give them."""
    view = allocate(length)
    try:
        return view[: read_at(descriptor, view, offset)]
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise CorruptChunk(f"the disk cannot read a part of a pack ({error.strerror})") from error


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
