"""Encoding parameters of a chunk; `codec` implements them.

They are separate from the codec, which needs zstd: a daemon that has not handled a checkpoint yet does without it.
"""

import msgspec

RAW, ZSTD, PLANES = 0, 1, 2
WIDTHS = (2, 4, 8)  # bytes of an element, for planes

Bytes = bytes | bytearray | memoryview


class Encoding(msgspec.Struct, frozen=True):
    """`planes`: bit mask of the compressed planes; `delta`: the difference to a base chunk is stored."""

    codec: int = RAW
    width: int = 0
    planes: int = 0
    delta: bool = False


class Base(msgspec.Struct, frozen=True):
    """A chunk in this store against which another can be stored as a delta. It is not a delta itself."""

    id: bytes
    length: int
