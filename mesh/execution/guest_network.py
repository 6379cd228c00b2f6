"""The network of a guest that reaches hosts by a proxy alone: loopback, and on it one port at which the node's proxy listens.

The socket is made inside the guest's network namespace and is held by the daemon, so nothing of it runs in the guest, and no
other guest can connect to it.
"""

import ctypes
import os
import socket
import threading
from collections.abc import Mapping

from mesh.util.processes import Process, process_of

PORT = 3128  # Squid's default
BACKLOG = 128
CLONE_NEWNET = 0x40000000
ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}

_libc = ctypes.CDLL(None, use_errno=True)


def listen() -> socket.socket:
    """Return the proxy's socket, in this thread's network namespace."""
    return socket.create_server(("127.0.0.1", PORT), backlog=BACKLOG)


def listen_in(process: Process) -> socket.socket:
    """Return the proxy's socket, in the network namespace of a process. OSError if it has none of its own, or is gone."""
    answer: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_listen_in, args=(process, answer), name="guest network")
    thread.start()  # a namespace is a thread's: this one ends in it
    thread.join()
    found = answer[0]
    if isinstance(found, OSError):
        raise found
    return found


def _listen_in(process: Process, answer: list[socket.socket | OSError]) -> None:
    try:
        theirs = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if process_of(process.pid) != process:
                raise ProcessLookupError("the guest has ended")
            if os.path.samestat(os.fstat(theirs), os.stat("/proc/thread-self/ns/net")):  # noqa: PTH116
                raise OSError("the guest has the network of this machine")
            if _libc.setns(theirs, CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"its network cannot be entered: {os.strerror(number)}")
            answer.append(listen())
        finally:
            os.close(theirs)
    except OSError as error:
        answer.append(error)
