"""Linux capabilities that this process has beyond its user's rights (`mesh install-service --allow`).

The service manager grants them as ambient capabilities, which every child process would inherit, guests above all. So they are
removed from the ambient set and lent to single system programs. Without capabilities, or as root, this module does nothing.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from mesh.util.processes import lines_of

NET_ADMIN, SYS_ADMIN, BPF = 12, 21, 39  # linux/capability.h
PR_CAP_AMBIENT, RAISE, LOWER, CLEAR_ALL = 47, 2, 3, 4  # linux/prctl.h

_libc = ctypes.CDLL(None)


def keep() -> None:
    """Clear the ambient set. Call it before other threads exist: each has its own ambient set."""
    _libc.prctl(PR_CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)


def has(capability: int, process: int | str = "self") -> bool:
    """Tell whether a process may use a capability. OSError: it has ended."""
    line = next(line for line in lines_of(f"/proc/{process}/status") if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> capability & 1)


@contextmanager
def lent(*capabilities: int) -> Iterator[None]:
    """Lend capabilities to the programs that this thread starts inside the block. The process must have them."""
    for capability in capabilities:
        _libc.prctl(PR_CAP_AMBIENT, RAISE, capability, 0, 0)
    try:
        yield
    finally:
        for capability in capabilities:
            _libc.prctl(PR_CAP_AMBIENT, LOWER, capability, 0, 0)
