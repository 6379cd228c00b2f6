"""Walk and remove directory trees that guests have filled, at any depth and with any permissions.

`os.walk` and `shutil.rmtree` of Python 3.11 recurse, so a thousand levels crash the caller. A path has at most 4,096 bytes
(PATH_MAX), so a guest could hide files below that, where no path reaches them.
"""

import contextlib
import errno
import logging
import os
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
    """Remove a file or tree of any depth and width. What cannot be removed stays and is logged.

    No link is followed, even one added meanwhile, and no list of names is kept: a guest may have made millions.
    """
    try:
        if root.is_symlink() or not root.is_dir():
            root.unlink(missing_ok=True)
            return
        top = _entered(str(root))
        try:
            while _removed_a_level(top):
                pass
        finally:
            os.close(top)
        root.rmdir()
    except OSError as error:
        log.warning("%s stays: %s", root, error)


def _removed_a_level(top: int) -> bool:
    """Remove all that is in a directory. What is in directories there are directories is moved up, as it may be too deep to reach
    by path; return whether anything was.
    """
    moved = False
    with os.scandir(top) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=top)
                continue
            directory = _entered(entry.name, top)
            try:
                moved = _moved_up(directory, top) or moved
            finally:
                os.close(directory)
            os.rmdir(entry.name, dir_fd=top)
    return moved


def _moved_up(directory: int, top: int) -> bool:
    """Remove all that is in a directory but directories, and move those to `top`; return whether there were any."""
    moved = False
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.close(_entered(entry.name, directory))  # makes it movable
                os.rename(entry.name, f".{os.urandom(12).hex()}", src_dir_fd=directory, dst_dir_fd=top)
                moved = True
            else:
                os.unlink(entry.name, dir_fd=directory)
    return moved


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
