"""Times of a log's bytes, kept in a file beside the log, so that its lines can be selected and stamped by time.

The file holds marks. A mark (unix_ms, offset) tells that the byte before `offset` was written at `unix_ms`. Bytes between two
marks have the time of the later one, which is at most MARK_EVERY_S too late in the log's first hours.
"""

import math
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from membership.malformed import MALFORMED

MARK_EVERY_S = 1.0
# The least time between two marks doubles after so many: 4.5 hours of constant output. Three weeks take 2 MiB (own choice).
DOUBLE_AFTER = 16_384
MOST_MARKS = 1 << 18  # that are read of a log: 34 years of constant output (own choice)
PIECE_BYTES = 1 << 20  # of a log, read or sent at once (own choice)
MOST_UNIX_MS = 2**53  # integers that JSON readers keep exact (RFC 8259, section 6)

LOG_BYTES = 10**15  # of a log: the header of a copy has 15 digits

Mark = tuple[int, int]
_MARK = struct.Struct("<QQ")
MARK_BYTES = _MARK.size


class LogPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes of a log from `offset` on, and their marks; the last mark is that of the last byte."""

    offset: int
    data: Annotated[bytes, msgspec.Meta(max_length=PIECE_BYTES)]
    marks: Annotated[tuple[Mark, ...], msgspec.Meta(max_length=PIECE_BYTES)]

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def timed(self) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes with their time."""
        start = self.offset
        for unix_ms, offset in self.marks:
            yield unix_ms, self.data[start - self.offset : offset - self.offset]
            start = offset


def encode_piece(piece: LogPiece) -> bytes:
    return msgspec.msgpack.encode(piece)


def decode_piece(data: bytes) -> LogPiece:
    """Decode a piece; ValueError if it is malformed, or if its marks do not fit its bytes."""
    try:
        piece = _piece_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not a piece of a log: {error}") from error
    return checked(piece)


_piece_decoder = msgspec.msgpack.Decoder(LogPiece)


def checked(piece: LogPiece) -> LogPiece:
    """Return the piece; ValueError if its marks do not fit its bytes."""
    offsets = [piece.offset, *(offset for _, offset in piece.marks)]
    fits = piece.offset >= 0 and offsets[-1] == piece.end and all(a < b for a, b in pairwise(offsets))
    if (
        not piece.data
        or not fits
        or piece.end >= LOG_BYTES
        or not all(0 <= unix_ms < MOST_UNIX_MS for unix_ms, _ in piece.marks)
    ):
        raise ValueError("the times of a log do not fit it")
    return piece


def times_path(log: Path) -> Path:
    return log.with_name(f"{log.name}.times")


def mark_sizes(logs: Iterable[Path]) -> None:
    """Add a mark to each log for what was written since its last one, unless that is too recent."""
    for log in logs:
        with suppress(OSError):  # not printed to yet, or the disk is full: the log's own time remains
            _mark_size(log)


def _mark_size(log: Path) -> None:
    state, marks, times = log.stat(), read_marks(log), times_path(log)
    kept = marks[: bisect_right(marks, state.st_size, key=_offset)]
    if len(kept) < len(marks):  # the log was cut (`max_log_gib`)
        os.truncate(times, len(kept) * _MARK.size)
    last_ms, last = kept[-1] if kept else (-math.inf, 0)
    written_ms, spacing_ms = _written_ms(state), 1000 * MARK_EVERY_S * 2 ** (len(kept) // DOUBLE_AFTER)
    if state.st_size > last and written_ms - last_ms >= spacing_ms:
        with times.open("ab") as file:
            file.write(_MARK.pack(written_ms, state.st_size))


def read_marks(log: Path, most: int = MOST_MARKS) -> list[Mark]:
    """Return the marks of a log, at most its last ones: a lender can leave a file of any size, as one hole."""
    try:
        with times_path(log).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size // MARK_BYTES - most) * MARK_BYTES)
            return decode_marks(file.read(most * MARK_BYTES))
    except FileNotFoundError:
        return []


def decode_marks(data: bytes) -> list[Mark]:
    whole = len(data) - len(data) % _MARK.size  # a crash may leave part of the last mark
    return list(_MARK.iter_unpack(data[:whole]))


def write_marks(log: Path, marks: Iterable[Mark]) -> None:
    times_path(log).write_bytes(b"".join(_MARK.pack(*mark) for mark in marks))


def piece_of(log: Path, offset: int, data: bytes, most_marks: int = MOST_MARKS) -> LogPiece:
    """Return the piece with this data of a log, from its marks. Bytes after the last mark have the time of the last write."""
    end, marks = offset + len(data), read_marks(log, most_marks)
    first, after = (bisect_right(marks, place, key=_offset) for place in (offset, end - 1))
    unix_ms = marks[after][0] if after < len(marks) else _written_ms(log.stat())
    return LogPiece(offset, data, (*marks[first:after], (unix_ms, end)))


def read_piece(log: Path, offset: int, most: int = PIECE_BYTES, most_marks: int = MOST_MARKS) -> LogPiece | None:
    """Return the log's bytes from `offset` on, at most so many; None if there are none. `most_marks`: the last that are read."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            data = file.read(most)
        return piece_of(log, offset, data, most_marks) if data else None
    except FileNotFoundError:
        return None


def offset_since(log: Path, since_ms: int) -> int:
    """Return an offset from which a reader finds all lines that began at `since_ms` or later.

    It is in the byte before them, so that the reader can tell whether a line begins there.
    """
    offset = 0
    for unix_ms, end in read_marks(log):
        if unix_ms >= since_ms:
            break
        offset = end - 1
    return offset


def _offset(mark: Mark) -> int:
    return mark[1]


def _written_ms(state: os.stat_result) -> int:
    """Return when the file was last written. A guest can set that time on its own output: not before 1970, nor after now."""
    return max(0, min(state.st_mtime_ns // 1_000_000, int(time.time() * 1000)))
