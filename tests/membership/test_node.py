"""Real nodes over real UDP and TCP on loopback."""

import asyncio
import math
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from membership import node as node_module
from membership import streams
from membership.admission import request_join
from membership.config import SwimConfig
from membership.core import SLICE
from membership.discovery import MdnsConfig
from membership.effects import KeepChain, KeepRevocations, PersistEpoch, SendPacket, SetTimer, WantReconcile
from membership.envelope import seal, seal_to
from membership.framing import connected, read_frame, write_frame
from membership.identity import Identity
from membership.node import MAX_RECONCILES, MAX_UNPROVEN, MembershipNode, PortInUse, SystemClock
from membership.reconcile import Delta, Greeting, Hello, ReachMe, encode_frame
from membership.snapshot import RevocationFile, SnapshotFile
from membership.streams import MAX_SERVED, MAX_SERVED_PER_HOST
from membership.trust import (
    TrustError,
    TrustStore,
    found_mesh,
    make_invite,
    make_revocation,
    parse_invite,
    prove_invite,
)
from membership.wire import Left, Ping, Suspect, encode
from tests.chains import admitted

LOOPBACK = "127.0.0.1"


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.02)


class WrongClock(SystemClock):
    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def unix(self) -> float:
        return super().unix() + self._ahead_s


class Mesh:
    """Nodes of one mesh in this process; the first one's address is the others' seed."""

    def __init__(self, directory: Path) -> None:
        now = time.time()
        self.directory = directory
        self.root = Identity.generate()
        self.genesis, chain = found_mesh(self.root, "test", "n0", "ada", now)
        self.identities = {"n0": (self.root, chain)}
        self.nodes: list[MembershipNode] = []

    def make(
        self,
        nick: str,
        *,
        mdns: bool = False,
        port: int = 0,
        seed: int | None = None,
        ahead_s: float = 0.0,
        place: str = "",
        on_fatal: Callable[[str], None] = lambda reason: None,
    ) -> MembershipNode:
        if nick not in self.identities:
            identity = Identity.generate()
            self.identities[nick] = (
                identity,
                admitted(self.root, self.genesis, self.identities["n0"][1], identity.node_id, nick, "ada", time.time()),
            )
        identity, chain = self.identities[nick]
        known = seed if seed is not None else self.nodes[0].port if self.nodes and not mdns else None
        seeds = [f"{LOOPBACK}:{known}"] if known is not None else []
        return MembershipNode(
            identity,
            TrustStore(self.genesis),
            chain,
            SwimConfig.local(),
            self.directory / (place or nick),
            bind_host=LOOPBACK,
            port=port,
            seeds=seeds,
            mdns=MdnsConfig((LOOPBACK,)) if mdns else None,
            clock=WrongClock(ahead_s),
            on_fatal=on_fatal,
            relay_nodes=2,
        )

    async def start(self, count: int, *, mdns: bool = False) -> None:
        for number in range(count):
            node = self.make(f"n{number}", mdns=mdns)
            await node.start()
            self.nodes.append(node)
        await until(lambda: all(alive(n) == count for n in self.nodes), "all to see all")


def alive(node: MembershipNode) -> int:
    return sum(member.state == "alive" for member in node.members())


def state(node: MembershipNode, nick: str) -> str:
    return next((member.state for member in node.members() if member.nick == nick), "")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    for node in made.nodes:
        await node.stop()


async def test_five_nodes_join_detect_a_crash_and_see_a_leave(mesh: Mesh) -> None:
    await mesh.start(5)
    await mesh.nodes[4].stop()
    await until(lambda: all(state(n, "n4") == "dead" for n in mesh.nodes[:4]), "the crash to be known")
    await mesh.nodes[3].leave()
    await mesh.nodes[3].stop()
    await until(lambda: all(state(n, "n3") == "left" for n in mesh.nodes[:3]), "the farewell to be known")
    assert alive(mesh.nodes[0]) == 3


async def test_nodes_find_each_other_by_mdns_on_loopback(mesh: Mesh) -> None:
    await mesh.start(3, mdns=True)


