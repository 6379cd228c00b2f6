"""Ending one guest for sure, by the kernel alone: no engine is asked, no network, no disk, no event loop. Standard library only.

`press` sends SIGKILL to everything of the guest that can be found, in the ways that its entry in the register names: its first
process (with it goes a PID namespace), its control groups (frozen ones are thawed, or the signal would wait), what descends from
its watcher. It is pressed again until nothing is left, so that a program that forks faster ends too. Only where the kernel does
not let us, the engine is told to, and not waited for.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh.engine import cgroups
from mesh.engine.descent import Process, descendants_of, lives, process_of
from mesh.engine.register import Entry

ENGINE_AFTER_S = 0.05  # until the engine is told to do it as well; the kernel alone takes milliseconds; ours
ENGINE_EVERY_S = 1.0
GIVE_UP_S = 10.0  # a process may hang in a driver; ours
PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # between two looks


@dataclass(frozen=True)
class Struck:
    """What came of a guest: `processes` is how many were seen alive, `ms` from the order until none was."""

    job: str
    engine: str
    processes: int
    ms: float
    left: tuple[int, ...] = ()
    problem: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.left:
            return f"{self.problem or 'still there'}: processes {', '.join(map(str, self.left))} of job {self.job[:8]}"
        return f"job {self.job[:8]} ({self.engine}): {self.processes} processes gone after {self.ms:.1f} ms"


class Hunt:
    """Of one guest, from `begun` (of time.monotonic) on."""

    def __init__(self, entry: Entry, begun: float) -> None:
        self.entry = entry
        self.outcome: Struck | None = None
        self._begun = begun
        self._groups = tuple(map(Path, entry.groups))
        self._processes = 0
        self._denied = False
        self._engine_due = begun + ENGINE_AFTER_S

    def press(self) -> bool:
        """Whether it is over: nothing is left, or nothing more can be done; `outcome` says which."""
        self._processes = max(self._processes, self._census())
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
        elapsed_s = time.monotonic() - self._begun
        if alive and elapsed_s < GIVE_UP_S:
            self._ask_engine()
            return False
        problem = "" if not alive else "not permitted" if self._denied else "does not end"
        left = tuple(sorted(process.pid for process in alive))
        self.outcome = Struck(self.entry.job, self.entry.engine, self._processes, elapsed_s * 1e3, left, problem)
        return True

    def _census(self) -> int:
        """How many there are, at a glance."""
        head, watcher = self.entry.head, self.entry.watcher
        counts = [len(cgroups.pids_in(group)) for group in self._groups]
        if head is not None:
            counts.append(int(lives(head)))
        if watcher is not None and lives(watcher):
            counts.append(len(descendants_of(watcher.pid)))
        return max(counts, default=0)

    def _alive(self) -> set[Process]:
        """Everything of the guest that runs now."""
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
        except OSError:  # no descriptor is left: the number itself then, looked at the moment before
            if lives(process):
                with contextlib.suppress(OSError):
                    os.kill(process.pid, 9)

    def _ask_engine(self) -> None:
        """Tell the engine, and do not wait for what it says: it may be the one that hangs."""
        now = time.monotonic()
        if not self.entry.container or not self.entry.socket or now < self._engine_due:
            return
        self._engine_due = now + ENGINE_EVERY_S
        line = f"POST /containers/{self.entry.container}/kill HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(self.entry.socket)
            connection.send(line.encode())


def run(entries: Iterable[Entry]) -> list[Struck]:
    """End them all, side by side; at most ten seconds."""
    begun = time.monotonic()
    hunts = [Hunt(entry, begun) for entry in entries]
    pause = PAUSE_S
    while left := [hunt for hunt in hunts if hunt.outcome is None]:
        if all([hunt.press() for hunt in left]):
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return [hunt.outcome for hunt in hunts if hunt.outcome is not None]


def _family(watcher: Process) -> set[Process]:
    """What descends from it. A number that is given again between the look and the name belongs to nobody of ours then."""
    named = {process_of(pid) for pid in descendants_of(watcher.pid)}
    now = descendants_of(watcher.pid)
    return {process for process in named if process is not None and process.pid in now and lives(process)}


def _in_container(container: str) -> set[Process]:
    """For one whose first process nobody has noted yet: everything whose control group is called after the container."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            process = process_of(int(name))
            with contextlib.suppress(OSError):
                if process is not None and container in Path("/proc", name, "cgroup").read_text() and lives(process):
                    found.add(process)
    return found
