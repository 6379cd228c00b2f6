"""Join requests: answers, pending requests, allow lists, and hostile bytes."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.admission import (
    MAX_INVITED,
    MAX_INVITED_PER_ISSUER,
    MAX_PENDING,
    MAX_PENDING_PER_ADDRESS,
    PENDING_EXPIRY_S,
    Decision,
    JoinRequests,
    PendingJoin,
    WaitingList,
    address_group,
    decode_decisions,
    decode_pending,
    encode_pending,
    make_join_request,
    open_join_request,
    read_allow_list,
    read_answer,
)
from membership.envelope import EnvelopeError
from membership.identity import Identity, format_id
from membership.reconcile import FrameError
from membership.records import MAX_BODY_BYTES
from membership.snapshot import UsedInvites
from membership.ssh_keys import fingerprint, read_armor, read_public_key
from membership.trust import (
    ROLES,
    SSH_NAMESPACE,
    Grant,
    Invite,
    TrustError,
    TrustStore,
    found_mesh,
    make_invite,
    make_revocation,
    parse_invite,
    prove_invite,
    ssh_message,
)
from tests.chains import admitted
from tests.ssh import make_key, sign

NOW = 1_800_000_000.0
ROOT, STRANGER = Identity(b"\x31" * 32), Identity(b"\x32" * 32)
GENESIS, CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)


def admit_none(entry: PendingJoin) -> Decision:
    return Decision()


def join_requests() -> tuple[JoinRequests, TrustStore]:
    store = TrustStore(GENESIS)
    store.admit_chain(CHAIN, NOW)
    return JoinRequests(ROOT, store), store


def invite(user: str = "bob", uses: int = 1, ttl_s: float = 3600, ssh_key: bytes = b"") -> Invite:
    store = TrustStore(GENESIS)
    issuer = store.admit_chain(CHAIN, NOW)
    return parse_invite(make_invite(ROOT, store, issuer, (), ttl_s, NOW, user=user, uses=uses, ssh_key=ssh_key), NOW)


def invited_request(using: Invite, identity: Identity = STRANGER, nonce: int = 1) -> bytes:
    return make_join_request(
        identity, nonce, "desk", "login", using.grant, prove_invite(using, identity.node_id, "login")
    )


def test_request_is_pending_until_admitted_and_the_answer_is_verifiable() -> None:
    requests, store = join_requests()
    request = make_join_request(STRANGER, 7, "desk", "bob")
    node, mesh, answer = read_answer(requests.answer(request, "10.0.0.9", CHAIN, NOW, admit_none), 7, NOW)
    assert (node, mesh.mesh_id, answer.state) == (ROOT.node_id, store.mesh_id, "waiting")
    (entry,) = decode_pending(encode_pending(requests.pending()), MAX_PENDING)
    assert (entry.node, entry.nick, entry.user, entry.host) == (STRANGER.node_id, "desk", "bob", "10.0.0.9")

    granted = admitted(ROOT, GENESIS, CHAIN, STRANGER.node_id, "desk", "bob", NOW)
    sealed = requests.answer(
        make_join_request(STRANGER, 8, "desk", "bob"), "10.0.0.9", CHAIN, NOW, lambda entry: Decision(granted)
    )
    _, mesh, answer = read_answer(sealed, 8, NOW)
    assert answer.state == "admitted" and mesh.check_chain(answer.granted, NOW).node_id == STRANGER.node_id
    assert requests.pending() == []


def test_answer_to_another_request_or_by_another_node_is_refused() -> None:
    requests, _ = join_requests()
    sealed = requests.answer(make_join_request(STRANGER, 7, "desk", "bob"), "h", CHAIN, NOW, admit_none)
    with pytest.raises(TrustError, match="not from the node"):
        read_answer(sealed, 8, NOW)
    other_genesis, _ = found_mesh(STRANGER, "x", "x", "x", NOW)
    forged = JoinRequests(STRANGER, TrustStore(other_genesis)).answer(
        make_join_request(STRANGER, 7, "d", "b"), "h", CHAIN, NOW, admit_none
    )
    with pytest.raises(TrustError):
        read_answer(forged, 7, NOW)


def test_revoked_node_gets_its_state_and_is_never_considered() -> None:
    requests, store = join_requests()
    store.admit_statement(make_revocation(ROOT, store, STRANGER.node_id, "", NOW))
    sealed = requests.answer(
        make_join_request(STRANGER, 1, "d", "b"), "h", CHAIN, NOW, lambda entry: pytest.fail("asked")
    )
    assert read_answer(sealed, 1, NOW)[2].state == "revoked" and requests.pending() == []


# --- the waiting list


def ask(requests: JoinRequests, host: str, identity: Identity | None = None, at: float = NOW) -> str:
    request = make_join_request(identity or Identity.generate(), 1, "d", "b")
    return read_answer(requests.answer(request, host, CHAIN, at, admit_none), 1, at)[2].state


def test_flood_from_one_address_keeps_nobody_out() -> None:
    """A neighbour's requests fill only the places of their own address (finding 17)."""
    requests, _ = join_requests()
    assert ask(requests, "10.0.0.7") == "waiting"
    answers = [ask(requests, "10.0.0.66") for _ in range(MAX_PENDING)]
    assert answers.count("waiting") == MAX_PENDING_PER_ADDRESS and answers.count("full") > 0
    assert ask(requests, "10.0.0.8", STRANGER) == "waiting"
    hosts = [entry.host for entry in requests.pending()]
    assert hosts[0] == "10.0.0.7" and hosts[-1] == "10.0.0.8"


