"""Codec of chunks: raw, zstd, or byte planes of which some are compressed; each can encode the difference to a base chunk.

Floats change little from one checkpoint to the next, least in their high bytes. So similar bytes are grouped (one plane for
each byte of an element, like blosc's shuffle) and only the planes that shrink are compressed. Close floats have close bit
patterns, so a delta is the numeric difference of the bit patterns, zigzag-encoded. An XOR would be large wherever a carry
propagates (measured: weights shrink to 0.70 by XOR and 0.68 by difference, Adam's second moment to 0.79 and 0.73). The best
encoding differs from tensor to tensor, so each is tried on a sample. zstd level 3 never paid on floats.
"""

import sys
import threading
from collections.abc import Sequence

from ckptstore import planes
from ckptstore.buffers import allocate
from ckptstore.encoding import PLANES, RAW, WIDTHS, ZSTD, Bytes, Encoding
from ckptstore.errors import CorruptChunk

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
SAMPLE_BYTES = 64 * 1024  # from the middle of the first chunk of a tensor (own choice)
WORTHWHILE = 0.98  # an encoding must shrink the simpler one to less than this (own choice)


class _Compressor(threading.local):
    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=LEVEL)

    def compress(self, data: Bytes) -> bytes:
        return self.compressor.compress(data, mode=zstd.ZstdCompressor.FLUSH_FRAME)


_compressor = _Compressor()


def encode(data: Bytes, encoding: Encoding, base: Bytes | None = None) -> Bytes:
    """Return the stored form of a chunk. A delta needs a `base` of the same length.

    A delta is of elements in planes, and elsewhere the exclusive or of all bytes.
    """
    base = base if encoding.delta else None
    assert base is not None or not encoding.delta
    if encoding.codec == PLANES:
        return _encode_planes(data, base, encoding.width, encoding.planes)
    changed = data if base is None else planes.xor(data, base)
    return _compressor.compress(changed) if encoding.codec == ZSTD else changed


def decode(stored: Bytes, codec: int, width: int, length: int, base: Bytes | None = None) -> Bytes:
    """Decode a chunk of this length. CorruptChunk for invalid bytes, before they use more memory than that."""
    if base is not None and len(base) != length:
        raise CorruptChunk("a chunk does not have the length of its base")
    if codec == PLANES and width in WIDTHS:
        return _decode_planes(stored, base, width, length)
    if codec not in {RAW, ZSTD}:
        raise CorruptChunk(f"codec {codec} of width {width} is unknown to this version")
    data = _expand(stored, length) if codec == ZSTD else stored
    if len(data) != length:
        raise CorruptChunk("a chunk does not have the length its header says")
    return data if base is None else planes.xor(data, base)


def choose(data: Bytes, base: Bytes | None, widths: Sequence[int] = WIDTHS) -> Encoding:
    """Choose the best encoding for data like this; `widths` are the possible element sizes. Ties go to the simpler encoding."""
    start = max(0, (len(data) - SAMPLE_BYTES) // 2) // 8 * 8
    sample = memoryview(data)[start : start + SAMPLE_BYTES]
    best, least = Encoding(), len(sample) * WORTHWHILE
    bases = [None] if base is None else [None, memoryview(base)[start : start + SAMPLE_BYTES]]
    for against in bases:
        whole = sample if against is None else planes.xor(sample, against)
        tried = [(Encoding(ZSTD, delta=against is not None), len(_compressor.compress(whole)))]
        tried += [_try_planes(sample, against, width) for width in widths if width in WIDTHS and len(sample) >= width]
        for encoding, size in tried:
            if size < least:
                best, least = encoding, size * WORTHWHILE
    return best


def _try_planes(sample: Bytes, base: Bytes | None, width: int) -> tuple[Encoding, int]:
    count, size, mask = len(sample) // width, len(sample) % width + 4 * width, 0
    for number, plane in enumerate(_planes(sample, base, width)):
        packed = len(_compressor.compress(plane))
        if packed < count * WORTHWHILE:
            mask |= 1 << number
        size += min(packed, count)
    return Encoding(PLANES, width, mask, base is not None), size


def _encode_planes(data: Bytes, base: Bytes | None, width: int, mask: int) -> bytes:
    parts: list[Bytes] = []
    lengths = b""
    for number, plane in enumerate(_planes(data, base, width)):
        packed = _compressor.compress(plane) if mask >> number & 1 else None
        part = packed if packed is not None and len(packed) < len(plane) else plane
        parts.append(part)
        lengths += len(part).to_bytes(4, "big")
    rest = len(data) // width * width
    return b"".join([lengths, *parts, data[rest:] if base is None else planes.xor(data[rest:], base[rest:])])


def _planes(data: Bytes, base: Bytes | None, width: int) -> list[memoryview]:
    whole, count = planes.split(data, base, width), len(data) // width
    return [whole[count * number : count * (number + 1)] for number in range(width)]


def _decode_planes(stored: Bytes, base: Bytes | None, width: int, length: int) -> memoryview:
    view = memoryview(stored)
    count, tail = divmod(length, width)
    lengths = [int.from_bytes(view[4 * number : 4 * number + 4], "big") for number in range(width)]
    if len(view) != 4 * width + sum(lengths) + tail or max(lengths) > count:
        raise CorruptChunk("the planes of a chunk do not fit its length")
    whole, out = allocate(count * width), allocate(length)
    offset, rest = 4 * width, count * width
    for number, size in enumerate(lengths):
        piece = view[offset : offset + size]
        whole[count * number : count * (number + 1)] = piece if size == count else _expand(piece, count)
        offset += size
    planes.join(whole, base, width, out[:rest])
    out[rest:] = view[offset:] if base is None else planes.xor(view[offset:], base[rest:])
    return out


def _expand(stored: Bytes, length: int) -> bytes:
    """Decompress one zstd frame of exactly this length, whatever length it claims."""
    expander = zstd.ZstdDecompressor()
    try:
        data = expander.decompress(stored, max_length=length + 1)
    except (zstd.ZstdError, ValueError, EOFError) as error:
        raise CorruptChunk(f"a chunk cannot be decompressed: {error}") from error
    if len(data) != length or (not expander.eof and expander.decompress(b"", max_length=1)):
        raise CorruptChunk("a chunk does not have the length its header says")
    return data
