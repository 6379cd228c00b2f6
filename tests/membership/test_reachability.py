"""The advertised address follows what members see, within what the owner and this machine's interfaces allow."""

import asyncio
import socket
import threading
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from membership.core import Core
from membership.identity import NodeId
from membership.listener import Take
from membership.member import Member
from membership.reachability import AGAIN_S, CHECK_S, FIRST_CHECK_S, RECHECK_S, Reachability
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
    found = Reachability("0.0.0.0", explicit, {}, ann, Random(1), lambda connection, host: connection.close())
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


class Stage:
    """A node whose own address and whose relays' ports members reach, or do not; `lent` counts the ports that it borrowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, explicit: str | None = None) -> None:
        self.ann = CoreNode("ann")
        self.others = [CoreNode(name) for name in ("bob", "cyd")]
        for other in self.others:
            meet(self.ann, other)
        self.reaches_own = set[NodeId]()  # members that reach the own address
        self.reaches_relay = {other.host: True for other in self.others}
        self.lends, self.lent, self.running = {other.host for other in self.others}, list[str](), asyncio.Event()
        self.problems: dict[str, str] = {}
        monkeypatch.setattr("membership.reachability.lan_addresses", lambda: [OWN])
        monkeypatch.setattr("membership.reachability.advertised_address", lambda bound, towards: OWN)
        monkeypatch.setattr("membership.reachability.use", self._use)
        self.found = Reachability(
            "0.0.0.0", explicit, self.problems, self.ann, Random(1), lambda connection, host: connection.close()
        )

    async def ask_reached(self, node: NodeId, own_host: str, own_port: int, host: str, port: int) -> Reached:
        acked = node in self.reaches_own if own_host == OWN else self.reaches_relay[own_host]
        return Reached(1, 1, False, "acked" if acked else "silent", "203.0.113.1")

    async def _use(self, core: Core, member: Member, take: Take, advertise: Callable[[int], None]) -> None:
        if member.host not in self.lends:
            raise FrameError("it relays for 0 nodes")
        self.lent.append(member.host)
        advertise(7400)
        await self.running.wait()

    async def tick(self, seconds: float = 1.0) -> tuple[str, int]:
        """Let time pass, and return the advertised address."""
        self.ann.now += seconds
        await self.found.check_if_due(self.ann.core, cast(Streams, self))
        member = self.ann.core.swim.table.get(self.ann.identity.node_id)
        assert member is not None and (member.host, member.port) == (self.found.host, self.found.port)
        return self.found.host, self.found.port

    async def start(self) -> None:
        await self.found.choose(7373, None)
        self.ann.core.set_address(self.found.host, self.found.port)


async def test_node_that_two_members_do_not_reach_borrows_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    await stage.start()
    assert await stage.tick(FIRST_CHECK_S) == (OWN, 7373), "one member may be cut off itself"
    host, port = await stage.tick(AGAIN_S)
    assert (host, port) == (stage.lent[0], 7400) and "reach" not in stage.problems
    assert await stage.tick(AGAIN_S) == (host, port)
    assert await stage.tick(CHECK_S) == (host, port) and len(stage.lent) == 1
    stage.reaches_own = {other.identity.node_id for other in stage.others}
    assert await stage.tick(CHECK_S) == (OWN, 7373), "it is reached itself again"
    await stage.found.close()


async def relayed(stage: Stage) -> tuple[str, int]:
    """Have the node of a stage borrow a port, and return its address."""
    await stage.start()
    await stage.tick(FIRST_CHECK_S)
    await stage.tick(AGAIN_S)
    return await stage.tick(AGAIN_S)


async def test_relay_stays_while_it_does_not_reach_the_node_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member that said so, as one behind the same NAT, took a node's relay away at each check."""
    stage = Stage(monkeypatch)
    host, port = await relayed(stage)
    stage.reaches_own = {other.identity.node_id for other in stage.others if other.host != host}
    for _ in range(8):
        assert await stage.tick(CHECK_S) == (host, port)
    assert stage.lent == [host] and "reach" not in stage.problems
    await stage.found.close()


async def test_relay_stays_if_one_member_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    host, port = await relayed(stage)
    stage.reaches_relay = dict.fromkeys(stage.reaches_relay, False)
    assert await stage.tick(CHECK_S) == (host, port)
    stage.reaches_relay = dict.fromkeys(stage.reaches_relay, True)
    assert await stage.tick(AGAIN_S) == (host, port) and stage.lent == [host]
    await stage.found.close()


async def test_relay_that_is_no_member_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    host, _ = await relayed(stage)
    (relay,) = (other for other in stage.others if other.host == host)
    stage.ann.core._expel(relay.identity.node_id)
    await stage.tick(0.1)
    assert len(stage.lent) == 2 and stage.found.host == stage.lent[1] != host
    await stage.found.close()


async def test_relay_that_leaves_or_whose_port_nobody_reaches_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    await stage.start()
    stage.reaches_relay = dict.fromkeys(stage.reaches_relay, False)
    await stage.tick(FIRST_CHECK_S)
    first, _ = await stage.tick(AGAIN_S)
    stage.reaches_relay = {host: host != first for host in stage.reaches_relay}
    second, _ = await stage.tick(AGAIN_S)
    assert stage.lent == [first, second] and first != second, "a firewall keeps the port of the first one closed"
    stage.running.set()
    await asyncio.sleep(0)
    stage.running.clear()
    stage.reaches_relay = dict.fromkeys(stage.reaches_relay, True)
    for _ in range(3):
        await stage.tick(0.1)
    assert len(stage.lent) == 3 and stage.found.host != OWN, "at once, without asking whether it is needed"
    await stage.found.close()


async def test_node_that_gets_no_relay_tells_and_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    await stage.start()
    stage.lends.clear()
    await stage.tick(FIRST_CHECK_S)
    assert await stage.tick(AGAIN_S) == (OWN, 7373)
    assert "reach" in stage.problems
    stage.lends = {stage.others[1].host}
    for _ in range(3):
        await stage.tick(RECHECK_S)
    assert stage.found.host == stage.others[1].host and "reach" not in stage.problems
    await stage.found.close()


async def test_node_whose_owner_set_its_address_borrows_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, explicit=OWN)
    await stage.start()
    for _ in range(4):
        assert await stage.tick(RECHECK_S) == (OWN, 7373)
    assert stage.lent == [] and "reach" in stage.problems
