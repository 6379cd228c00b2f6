"""Addresses that jobs may reach: public ones, checked after the lookup, and none of this machine."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from membership.discovery import own_addresses
from mesh.network import addresses
from mesh.network.addresses import NotPublic, PublicAddresses, checked, is_public, is_this_machines


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "255.255.255.255"),
        *("169.254.169.254", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1", "2002:7f00:1::", "2002:a00:1::"),
        "2001:0:a9fe:a9fe::5601:5601",  # Teredo by a link-local server
        "2001:0:808:808::f7f7:f7f7",  # Teredo, from 8.8.8.8 to 8.8.8.8
        *("4000::1", "2606:4700::6810:1%eth0"),
    ],
)
def test_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::6810:1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_address_that_is_public(address: str) -> None:
    assert is_public(address)


def test_this_machines_own_address_is_known() -> None:
    assert is_this_machines("127.0.0.1") and is_this_machines("127.9.9.9")
    assert not is_this_machines("8.8.8.8")
    assert is_this_machines("::1") == ("::1" in own_addresses()), "if the kernel has IPv6"


def test_own_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_public", lambda address: True)
    assert checked(["127.0.0.1", "8.8.8.8", "8.8.8.8"]) == ["8.8.8.8"]


async def test_dead_name_server_holds_eight_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(addresses, "_look_up", lambda host: [str(done.wait(20))][:0])
    look_up = PublicAddresses()
    names = [asyncio.create_task(look_up(f"host{number}.example.org")) for number in range(20)]
    await asyncio.sleep(0)
    threads = sum(thread.name.startswith("names") for thread in threading.enumerate())
    done.set()
    assert threads == 8
    assert all(isinstance(one, NotPublic) for one in await asyncio.gather(*names, return_exceptions=True))
    assert not look_up._asked


async def test_answers_are_checked_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = list[str](), ["127.0.0.1", "8.8.4.4"]

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in answer]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    look_up = PublicAddresses()
    found = await asyncio.gather(look_up("data.example.org"), look_up("data.example.org"))
    assert found == [["8.8.4.4"]] * 2 and asked == ["data.example.org."], "never in the machine's search domains"
    answer[:] = ["10.0.0.7"]  # the name now points into the campus
    with pytest.raises(NotPublic, match="no public address"):
        await look_up("data.example.org")
