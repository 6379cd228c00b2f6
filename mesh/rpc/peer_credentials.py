"""The user at the other end of a connection on this machine, from the kernel (sock_diag(7)).

Any user of a machine can connect to any port of its loopback, and take all connections of a server there.
"""

import asyncio
import logging
import os
import socket
import struct

log = logging.getLogger(__name__)

ROOT = 0
# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ESTABLISHED = 1
ANY_STATE, NO_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_PORTS = struct.Struct(">HH")
_ANSWER = struct.Struct("=BBBB48xIIIII")  # family, state, timer, retransmits; expires, two queues, uid, inode


def user_of(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The uid whose open socket is `near` and is connected to `far`, both IPv4 and on this machine; None if there is none.

    A closed socket has no user: the kernel attributes its remains to root.
    """
    ends = socket.inet_aton(near[0]), socket.inet_aton(far[0])
    identity = _PORTS.pack(near[1], far[1]) + b"".join(end.ljust(16, b"\0") for end in ends) + bytes(4) + NO_COOKIE
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ANY_STATE) + identity
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + body)
        answer = kernel.recv(4096)
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    _, state, _, _, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return uid if state == ESTABLISHED and inode else None


def is_ours(uid: int | None) -> bool:
    return uid is not None and uid in {ROOT, os.geteuid()}


def is_own(transport: asyncio.Transport) -> bool:
    """Tell whether the other end of a connection is a program of this node's user, or of root."""
    near, far = (transport.get_extra_info(name) for name in ("peername", "sockname"))
    try:
        return bool(near and far) and is_ours(user_of(near, far))
    except OSError as error:
        log.warning("the kernel does not say whose connection it is: %s", error)
        return False
