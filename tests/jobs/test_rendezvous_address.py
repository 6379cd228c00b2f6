"""Rendezvous address of a gang: a port that no outgoing connection can take before the guest."""

import socket
from random import Random

import pytest

from mesh.jobs import service
from mesh.jobs.service import rendezvous_address, rendezvous_ports


@pytest.mark.parametrize(
    ("ephemeral", "ports"),
    [
        ("32768\t60999\n", range(20_000, 32_768)),
        ("1024 40000", range(40_001, 65_536)),
        ("60000 65535", range(20_000, 60_000)),
        ("1 65535", range(20_000, 65_536)),
        ("100 200", range(20_000, 65_536)),
    ],
)
def test_port_is_outside_the_range_for_outgoing_connections(ephemeral: str, ports: range) -> None:
    assert rendezvous_ports(ephemeral) == ports


def test_port_can_be_bound_and_is_not_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports = [port, free.getsockname()[1]]
        monkeypatch.setattr(service, "rendezvous_ports", lambda ephemeral: ports)
        host, other = rendezvous_address("127.0.0.1", Random(7))
        assert other != port
    with socket.create_server((host, other)):
        pass


def test_port_for_an_address_that_is_not_local_is_of_the_range() -> None:
    """Regression: `--advertise` with the address of a NAT; the error came up in the core, and ended the daemon."""
    host, port = rendezvous_address("192.0.2.1", Random(7))
    assert host == "192.0.2.1" and port in range(service.LEAST_PORT, service.MOST_PORT + 1)
