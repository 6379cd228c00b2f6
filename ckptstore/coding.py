"""What is said of how a chunk is stored; `codec` does it. Apart, since that needs numpy, which a daemon that has yet to handle a
checkpoint does without (own measurement: 15 MiB and 0.1 s)."""

import msgspec

RAW, ZSTD, PLANES = 0, 1, 2
WIDTHS = (2, 4, 8)  # bytes of an element, for planes

Bytes = bytes | bytearray | memoryview


class Coding(msgspec.Struct, frozen=True):
    """`planes` are those that are compressed, as bits; `delta`: the difference to a base is stored."""

    codec: int = RAW
    width: int = 0
    planes: int = 0
    delta: bool = False


class Base(msgspec.Struct, frozen=True):
    """A chunk that another may be stored as the difference to: it is here, and no difference itself."""

    id: bytes
    length: int
