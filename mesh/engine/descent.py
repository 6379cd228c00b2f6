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


def descendants_of(pid: int) -> set[int]:
    """Its children, theirs, and so on."""
    found: set[int] = set()
    queue = [pid]
    while queue:
        children = [child for child in children_of(queue.pop()) if child not in found]
        found.update(children)
        queue.extend(children)
    return found
