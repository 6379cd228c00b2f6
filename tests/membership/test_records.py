import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import seal
from membership.identity import Identity
from membership.reconcile import FrameError, decode_frame
from membership.records import MAX_BODY_BYTES, MAX_RECORD_BYTES, STATEMENTS, Record, RecordTable, encode_body
from membership.trust import TrustStore, found_mesh, make_promotion, make_revocation
from tests.chains import admitted

NOW = 1_800_000_000.0
ROOT, PEER = Identity(b"\x21" * 32), Identity(b"\x22" * 32)
GENESIS, CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)
PEER_CHAIN = admitted(ROOT, GENESIS, CHAIN, PEER.node_id, "peer", "bob", NOW)


def table() -> RecordTable:
    trust = TrustStore(GENESIS)
    trust.admit_chain(CHAIN, NOW)
    trust.admit_chain(PEER_CHAIN, NOW)
    return RecordTable(trust)


def sealed(who: Identity, section: str, epoch: int, version: int, body: bytes = b"x", life_s: int = 600) -> bytes:
    mesh_id = TrustStore(GENESIS).mesh_id
    return seal(who, mesh_id, "record", encode_body(epoch, version, section, int(NOW) + life_s, body))


POOL = [
    sealed(who, section, epoch, version, b"%d" % version)
    for who in (ROOT, PEER)
    for section in ("facts", "jobs/a")
    for epoch in (1, 2)
    for version in (1, 2)
]


@given(st.permutations(POOL), st.lists(st.sampled_from(POOL)))
def test_any_order_gives_one_table_and_equal_roots_mean_equal_tables(order: list[bytes], repeats: list[bytes]) -> None:
    first, second = table(), table()
    for item in POOL:
        first.apply(item, NOW)
    for item in [*order, *repeats]:
        second.apply(item, NOW)
    assert first.root == second.root
    assert sorted(first.digest()) == sorted(second.digest())
    assert all(record.order == (2, 2) for record in second.section("jobs/", NOW))


@given(st.lists(st.sampled_from(POOL), unique=True), st.lists(st.sampled_from(POOL), unique=True))
def test_one_exchange_makes_tables_equal(ours: list[bytes], theirs: list[bytes]) -> None:
    a, b = table(), table()
    for item in ours:
        a.apply(item, NOW)
    for item in theirs:
        b.apply(item, NOW)
    from_a, from_b = a.missing_from(b.digest(), 10**6, NOW), b.missing_from(a.digest(), 10**6, NOW)
    for item in from_a:
        b.apply(item, NOW)
    for item in from_b:
        a.apply(item, NOW)
    assert a.root == b.root
    assert a.missing_from(b.digest(), 10**6, NOW) == []


def test_expired_record_is_never_served_and_never_returns() -> None:
    records = table()
    short = sealed(ROOT, "facts", 1, 1, life_s=10)
    assert isinstance(records.apply(short, NOW), Record)
    empty = table().root
    assert records.get(ROOT.node_id, "facts", NOW + 11) is None, (
        "an expired record is not served before its collection either"
    )
    assert not list(records.section("facts", NOW + 11)) and not records.missing_from([], 10**6, NOW + 11)
    assert len(records.expire(NOW + 11)) == 1
    assert records.get(ROOT.node_id, "facts", NOW) is None and records.root == empty
    assert records.apply(short, NOW + 11) == "expired"


def test_only_members_write_and_only_their_own_sections() -> None:
    records = table()
    stranger = Identity(b"\x23" * 32)
    assert records.apply(sealed(stranger, "facts", 1, 1), NOW) == "unknown author"
    forged = bytearray(sealed(ROOT, "facts", 1, 1))
    forged[1:33] = PEER.node_id
    assert records.apply(bytes(forged), NOW) == "invalid"
    assert list(records.section("facts", NOW)) == []


def test_chain_in_a_trust_record_admits_its_author_only() -> None:
    trust = TrustStore(GENESIS)
    records = RecordTable(trust)
    assert records.apply(sealed(PEER, "trust", 1, 1, CHAIN), NOW) == "invalid", "a certificate of another node"
    assert isinstance(records.apply(sealed(PEER, "trust", 1, 1, PEER_CHAIN), NOW), Record)
    assert trust.credentials(PEER.node_id, NOW) is not None


