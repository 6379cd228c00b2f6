"""CPU use and memory pressure outside the mesh: the machine's, less those of this daemon, its helpers and its guests."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from mesh.util import cgroups
from mesh.util.processes import stat_of

SMOOTHED_S = 10.0  # a shorter burst hardly counts (own choice)
TICKS = os.sysconf("SC_CLK_TCK")  # per second


class Load:
    """Smoothed CPU use outside the mesh, in cores."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: tuple[float, float, float] | None = None  # when, seconds busy, of them ours
        self._cores: float | None = None

    def look(self, now: float, ours: Iterable[int] = ()) -> float | None:
        """Return smoothed cores; None at the first call. `ours`: the processes of helpers and guests."""
        try:
            busy_s = self._busy_s()
        except (OSError, IndexError, ValueError):
            return None
        states = (stat_of(pid, str(self._proc)) for pid in {os.getpid(), *ours})
        ours_s = sum(state.used for state in states if state is not None) / TICKS
        before, self._last = self._last, (now, busy_s, ours_s)
        if before is None or now <= before[0] or ours_s < before[2]:
            return self._cores  # the count of a guest that has ended is gone
        length_s = now - before[0]
        cores = max(0.0, busy_s - before[1] - (ours_s - before[2])) / length_s
        kept = math.exp(-length_s / SMOOTHED_S) if self._cores is not None else 0.0
        self._cores = cores * (1 - kept) + (self._cores or 0.0) * kept
        return self._cores

    def _busy_s(self) -> float:
        """Return the busy seconds of all processors since boot, without idle, I/O wait and stolen time."""
        with (self._proc / "stat").open() as file:
            user, nice, system, _, _, irq, softirq = (int(word) for word in file.readline().split()[1:8])
        return (user + nice + system + irq + softirq) / TICKS


def memory_wait(ours: Iterable[int] = ()) -> float | None:
    """Return the share of the last ten seconds, in per cent, in which a program outside the mesh waited for memory.

    It is the worst of the control groups that hold no guest ("some" of psi.rst in the documentation of Linux),
    so a guest that waits for memory of its own is not counted. None where the kernel shows none, or cannot tell guests apart.
    """
    _, root = cgroups.mounts().get("", ("", None))
    if root is None:
        return None
    found = (cgroups.groups_of(pid).get("") for pid in {os.getpid(), *ours})
    return _worst(root, {group for group in found if group is not None})


def _worst(group: Path, ours: set[Path]) -> float | None:
    if group in ours:
        return None
    try:
        if not any(group in own.parents for own in ours):
            return float((group / "memory.pressure").read_text().split("avg10=", 1)[1].split()[0])
        inside = [_worst(Path(entry.path), ours) for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
    except (OSError, IndexError, ValueError):  # it is gone, or the kernel was started with psi=0
        return None
    return max((share for share in inside if share is not None), default=None)
