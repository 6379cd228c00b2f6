"""Cores of a few nodes exchanging messages without sockets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.config import SwimConfig
from membership.core import ITEMS_S, MAX_ITEMS, MAX_UNKNOWN, SLICE, Core, StreamExchange
from membership.effects import (
    Effect,
    KeepChain,
    KeepRevocations,
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    WantReconcile,
)
from membership.envelope import EnvelopeError, MeshSealer
from membership.identity import Identity
from membership.reconcile import (
    DELTA_BYTES,
    MAX_EVIDENCE,
    AnyFrame,
    Delta,
    Differs,
    Done,
    FrameError,
    Greeting,
    Hello,
    Reached,
    ReachMe,
    Renew,
    Renewed,
    Reply,
    StreamPing,
    encode_frame,
)
from membership.records import MAX_LIFE_S, STATEMENTS
from membership.snapshot import RevocationFile, next_epoch
from membership.trust import (
    TrustError,
    TrustStore,
    User,
    found_mesh,
    make_revocation,
)
from membership.wire import (
    EPOCH_AHEAD_MS,
    MAX_EVIDENCE_BYTES,
    MAX_INCARNATION,
    Ack,
    Alive,
    AnyPacket,
    Dead,
    Left,
    Nack,
    Ping,
    PingRequest,
    Rumours,
    Suspect,
    encode,
)
from tests.chains import admitted

NOW = 1_800_000_000.0
ROOT = Identity(b"\x41" * 32)
GENESIS, ROOT_CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)
PEOPLE = {"root": (ROOT, ROOT_CHAIN)}
for number, name in enumerate(("ann", "bob", "cyd")):
    person = Identity(bytes([0x42 + number]) * 32)
    PEOPLE[name] = (person, admitted(ROOT, GENESIS, ROOT_CHAIN, person.node_id, name, name, NOW))


class CoreNode:
    """A core with a clock that the test sets, and its effects."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name = name
        self.host = f"10.0.0.{list(PEOPLE).index(name) + 1}"
        self.now = 0.0
        self.effects: list[Effect] = []
        self.identity, chain = PEOPLE[name]
        trust = TrustStore(GENESIS)
        trust.admit_chain(chain, NOW)
        self.core = Core(
            MeshSealer(self.identity, trust.mesh_id),
            trust,
            chain,
            SwimConfig.lan(),
            Random(1),
            self,
            self.effects.extend,
            host=self.host,
            port=7373,
            epoch=epoch,
        )
        self.core.start()

    def boot(self) -> float:
        return self.now

    def unix(self) -> float:
        return NOW + self.now

    def asked_for(self, kind: type) -> list[Effect]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def knows(self, other: "CoreNode") -> bool:
        return self.core.swim.table.get(other.identity.node_id) is not None


def resume(exchange: StreamExchange, heard: tuple[bytes, AnyFrame] | None = None) -> AnyFrame:
    """Return the next frame of one side, after the turns that it leaves to other work."""
    frame = next(exchange) if heard is None else exchange.send(heard)
    while frame is None:
        frame = next(exchange)
    return frame


def talk(one: CoreNode, other: CoreNode, exchange: StreamExchange) -> None:
    """Run an exchange of `one` with `other`, frame by frame, over sealed bytes."""
    answering: StreamExchange | None = None
    try:
        frame = resume(exchange)
        while True:
            heard = other.core.open_frame(one.core.seal_frame(frame))
            try:
                if answering is None:
                    answering = other.core.answer(*heard)
                    reply = resume(answering)
                else:
                    reply = resume(answering, heard)
            except StopIteration as end:
                if end.value is None:
                    return
                reply = end.value
            frame = resume(exchange, one.core.open_frame(other.core.seal_frame(reply)))
    except StopIteration:
        return


def meet(*nodes: CoreNode) -> None:
    for one in nodes:
        for other in nodes:
            if one is not other:
                talk(one, other, one.core.push_pull())


def test_one_push_pull_makes_two_nodes_equal() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    ann.core.publish("facts", b"of ann", 600)
    bob.core.publish("facts", b"x" * 5000, 600)
    talk(ann, bob, ann.core.push_pull())
    assert ann.knows(bob) and bob.knows(ann) and ann.core.swim.root() == bob.core.swim.root()
    record = bob.core.records.get(ann.identity.node_id, "facts", NOW)
    assert record is not None and record.body == b"of ann"
    before = bob.core.counters["reconciled"]
    talk(ann, bob, ann.core.push_pull(unless_equal=True))
    assert bob.core.counters["reconciled"] == before, "equal roots take two frames"


def test_newcomer_is_introduced_to_the_others_once() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob)
    ann.effects.clear()
    talk(cyd, ann, cyd.core.push_pull())
    (sent,) = (effect for effect in ann.effects if isinstance(effect, SendPacket))
    assert sent.to == bob.identity.node_id
    bob.core.on_datagram(ann.core.seal_packet(sent.to, sent.packet), (ann.host, 7373))
    assert bob.knows(cyd), "with its certificate and its address"
    ann.effects.clear()
    talk(cyd, ann, cyd.core.push_pull())
    assert not ann.asked_for(SendPacket), "it is no newcomer any more"


