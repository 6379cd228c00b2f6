"""Packets over TCP where UDP is blocked: when, for whom, within which bounds, and back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from membership import paths
from membership.envelope import seal_to
from membership.identity import Identity
from membership.node import MembershipNode
from membership.paths import BLOCKED_S, MISSES, RECHECK_S, VERIFIED_S, Paths
from membership.streams import PACKET
from membership.wire import Ack, Ping, decode_packet, encode
from tests.membership.test_core import CoreNode
from tests.membership.test_node import LOOPBACK, Mesh, alive, state, until

ANN, BOB, EVE = b"a", b"b", b"e"


def test_single_lost_packet_changes_nothing_and_an_ack_forgives() -> None:
    known = Paths()
    for number in range(3 * MISSES):
        known.missed(ANN, float(number))
        known.acked(ANN, float(number))
    assert not known.by_stream(ANN, 10.0)
    for _ in range(MISSES):
        known.missed(ANN, 10.0)
    assert known.by_stream(ANN, 10.0) and not known.by_stream(BOB, 10.0)


def test_udp_is_blocked_for_all_only_while_nobody_acks() -> None:
    known = Paths()
    known.came_by_stream(ANN, 0.0)
    known.came_by_stream(BOB, 0.0)
    assert known.by_stream(EVE, 0.0)
    known.acked(EVE, 1.0)
    assert not known.by_stream(EVE, 1.0 + BLOCKED_S) and known.by_stream(ANN, 1.0)
    assert known.by_stream(EVE, 1.1 + BLOCKED_S)


def test_udp_is_tried_again_and_its_success_outweighs_packets_that_come_over_tcp() -> None:
    known = Paths()
    known.came_by_stream(ANN, 0.0)
    assert known.due(RECHECK_S - 1) == [] and known.due(RECHECK_S) == [ANN] and known.due(RECHECK_S) == []
    known.reached(ANN, RECHECK_S)
    known.came_by_stream(ANN, RECHECK_S + 1)
    assert not known.by_stream(ANN, RECHECK_S + 1), "one direction may be blocked alone"
    known.came_by_stream(ANN, RECHECK_S + VERIFIED_S)
    assert known.by_stream(ANN, RECHECK_S + VERIFIED_S)


def test_flood_over_many_connections_is_refused_before_signatures_are_checked() -> None:
    ann = CoreNode("ann")
    for number in range(2000):
        assert ann.core.on_stream_packet(b"\x01" + bytes(200), f"2001:db8::{number:x}") is None
    assert ann.core.counters["refused_flood"] > 1000


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    for node in made.nodes:
        await node.stop()


async def over_tcp(node: MembershipNode, data: bytes) -> list[bytes]:
    """Send one frame and return the frames that answer it."""
    reader, writer = await asyncio.open_connection(LOOPBACK, node.port)
    writer.write(len(data).to_bytes(4, "big") + data)
    answer = await reader.read(1 << 16)
    while more := await reader.read(1 << 16):
        answer += more
    writer.close()
    frames = []
    while answer:
        size = int.from_bytes(answer[:4], "big")
        frames.append(answer[4 : 4 + size])
        answer = answer[4 + size :]
    return frames


async def test_packet_over_tcp_is_answered_on_its_connection_to_members_alone(mesh: Mesh) -> None:
    await mesh.start(2)
    target, peer = mesh.nodes[0], mesh.identities["n1"][0]
    mesh_id, me = target.trust.mesh_id, target.identity.node_id
    genuine = PACKET + seal_to(peer, mesh_id, "swim", me, encode(Ping(4711, b"", ())))
    ack, end = await over_tcp(target, genuine)
    assert end == PACKET
    answer = decode_packet(ack[len(PACKET) + 73 :])
    assert isinstance(answer, Ack) and answer.answers == 4711
    assert await over_tcp(target, genuine) == [], "a replay"
    stranger = seal_to(Identity.generate(), mesh_id, "swim", me, encode(Ping(1, b"", ())))
    assert await over_tcp(target, PACKET + stranger) == []
    assert await over_tcp(target, PACKET + genuine) == []
    assert target.counters["refused_replayed"] == 1 and target.counters["refused_foreign"] == 1


async def test_node_without_udp_hears_rumours_says_farewell_and_returns_to_udp(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RECHECK_S", 0.5)
    await mesh.start(3)
    victim, others = mesh.nodes[2], mesh.nodes[:2]
    with monkeypatch.context() as patched:
        patched.setattr(victim, "_send", lambda data, host, port: None)
        patched.setattr(victim, "_on_datagram", lambda data, source: None)
        await until(lambda: victim.counters["packets_by_tcp"] > 3, "packets to go over TCP")
        await until(lambda: all(n.counters["packets_by_tcp"] > 0 for n in others), "answers to its probes over TCP")
    await until(lambda: all(alive(n) == 3 for n in mesh.nodes), "all to be alive")
    sent = victim.counters["packets_by_tcp"]
    now = victim._clock.boot
    nodes = [n.identity.node_id for n in others]
    await until(lambda: not any(victim._core.paths.by_stream(n, now()) for n in nodes), "UDP to be used again")
    monkeypatch.setattr(victim, "_send", lambda data, host, port: None)
    monkeypatch.setattr(victim, "_on_datagram", lambda data, source: None)
    await until(lambda: victim.counters["packets_by_tcp"] > sent + 3, "packets to go over TCP again")
    await until(lambda: all(victim._core.paths.by_stream(n, now()) for n in nodes), "both to get packets over TCP")
    await victim.leave()
    await victim.stop()
    await until(lambda: all(state(n, "n2") == "left" for n in others), "the farewell over TCP to be known")
