"""Bounds on what other nodes may claim, and values that never fall."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.admission import (
    ENDORSED,
    MAX_INVITED,
    MAX_INVITED_PER_ISSUER,
    PendingJoin,
    WaitingList,
    decode_pending,
    encode_pending,
)
from membership.config import SwimConfig
from membership.identity import Identity
from membership.probe import MAX_RELAYS, Relays
from membership.ratelimit import BURST_S, TokenBuckets
from membership.reconcile import FrameError, ReachMe, decode_frame, encode_frame
from membership.records import Record, RecordTable, encode_body
from membership.rumours import RumourQueue
from membership.snapshot import RevocationFile, Snapshot, SnapshotFile, UsedInvites, next_epoch
from membership.suspicion import AccuserCredit
from membership.trust import TrustError, TrustStore, User
from membership.wire import EPOCH_AHEAD_MS, MAX_INCARNATION, Alive, Suspect, WireError, decode_evidence, encode
from tests.chains import admitted
from tests.membership.test_admission_decisions import Desk, invite, pending
from tests.membership.test_core import meet
from tests.membership.test_records import CHAIN, GENESIS, NOW, PEER, ROOT, sealed, table

NODE, OTHER = b"n" * 32, b"o" * 32
# What asyncio would close a socket for, what no name can be written as, a name, and an address of one link.
NO_ADDRESSES = ["", "a\0b", "a..b", "a" * 64, "lab.example.edu", "fe80::1%eth0", "fe80::1%a\0b"]


def test_two_records_of_one_version_do_not_replace_each_other() -> None:
    records = table()
    records.apply(sealed(PEER, "facts", 1, 1, b"first"), NOW)
    assert records.apply(sealed(PEER, "facts", 1, 1, b"second"), NOW) == "not newer"


def test_record_does_not_outlive_a_month_by_more_than_clocks_differ() -> None:
    month_s = 30 * 86_400
    assert table().apply(sealed(PEER, "facts", 1, 1, life_s=month_s + 121), NOW) == "invalid"
    assert isinstance(table().apply(sealed(PEER, "facts", 1, 1, life_s=month_s + 120), NOW), Record)
    assert table().apply(sealed(PEER, "facts", 1, 1, life_s=0), NOW) == "expired"


def test_section_that_is_too_long_is_not_signed() -> None:
    assert encode_body(1, 1, "facts", 1, bytes(16 << 10))
    with pytest.raises(ValueError, match="at most 16384 bytes"):
        encode_body(1, 1, "facts", 1, bytes((16 << 10) + 1))


def test_large_section_that_another_node_signed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = sealed(PEER, "facts", 1, 1, b"x" * 100)
    monkeypatch.setattr("membership.records.MAX_BODY_BYTES", 99)
    assert table().apply(large, NOW) == "invalid"


@pytest.mark.parametrize("bound", ["MAX_SECTIONS", "MAX_NODES"])
def test_table_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"membership.records.{bound}", 1)
    records: RecordTable = table()
    records.apply(sealed(ROOT, "facts", 1, 1), NOW)
    more = sealed(ROOT, "jobs/a", 1, 1) if bound == "MAX_SECTIONS" else sealed(PEER, "facts", 1, 1)
    assert records.apply(more, NOW) == "full"
    assert isinstance(records.apply(sealed(ROOT, "facts", 1, 2), NOW), Record), "what is known is replaced"


def test_sections_of_all_nodes_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that adds machines to its user gets no more room; its certificates, and others, keep theirs."""
    trust = TrustStore(GENESIS)
    trust.admit_chain(CHAIN, NOW)
    bob = User("bob", PEER.node_id, int(NOW) + 1)
    machines = [Identity(bytes([number]) * 32) for number in range(1, 7)]
    chains = [admitted(ROOT, GENESIS, CHAIN, one.node_id, "m", bob, NOW) for one in machines]
    eve = Identity(b"\x77" * 32)
    trust.admit_chain(admitted(ROOT, GENESIS, CHAIN, eve.node_id, "m", "eve", NOW), NOW)
    records = RecordTable(trust)
    long = lambda one, number, version=1, size=1: sealed(one, f"{number:0128}", 1, version, b"x" * size)  # noqa: E731
    monkeypatch.setattr(
        "membership.records.MAX_USER_DIGEST_BYTES", 9 * len(msgspec.msgpack.encode((bytes(32), "n" * 128, 1, 1)))
    )
    monkeypatch.setattr("membership.records.MAX_USER_BYTES", 20_000)

    def applied(item: bytes) -> bool:
        return isinstance(records.apply(item, NOW), Record)

    for one, chain in zip(machines, chains, strict=True):
        assert applied(sealed(one, "trust", 1, 1, chain))
    assert sum(applied(long(one, number)) for number in range(3) for one in machines) == 9
    assert applied(long(machines[0], 0, 2, 10_000)), "it replaces a section"
    assert not applied(long(machines[1], 0, 2, 10_000)) and applied(long(machines[1], 0, 2, 1)), "of the same size"
    assert all(applied(long(eve, number)) for number in range(9)) and not applied(long(eve, 9))
    assert all(applied(long(ROOT, number)) for number in range(12)), "a founder's revocations have to come through"
    records.drop(machines[0].node_id)
    assert sum(applied(long(machines[5], number)) for number in range(3, 9)) == 2
    for node in list(records.authors()):
        records.drop(node)
    assert not records._digest_bytes and not records._sealed_bytes


def test_rumours_are_bounded() -> None:
    queue = RumourQueue(retransmit_multiplier=4)
    for number in range(5000):
        queue.add("member" if number % 2 else "record", b"%d" % number, bytes(100))
    assert len(queue) == 4096


