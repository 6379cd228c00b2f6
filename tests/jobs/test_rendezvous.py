"""Where a gang meets: a port that no outgoing connection takes before the guest does."""

import socket
from random import Random

import pytest

from mesh.jobs import rendezvous
from mesh.jobs.rendezvous import meeting_place, meeting_ports


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
def test_it_is_drawn_from_what_the_kernel_does_not_give_to_connections(ephemeral: str, ports: range) -> None:
    assert meeting_ports(ephemeral) == ports


def test_the_port_can_be_bound_and_one_in_use_is_never_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "meeting_ports", lambda ephemeral: range(port, port + 1))
        host, other = meeting_place("127.0.0.1", Random(7))
        assert other != port
    with socket.create_server((host, other)):
        pass


def test_an_address_that_is_not_here_is_an_error() -> None:
    with pytest.raises(OSError):
        meeting_place("192.0.2.1", Random(7))
