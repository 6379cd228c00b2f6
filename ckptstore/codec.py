"""How a chunk is stored: as it is, compressed, or as byte planes of which some are compressed; any of these may hold the
difference to an earlier chunk instead of the chunk itself.

Floats change little from one checkpoint to the next, and in their high bytes most of all. So what is alike is brought together
(one plane for each byte of an element, as blosc's shuffle does) and zstd sees only the planes that it can shorten. The bits of
floats that are near each other are numbers that are near each other, so planes hold how far an element has moved (zigzag, so that
a small step down is a small number too): an XOR would be large wherever a carry has gone through (own measurement: weights 0.70
of their size by XOR and 0.68 by steps, Adam's second moment 0.79 and 0.73). Which way is best differs from tensor to tensor, so
each is tried on a sample. Level 3 never paid on floats.
"""

import sys
import threading
from collections.abc import Sequence

import numpy as np

from ckptstore.coding import PLANES, WIDTHS, ZSTD, Bytes, Coding
from ckptstore.errors import CorruptChunk

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1
SAMPLE_BYTES = 64 * 1024  # tried each way, from the middle of the first chunk of a tensor; ours
WORTH = 0.98  # a way, or a plane, that leaves more than this of a simpler one is not worth its time; ours

_Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class _Tools(threading.local):
    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=LEVEL)

    def compress(self, data: Bytes | _Array) -> bytes:
        view = data.data if isinstance(data, np.ndarray) else data
        return self.compressor.compress(view, mode=zstd.ZstdCompressor.FLUSH_FRAME)


_tools = _Tools()


def encode(data: Bytes, coding: Coding, base: Bytes | None = None) -> Bytes:
    """The stored form of a chunk; `base` has its length, and is needed for a delta."""
    array = _array(data)
    if coding.delta:
        assert base is not None
        width = coding.width if coding.codec == PLANES else 0
        array = _steps(array, _array(base), width)
    match coding.codec:
        case 0:
            return array.data
        case 1:
            return _tools.compress(array)
    return _encode_planes(array, coding.width, coding.planes)


def decode(stored: Bytes, codec: int, width: int, length: int, base: Bytes | None = None) -> Bytes:
    """The chunk of this length; CorruptChunk for what is none, before more memory than that has been used."""
    match codec:
        case 0:
            data: Bytes = stored
        case 1:
            data = _expand(stored, length)
        case 2 if width in WIDTHS:
            data = _decode_planes(stored, width, length)
        case _:
            raise CorruptChunk(f"codec {codec} of width {width} is not one this version knows")
    if len(data) != length or (base is not None and len(base) != length):
        raise CorruptChunk("a chunk does not have the length its header says")
    return data if base is None else _stepped(_array(data), _array(base), width).data


def choose(data: Bytes, base: Bytes | None, widths: Sequence[int] = WIDTHS) -> Coding:
    """The best way for data like this; `widths` are the elements it may consist of. Simpler ways win a near draw."""
    start = max(0, (len(data) - SAMPLE_BYTES) // 2) // 8 * 8
    sample = _array(data)[start : start + SAMPLE_BYTES]
    best, least = Coding(), len(sample) * WORTH
    formers = [None] if base is None else [None, _array(base)[start : start + SAMPLE_BYTES]]
    for against in formers:
        whole = sample if against is None else _steps(sample, against, 0)
        tried = [(Coding(ZSTD, delta=against is not None), len(_tools.compress(np.ascontiguousarray(whole))))]
        for width in widths:
            if width in WIDTHS and len(sample) >= width:
                array = sample if against is None else _steps(sample, against, width)
                tried.append(_try_planes(array, width, against is not None))
        for coding, size in tried:
            if size < least:
                best, least = coding, size * WORTH
    return best


def _try_planes(array: _Array, width: int, delta: bool) -> tuple[Coding, int]:
    count, size, mask = len(array) // width, len(array) % width + 4 * width, 0
    for number, plane in enumerate(_split(array, width)):
        packed = len(_tools.compress(plane))
        if packed < count * WORTH:
            mask |= 1 << number
        size += min(packed, count)
    return Coding(PLANES, width, mask, delta), size


def _encode_planes(array: _Array, width: int, mask: int) -> bytes:
    parts: list[Bytes] = []
    lengths = b""
    for number, plane in enumerate(_split(array, width)):
        packed = _tools.compress(plane) if mask >> number & 1 else None
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


def _steps(array: _Array, base: _Array, width: int) -> _Array:
    """How far each element of `width` bytes has moved, as a little-endian number with its sign in the lowest bit; the XOR of what
    is left over, or of all for width 0."""
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


def _stepped(steps: _Array, base: _Array, width: int) -> _Array:
    """The array that has moved so."""
    count = len(steps) // width * width if width else 0
    out = np.empty(len(steps), np.uint8)
    np.bitwise_xor(steps[count:], base[count:], out=out[count:])
    if count:
        moved, numbers = steps[:count].view(f"<u{width}"), out[:count].view(f"<u{width}")
        sign = np.negative(moved & 1)
        np.right_shift(moved, 1, out=numbers)
        np.bitwise_xor(numbers, sign, out=numbers)
        np.add(numbers, base[:count].view(f"<u{width}"), out=numbers)
    return out


def _split(array: _Array, width: int) -> list[_Array]:
    body = array[: len(array) // width * width].reshape(-1, width)
    return [np.ascontiguousarray(body[:, number]) for number in range(width)]


def _expand(stored: Bytes, length: int) -> bytes:
    """One zstd frame of just so many bytes, whatever it claims to be."""
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
