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

import numpy as np

from ckptstore.encoding import PLANES, WIDTHS, ZSTD, Bytes, Encoding
from ckptstore.errors import CorruptChunk

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
SAMPLE_BYTES = 64 * 1024  # from the middle of the first chunk of a tensor (own choice)
WORTHWHILE = 0.98  # an encoding must shrink the simpler one to less than this (own choice)

_Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class _Compressor(threading.local):
    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=LEVEL)

    def compress(self, data: Bytes | _Array) -> bytes:
        view = data.data if isinstance(data, np.ndarray) else data
        return self.compressor.compress(view, mode=zstd.ZstdCompressor.FLUSH_FRAME)


_compressor = _Compressor()


def encode(data: Bytes, encoding: Encoding, base: Bytes | None = None) -> Bytes:
    """Return the stored form of a chunk. A delta needs a `base` of the same length."""
    array = _array(data)
    if encoding.delta:
        assert base is not None
        width = encoding.width if encoding.codec == PLANES else 0
        array = _differences(array, _array(base), width)
    match encoding.codec:
        case 0:
            return array.data
        case 1:
            return _compressor.compress(array)
    return _encode_planes(array, encoding.width, encoding.planes)


def decode(stored: Bytes, codec: int, width: int, length: int, base: Bytes | None = None) -> Bytes:
    """Decode a chunk of this length. CorruptChunk for invalid bytes, before they use more memory than that."""
    match codec:
        case 0:
            data: Bytes = stored
        case 1:
            data = _expand(stored, length)
        case 2 if width in WIDTHS:
            data = _decode_planes(stored, width, length)
        case _:
            raise CorruptChunk(f"codec {codec} of width {width} is unknown to this version")
    if len(data) != length or (base is not None and len(base) != length):
        raise CorruptChunk("a chunk does not have the length its header says")
    return data if base is None else _apply_differences(_array(data), _array(base), width).data


def choose(data: Bytes, base: Bytes | None, widths: Sequence[int] = WIDTHS) -> Encoding:
    """Choose the best encoding for data like this; `widths` are the possible element sizes. Ties go to the simpler encoding."""
    start = max(0, (len(data) - SAMPLE_BYTES) // 2) // 8 * 8
    sample = _array(data)[start : start + SAMPLE_BYTES]
    best, least = Encoding(), len(sample) * WORTHWHILE
    bases = [None] if base is None else [None, _array(base)[start : start + SAMPLE_BYTES]]
    for against in bases:
        whole = sample if against is None else _differences(sample, against, 0)
        tried = [(Encoding(ZSTD, delta=against is not None), len(_compressor.compress(np.ascontiguousarray(whole))))]
        for width in widths:
            if width in WIDTHS and len(sample) >= width:
                array = sample if against is None else _differences(sample, against, width)
                tried.append(_try_planes(array, width, against is not None))
        for encoding, size in tried:
            if size < least:
                best, least = encoding, size * WORTHWHILE
    return best


def _try_planes(array: _Array, width: int, delta: bool) -> tuple[Encoding, int]:
    count, size, mask = len(array) // width, len(array) % width + 4 * width, 0
    for number, plane in enumerate(_split(array, width)):
        packed = len(_compressor.compress(plane))
        if packed < count * WORTHWHILE:
            mask |= 1 << number
        size += min(packed, count)
    return Encoding(PLANES, width, mask, delta), size


def _encode_planes(array: _Array, width: int, mask: int) -> bytes:
    parts: list[Bytes] = []
    lengths = b""
    for number, plane in enumerate(_split(array, width)):
        packed = _compressor.compress(plane) if mask >> number & 1 else None
        part = packed if packed is not None and len(packed) < len(plane) else plane.data
        parts.append(part)
        lengths += len(part).to_bytes(4, "big")
    tail = array[len(array) // width * width :]
    return b"".join([lengths, *parts, tail.data])


def _decode_planes(stored: Bytes, width: int, length: int) -> memoryview:
    view = memoryview(stored)
    count, tail = divmod(length, width)
    lengths = [int.from_bytes(view[4 * number : 4 * number + 4], "big") for number in range(width)]
    if len(view) != 4 * width + sum(lengths) + tail or max(lengths) > count:
        raise CorruptChunk("the planes of a chunk do not fit its length")
    out = np.empty(length, np.uint8)
    body = out[: count * width].reshape(count, width)
    offset = 4 * width
    for number, size in enumerate(lengths):
        piece = view[offset : offset + size]
        body[:, number] = _array(piece if size == count else _expand(piece, count))
        offset += size
    out[count * width :] = _array(view[offset:])
    return out.data


def _differences(array: _Array, base: _Array, width: int) -> _Array:
    """Return the zigzag-encoded little-endian difference of each element of `width` bytes.

    The remainder at the end, or everything for width 0, is XORed.
    """
    count = len(array) // width * width if width else 0
    out = np.empty(len(array), np.uint8)
    np.bitwise_xor(array[count:], base[count:], out=out[count:])
    if count:
        moved, signed = out[:count].view(f"<u{width}"), out[:count].view(f"<i{width}")
        np.subtract(array[:count].view(f"<u{width}"), base[:count].view(f"<u{width}"), out=moved)
        sign = signed >> (8 * width - 1)
        np.left_shift(signed, 1, out=signed)
        np.bitwise_xor(signed, sign, out=signed)
    return out


def _apply_differences(differences: _Array, base: _Array, width: int) -> _Array:
    """Invert `_differences`."""
    count = len(differences) // width * width if width else 0
    out = np.empty(len(differences), np.uint8)
    np.bitwise_xor(differences[count:], base[count:], out=out[count:])
    if count:
        moved, numbers = differences[:count].view(f"<u{width}"), out[:count].view(f"<u{width}")
        sign = np.negative(moved & 1)
        np.right_shift(moved, 1, out=numbers)
        np.bitwise_xor(numbers, sign, out=numbers)
        np.add(numbers, base[:count].view(f"<u{width}"), out=numbers)
    return out


def _split(array: _Array, width: int) -> list[_Array]:
    body = array[: len(array) // width * width].reshape(-1, width)
    return [np.ascontiguousarray(body[:, number]) for number in range(width)]


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


def _array(data: Bytes | _Array) -> _Array:
    return np.frombuffer(data, np.uint8)
