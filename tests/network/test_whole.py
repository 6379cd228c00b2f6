"""The machine's own traffic beside checkpoints that take what they can get, over a link that is slower than both want."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from mesh.network.edge import Edge
from mesh.network.shaping import BULK, URGENT
from tests.network.wires import NEIGHBOUR, UP, WAIT_S, Wires, inside

pytestmark = pytest.mark.bpf

LINK_MBPS = 40.0
PACKETS, BYTES, APART_S = 1500, 1400, 0.001  # at most 11 Mbit/s
MORE = 8  # times as much of what has to give way


def greedy(wires: Wires, priority: int, stack: contextlib.ExitStack) -> None:
    """A stream of this class that never ends, from the machine to its neighbour; until the stack does."""
    with inside(wires.neighbour):
        server = stack.enter_context(socket.create_server((NEIGHBOUR, 0)))
    with inside(wires.machine):
        out = stack.enter_context(socket.socket())
        out.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        out.connect(server.getsockname())
    back = stack.enter_context(server.accept()[0])

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                out.send(bytes(1 << 16))

    def take() -> None:
        with contextlib.suppress(OSError):
            while back.recv(1 << 16):
                pass

    threads = [threading.Thread(target=work, name=f"greedy {work.__name__}") for work in (send, take)]
    for thread in threads:
        thread.start()

    def end() -> None:
        for sock in (out, back):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    stack.callback(end)


def test_host_traffic_survives_full_link(tmp_path: Path) -> None:
    with Wires(0, LINK_MBPS) as wires, contextlib.ExitStack() as stack:
        edge = Edge(tmp_path / "run" / "node", device=UP, mbps=LINK_MBPS)
        stack.callback(edge.close)
        stack.enter_context(inside(wires.machine))
        edge.open()
        assert not edge.state().problem
        edge.give(1e6)
        greedy(wires, URGENT.priority, stack)
        flows = {name: datagrams(wires, priority, stack) for name, priority in (("own", 0), ("copy", BULK.priority))}
        arrived = dict.fromkeys(flows, 0)
        for _ in range(PACKETS):
            for name, (out, back) in flows.items():
                for _ in range(MORE if name == "copy" else 1):
                    with contextlib.suppress(BlockingIOError):  # its queue is full
                        out.send(bytes(BYTES))
                arrived[name] += taken(back)
            time.sleep(APART_S)
        assert arrived["copy"] < 0.5 * MORE * PACKETS, f"the link was not full: {arrived} of {PACKETS}"
        waited = time.monotonic()
        while arrived["own"] < PACKETS and time.monotonic() < waited + 2:
            arrived["own"] += taken(flows["own"][1])
            time.sleep(0.01)
        assert arrived["own"] >= 0.99 * PACKETS, f"{arrived} of {PACKETS}"


def datagrams(wires: Wires, priority: int, stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """From the machine, in this class, to its neighbour."""
    with inside(wires.neighbour):
        back = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        back.bind((NEIGHBOUR, 0))
    out = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    out.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
    out.connect(back.getsockname())
    for sock in (out, back):
        sock.setblocking(False)
    return out, back


def taken(sock: socket.socket) -> int:
    """Return the number of packets received."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while sock.recv(2 * BYTES):
            count += 1
    return count
