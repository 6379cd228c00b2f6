"""Who descends from a process, and who a process is, by the kernel's account. Standard library only."""

import contextlib
import os
import signal
from typing import NamedTuple


class Stat(NamedTuple):
    """Of a process: its state as `ps` shows it, its parent, and when it was started, in clock ticks since the machine was."""

    state: str
    parent: int
    started: int


class Process(NamedTuple):
    """One process and no other: a number is given again, but not with the same start on the same boot (proc(5), field 22)."""

    pid: int
    started: int

    def open(self) -> int | None:
        """A descriptor that means this process for ever, readable once it has ended; None if it has been reaped.

        The descriptor is opened before the start is compared: who has that number afterwards, and this start, had it before.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        found = stat_of(self.pid)
        if found is None or found.started != self.started:
            os.close(descriptor)
            return None
        return descriptor

    def kill(self) -> None:
        """SIGKILL to it, if it is still there; PermissionError if it may not be ended from here."""
        descriptor = self.open()
        if descriptor is not None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def stat_of(pid: int) -> Stat | None:
    """None once it has been reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
        return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))
    except (OSError, IndexError):
        return None


def process_of(pid: int) -> Process | None:
    found = stat_of(pid)
    return Process(pid, found.started) if found is not None else None


def lives(process: Process) -> bool:
    """Whether any of it still runs: a zombie does not, unless it is but the first thread of others that do."""
    found = stat_of(process.pid)
    if found is None or found.started != process.started:
        return False
    if found.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1  # noqa: PTH208
    except OSError:
        return False


def stands_still(pid: int) -> bool:
    """Whether it runs nothing of its program until it is told to go on: it is stopped, has ended, or waits in the kernel with a
    stop to come before it returns (as one that has started another by vfork(2), which was stopped)."""
    found = stat_of(pid)
    if found is None or found.state in "TtZX":
        return True
    if found.state != "D":
        return False
    return _has_signal(pid, signal.SIGSTOP, "SigPnd:", "ShdPnd:")


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for this signal now."""
    return _has_signal(pid, number, "SigCgt:")


def _has_signal(pid: int, number: int, *masks: str) -> bool:
    """In one of these masks of proc_pid_status(5)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in file if line.startswith(masks))
    return False


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
