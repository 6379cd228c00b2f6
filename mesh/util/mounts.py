"""The mounts that a process sees. Source: proc_pid_mountinfo(5). Standard library only."""

import re
from typing import NamedTuple

from mesh.util.processes import lines_of


class Mount(NamedTuple):
    """A mount: its number, its device (`8:1`), the visible root of its file system, its place, and how it propagates.

    `kind` and `options` are those of the file system.
    """

    number: str
    device: str
    root: str
    place: str
    propagation: tuple[str, ...]
    kind: str
    options: str


def mounts(process: int | str = "self") -> list[Mount]:
    """Return the mounts that a process sees. OSError if it has gone."""
    found = []
    for line in lines_of(f"/proc/{process}/mountinfo"):
        mount, _, system = line.partition(" - ")
        number, _, device, root, place, _, *propagation = mount.split(" ")
        kind, _, options = system.split(" ", 2)
        found.append(Mount(number, device, _plain(root), _plain(place), tuple(propagation), kind, options))
    return found


def _plain(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)
