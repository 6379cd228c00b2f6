"""Control groups, versions 1 and 2: find a process's groups, list, kill, freeze and thaw. Standard library only."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from mesh.util import mounts as mount_table
from mesh.util.processes import GONE, SHORT, Process, lines_of, process_of

KILL, FREEZE, EVENTS = "cgroup.kill", "cgroup.freeze", "cgroup.events"  # of version 2 (the first since Linux 5.14)
FREEZER = "freezer.state"  # of version 1
CRUN_CHILD = (
    "container"  # the group below a container's own, with systemd and version 2 (crun(1), run.oci.systemd.subgroup)
)
LIMITS = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")  # of version 2
REMOVE_S, LOOK_S = 2.0, 0.01  # until a group whose last process has ended can be removed (own choice)


@cache
def mounts() -> dict[str, tuple[str, Path]]:
    """Return the visible root of each hierarchy and its mount point, by controller ("" is version 2); cached."""
    found: dict[str, tuple[str, Path]] = {}
    for mount in mount_table.mounts():
        place = (mount.root, Path(mount.place))
        if mount.kind == "cgroup2":
            found.setdefault("", place)
        elif mount.kind == "cgroup":
            for controller in mount.options.split(","):
                found.setdefault(controller, place)
    return found


def groups_of(pid: int) -> dict[str, Path]:
    """Return the directory of a process's control group by controller, without groups that are not visible here."""
    seen, found = mounts(), {}
    with contextlib.suppress(*GONE):
        for line in lines_of(f"/proc/{pid}/cgroup"):
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                root, place = seen.get(controller, ("", None))
                if place is not None and (path + "/").startswith(root.rstrip("/") + "/"):
                    found[controller] = place / path[len(root.rstrip("/")) :].lstrip("/")
    return found


def is_in(pid: int, group: Path) -> bool:
    """Return whether the process is now in this group or in one below it."""
    return any(own == group or group in own.parents for own in groups_of(pid).values())


def pids_in(group: Path, spend: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Yield the ids of all processes in a group and below it; none if the group is gone. OSError: it cannot be read now.

    `spend` is called for each group and process, and may raise.
    """
    for directory, _, _ in os.walk(group, onerror=_raise_if_short):
        spend()
        try:
            found = Path(directory, "cgroup.procs").read_text().split()
        except OSError as error:
            _raise_if_short(error)
            continue
        for pid in found:
            spend()
            yield int(pid)


def processes_in(group: Path, spend: Callable[[], None] = lambda: None) -> Iterator[Process]:
    """Yield all processes in a group and below it; none if the group is gone.

    An id may be reused after it was listed, so each process's group is checked again.
    """
    for pid in pids_in(group, spend):
        process = process_of(pid)
        if process is not None and is_in(pid, group):
            yield process


def is_populated(group: Path) -> bool:
    """Return whether a process is in a group or below it. Version 2 only; false in version 1."""
    return "populated 1" in _lines(group, EVENTS)


def own_groups(pid: int, mark: str) -> tuple[Path, ...]:
    """Return the groups by which to kill, freeze and thaw a process: those whose name contains `mark` and so belong to it alone.

    crun puts a container's processes in a group below that one, which Podman pauses: that comes first.
    """
    found = groups_of(pid)
    return tuple(group for name in ("", "freezer") if name in found for group in _marked(found[name], mark))


def limits_of(groups: Sequence[Path]) -> dict[str, float]:
    """Return what limits these nested groups of version 2 together: the lowest value of each file, infinite if none is set.

    `memory.max` and `memory.swap.max` are in bytes, `pids.max` a number, and `cpu.max` the processors that may be used.
    """
    found = {}
    for file in LIMITS:
        limits = [math.inf]
        for group in groups:
            with contextlib.suppress(OSError):
                quota, *period = (group / file).read_text().split()
                if quota != "max":
                    limits.append(int(quota) / int(*period or (1,)))
        found[file] = min(limits)
    return found


def kill_all(group: Path) -> None:
    """Send SIGKILL to all processes of a group at once, forks included. Version 2 only; does nothing in version 1."""
    with contextlib.suppress(OSError):
        _write(group / KILL, "1")


def freeze(groups: Iterable[Path]) -> bool:
    """Freeze the first of these groups that can be frozen, as `docker pause` does; return whether one can."""
    for file, word in ((FREEZER, "FROZEN"), (FREEZE, "1")):  # where both versions are mounted, engines use the first
        for group in groups:
            with contextlib.suppress(OSError):
                _write(group / file, word)
                return True
    return False


def thaw(group: Path) -> None:
    """Thaw a group. In version 1 a frozen process dies of SIGKILL only once thawed; in version 2 at once."""
    for file, word in ((FREEZER, "THAWED"), (FREEZE, "0")):
        with contextlib.suppress(OSError):
            _write(group / file, word)


def are_frozen(groups: Iterable[Path]) -> bool | None:
    """Return whether one of a guest's groups is frozen, by any program; None if no group can tell."""
    states = [line for group in groups for line in _freezer_lines(group)]
    return any(line in {"FROZEN", "frozen 1"} for line in states) if states else None


def memory_of(pid: int) -> int | None:
    """Return the memory of a process's group in bytes: anonymous, tmpfs and swapped. None if not visible."""
    groups = groups_of(pid)
    for controller, names in (("memory", ("total_rss", "total_shmem", "total_swap")), ("", ("anon", "shmem"))):
        found = []
        with contextlib.suppress(OSError, KeyError):
            lines = (groups[controller] / "memory.stat").read_text().splitlines()
            found = [int(line.split()[1]) for line in lines if line.split()[0] in names]
        with contextlib.suppress(OSError, KeyError):
            found.append(int((groups[controller] / "memory.swap.current").read_text()))
        if found:
            return sum(found)
    return None


def remove_groups(directories: tuple[str, ...]) -> None:
    """Remove those of these groups that are empty, or become empty within REMOVE_S seconds, with the groups in them."""
    deadline = time.monotonic() + REMOVE_S
    left = list(map(Path, directories))
    while left and time.monotonic() < deadline:
        left = [path for path in left if not _removed(path)]
        if left:
            time.sleep(LOOK_S)


def _marked(own: Path, mark: str) -> tuple[Path, ...]:
    if mark in own.name:
        return (own,)
    return (own, own.parent) if own.name == CRUN_CHILD and mark in own.parent.name else ()


def _raise_if_short(error: OSError) -> None:
    if error.errno in SHORT:
        raise error


def _removed(path: Path) -> bool:
    try:
        for inner in [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]:
            if not _removed(Path(inner)):
                return False
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _freezer_lines(group: Path) -> list[str]:
    return _lines(group, FREEZER) or _lines(group, EVENTS)


def _lines(group: Path, file: str) -> list[str]:
    """Return the lines of a file of a group; none if it has no such file."""
    with contextlib.suppress(OSError):
        return (group / file).read_text().splitlines()
    return []


def _write(path: Path, text: str) -> None:
    """Write to an existing file; never create one if the group is gone."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
