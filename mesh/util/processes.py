"""Processes and their descendants, from /proc. Standard library only.

A process that has gone is an answer. Any other error is raised, as when no descriptor is free: the kill-switch must not take it
for an end.
"""

import contextlib
import errno
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

# Errors of a process that has been reaped, or that is hidden from this user (proc(5), hidepid).
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
PER_USER = (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)
USER_SHARE = 8  # a guest gets an eighth of what its user may have (own choice)
SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # errors that are about this process or machine alone


class Stat(NamedTuple):
    """A process's state as in `ps`, its parent, the number of its terminal (0: none), and times in clock ticks.

    `used`: of the CPU, by it and its ended children; `started`: since boot.
    """

    state: str
    parent: int
    terminal: int
    used: int
    started: int


class Process(NamedTuple):
    """Exactly one process: an id may be reused, but not with the same start time on the same boot (proc(5), field 22)."""

    pid: int
    started: int

    def open(self) -> int | None:
        """Return a pidfd of this process, readable once it has ended; None if it has been reaped.

        The pidfd is opened before the start time is compared, so a match proves that the pidfd means this process.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        found = None
        try:
            found = process_of(self.pid)
        finally:
            if found != self:
                os.close(descriptor)
        return descriptor if found == self else None

    def kill(self) -> None:
        """Send SIGKILL if it still exists; PermissionError if that is not allowed."""
        descriptor = self.open()
        if descriptor is not None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def no_core_dumps() -> None:
    """Keep the memory of this process, and of those that it starts, out of core dumps, for good."""
    most = core_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def core_limit() -> int:
    """Return the RLIMIT_CORE of a process without core dumps.

    The kernel pipes a dump to a handler such as systemd-coredump whatever the limit, unless that is 1 (fs/coredump.c). 0 where
    the hard limit does not allow that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return 1 if hard else 0


def user_limits() -> dict[int, int]:
    """Return a guest's share of what the kernel counts for all processes of a user together, by the resource: its limit here."""
    hard = {kind: resource.getrlimit(kind)[1] for kind in PER_USER}
    return {kind: most // USER_SHARE for kind, most in hard.items() if most != resource.RLIM_INFINITY}


def keep_to_user_limits() -> None:
    """Keep this process, and those that it starts, to the share of one guest, for good."""
    for kind, most in user_limits().items():
        resource.setrlimit(kind, (most, most))


def lines_of(path: str) -> list[str]:
    """Return the lines of a file of /proc that are not empty.

    Users choose some of its bytes, such as names of programs, files, mounts and groups. They need not be UTF-8, and only a
    newline ends a line.
    """
    with open(path, "rb") as file:  # noqa: PTH123
        return [line for line in os.fsdecode(file.read()).split("\n") if line]


def name_of(pid: int) -> str:
    """Return the name of a process's program. OSError if it has gone."""
    with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123
        return file.read().decode(errors="replace").strip()


def stat_of(pid: int, proc: str = "/proc") -> Stat | None:
    """Return a process's state; None once it has been reaped."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
        used = sum(map(int, fields[11:15]))
        return Stat(fields[0].decode(), int(fields[1]), int(fields[4]), used, int(fields[19]))
    except GONE:
        return None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user at the other end of a Unix socket, by the kernel's word (unix(7))."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def process_of(pid: int) -> Process | None:
    found = stat_of(pid)
    return Process(pid, found.started) if found is not None else None


def lives(process: Process) -> bool:
    """Return whether any of its threads still runs: a zombie's other threads may."""
    found = stat_of(process.pid)
    if found is None or found.started != process.started:
        return False
    if found.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1  # noqa: PTH208
    except GONE:
        return False


def stands_still(pid: int) -> bool:
    """Return whether it will run none of its program until it is continued.

    It is stopped, has ended, or waits in the kernel with a pending stop (as after vfork(2) with a stopped child).
    """
    found = stat_of(pid)
    if found is None or found.state in "TtZX":
        return True
    if found.state != "D":
        return False
    return _has_signal(pid, signal.SIGSTOP, "SigPnd:", "ShdPnd:")


def catches(pid: int, number: int) -> bool:
    """Return whether it has a handler for this signal now."""
    return _has_signal(pid, number, "SigCgt:")


def _has_signal(pid: int, number: int, *masks: str) -> bool:
    """Return whether a signal is in one of these masks of proc_pid_status(5)."""
    with contextlib.suppress(OSError):
        lines = lines_of(f"/proc/{pid}/status")
        return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith(masks))
    return False


def children_of(pid: int, spend: Callable[[], None] = lambda: None) -> list[int]:
    """Return the direct children of all threads of a process. `spend` is called for each thread, and may raise."""
    found = []
    with contextlib.suppress(*GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            spend()
            with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                found += [int(child) for child in file.read().split()]
    return found


def descendants_of(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    queue = [pid]
    while queue:
        children = [child for child in children_of(queue.pop()) if child not in found]
        found.update(children)
        queue.extend(children)
    return found