@given(st.binary(max_size=400))
def test_hostile_bytes_change_nothing(data: bytes) -> None:
    records = table()
    before = records.root
    assert records.apply(data, NOW) == "invalid"
    assert records.root == before
    with contextlib.suppress(FrameError):
        decode_frame(data)


def test_section_that_is_no_list_of_statements_is_refused() -> None:
    records = table()
    for number, body in enumerate((b"nonsense", msgspec.msgpack.encode({}), msgspec.msgpack.encode([1]))):
        assert records.apply(sealed(ROOT, f"{STATEMENTS}{number}", 1, 1, body), NOW) == "invalid"
    assert isinstance(records.apply(sealed(ROOT, f"{STATEMENTS}0", 1, 1, msgspec.msgpack.encode([])), NOW), Record)


def test_trust_records_come_before_records_they_verify() -> None:
    records = table()
    for item in (*POOL, sealed(ROOT, "trust", 1, 1, CHAIN)):
        records.apply(item, NOW)
    first = records.missing_from([], 10**6, NOW)[0]
    assert table().apply(first, NOW).section == "trust"  # type: ignore[union-attr]


def test_padded_record_is_refused_and_keeps_no_other_one_back() -> None:
    """A record of more than a push-pull may hold would end each answer to newcomers."""
    records, mesh_id = table(), TrustStore(GENESIS).mesh_id
    fields = [1, 1, f"{STATEMENTS}0", int(NOW) + 600, msgspec.msgpack.encode([])]
    large = seal(ROOT, mesh_id, "record", msgspec.msgpack.encode([*fields, bytes(MAX_RECORD_BYTES)]))
    assert records.apply(large, NOW) == "invalid"
    later = seal(ROOT, mesh_id, "record", msgspec.msgpack.encode([*fields, "a field of a later version"]))
    assert isinstance(records.apply(later, NOW), Record)
    assert records.apply(sealed(ROOT, "\u00fc" * 65, 1, 1), NOW) == "invalid", "a name of 130 bytes"
    largest = sealed(ROOT, "n" * 128, 2**62, 2**62, bytes(MAX_BODY_BYTES))
    assert isinstance(records.apply(largest, NOW), Record)


def test_body_size_is_limited() -> None:
    assert isinstance(table().apply(sealed(ROOT, "facts", 1, 1, bytes(MAX_BODY_BYTES)), NOW), Record)


def test_statements_over_the_bound_keep_no_other_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may keep different statements of a founder who signed too many: a section of one node counts at the others."""
    monkeypatch.setattr("membership.trust.MAX_STATEMENTS", 6)
    other, victim = Identity(b"\x23" * 32), Identity(b"\x24" * 32)
    genesis, chain = found_mesh(ROOT, "lab", "root", "ada", NOW, [other.node_id], 1)
    trust = TrustStore(genesis)
    trust.admit_chain(chain, NOW)

    def statements(numbers: range) -> list[bytes]:
        return [make_promotion(other, TrustStore(genesis), bytes([number]) * 32, NOW) for number in numbers]

    for promotion in statements(range(3)):
        trust.admit_statement(promotion)
    revocation = make_revocation(ROOT, trust, victim.node_id, "", NOW)
    body = msgspec.msgpack.encode([*statements(range(3, 6)), revocation])
    record = seal(ROOT, trust.mesh_id, "record", encode_body(1, 1, f"{STATEMENTS}0", int(NOW) + 600, body))
    assert isinstance(RecordTable(trust).apply(record, NOW), Record)
    assert victim.node_id in trust.revoked and len(trust.statements) == 4


def test_invalid_statement_keeps_no_other_one_back() -> None:
    trust, victim = TrustStore(GENESIS), Identity(b"\x24" * 32)
    trust.admit_chain(CHAIN, NOW)
    genuine = make_revocation(ROOT, trust, victim.node_id, "", NOW)
    body = msgspec.msgpack.encode([genuine[:-1], b"", genuine])
    record = seal(ROOT, trust.mesh_id, "record", encode_body(1, 1, f"{STATEMENTS}0", int(NOW) + 600, body))
    assert isinstance(RecordTable(trust).apply(record, NOW), Record)
    assert trust.revoked == {victim.node_id} and trust.statements == {genuine: victim.node_id}
