"""Packs: files of self-describing objects, and the stream of objects that peers exchange (docs/ckptstore-format.md).

A reader trusts nothing: lengths are bounded before anything is allocated, headers carry their own check, and the payload's
hash is compared with its id.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from ckptstore.errors import CorruptChunk
from ckptstore.failpoints import failpoint

CHUNK_BYTES = 4 * 1024 * 1024  # smaller chunks bought nothing on real checkpoints (own measurement)
PACK_MAGIC = b"MESHPACK\x00\x01" + b"\0" * 6
OBJECT_MAGIC = b"MOBJ"
HEADER_BYTES = 56
RAW = 0
MAX_STORED = CHUNK_BYTES + 64 * 1024


class ObjectHeader(msgspec.Struct, frozen=True):
    id: bytes
    codec: int
    raw_length: int
    stored_length: int


class Location(msgspec.Struct, frozen=True):
    """Where an object's payload lies."""

    pack: str
    offset: int
    length: int


def chunk_id(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


def encode_header(identity: bytes, length: int) -> bytes:
    head = OBJECT_MAGIC + bytes([RAW, 0, 0, 0]) + length.to_bytes(4, "big") * 2 + identity
    return head + blake3(head).digest(8)


def decode_header(data: bytes) -> ObjectHeader:
    """The header of an object; CorruptChunk if any bit of it is wrong."""
    head, check = data[:48], data[48:HEADER_BYTES]
    if len(data) < HEADER_BYTES or head[:4] != OBJECT_MAGIC or blake3(head).digest(8) != check:
        raise CorruptChunk("not an object header")
    codec = head[4]
    raw_length, stored_length = int.from_bytes(head[8:12], "big"), int.from_bytes(head[12:16], "big")
    if codec != RAW or head[5:8] != b"\0\0\0":
        raise CorruptChunk(f"codec {codec} is not one this version knows")
    if raw_length > CHUNK_BYTES or stored_length > MAX_STORED or raw_length != stored_length:
        raise CorruptChunk("an object's lengths are impossible")
    return ObjectHeader(id=head[16:48], codec=codec, raw_length=raw_length, stored_length=stored_length)


class PackWriter:
    """Writes one pack in `tmp`, and publishes it whole."""

    def __init__(self, tmp: Path, packs: Path) -> None:
        self.name = os.urandom(16).hex()
        self._temporary = tmp / f"{self.name}.pack"
        self._final = packs / f"{self.name}.pack"
        self._file = self._temporary.open("xb", buffering=0)
        self._write(PACK_MAGIC)
        self._offset = len(PACK_MAGIC)
        self.locations: dict[bytes, Location] = {}
        self.bytes_written = 0

    def add(self, identity: bytes, data: bytes | memoryview) -> None:
        """Append a chunk, once."""
        if identity in self.locations:
            return
        failpoint("pack-write")
        self._write(encode_header(identity, len(data)))
        self._write(data)
        self.locations[identity] = Location(self.name, self._offset + HEADER_BYTES, len(data))
        self._offset += HEADER_BYTES + len(data)
        self.bytes_written += len(data)

    def publish(self) -> None:
        """Make the pack durable and visible; without objects there is nothing to publish."""
        if not self.locations:
            self.abort()
            return
        failpoint("pack-before-fsync")
        os.fsync(self._file.fileno())
        self._file.close()
        failpoint("pack-before-rename")
        self._temporary.rename(self._final)
        failpoint("pack-after-rename")
        sync_directory(self._final.parent)

    def abort(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def scan_pack(path: Path) -> Iterator[tuple[ObjectHeader, int]]:
    """Each object's header and payload offset, as far as they can be told; CorruptChunk where they cannot.

    Payloads are not read: that is `verify`'s work.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(PACK_MAGIC)) != PACK_MAGIC:
            raise CorruptChunk(f"{path.name} is not a pack of version 1")
        offset = len(PACK_MAGIC)
        while offset < size:
            header = decode_header(file.read(HEADER_BYTES))
            if offset + HEADER_BYTES + header.stored_length > size:
                raise CorruptChunk(f"{path.name} is cut off at {size}")
            yield header, offset + HEADER_BYTES
            offset += HEADER_BYTES + header.stored_length
            file.seek(offset)


class ObjectStream:
    """Takes a stream of objects in pieces of any size; gives (id, payload) of each whole and correct one."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: ObjectHeader | None = None

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """CorruptChunk at the first object that is not what it says; the stream is of no more use then."""
        self._buffer += data
        while True:
            if self._header is None:
                if len(self._buffer) < HEADER_BYTES:
                    return
                self._header = decode_header(bytes(self._buffer[:HEADER_BYTES]))
                del self._buffer[:HEADER_BYTES]
            if len(self._buffer) < self._header.stored_length:
                return
            payload = bytes(self._buffer[: self._header.stored_length])
            del self._buffer[: self._header.stored_length]
            identity, self._header = self._header.id, None
            if chunk_id(payload) != identity:
                raise CorruptChunk("a chunk does not have the bytes its id says")
            yield identity, payload

    @property
    def clean(self) -> bool:
        """Whether the stream stands between two objects."""
        return self._header is None and not self._buffer


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
