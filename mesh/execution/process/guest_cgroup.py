"""Control groups for guests of the `process` engine: limits for a whole guest, and one more way to kill all of it.

Version 1 (one hierarchy per controller): a group below the daemon's own group in each, which needs root. Version 2: the same, or
a subtree delegated to the daemon (systemd's `Delegate=yes`); the daemon first moves itself to a leaf, since a group whose
children have controllers may hold no processes (cgroups(7)). Controllers that are not available are left out; `kinds` lists the
others. Standard library only: the guest's watcher removes the groups.
"""

import contextlib
import errno
import os
import secrets
from pathlib import Path

from mesh.util.cgroups import mounts, remove_groups

PARENT, DAEMON = "campus-mesh", "campus-mesh-daemon"
PERIOD_US = 100_000  # the scheduler's period: the kernel's default
CONTROLLERS = ("memory", "pids", "cpu")
V2_FILES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}
TRIES = 10


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

    def limit(self, memory_mib: int | None, cpus: float | None, pids: int) -> None:
        """Set the limits. OSError if the kernel refuses one."""
        memory, tasks, cpu = (self._by_kind.get(kind) for kind in CONTROLLERS)
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

    def enter(self) -> None:
        """Move this process, and with it the processes that it starts later, into the groups."""
        for path in self.directories:
            Path(path, "cgroup.procs").write_text("0")

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
        remove_groups(self.directories)


def make_group() -> GuestGroup | None:
    """Make the groups of a new guest; None if the daemon may make none."""
    name = f"guest-{secrets.token_hex(8)}"
    made: dict[str, Path] = {}
    for kind in ("", "freezer", *CONTROLLERS):
        parent = _parent(kind)
        if parent is None:
            continue
        if not _made(parent, name, kind):
            continue
        made[kind] = parent / name
        if kind == "":
            made |= {kind: parent / name for kind, file in V2_FILES.items() if (parent / name / file).exists()}
    return GuestGroup(made) if made else None


def _made(parent: Path, name: str, kind: str) -> bool:
    for _ in range(TRIES):
        try:
            parent.mkdir(exist_ok=True)
            if kind == "":
                _enable(parent)
            (parent / name).mkdir()
        except FileNotFoundError:  # the parent was removed with another guest's group in between
            continue
        except OSError:
            return False
        return True
    return False


def _parent(kind: str) -> Path | None:
    """Return the parent of new groups of this kind: below the group of this process."""
    root, mounted = mounts().get(kind, ("", None))
    if mounted is None:
        return None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.removesuffix(f"/{DAEMON}")
            if kind in controllers.split(",") and own.startswith(root.rstrip("/")):
                return mounted / own[len(root.rstrip("/")) :].lstrip("/") / PARENT
    return None


def _enable(parent: Path) -> None:
    """Enable controllers for groups of version 2 below this one, as far as they are delegated."""
    above = parent.parent
    try:
        wanted = [name for name in (above / "cgroup.controllers").read_text().split() if name in CONTROLLERS]
        if not wanted:
            return
        if (above / "cgroup.type").exists():  # the root group has no type, and may hold processes beside children
            leaf = above / DAEMON
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        for group in (above, parent):
            (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError:
        return


def _put(group: Path, names: tuple[str, ...], value: str) -> None:
    for name in names:
        if (group / name).exists():
            (group / name).write_text(value)
            return
