"""Room on the disk: for what guests write, and for system checkpoints. It is promised beforehand, so that several at once are not
each given the same; what is promised and not written yet counts as taken.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from mesh.amount import amount

BLOCK = 512  # bytes of st_blocks (inode(7))
FREE_SHARE = 2  # of what is free and promised to nobody, one part in so many is a guest's; ours


class NoRoom(OSError):
    """The text says how much is free, and promised to others."""


class Quotas:
    """Of a node's guests: what each may still write, where its owner has not said. Calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[Path, int] = {}  # bytes, by the directory that a guest works in

    def grant(self, directory: Path) -> int:
        """What a guest that is about to start may write, in bytes."""
        with self._lock:
            others = sum(left for one, left in self._left.items() if one != directory)
            self._left[directory] = max(0, shutil.disk_usage(directory).free - others) // FREE_SHARE
            return self._left[directory]

    def has_left(self, directory: Path, left: int) -> None:
        with self._lock:
            if directory in self._left:
                self._left[directory] = max(0, left)

    def end(self, directory: Path) -> None:
        """It writes no more."""
        with self._lock:
            self._left.pop(directory, None)


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
    """`of` its files: on disk, if nothing else is asked."""
    size = of or blocks
    return sum(size(Path(directory, name)) for directory, _, files in os.walk(root) for name in files)


def blocks(path: Path) -> int:
    """Bytes on disk; none of what cannot be looked at."""
    try:
        return path.lstat().st_blocks * BLOCK
    except OSError:
        return 0
