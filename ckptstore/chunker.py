"""Chunker: splits a checkpoint file at its tensors.

An unchanged tensor gives the same chunks wherever it has moved in the file, and a changed one can be stored as a delta to its
earlier version. Tensors are found in the file's own directory, without torch: safetensors (8 bytes of length, then JSON) and the
zip files that `torch.save` writes (entries are stored, not compressed). Other files, and invalid ones, are split every 4 MiB.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
from blake3 import blake3

from membership.malformed import MALFORMED

CHUNK_BYTES = 4 * 1024 * 1024  # measured: smaller chunks save nothing on real checkpoints
OWN_CHUNK_BYTES = 256 * 1024  # smaller tensors share chunks (own choice)
LABEL_BYTES = 8
MAX_DIRECTORY_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 100_000

DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ZIP_END, ZIP_END_BYTES, ZIP_COMMENT_BYTES = b"PK\5\6", 22, 65_535
ZIP64_LOCATOR, ZIP64_LOCATOR_BYTES, ZIP64_END, ZIP64_END_BYTES = b"PK\6\7", 20, b"PK\6\6", 56
ZIP_ENTRY, ZIP_ENTRY_BYTES, ZIP_LOCAL, ZIP_LOCAL_BYTES = b"PK\1\2", 46, b"PK\3\4", 30
ZIP64_EXTRA, UNKNOWN_32 = 1, 0xFFFFFFFF

Read = Callable[[int, int], bytes]  # (length, offset), as os.pread without the descriptor


class Tensor(msgspec.Struct, frozen=True):
    """`width`: bytes of an element, 0 if unknown."""

    name: str
    offset: int
    length: int
    width: int


class Piece(msgspec.Struct, frozen=True):
    """A part of a file that becomes one chunk: number `number` of the tensor, or of the gap between tensors, called `name`."""

    name: str
    number: int
    offset: int
    length: int
    width: int


class _Unknown(ValueError):
    """The file has another format, or is damaged."""


def split(read: Read, size: int) -> list[Piece]:
    """Split a whole file into pieces of at most CHUNK_BYTES."""
    tensors = _tensors(read, size)
    spans: list[Tensor] = []
    end, gap = 0, 0
    for tensor in [*(t for t in tensors if t.length >= OWN_CHUNK_BYTES), Tensor("", size, 0, 0)]:
        if tensor.offset > end:
            # A gap has no name, but its number is often the same in the next checkpoint.
            spans.append(Tensor(f" {gap}", end, tensor.offset - end, 0))
            gap += 1
        if tensor.length:
            spans.append(tensor)
        end = tensor.offset + tensor.length
    return [
        Piece(span.name, number, start, min(CHUNK_BYTES, span.offset + span.length - start), span.width)
        for span in spans
        for number, start in enumerate(range(span.offset, span.offset + span.length, CHUNK_BYTES))
    ]


def _tensors(read: Read, size: int) -> list[Tensor]:
    """Return the tensors in the order of their offsets, without overlaps; none if the format is unknown."""
    for parse in (_safetensors, _zip_entries):
        try:
            found = sorted(parse(read, size), key=lambda tensor: tensor.offset)
        except (_Unknown, *MALFORMED):
            continue
        if all(a.offset + a.length <= b.offset for a, b in pairwise(found)) and len(found) <= MAX_TENSORS:
            return found
    return []


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


def _safetensors(read: Read, size: int) -> list[Tensor]:
    length = int.from_bytes(read(8, 0), "little")
    if not 2 <= length <= min(MAX_DIRECTORY_BYTES, size - 8):
        raise _Unknown
    found = []
    for name, raw in _header_decoder.decode(read(length, 8)).items():
        if name == "__metadata__":
            continue
        entry = _entry_decoder.decode(raw)
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= size - 8 - length:
            raise _Unknown
        found.append(Tensor(name, 8 + length + begin, end - begin, DTYPE_BYTES.get(entry.dtype, 1)))
    return found


def _zip_entries(read: Read, size: int) -> list[Tensor]:
    if read(4, 0) != ZIP_LOCAL:
        raise _Unknown
    found = []
    for name, method, length, header in _zip_directory(read, size):
        if method != 0 or length < OWN_CHUNK_BYTES:
            continue
        local = read(ZIP_LOCAL_BYTES, header)
        if len(local) < ZIP_LOCAL_BYTES or local[:4] != ZIP_LOCAL:
            raise _Unknown
        offset = header + ZIP_LOCAL_BYTES + _u16(local, 26) + _u16(local, 28)
        if offset + length > size:
            raise _Unknown
        # The first part of the name is the archive's own name, which changes with the step.
        found.append(Tensor(name.partition("/")[2] or name, offset, length, 0))
    return found


def _zip_directory(read: Read, size: int) -> list[tuple[str, int, int, int]]:
    """Return the name, method, length and local header offset of each entry."""
    tail_bytes = min(size, ZIP_END_BYTES + ZIP_COMMENT_BYTES)
    tail = read(tail_bytes, size - tail_bytes)
    at = tail.rfind(ZIP_END)
    if at < 0 or len(tail) - at < ZIP_END_BYTES:
        raise _Unknown
    length, offset = _u32(tail, at + 12), _u32(tail, at + 16)
    locator = tail[at - ZIP64_LOCATOR_BYTES : at] if at >= ZIP64_LOCATOR_BYTES else b""
    if locator[:4] == ZIP64_LOCATOR:
        end = read(ZIP64_END_BYTES, min(_u64(locator, 8), size))
        if len(end) < ZIP64_END_BYTES or end[:4] != ZIP64_END:
            raise _Unknown
        length, offset = _u64(end, 40), _u64(end, 48)
    if length > MAX_DIRECTORY_BYTES or offset + length > size:
        raise _Unknown
    directory, place = read(length, offset), 0
    entries = []
    while place + ZIP_ENTRY_BYTES <= len(directory) and directory[place : place + 4] == ZIP_ENTRY:
        name_bytes, extra_bytes, comment_bytes = (_u16(directory, place + where) for where in (28, 30, 32))
        body = place + ZIP_ENTRY_BYTES
        name = directory[body : body + name_bytes].decode()
        extra = directory[body + name_bytes : body + name_bytes + extra_bytes]
        packed, whole, header = _long_sizes(directory, place, extra)
        if packed == whole:
            entries.append((name, _u16(directory, place + 10), whole, header))
        place = body + name_bytes + extra_bytes + comment_bytes
    return entries


def _long_sizes(directory: bytes, place: int, extra: bytes) -> tuple[int, int, int]:
    """Return stored length, length and local header offset of an entry, from its zip64 field where they exceed 32 bits."""
    whole, packed, header = _u32(directory, place + 24), _u32(directory, place + 20), _u32(directory, place + 42)
    at = 0
    while at + 4 <= len(extra):
        kind, length = _u16(extra, at), _u16(extra, at + 2)
        if kind == ZIP64_EXTRA:
            values = [_u64(extra, where) for where in range(at + 4, min(at + 4 + length, len(extra)) - 7, 8)]
            sizes = [values.pop(0) if value == UNKNOWN_32 and values else value for value in (whole, packed, header)]
            whole, packed, header = sizes
        at += 4 + length
    return packed, whole, header


def label(parts: Sequence[str | int]) -> bytes:
    """Return the label of a piece, by which the same piece is found in an earlier checkpoint."""
    return blake3("\0".join(str(part) for part in parts).encode(errors="surrogateescape")).digest(LABEL_BYTES)


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
