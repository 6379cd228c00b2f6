"""Step tests of the SWIM core: no sockets, no sleeping; time is an argument."""

import contextlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.config import SwimConfig
from membership.effects import (
    Cloned,
    Effect,
    MemberChanged,
    PersistEpoch,
    SendPacket,
    SetTimer,
    StreamPing,
    WantReconcile,
)
from membership.envelope import ADDRESSED_OVERHEAD
from membership.rumours import MAX_MISFITS, RumourQueue
from membership.suspicion import Suspicion
from membership.swim import Swim
from membership.wire import (
    MAX_INCARNATION,
    Ack,
    Alive,
    AnyEvidence,
    Dead,
    Left,
    Nack,
    Ping,
    PingRequest,
    Rumours,
    Suspect,
    WireError,
    decode_evidence,
    decode_packet,
    encode,
)

CONFIG = SwimConfig.lan()
ME, PEER, THIRD, FOURTH = (bytes([n]) * 32 for n in range(1, 5))


def sealed(item: AnyEvidence) -> bytes:
    return encode(item)


def alive(node: bytes, epoch: int = 1, incarnation: int = 0) -> Alive:
    return Alive(node, epoch, incarnation, "10.0.0.9", 7000 + node[0], False)


def core(*peers: bytes) -> Swim:
    swim = Swim(ME, "10.0.0.1", 7373, 1, CONFIG, Random(5), sealed, lambda: 0)
    swim.start(0.0)
    for peer in peers:
        swim.on_evidence(peer, alive(peer), sealed(alive(peer)), 0.0)
    return swim


def fire(swim: Swim, name: str, now: float) -> list[Effect]:
    return swim.on_timer(name, swim._tokens[name], now)


def packets(effects: list[Effect], kind: type) -> list[SendPacket]:
    return [e for e in effects if isinstance(e, SendPacket) and isinstance(e.packet, kind)]


def changes(effects: list[Effect]) -> list[tuple[bytes, str]]:
    return [(e.node, e.state) for e in effects if isinstance(e, MemberChanged)]


def test_ping_is_acked_with_its_nonce() -> None:
    swim = core(PEER)
    effects = swim.on_packet(PEER, Ping(77, b"root", ()), [], 1.0)
    (ack,) = packets(effects, Ack)
    assert ack.to == PEER and isinstance(ack.packet, Ack) and ack.packet.answers == 77


def test_silent_peer_is_probed_indirectly_then_suspected_then_dead() -> None:
    swim = core(PEER)
    (ping,) = packets(fire(swim, "probe", 1.0), Ping)
    assert ping.to == PEER
    for other in (THIRD, FOURTH):
        swim.on_evidence(other, alive(other), sealed(alive(other)), 1.0)
    relayed = packets(fire(swim, "probe-timeout", 1.5), PingRequest)
    assert {p.to for p in relayed} == {THIRD, FOURTH}
    effects = fire(swim, "probe", 2.0)
    assert (PEER, "suspect") in changes(effects)
    (timer,) = [e for e in effects if isinstance(e, SetTimer) and e.name.startswith("suspect")]
    effects = swim.on_timer(timer.name, timer.token, timer.at)
    assert changes(effects) == [(PEER, "unreachable")] and swim.is_unreachable(PEER)
    (timer,) = [e for e in effects if isinstance(e, SetTimer)]
    assert changes(swim.on_timer(timer.name, timer.token, timer.at)) == [(PEER, "dead")]
    assert not swim.is_unreachable(PEER)


def test_new_member_is_probed_in_the_round_that_goes_on() -> None:
    swim, probed = core(*(bytes([n]) * 32 for n in range(10, 20))), []
    for now in range(1, 12):
        if now == 2:
            swim.on_evidence(PEER, alive(PEER), sealed(alive(PEER)), 1.5)
        (ping,) = packets(fire(swim, "probe", float(now)), Ping)
        swim.on_packet(ping.to, Ack(now, b"root", (), ping.packet.nonce), [], now + 0.1)
        probed.append(ping.to)
    assert PEER in probed and len(set(probed)) == len(probed)


def test_ack_in_time_keeps_the_peer_alive() -> None:
    swim = core(PEER)
    (ping,) = packets(fire(swim, "probe", 1.0), Ping)
    swim.on_packet(PEER, Ack(5, b"root", (), ping.packet.nonce), [], 1.1)
    assert fire(swim, "probe-timeout", 1.5) == []
    assert changes(fire(swim, "probe", 2.0)) == []