async def test_records_spread_and_a_restarted_node_outranks_its_earlier_run(mesh: Mesh) -> None:
    await mesh.start(3)
    me = mesh.nodes[2].identity.node_id
    mesh.nodes[2].publish("jobs/x", b"first", 600)
    mesh.nodes[2].publish("jobs/large", bytes(5000), 600)
    await until(lambda: all(n.record(me, "jobs/x") and n.record(me, "jobs/large") for n in mesh.nodes), "the records")
    epoch = next(m.epoch for m in mesh.nodes[0].members() if m.node_id == me)
    await mesh.nodes[2].stop()
    await until(lambda: state(mesh.nodes[0], "n2") == "dead", "the crash to be known")
    again = mesh.make("n2")
    await again.start()
    mesh.nodes[2] = again
    await until(lambda: all(alive(n) == 3 for n in mesh.nodes), "the node to be back")
    assert next(m.epoch for m in mesh.nodes[0].members() if m.node_id == me) > epoch
    again.publish("jobs/x", b"second", 600)
    await until(
        lambda: all(n.record(me, "jobs/x").body == b"second" for n in mesh.nodes),  # type: ignore[union-attr]
        "the newer record",
    )


async def test_withdrawn_record_is_gone_everywhere(mesh: Mesh) -> None:
    await mesh.start(2)
    me = mesh.nodes[1].identity.node_id
    for section in ("jobs/x", "jobs/y"):
        mesh.nodes[1].publish(section, b"here", 600)
    await until(lambda: len(mesh.nodes[0].records("jobs/")) == 2, "the records")
    mesh.nodes[1].withdraw("jobs/x")
    await until(lambda: len(mesh.nodes[0].records("jobs/")) == 1, "the end of one")
    assert [node.record(me, "jobs/x") for node in mesh.nodes] == [None, None]
    assert all(node.record(me, "jobs/y") for node in mesh.nodes)


async def test_restarted_node_is_told_at_its_first_contact_what_it_published_before(mesh: Mesh) -> None:
    await mesh.start(2)
    me = mesh.nodes[1].identity.node_id
    mesh.nodes[1].publish("disk", b"its age", 600)
    await until(lambda: mesh.nodes[0].record(me, "disk") is not None, "the record")
    await mesh.nodes[1].stop()
    mesh.nodes[1] = mesh.make("n1")
    await mesh.nodes[1].start()
    await mesh.nodes[1].first_contact(60.0)
    known = mesh.nodes[1].record(me, "disk")
    assert known is not None and known.body == b"its age"


async def test_node_that_knows_no_address_waits_for_nobody(mesh: Mesh) -> None:
    mesh.nodes.append(mesh.make("n0"))
    await mesh.nodes[0].start()
    async with asyncio.timeout(60.0):
        await mesh.nodes[0].first_contact(math.inf)


async def test_draining_is_announced(mesh: Mesh) -> None:
    await mesh.start(2)
    mesh.nodes[1].set_draining(True)
    await until(lambda: any(m.draining for m in mesh.nodes[0].members()), "the drain to be known")


async def test_unsigned_foreign_and_replayed_messages_are_rejected_and_counted(mesh: Mesh) -> None:
    await mesh.start(2)
    target = mesh.nodes[0]
    peer, _ = mesh.identities["n1"]
    before = [(m.node_id, m.state, m.incarnation) for m in target.members()]
    mesh_id = target.trust.mesh_id
    me = target.identity.node_id
    genuine = seal_to(peer, mesh_id, "swim", me, encode(Ping(4711, b"", ())))
    stranger = Identity.generate()
    foreign = seal_to(stranger, mesh_id, "swim", me, encode(Ping(1, b"", ())))
    other_mesh = seal_to(peer, b"\0" * 16, "swim", me, encode(Ping(2, b"", ())))
    forged = seal(stranger, mesh_id, "member", encode(Left(peer.node_id, 1 << 60, 0)))
    carrier = seal_to(peer, mesh_id, "swim", me, encode(Ping(3, b"", (("member", forged),))))
    misdirected = seal_to(peer, mesh_id, "swim", stranger.node_id, encode(Ping(5, b"", ())))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for data in (
            b"junk",
            genuine[:-1] + bytes([genuine[-1] ^ 1]),
            other_mesh,
            foreign,
            genuine,
            genuine,
            carrier,
            misdirected,
        ):
            sender.sendto(data, (LOOPBACK, target.port))
    # Junk, an altered packet, one of another mesh, a forged farewell, and a packet for another node.
    await until(lambda: target.counters["refused_unsigned"] == 5, "the packets to be read")
    assert target.counters["refused_foreign"] == 1
    assert target.counters["refused_replayed"] == 1
    assert [(m.node_id, m.state, m.incarnation) for m in target.members()] == before


