"""The fork server: forks the watchers of guests (`guest_init`), so that no guest waits for an interpreter. Standard library only.

A daemon starts it as a program of its own with one thread, so it and its forks have none of the daemon's memory and descriptors.
It does not learn what a guest runs: the daemon tells the watcher. An order is one byte with the descriptors of one guest. The
answer comes on that guest's own socket, as JSON: the watcher, [pid, start time], or a text if there is none. Watchers do not need
the server: they go on if it ends, and when the daemon ends, each sees its own pipe close.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Collection
from typing import NoReturn

from mesh.execution.process import guest_init
from mesh.util.processes import process_of

DESCRIPTORS = 4  # of an order: the pipes from and to the daemon, standard error, the socket


def main() -> None:
    os.setsid()  # Ctrl-C is for the daemon, which needs watchers while it leaves
    gc.freeze()  # a collection in a fork would copy what it shares
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(orders: socket.socket) -> None:
    """Fork a watcher for each order, and reap watchers, until the daemon's end closes."""
    watchers: dict[int, int] = {}  # pidfd -> pid
    poller = select.poll()
    poller.register(orders, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        for ended in watchers.keys() & ready:
            poller.unregister(ended)
            os.waitpid(watchers.pop(ended), 0)
            os.close(ended)
        if orders.fileno() not in ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, 1, DESCRIPTORS)
        if not order:
            return
        if len(descriptors) == DESCRIPTORS:  # else none is left here, and the daemon sees its socket close
            pid, watcher = fork_watcher(descriptors, {orders.fileno(), *watchers})
            if pid:
                watchers[watcher] = pid
                poller.register(watcher, select.POLLIN)
        for descriptor in descriptors:
            os.close(descriptor)


def fork_watcher(order: list[int], others: Collection[int]) -> tuple[int, int]:
    """Tell the daemon of a new watcher; return its pid and pidfd, or zeros if there is none."""
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            become_watcher(order, others)
        process, watcher = process_of(pid), os.pidfd_open(pid)  # which nobody has reaped
    except OSError as error:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        tell(order, error.strerror)
        return 0, 0
    tell(order, process)
    return pid, watcher


def tell(order: list[int], what: object) -> None:
    doors = socket.socket(fileno=order[-1])
    with contextlib.suppress(OSError):  # the daemon may wait no more
        doors.send(json.dumps(what).encode())
    doors.detach()


def become_watcher(order: list[int], others: Collection[int]) -> NoReturn:
    """Watch a guest, without the descriptors of this server and its other watchers."""
    code = 1
    try:
        for descriptor in others:
            os.close(descriptor)
        daemon, status, errors, doors = order
        os.dup2(errors, 2)
        os.close(errors)
        guest_init.main(daemon, status, socket.socket(fileno=doors))
        code = 0
    except SystemExit as error:
        os.write(2, f"{error}\n".encode())
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(code)