def test_ack_with_another_nonce_is_ignored() -> None:
    swim = core(PEER)
    (ping,) = packets(fire(swim, "probe", 1.0), Ping)
    swim.on_packet(PEER, Ack(5, b"root", (), ping.packet.nonce + 1), [], 1.1)
    assert (PEER, "suspect") in changes(fire(swim, "probe", 2.0))


@pytest.mark.parametrize("subject", [ME, PEER], ids=["oneself", "another"])
@pytest.mark.parametrize("named", [(1, 4), (7, 0), (7, MAX_INCARNATION - 1)])
@pytest.mark.parametrize("kind", [Suspect, Dead])
def test_accusation_of_what_its_subject_never_announced_has_no_effect(
    subject: bytes, named: tuple[int, int], kind: type
) -> None:
    """Each refutation of one with a new epoch would be a write to the disk, and nobody could refute one with a far epoch."""
    swim = core(PEER, THIRD)
    while swim.rumours.take(1400, 3):
        pass
    before = swim.table.get(subject), swim.health.score
    accusation = kind(subject, *named)
    assert not [e for e in swim.on_evidence(THIRD, accusation, sealed(accusation), 1.0) if not isinstance(e, SetTimer)]
    assert (swim.table.get(subject), swim.health.score) == before and not len(swim.rumours)


def test_accused_node_trusts_its_own_probes_less() -> None:
    """Lifeguard: who is suspected is slow itself."""
    swim = core(PEER)
    accusation = Suspect(ME, 1, 0)
    before = swim.health.scaled(1.0)
    swim.on_evidence(PEER, accusation, sealed(accusation), 1.0)
    assert swim.health.scaled(1.0) > before


def test_node_that_has_left_refutes_nothing() -> None:
    swim = core(PEER)
    swim.leave(1.0)
    accusation = Suspect(ME, 1, 0)
    assert swim.on_evidence(PEER, accusation, sealed(accusation), 2.0) == []
    me = swim.table.get(ME)
    assert me is None or me.state == "left"


@pytest.mark.parametrize("kind", [Suspect, Dead])
def test_accusation_of_the_present_incarnation_is_refuted(kind: type) -> None:
    swim = core(PEER)
    accusation = kind(ME, 1, 0)
    swim.on_evidence(PEER, accusation, sealed(accusation), 1.0)
    me = swim.table.get(ME)
    assert me is not None
    assert (me.epoch, me.incarnation) == (1, 1)


def test_last_incarnation_is_refuted_in_a_new_epoch() -> None:
    swim = core(PEER)
    swim._incarnation = MAX_INCARNATION - 1
    accusation = Suspect(ME, 1, MAX_INCARNATION - 1)
    assert PersistEpoch(2) in swim.on_evidence(PEER, accusation, sealed(accusation), 1.0)
    assert swim.table.get(ME).order == (2, 0, 0)  # type: ignore[union-attr]


@given(st.integers(0, 5), st.integers(0, 50), st.sampled_from([Suspect, Dead]))
def test_node_never_considers_itself_dead(epoch: int, incarnation: int, kind: type) -> None:
    swim = core(PEER)
    swim.on_evidence(PEER, kind(ME, epoch, incarnation), b"", 1.0)
    me = swim.table.get(ME)
    assert me is not None and me.state == "alive"
    assert (me.epoch, me.incarnation) == ((1, 1) if (epoch, incarnation) == (1, 0) else (1, 0))


def test_stale_timer_is_ignored() -> None:
    swim = core(PEER)
    token = swim._tokens["probe"]
    fire(swim, "probe", 1.0)
    assert swim.on_timer("probe", token, 1.1) == []


def test_suspect_receives_the_accusation_and_what_it_names_with_the_next_ping() -> None:
    swim = core(PEER)
    accusation = Suspect(PEER, 1, 0)
    swim.on_evidence(THIRD, accusation, sealed(accusation), 1.0)
    (ping,) = packets(fire(swim, "probe", 2.0), Ping)
    assert ping.packet.gossip[:2] == (("member", sealed(alive(PEER))), ("member", sealed(accusation)))


