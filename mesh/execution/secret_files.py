"""Secret files: files of guests in memory, in a directory of this node that is emptied when it starts.

The directory is on a tmpfs, so no file system keeps it; the kernel may still swap its pages out. A daemon that is killed leaves
its files in memory until its next start, or the machine's.
"""

import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from mesh.util import trees
from mesh.util.mounts import mounts

IN_MEMORY = {"tmpfs", "ramfs"}
VARIABLES = ".variables"  # a file that sets the variables of a container


class NoMemoryFiles(OSError):
    """No directory of this machine is in memory and this user's to write."""


class GuestSecrets(msgspec.Struct, frozen=True):
    """The secrets of one guest: variables, and a directory with files. Its text does not show them."""

    variables: dict[str, str] = {}
    directory: str | None = None

    def __repr__(self) -> str:
        return f"GuestSecrets({len(self.variables)} variables, directory={self.directory!r})"


class SecretFiles:
    """The secret files of this node's guests, a directory for each attempt."""

    def __init__(self, node: bytes, bases: tuple[str, ...] | None = None) -> None:
        self._prefix = f"mesh-secrets-{node.hex()[:16]}"
        # Another user could take a name that they know.
        self._name = f"{self._prefix}-{os.urandom(8).hex()}"
        self._bases = memory_bases() if bases is None else bases

    @property
    def root(self) -> Path:
        """Return the directory; NoMemoryFiles if this machine has no place for it."""
        for base in self._bases:
            if base and os.access(base, os.W_OK | os.X_OK) and file_system_of(Path(base)) in IN_MEMORY:
                return Path(base) / self._name
        raise NoMemoryFiles("this machine has no directory in memory for secrets (/dev/shm, $XDG_RUNTIME_DIR)")

    def left(self) -> list[Path]:
        """Return the directories that are there, also those of earlier runs."""
        return own_directories(self._bases, self._prefix)

    def clear(self) -> None:
        """Remove what an earlier run has left."""
        for place in self.left():
            trees.remove(place)

    def put(self, attempt: str, files: Mapping[str, bytes]) -> Path:
        """Write an attempt's files, readable for their owner only; return their directory."""
        root = self.root
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NoMemoryFiles(f"{root} is not a closed directory of this user")
        place = root / attempt
        trees.remove(place)
        place.mkdir(mode=0o700)
        for name, data in files.items():
            descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o400)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        place.chmod(0o500)
        return place

    def remove(self, attempt: str) -> None:
        """Remove an attempt's files, if there are any."""
        for place in self.left():
            trees.remove(place / attempt)


def own_directories(bases: Iterable[str], prefix: str) -> list[Path]:
    """Return the directories of this user in these places whose names begin like that."""
    places = (place for base in bases if base for place in Path(base).glob(f"{prefix}*"))
    return [place for place in places if _is_own_directory(place)]


def _is_own_directory(place: Path) -> bool:
    """Tell whether it is a directory of this user. In /dev/shm others make links and directories of any name, and remove them."""
    with suppress(OSError):
        found = place.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def shell_lines(variables: Mapping[str, str]) -> bytes:
    """Return the lines that set these variables in a POSIX shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()).encode()


def memory_bases() -> tuple[str, ...]:
    """Return the directories of this machine that are in memory, the most private first; some may not exist."""
    return (os.environ.get("XDG_RUNTIME_DIR", ""), "/run" if os.getuid() == 0 else "", "/dev/shm")


def file_system_of(path: Path) -> str:
    """Return the kind of the file system that holds a path."""
    device = path.stat().st_dev
    mine = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in mounts() if mount.device == mine), "")