@pytest.mark.parametrize("caller", ["a member", "a stranger"])
def test_push_pull_brings_the_chain_of_its_own_node(caller: str) -> None:
    """Otherwise whoever has seen a member's certificate reads and writes all that the mesh knows."""
    ann, (_, borrowed) = CoreNode("ann"), PEOPLE["cyd"]
    caller_id = PEOPLE["bob"][0].node_id if caller == "a member" else Identity(b"\x66" * 32).node_id
    known = ann.core.trust.seen().keys()
    with pytest.raises(TrustError, match="certificate of another node"):
        next(ann.core.answer(caller_id, Hello(1, borrowed, [], [])))
    asking = ann.core.push_pull()
    hello = next(asking)
    assert isinstance(hello, Hello)
    with pytest.raises(TrustError, match="certificate of another node"):
        asking.send((caller_id, Reply(2, hello.nonce, borrowed, [], [], [], [])))
    with pytest.raises(StopIteration) as renewed:
        next(ann.core.answer(caller_id, Renew(3, borrowed)))
    assert renewed.value.value.chain == b"" and "another node" in renewed.value.value.problem
    assert ann.core.trust.seen().keys() - {PEOPLE["cyd"][0].node_id} == known and ann.core.counters["reconciled"] == 0


def test_evidence_about_an_unknown_node_waits_for_its_certificate() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob)
    word = cyd.core._seal_evidence(Alive(cyd.identity.node_id, 1, 0, cyd.host, 7373, False, 1))
    packet = Rumours(5, bytes(8), (("member", word),))
    ann.effects.clear()
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    assert not ann.knows(cyd) and ann.core.counters["unknown_author"] == 1
    assert ann.asked_for(WantReconcile), "the sender is asked about unknown nodes"
    shown = cyd.core.records.get(cyd.identity.node_id, "trust", NOW)
    assert shown is not None
    packet = Rumours(6, bytes(8), (("record", shown.sealed),))
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    assert ann.knows(cyd), "the waiting evidence was applied"


def padded(node: CoreNode, evidence: Alive | Suspect, size: int) -> bytes:
    """Seal evidence with a field of a later version, so that it has this size."""
    fields = msgspec.msgpack.decode(encode(evidence))
    short = node.core._sealer.seal("member", msgspec.msgpack.encode([*fields, bytes(256)]))
    return node.core._sealer.seal("member", msgspec.msgpack.encode([*fields, bytes(256 + size - len(short))]))


def test_evidence_is_bounded_so_that_an_ack_with_two_pieces_fits_into_a_packet() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob, cyd)
    me = bob.identity.node_id
    lie = Suspect(me, 1, 2)
    statement, accusation = Alive(me, 1, 2, "10.0.0.9", 7373, False, 1), padded(cyd, lie, MAX_EVIDENCE_BYTES)
    for name, size, refused in (("larger", MAX_EVIDENCE_BYTES + 1, 1), ("largest", MAX_EVIDENCE_BYTES, 1)):
        word = padded(bob, statement, size)
        assert len(word) == size
        ann.core._apply_evidence(word, rumoured=False)
        assert ann.core.counters["refused_implausible"] == refused, name
    ann.core._apply_evidence(accusation, rumoured=False)
    member = ann.core.swim.table.get(me)
    assert member is not None and (member.alive_sealed, member.verdict_sealed) == (word, accusation)
    ann.effects.clear()
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, Ping(1, bytes(8), ())), (bob.host, 1))
    (ack,) = ann.asked_for(SendPacket)
    assert isinstance(ack, SendPacket) and len(ack.packet.gossip) == 2
    assert len(ann.core.seal_packet(me, ack.packet)) <= SwimConfig.lan().packet_bytes


def test_evidence_about_unknown_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_UNKNOWN == 512
    monkeypatch.setattr("membership.core.MAX_UNKNOWN", 8)
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    ann.effects.clear()
    for number in range(1, 20):
        stranger = Identity(bytes([number]) * 32)
        word = MeshSealer(stranger, ann.core.trust.mesh_id).seal(
            "member", encode(Alive(stranger.node_id, 1, 0, "10.0.0.9", 7373, False, 1))
        )
        packet = Rumours(number, bytes(8), (("member", word),))
        ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, number))
    assert ann.core.counters["unknown_author"] == 19 and len(ann.core._unknown) == 8
    assert len(ann.asked_for(WantReconcile)) == 1


def test_sender_without_an_address_is_not_asked_about_unknown_nodes() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    ann.core.trust.admit_chain(PEOPLE["bob"][1], NOW)
    word = cyd.core._seal_evidence(Alive(cyd.identity.node_id, 1, 0, cyd.host, 7373, False, 1))
    packet = Rumours(5, bytes(8), (("member", word),))
    assert ann.core.on_stream_packet(bob.core.seal_packet(ann.identity.node_id, packet), bob.host) == []
    assert ann.core.counters["unknown_author"] == 1 and not ann.asked_for(WantReconcile)


def test_section_that_expires_before_its_earlier_version_is_extended() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    ann.core.publish("jobs/x", b"old", 1000)
    ann.core.publish("jobs/x", b"", 10)
    record = ann.core.records.get(ann.identity.node_id, "jobs/x", NOW)
    assert record is not None and record.not_after_unix >= NOW + 1000
    # A node that was cut off keeps a record of an earlier run and brings it back.
    cyd = CoreNode("cyd")
    ann.core.publish("jobs/y", b"old", 1000)
    meet(ann, bob, cyd)
    reborn = CoreNode("ann", epoch=9)
    reborn.core.publish("jobs/y", b"new", 10)
    meet(reborn, bob)
    for node in (reborn, bob, cyd):
        node.now = 20.0
        node.core.expire()
    meet(bob, cyd)
    meet(reborn, bob, cyd)
    meet(reborn, bob, cyd)
    for node in (reborn, bob, cyd):
        record = node.core.records.get(ann.identity.node_id, "jobs/y", NOW + 500)
        assert record is not None and record.body == b"" and record.epoch == 9, node.name


