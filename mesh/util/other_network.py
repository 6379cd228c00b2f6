"""Listen on the loopback of another process's network: a container's, or that of a rootless engine.

A process of its own joins that network and hands the socket over. A thread of the daemon could join it only as root: without,
one first joins the namespace of users that owns the network, which a program with several threads may not (setns(2)). Standard
library only.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

from mesh.util.isolated import isolated
from mesh.util.processes import Process

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
JOIN_S = 10.0  # timeout; it takes 0.05 s (own choice)


def has_own_network(pid: int) -> bool:
    """Return whether a process has another network than this one; False if it is gone or hidden from this user."""
    with contextlib.suppress(OSError):
        return not Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net")
    return False


def listen_in(process: Process, port: int) -> socket.socket:
    """Return a socket that listens at this port of the loopback of a process's network. Blocks.

    OSError if the process has no network of its own, is gone, or may not be joined, or the port is taken.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = map(str, (*process, port, theirs.fileno()))
        try:
            done = subprocess.run(
                [*isolated("mesh.util", "other_network"), *words],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=JOIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"the network of process {process.pid} was not entered within {JOIN_S:g} s") from error
        if done.returncode:
            raise OSError(done.stderr.decode(errors="replace").strip()[-300:])
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=descriptors[0])


def main() -> None:
    pid, started, port, there = map(int, sys.argv[1:])
    descriptor = Process(pid, started).open()
    if descriptor is None:
        sys.exit(f"process {pid} has ended")
    if not has_own_network(pid):
        sys.exit(f"process {pid} has the network of this machine")
    as_owner = os.geteuid() != 0 and not Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET | (CLONE_NEWUSER if as_owner else 0)) != 0:
        sys.exit(f"the network of process {pid} cannot be entered: {os.strerror(ctypes.get_errno())}")
    with socket.create_server(("127.0.0.1", port)) as listener, socket.socket(fileno=there) as way:
        socket.send_fds(way, [b"!"], [listener.fileno()])
