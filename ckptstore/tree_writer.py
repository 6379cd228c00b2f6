"""Writer of a stranger's tree: below one directory, and nowhere else.

The kernel never resolves a path of the stranger. Each component is opened on its own in the directory before it, and no link is
followed (openat(2) with O_NOFOLLOW), which is what openat2(2) does with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS. So it does not
matter which links the tree holds, or what the paths that it came with would mean to anybody else (CVE-2025-4517, CVE-2007-4559).
"""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ckptstore.manifest import check_link, check_path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")


class TreeWriter:
    """Writes files, directories and links below `root`, which exists. Paths begin with `prefix`, which is not written.

    Only permission bits are set: setuid, setgid and sticky bits are dropped. An entry that exists is an error, or is removed
    first if `replaces`; a directory is never removed, and may occur twice.
    """

    def __init__(self, root: Path, prefix: str = "", replaces: bool = False) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._at: list[str] = []  # the directory of the last entry; only that one is kept open
        self._here = self._root
        self._prefix, self._replaces = prefix, replaces
        self.directories = 0  # made so far; a path can imply 255 of them

    def __enter__(self) -> "TreeWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        os.close(self._root)

    def directory(self, path: str, mode: int) -> None:
        """Create a directory, or set the mode of one; its owner always has all rights to it."""
        os.fchmod(self._enter(self._parts(path)), mode & 0o777 | stat.S_IRWXU)

    def file(self, path: str, mode: int) -> int:
        """Create a file and return its descriptor."""
        *parents, name = self._parts(path)
        directory = self._enter(parents)
        descriptor = self._made(name, directory, lambda: os.open(name, NEW_FILE, 0o600, dir_fd=directory))
        os.fchmod(descriptor, mode & 0o777)
        return descriptor

    def link(self, path: str, target: str) -> None:
        """Create a symbolic link; BadPath if it would lead out of the tree."""
        check_link(path, target)
        *parents, name = self._parts(path)
        directory = self._enter(parents)
        self._made(name, directory, lambda: os.symlink(target, name, dir_fd=directory))

    def _parts(self, path: str) -> list[str]:
        check_path(path)
        return path.removeprefix(self._prefix).split("/")

    def _enter(self, parts: list[str]) -> int:
        """Open a directory, after making those of its parents that are missing."""
        if parts[: len(self._at)] != self._at:
            self._leave()
        for name in parts[len(self._at) :]:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self._here)
                self.directories += 1
            inner = os.open(name, DIRECTORY, dir_fd=self._here)
            if self._here != self._root:
                os.close(self._here)
            self._here = inner
            self._at.append(name)
        return self._here

    def _leave(self) -> None:
        if self._here != self._root:
            os.close(self._here)
        self._here, self._at = self._root, []

    def _made(self, name: str, directory: int, make: Callable[[], T]) -> T:
        try:
            return make()
        except FileExistsError:
            if not self._replaces:
                raise
        os.unlink(name, dir_fd=directory)
        return make()
