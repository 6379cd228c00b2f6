"""Files of /proc in which a user has chosen some of the bytes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.util.mounts import Mount, mounts
from mesh.util.processes import catches, lines_of, name_of

LINES = b"""\
25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
94 25 0:52 / /mnt/M\xfcller\x0b\xc2\x85\r rw master:3 propagate_from:2 - tmpfs x rw
95 25 0:53 /a\\040b /mnt/tab\\011back\\134slash\\012 rw - cgroup  rw,memory
"""


def test_mounts_are_told_apart_whatever_bytes_their_paths_have(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(LINES)
    assert mounts(f"..{tmp_path}") == [
        Mount("25", "8:1", "/", "/", ("shared:1",), "ext4", "rw,discard"),
        Mount(
            "94",
            "0:52",
            "/",
            os.fsdecode(b"/mnt/M\xfcller\x0b\xc2\x85\r"),
            ("master:3", "propagate_from:2"),
            "tmpfs",
            "rw",
        ),
        Mount("95", "0:53", "/a b", "/mnt/tab\tback\\slash\n", (), "cgroup", "rw,memory"),
    ]


@pytest.fixture
def renamed() -> Iterator[None]:
    """Give this process a name that is no text and looks like another line of its status."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes(b"\xff\rSigCgt:\tfff")
    yield
    comm.write_bytes(before)


def test_name_of_a_program_may_hold_any_bytes(renamed: None) -> None:
    assert name_of(os.getpid()) == "�\rSigCgt:\tfff"
    assert not catches(os.getpid(), signal.SIGUSR2)
    assert len(lines_of("/proc/self/status")) == Path("/proc/self/status").read_bytes().count(b"\n")
