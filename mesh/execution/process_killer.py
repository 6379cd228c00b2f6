"""The process killer: ends one guest through the kernel alone. It needs no engine, network, disk or event loop.

Standard library only.
A strike sends SIGKILL to what ends the guest as a whole: its first process (and with it a PID namespace) and its control groups.
All guests are struck before the first is looked at, since a guest chooses how long a look takes. A look kills each process that
the registry entry helps to find: in its groups (frozen ones are thawed, or the signal would wait) and below its watcher. Both
repeat until nothing is left, so a program that forks fast ends too. After a moment the engine is asked to kill it as well; its
answer is not awaited.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh.execution.guest_registry import GuestEntry
from mesh.util import cgroups
from mesh.util.budget import Budget, OverBudget
from mesh.util.processes import GONE, Process, children_of, lines_of, lives, process_of

ENGINE_AFTER_S = 0.05  # until the engine is asked too; the kernel alone takes milliseconds (own choice)
ENGINE_EVERY_S = 1.0
LOOK_S = 0.05  # for one look at one guest; a process takes about 50 us (own choice)
GIVE_UP_S = 10.0  # a process may hang in a driver (own choice)
PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # between two steps


@dataclass(frozen=True)
class KillResult:
    """The result of killing one guest: processes seen alive, and the milliseconds from the order until none was.

    It is looked at after the first signal, so few processes are seen of a guest that ends fast: at least one, if it lived.
    `problem`: why some could not be killed, or whether that is unknown; `left`: their ids, as far as they are known.
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
        self._begun, self._struck_at = begun, 0.0
        self._groups = tuple(map(Path, entry.groups))
        self._processes = 0
        self._denied = False
        self._engine_due = begun + ENGINE_AFTER_S

    def strike(self) -> None:
        """Send SIGKILL through all that ends the guest as a whole. What that costs does not depend on the guest."""
        self._struck_at = self._struck_at or time.monotonic()
        if not self._processes:
            self._processes = int(self._is_seen_alive())
        if self._grip is not None:
            self._grip.kill()
        if self.entry.head is not None:
            with contextlib.suppress(OSError):  # no descriptor is free
                self._kill(self.entry.head)
        for group in self._groups:
            cgroups.kill_all(group)

    def look(self) -> bool:
        """Kill what is found of it; return whether it is over. `outcome` then says whether anything is left.

        Call it after `strike`. What cannot be looked for, as when no descriptor is free, is left: it is tried again. A look takes
        at most `LOOK_S`, however many processes there are; those found in that time are killed.
        """
        found, unknown = set[Process](), ""
        try:
            try:
                self._find(found, Budget(LOOK_S).spend)
            except OverBudget as error:
                unknown = str(error)
            alive = {process for process in found if lives(process)}
            for process in alive:
                self._kill(process)
        except Exception as error:
            alive, unknown = set(), str(error)
        for group in self._groups:
            cgroups.thaw(group)
        self._processes = max(self._processes, len(alive), int(bool(unknown)))
        problem = f"it is unknown whether it has ended: {unknown}" if unknown else ""
        if alive:
            problem = "not permitted" if self._denied else "does not end"
        now = time.monotonic()
        if problem and now - self._struck_at < GIVE_UP_S:
            self._ask_engine()
            return False
        left = tuple(sorted(process.pid for process in alive))
        elapsed_ms = (now - self._begun) * 1e3
        self.outcome = KillResult(self.entry.job, self.entry.engine, self._processes, elapsed_ms, left, problem)
        return True

    def _is_seen_alive(self) -> bool:
        """Return whether it is alive, as far as one question can tell."""
        with contextlib.suppress(OSError):
            if self.entry.head is not None and lives(self.entry.head):
                return True
        return any(map(cgroups.is_populated, self._groups))

    def _find(self, found: set[Process], spend: Callable[[], None]) -> None:
        """Add the processes of the guest; those added before an error are its own too."""
        entry = self.entry
        if entry.head is not None:
            found.add(entry.head)
        for group in self._groups:
            found.update(cgroups.processes_in(group, spend))
        if entry.watcher is not None and lives(entry.watcher):
            found.update(_family(entry.watcher, spend))
        if entry.container and entry.head is None:
            found.update(_in_container(entry.container))

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
        for kill in left:
            kill.strike()
        if all([kill.look() for kill in left]):
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return [kill.outcome for kill in kills if kill.outcome is not None]


def _family(watcher: Process, spend: Callable[[], None]) -> Iterator[Process]:
    """Yield the descendants of a watcher, parents first. Listing twice excludes a number that was reused in between."""
    parents, seen = deque([watcher.pid]), set[int]()
    while parents:
        parent = parents.popleft()
        named = {pid: process_of(pid) for pid in children_of(parent, spend) if pid not in seen}
        seen.update(named)
        now = set(children_of(parent, spend))
        for pid, process in named.items():
            spend()
            parents.append(pid)
            if process is not None and pid in now:
                yield process


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
