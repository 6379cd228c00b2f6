"""The kernel's FUSE protocol, as far as a file system needs it that never changes. No I/O but that of mounts.

Messages are those of linux/fuse.h, version 7.31 or later (Linux 5.4). Files need no OPEN: the kernel is told so once, and then
keeps what it has read. Nothing here writes, and the mount is read-only besides.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ckptstore.encoding import Bytes
from mesh.util.mounts import mounts

LOOKUP, FORGET, GETATTR, READLINK, READ, STATFS, INIT, READDIR = 1, 2, 3, 5, 15, 17, 26, 28
INTERRUPT, DESTROY, BATCH_FORGET, READDIRPLUS = 36, 38, 42, 44
UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT, DESTROY}
VERSION, OLDEST_MINOR = (7, 41), 31
ASYNC_READ, DO_READDIRPLUS, READDIRPLUS_AUTO, PARALLEL_DIROPS, MAX_PAGES = 1, 1 << 13, 1 << 14, 1 << 18, 1 << 22
NO_OPEN, CACHE_SYMLINKS, NO_OPENDIR, INIT_EXT = 1 << 17, 1 << 23, 1 << 24, 1 << 30
REQUEST_TIMEOUT = 1 << 10  # of the second flags: the kernel gives up a connection that does not answer (since 6.15)
READ_BYTES = 1 << 20  # most of a read
REQUEST_BYTES = 1 << 16  # of a buffer for a request, which has at most a name of 255 bytes
BACKGROUND = 512  # reads ahead that may wait; each that waits for the network takes one (own choice)
VALID_S = 1 << 30  # nothing ever changes
KIND = "fuse.campus-mesh"
MS_RDONLY, MS_NOSUID, MS_NODEV, MNT_DETACH = 1, 2, 4, 2

_in = struct.Struct("=IIQQIIIHH")
_out = struct.Struct("=IiQ")
_init_in, _init_out = struct.Struct("=IIII"), struct.Struct("=IIIIHHIIHHIIH22x")
_attr = struct.Struct("=QQQQQQIIIIIIIIII")
_entry, _attr_out = struct.Struct("=QQQQII"), struct.Struct("=QII")
_read, _interrupt = struct.Struct("=QQII"), struct.Struct("=Q")
_dirent, _statfs = struct.Struct("=QQII"), struct.Struct("=QQQQQIIII24x")

libc = ctypes.CDLL(None, use_errno=True)


class Request(NamedTuple):
    """A request of the kernel. `node`: the number of an entry; `pid`: the thread that waits, 0 if it cannot be seen."""

    opcode: int
    unique: int
    node: int
    pid: int
    body: memoryview

    @property
    def name(self) -> bytes:
        return bytes(self.body[:-1])

    @property
    def span(self) -> tuple[int, int]:
        """Return the offset and the size of a READ or READDIR."""
        _, offset, size, _ = _read.unpack_from(self.body)
        return offset, size

    @property
    def interrupted(self) -> int:
        return int(_interrupt.unpack_from(self.body)[0])


class Attributes(NamedTuple):
    number: int
    mode: int
    size: int
    unix: int

    def pack(self) -> bytes:
        unix, blocks = self.unix, (self.size + 511) // 512
        owner = (os.getuid(), os.getgid())
        return _attr.pack(
            self.number, self.size, blocks, unix, unix, unix, 0, 0, 0, self.mode, 1, *owner, 0, READ_BYTES, 0
        )


def decode(message: bytes) -> Request:
    length, opcode, unique, node, _, _, pid, extra, _ = _in.unpack_from(message)
    return Request(opcode, unique, node, pid, memoryview(message)[_in.size : length - 8 * extra])


def answer(unique: int, pieces: Iterable[Bytes] = (), error: int = 0) -> list[Bytes]:
    """Return the pieces of an answer. `error`: an errno."""
    parts = list(pieces)
    return [_out.pack(_out.size + sum(map(len, parts)), -error, unique), *parts]


def init(request: Request, timeout_s: int) -> bytes:
    """Return the body of the first answer. OSError: the kernel is too old. `timeout_s`: of the kernel for any answer."""
    major, minor, ahead, flags = _init_in.unpack_from(request.body)
    if (major, minor) < (VERSION[0], OLDEST_MINOR):
        raise OSError(errno.EPROTO, f"the kernel speaks FUSE {major}.{minor}, and 7.{OLDEST_MINOR} is needed")
    wanted = ASYNC_READ | DO_READDIRPLUS | READDIRPLUS_AUTO | PARALLEL_DIROPS | MAX_PAGES | CACHE_SYMLINKS
    wanted |= NO_OPEN | NO_OPENDIR | INIT_EXT
    more = struct.unpack_from("=I", request.body, _init_in.size)[0] if flags & INIT_EXT else 0
    pages = READ_BYTES // os.sysconf("SC_PAGESIZE")
    sizes = (BACKGROUND, BACKGROUND * 3 // 4, 1 << 12, 1, pages, 0, more & REQUEST_TIMEOUT, 0, timeout_s)
    return _init_out.pack(7, min(minor, VERSION[1]), ahead, flags & wanted, *sizes)


def entry(found: Attributes) -> bytes:
    return _entry.pack(found.number, 0, VALID_S, VALID_S, 0, 0) + found.pack()


def attributes(found: Attributes) -> bytes:
    return _attr_out.pack(VALID_S, 0, 0) + found.pack()


def statfs(size: int, entries: int) -> bytes:
    return _statfs.pack((size + 4095) // 4096, 0, 0, entries, 0, 4096, 255, 4096, 0)


def listed(found: Attributes, name: bytes, after: int, plus: bool) -> bytes:
    """Return a line of a directory. `after`: where the next one is; `plus`: with its attributes."""
    line = _dirent.pack(found.number, after, len(name), stat.S_IFMT(found.mode) >> 12) + name
    return (entry(found) if plus else b"") + line + bytes(-len(line) % 8)


# --- mounts


def mounted(path: Path) -> int:
    """Mount a file system at a directory, read-only; return the descriptor by which the kernel asks. OSError."""
    kernel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    options = f"fd={kernel},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,default_permissions"
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    try:
        _checked(libc.mount(b"campus-mesh", os.fsencode(path), KIND.encode(), flags, options.encode()), path)
    except OSError:
        os.close(kernel)
        raise
    return kernel


def unmounted(path: Path) -> None:
    """Take a mount away, even if a guest still uses it or nobody answers for it. OSError."""
    _checked(libc.umount2(os.fsencode(path), MNT_DETACH), path)


def mounts_below(directory: Path) -> list[Path]:
    """Return this node's file systems that are mounted below a directory."""
    return [
        place for mount in mounts() if mount.kind == KIND and (place := Path(mount.place)).is_relative_to(directory)
    ]


def _checked(result: int, path: Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
