"""The control directory of an attempt, in which the daemon and the guest leave each other files.

The guest may put anything there, and the daemon may be root: a link to a file of the host, a pipe that never ends, a directory
under the name of a file. So nothing is followed, waited for or read without a bound.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from mesh import trees


def read_file(path: Path, limit: int) -> bytes:
    """At most `limit` bytes and one more, of a plain file; OSError if it is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
        return os.pread(descriptor, limit + 1, 0)
    finally:
        os.close(descriptor)


def put_file(path: Path, data: bytes) -> None:
    """Whole or not at all, in place of whatever is there. OSError if it cannot be."""
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if path.is_dir() and not path.is_symlink():
            moved = path.rename(fresh.with_suffix(".moved"))
            trees.remove(moved)  # or, if its job goes on filling it, with the attempt
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