def test_section_is_published_after_the_clock_was_ahead(caplog: pytest.LogCaptureFixture) -> None:
    ann = CoreNode("ann")
    me = ann.identity.node_id
    ann.now = 40 * 86_400.0
    ann.core.publish("advert", b"ahead", 3600)
    ann.now = 0.0
    ann.core.publish("advert", b"corrected", 3600)
    record = ann.core.records.get(me, "advert", NOW)
    assert record is not None and record.body == b"corrected" and record.not_after_unix == NOW + MAX_LIFE_S
    assert "not published" not in caplog.text
    ann.core.publish("facts", b"x", 0.0)
    assert "section facts was not published: expired" in caplog.text


def test_section_beyond_the_bound_is_not_published_and_that_is_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = CoreNode("ann")
    assert ann.core.publish("facts", b"x", 3600)
    monkeypatch.setattr("membership.records.MAX_SECTIONS", 2)
    for second in range(120):
        ann.now = float(second)
        assert not ann.core.publish(f"jobs/{second}", b"x", 3600)
    assert ann.core.publish("facts", b"y", 3600), "one that is there is replaced"
    assert caplog.text.count("was not published: full") == 2


def test_versions_of_expired_sections_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("membership.core.REMEMBERED", 100)
    ann = CoreNode("ann")
    ann.core.publish("jobs/lasting", b"x", 86_400)
    for number in range(1000):
        ann.now += 30.0
        ann.core.publish(f"jobs/{number}", b"x", 60)
    kept = ann.core._versions
    assert len(kept) <= 100 and "jobs/lasting" in kept and "jobs/999" in kept and "jobs/960" in kept
    ann.core.publish("jobs/999", b"y", 60)
    assert kept["jobs/999"] == 2


def test_earlier_run_is_outbid_after_a_lost_disk_and_a_wrong_clock() -> None:
    former, bob = CoreNode("ann", epoch=500), CoreNode("bob")
    former.core.publish("facts", b"former", 1000)
    meet(former, bob)
    reborn = CoreNode("ann", epoch=3)
    reborn.core.publish("facts", b"present", 1000)
    meet(reborn, bob)
    meet(reborn, bob)
    assert [effect.epoch for effect in reborn.asked_for(PersistEpoch)][-1] > 500  # type: ignore[attr-defined]
    record = bob.core.records.get(former.identity.node_id, "facts", NOW)
    assert record is not None and record.body == b"present" and record.epoch > 500
    member = bob.core.swim.table.get(former.identity.node_id)
    assert member is not None and member.epoch > 500 and member.state == "alive"


def test_revoked_node_is_dropped_and_gets_only_the_revocation() -> None:
    root, ann, bob = CoreNode("root"), CoreNode("ann"), CoreNode("bob")
    meet(root, ann, bob)
    bob.core.publish("facts", b"x", 600)
    meet(ann, bob)
    root.core.publish_statement(make_revocation(ROOT, root.core.trust, bob.identity.node_id, "", NOW))
    meet(root, ann)
    assert not ann.knows(bob) and ann.core.records.get(bob.identity.node_id, "facts", NOW) is None
    assert ann.asked_for(KeepRevocations)
    ann.core.publish("secret", b"s", 600)
    with pytest.raises(TrustError):
        talk(ann, bob, ann.core.push_pull())
    with contextlib.suppress(TrustError, FrameError):
        talk(bob, ann, bob.core.push_pull())
    assert bob.identity.node_id in bob.core.trust.revoked
    assert bob.core.records.get(ann.identity.node_id, "secret", NOW) is None
    before = ann.core.counters["refused_revoked"]
    ann.effects.clear()
    packet = Rumours(7, bytes(8), ())
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    assert ann.core.counters["refused_revoked"] == before + 1 and not ann.effects


def test_accusation_of_a_node_that_was_revoked_since_is_refuted() -> None:
    root, ann, bob, cyd = CoreNode("root"), CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(root, ann, bob, cyd)
    verdict = bob.core._seal_evidence(Dead(cyd.identity.node_id, 1, 0))
    packet = Rumours(5, bytes(8), (("member", verdict),))
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    root.core.publish_statement(make_revocation(ROOT, root.core.trust, bob.identity.node_id, "", NOW))
    meet(root, ann)
    meet(root, cyd)
    assert ann.core.swim.table.get(cyd.identity.node_id).state == "suspect"  # type: ignore[union-attr]
    talk(cyd, ann, cyd.core.push_pull())
    talk(cyd, ann, cyd.core.push_pull())
    assert ann.core.swim.table.get(cyd.identity.node_id).state == "alive"  # type: ignore[union-attr]


def test_member_with_expired_certificate_is_dropped_until_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as shorter:
        shorter.setattr("membership.trust.NODE_CERTIFICATE_S", 3600)
        for name in ("ann", "bob"):
            person, _ = PEOPLE[name]
            chain = admitted(ROOT, GENESIS, ROOT_CHAIN, person.node_id, name, name, NOW)
            shorter.setitem(PEOPLE, name, (person, chain))
        root, ann, bob = CoreNode("root"), CoreNode("ann"), CoreNode("bob")
    meet(root, ann, bob)
    talk(ann, root, ann.core.ask_renewal())
    (kept,) = ann.asked_for(KeepChain)
    assert root.core.counters["renewals"] == 1
    meet(root, ann, bob)
    for node in (root, ann, bob):
        node.now = 3600.0 + 121.0
        node.core.expire()
    assert root.knows(ann) and not root.knows(bob), "bob asked for no renewal"
    with pytest.raises(TrustError, match="has expired"):
        talk(bob, root, bob.core.ask_renewal())
    with pytest.raises(TrustError, match="may not admit"):
        talk(root, ann, root.core.ask_renewal())
    assert ann.core.chain == kept.chain  # type: ignore[attr-defined]


