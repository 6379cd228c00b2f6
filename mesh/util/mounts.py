"""The mounts that a process sees. Source: proc_pid_mountinfo(5). Standard library only."""

import os
import re
from pathlib import Path
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


def device_of(path: Path) -> str:
    """Return the device of the mount that holds a path: on btrfs and overlays that is not the one of `os.stat`."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        number, device = mount_number("self", descriptor), os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)
    found = (mount.device for mount in mounts() if mount.number == number)
    return next(found, f"{os.major(device)}:{os.minor(device)}")


def numbers_on(process: int | str, device: str) -> set[str]:
    """Return the numbers of the mounts of a device (`8:1`) that a process sees. OSError if it has gone."""
    with Path(f"/proc/{process}/mountinfo").open("rb") as lines:  # one at a time: a guest may have 100,000
        found = (line.split(b" ", 3) for line in lines)
        return {number.decode() for number, _, at, _ in found if at == device.encode()}


def mount_number(process: int | str, descriptor: int | str) -> str:
    """Return the number of the mount that an open file is on, without asking its file system, which a guest may serve."""
    told = Path(f"/proc/{process}/fdinfo/{descriptor}").read_text()
    return told.split("mnt_id:", 1)[1].split(None, 1)[0]


def _plain(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), path)