async def test_node_of_another_mesh_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    await mesh.start(2)
    stranger = Identity.generate()
    genesis, chain = found_mesh(stranger, "test", "evil", "eve", time.time())
    intruder = MembershipNode(
        stranger,
        TrustStore(genesis),
        chain,
        SwimConfig.local(),
        tmp_path / "evil",
        bind_host=LOOPBACK,
        port=0,
        seeds=[f"{LOOPBACK}:{mesh.nodes[0].port}"],
    )
    await intruder.start()
    try:
        await until(lambda: mesh.nodes[0].counters["refused_unsigned"] > 0, "the stranger to be refused")
        assert alive(mesh.nodes[0]) == 2 and alive(intruder) == 1
    finally:
        await intruder.stop()


async def test_revoked_node_is_excluded_everywhere_and_stays_excluded(mesh: Mesh) -> None:
    """The founder revokes a key and leaves; later nodes learn of it from the others, and a restart keeps it."""
    await mesh.start(4)
    founder, victim = mesh.nodes[0], mesh.nodes[3]
    founder.publish_statement(make_revocation(mesh.root, founder.trust, victim.identity.node_id, "test", time.time()))
    await until(lambda: all(state(n, "n3") == "revoked" for n in mesh.nodes[:3]), "the revocation to spread")
    await until(lambda: "revoked" in victim.problem, "the revoked node to hear of it")
    await founder.leave()
    await founder.stop()
    await mesh.nodes[1].stop()
    again = mesh.make("n1", seed=mesh.nodes[2].port)
    await again.start()
    mesh.nodes[1] = again
    assert victim.identity.node_id in again.trust.revoked, "read from disk before any message is accepted"
    newcomer = mesh.make("n4", seed=mesh.nodes[2].port)
    await newcomer.start()
    mesh.nodes.append(newcomer)
    await until(lambda: victim.identity.node_id in newcomer.trust.revoked, "the newcomer to hear of it")
    assert state(newcomer, "n3") in {"", "revoked"}
    await victim.stop()
    with pytest.raises(TrustError, match="revoked"):
        returned = mesh.make("n3")
        try:
            await returned.start()
        finally:
            await returned.stop()


async def test_port_in_use_is_an_error_with_advice(mesh: Mesh) -> None:
    await mesh.start(1)
    second = mesh.make("n1", port=mesh.nodes[0].port)
    with pytest.raises(PortInUse, match="--port"):
        await second.start()
    await second.stop()


async def test_closed_udp_port_is_opened_again(mesh: Mesh) -> None:
    await mesh.start(2)
    node, other = mesh.nodes
    for transport in node._transports.values():
        transport.sendto(b"x", (LOOPBACK, 70_000))
    assert all(transport.is_closing() for transport in node._transports.values())
    await node._reopen_transports()
    assert await node._ping_udp(other.identity.node_id, LOOPBACK, other.port)
    assert await other._ping_udp(node.identity.node_id, LOOPBACK, node.port)