def test_flood_is_refused_before_signatures_are_checked() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    for port in range(2000):
        ann.core.on_datagram(b"\x01" + bytes(200), (bob.host, port))
    assert ann.core.counters["refused_flood"] > 1000
    assert ann.core.counters["refused_foreign"] + ann.core.counters["refused_flood"] == 2000
    packet = bob.core.seal_packet(ann.identity.node_id, Ping(1, bytes(8), ()))
    assert ann.core.on_stream_packet(packet, bob.host), "its source cannot be forged"


def test_packets_of_unknown_senders_at_one_host_want_one_push_pull() -> None:
    ann = CoreNode("ann")
    for port in range(1, 101):
        ann.core.on_datagram(b"\x01" + port.to_bytes(8, "big") + bytes(200), ("10.0.0.66", port))
    assert ann.asked_for(WantReconcile) == [WantReconcile(b"", "10.0.0.66", 1, False, unproven=True)]
    assert len(ann.core.swim._reconcile_limit) == 1, "its other ports take no place of a member"
    ann.now = SwimConfig.lan().reconcile_pause_s
    ann.core.on_datagram(b"\x01" + bytes(208), ("10.0.0.66", 101))
    assert len(ann.asked_for(WantReconcile)) == 2


small = st.binary(max_size=40)
members = st.lists(st.tuples(small, st.integers(-5, 5), st.integers(-5, 5), st.integers(-5, 9)), max_size=3)
digests = st.lists(st.tuples(small, st.text(max_size=5), st.integers(-5, 5), st.integers(-5, 5)), max_size=3)
pieces = st.lists(small, max_size=3)
numbers = st.integers(0, 2**62)
frames = st.one_of(
    st.builds(Greeting, numbers, small),
    st.builds(Differs, numbers, numbers),
    st.builds(Hello, numbers, st.one_of(small, st.just(PEOPLE["bob"][1])), digests, members),
    st.builds(Reply, numbers, numbers, st.one_of(small, st.just(PEOPLE["bob"][1])), digests, members, pieces, pieces),
    st.builds(StreamPing, numbers),
    st.builds(Delta, numbers, numbers, pieces, pieces),
    st.builds(Done, numbers, numbers),
    st.builds(Renew, numbers, small),
    st.builds(Renewed, numbers, numbers, small, st.text(max_size=5)),
    st.builds(ReachMe, numbers, st.text(max_size=9), st.integers()),
    st.builds(Reached, numbers, numbers, st.booleans(), st.text(max_size=5), st.text(max_size=5)),
)


@given(st.lists(frames, min_size=1, max_size=4), st.booleans())
def test_any_sequence_of_frames_is_answered_or_refused_without_effect(said: list[object], asks: bool) -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    root = ann.core.swim.table.root
    queue: Iterator[object] = iter(said)
    try:
        if asks:
            exchange = ann.core.push_pull(unless_equal=True)
            next(exchange)
        else:
            exchange = ann.core.answer(bob.identity.node_id, next(queue))  # type: ignore[arg-type]
            next(exchange)
        for frame in queue:
            exchange.send((bob.identity.node_id, frame))  # type: ignore[arg-type]
    except (StopIteration, FrameError, TrustError, EnvelopeError):
        pass
    assert ann.core.swim.table.root == root, "no new member"


anything = st.integers(-(2**63), 2**64 - 1)
words = st.builds(
    lambda kind, epoch, incarnation: kind(PEOPLE["ann"][0].node_id, epoch, incarnation),
    st.sampled_from([Suspect, Dead]),
    anything,
    anything,
)
told = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["member", "record"]), small),
        words.map(lambda word: ("member", CoreNode("bob").core._seal_evidence(word))),
    ),
    max_size=3,
).map(tuple)
sent = st.one_of(
    st.builds(Ping, anything, small, told),
    st.builds(Ack, anything, small, told, anything, anything),
    st.builds(PingRequest, anything, small, told, small),
    st.builds(Nack, anything, small, told, anything),
    st.builds(Rumours, anything, small, told),
)


@given(st.lists(sent, max_size=5))
def test_nonsense_signed_by_a_member_breaks_nothing(packets: list[AnyPacket]) -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    for packet in packets:
        data = bob.core._sealer.seal_to(ann.identity.node_id, encode(packet))
        ann.core.on_datagram(data, (bob.host, 7373))
        for effect in ann.asked_for(SetTimer):
            ann.core.on_timer(effect.name, effect.token, effect.at)  # type: ignore[attr-defined]
        ann.effects.clear()
    me = ann.core.swim.table.get(ann.identity.node_id)
    assert me is not None and me.state == "alive"


@given(st.binary(max_size=1300))
def test_hostile_datagrams_change_nothing(data: bytes) -> None:
    ann = CoreNode("ann")
    root = ann.core.swim.root()
    ann.core.on_datagram(data, ("x", 1))
    assert ann.core.swim.root() == root and not ann.asked_for(SendPacket)


def test_packet_is_refused_by_other_nodes_than_its_recipient() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob, cyd)
    data = ann.core.seal_packet(bob.identity.node_id, Rumours(1, bytes(8), ()))
    cyd.core.on_datagram(data, (ann.host, 7373))
    assert cyd.core.counters["refused_unsigned"] == 1
    bob.core.on_datagram(data, (ann.host, 7373))
    bob.core.on_datagram(data, (ann.host, 7373))
    assert bob.core.counters["refused_replayed"] == 1