def test_only_alive_members_relay_and_only_their_own_nacks_count() -> None:
    swim = core(PEER)
    (ping,) = packets(fire(swim, "probe", 1.0), Ping)
    for other in (THIRD, FOURTH):
        swim.on_evidence(other, alive(other), sealed(alive(other)), 1.0)
    accusation = Suspect(FOURTH, 1, 0)
    swim.on_evidence(THIRD, accusation, sealed(accusation), 1.0)
    assert {p.to for p in packets(fire(swim, "probe-timeout", 1.5), PingRequest)} == {THIRD}
    assert swim._probe is not None and isinstance(ping.packet, Ping)
    swim.on_packet(THIRD, Nack(1, b"root", (), ping.packet.nonce + 1), [], 1.6)
    assert not swim._probe.nacks
    swim.on_packet(THIRD, Nack(2, b"root", (), ping.packet.nonce), [], 1.6)
    assert swim._probe.nacks == {THIRD}


def test_silence_over_tcp_accuses_nobody() -> None:
    swim = core(PEER)
    assert swim.on_stream_ping(PEER, "silent", 1.0) == []
    assert (PEER, "suspect") in changes(swim.on_stream_ping(PEER, "refused", 1.0))


def test_relay_sends_a_nack_at_once_and_forwards_the_ack() -> None:
    swim = core(PEER, THIRD)
    effects = swim.on_packet(PEER, PingRequest(9, b"root", (), THIRD), [], 1.0)
    (ping,), (nack,) = packets(effects, Ping), packets(effects, Nack)
    assert ping.to == THIRD and nack.to == PEER
    (ack,) = packets(swim.on_packet(THIRD, Ack(3, b"root", (), ping.packet.nonce), [], 1.2), Ack)
    assert ack.to == PEER and isinstance(ack.packet, Ack) and ack.packet.answers == 9


def test_leave_is_sent_to_every_member() -> None:
    swim = core(PEER, THIRD)
    told = {e.to for e in swim.leave(1.0) if isinstance(e, SendPacket)}
    assert told == {PEER, THIRD}
    assert fire(swim, "gossip", 2.0) == [], "nothing is sent after the farewell"


def test_left_member_is_alive_again_in_a_new_epoch() -> None:
    swim = core(PEER)
    farewell = Left(PEER, 1, 0)
    assert changes(swim.on_evidence(PEER, farewell, sealed(farewell), 1.0)) == [(PEER, "left")]
    again = alive(PEER, epoch=2)
    assert changes(swim.on_evidence(PEER, again, sealed(again), 2.0)) == [(PEER, "alive")]


def test_every_packet_fits_the_size_limit() -> None:
    swim = core(*(bytes([n]) * 32 for n in range(2, 120)))
    for number in range(60):
        swim.rumours.add("record", bytes([number]), bytes(200 + number * 10))
    sizes = []
    for round_number in range(1, 40):
        for effect in [*fire(swim, "gossip", round_number * 0.2), *fire(swim, "probe", float(round_number))]:
            if isinstance(effect, SendPacket):
                sizes.append(len(encode(effect.packet)) + ADDRESSED_OVERHEAD)
    assert sizes and max(sizes) <= CONFIG.packet_bytes


def test_member_rumours_cannot_starve_records() -> None:
    queue = RumourQueue(4)
    for number in range(50):
        queue.add("member", b"m%d" % number, bytes(150))
    queue.add("record", b"r", bytes(200))
    kinds = [kind for kind, _ in queue.take(1000, 50)]
    assert kinds.count("record") == 1 and kinds.count("member") >= 3


def test_full_queue_drops_what_was_sent_most_often() -> None:
    queue = RumourQueue(4, capacity=3)
    for name in (b"old", b"older"):
        queue.add("record", name, name)
    queue.take(1000, 2)
    queue.add("record", b"new", b"new")
    queue.add("record", b"newest", b"newest")
    assert len(queue) == 3 and {sealed for _, sealed in queue.take(1000, 2)} >= {b"new", b"newest"}
    left = len(queue)
    queue.add("record", b"newest", b"changed")
    assert len(queue) == left and queue.waiting_bytes == sum(rumour.size for rumour in queue._by_name.values())


def test_rumour_that_fits_is_looked_for_behind_a_few_that_do_not() -> None:
    queue = RumourQueue(4)
    for number in range(MAX_MISFITS - 1):
        queue.add("record", b"large%d" % number, bytes(500))
    queue.add("record", b"small", b"small")
    assert queue.take(100, 2) == (("record", b"small"),)
    queue.add("record", b"large", bytes(500))
    assert queue.take(100, 2) == (), "a packet does not cost a look at the whole queue"


