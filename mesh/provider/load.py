"""CPU use outside the mesh: the machine's total, less that of this daemon and its guests."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from mesh.util.processes import descendants_of

SMOOTHED_S = 10.0  # a shorter burst hardly counts (own choice)
TICKS = os.sysconf("SC_CLK_TCK")  # per second


class Load:
    """Smoothed CPU use outside the mesh, in cores."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: tuple[float, float, float] | None = None  # when, seconds busy, seconds of guests
        self._cores: float | None = None

    def look(self, now: float, guests: Iterable[int] = ()) -> float | None:
        """Return smoothed cores; None at the first call. `guests`: their processes that are not descendants of the daemon."""
        try:
            busy_s = self._busy_s()
        except (OSError, IndexError, ValueError):
            return None
        me = os.getpid()
        guests_s = sum(self._used_s(pid) for pid in {me, *descendants_of(me), *guests})
        before, self._last = self._last, (now, busy_s, guests_s)
        if before is None or now <= before[0] or guests_s < before[2]:
            return self._cores  # the count of a guest that has ended is gone
        length_s = now - before[0]
        cores = max(0.0, busy_s - before[1] - (guests_s - before[2])) / length_s
        kept = math.exp(-length_s / SMOOTHED_S) if self._cores is not None else 0.0
        self._cores = cores * (1 - kept) + (self._cores or 0.0) * kept
        return self._cores

    def _busy_s(self) -> float:
        """Return the busy seconds of all processors since boot, without idle, I/O wait and stolen time."""
        with (self._proc / "stat").open() as file:
            user, nice, system, _, _, irq, softirq = (int(word) for word in file.readline().split()[1:8])
        return (user + nice + system + irq + softirq) / TICKS

    def _used_s(self, pid: int) -> float:
        """Return the CPU seconds of a process, with those of its ended children."""
        try:
            words = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return sum(int(word) for word in words[11:15]) / TICKS
        except (OSError, IndexError, ValueError):
            return 0.0