def test_departure_is_reported_once() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    ann.effects.clear()
    farewell = next(e for e in bob.core.swim.leave(0.0) if isinstance(e, SendPacket))
    for number in range(3):
        packet = Rumours(100 + number, bytes(8), farewell.packet.gossip)
        ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    assert [effect.state for effect in ann.asked_for(MemberChanged)] == ["left"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("behind_s", [0, 3600, 200 * 86_400])
def test_subject_can_refute_any_accepted_evidence(behind_s: int) -> None:
    """Also with a clock that is behind those of the others, so that its own epoch is far ahead of it."""
    epoch = int(NOW * 1000)
    ann, bob, cyd = CoreNode("ann", epoch), CoreNode("bob", epoch), CoreNode("cyd", epoch)
    meet(ann, bob, cyd)
    ann.unix = lambda: NOW - behind_s  # type: ignore[method-assign]
    me, limit = ann.identity.node_id, epoch + EPOCH_AHEAD_MS
    named = [
        (2**61, 0),
        (1, MAX_INCARNATION - 1),
        (limit, MAX_INCARNATION - 1),
        (limit - 1000, 0),
        (epoch, 1),
        (epoch, 0),
    ]
    for number, lie in enumerate(kind(me, *said) for said in named for kind in (Suspect, Dead)):
        packet = Rumours(200 + number, bytes(8), (("member", bob.core._seal_evidence(lie)),))
        for node in (cyd, ann):
            node.core.on_datagram(bob.core.seal_packet(node.identity.node_id, packet), (bob.host, 7373))
        refutation = Rumours(300 + number, bytes(8), (("member", ann.core.swim.table.get(me).alive_sealed),))  # type: ignore[union-attr]
        cyd.core.on_datagram(ann.core.seal_packet(cyd.identity.node_id, refutation), (ann.host, 7373))
        member = cyd.core.swim.table.get(me)
        assert member is not None and member.state == "alive", lie
    assert ann.core.swim.epoch == epoch and not ann.asked_for(PersistEpoch), "no lie costs a write to the disk"


def test_announcement_of_an_epoch_far_ahead_is_refused() -> None:
    """It would outlive the certificates of the node, as nothing that its next runs announce is newer."""
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    for number, kind in enumerate((Alive, Left)):
        epoch = int(NOW * 1000) + EPOCH_AHEAD_MS + 1
        rest = (bob.host, 7373, False) if kind is Alive else ()
        word = bob.core._seal_evidence(kind(bob.identity.node_id, epoch, 0, *rest))
        packet = Rumours(number, bytes(8), (("member", word),))
        ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    assert ann.core.counters["refused_implausible"] == 2
    assert ann.core.swim.table.get(bob.identity.node_id).epoch == 1  # type: ignore[union-attr]


def test_accusation_that_comes_before_what_it_names_counts_when_both_come() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob, cyd)
    bob.core.swim.set_draining(True, 0.0)
    meet(bob, cyd)
    subject = bob.identity.node_id
    accusation = cyd.core._seal_evidence(Suspect(subject, 1, 1))
    cyd.core._apply_evidence(accusation, rumoured=True)
    list(ann.core._apply_delta(cyd.identity.node_id, Delta(1, 1, [], [accusation])))
    assert ann.core.swim.table.get(subject).order == (1, 0, 0)  # type: ignore[union-attr]
    talk(ann, cyd, ann.core.push_pull())
    assert ann.core.swim.table.get(subject).order == (1, 1, 1)  # type: ignore[union-attr]


def test_restarted_node_with_a_lower_epoch_refutes_an_accusation_of_its_earlier_run() -> None:
    """Its disk was lost and its clock is behind: the answer to its ping shows it what it announced then."""
    ann, bob, now = CoreNode("ann", 9), CoreNode("bob"), CoreNode("ann", 5)
    meet(ann, bob)
    accusation = bob.core._seal_evidence(Suspect(ann.identity.node_id, 9, 0))
    bob.core._apply_evidence(accusation, rumoured=True)
    now.core.trust.admit_chain(bob.core.chain, NOW)
    now.core._apply_evidence(bob.core._seal_evidence(Alive(bob.identity.node_id, 1, 0, bob.host, 7373, False)), False)
    bob.effects.clear()
    ping = now.core.seal_packet(bob.identity.node_id, Ping(1, bytes(8), ()))
    bob.core.on_datagram(ping, (ann.host, 7373))
    (ack,) = (effect for effect in bob.effects if isinstance(effect, SendPacket) and isinstance(effect.packet, Ack))
    now.core.on_datagram(bob.core.seal_packet(ack.to, ack.packet), (bob.host, 7373))
    assert now.core.swim.epoch == 10
    talk(now, bob, now.core.push_pull())
    assert bob.core.swim.table.get(ann.identity.node_id).order == (10, 0, 0)  # type: ignore[union-attr]


def test_epoch_of_a_clock_years_ahead_is_ignored() -> None:
    wall = int(NOW * 1000)
    assert next_epoch(wall + 5, wall) == wall + 6 and next_epoch(0, wall) == wall
    assert next_epoch(wall + 10 * 365 * 86_400_000, wall) == wall


