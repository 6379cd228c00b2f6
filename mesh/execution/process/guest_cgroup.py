"""Control groups for guests of the `process` engine: limits for a whole guest, and the way to freeze and kill all of it.

Version 2: a group in the daemon's subtree (`subtree`), which has the limits, and one in it, which has the processes. A guest that
makes user and cgroup namespaces of its own may mount the group of its processes, writable: so the limits are one above, and
`cgroup.max.descendants` there lets it make none below. Version 1 has one hierarchy for each controller, and a guest one group in
each, which needs root. Controllers that are not available are left out; `kinds` lists the others ("" is version 2 itself, which
freezes and kills). `subtree` makes the groups, and the guest's watcher removes them: standard library only, and little of it,
since each guest waits for its import.
"""

import contextlib
import errno
from pathlib import Path

from mesh.util import cgroups

CONTROLLERS = ("memory", "pids", "cpu", "io")
INNER = "guest"  # the group of version 2 that holds a guest's processes
PERIOD_US = 100_000  # the scheduler's period: the kernel's default
V2_FILES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max", "io": "io.max"}


class GuestGroup:
    """The control groups of one guest, one directory per hierarchy."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self._by_kind = directories

    @classmethod
    def of(cls, plain: dict[str, str]) -> "GuestGroup":
        return cls({kind: Path(path) for kind, path in plain.items()})

    def plain(self) -> dict[str, str]:
        return {kind: str(path) for kind, path in self._by_kind.items()}

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, self._by_kind.values())))

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(self._by_kind)

    def limit(
        self, memory_mib: int | None, cpus: float | None, pids: int, disk: tuple[str, int | None] | None = None
    ) -> None:
        """Set the limits. OSError if the kernel refuses one. `disk`: a device's number and the bytes per second it may move."""
        memory, tasks, cpu, io = (self._by_kind.get(kind) for kind in CONTROLLERS)
        if memory is not None and memory_mib is not None:
            _put(memory, ("memory.max", "memory.limit_in_bytes"), str(memory_mib << 20))
            with contextlib.suppress(OSError):  # swap accounting may be off
                _put(memory, ("memory.swap.max",), "0")
            with contextlib.suppress(OSError):
                _put(memory, ("memory.memsw.limit_in_bytes",), str(memory_mib << 20))
        if tasks is not None:
            _put(tasks, ("pids.max",), str(pids))
        if cpu is not None and cpus is not None:
            quota = max(1000, int(cpus * PERIOD_US))
            if (cpu / "cpu.max").exists():
                _put(cpu, ("cpu.max",), f"{quota} {PERIOD_US}")
            else:
                try:
                    _put(cpu, ("cpu.cfs_quota_us",), str(quota))
                except OSError as error:
                    if error.errno != errno.EINVAL:  # a lower limit of the parent group applies
                        raise
        if io is not None and disk is not None:
            _put(io, ("io.max",), f"{disk[0]} rbps={disk[1]} wbps={disk[1]}")

    def enter(self) -> None:
        """Move this process, and with it the processes that it starts later, into the groups."""
        for path in self.directories:
            inner = INNER if path == str(self._by_kind.get("")) else ""
            Path(path, inner, "cgroup.procs").write_text("0")

    def freeze(self) -> bool:
        """Stop all of the guest, forks included, with one write (`cgroup.freeze`); return whether this machine can."""
        return "" in self._by_kind and cgroups.freeze((self._by_kind[""],))

    def thaw(self) -> None:
        if "" in self._by_kind:
            cgroups.thaw(self._by_kind[""])

    def ran_out_of_memory(self) -> bool:
        memory = self._by_kind.get("memory")
        for name in ("memory.events", "memory.oom_control") if memory is not None else ():
            with contextlib.suppress(OSError):
                for line in Path(str(memory), name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1]) > 0
        return False

    def remove(self) -> None:
        """Remove the groups after the guest has ended. Blocks for up to REMOVE_S seconds."""
        cgroups.remove_groups(self.directories)


def _put(group: Path, names: tuple[str, ...], value: str) -> None:
    for name in names:
        if (group / name).exists():
            (group / name).write_text(value)
            return
