"""Length-prefixed frames on a byte stream. No I/O. Standard library only: the program inside the guest uses it too."""

import struct

HEADER = struct.Struct(">I")


class TooLong(ValueError):
    """A frame is longer than the limit: the input is not a stream of frames."""


def framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


class Unframer:
    """Splits a byte stream into frames. It never holds more than one incomplete frame, of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        found = []
        while len(self._rest) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._rest)
            if length > self._limit:
                raise TooLong(f"a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._rest) < end:
                break
            found.append(bytes(self._rest[HEADER.size : end]))
            del self._rest[:end]
        return found