def test_urgent_record_is_repeated_as_often_as_news_of_members() -> None:
    def sent(urgent: bool) -> int:
        queue = RumourQueue(10)
        queue.add("record", b"advert", b"advert", urgent)
        return sum(len(queue.take(1000, 50)) for _ in range(1000))

    assert sent(True) > 2 * sent(False) > 0


@given(st.integers(2, 500), st.lists(st.binary(min_size=1, max_size=1), max_size=10))
def test_suspicion_stays_within_its_bounds_and_confirmations_only_shorten_it(
    members: int, accusers: list[bytes]
) -> None:
    suspicion = Suspicion(CONFIG, members, b"first", 0.0)
    deadlines = [suspicion.deadline]
    for accuser in accusers:
        suspicion.confirm(accuser)
        deadlines.append(suspicion.deadline)
    assert deadlines == sorted(deadlines, reverse=True)
    shortest = CONFIG.suspicion_multiplier * CONFIG.probe_interval_s
    assert shortest <= deadlines[-1] <= deadlines[0]


def test_the_same_accuser_counts_once() -> None:
    suspicion = Suspicion(CONFIG, 50, b"a", 0.0)
    before = suspicion.deadline
    assert not suspicion.confirm(b"a")
    assert suspicion.deadline == before
    assert suspicion.confirm(b"b") and suspicion.deadline < before


@given(
    st.integers(2, 500),
    st.lists(st.tuples(st.sampled_from([b"first", b"a", b"b", b"c"]), st.floats(0.0, 50.0), st.booleans()), max_size=8),
)
def test_refusals_move_the_deadline_at_most_to_the_floor(members: int, words: list[tuple[bytes, float, bool]]) -> None:
    suspicion = Suspicion(CONFIG, members, b"first", 0.0)
    deadline, refused_to = suspicion.deadline, set()
    for accuser, now, refused in sorted(words, key=lambda word: word[1]):
        suspicion.confirm(accuser, now, refused)
        refused_to |= {accuser} if refused else set()
        assert suspicion.deadline <= deadline, "the deadline only moves earlier"
        deadline = suspicion.deadline
        shortest = CONFIG.suspicion_multiplier * CONFIG.probe_interval_s
        assert deadline >= shortest or (len(refused_to) >= min(2, members - 1) and deadline >= CONFIG.refused_floor_s)


def test_two_refused_connections_shorten_the_suspicion() -> None:
    swim = core(PEER, THIRD, FOURTH)
    (timer,) = [e for e in swim.on_stream_ping(PEER, "refused", 1.0) if isinstance(e, SetTimer)]
    assert timer.at > 1.0 + CONFIG.suspicion_multiplier, "one refusal may be a firewall between the two"
    second = Suspect(PEER, 1, 0, True)
    (sooner,) = [e for e in swim.on_evidence(THIRD, second, sealed(second), 1.2) if isinstance(e, SetTimer)]
    assert sooner.at == 1.2 + CONFIG.refused_floor_s
    assert changes(swim.on_timer(sooner.name, sooner.token, sooner.at)) == [(PEER, "dead")]


def test_suspect_can_refute_after_refused_connections() -> None:
    swim = core(PEER, THIRD)
    swim.on_stream_ping(PEER, "refused", 1.0)
    again = alive(PEER, epoch=2)
    assert changes(swim.on_evidence(PEER, again, sealed(again), 1.5)) == [(PEER, "alive")]
    assert not [name for name in swim._tokens if name.startswith("suspect")]


def test_tcp_ack_keeps_a_peer_alive_if_udp_is_blocked() -> None:
    swim = core(PEER, THIRD)
    (ping,) = packets(fire(swim, "probe", 1.0), Ping)
    asked = [e.node for e in fire(swim, "probe-timeout", 1.5) if isinstance(e, StreamPing)]
    assert asked == [ping.to]
    swim.on_stream_ping(ping.to, "acked", 1.6)
    assert changes(fire(swim, "probe", 2.0)) == []


def test_relay_pings_over_tcp_too_and_reports_the_outcome() -> None:
    swim = core(PEER, THIRD)
    effects = swim.on_packet(PEER, PingRequest(9, b"root", (), THIRD), [], 1.0)
    assert [e.node for e in effects if isinstance(e, StreamPing)] == [THIRD]
    (ack,) = packets(swim.on_stream_ping(THIRD, "acked", 1.1), Ack)
    assert ack.to == PEER and isinstance(ack.packet, Ack) and ack.packet.answers == 9
    swim.on_packet(PEER, PingRequest(10, b"root", (), THIRD), [], 2.0)
    assert (THIRD, "suspect") in changes(swim.on_stream_ping(THIRD, "refused", 2.1))
    assert swim.on_stream_ping(FOURTH, "refused", 2.1) == [], "an unknown node is not accused"


