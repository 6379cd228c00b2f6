"""Control groups for a guest of the `process` engine, where the daemon may make some: limits that hold for all of it together,
and one more way to end it whole.

Version 1 (each controller has a hierarchy of its own): below the daemon's own group of each, which takes root. Version 2: the
same, or a subtree that was delegated to the daemon (systemd's `Delegate=yes`); the daemon moves itself to a leaf there first,
since a group with controllers for its children has no processes (cgroups(7)). What cannot be had is left out, and `kinds` says
what there is. Standard library only: the guest's watcher removes them.
"""

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from mesh.engine.cgroups import mounts

PARENT, DAEMON = "campus-mesh", "campus-mesh-daemon"
PERIOD_US = 100_000  # of the scheduler's accounts: the kernel's default
CONTROLLERS = ("memory", "pids", "cpu")
V2_FILES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}
TRIES = 10
REMOVE_S, LOOK_S = 2.0, 0.01  # until a group whose last process has ended can be removed; ours


class GuestGroup:
    """`directories` are the guest's own, one for each hierarchy; a process enters by writing 0 to their `cgroup.procs`."""

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
        """OSError if the kernel does not take one."""
        memory, tasks, cpu = (self._by_kind.get(kind) for kind in CONTROLLERS)
        if memory is not None and memory_mib is not None:
            _put(memory, ("memory.max", "memory.limit_in_bytes"), str(memory_mib << 20))
            with contextlib.suppress(OSError):  # where swap is not accounted for
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
                    if error.errno != errno.EINVAL:  # the group above may have less, and holds it to that
                        raise

    def enter(self) -> None:
        """This process, and what it starts from now on."""
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
        """Once nothing of the guest is left. Blocks for up to two seconds."""
        remove_groups(self.directories)


def make_group() -> GuestGroup | None:
    """A new one; None where the daemon may make none."""
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
        except FileNotFoundError:  # somebody's last group has just gone, and its parent with it
            continue
        except OSError:
            return False
        return True
    return False


def remove_groups(directories: tuple[str, ...]) -> None:
    """Whichever of these are empty, or become so in a moment."""
    deadline = time.monotonic() + REMOVE_S
    left = list(map(Path, directories))
    while left and time.monotonic() < deadline:
        left = [path for path in left if not _removed(path)]
        if left:
            time.sleep(LOOK_S)
    for parent in {path.parent for path in map(Path, directories)}:
        with contextlib.suppress(OSError):  # it has others
            parent.rmdir()


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _parent(kind: str) -> Path | None:
    """Where groups of this kind are made: below the group that this process is in."""
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
    """Let groups of version 2 below this one have controllers. Nothing where there are none, or they are not ours to give."""
    above = parent.parent
    try:
        wanted = [name for name in (above / "cgroup.controllers").read_text().split() if name in CONTROLLERS]
        if not wanted:
            return
        if (above / "cgroup.type").exists():  # the root has none, and may have processes beside children
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
