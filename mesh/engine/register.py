"""Which guests live on this node: a file each in the state directory, for whoever must end them when the daemon cannot be asked.

Written before a guest's program can run and removed when nothing of it is left, by rename: a crash leaves a whole entry or none.
Not synced to disk: what a power cut loses, no guest has outlived. An entry names processes by number *and* start, on one boot of
the machine, so that nobody else is ever meant. Standard library only, as everything on the way of a kill.
"""

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mesh.engine.descent import Process

ENDING, STRUCK = ".json", ".struck"  # of an entry; of one whose guest the owner has ended past the daemon
OWN_GROUP = re.compile(r"[0-9a-f]{16}[^/]*$")  # how the last part of a group's path tells whose it is
TEXT_LIMIT, ENTRY_LIMIT = 4096, 1 << 16  # bytes of one field, of one file; ours


@dataclass(frozen=True)
class Entry:
    """`head`: with it everything of the guest ends (the first process of a PID namespace). `watcher`: what descends from it is
    the guest's. `container` is an id of the engine behind `socket`. `groups` are directories of control groups of its own."""

    boot: str
    engine: str
    job: str
    attempt: int
    head: Process | None = None
    watcher: Process | None = None
    container: str = ""
    socket: str = ""
    groups: tuple[str, ...] = ()


class Damaged(ValueError):
    """A file that is no entry; the text says why."""


class Register:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, key: str, entry: Entry) -> None:
        """OSError if it cannot be written: a guest that cannot be found again must not start."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.directory / f".{key}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(asdict(entry)).encode())
        fresh.rename(self.directory / (key + ENDING))

    def drop(self, key: str) -> bool:
        """Whether its owner had ended it past the daemon."""
        struck = self.is_struck(key)
        for ending in (ENDING, STRUCK):
            with contextlib.suppress(OSError):
                (self.directory / (key + ending)).unlink(missing_ok=True)
        return struck

    def is_struck(self, key: str) -> bool:
        return (self.directory / (key + STRUCK)).exists()

    def strike(self, key: str) -> None:
        """Note that its owner ends it past the daemon. Needs no room on the disk."""
        with contextlib.suppress(OSError):
            (self.directory / (key + ENDING)).rename(self.directory / (key + STRUCK))

    def entries(self) -> tuple[dict[str, Entry], list[str]]:
        """Everybody of this boot, struck or not; and what could not be read, in words."""
        found: dict[str, Entry] = {}
        problems: list[str] = []
        paths = sorted(self.directory.glob("*")) if self.directory.is_dir() else []
        for path in paths:
            if path.suffix in {ENDING, STRUCK}:
                try:
                    entry = decode_entry(_read(path))
                except (OSError, Damaged) as error:
                    problems.append(f"{path}: {error}")
                else:
                    if entry.boot == boot_id():
                        found[path.stem] = entry
        return found, problems

    def clear(self) -> None:
        """Forget everybody: for a daemon that starts, and has ended what an earlier one left."""
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            with contextlib.suppress(OSError):
                path.unlink()


def decode_entry(data: bytes) -> Entry:
    """Damaged if these bytes are none. What is wrong in one field makes the whole untrusted."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not an entry: {error}") from error
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(Entry)}:
        raise Damaged("not an entry: its fields are others")
    attempt = values["attempt"]
    if type(attempt) is not int or not 0 <= attempt < 2**63:
        raise Damaged("its attempt is no number")
    groups = values["groups"]
    if not isinstance(groups, list) or len(groups) > 64:
        raise Damaged("its groups are no list")
    return Entry(
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
        raise Damaged(f"its {name} is no text")
    return value


def _process(name: str, value: Any) -> Process | None:
    if value is None:
        return None
    numbers = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    if not numbers or not 1 < value[0] < 2**31 or not 0 <= value[1] < 2**63:
        raise Damaged(f"its {name} is no process")
    return Process(*value)


def _group(value: Any) -> str:
    """A group that is a guest's own has a name of its own: never a whole hierarchy, nor all containers."""
    text = _text("group", value)
    if not OWN_GROUP.search(text) or not text.startswith("/") or ".." in text.split("/"):
        raise Damaged("its group is none of a guest's own")
    return text