def test_any_number_of_revocations_reaches_the_other_nodes() -> None:
    """The 51st revocation spreads like the first, over several sections, and a restarted node has all of them (V8)."""
    root, ann, cyd = CoreNode("root"), CoreNode("ann"), CoreNode("cyd")
    meet(root, ann)
    outcasts = [number.to_bytes(32, "big") for number in range(1, 201)]
    for outcast in outcasts:
        root.core.publish_statement(make_revocation(ROOT, root.core.trust, outcast, "r" * 100, NOW))
    meet(root, ann)
    assert ann.core.trust.revoked >= set(outcasts)
    kept = ann.asked_for(KeepRevocations)[-1]
    assert len(kept.sealed) == 200  # type: ignore[attr-defined]
    again = TrustStore(GENESIS)
    for sealed in kept.sealed:  # type: ignore[attr-defined]
        again.admit_statement(sealed)
    assert again.revoked == ann.core.trust.revoked
    sections = {record.section for record in ann.core.records.section(STATEMENTS, NOW)}
    assert len(sections) > 2, "they do not fit into one section"
    assert [r.node for r in ann.core.records.section(STATEMENTS, NOW) if r.node == ann.identity.node_id] == [], (
        "a node that may not admit repeats nothing that an admitter publishes"
    )
    # Their author is gone: the other node publishes them itself, for those who join later.
    ann.core.records.drop(root.identity.node_id)
    ann.core.publish_statements()
    talk(ann, cyd, ann.core.push_pull())
    assert cyd.core.trust.revoked >= set(outcasts)


def test_revocation_counts_whatever_the_founders_clock_said(tmp_path: Path) -> None:
    """The clock of the founder was three hours ahead for one revocation: it and later ones spread and are read back."""
    root, ann, bob, cyd = (CoreNode(name) for name in ("root", "ann", "bob", "cyd"))
    meet(root, ann, bob, cyd)
    for outcast, ahead_s in ((bob, 3 * 3600.0), (cyd, 0.0)):
        root.now += ahead_s
        root.core.publish_statement(
            make_revocation(ROOT, root.core.trust, outcast.identity.node_id, "stolen", root.unix())
        )
        root.now -= ahead_s
    meet(root, ann)
    outcasts = {bob.identity.node_id, cyd.identity.node_id}
    assert ann.core.trust.revoked == root.core.trust.revoked == outcasts
    file = RevocationFile(tmp_path / "revoked")
    for node in (root, ann):
        file.write(node.asked_for(KeepRevocations)[-1].sealed)  # type: ignore[attr-defined]
        file.read_into(again := TrustStore(GENESIS))
        assert again.revoked == outcasts


def test_members_of_a_revoked_admitter_are_dropped_at_once() -> None:
    """Finding 16: the running node drops them with the admitter, and admits them again with a new certificate."""
    admitter = Identity(b"\x61" * 32)
    chain = admitted(ROOT, GENESIS, ROOT_CHAIN, admitter.node_id, "adm", "adm", NOW, admit=True)
    person, _ = PEOPLE["bob"]
    root, ann = CoreNode("root"), CoreNode("ann")
    for node in (root, ann):
        node.core.trust.admit_chain(chain, NOW)
    PEOPLE["dan"] = (person, admitted(admitter, GENESIS, chain, person.node_id, "dan", "dan", NOW))
    dan = CoreNode("dan")
    del PEOPLE["dan"]
    meet(root, ann, dan)
    assert root.knows(dan) and ann.knows(dan)
    root.core.publish_statement(make_revocation(ROOT, root.core.trust, admitter.node_id, "", NOW))
    assert not root.knows(dan)
    meet(root, ann)
    assert not ann.knows(dan)
    talk(dan, ann, dan.core.push_pull())
    assert not ann.knows(dan) and admitter.node_id in dan.core.trust.revoked, "it is told why"
    assert "was revoked" in dan.core.trust.refusal(dan.core.trust.seen()[person.node_id], NOW)
    dan.core.publish_chain(admitted(ROOT, GENESIS, ROOT_CHAIN, person.node_id, "dan", "dan", NOW + 1))
    meet(dan, root, ann)
    assert root.knows(dan) and ann.knows(dan)


def test_node_of_a_stolen_admitter_does_not_stay_by_a_renewal() -> None:
    """It asks the founder for a new certificate at once, long before the end of its own."""
    admitter, evil = Identity(b"\x61" * 32), Identity(b"\x62" * 32)
    chain = admitted(ROOT, GENESIS, ROOT_CHAIN, admitter.node_id, "adm", "adm", NOW, admit=True)
    bobs = User("bob", PEOPLE["bob"][0].node_id, int(NOW) + 1)
    PEOPLE["evil"] = (evil, admitted(admitter, GENESIS, chain, evil.node_id, "evil", bobs, NOW))
    root, ann, node = CoreNode("root"), CoreNode("ann"), CoreNode("evil")
    del PEOPLE["evil"]
    meet(root, ann, node)
    talk(node, root, node.core.ask_renewal())
    meet(root, ann, node)
    assert ann.core.trust.seen()[evil.node_id].admitter == ROOT.node_id and ann.knows(node)
    root.core.publish_statement(make_revocation(ROOT, root.core.trust, admitter.node_id, "stolen", NOW))
    meet(root, ann)
    talk(node, ann, node.core.push_pull())
    assert not root.knows(node) and not ann.knows(node)
    assert admitter.node_id in node.core.trust.revoked, "it is told why"


def test_new_certificate_is_published() -> None:
    ann = CoreNode("ann")
    renewed = admitted(ROOT, GENESIS, ROOT_CHAIN, ann.identity.node_id, "ann", "ann", NOW + 1)
    ann.core.publish_chain(renewed)
    record = ann.core.records.get(ann.identity.node_id, "trust", NOW)
    assert record is not None and record.body == renewed == ann.core.chain