def test_suspended_node_accuses_no_other_node() -> None:
    swim = core(PEER)
    fire(swim, "probe", 1.0)
    (asked,) = swim.on_lag(8.0, 9.0)
    assert isinstance(asked, WantReconcile) and asked.node == PEER, "missed updates are requested"
    assert swim.health.score == 1
    assert changes(fire(swim, "probe", 9.0)) == [], "the ack may still be in the socket"
    accusation = Suspect(PEER, 1, 0)
    swim.on_evidence(THIRD, accusation, sealed(accusation), 9.0)
    swim.on_lag(20.0, 30.0)
    (later,) = [e for e in fire(swim, "suspect-" + PEER.hex(), 30.0) if isinstance(e, SetTimer)]
    assert later.at == 30.0 + CONFIG.probe_interval_s
    assert changes(swim.on_timer(later.name, later.token, later.at)) == [(PEER, "dead")]
    assert swim.on_lag(CONFIG.lag_s / 2, 40.0) == [] and swim.health.score == 2, "a small delay is no lag"


def test_verdict_of_another_node_is_one_more_accusation() -> None:
    """Its author may lie or be cut off, and a death moves the jobs of a node."""
    swim = core(PEER, THIRD, FOURTH)
    verdict = Dead(PEER, 1, 0)
    assert changes(swim.on_evidence(THIRD, verdict, sealed(verdict), 1.0)) == [(PEER, "suspect")]
    assert swim.on_evidence(THIRD, verdict, sealed(verdict), 1.1) == [], "an accuser counts once"
    effects = swim.on_evidence(FOURTH, verdict, sealed(verdict), 1.2)
    assert changes(effects) == [(PEER, "unreachable")]
    (timer,) = [e for e in effects if isinstance(e, SetTimer) and e.name.startswith("suspect")]
    assert changes(swim.on_timer(timer.name, timer.token, timer.at)) == [(PEER, "dead")]


@pytest.mark.parametrize("kind", [Suspect, Dead])
def test_repeated_false_accuser_is_ignored(kind: type) -> None:
    swim = core(PEER, THIRD, FOURTH)
    for number in range(CONFIG.accuser_credit + 1):
        lie = kind(PEER, 1, number)
        told = changes(swim.on_evidence(THIRD, lie, sealed(lie), float(number)))
        assert told == ([(PEER, "suspect")] if number < CONFIG.accuser_credit else [])
        refutation = alive(PEER, incarnation=number + 1)
        swim.on_evidence(PEER, refutation, sealed(refutation), number + 0.5)
    honest, later = Suspect(PEER, 1, CONFIG.accuser_credit + 1), CONFIG.accuser_window_s + 20.0
    assert changes(swim.on_evidence(FOURTH, honest, sealed(honest), 20.0)) == [(PEER, "suspect")]
    assert changes(swim.on_evidence(THIRD, honest, sealed(honest), later)) == [(PEER, "unreachable")], "it counts again"


def test_own_accusation_counts_however_often_earlier_ones_were_refuted() -> None:
    """In a mesh of two nobody else finds out that the other one has crashed."""
    swim = core(PEER)
    for number in range(CONFIG.accuser_credit + 1):
        assert changes(swim.on_stream_ping(PEER, "refused", float(number)))[0] == (PEER, "suspect")
        refutation = alive(PEER, incarnation=number + 1)
        swim.on_evidence(PEER, refutation, sealed(refutation), number + 0.5)


@given(st.binary(max_size=200))
def test_hostile_bytes_are_wire_errors(data: bytes) -> None:
    for decode in (decode_packet, lambda d: decode_evidence(ME, d)):
        with contextlib.suppress(WireError):
            decode(data)


def test_statement_for_another_node_is_refused() -> None:
    with pytest.raises(WireError, match="itself"):
        decode_evidence(PEER, encode(alive(THIRD)))
    with pytest.raises(WireError, match="itself"):
        decode_evidence(PEER, encode(Left(THIRD, 1, 1)))
    assert decode_evidence(PEER, encode(Dead(THIRD, 1, 1))) == Dead(THIRD, 1, 1)


