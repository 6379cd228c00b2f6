"""Files in the control directory of an attempt, through which the daemon and the guest talk.

The guest may put anything there while the daemon may be root: a link to a file of the host, a pipe that never ends, a directory
in place of a file. So links are not followed, nothing blocks, and every read is bounded.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from mesh.util import trees


def read_file(path: Path, limit: int) -> bytes:
    """Return at most `limit` + 1 bytes of a regular file; OSError if it is not one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.pread(descriptor, limit + 1, 0)
    finally:
        os.close(descriptor)


def put_file(path: Path, data: bytes) -> None:
    """Write a file atomically in place of anything that has its name. OSError if that fails."""
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if path.is_dir() and not path.is_symlink():
            moved = path.rename(fresh.with_suffix(".moved"))
            trees.remove(moved)  # if its job keeps filling it, it is removed with the attempt
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