def test_certificate_of_another_node_is_no_renewal() -> None:
    ann = CoreNode("ann")
    asking = ann.core.ask_renewal()
    question = next(asking)
    with pytest.raises(TrustError, match="certificate for another node"):
        asking.send((ROOT.node_id, Renewed(1, question.nonce, PEOPLE["bob"][1], "")))
    assert ann.core.chain == PEOPLE["ann"][1]


def test_certificate_of_another_node_is_never_published_as_its_own() -> None:
    """Whoever answers a node that joins again may be hostile."""
    ann = CoreNode("ann")
    with pytest.raises(TrustError, match="certificate for another node"):
        ann.core.publish_chain(PEOPLE["bob"][1])
    assert not ann.asked_for(KeepChain)
    assert ann.core.chain == PEOPLE["ann"][1]


def test_certificate_of_another_user_is_never_published_as_its_own() -> None:
    """A member that is admitted again keeps its user, or gets one that no other machine has."""
    ann, me = CoreNode("ann"), PEOPLE["ann"][0].node_id
    bobs = User("bob", PEOPLE["bob"][0].node_id, int(NOW) + 1)
    with pytest.raises(TrustError, match="a machine of another user, 'bob'"):
        ann.core.publish_chain(admitted(ROOT, GENESIS, ROOT_CHAIN, me, "ann", bobs, NOW + 1))
    assert not ann.asked_for(KeepChain)
    renamed = admitted(ROOT, GENESIS, ROOT_CHAIN, me, "ann", User("ann2", me, int(NOW) + 1), NOW + 1)
    ann.core.publish_chain(renamed)
    assert ann.core.chain == renamed


def pushed(
    sender: CoreNode, receiver: CoreNode, records: list[bytes], evidence: list[bytes]
) -> tuple[StreamExchange, tuple[bytes, AnyFrame]]:
    """Return the receiver's side of a push-pull that the sender began, and the delta that it hears next."""
    answering = receiver.core.answer(sender.identity.node_id, Hello(1, sender.core.chain, [], []))
    reply = resume(answering)
    delta = Delta(2, reply.nonce, records, evidence)
    return answering, receiver.core.open_frame(sender.core.seal_frame(delta))


def test_large_frame_is_applied_in_turns_with_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one took three seconds at a stretch, and the others declared its receiver dead."""
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    applied: list[bytes] = []
    for name in ("_apply_record", "_apply_evidence"):
        monkeypatch.setattr(ann.core, name, lambda sealed, rumoured: applied.append(sealed))
    items = [b"r%03d" % number for number in range(500)], [b"e%03d" % number for number in range(500)]
    answering, heard = pushed(bob, ann, *items)
    frame = answering.send(heard)
    while frame is None:
        before = len(applied)
        with contextlib.suppress(StopIteration):
            frame = next(answering)
        if len(applied) == before:
            break
        assert len(applied) - before <= SLICE
    assert applied == items[0] + items[1]


def test_items_of_a_member_are_bounded() -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, bob, cyd)
    ann.now = 60.0
    frames = iter(range(10))
    with pytest.raises(FrameError, match="too much"):
        for _ in frames:
            answering, heard = pushed(bob, ann, [], [b"e" * 100] * MAX_EVIDENCE)
            with contextlib.suppress(StopIteration):
                resume(answering, heard)
    assert next(frames) == MAX_ITEMS // MAX_EVIDENCE + 1 and ann.core.counters["refused_flood"] == 1
    for sender, after_s in ((bob, 2 * SLICE / ITEMS_S), (cyd, 0.0)):
        ann.now += after_s
        answering, heard = pushed(sender, ann, [], [b"e" * 100] * SLICE)
        assert answering.send(heard) is None, "it goes on at a low rate, and another member does at once"


@pytest.mark.parametrize(("records", "evidence"), [([bytes(DELTA_BYTES), b"x"], []), ([], [b""] * (MAX_EVIDENCE + 1))])
def test_frame_with_more_than_a_push_pull_brings_is_refused(records: list[bytes], evidence: list[bytes]) -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    for frame in (Delta(1, 2, records, evidence), Reply(1, 2, bob.core.chain, [], [], records, evidence)):
        with pytest.raises(FrameError, match="more than a push-pull"):
            ann.core.open_frame(bob.core.seal_frame(frame))


def test_packet_over_tcp_is_no_larger_than_over_udp() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    rumours = (("member", b"x" * 100),) * 20
    data = bob.core._sealer.seal_to(ann.identity.node_id, encode(Rumours(1, bytes(8), rumours)))  # type: ignore[arg-type]
    assert ann.core.on_stream_packet(data, bob.host) is None and ann.core.counters["refused_unsigned"] == 1


def test_large_frame_of_a_stranger_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode 4 MiB of a stranger would occupy a node for 0.3 s."""
    ann, stranger = CoreNode("ann"), Identity(b"\x55" * 32)
    digest = [(bytes(32), "facts", 1, 1)] * 200
    large = [Hello(1, b"x", digest, []), Hello(1, PEOPLE["bob"][1], digest, []), Delta(1, 1, [bytes(10_000)], [])]
    sealed = [MeshSealer(stranger, ann.core.trust.mesh_id).seal("reconcile", encode_frame(frame)) for frame in large]
    with monkeypatch.context() as patched:
        patched.setattr("membership.core.decode_frame", lambda payload: pytest.fail("it is decoded"))
        for data in sealed:
            with pytest.raises((TrustError, FrameError)):
                ann.core.open_frame(data)


