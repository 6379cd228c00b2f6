"""Control groups of both versions: where a process's are, what runs in one, how to end that. Standard library only."""

import contextlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mesh.engine.descent import Process, process_of

KILL, FREEZE, EVENTS = "cgroup.kill", "cgroup.freeze", "cgroup.events"  # of version 2 (the first since Linux 5.14)
FREEZER = "freezer.state"  # of version 1


@cache
def mounts() -> dict[str, tuple[str, Path]]:
    """By controller ("" is version 2): which part of the hierarchy is to be seen, and where (proc_pid_mountinfo(5)), as it was
    when this process first asked."""
    found: dict[str, tuple[str, Path]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
            place = (fields[3], Path(fields[4].replace("\\040", " ")))
            if kind == "cgroup2":
                found.setdefault("", place)
            elif kind == "cgroup":
                for controller in options.split(","):
                    found.setdefault(controller, place)
    return found


def groups_of(pid: int) -> dict[str, Path]:
    """By controller, the directory of the control group that a process is in; what is not to be seen from here is left out."""
    seen, found = mounts(), {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                root, mounted = seen.get(controller, ("", None))
                if mounted is not None and (path + "/").startswith(root.rstrip("/") + "/"):
                    found[controller] = mounted / path[len(root.rstrip("/")) :].lstrip("/")
    return found


def is_in(pid: int, group: Path) -> bool:
    """Whether the process is in this group now, or in one below."""
    return any(own == group or group in own.parents for own in groups_of(pid).values())


def pids_in(group: Path) -> list[int]:
    """Numbers of everybody in a group and below it, as of this moment; none if it is gone."""
    found: list[int] = []
    for directory, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            found += map(int, Path(directory, "cgroup.procs").read_text().split())
    return found


def processes_in(group: Path) -> set[Process]:
    """Everybody in a group and below it, none if it is gone. A number may be given to somebody else between the list and the
    look, so it is looked at where that one is."""
    named = ((pid, process_of(pid)) for pid in pids_in(group))
    return {process for pid, process in named if process is not None and is_in(pid, group)}


def own_groups(pid: int, mark: str) -> tuple[Path, ...]:
    """Of a process: the groups to end and to thaw it by, those whose name has this mark in it and is thus its own."""
    found = groups_of(pid)
    return tuple(found[name] for name in ("", "freezer") if name in found and mark in found[name].name)


def kill_all(group: Path) -> None:
    """SIGKILL to everybody in a group of version 2 at once, forks under way included; nothing in one of version 1."""
    with contextlib.suppress(OSError):
        _write(group / KILL, "1")


def freeze(groups: Iterable[Path]) -> None:
    """Let nothing in them run until they are thawed, as `docker pause` does; nothing where that may not be done from here."""
    for file, word in ((FREEZER, "FROZEN"), (FREEZE, "1")):  # where both versions are mounted, engines use the first
        for group in groups:
            with contextlib.suppress(OSError):
                _write(group / file, word)
                return


def thaw(group: Path) -> None:
    """One that is frozen takes its SIGKILL only when it is thawed (version 1), or at once (version 2)."""
    for file, word in ((FREEZER, "THAWED"), (FREEZE, "0")):
        with contextlib.suppress(OSError):
            _write(group / file, word)


def are_frozen(groups: Iterable[Path]) -> bool | None:
    """Whether all of a guest's processes are held by one of its groups, whoever froze it; None if none of them can tell."""
    told = [line for group in groups for line in _freezer_lines(group)]
    return any(line in {"FROZEN", "frozen 1"} for line in told) if told else None


def memory_of(pid: int) -> int | None:
    """Bytes that are not on disk of the group that a process is in: its processes' own memory, what lies in its tmpfs, what is
    swapped out. None where that cannot be seen."""
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


def _freezer_lines(group: Path) -> list[str]:
    for file in (FREEZER, EVENTS):
        with contextlib.suppress(OSError):
            return (group / file).read_text().splitlines()
    return []


def _write(path: Path, text: str) -> None:
    """Into a file that is there: none is made, as where the group has gone meanwhile."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