def test_flood_from_many_addresses_evicts_no_lone_request() -> None:
    """A newcomer takes the newest place of the largest group; a request alone in its group stays."""
    requests, _ = join_requests()
    assert ask(requests, "10.0.0.7", STRANGER) == "waiting"
    for number in range(MAX_PENDING):
        for _ in range(MAX_PENDING_PER_ADDRESS):
            ask(requests, f"10.0.1.{number}")
    entries = requests.pending()
    assert len(entries) == MAX_PENDING and entries[0].node == STRANGER.node_id
    # A lone latecomer finds a place as long as some address has two or more.
    waiting = WaitingList(3, 2)
    place = lambda node, group: waiting.keep(PendingJoin(node, "n", "u", group, 0, b""), group, NOW)  # noqa: E731
    assert place(b"1", "a") and place(b"2", "b") and place(b"3", "b")
    assert place(b"4", "c") and [entry.node for entry in waiting.entries()] == [b"1", b"2", b"4"]
    assert not place(b"5", "d"), "all groups are as small as the newcomer's"
    assert place(b"1", "a"), "a known request is refreshed"


def test_address_group_ignores_what_a_machine_can_vary() -> None:
    assert address_group("10.0.0.1") != address_group("10.0.0.2")
    assert address_group("2001:db8:0:1::5") == address_group("2001:db8:0:1:ffff::9%eth0")
    assert address_group("2001:db8:0:1::5") != address_group("2001:db8:0:2::5")
    assert address_group("unknown") == "unknown"


def test_pending_requests_expire() -> None:
    requests, _ = join_requests()
    assert ask(requests, "h") == "waiting"
    later = NOW + PENDING_EXPIRY_S + 1
    assert ask(requests, "h", STRANGER, later) == "waiting"
    assert [entry.node for entry in requests.pending()] == [STRANGER.node_id]


def test_full_lists_with_the_longest_names_fit_into_a_section() -> None:
    requests, _ = join_requests()
    name = "x" * 64
    using = invite(name[:40], uses=1000)
    for number in range(4 * MAX_PENDING):
        key = Identity.generate()
        asked = make_join_request(key, 1, "\u00e9" * 32, name)
        requests.answer(asked, f"2001:db8:{number:x}:ffff:ffff:ffff:ffff:ffff", CHAIN, NOW, admit_none)
        proof = prove_invite(using, key.node_id, name)
        requests.answer(make_join_request(key, 1, "\u00e9" * 32, name, using.grant, proof), "h", CHAIN, NOW, admit_none)
    assert len(requests.pending()) == MAX_PENDING and len(requests.invited()) == MAX_INVITED_PER_ISSUER
    for entries in (requests.pending(), requests.invited()):
        assert len(encode_pending(entries)) < MAX_BODY_BYTES


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcd"), st.integers(0, 2000)), max_size=60))
def test_lists_with_proofs_of_any_size_fit_into_a_section(asked: list[tuple[int, str, int]]) -> None:
    waiting = WaitingList(MAX_INVITED, MAX_INVITED_PER_ISSUER)
    for number, group, size in asked:
        waiting.keep(PendingJoin(bytes([number]) * 32, "n", "u", "h", 0, b"p" * size), group, NOW)
        assert len(encode_pending(waiting.entries())) <= MAX_BODY_BYTES


