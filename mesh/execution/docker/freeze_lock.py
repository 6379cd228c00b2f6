"""A lock between the watchdog and the daemon: which of them may freeze or thaw a container. Standard library only.

CRIU freezes and thaws what it dumps. Each container has one byte of an unnamed file, which is locked (fcntl(2)): a process that
dies releases its locks.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

DIGITS = 15  # hexadecimal digits of a container's id that fit a file offset (off_t)
LOOK_S = 0.05  # own choice


class FreezeLock:
    """Both processes share `descriptor`. A lock belongs to a process: two threads must not lock the same container."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("freeze-lock") if descriptor is None else descriptor

    def take(self, container: str) -> bool:
        """Lock a container; return whether this process now holds it."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(container))
        except BlockingIOError:
            return False
        return True

    def give(self, container: str) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _place(container))

    @contextlib.contextmanager
    def own(self, container: str, within_s: float) -> Iterator[None]:
        """Hold the lock of a container. Blocks; TimeoutError if it is not free within `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self.take(container):
            if time.monotonic() >= until:
                raise TimeoutError
            time.sleep(LOOK_S)
        try:
            yield
        finally:
            self.give(container)

    def close(self) -> None:
        os.close(self.descriptor)


def _place(container: str) -> int:
    return int(container[:DIGITS], 16)
