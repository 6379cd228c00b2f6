"""Room on the disk: what guests together have taken of it; and for system checkpoints, which is promised beforehand, so that
several at once are not each given the same. What is promised and not written yet counts as taken.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from mesh import trees
from mesh.amount import amount

BLOCK = 512  # bytes of st_blocks (inode(7))
LEFT_SHARE = 8  # of what guests found free, one part in so many is left by all of them together; ours


class NoRoom(OSError):
    """The text says how much is free, and promised to others."""


class Writers:
    """The guests of a node, and how much each has written since it began: together they leave its owner some of the disk."""

    def __init__(self) -> None:
        self._wrote: dict[Path, int] = {}  # bytes, by the directory that a guest works in
        self._leaving: dict[Path, int] = {}  # of those that have ended, until they are cleared away

    def wrote(self, directory: Path, size: int) -> bool:
        """So much by now. Whether it has to end: too little is left, and nobody has written more."""
        self._wrote[directory] = size
        self._leaving = {one: wrote for one, wrote in self._leaving.items() if one.exists()}
        try:
            free = shutil.disk_usage(directory).free + sum(self._leaving.values())
        except OSError:  # it is being cleared away
            return False
        return LEFT_SHARE * free < free + sum(self._wrote.values()) and size == max(self._wrote.values())

    def ended(self, directory: Path) -> None:
        if directory in self._wrote:
            self._leaving[directory] = self._wrote.pop(directory)


class Room:
    """Of one disk, for system checkpoints: a promise is over when its directory is gone. Its calls look at files, and may come
    from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: dict[Path, int] = {}  # bytes in all, by the directory that they are written below

    def promise(self, directory: Path, more: int) -> None:
        """Keep room for so many bytes beyond what is below `directory` by now, in place of what was kept for it before. NoRoom,
        and nothing is kept for it, where they are not free."""
        with self._lock:
            self._promised.pop(directory, None)
            self._promised = {one: total for one, total in self._promised.items() if one.is_dir()}
            # Before what is free: what is written meanwhile counts twice then, and not as nobody's.
            others = sum(max(0, total - tree_bytes(one)) for one, total in self._promised.items())
            free = shutil.disk_usage(directory).free
            if more > free - others:
                promised = f", {amount(others)} of them for other checkpoints" if others else ""
                raise NoRoom(f"{amount(free)} of the disk are free{promised}")
            self._promised[directory] = tree_bytes(directory) + more


def tree_bytes(root: Path, of: Callable[[Path], int] | None = None) -> int:
    """`of` its files: on disk, if nothing else is asked. TooDeep where that cannot be known."""
    size = of or blocks
    return sum(size(Path(directory, name)) for directory, _, files in trees.walk(root, strict=True) for name in files)


def tree_use(root: Path) -> tuple[int, int]:
    """Bytes on disk, and how many files and directories. TooDeep where that cannot be known."""
    size = inodes = 0
    for directory, names, files in trees.walk(root, strict=True):
        size += sum(blocks(Path(directory, name)) for name in files)
        inodes += len(names) + len(files)
    return size, inodes


def blocks(path: Path) -> int:
    """Bytes on disk; none of what cannot be looked at."""
    try:
        return path.lstat().st_blocks * BLOCK
    except OSError:
        return 0