def test_large_frame_of_a_member_that_is_not_known_yet_is_decoded() -> None:
    ann, cyd = CoreNode("ann"), Identity(b"\x55" * 32)
    chain = admitted(ROOT, GENESIS, ROOT_CHAIN, cyd.node_id, "cyd", "cyd", NOW)
    digest = [(bytes(32), "facts", 1, 1)] * 200
    for frame in (Hello(1, chain, digest, []), Reply(1, 1, chain, digest, [], [], [])):
        data = MeshSealer(cyd, ann.core.trust.mesh_id).seal("reconcile", encode_frame(frame))
        assert ann.core.open_frame(data) == (cyd.node_id, frame)


def test_large_frame_of_a_revoked_node_is_answered_with_the_revocation() -> None:
    ann, bob = CoreNode("ann"), PEOPLE["bob"][0]
    ann.core.trust.admit_statement(make_revocation(ROOT, ann.core.trust, bob.node_id, "", NOW))
    frame = Hello(7, PEOPLE["bob"][1], [(bytes(32), "facts", 1, 1)] * 200, [])
    data = MeshSealer(bob, ann.core.trust.mesh_id).seal("reconcile", encode_frame(frame))
    _, hello = ann.core.open_frame(data)
    assert hello == Hello(7, PEOPLE["bob"][1], [], []), "the rest is not decoded"
    with pytest.raises(StopIteration) as told:
        next(ann.core.answer(bob.node_id, hello))
    assert isinstance(told.value.value, Reply)


def test_answer_to_another_hello_is_refused() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    bob.core.publish("facts", b"of bob", 600)
    asking = ann.core.push_pull()
    hello = next(asking)
    (_, reply) = bob.identity.node_id, next(bob.core.answer(ann.identity.node_id, hello))
    replayed = ann.core.push_pull()
    next(replayed)
    with pytest.raises(FrameError, match="does not match"):
        replayed.send((bob.identity.node_id, reply))
    assert ann.core.records.get(bob.identity.node_id, "facts", NOW) is None


def test_replayed_word_that_all_is_equal_ends_no_exchange() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    asking = ann.core.push_pull(unless_equal=True)
    greeting = next(asking)
    assert isinstance(greeting, Greeting)
    assert isinstance(asking.send((bob.identity.node_id, Done(7, greeting.nonce + 1))), Hello)
    asking = ann.core.push_pull(unless_equal=True)
    greeting = next(asking)
    with pytest.raises(StopIteration):
        asking.send((bob.identity.node_id, Done(7, greeting.nonce)))


@pytest.mark.parametrize("wrong", ["another sender", "another nonce"])
def test_delta_that_ends_another_exchange_is_refused(wrong: str) -> None:
    ann, bob, cyd = CoreNode("ann"), CoreNode("bob"), CoreNode("cyd")
    meet(ann, cyd)
    answering = ann.core.answer(bob.identity.node_id, next(bob.core.push_pull()))
    reply = next(answering)
    sender = cyd if wrong == "another sender" else bob
    nonce = reply.nonce + (wrong == "another nonce")
    record = cyd.core.records.get(cyd.identity.node_id, "trust", NOW)
    assert record is not None
    with pytest.raises(FrameError, match="does not match"):
        answering.send((sender.identity.node_id, Delta(9, nonce, [record.sealed], [])))
    assert ann.core.counters["refused_replayed"] == 1


def test_statements_of_a_node_that_is_gone_are_published_by_another() -> None:
    root, ann, cyd = CoreNode("root"), CoreNode("ann"), CoreNode("cyd")
    meet(root, ann)
    outcast = b"\x07" * 32
    root.core.publish_statement(make_revocation(ROOT, root.core.trust, outcast, "", NOW))
    meet(root, ann)
    ann.now = 30 * 86_400.0  # the sections of the founder have expired
    ann.core.expire()
    assert [r.node for r in ann.core.records.section(STATEMENTS + "0", ann.unix())] == [ann.identity.node_id]
    cyd.now = ann.now
    talk(ann, cyd, ann.core.push_pull())
    assert outcast in cyd.core.trust.revoked


def test_sections_follow_an_epoch_that_a_packet_raised() -> None:
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    ann.core.publish("facts", b"x", 600)
    former = Alive(ann.identity.node_id, 500, 0, ann.host, 7373, False, 1)
    packet = Rumours(1, bytes(8), (("member", ann.core._seal_evidence(former)),))
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), (bob.host, 7373))
    record = ann.core.records.get(ann.identity.node_id, "facts", NOW)
    assert record is not None
    assert record.epoch == 501


def test_packet_of_a_member_with_an_expired_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    person, _ = PEOPLE["bob"]
    with monkeypatch.context() as shorter:
        shorter.setattr("membership.trust.NODE_CERTIFICATE_S", 3600)
        chain = admitted(ROOT, GENESIS, ROOT_CHAIN, person.node_id, "bob", "bob", NOW)
    monkeypatch.setitem(PEOPLE, "bob", (person, chain))
    ann, bob = CoreNode("ann"), CoreNode("bob")
    meet(ann, bob)
    ann.effects.clear()
    ann.now = 3600.0 + 121.0  # before the upkeep that drops the member
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, Ping(1, bytes(8), ())), (bob.host, 7373))
    assert ann.core.counters["refused_foreign"] == 1
    assert not ann.asked_for(SendPacket), "it is not answered"
    assert ann.asked_for(WantReconcile), "it may have a new certificate"


def test_late_timer_shows_that_this_node_stood_still() -> None:
    ann = CoreNode("ann")
    lag_s = SwimConfig.lan().lag_s
    for late_s, lags in ((0.9 * lag_s, 0), (lag_s, 1)):
        ann.now = 100.0 + late_s
        ann.core.on_timer("probe", 0, 100.0)
        assert ann.core.counters["lags"] == lags
    assert ann.core.swim.health.score == 1, "it probes more slowly before it accuses others"
