"""Capabilities that this process was given beyond its user's rights (`mesh install-service --allow`).

The service manager gives them as ambient ones, which every program started from here would have too, guests above all. So they
are kept, and lent to a program of the system for its one call. Without any, or as root, nothing here changes anything.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

NET_ADMIN, SYS_ADMIN, BPF = 12, 21, 39  # linux/capability.h
PR_CAP_AMBIENT, RAISE, LOWER, CLEAR_ALL = 47, 2, 3, 4  # linux/prctl.h

_libc = ctypes.CDLL(None)


def keep() -> None:
    """Hand none of them on from here. Before any other thread is there: each has its own ambient set."""
    _libc.prctl(PR_CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)


@contextmanager
def lent(*capabilities: int) -> Iterator[None]:
    """To the programs that this thread starts meanwhile. One that this process has not, it cannot lend."""
    for capability in capabilities:
        _libc.prctl(PR_CAP_AMBIENT, RAISE, capability, 0, 0)
    try:
        yield
    finally:
        for capability in capabilities:
            _libc.prctl(PR_CAP_AMBIENT, LOWER, capability, 0, 0)
