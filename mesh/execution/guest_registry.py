"""The guests that live on this node: one file each in the state directory, so that they can be killed without the daemon.

An entry is written before the guest's program can run and removed when nothing of the guest is left. Files are renamed into
place: a crash leaves a whole entry or none. They are not synced, since no guest outlives a power cut. An entry names a process by
number and start time on one boot, so it never means another process. Standard library only, like everything on the kill path.
"""

import contextlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mesh.util.cgroups import CRUN_CHILD
from mesh.util.processes import Process

ENDING = ".json"
KILLED, LAPSED = ".killed", ".lapsed"  # of one whose guest is killed without the daemon: for the owner, for its lease
# How the path of a control group ends that belongs to one guest.
OWN_GROUP = re.compile(rf"[0-9a-f]{{16}}[^/]*(/{CRUN_CHILD})?$")
TEXT_LIMIT, ENTRY_LIMIT = 4096, 1 << 16  # bytes of one field, of one file (own choice)


@dataclass(frozen=True)
class GuestEntry:
    """Handles to find and kill every process of one guest.

    When `head` dies, the whole guest dies (the first process of a PID namespace). All descendants of `watcher` belong to the
    guest. `container` is an id of the engine behind `socket`. `groups` are the directories of the guest's own control groups.
    """

    boot: str
    engine: str
    job: str
    attempt: int
    head: Process | None = None
    watcher: Process | None = None
    container: str = ""
    socket: str = ""
    groups: tuple[str, ...] = ()


class BadEntry(ValueError):
    """A file is not a valid entry; the text says why."""


class GuestRegistry:
    """The entries in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, key: str, entry: GuestEntry) -> None:
        """Write an entry. OSError if that fails: a guest that cannot be found again must not start."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.directory / f".{key}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(asdict(entry)).encode())
        fresh.rename(self.directory / (key + ENDING))

    def drop(self, key: str) -> str:
        """Remove an entry; return its mark, KILLED or LAPSED, or an empty text."""
        marked = ""
        for ending in (ENDING, KILLED, LAPSED):
            with contextlib.suppress(OSError):
                (self.directory / (key + ending)).unlink()
                marked = ending
        return "" if marked == ENDING else marked

    def is_killed(self, key: str) -> bool:
        return (self.directory / (key + KILLED)).exists()

    def mark(self, key: str, mark: str) -> None:
        """Record that this guest is killed without the daemon, and why: KILLED or LAPSED. Needs no free disk space."""
        with contextlib.suppress(OSError):
            (self.directory / (key + ENDING)).rename(self.directory / (key + mark))

    def entries(self) -> tuple[dict[str, GuestEntry], list[str]]:
        """Return all entries of this boot, marked or not, and a text for each file that could not be read."""
        found: dict[str, GuestEntry] = {}
        problems: list[str] = []
        paths = sorted(self.directory.glob("*")) if self.directory.is_dir() else []
        for path in paths:
            if path.suffix in {ENDING, KILLED, LAPSED}:
                try:
                    entry = decode_entry(_read(path))
                except (OSError, BadEntry) as error:
                    problems.append(f"{path}: {error}")
                else:
                    if entry.boot == boot_id():
                        found[path.stem] = entry
        return found, problems

    def clear(self, left: Collection[str] = ()) -> None:
        """Remove all entries but those of guests that are left. A starting daemon calls it after it has killed the others."""
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if path.stem not in left:
                with contextlib.suppress(OSError):
                    path.unlink()


def decode_entry(data: bytes) -> GuestEntry:
    """Decode an entry. BadEntry if any field is wrong."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"not an entry: {error}") from error
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(GuestEntry)}:
        raise BadEntry("not an entry: it has other fields")
    attempt = values["attempt"]
    if type(attempt) is not int or not 0 <= attempt < 2**63:
        raise BadEntry("its attempt is not a number")
    groups = values["groups"]
    if not isinstance(groups, list) or len(groups) > 64:
        raise BadEntry("its groups are not a list")
    return GuestEntry(
        **{name: _text(name, values[name]) for name in ("boot", "engine", "job", "container", "socket")},
        attempt=attempt,
        head=_process("head", values["head"]),
        watcher=_process("watcher", values["watcher"]),
        groups=tuple(_group(group) for group in groups),
    )


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(ENTRY_LIMIT)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_LIMIT or "\0" in value:
        raise BadEntry(f"its {name} is not a string")
    return value


def _process(name: str, value: Any) -> Process | None:
    if value is None:
        return None
    numbers = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    if not numbers or not 1 < value[0] < 2**31 or not 0 <= value[1] < 2**63:
        raise BadEntry(f"its {name} is not a process")
    return Process(*value)


def _group(value: Any) -> str:
    """Accept only the group of one guest, by its name: never a whole hierarchy, never the group of all containers."""
    text = _text("group", value)
    if not OWN_GROUP.search(text) or not text.startswith("/") or ".." in text.split("/"):
        raise BadEntry("its group does not belong to one guest")
    return text
