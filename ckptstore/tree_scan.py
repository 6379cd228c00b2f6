"""Scan of a tree of files: what each entry looks like from outside, so that a change while the tree is read is noticed.

A change leaves another look only if the clock of file times has ticked since the one before: see `settled`.
"""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptstore.errors import BadManifest, FileChanged
from ckptstore.manifest import MAX_FILES

TICK_NS = 20_000_000  # file times lag behind the clock by up to a kernel tick, 10 ms at 100 Hz
MOST_PATH_CHARS = 64 << 20  # of all paths together: a manifest holds a quarter of it (own choice)


class Look(NamedTuple):
    """A file's metadata, which differs after each change of the file.

    Two writes may leave the modification time and the size equal, so the inode and the change time are compared, too.
    """

    mode: int
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> "Look":
        return cls(info.st_mode, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    def is_of_same_file(self, other: "Look | None") -> bool:
        """Tell whether a file seems unchanged by size, modification time and inode, as rsync does: a new owner is no change."""
        return other is not None and self._replace(ctime_ns=other.ctime_ns) == other

    def holds(self, info: os.stat_result) -> bool:
        """Tell whether an open file is unchanged. Its removal alone is no change, though it sets the change time."""
        now = self.of(info)
        return now == (self._replace(ctime_ns=now.ctime_ns) if info.st_nlink == 0 else self)


Scan = dict[str, Look]  # by path below the root, which is ""; a directory before what is in it


def scan(root: Path, most: int = MAX_FILES, whole: bool = True) -> Scan:
    """Return what is at `root`, with all that is below it if `whole`. BadManifest once it is more than `most`, or its paths are
    too long together; OSError.
    """
    return dict(_walk(root, most, whole))


def settled(root: Path, most: int = MAX_FILES, whole: bool = True) -> Scan:
    """Scan a tree that looked like this at one moment, and in which each later change of a file leaves another look.

    FileChanged if it changes meanwhile; otherwise as `scan`.
    """
    found = scan(root, most, whole)
    wait_ns = max(look.ctime_ns for look in found.values()) + TICK_NS - time.time_ns()
    if wait_ns > 0:  # the clock of file times passes the newest change
        time.sleep(min(wait_ns, TICK_NS) / 1e9)
    left = dict.fromkeys(found)  # what looks the same before and after this moment looked so at it
    for name, look in _walk(root, MAX_FILES, whole):
        if found.get(name) != look:
            raise FileChanged(f"{root / name} changed while it was being saved")
        del left[name]
    for name in left:
        raise FileChanged(f"{root / name} was removed while it was being saved")
    return found


def _walk(root: Path, most: int, whole: bool) -> Iterator[tuple[str, Look]]:
    waiting = [("", Look.of(root.lstat()))]
    left, left_chars = most - 1, MOST_PATH_CHARS
    while waiting:
        name, look = waiting.pop()
        yield name, look
        if not (whole and stat.S_ISDIR(look.mode)):
            continue
        inner = []
        with os.scandir(root / name) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise BadManifest(
                        f"there are more than {most} files and directories: pack them into few large ones"
                    )
                path = f"{name}/{entry.name}" if name else entry.name
                left_chars -= len(path)
                if left_chars < 0:
                    raise BadManifest(
                        f"the paths of its files and directories have more than {MOST_PATH_CHARS} characters together: "
                        "use shorter names, or pack them into few large files"
                    )
                inner.append((path, Look.of(entry.stat(follow_symlinks=False))))
        waiting += sorted(inner, reverse=True)
