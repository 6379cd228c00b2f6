"""A machine with guests and a neighbour, each a network namespace of its own, and sockets of this process in any of them.

Everything is made by the test that uses it and goes with it; nothing outside the namespaces is touched.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from types import TracebackType

from tests.netns.lan import make_namespace, run

CLONE_NEWNET = 0x40000000
WAIT_S = 30.0
UP = "up0"  # of the machine, to its neighbour
MACHINE, NEIGHBOUR = "10.91.0.1", "10.91.0.2"

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, what it starts and the sockets it makes belong to the namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert _libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert _libc.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(before)
        os.close(there)


class Wires:
    """The machine forwards for its guests; each has its own veth pair: `g0` is the machine's end of guest 0's.

    `link_mbps`: what a switch carries to its neighbour, with a queue of 20 ms; 0 is a cable.
    """

    _made = 0

    def __init__(self, guests: int = 1, link_mbps: float = 0.0) -> None:
        Wires._made += 1
        tag = f"me{os.getpid()}-{Wires._made}"
        self.machine, self.neighbour = f"{tag}-machine", f"{tag}-far"
        self.guests = [f"{tag}-guest{number}" for number in range(guests)]
        self.switch = f"{tag}-switch"
        self._link_mbps = link_mbps

    def __enter__(self) -> "Wires":
        try:
            for namespace in (self.machine, self.neighbour, *self.guests):
                make_namespace(namespace)
            if self._link_mbps:
                self._by_switch()
            else:
                self._pair(self.machine, UP, f"{MACHINE}/24", self.neighbour, "eth0", f"{NEIGHBOUR}/24")
            run("ip", "netns", "exec", self.machine, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for number, guest in enumerate(self.guests):
                near = f"10.92.{number}.1"
                self._pair(self.machine, f"g{number}", f"{near}/24", guest, "eth0", f"{self.guest(number)}/24")
                run("ip", "-n", guest, "route", "add", "default", "via", near)
                run("ip", "-n", self.neighbour, "route", "add", f"10.92.{number}.0/24", "via", MACHINE)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for namespace in (*self.guests, self.neighbour, self.switch, self.machine):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    @staticmethod
    def guest(number: int) -> str:
        """Its address."""
        return f"10.92.{number}.2"

    def _pair(self, first: str, near: str, address: str, second: str, far: str, other: str) -> None:
        run("ip", "-n", first, "link", "add", near, "type", "veth", "peer", "name", far, "netns", second)
        for namespace, name, own in ((first, near, address), (second, far, other)):
            run("ip", "-n", namespace, "address", "add", own, "dev", name)
            run("ip", "-n", namespace, "link", "set", name, "up")

    def _by_switch(self) -> None:
        make_namespace(self.switch)
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for number, (namespace, name, own) in enumerate(
            ((self.machine, UP, f"{MACHINE}/24"), (self.neighbour, "eth0", f"{NEIGHBOUR}/24"))
        ):
            port = f"p{number}"
            run("ip", "-n", namespace, "link", "add", name, "type", "veth", "peer", "name", port, "netns", self.switch)
            run("ip", "-n", namespace, "address", "add", own, "dev", name)
            run("ip", "-n", namespace, "link", "set", name, "up")
            run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        queue = ("tbf", "rate", f"{self._link_mbps:g}mbit", "burst", "128k", "latency", "20ms")
        run("tc", "-n", self.switch, "qdisc", "add", "dev", "p1", "root", *queue)

    def tc(self, *words: str) -> str:
        """On the machine."""
        return run("tc", "-n", self.machine, *words)

    def queues(self) -> str:
        """All that anybody has put on the machine's interfaces."""
        hooks = [
            self.tc("filter", "show", "dev", name, hook)
            for name in (UP, *(f"g{number}" for number in range(len(self.guests))))
            for hook in ("ingress", "egress")
            if f"clsact ffff: dev {name}" in self.tc("qdisc", "show")
        ]
        return self.tc("qdisc", "show") + "".join(hooks)

    def sent(self, minor: int) -> int:
        """Bytes that have left by the machine's own interface in this class."""
        words = self.tc("-s", "class", "show", "dev", UP, "classid", f"6d65:{minor:x}").split()
        return int(words[words.index("Sent") + 1]) if "Sent" in words else 0


class Talk:
    """Datagrams one way, between two namespaces. In order: so a later one that arrives says that earlier ones were dropped, but
    for the first, which wait until the neighbour's address is known: `passes` first.
    """

    def __init__(self, source: str, target: str, address: str, priority: int = 0) -> None:
        with inside(target):
            self._in = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._in.bind((address, 0))
        with inside(source):
            self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            if priority:
                self._out.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
            self._out.connect(self._in.getsockname())
        self._in.settimeout(WAIT_S)
        self._count = 0

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *error: object) -> None:
        self._in.close()
        self._out.close()

    def say(self, count: int = 1) -> list[int]:
        """Send so many; their numbers."""
        for _ in range(count):
            self._count += 1
            with contextlib.suppress(PermissionError):  # a packet of this machine's own that is dropped is told so
                self._out.send(self._count.to_bytes(4))
        return list(range(self._count - count + 1, self._count + 1))

    def heard(self, last: int) -> list[int]:
        """Return the packets received up to that one, which must arrive."""
        seen = []
        while last not in seen:
            seen.append(int.from_bytes(self._in.recv(16)))
        return seen

    def passes(self) -> bool:
        """Return whether all packets sent now arrive."""
        numbers = self.say(5)
        return self.heard(numbers[-1]) == numbers
