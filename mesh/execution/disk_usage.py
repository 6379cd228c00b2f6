"""Disks: which one holds a directory, how much guests have written, and reservations for system checkpoints.

Space is reserved before a system checkpoint is written, so that several at once are not promised the same bytes.
"""

import contextlib
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from mesh.util import trees
from mesh.util.byte_text import amount

BLOCK = 512  # bytes of st_blocks (inode(7))
LEAST = 4096  # of a file or directory: an empty one takes an inode and a name (own choice)
Entry = Path | os.DirEntry[str]
LEFT_SHARE = 8  # guests together leave an eighth of the space that they found free (own choice)


class Disk(NamedTuple):
    """A whole disk, not a partition of it: its number as `io.max` takes it, and its device file."""

    number: str
    path: str


def disk_of(path: str) -> Disk | None:
    """Return the disk that holds a path; None if its file system is on none (a tmpfs, an overlay, a share)."""
    device = Path(path).stat().st_dev
    with contextlib.suppress(OSError):
        part = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        whole = part.parent if (part / "partition").exists() else part
        facts = dict(line.split("=", 1) for line in (whole / "uevent").read_text().split())
        return Disk((whole / "dev").read_text().strip(), f"/dev/{facts['DEVNAME']}")
    return None


class NoRoom(OSError):
    """There is not enough free space; the text says how much is free and how much is reserved."""


class Writers:
    """The bytes that each guest of a node has written since it started; together they must leave the owner some space."""

    def __init__(self) -> None:
        self._wrote: dict[Path, int] = {}  # bytes by working directory
        self._leaving: dict[Path, int] = {}  # of ended guests, until their directories are removed

    def wrote(self, directory: Path, size: int) -> bool:
        """Record the bytes written so far; return whether this guest must end: space is short and no other wrote more."""
        self._wrote[directory] = size
        self._leaving = {one: wrote for one, wrote in self._leaving.items() if one.exists()}
        try:
            free = shutil.disk_usage(directory).free + sum(self._leaving.values())
        except OSError:  # it is being removed
            return False
        return LEFT_SHARE * free < free + sum(self._wrote.values()) and size == max(self._wrote.values())

    def ended(self, directory: Path) -> None:
        if directory in self._wrote:
            self._leaving[directory] = self._wrote.pop(directory)


class Room:
    """Reservations of one disk for system checkpoints. One ends when its directory is gone.

    Thread-safe; calls read directories and so block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[Path, int] = {}  # total bytes by directory

    def promise(self, directory: Path, more: int) -> None:
        """Reserve `more` bytes beyond what `directory` holds now, in place of its earlier reservation.

        NoRoom if they are not free; then `directory` has no reservation.
        """
        with self._lock:
            self._promised.pop(directory, None)
            self._promised = {one: total for one, total in self._promised.items() if one.is_dir()}
            # Measure the others before the free space: bytes written in between then count twice, not zero times.
            others = sum(max(0, total - tree_bytes(one)) for one, total in self._promised.items())
            free = shutil.disk_usage(directory).free
            if more > free - others:
                promised = f", {amount(others)} of it reserved for other checkpoints" if others else ""
                raise NoRoom(f"{amount(free)} of disk space is free{promised}")
            self._promised[directory] = tree_bytes(directory) + more


def tree_use(
    roots: Iterable[Path],
    most_bytes: float = math.inf,
    most_inodes: float = math.inf,
    of: Callable[[Entry], int] | None = None,
    spend: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Return the sum of `of`, by default bytes on disk, and the number of files and directories below these directories.

    The count ends where one of them is over its limit. OutOfReach if any cannot be counted. `spend` is called
    for each, and may raise.
    """
    size = inodes = 0
    for root in roots:
        for entry in trees.walk(root, strict=True):
            spend()
            size += (of or blocks)(entry)
            inodes += 1
            if size > most_bytes or inodes > most_inodes:
                return size, inodes
    return size, inodes


def tree_bytes(root: Path) -> int:
    return tree_use([root])[0]


def blocks(entry: Entry, of_link: bool = False) -> int:
    """Return the bytes on disk of a file or directory, at least `LEAST`; 0 if it has gone.

    `of_link`: of a file with several links, return this link's share.
    """
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        trees.check_reach(error)
        return 0
    links = found.st_nlink if of_link and not stat.S_ISDIR(found.st_mode) else 1
    return max(LEAST, found.st_blocks * BLOCK) // max(1, links)
