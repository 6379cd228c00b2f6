"""Directories that guests have filled: looked through and removed however deep they are, and whatever rights their makers left.

`os.walk` and `shutil.rmtree` of Python 3.11 go down by recursion, so that a thousand levels are an error in whoever looks. A path
has at most 4,096 bytes (PATH_MAX), so below that a guest could keep what nobody finds by its path.
"""

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

DEEPEST = 256  # levels: Bazel's and npm's trees have some 40; ours
RIGHTS = stat.S_IRWXU
IN = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


class TooDeep(OSError):
    """What is below cannot be known."""


def walk(root: Path, strict: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, but that links to directories are files; not below `DEEPEST` levels. TooDeep there if it is `strict`."""
    left = [(str(root), 0)]
    while left:
        directory, level = left.pop()
        names: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    (names if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        except OSError:
            continue
        yield directory, names, files
        if names and level == DEEPEST:
            if strict:
                raise TooDeep(f"{root} has more than {DEEPEST} directories in each other")
            continue
        left += ((f"{directory}/{name}", level + 1) for name in reversed(names))


def remove(root: Path) -> None:
    """Whatever it is, with all that is in it; where the usual way ends, directories are moved up to where they can be reached.
    What cannot be removed stays, and is told in the log. No link is followed, also if somebody puts one there meanwhile."""
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
                    os.close(_entered(inner, directory))  # with the right to be moved
                moved += 1
                place = f".{moved}.{os.urandom(6).hex()}"
                os.rename(inner, place, src_dir_fd=directory, dst_dir_fd=top)
                left.append(place)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=top)


def _emptied(directory: int) -> list[str]:
    """Its directories, once all else is gone."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, inner in found:
        if not inner:
            os.unlink(name, dir_fd=directory)
    return [name for name, inner in found if inner]


def _entered(name: str, at: int | None = None) -> int:
    """A descriptor of a directory, to which its owner has all rights from now on."""
    handle = os.open(name, os.O_PATH | IN, dir_fd=at)
    try:
        itself = f"/proc/self/fd/{handle}"
        with contextlib.suppress(OSError):  # another user's
            os.chmod(itself, RIGHTS)  # noqa: PTH101
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
