"""Who descends from a process, by the kernel's account. Standard library only."""

import contextlib
import os


def children_of(pid: int) -> list[int]:
    """Direct children of a process, of all its threads."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                found += [int(child) for child in file.read().split()]
    return found
