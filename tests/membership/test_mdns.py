"""Which mDNS announcements a node accepts. Anybody on its network can send them."""

from types import SimpleNamespace
from typing import Any

import pytest

from membership import mdns
from membership.discovery import MdnsConfig
from membership.mdns import MdnsBeacon

ME, OTHER, MESH = b"m" * 32, b"o" * 32, b"mesh" * 8
GOOD = {b"v": b"1", b"mesh": MESH.hex()[:8].encode(), b"id": OTHER.hex().encode()}


async def heard(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> list[tuple[bytes, str, int]]:
    """Return what a node finds in this answer about another one."""

    class Info:
        port, properties, addresses = 7373, GOOD, ("192.0.2.7",)

        def __init__(self, *names: str) -> None:
            self.__dict__.update(answer)

        async def async_request(self, *asked: object) -> bool:
            return True

        def parsed_addresses(self, version: object) -> tuple[str, ...]:
            return self.addresses

    found: list[tuple[bytes, str, int]] = []
    monkeypatch.setattr(mdns, "AsyncServiceInfo", Info)
    beacon = MdnsBeacon(MdnsConfig(), ME, "me", MESH, "192.0.2.1", 7373, lambda *other: found.append(other))
    nothing: Any = SimpleNamespace()
    await beacon._look_up(nothing, mdns.SERVICE, "other")
    return found


async def test_node_of_this_mesh_is_found_at_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await heard(monkeypatch, addresses=("192.0.2.7", "fe80::7", "2001:db8::7")) == [
        (OTHER, "192.0.2.7", 7373),
        (OTHER, "2001:db8::7", 7373),
    ], "an address of a link needs its interface"


@pytest.mark.parametrize(
    "answer",
    [
        {"properties": {**GOOD, b"mesh": b"00000000"}},
        {"properties": {b"id": GOOD[b"id"]}},
        {"properties": {**GOOD, b"id": ME.hex().encode()}},
        {"properties": {**GOOD, b"id": b"07" * 31}},
        {"properties": {**GOOD, b"id": b"no number"}},
        {"properties": {**GOOD, b"id": None}},
        {"port": None},
    ],
)
async def test_other_announcements_are_ignored(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> None:
    assert await heard(monkeypatch, **answer) == []
