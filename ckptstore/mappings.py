"""Mappings: the files that processes have mapped shared and writable.

A write through a mapping changes a file's times only when its page was clean, so a file may change while its times stay.
"""

import os
from contextlib import suppress
from pathlib import Path


def mapped_for_writing() -> set[tuple[int, int]]:
    """Return device and inode of these files, of the processes that we may inspect.

    On file systems with a device of their own for each subvolume (btrfs) the device is not the one of `os.stat`.
    """
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError), (process / "maps").open("rb") as lines:
                for line in lines:  # one at a time: a guest may have 65,530 with paths of 4 KiB
                    _, rights, _, device, inode = line.split(maxsplit=5)[:5]
                    if rights[1:2] == b"w" and rights[3:4] == b"s":
                        major, minor = device.split(b":")
                        found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found