async def test_address_that_cannot_be_reached_is_no_bug(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes
    for host, port in (("a..b", 7373), (LOOPBACK, 70_000)):
        node._perform([WantReconcile(b"", host, port)])
    await until(lambda: node.counters["reconcile_failed"] == 2, "both to fail")
    assert "failed" not in caplog.text


async def test_node_that_leaves_soon_remembers_the_addresses_of_others(mesh: Mesh) -> None:
    await mesh.start(2)
    first, second = mesh.nodes
    await second.leave()
    peers = SnapshotFile(mesh.directory / "n1" / "snapshot.json").read().peers
    assert [(peer.node, peer.port) for peer in peers] == [(first.identity.node_id, first.port)]


async def test_damaged_snapshot_is_moved_aside(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0" / "snapshot.json").write_bytes(b"\xff{ nonsense")
    await mesh.start(1)
    assert "moved to" in mesh.nodes[0].problem
    assert (tmp_path / "n0" / "snapshot.damaged").exists()


async def test_wrong_clock_is_reported_by_its_node_only(mesh: Mesh) -> None:
    await mesh.start(3)
    wrong = mesh.make("n3", ahead_s=100.0)
    await wrong.start()
    mesh.nodes.append(wrong)
    await until(lambda: all(alive(n) == 4 for n in mesh.nodes), "all to see all")
    await until(lambda: "clock" in wrong.problems, "it to notice")
    assert re.search(r"\b(9[6-9]|10[0-4]) s ahead of", wrong.problems["clock"]), "the tolerance covers network delay"
    assert not any("clock" in node.problems for node in mesh.nodes[:3])
    assert wrong.clock_offset_s is not None and wrong.clock_offset_s < -95


async def test_streams_are_bounded(mesh: Mesh) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes
    writers: list[asyncio.StreamWriter] = []

    async def open_streams(source: str, count: int) -> int:
        """Open streams that send one byte; return how many of them the node has refused."""
        before = node.counters["refused_busy"]
        for _ in range(count):
            writers.append((await asyncio.open_connection(LOOPBACK, node.port, local_addr=(source, 0)))[1])
            writers[-1].write(b"\0")
        await until(lambda: serving() + node.counters["refused_busy"] == len(writers), "them to be accepted")
        return node.counters["refused_busy"] - before

    def serving() -> int:
        assert node._streams is not None
        return len(node._streams._strangers)

    assert await open_streams("127.0.0.2", 20) == 4, "16 of one address"
    assert await open_streams("127.0.0.3", 10) == 0
    assert await open_streams("127.0.0.4", 10) == 4, "32 in all"
    for writer in writers:
        writer.close()


async def test_few_bytes_of_a_stranger_are_read(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its refusals make one line of the log; a newcomer and the members of another address are heard."""
    monkeypatch.setattr(streams, "FRAME_LIMIT", 64 * 1024)
    monkeypatch.setattr(streams, "STRANGER_BYTES_S", 1.0)
    node = mesh.make("n0")
    await node.start()
    mesh.nodes.append(node)
    caplog.set_level("INFO", "membership.streams")
    data = seal(Identity.generate(), node.trust.mesh_id, "reconcile", encode_frame(Hello(1, b"x", [], [])))
    for _ in range(40):
        reader, writer = await asyncio.open_connection(LOOPBACK, node.port, local_addr=("127.0.0.2", 0))
        await write_frame(writer, data)
        assert await reader.read() == b""
        writer.close()
    assert node.counters["refused_foreign"] == 32 and node.counters["refused_flood"] == 8
    assert len([line for line in caplog.messages if "refused" in line]) == 1
    for number in range(1, 4):
        mesh.nodes.append(mesh.make(f"n{number}"))
        await mesh.nodes[-1].start()
    await until(lambda: all(alive(n) == 4 for n in mesh.nodes), "all to see all")
    left = node._streams._buckets._buckets[LOOPBACK][0]
    assert left == 64 * 1024, "what members send does not count"


async def test_few_bytes_of_a_member_are_read(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a member sends beyond its bound counts against its address, and against no other member."""
    monkeypatch.setattr(streams, "FRAME_LIMIT", 64 * 1024)
    monkeypatch.setattr(streams, "MEMBER_BYTES_S", 1.0)
    await mesh.start(3)
    node, member, other = mesh.nodes
    await member.stop()
    digest = [(number.to_bytes(32, "big"), "a section", 1, 1) for number in range(1200)]
    answered = []
    for nonce in range(8):
        reader, writer = await asyncio.open_connection(LOOPBACK, node.port, local_addr=("127.0.0.2", 0))
        hello = encode_frame(Hello(nonce, member.chain, digest, []))
        assert len(hello) > 50_000
        await write_frame(writer, seal(member.identity, node.trust.mesh_id, "reconcile", hello))
        answered.append(await reader.read(1) != b"")
        writer.close()
    assert answered == [True] * 4 + [False] * 4
    assert await other._streams.ping(node.identity.node_id, LOOPBACK, node.port, 5.0) == "acked"


async def test_copies_of_a_members_frame_take_nothing_of_it(mesh: Mesh) -> None:
    """A frame that was read on the network, sent again and again, took the places and the bytes of members."""
    await mesh.start(2)
    node, member = mesh.nodes
    hello = member._core.seal_frame(Hello(1, member.chain, [], []))
    async with connected(LOOPBACK, node.port) as (reader, writer):
        await write_frame(writer, hello)
        assert await reader.read(1) != b""
    for _ in range(2 * MAX_SERVED_PER_HOST):
        async with connected(LOOPBACK, node.port) as (reader, writer):
            await write_frame(writer, hello)
            assert await reader.read() == b""
    assert node.counters["refused_replayed"] == 2 * MAX_SERVED_PER_HOST


async def test_node_does_other_work_while_it_applies_a_large_frame(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member's frame of accusations of the receiver wrote its epoch to the disk for each, and stopped it for minutes."""
    await mesh.start(2)
    node, liar = mesh.nodes
    epoch, turns, turn_of = node._core.swim.epoch, 0, list[int]()
    apply = node._core._apply_evidence

    def counted(sealed: bytes, rumoured: bool) -> None:
        turn_of.append(turns)
        apply(sealed, rumoured)

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    lies = [Suspect(node.identity.node_id, epoch + number, number) for number in range(1000)]
    evidence = [seal(liar.identity, node.trust.mesh_id, "member", encode(lie)) for lie in lies]
    reader, writer = await asyncio.open_connection(LOOPBACK, node.port)
    await write_frame(writer, liar._core.seal_frame(Hello(1, liar.chain, [], [])))
    _, reply = liar._core.open_frame(await read_frame(reader))
    monkeypatch.setattr(node._core, "_apply_evidence", counted)
    working = asyncio.create_task(other_work())
    await write_frame(writer, liar._core.seal_frame(Delta(2, reply.nonce, [], evidence)))
    await read_frame(reader)
    working.cancel()
    writer.close()
    assert len(turn_of) >= 1000 and len(set(turn_of)) >= 1000 // SLICE
    assert node._core.swim.epoch == epoch, "nothing was written to the disk"


async def test_streams_of_strangers_keep_nobody_out(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "EXCHANGE_TIMEOUT_S", 60.0)  # so that none ends by itself
    await mesh.start(2)
    node, member = mesh.nodes
    silent: list[asyncio.StreamWriter] = []
    serving = node._streams._strangers

    async def flood(count: int) -> None:
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(count):
                silent.append((await asyncio.open_connection(LOOPBACK, node.port, local_addr=(source, 0)))[1])
                silent[-1].write(b"\0")

    await flood(MAX_SERVED_PER_HOST)
    await until(lambda: len(serving) == MAX_SERVED, "all places of strangers to be taken")
    newcomer = mesh.make("n2", seed=1)
    await newcomer.start()
    mesh.nodes.append(newcomer)
    await newcomer._streams.run(newcomer._core.push_pull(), LOOPBACK, node.port)
    assert alive(newcomer) == 3 and node.counters["refused_busy"] >= 1
    # A member that says no more keeps its place from another flood.
    frame = seal(member.identity, node.trust.mesh_id, "reconcile", encode_frame(Greeting(1, b"")))
    reader, writer = await asyncio.open_connection(LOOPBACK, node.port)
    await write_frame(writer, frame)
    assert await read_frame(reader)
    busy = node.counters["refused_busy"]
    await flood(MAX_SERVED)
    await until(lambda: node.counters["refused_busy"] >= busy + MAX_SERVED, "the flood to be accepted")
    assert len(node._streams._members) >= 1 and not reader.at_eof()
    for one in (writer, *silent):
        one.close()


async def test_streams_of_members_are_bounded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "EXCHANGE_TIMEOUT_S", 60.0)
    await mesh.start(2)
    node, member = mesh.nodes
    await member.stop()
    writers: list[asyncio.StreamWriter] = []
    for number in range(MAX_SERVED_PER_HOST + 4):
        greeting = encode_frame(Greeting(number, b""))
        writers.append((await asyncio.open_connection(LOOPBACK, node.port, local_addr=("127.0.0.2", 0)))[1])
        await write_frame(writers[-1], seal(member.identity, node.trust.mesh_id, "reconcile", greeting))
    await until(lambda: node.counters["refused_busy"] == 4, "the excess to be refused")
    assert list(node._streams._members.values()).count("127.0.0.2") == MAX_SERVED_PER_HOST
    for writer in writers:
        writer.close()


async def test_reachability_is_answered_for_members_only(mesh: Mesh) -> None:
    await mesh.start(3)
    seen = await mesh.nodes[1].network_report()
    assert seen.others == 2 and len(seen.asked) == 2
    assert all(asked.udp and asked.tcp == "acked" and asked.seen_host == LOOPBACK for asked in seen.asked)
    stranger = mesh.make("n9")
    node = mesh.nodes[0]
    stranger.trust.admit_chain(mesh.identities["n0"][1], time.time())
    await stranger.start()
    mesh.nodes.append(stranger)
    foreign = Identity.generate()
    reader, writer = await asyncio.open_connection(LOOPBACK, node.port)
    frame = seal(foreign, node.trust.mesh_id, "reconcile", encode_frame(ReachMe(1, LOOPBACK, 9)))
    writer.write(len(frame).to_bytes(4, "big") + frame)
    assert await reader.read() == b"", "the node closes the connection"
    writer.close()
    assert node.counters["refused_foreign"] >= 1


async def test_of_two_machines_with_one_key_the_younger_ends(mesh: Mesh) -> None:
    await mesh.start(2)
    elder, ended = mesh.nodes[1], list[str]()
    copy = mesh.make("n1", seed=mesh.nodes[0].port, place="copy", on_fatal=ended.append)
    await copy.start()
    mesh.nodes.append(copy)
    await until(lambda: bool(ended), "the copy to end")
    assert "was started earlier with this node's key" in ended[0]
    await until(lambda: "cloned" in elder.problems, "the elder to report the copy")
    await copy.leave()
    packets = copy.counters["packets_in"]
    seen = elder.counters["packets_in"]
    await until(lambda: elder.counters["packets_in"] > seen + 10, "the elder to go on")
    assert copy.counters["packets_in"] == packets, "it hears nothing any more"
    reader, writer = await asyncio.open_connection(LOOPBACK, copy.port)
    writer.write(b"\0")
    with suppress(ConnectionResetError):  # closed with the byte unread
        async with asyncio.timeout(5):
            assert await reader.read() == b"", "it answers nobody"
    writer.close()
    assert state(mesh.nodes[0], "n1") == "alive", "the copy says no farewell for the elder"


async def test_certificate_of_another_node_starts_nothing(mesh: Mesh) -> None:
    await mesh.start(1)
    stranger = Identity.generate()
    mesh.identities["n1"] = (stranger, mesh.identities["n0"][1])
    node = mesh.make("n1")
    with pytest.raises(TrustError, match="is for another key"):
        await node.start()
    await node.stop()


async def test_invite_used_before_a_restart_stays_used(mesh: Mesh) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes
    text = make_invite(mesh.root, node.trust, node.credentials, (), 3600, time.time() + 1, user="bob")
    using = parse_invite(text, time.time())

    async def join(port: int) -> str:
        newcomer = Identity.generate()
        proof = prove_invite(using, newcomer.node_id, "bob")
        _, _, answer = await request_join(LOOPBACK, port, newcomer, "desk", "bob", 1, time.time(), using.grant, proof)
        return answer.state

    assert await join(node.port) == "admitted"
    await node.stop()
    mesh.nodes[0] = again = mesh.make("n0")
    await again.start()
    assert await join(again.port) == "refused"


async def test_push_pulls_at_a_time_are_bounded(mesh: Mesh) -> None:
    """Forged packets name addresses that take a connection and say nothing."""
    opened = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.read()
        await reader.read()

    server = await asyncio.start_server(silent, LOOPBACK, 0)
    await mesh.start(1)
    (node,) = mesh.nodes
    port = server.sockets[0].getsockname()[1]
    for _ in range(MAX_RECONCILES + 8):
        node._perform([WantReconcile(b"", LOOPBACK, port, unproven=True)])
    assert node.counters["reconciles_put_off"] == MAX_RECONCILES + 8 - MAX_UNPROVEN
    before = node.counters["reconciles_put_off"]
    for _ in range(MAX_RECONCILES - MAX_UNPROVEN + 8):
        node._perform([WantReconcile(b"", LOOPBACK, port, False)])
    await until(lambda: opened >= MAX_RECONCILES, "the push-pulls to begin")
    assert node.counters["reconciles_put_off"] - before == 8
    assert opened == MAX_RECONCILES
    server.close()


async def test_epoch_and_certificate_are_kept_before_anything_else_is_sent(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes
    kept: list[bytes] = []
    snapshot = SnapshotFile(node._snapshots.path)
    node._keep_chain = kept.append
    seen: list[tuple[int, list[bytes]]] = []
    monkeypatch.setattr(node, "_send_packet", lambda effect: seen.append((snapshot.read().epoch, list(kept))))
    epoch, (_, chain) = snapshot.read().epoch + 5, mesh.identities["n0"]
    packet = SendPacket(b"p" * 32, LOOPBACK, 9, Ping(1, b"", ()))
    node._perform([PersistEpoch(epoch), KeepChain(chain), packet])
    assert seen == [(epoch, [chain])]


async def test_full_disk_loses_no_timer_and_what_was_not_saved_is_saved_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "TICK_S", 0.01)
    monkeypatch.setattr(node_module, "UPKEEP_S", 0.0)
    await mesh.start(1)
    (node,) = mesh.nodes

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left")

    sealed = make_revocation(mesh.root, node.trust, bytes(32), "test", time.time())
    snapshots, revoked = SnapshotFile(node._snapshots.path), mesh.directory / "n0" / "revoked"
    epoch = snapshots.read().epoch + 5
    with monkeypatch.context() as disk:
        disk.setattr("membership.snapshot.write_durably", full)
        node._perform([PersistEpoch(epoch), KeepRevocations([sealed]), SetTimer("gossip", 7, math.inf)])
        assert "gossip" in node._timers and not revoked.exists()
    await until(lambda: revoked.exists() and snapshots.read().epoch == epoch, "both to be saved", 20.0)
    RevocationFile(revoked).read_into(kept := TrustStore(mesh.genesis))
    assert kept.revoked == {bytes(32)}


async def test_node_without_a_valid_certificate_asks_again_now_and_then(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes
    asked: list[tuple[str, int]] = []
    granted = b""

    async def answered(host: str, port: int, *given: object) -> tuple[None, None, SimpleNamespace]:
        asked.append((host, port))
        return None, None, SimpleNamespace(granted=granted)

    published: list[bytes] = []
    monkeypatch.setattr(node_module, "request_join", answered)
    monkeypatch.setattr(node._core, "publish_chain", published.append)
    node._seeds = [(LOOPBACK, number) for number in range(1, 6)]
    node.problems["certificate"] = "its admitter was revoked"
    for _ in range(3):
        await node._join_again()
    assert len(asked) == 3 == len(set(asked)) and not published, "three nodes, once in a while"
    node._renew_at, granted = 0.0, b"a new chain"
    await node._join_again()
    assert published == [granted] and "certificate" not in node.problems and len(asked) == 4


async def test_step_of_the_upkeep_that_fails_stops_no_other(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "TICK_S", 0.01)
    monkeypatch.setattr(node_module, "UPKEEP_S", 0.0)
    monkeypatch.setattr(node_module, "REPUBLISH_S", 0.0)
    node = mesh.make("n0")
    mesh.nodes.append(node)
    done = Counter[str]()

    def full() -> None:
        raise OSError("no space left")

    async def strange(*given: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(node, "_save_peers", full)
    monkeypatch.setattr(node, "_renew_if_due", strange)
    monkeypatch.setattr("membership.admission.Admission.tick", lambda self: full())
    monkeypatch.setattr("membership.core.Core.publish_statements", lambda *given, **named: done.update(["last step"]))
    await node.start()
    await until(lambda: done["last step"] >= 3, "the last step of three rounds", 20.0)
    assert node.counters["upkeep_failed"] >= 6


async def test_task_that_fails_is_logged(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    await mesh.start(1)
    (node,) = mesh.nodes

    async def broken() -> None:
        raise KeyError("x")

    task = node._spawn(broken(), "a task")
    await asyncio.wait([task])
    await until(lambda: "membership task a task failed" in caplog.text, "the failure to be logged")
    assert task not in node._tasks
