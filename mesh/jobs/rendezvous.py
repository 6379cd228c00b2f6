"""Where a gang meets: an address of its leader's machine, and a port that stays free until the guest takes it."""

import socket
from contextlib import suppress
from pathlib import Path
from random import Random

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_PORT, MOST_PORT = 20_000, 65_535
TRIES = 64


def meeting_ports(ephemeral: str) -> range:
    """The ports to draw from, given the kernel's range ("first last") for outgoing connections.

    Not one of that range: any connection that somebody opens between the draw and the guest's start would take it, and the
    guest's `bind` would fail. The larger part of what it leaves from 20,000 on; everything, where it leaves nothing.
    """
    first, last = (int(word) for word in ephemeral.split())
    below, above = range(LEAST_PORT, min(first, MOST_PORT + 1)), range(max(last + 1, LEAST_PORT), MOST_PORT + 1)
    return max(below, above, key=len) or range(LEAST_PORT, MOST_PORT + 1)


def meeting_place(host: str, random: Random) -> tuple[str, int]:
    """`host` with a port nobody has there now. It is not kept: the guest must be able to bind it. OSError when none is found."""
    try:
        ports = meeting_ports(EPHEMERAL.read_text())
    except (OSError, ValueError):  # not Linux, or /proc is not there
        ports = range(LEAST_PORT, MOST_PORT + 1)
    for port in random.choices(ports, k=TRIES):
        with suppress(OSError):
            return host, _bound_once(host, port)
    return host, _bound_once(host, 0)


def _bound_once(host: str, port: int) -> int:
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])