def test_second_accuser_makes_a_suspect_unreachable_and_its_refutation_alive() -> None:
    swim = core(PEER, THIRD, FOURTH)
    accusation = Suspect(PEER, 1, 0)
    assert changes(swim.on_evidence(THIRD, accusation, sealed(accusation), 1.0)) == [(PEER, "suspect")]
    assert changes(swim.on_evidence(THIRD, accusation, sealed(accusation), 1.1)) == [], "an accuser counts once"
    assert changes(swim.on_evidence(FOURTH, accusation, sealed(accusation), 1.2)) == [(PEER, "unreachable")]
    back = alive(PEER, 1, 1)
    (change,) = [e for e in swim.on_evidence(PEER, back, sealed(back), 1.3) if isinstance(e, MemberChanged)]
    assert (change.state, change.was) == ("alive", "unreachable") and not swim.is_unreachable(PEER)


def test_ping_of_a_member_held_dead_is_acked_with_the_accusation() -> None:
    swim = core(PEER, THIRD)
    effects = swim.on_stream_ping(PEER, "refused", 1.0)
    while swim.table.get(PEER).state != "dead":  # type: ignore[union-attr]
        (timer,) = [e for e in effects if isinstance(e, SetTimer) and e.name.startswith("suspect")]
        effects = swim.on_timer(timer.name, timer.token, timer.at)
    while swim.rumours.take(1400, 3):
        pass  # it is no news any more
    (ack,) = packets(swim.on_packet(PEER, Ping(7, b"root", ()), [], 90.0), Ack)
    assert ack.packet.gossip == (("member", sealed(alive(PEER))), ("member", sealed(Dead(PEER, 1, 0))))


def test_earlier_run_is_outbid_once_and_a_clone_is_detected() -> None:
    swim = core(PEER)
    former = Alive(ME, 50, 0, "10.0.0.7", 7373, False, 50)
    assert not [e for e in swim.on_evidence(ME, former, sealed(former), 1.0) if isinstance(e, Cloned)]
    assert swim.table.get(ME).epoch == 51  # type: ignore[union-attr]
    assert swim.on_evidence(ME, former, sealed(former), 2.0) == [], "an echo has no effect"
    again = Alive(ME, 52, 0, "10.0.0.7", 7373, False, 50)
    (cloned,) = [e for e in swim.on_evidence(ME, again, sealed(again), 3.0) if isinstance(e, Cloned)]
    assert (cloned.host, cloned.younger) == ("10.0.0.7", False), "it started after this node"


def test_gossip_timer_stops_without_rumours() -> None:
    swim = core(PEER)
    ticks = 0
    while [e for e in fire(swim, "gossip", 1.0 + ticks) if isinstance(e, SetTimer)]:
        ticks += 1
    assert ticks < 10 and not len(swim.rumours)
    (soon,) = [e for e in swim.gossip_record(ME, "facts", b"x", 50.0) if isinstance(e, SetTimer)]
    assert soon.name == "gossip" and 50.0 < soon.at <= 50.0 + CONFIG.gossip_interval_s


def test_urgent_record_is_sent_at_once_and_first() -> None:
    swim = core(PEER, THIRD)
    for number in range(20):
        swim.rumours.add("record", bytes([number]), bytes(300))
    told = packets(swim.gossip_record(ME, "advert", b"urgent" * 20, 5.0, urgent=True), Rumours)
    assert len(told) == 2 and all(("record", b"urgent" * 20) in packet.packet.gossip for packet in told)


@pytest.mark.parametrize(("certificate", "kinds"), [(300, ["rm"]), (1000, ["r", "m"]), (5000, ["m"])])
def test_introduction_fits_into_packets(certificate: int, kinds: list[str]) -> None:
    swim = core(PEER, THIRD)
    sent = packets(swim.introduce(PEER, bytes(certificate)), Rumours)
    assert [p.to for p in sent] == [THIRD] * len(kinds), "neither the newcomer nor this node"
    assert ["".join(kind[0] for kind, _ in p.packet.gossip) for p in sent] == kinds
    assert all(len(encode(p.packet)) + ADDRESSED_OVERHEAD <= CONFIG.packet_bytes for p in sent)
    assert swim.introduce(FOURTH, bytes(10)) == [], "it is not known, so there is nothing to tell"


def test_introductions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("membership.swim.INTRODUCED_TO", 3)
    swim = core(*(bytes([n]) * 32 for n in range(2, 12)))
    sent = packets(swim.introduce(PEER, bytes(300)), Rumours)
    assert len({p.to for p in sent} - {ME, PEER}) == len(sent) == 3
