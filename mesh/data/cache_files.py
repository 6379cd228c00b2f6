"""Files of caches: what a job has added to one is merged into a copy of its newest version.

A version only grows: its files stay unless a job has written one of the same name. So of two jobs that fill a cache at the same
time, the version after both has what each has added. The files come from a guest and are hostile: no link is followed.
"""

import filecmp
import os
from pathlib import Path
from typing import NamedTuple

from ckptstore.errors import TooLarge
from mesh.util import trees

MAX_ENTRIES = 100_000  # of a cache: a node remembers how each looked at the start, 0.4 kB (own choice)
FILE_MODE = 0o644


class Grown(NamedTuple):
    """The new files of a version of a cache, and their bytes."""

    files: int
    bytes: int


def merge(added: Path, cache: Path) -> Grown:
    """Move the files and links below `added` into `cache`, over those of the same name; what is equal there already is not new.

    TooLarge if the cache then has more than MAX_ENTRIES. OutOfReach, OSError.
    """
    files = size = 0
    for entry in list(trees.walk(added, strict=True)):
        path, here = Path(entry.path), cache / Path(entry.path).relative_to(added)
        if entry.is_dir(follow_symlinks=False):
            if here.is_symlink() or not here.is_dir():
                here.unlink(missing_ok=True)
                here.mkdir(mode=0o700)
            continue
        if not entry.is_symlink():
            path.chmod(FILE_MODE | entry.stat(follow_symlinks=False).st_mode & 0o111)
        if _equal(path, here):
            continue
        if here.is_dir() and not here.is_symlink():
            trees.remove(here)
        path.rename(here)
        files, size = files + 1, size + here.lstat().st_size
    if sum(1 for _ in trees.walk(cache)) > MAX_ENTRIES:
        raise TooLarge(f"it would have more than {MAX_ENTRIES} files and directories: remove it with `mesh data rm`")
    return Grown(files, size)


def _equal(one: Path, other: Path) -> bool:
    """Tell whether two files or links are equal; false if the other is not there."""
    if not os.path.lexists(other) or one.is_symlink() != other.is_symlink():
        return False
    if one.is_symlink():
        return one.readlink() == other.readlink()
    same_kind = other.is_file() and one.stat().st_mode & 0o111 == other.stat().st_mode & 0o111
    return same_kind and filecmp.cmp(one, other, shallow=False)