def test_request_with_a_proof_of_a_large_rsa_key_has_a_place() -> None:
    waiting = WaitingList(MAX_INVITED, MAX_INVITED_PER_ISSUER)
    request = make_join_request(STRANGER, 1, "n" * 64, "u" * 64, b"g" * 270, b"p" * 200, b"s" * 1200)
    large, _ = open_join_request(request[1:], "h" * 45, 0)
    assert waiting.keep(large, "a", NOW)


# --- invites


def test_request_with_an_invite_is_checked_before_it_waits() -> None:
    requests, store = join_requests()
    good = invite()
    state = lambda data, at=NOW: read_answer(requests.answer(data, "h", CHAIN, at, admit_none), 1, at)[2]  # noqa: E731
    assert state(invited_request(good)).state == "waiting" and requests.pending() == []
    assert [entry.node for entry in requests.invited()] == [STRANGER.node_id]
    stolen = make_join_request(ROOT, 1, "d", "login", good.grant, prove_invite(good, STRANGER.node_id, "login"))
    assert "not signed with the invite" in state(stolen).problem
    assert "has expired" in state(invited_request(good), NOW + 3601).problem
    foreign = msgspec.structs.replace(good, grant=good.grant[:-1])
    assert state(invited_request(foreign)).state == "refused"
    store.admit_statement(make_revocation(ROOT, store, STRANGER.node_id, "", NOW))
    assert state(invited_request(good)).state == "revoked"


def ssh_request(using: Invite, key: Path, node: Identity = STRANGER, signed_for: Identity | None = None) -> bytes:
    store = TrustStore(GENESIS)
    message = ssh_message(store.mesh_id, store.open_grant(using.grant)[1], (signed_for or node).node_id)
    proof = read_armor(sign(key, message, SSH_NAMESPACE.decode()))
    invited = prove_invite(using, node.node_id, "login")
    return make_join_request(node, 1, "desk", "login", using.grant, invited, proof)


@pytest.mark.ssh
def test_invite_bound_to_an_ssh_key_needs_its_signature_for_this_machine_and_invite(tmp_path: Path) -> None:
    requests, _ = join_requests()
    own, other = make_key(tmp_path / "own"), make_key(tmp_path / "other")
    digest = fingerprint(read_public_key(own.with_suffix(".pub").read_text()))
    bound, second = invite(ssh_key=digest), invite(ssh_key=digest)
    state = lambda data: read_answer(requests.answer(data, "h", CHAIN, NOW, admit_none), 1, NOW)[2]  # noqa: E731
    for stolen in (
        invited_request(bound),
        ssh_request(bound, other),
        ssh_request(bound, own, signed_for=ROOT),
        make_join_request(
            STRANGER, 1, "desk", "login", bound.grant, prove_invite(bound, STRANGER.node_id, "login"), b"SSHSIG"
        ),
    ):
        assert "not signed with the SSH key" in state(stolen).problem
    elsewhere = msgspec.structs.replace(second, seed=bound.seed)
    assert state(ssh_request(elsewhere, own)).state == "refused"
    assert requests.invited() == [] and state(ssh_request(bound, own)).state == "waiting"
    assert state(ssh_request(invite(), own)).state == "refused", "a proof that no invite asks for takes only room"


def test_invite_bound_to_an_ssh_key_admits_one_machine() -> None:
    for words in ({"uses": 2}, {"user": ""}):
        with pytest.raises(TrustError, match="bound to an SSH key admits one machine"):
            invite(ssh_key=b"f" * 32, **words)  # type: ignore[arg-type]


def test_strangers_take_no_place_of_the_invited() -> None:
    requests, _ = join_requests()
    for number in range(MAX_PENDING):
        ask(requests, f"10.0.1.{number}")
    assert ask(requests, "10.0.0.7") == "full"
    answer = requests.answer(invited_request(invite()), "10.0.0.7", CHAIN, NOW, admit_none)
    assert read_answer(answer, 1, NOW)[2].state == "waiting"


