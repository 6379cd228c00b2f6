"""Mappings: the files that processes have mapped shared and writable.

A write through a mapping changes a file's times only when its page was clean, so a file may change while its times stay.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

Processes = Callable[[], Iterable[int]]  # the ids of those that may write to a tree


def every_process() -> Iterator[int]:
    """Yield the id of every process of this machine."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def mapped_for_writing(processes: Processes = every_process) -> set[tuple[int, int]]:
    """Return device and inode of these files, of these processes, as far as we may inspect them.

    On file systems with a device of their own for each subvolume (btrfs) the device is not the one of `os.stat`.
    """
    found = set()
    for process in processes():
        with suppress(OSError), Path(f"/proc/{process}/maps").open("rb") as lines:
            for line in lines:  # one at a time: a guest may have 65,530 with paths of 4 KiB
                _, rights, _, device, inode = line.split(maxsplit=5)[:5]
                if rights[1:2] == b"w" and rights[3:4] == b"s":
                    major, minor = device.split(b":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found
