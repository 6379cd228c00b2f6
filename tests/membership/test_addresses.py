"""Addresses as text, sockets of both families, and which of a machine's addresses others may use."""

import errno
import os
import socket
from pathlib import Path

import ifaddr
import pytest

from membership import discovery
from membership.addresses import (
    address_group,
    address_text,
    bind_problem,
    bound_sockets,
    is_endpoint,
    is_group,
    parse_seed,
)
from membership.discovery import advertised_address, lan_addresses, neighbours, without_route


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("lab3", "lab3", 7373),
        ("lab3.example.edu:80", "lab3.example.edu", 80),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("2001:DB8::0:5", "2001:db8::5", 7373),
        ("[2001:db8::5]", "2001:db8::5", 7373),
        (" [2001:db8::5]:80 ", "2001:db8::5", 80),
        ("fe80::1%eth0", "fe80::1%eth0", 7373),
    ],
)
def test_address_is_read_with_and_without_a_port(text: str, host: str, port: int) -> None:
    assert parse_seed(text, 7373) == (host, port)
    assert parse_seed(address_text(host, port), 1) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "host:", ":1", "host:0", "host:99999", "host:x", "host:\u0661", "[host]:1", "1:2:3", "[::1", "[::1]:", "[]:1"],
)
def test_invalid_address_is_an_error_with_advice(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        parse_seed(text, 7373)


@pytest.mark.parametrize(
    ("host", "port", "stated"),
    [
        ("10.0.0.1", 1, True),
        ("10.0.0.1", 65535, True),
        ("10.0.0.1", 0, False),
        ("10.0.0.1", 65536, False),
        ("0000:0000:0000:0000:0000:ffff:255.255.255.255", 80, True),
        ("lab3", 80, False),
        ("fe80::1%eth0", 80, False),
    ],
)
def test_members_state_addresses_and_ports(host: str, port: int, stated: bool) -> None:
    assert is_endpoint(host, port) is stated


def test_group_of_addresses_is_what_one_machine_cannot_vary() -> None:
    for host, group in (
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::5", "2001:db8::/64"),
        ("fe80::1%e", "fe80::/64"),
        ("x", "x"),
    ):
        assert address_group(host) == group
    for text in ("10.0.0.1", "2001:db8::/64", "1111:2222:3333:4444::/64"):
        assert is_group(text)
    for text in ("2001:db8::5", "2001:db8::5/64", "10.0.0.1/64", "2001:db8::/63", "lab3", "a" * 300):
        assert not is_group(text)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_every_address_is_one_socket_of_each_family_on_one_port(kind: socket.SocketKind) -> None:
    """So a peer's IPv4 address never looks like IPv6, whose addresses are counted by networks of 64 bits."""
    made = bound_sockets("", 0, kind)
    try:
        assert [sock.family for sock in made] == [socket.AF_INET, socket.AF_INET6]
        assert len({sock.getsockname()[1] for sock in made}) == 1
        assert made[1].getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    finally:
        for sock in made:
            sock.close()


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give this machine two interfaces of networks, and one of containers."""

    def adapter(name: str, *ips: tuple[str, int]) -> ifaddr.Adapter:
        found = [ifaddr.IP((ip, 0, 0) if ":" in ip else ip, prefix, name) for ip, prefix in ips]
        return ifaddr.Adapter(name, name, found)

    stable, temporary = ("2001:db8::1", 64), ("2001:db8::abcd", 64)
    made = [
        adapter("lo", ("127.0.0.1", 8), ("::1", 128)),
        adapter("eth0", ("fe80::1", 64), temporary, stable, ("10.0.0.1", 24)),
        adapter("docker0", ("172.17.0.1", 16), ("fd00::1", 64)),
    ]
    flags = tmp_path / "if_inet6"
    rows = [("20010db8000000000000000000000001", "80"), ("20010db800000000000000000000abcd", "01")]
    flags.write_text("".join(f"{address} 02 40 00 {flag}     eth0\n" for address, flag in rows))
    monkeypatch.setattr(discovery, "IPV6_ADDRESSES", flags)
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: made)


@pytest.mark.usefixtures("adapters")
def test_link_local_temporary_and_container_addresses_are_for_nobody() -> None:
    assert lan_addresses() == ["10.0.0.1", "2001:db8::1"]
    assert neighbours(["10.0.0.9", "10.0.1.9", "2001:db8::9", "2001:db8:1::9", "fe80::9", "lab"]) == [
        "10.0.0.9",
        "2001:db8::9",
    ]


def test_only_addresses_of_a_family_that_the_machine_lacks_are_without_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "own_addresses", lambda: {"2001:db8::1", "127.0.0.1", "::1", "fe80::1"})
    assert without_route(["10.9.9.9", "2001:db8::9", "127.0.0.1", "lab3.example.edu"]) == ["10.9.9.9"]


@pytest.mark.usefixtures("adapters")
def test_advertised_address_is_of_the_family_that_the_node_listens_on() -> None:
    assert advertised_address("", None) == "10.0.0.1"
    assert advertised_address("::", None) == "2001:db8::1"
    assert advertised_address("::", "127.0.0.1") == "2001:db8::1"
    assert advertised_address("", "::1") == "::1"
    assert advertised_address("10.9.9.9", None) == "10.9.9.9"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "port 80 on this machine is in use by another program"),
        (errno.EACCES, "this user may not use port 80 on this machine. Choose one from 1024 on with --api-port."),
        (errno.ENOBUFS, "port 80 on this machine cannot be used: No buffer space available"),
    ],
)
def test_each_reason_why_a_port_cannot_be_bound_has_its_words(number: int, words: str) -> None:
    assert bind_problem(OSError(number, os.strerror(number)), "", 80, "--api-port").startswith(words)


def test_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(OSError) as caught:
        bound_sockets("192.0.2.1", 0, socket.SOCK_STREAM)
    assert (
        bind_problem(caught.value, "192.0.2.1", 0, "--port")
        == "192.0.2.1 is not an address of this machine: see --bind"
    )
