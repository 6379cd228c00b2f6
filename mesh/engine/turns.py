"""Who of two processes may freeze a container or let it go: its warden, or the daemon that has it dumped. Standard library only.

CRIU freezes and thaws what it dumps as it needs. A byte of a file without a name stands for each container, and is locked
(fcntl(2)): who dies gives back what he has.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

DIGITS = 15  # of a container's number, hexadecimal: as far as a file can reach (off_t)
LOOK_S = 0.05  # ours


class Turns:
    """Both processes have the same `descriptor`. Locks are of a process: two of its threads must not want the same container."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("turns") if descriptor is None else descriptor

    def take(self, container: str) -> bool:
        """Whether it is ours now, or was."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(container))
        except BlockingIOError:
            return False
        return True

    def give(self, container: str) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _place(container))

    @contextlib.contextmanager
    def own(self, container: str, within_s: float) -> Iterator[None]:
        """Blocks until it is ours; TimeoutError."""
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
