"""Whole cores of a few nodes, without sockets: what they tell each other, in which order, and what that changes."""

import contextlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.config import SwimConfig
from membership.core import Conversation, Core
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
from membership.envelope import EnvelopeError, Seals
from membership.identity import Identity
from membership.reconcile import (
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
)
from membership.snapshot import next_epoch
from membership.trust import (
    TrustError,
    TrustStore,
    accept_invite,
    found_mesh,
    make_invite,
    make_revocation,
    parse_invite,
)
from membership.wire import (
    EPOCH_AHEAD_MS,
    MAX_INCARNATION,
    Ack,
    Alive,
    AnyPacket,
    Dead,
    Nack,
    Ping,
    PingRequest,
    Rumours,
    Suspect,
    encode,
)

NOW = 1_800_000_000.0
ROOT = Identity(b"\x41" * 32)
GENESIS, ROOT_CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)
INVITE = parse_invite(make_invite(ROOT, ROOT_CHAIN, GENESIS, (), 3600, NOW), NOW)
PEOPLE = {"root": (ROOT, ROOT_CHAIN)}
for number, name in enumerate(("ann", "bob", "cyd")):
    person = Identity(bytes([0x42 + number]) * 32)
    PEOPLE[name] = (person, accept_invite(INVITE, person.node_id, name, name, NOW))