def test_relays_are_bounded_and_older_ones_stay() -> None:
    relays = Relays()
    for number in range(MAX_RELAYS + 10):
        relays.add(number, NODE, OTHER, 7, 0.0)
    assert len(relays) == 1024 and relays.take(0, 1.0) == (OTHER, 7)


def test_requests_with_invites_are_bounded() -> None:
    waiting = WaitingList(MAX_INVITED, MAX_INVITED_PER_ISSUER)
    place = lambda number, issuer: waiting.keep(PendingJoin(b"%d" % number, "n", "u", "h", 0, b""), issuer, NOW)  # noqa: E731
    assert sum(place(number, "issuer") for number in range(30)) == 16
    assert sum(place(100 + number, f"issuer {number}") for number in range(30)) == 19
    assert len(waiting.entries()) == 20


def test_endorsements_of_a_member_are_bounded_and_fit_into_a_section(tmp_path: Path) -> None:
    ann = Desk("ann", tmp_path)
    machines = [Identity(bytes([number]) * 32) for number in range(1, 22)]

    def endorsed(pad: int = 0) -> list[bytes]:
        for machine in machines:
            using = invite(ann, mine=True)
            one = pending(using, machine)
            ann.admission._endorse(msgspec.structs.replace(one, host="h" * pad))
        record = ann.core.records.get(ann.me, ENDORSED, ann.node.unix())
        assert record is not None
        return [entry.node for entry in decode_pending(record.body, 100)]

    assert endorsed() == [machine.node_id for machine in machines[-16:]]
    assert endorsed(pad=2000) == [machine.node_id for machine in machines[-6:]]


def test_machines_that_endorsements_add_to_a_user_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("membership.admission.MAX_MACHINES", 3)
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    machines = [pending(invite(ann, mine=True), Identity(bytes([number]) * 32)) for number in range(1, 6)]
    ann.core.publish(ENDORSED, encode_pending(machines), 600)
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    assert len(root.core.trust.machines(ann.me, root.node.unix())) == 3


@pytest.mark.parametrize(
    "evidence",
    [
        Suspect(NODE, 1, MAX_INCARNATION),
        Alive(NODE, 1, 0, "10.0.0.1", 0, False),
        *(Alive(NODE, 1, 0, host, 7373, False) for host in NO_ADDRESSES),
    ],
    ids=repr,
)
def test_impossible_evidence_is_refused(evidence: Alive | Suspect) -> None:
    with pytest.raises(WireError, match="impossible"):
        decode_evidence(NODE, encode(evidence))


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 70_000), *((host, 7373) for host in NO_ADDRESSES)])
def test_reachability_is_asked_for_addresses_alone(host: str, port: int) -> None:
    with pytest.raises(FrameError, match="impossible"):
        decode_frame(encode_frame(ReachMe(1, host, port)))
    assert decode_frame(encode_frame(ReachMe(1, "2001:db8::1", 7373))) == ReachMe(1, "2001:db8::1", 7373)


def test_accuser_is_believed_again_after_the_window() -> None:
    config = SwimConfig.lan()
    credit = AccuserCredit(config)
    for _ in range(config.accuser_credit):
        credit.refuted(OTHER, 100.0)
    assert not credit.believed(OTHER, 100.0 + config.accuser_window_s)
    assert credit.believed(OTHER, 101.0 + config.accuser_window_s)


def test_quiet_source_saves_no_more_than_a_full_bucket() -> None:
    buckets = TokenBuckets(10.0)
    assert buckets.allow("a", 0.0)
    assert sum(buckets.allow("a", 1e6) for _ in range(1000)) == 10.0 * BURST_S


def test_next_epoch_is_above_the_last_unless_a_clock_was_wrong_by_years() -> None:
    most = 1_000 + EPOCH_AHEAD_MS
    for saved, epoch in ((500, 1_000), (1_000, 1_001), (2_000, 2_001), (most, most + 1), (most + 1, 1_000)):
        assert next_epoch(saved, 1_000) == epoch


def test_invite_admits_as_many_machines_as_it_says_and_none_from_before_its_file(tmp_path: Path) -> None:
    used = UsedInvites(tmp_path / "uses")
    used.read(1_000.0)

    def grant(key: bytes = b"one", made: int = 1_000, ends: int = 2_000) -> Any:
        return SimpleNamespace(key=key, made_unix=made, not_after=ends, uses=2)

    assert not used.take(grant(b"old", made=999), NODE, 1_100.0), "its file may have been lost"
    assert [used.take(grant(), node, 1_100.0) for node in (NODE, NODE, OTHER, b"third")] == [True, True, True, False]
    again = UsedInvites(tmp_path / "uses")
    again.read(5_000.0)
    assert again.count == 2 and not again.take(grant(), b"third", 1_100.0) and again.take(grant(), NODE, 1_100.0)
    for now, kept in ((2_120.0, {b"one", b"two"}), (2_121.0, {b"two", b"three"})):
        key = b"two" if now == 2_120.0 else b"three"
        assert again.take(grant(key, ends=9_000), NODE, now) and set(again._uses) == kept, "two minutes after its end"
    again.void(1, 3_000.0)
    assert again.count == 4 and not again.take(grant(b"new", made=3_000, ends=9_000), NODE, 3_000.0)
    again.void(9, 3_000.0)
    assert again.count == 9 and again.take(grant(b"new", made=3_001, ends=9_000), NODE, 3_001.0)


def test_epoch_on_disk_never_falls(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "peers.json")
    file.write(Snapshot(epoch=7))
    file.write(Snapshot(epoch=3))
    assert SnapshotFile(tmp_path / "peers.json").read().epoch == 7


def test_damaged_revocations_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_bytes(b"\xc1")
    with pytest.raises(TrustError, match="is damaged"):
        RevocationFile(path).read_into(TrustStore(GENESIS))
