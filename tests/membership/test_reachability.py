"""The advertised address follows what members see, within what the owner and this machine's interfaces allow."""

import socket
import threading
from random import Random
from typing import Any, cast

import pytest

from membership.identity import NodeId
from membership.reachability import FIRST_CHECK_S, Reachability
from membership.reconcile import FrameError, Reached
from membership.streams import Streams
from tests.membership.test_core import CoreNode, meet

OWN, OTHER = "192.0.2.7", "198.51.100.9"


class OneAnswer:
    """Streams to a member that gives one answer to each question whether it reaches this node."""

    def __init__(self, answer: Reached) -> None:
        self._answer = answer

    async def ask_reached(self, node: NodeId, own_host: str, own_port: int, host: str, port: int) -> Reached:
        return self._answer


async def checked(
    monkeypatch: pytest.MonkeyPatch, seen_host: str, *, explicit: str | None = None, udp: bool = False
) -> Reachability:
    """Return the state after a member has said where it sees this node, whose interfaces have the address `OWN`."""
    monkeypatch.setattr("membership.reachability.lan_addresses", lambda: [OWN])
    monkeypatch.setattr("membership.reachability.advertised_address", lambda bound, towards: "203.0.113.1")
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    found = Reachability("0.0.0.0", explicit, {}, ann, Random(1))
    await found.choose(7373, None)
    ann.now = FIRST_CHECK_S
    streams = OneAnswer(Reached(1, 1, udp, "acked", seen_host))
    await found.check_if_due(ann.core, cast(Streams, streams))
    return found


async def test_address_of_an_own_interface_that_a_member_sees_is_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await checked(monkeypatch, OWN)).host == OWN


async def test_answer_to_an_earlier_question_or_of_another_node_says_nothing() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")

    class Answering(Streams):
        late = 0

        async def _ask(self, question: Any, host: str, port: int) -> tuple[NodeId, Any]:
            return bob.identity.node_id, Reached(1, question.nonce + self.late, True, "acked", OWN)

    streams = Answering.__new__(Answering)
    streams._core = ann.core
    assert (await streams.ask_reached(bob.identity.node_id, OWN, 1, OTHER, 2)).udp
    with pytest.raises(FrameError, match="does not match the question"):
        await streams.ask_reached(ann.identity.node_id, OWN, 1, OTHER, 2)
    streams.late = 1
    with pytest.raises(FrameError, match="does not match the question"):
        await streams.ask_reached(bob.identity.node_id, OWN, 1, OTHER, 2)


async def test_address_of_another_machine_is_never_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await checked(monkeypatch, OTHER)).host == "203.0.113.1"


async def test_address_that_the_owner_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await checked(monkeypatch, OWN, explicit="203.0.113.2")).host == "203.0.113.2"


async def test_name_that_the_owner_set_is_resolved_once_and_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def getaddrinfo(host: str, *wanted: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        asked.append((host, threading.current_thread() is threading.main_thread()))
        return [(0, 0, 0, "", (address, 0)) for address in ("2001:db8::7", "203.0.113.2")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert (await checked(monkeypatch, OWN, explicit="lab.example.edu")).host == "203.0.113.2"
    assert asked == [("lab.example.edu", False)]


async def test_name_that_nobody_can_resolve_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="is not a name"):
        await checked(monkeypatch, OWN, explicit="a..b")


async def test_address_at_which_the_node_is_reached_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await checked(monkeypatch, OWN, udp=True)).host == "203.0.113.1"
