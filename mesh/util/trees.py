"""Walk and remove directory trees that guests have filled, at any depth and with any permissions.

`os.walk` and `shutil.rmtree` of Python 3.11 recurse, so a thousand levels crash the caller. A path has at most 4,096 bytes
(PATH_MAX), so a guest could hide files below that, where no path reaches them.
"""

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

DEEPEST = 256  # levels; trees of Bazel and npm have about 40 (own choice)
MOST_WAITING = 1 << 18  # directories found and not yet entered (own choice): at most 80 MB of names
RIGHTS = stat.S_IRWXU
IN = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HIDING = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}  # errors by which an owner can keep a tree from being walked

log = logging.getLogger(__name__)


class OutOfReach(OSError):
    """Part of a tree cannot be walked: it is too deep, or closed."""


def walk(root: Path, strict: bool = False) -> Iterator[os.DirEntry[str]]:
    """Yield all files and directories below `root`, a directory before what is in it. No link is followed.

    What is closed, below `DEEPEST` levels, or in one directory too many is left out; OutOfReach if `strict`. Only names of
    directories that are still to be entered are kept, and at most `MOST_WAITING`.
    """
    levels, waiting = [(str(root.parent), [root.name])], 1
    while levels:
        parent, names = levels[-1]
        if not names:
            levels.pop()
            continue
        directory, inner, whole = os.path.join(parent, names.pop()), list[str](), True  # noqa: PTH118
        waiting -= 1
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        whole = len(levels) <= DEEPEST and waiting < MOST_WAITING
                        if whole:
                            inner.append(entry.name)
                            waiting += 1
                    yield entry
        except OSError as error:
            if strict:
                check_reach(error)
            continue
        if strict and not whole:
            raise OutOfReach(f"{root} has more than {DEEPEST} directories in each other, or {MOST_WAITING} in one")
        levels.append((directory, inner))


def check_reach(error: OSError) -> None:
    """Raise OutOfReach if a file or directory is closed or its path too long, and not just removed."""
    if error.errno in HIDING:
        raise OutOfReach(f"one of its files or directories cannot be read ({error.strerror})") from error


def remove(root: Path) -> None:
    """Remove a file or tree of any depth. Directories too deep to reach by path are moved up first.

    What cannot be removed stays and is logged. No link is followed, even one added meanwhile.
    """
    try:
        if root.is_symlink() or not root.is_dir():
            root.unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(root)
            return
        top = _entered(str(root))
        try:
            _empty(top)
        finally:
            os.close(top)
        root.rmdir()
    except OSError as error:
        log.warning("%s stays: %s", root, error)


def _empty(top: int) -> None:
    left = _emptied(top)
    moved = 0
    while left:
        name = left.pop()
        directory = _entered(name, top)
        try:
            for inner in _emptied(directory):
                with contextlib.suppress(OSError):
                    os.close(_entered(inner, directory))  # makes it movable
                moved += 1
                place = f".{moved}.{os.urandom(6).hex()}"
                os.rename(inner, place, src_dir_fd=directory, dst_dir_fd=top)
                left.append(place)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=top)


def _emptied(directory: int) -> list[str]:
    """Remove all but directories; return the names of those."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, inner in found:
        if not inner:
            os.unlink(name, dir_fd=directory)
    return [name for name, inner in found if inner]


def _entered(name: str, at: int | None = None) -> int:
    """Open a directory, after giving its owner all rights to it."""
    handle = os.open(name, os.O_PATH | IN, dir_fd=at)
    try:
        itself = f"/proc/self/fd/{handle}"
        with contextlib.suppress(OSError):  # it belongs to another user
            os.chmod(itself, RIGHTS)  # noqa: PTH101
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
