"""Whose program is at the other end of a connection on this machine: the kernel knows (proc(5), /proc/net/tcp).

Any user of a machine can connect to any port of its loopback. Only this node's own user, and root, may see its page.
"""

import ipaddress
import os
import sys
from pathlib import Path

ROOT = 0
TABLE = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7  # columns
_OVER = frozenset({"06", "07"})  # TIME_WAIT and CLOSE of an earlier connection have nobody's uid


def user_of(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The uid whose socket is `near` and is connected to `far`, both IPv4 and on this machine; None if there is none."""
    wanted = (_written(near), _written(far))
    for line in TABLE.read_text().splitlines()[1:]:
        words = line.split()
        if (words[_LOCAL], words[_REMOTE]) == wanted and words[_STATE] not in _OVER:
            return int(words[_UID])
    return None


def is_ours(uid: int | None) -> bool:
    return uid is not None and uid in {ROOT, os.geteuid()}


def _written(address: tuple[str, int]) -> str:
    """As the kernel writes it: the address as a number of the machine's own byte order."""
    host, port = address
    packed = ipaddress.IPv4Address(host).packed
    return f"{int.from_bytes(packed, sys.byteorder):08X}:{port:04X}"