class Desk:
    """A core with a clock that a test sets, and everything it asked for."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name = name
        self.now = 0.0
        self.effects: list[Effect] = []
        self.identity, chain = PEOPLE[name]
        trust = TrustStore(GENESIS)
        trust.admit_chain(chain, NOW)
        self.core = Core(
            Seals(self.identity, trust.mesh_id),
            trust,
            chain,
            SwimConfig.lan(),
            Random(1),
            self,
            self.effects.extend,
            host=name,
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

    def knows(self, other: "Desk") -> bool:
        return self.core.swim.table.get(other.identity.node_id) is not None


def talk(one: Desk, other: Desk, conversation: Conversation) -> None:
    """Play a conversation of `one` with `other`, frame by frame, over sealed bytes."""
    answering: Conversation | None = None
    try:
        frame = next(conversation)
        while True:
            heard = other.core.open_frame(one.core.seal_frame(frame))
            try:
                if answering is None:
                    answering = other.core.answer(*heard)
                    reply = next(answering)
                else:
                    reply = answering.send(heard)
            except StopIteration as end:
                if end.value is None:
                    return
                reply = end.value
            frame = conversation.send(one.core.open_frame(other.core.seal_frame(reply)))
    except StopIteration:
        return


def meet(*desks: Desk) -> None:
    for one in desks:
        for other in desks:
            if one is not other:
                talk(one, other, one.core.converse())


def test_one_conversation_makes_two_strangers_know_the_same() -> None:
    ann, bob = Desk("ann"), Desk("bob")
    ann.core.publish("facts", b"of ann", 600)
    bob.core.publish("facts", b"x" * 5000, 600)
    talk(ann, bob, ann.core.converse())
    assert ann.knows(bob) and bob.knows(ann) and ann.core.swim.root() == bob.core.swim.root()
    record = bob.core.records.get(ann.identity.node_id, "facts", NOW)
    assert record is not None and record.body == b"of ann"
    before = bob.core.counters["reconciled"]
    talk(ann, bob, ann.core.converse(unless_equal=True))
    assert bob.core.counters["reconciled"] == before, "equal roots cost two frames"


def test_news_of_a_stranger_waits_for_its_certificate() -> None:
    ann, bob, cyd = Desk("ann"), Desk("bob"), Desk("cyd")
    meet(ann, bob)
    word = cyd.core._seal_evidence(Alive(cyd.identity.node_id, 1, 0, "cyd", 7373, False, 1))
    packet = Rumours(5, bytes(8), (("member", word),))
    ann.effects.clear()
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), ("bob", 7373))
    assert not ann.knows(cyd) and ann.core.counters["unknown_author"] == 1
    assert ann.asked_for(WantReconcile), "who tells of strangers is asked about them"
    shown = cyd.core.records.get(cyd.identity.node_id, "trust", NOW)
    assert shown is not None
    packet = Rumours(6, bytes(8), (("record", shown.sealed),))
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), ("bob", 7373))
    assert ann.knows(cyd), "what waited was taken in"


def test_a_section_that_ends_before_its_former_version_is_made_to_outlive_it() -> None:
    ann, bob = Desk("ann"), Desk("bob")
    ann.core.publish("jobs/x", b"old", 1000)
    ann.core.publish("jobs/x", b"", 10)
    record = ann.core.records.get(ann.identity.node_id, "jobs/x", NOW)
    assert record is not None and record.not_after_unix >= NOW + 1000
    # What a former life has said is kept by one who hears nothing of its end, and comes back with him.
    cyd = Desk("cyd")
    ann.core.publish("jobs/y", b"old", 1000)
    meet(ann, bob, cyd)
    reborn = Desk("ann", epoch=9)
    reborn.core.publish("jobs/y", b"new", 10)
    meet(reborn, bob)
    for desk in (reborn, bob, cyd):
        desk.now = 20.0
        desk.core.forget_the_old()
    meet(bob, cyd)
    meet(reborn, bob, cyd)
    meet(reborn, bob, cyd)
    for desk in (reborn, bob, cyd):
        record = desk.core.records.get(ann.identity.node_id, "jobs/y", NOW + 500)
        assert record is not None and record.body == b"" and record.epoch == 9, desk.name


def test_after_a_lost_disk_and_a_wrong_clock_the_former_life_is_outbid_with_all_sections() -> None:
    former, bob = Desk("ann", epoch=500), Desk("bob")
    former.core.publish("facts", b"former", 1000)
    meet(former, bob)
    reborn = Desk("ann", epoch=3)
    reborn.core.publish("facts", b"present", 1000)
    meet(reborn, bob)
    meet(reborn, bob)
    assert [effect.epoch for effect in reborn.asked_for(PersistEpoch)][-1] > 500  # type: ignore[attr-defined]
    record = bob.core.records.get(former.identity.node_id, "facts", NOW)
    assert record is not None and record.body == b"present" and record.epoch > 500
    member = bob.core.swim.table.get(former.identity.node_id)
    assert member is not None and member.epoch > 500 and member.state == "alive"


def test_the_revoked_are_forgotten_and_told_and_nothing_else() -> None:
    root, ann, bob = Desk("root"), Desk("ann"), Desk("bob")
    meet(root, ann, bob)
    bob.core.publish("facts", b"x", 600)
    meet(ann, bob)
    root.core.revoke(make_revocation(ROOT, root.core.trust, bob.identity.node_id, "", NOW))
    meet(root, ann)
    assert not ann.knows(bob) and ann.core.records.get(bob.identity.node_id, "facts", NOW) is None
    assert ann.asked_for(KeepRevocations)
    ann.core.publish("secret", b"s", 600)
    with pytest.raises(TrustError):
        talk(ann, bob, ann.core.converse())
    with contextlib.suppress(TrustError, FrameError):
        talk(bob, ann, bob.core.converse())
    assert bob.identity.node_id in bob.core.trust.revoked
    assert bob.core.records.get(ann.identity.node_id, "secret", NOW) is None
    before = ann.core.counters["refused_revoked"]
    ann.effects.clear()
    packet = Rumours(7, bytes(8), ())
    ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), ("bob", 7373))
    assert ann.core.counters["refused_revoked"] == before + 1 and not ann.effects


def test_whose_certificate_has_ended_is_forgotten_until_it_is_renewed() -> None:
    root, ann, bob = Desk("root"), Desk("ann"), Desk("bob")
    meet(root, ann, bob)
    talk(ann, root, ann.core.ask_renewal())
    (kept,) = ann.asked_for(KeepChain)
    assert root.core.counters["renewals"] == 1
    meet(root, ann, bob)
    for desk in (root, ann, bob):
        desk.now = 3600.0 + 121.0
        desk.core.forget_the_old()
    assert root.knows(ann) and not root.knows(bob), "the invite has ended, and bob had asked nobody"
    with pytest.raises(TrustError, match="has ended"):
        talk(bob, root, bob.core.ask_renewal())
    with pytest.raises(TrustError, match="may not admit"):
        talk(root, ann, root.core.ask_renewal())
    assert ann.core.chain == kept.chain  # type: ignore[attr-defined]


def test_a_flood_is_refused_before_any_signature_is_checked() -> None:
    ann = Desk("ann")
    for _ in range(2000):
        ann.core.on_datagram(b"\x01" + bytes(200), ("flood", 1))
    assert ann.core.counters["refused_flood"] > 1000
    assert ann.core.counters["refused_foreign"] + ann.core.counters["refused_flood"] == 2000


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
def test_any_sequence_of_frames_is_answered_or_refused_and_teaches_nothing_false(
    said: list[object], asks: bool
) -> None:
    ann, bob = Desk("ann"), Desk("bob")
    root = ann.core.swim.table.root
    queue: Iterator[object] = iter(said)
    try:
        if asks:
            conversation = ann.core.converse(unless_equal=True)
            next(conversation)
        else:
            conversation = ann.core.answer(bob.identity.node_id, next(queue))  # type: ignore[arg-type]
            next(conversation)
        for frame in queue:
            conversation.send((bob.identity.node_id, frame))  # type: ignore[arg-type]
    except (StopIteration, FrameError, TrustError, EnvelopeError):
        pass
    assert ann.core.swim.table.root == root, "nobody new is believed to be here"


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
        words.map(lambda word: ("member", Desk("bob").core._seal_evidence(word))),
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
def test_a_member_that_signs_nonsense_breaks_nothing(packets: list[AnyPacket]) -> None:
    ann, bob = Desk("ann"), Desk("bob")
    meet(ann, bob)
    for packet in packets:
        data = bob.core._seals.seal_to(ann.identity.node_id, encode(packet))
        ann.core.on_datagram(data, ("bob", 7373))
        for effect in ann.asked_for(SetTimer):
            ann.core.on_timer(effect.name, effect.token, effect.at)  # type: ignore[attr-defined]
        ann.effects.clear()
    me = ann.core.swim.table.get(ann.identity.node_id)
    assert me is not None and me.state == "alive"


@given(st.binary(max_size=1300))
def test_hostile_datagrams_change_nothing(data: bytes) -> None:
    ann = Desk("ann")
    root = ann.core.swim.root()
    ann.core.on_datagram(data, ("x", 1))
    assert ann.core.swim.root() == root and not ann.asked_for(SendPacket)


def test_a_packet_cannot_be_read_by_another_node_than_it_was_sent_to() -> None:
    ann, bob, cyd = Desk("ann"), Desk("bob"), Desk("cyd")
    meet(ann, bob, cyd)
    data = ann.core.seal_packet(bob.identity.node_id, Rumours(1, bytes(8), ()))
    cyd.core.on_datagram(data, ("ann", 7373))
    assert cyd.core.counters["refused_unsigned"] == 1
    bob.core.on_datagram(data, ("ann", 7373))
    bob.core.on_datagram(data, ("ann", 7373))
    assert bob.core.counters["refused_replayed"] == 1


def test_members_that_go_are_told_of_once() -> None:
    ann, bob = Desk("ann"), Desk("bob")
    meet(ann, bob)
    ann.effects.clear()
    farewell = next(e for e in bob.core.swim.leave(0.0) if isinstance(e, SendPacket))
    for number in range(3):
        packet = Rumours(100 + number, bytes(8), farewell.packet.gossip)
        ann.core.on_datagram(bob.core.seal_packet(ann.identity.node_id, packet), ("bob", 7373))
    assert [effect.state for effect in ann.asked_for(MemberChanged)] == ["left"]  # type: ignore[attr-defined]


def test_no_lie_about_a_life_leaves_its_subject_without_an_answer() -> None:
    ann, bob, cyd = Desk("ann"), Desk("bob"), Desk("cyd")
    meet(ann, bob, cyd)
    limit = int(NOW * 1000) + EPOCH_AHEAD_MS
    lies = [
        Dead(ann.identity.node_id, 2**61, 0),
        Dead(ann.identity.node_id, 1, MAX_INCARNATION - 1),
        Dead(ann.identity.node_id, limit, MAX_INCARNATION - 1),
    ]
    for number, lie in enumerate(lies):
        packet = Rumours(200 + number, bytes(8), (("member", bob.core._seal_evidence(lie)),))
        for desk in (ann, cyd):
            desk.core.on_datagram(bob.core.seal_packet(desk.identity.node_id, packet), ("bob", 7373))
        for desk in (ann, cyd):
            desk.now += 1.0
        meet(ann, cyd)
        member = cyd.core.swim.table.get(ann.identity.node_id)
        assert member is not None and member.state == "alive", lie
    assert cyd.core.counters["refused_implausible"] == 1


def test_an_epoch_from_a_clock_that_was_years_ahead_is_forgotten() -> None:
    wall = int(NOW * 1000)
    assert next_epoch(wall + 5, wall) == wall + 6 and next_epoch(0, wall) == wall
    assert next_epoch(wall + 10 * 365 * 86_400_000, wall) == wall
