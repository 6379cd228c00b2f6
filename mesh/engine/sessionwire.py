"""Frames on a stream: four bytes of length before each. Standard library only, for the program inside the guest too. No I/O."""

import struct

HEADER = struct.Struct(">I")


class TooLong(ValueError):
    """A frame longer than any may be: what comes is no stream of frames."""


def framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


class Unframer:
    """Takes bytes as they come, gives whole frames; never holds more than one that is not whole, of `limit` bytes at most."""

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
