"""Byte planes of chunks, and differences between chunks.

`planes.c` does this where it has been compiled, Python about ten times slower elsewhere; a test compares the two. A wheel brings
the library. From sources it is compiled once, at first use, beside this file or in the user's cache.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from ckptstore.buffers import allocate
from ckptstore.encoding import WIDTHS, Bytes
from membership.own_cache import own_cache

SOURCE = Path(__file__).with_name("planes.c")
FILE = f"libplanes-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"  # so that each version has its own
OPTIONS = ("-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_BYTES, _COUNT, _WIDTH = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
FUNCTIONS = {
    "planes_split": [_BYTES, _BYTES, _COUNT, _WIDTH, _BYTES],
    "planes_join": [_BYTES, _BYTES, _COUNT, _WIDTH, _BYTES],
    "planes_xor": [_BYTES, _BYTES, _COUNT, _BYTES],
}
BLOCK_BYTES = 1 << 16  # that Python works on at a time (own choice)

log = logging.getLogger(__name__)


def split(data: Bytes, base: Bytes | None, width: int) -> memoryview:
    """Return the planes of the whole elements of `data`, one after another: their first bytes, then their second bytes.

    With a base of the same length, an element is the zigzag-encoded little-endian difference to that of the base.
    """
    if width not in WIDTHS or (base is not None and len(base) != len(data)):
        raise ValueError(f"no differences of {len(data)} bytes in elements of {width}")
    count = len(data) // width
    out = allocate(count * width)
    native = library()
    if native is None:
        _split(data, base, width, out)
    elif count:
        native.planes_split(_at(data), None if base is None else _at(base), count, width, _at(out))
    return out


def join(planes: Bytes, base: Bytes | None, width: int, out: memoryview) -> None:
    """Invert `split`, into memory of as many bytes as there are in the planes. The base may be longer."""
    if (
        width not in WIDTHS
        or len(planes) % width
        or len(out) != len(planes)
        or (base is not None and len(base) < len(out))
    ):
        raise ValueError(f"no {len(out)} bytes of planes of {width}")
    count = len(planes) // width
    native = library()
    if native is None:
        _join(planes, base, width, out)
    elif count:
        native.planes_join(_at(planes), None if base is None else _at(base), count, width, _at(out))


def xor(one: Bytes, other: Bytes) -> Bytes:
    """Return the bits in which two byte strings of the same length differ."""
    if len(one) != len(other):
        raise ValueError(f"{len(one)} bytes and {len(other)}")
    native = library()
    if native is None:
        return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")
    out = allocate(len(one))
    if one:
        native.planes_xor(_at(one), _at(other), len(one), _at(out))
    return out


# --- in C


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, made now if need be; None where that cannot be."""
    for place in (directory / FILE for directory in _directories()):
        if place.exists() or _compiled(place):
            with suppress(OSError):
                return _declared(ctypes.CDLL(str(place)))
    log.warning("saves of checkpoints are slow: no C compiler here makes %s (`apt install gcc libc6-dev`)", SOURCE)
    return None


def compile_into(place: Path, compiler: Sequence[str]) -> None:
    """Make the library; it appears only when it is complete. OSError or CalledProcessError if that fails."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as directory:
        made = Path(directory) / place.name
        subprocess.run([*compiler, *OPTIONS, str(SOURCE), "-o", str(made)], check=True, capture_output=True)
        made.rename(place)


def _directories() -> Iterator[Path]:
    yield SOURCE.parent / "lib" / platform.machine()
    try:
        yield own_cache("planes")
    except OSError as error:
        log.debug("there is no cache for %s: %s", FILE, error)


def _compiled(place: Path) -> bool:
    compiler = next(
        (name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)), None
    )
    if compiler is None:
        return False
    try:
        compile_into(place, [compiler])
    except (OSError, subprocess.CalledProcessError) as error:
        log.debug("%s cannot be made: %s", place, error)
        return False
    return True


def _declared(native: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in FUNCTIONS.items():
        function = getattr(native, name)
        function.restype, function.argtypes = None, arguments
    return native


def _at(data: Bytes) -> object:
    """Return a pointer to the data, which must not be empty."""
    if isinstance(data, memoryview) and data.readonly:
        data = bytes(data)
    return data if isinstance(data, bytes) else ctypes.byref(ctypes.c_char.from_buffer(data))


# --- in Python: one large integer holds all the elements of a block


def _split(data: Bytes, base: Bytes | None, width: int, out: memoryview) -> None:
    count = len(out) // width
    for start in range(0, len(out), BLOCK_BYTES):
        block = bytes(data[start : min(start + BLOCK_BYTES, len(out))])
        if base is not None:
            block = _differences(block, base[start : start + len(block)], width)
        for plane in range(width):
            at = plane * count + start // width
            out[at : at + len(block) // width] = block[plane::width]


def _join(planes: Bytes, base: Bytes | None, width: int, out: memoryview) -> None:
    count = len(out) // width
    for start in range(0, len(out), BLOCK_BYTES):
        block = bytearray(min(BLOCK_BYTES, len(out) - start))
        for plane in range(width):
            at = plane * count + start // width
            block[plane::width] = planes[at : at + len(block) // width]
        if base is not None:
            block[:] = _sums(block, base[start : start + len(block)], width)
        out[start : start + len(block)] = block


def _differences(block: Bytes, base: Bytes, width: int) -> bytes:
    bits, ones, high, low = _masks(width, len(block))
    new, old = int.from_bytes(block, "little"), int.from_bytes(base, "little")
    # A bit set above each element takes its borrow, so that none reaches the next.
    moved = ((new | high) - (old & low)) ^ ((new ^ old ^ high) & high)
    sign = (moved >> (bits - 1)) & ones
    return (((moved & low) << 1) ^ ((sign << bits) - sign)).to_bytes(len(block), "little")


def _sums(block: Bytes, base: Bytes, width: int) -> bytes:
    bits, ones, high, low = _masks(width, len(block))
    found, old = int.from_bytes(block, "little"), int.from_bytes(base, "little")
    sign = found & ones
    moved = ((found ^ sign) >> 1) ^ ((sign << bits) - sign)
    return (((moved & low) + (old & low)) ^ ((moved ^ old) & high)).to_bytes(len(block), "little")


@cache
def _all_masks(width: int) -> tuple[int, int]:
    ones = int.from_bytes((b"\1" + bytes(width - 1)) * (BLOCK_BYTES // width), "little")
    return ones, ones << (8 * width - 1)


def _masks(width: int, length: int) -> tuple[int, int, int, int]:
    """Return the bits of an element; the lowest and the highest bit of each; and all others than the highest."""
    every = (1 << 8 * length) - 1
    ones, high = (mask & every for mask in _all_masks(width))
    return 8 * width, ones, high, every ^ high