def test_uses_of_an_invite_are_durable_and_bounded(tmp_path: Path) -> None:
    """A used invite stays used over a restart, and is void if the file of its uses is lost (finding 2)."""
    path = tmp_path / "invites"
    grant = Grant(b"k" * 32, "bob", False, ROLES, 2, int(NOW), int(NOW) + 3600, b"")
    used = UsedInvites(path)
    used.read(NOW)
    assert used.take(grant, b"1" * 32, NOW) and used.take(grant, b"1" * 32, NOW), "one machine uses it once"
    again = UsedInvites(path)
    again.read(NOW + 60)
    assert again.take(grant, b"2" * 32, NOW) and not again.take(grant, b"3" * 32, NOW)
    assert again.take(grant, b"1" * 32, NOW), "an interrupted join goes on"
    for damage in (path.unlink, lambda: path.write_bytes(b"?")):
        damage()
        lost = UsedInvites(path)
        lost.read(NOW + 60)
        assert not lost.take(grant, b"3" * 32, NOW + 60)


@given(st.binary(max_size=300))
def test_hostile_requests_and_answers_are_refused(data: bytes) -> None:
    requests, _ = join_requests()
    with pytest.raises((EnvelopeError, FrameError)):
        requests.answer(b"J" + data, "h", CHAIN, NOW, admit_none)
    with pytest.raises(TrustError):
        read_answer(data, 1, NOW)
    assert decode_pending(data, MAX_PENDING) is not None and decode_decisions(data) is not None
    assert requests.pending() == []


@pytest.mark.parametrize("name", ["", "x" * 65, "\u00e9" * 33], ids=["empty", "long", "long in bytes"])
@pytest.mark.parametrize("field", ["nick", "user"])
def test_request_with_a_name_out_of_bounds_is_refused(field: str, name: str) -> None:
    requests, _ = join_requests()
    names = {"nick": "desk", "user": "bob", field: name}
    with pytest.raises(FrameError, match="1 to 64 bytes"):
        requests.answer(make_join_request(STRANGER, 1, **names), "h", CHAIN, NOW, admit_none)
    assert requests.pending() == []


def test_large_request_is_refused_before_it_is_read() -> None:
    requests, _ = join_requests()
    with pytest.raises(FrameError, match="at most 4096 bytes"):
        requests.answer(make_join_request(STRANGER, 1, "n", "u", b"x" * 4096), "h", CHAIN, NOW, admit_none)


def test_request_with_the_longest_names_waits() -> None:
    requests, _ = join_requests()
    requests.answer(make_join_request(STRANGER, 1, "n" * 64, "\u00e9" * 32), "h", CHAIN, NOW, admit_none)
    assert [entry.node for entry in requests.pending()] == [STRANGER.node_id]


def test_decisions_round_trip() -> None:
    told = {b"a": Decision(b"b"), b"c": Decision(problem="no")}
    assert decode_decisions(msgspec.msgpack.encode(told)) == told
    assert decode_decisions(b"") == {} and decode_pending(b"", 9) == []


def test_allow_list_errors_name_the_line_and_mistake(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    assert read_allow_list(path) == {}
    key = format_id(STRANGER.node_id)
    path.write_text(f"\n# people\n{key} nick=desk user=bob roles=user  # their laptop\n")
    (entry,) = read_allow_list(path).values()
    assert (entry.node, entry.nick, entry.user, entry.roles) == (STRANGER.node_id, "desk", "bob", ("user",))
    for line, words in (
        ("abc", "characters"),
        (f"{key} admin", "nick=NAME"),
        (f"{key} roles=root", "provider and user"),
        (key[:-1] + ("a" if key[-1] != "a" else "b"), "check character"),
    ):
        path.write_text(f"\n{line}\n")
        with pytest.raises(TrustError, match="line 2") as refused:
            read_allow_list(path)
        assert words in str(refused.value)


@given(st.binary(max_size=100))
def test_hostile_allow_list_is_an_error_or_a_list(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "allow"
        path.write_bytes(data)
        try:
            assert isinstance(read_allow_list(path), dict)
        except TrustError as error:
            assert str(path) in str(error)
