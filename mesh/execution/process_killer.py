"""The process killer: ends one guest through the kernel alone. It needs no engine, network, disk or event loop.

Standard library only.
Each step sends SIGKILL to everything of the guest that its registry entry helps to find: its first process (and with it a PID
namespace), its control groups (frozen ones are thawed, or the signal would wait) and the descendants of its watcher. Steps repeat
until nothing is left, so a program that forks fast ends too. After a moment the engine is asked to kill it as well; its answer is
not awaited.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh.execution.guest_registry import GuestEntry
from mesh.util import cgroups
from mesh.util.processes import GONE, Process, descendants_of, lines_of, lives, process_of

ENGINE_AFTER_S = 0.05  # until the engine is asked too; the kernel alone takes milliseconds (own choice)
ENGINE_EVERY_S = 1.0
GIVE_UP_S = 10.0  # a process may hang in a driver (own choice)
PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # between two steps


@dataclass(frozen=True)
class KillResult:
    """The result of killing one guest: processes seen alive, and the milliseconds from the order until none was.

    `problem`: why some could not be, or whether that is unknown; `left`: their ids, as far as they are known.
    """

    job: str
    engine: str
    processes: int
    ms: float
    left: tuple[int, ...] = ()
    problem: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.problem:
            numbers = f"processes {', '.join(map(str, self.left))} of " if self.left else ""
            return f"{self.problem}: {numbers}job {self.job[:8]}"
        return f"job {self.job[:8]} ({self.engine}): {self.processes} processes gone after {self.ms:.1f} ms"


class Grip:
    """Ends a guest's first process and all of its control groups without a free descriptor: what that takes is open already.

    OSError if it cannot be opened. Thread-safe.
    """

    def __init__(self, entry: GuestEntry) -> None:
        self._lock = threading.Lock()
        self._groups = list[int]()
        self._head = entry.head.open() if entry.head is not None else None
        try:
            for group in entry.groups:
                with contextlib.suppress(FileNotFoundError):  # version 1, or it is gone
                    self._groups.append(os.open(Path(group, cgroups.KILL), os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        with self._lock:
            if self._head is not None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._head, signal.SIGKILL)
            for group in self._groups:
                with contextlib.suppress(OSError):
                    os.write(group, b"1")

    def close(self) -> None:
        with self._lock:
            for descriptor in (*self._groups, *((self._head,) if self._head is not None else ())):
                os.close(descriptor)
            self._groups, self._head = [], None


class GuestKill:
    """The killing of one guest, ordered at `begun` (time.monotonic). `grip`: of a guest that this process has started."""

    def __init__(self, entry: GuestEntry, begun: float, grip: Grip | None = None) -> None:
        self.entry, self._grip = entry, grip
        self.outcome: KillResult | None = None
        self._begun = begun
        self._groups = tuple(map(Path, entry.groups))
        self._processes = 0
        self._denied = False
        self._engine_due = begun + ENGINE_AFTER_S

    def step(self) -> bool:
        """Kill all that is found once; return whether it is over. `outcome` then says whether anything is left.

        What cannot be looked for, as when no descriptor is free, is left: it is tried again.
        """
        left, problem = tuple[int, ...](), ""
        try:
            alive = self._strike()
        except Exception as error:
            problem = f"it is unknown whether it has ended: {error}"
            self._processes = max(self._processes, 1)
        else:
            left = tuple(sorted(process.pid for process in alive))
            problem = "" if not left else "not permitted" if self._denied else "does not end"
        elapsed_s = time.monotonic() - self._begun
        if problem and elapsed_s < GIVE_UP_S:
            self._ask_engine()
            return False
        self.outcome = KillResult(self.entry.job, self.entry.engine, self._processes, elapsed_s * 1e3, left, problem)
        return True

    def _strike(self) -> set[Process]:
        """Kill all that is found; return what was alive."""
        try:
            self._processes = max(self._processes, self._census())
        finally:
            if self._grip is not None:
                self._grip.kill()
        if self.entry.head is not None:
            self._kill(self.entry.head)
        for group in self._groups:
            cgroups.kill_all(group)
        alive = self._alive()
        self._processes = max(self._processes, len(alive))
        for process in alive:
            self._kill(process)
        for group in self._groups:
            cgroups.thaw(group)
        return alive

    def _census(self) -> int:
        """Return a quick count of its processes."""
        head, watcher = self.entry.head, self.entry.watcher
        counts = [len(cgroups.pids_in(group)) for group in self._groups]
        if head is not None:
            counts.append(int(lives(head)))
        if watcher is not None and lives(watcher):
            counts.append(len(descendants_of(watcher.pid)))
        return max(counts, default=0)

    def _alive(self) -> set[Process]:
        """Return all processes of the guest that run now."""
        entry = self.entry
        found = {entry.head} if entry.head is not None else set()
        for group in self._groups:
            found |= cgroups.processes_in(group)
        if entry.watcher is not None and lives(entry.watcher):
            found |= _family(entry.watcher)
        if entry.container and entry.head is None:
            found |= _in_container(entry.container)
        return {process for process in found if lives(process)}

    def _kill(self, process: Process) -> None:
        try:
            process.kill()
        except PermissionError:
            self._denied = True

    def _ask_engine(self) -> None:
        """Ask the engine to kill it, without waiting for the answer: the engine may be what hangs."""
        now = time.monotonic()
        if not self.entry.container or not self.entry.socket or now < self._engine_due:
            return
        self._engine_due = now + ENGINE_EVERY_S
        line = f"POST /containers/{self.entry.container}/kill HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(self.entry.socket)
            connection.send(line.encode())


def run(entries: Iterable[GuestEntry]) -> list[KillResult]:
    """Kill all these guests in parallel, for at most GIVE_UP_S seconds."""
    begun = time.monotonic()
    kills = [GuestKill(entry, begun) for entry in entries]
    pause = PAUSE_S
    while left := [kill for kill in kills if kill.outcome is None]:
        if all([kill.step() for kill in left]):
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return [kill.outcome for kill in kills if kill.outcome is not None]


def _family(watcher: Process) -> set[Process]:
    """Return the descendants of a watcher. Listing twice excludes a number that was reused in between."""
    named = {process_of(pid) for pid in descendants_of(watcher.pid)}
    now = descendants_of(watcher.pid)
    return {process for process in named if process is not None and process.pid in now and lives(process)}


def _in_container(container: str) -> set[Process]:
    """Return all processes whose control group is named after the container; used before its first process is known."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            process = process_of(int(name))
            with contextlib.suppress(*GONE):
                if (
                    process is not None
                    and any(container in line for line in lines_of(f"/proc/{name}/cgroup"))
                    and lives(process)
                ):
                    found.add(process)
    return found
