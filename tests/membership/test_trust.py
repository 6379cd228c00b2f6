import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import Seals, seal
from membership.identity import Identity
from membership.trust import (
    ROLES,
    Certificate,
    TrustError,
    TrustStore,
    accept_invite,
    admit_node,
    found_mesh,
    make_invite,
    make_revocation,
    parse_invite,
    renew_chain,
)

NOW = 1_800_000_000.0
ROOT = Identity(b"\x11" * 32)
GENESIS, CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)
INVITE = make_invite(ROOT, CHAIN, GENESIS, ("10.0.0.1:7373",), 3600, NOW)
GUEST = Identity(b"\x12" * 32)


def test_founder_and_invited_node_are_members() -> None:
    store = TrustStore(GENESIS)
    assert store.admit_chain(CHAIN, NOW).can_admit
    invite = parse_invite(INVITE, NOW)
    standing = store.admit_chain(accept_invite(invite, GUEST.node_id, "desk", "bob", NOW), NOW)
    assert (standing.node_id, standing.nick, standing.user, standing.can_admit) == (GUEST.node_id, "desk", "bob", False)
    assert invite.seeds == ("10.0.0.1:7373",)


def test_a_node_of_another_mesh_is_foreign() -> None:
    other_genesis, other_chain = found_mesh(Identity(b"\x13" * 32), "lab", "x", "eve", NOW)
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_chain(other_chain, NOW)
    assert TrustStore(GENESIS).mesh_id != TrustStore(other_genesis).mesh_id, "a name is no identity"


def test_an_ordinary_member_cannot_admit() -> None:
    chain = accept_invite(parse_invite(INVITE, NOW), GUEST.node_id, "desk", "bob", NOW)
    with pytest.raises(TrustError, match="may not admit"):
        make_invite(GUEST, chain, GENESIS, (), 3600, NOW)


def test_invites_and_certificates_end() -> None:
    with pytest.raises(TrustError, match="has ended"):
        parse_invite(INVITE, NOW + 2 * 86_400)
    chain = accept_invite(parse_invite(INVITE, NOW), GUEST.node_id, "desk", "bob", NOW)
    store = TrustStore(GENESIS)
    # The invite's own certificate is in the chain: once it has ended, nobody new is admitted by it.
    with pytest.raises(TrustError, match="has ended"):
        store.check_chain(chain, NOW + 91 * 86_400)


def test_revoked_keys_have_no_standing() -> None:
    store = TrustStore(GENESIS)
    store.admit_chain(CHAIN, NOW)
    store.revoked.add(ROOT.node_id)
    assert store.standing(ROOT.node_id, NOW) is None
    with pytest.raises(TrustError, match="revoked"):
        store.admit_chain(CHAIN, NOW)


@given(st.integers(6, len(INVITE) - 1), st.sampled_from("ABCxyz019-_"))
def test_a_mistyped_invite_is_told(place: int, other: str) -> None:
    if INVITE[place] == other:
        return
    text = INVITE[:place] + other + INVITE[place + 1 :]
    try:
        parse_invite(text, NOW)
    except TrustError as error:
        assert "again" in str(error)
    else:
        # Only the unused low bits of the last base64 character may differ without changing a byte.
        assert place == len(INVITE) - 1


@given(st.one_of(st.text(max_size=100), st.binary(max_size=100).map(lambda b: "mesh1-" + b.hex())))
def test_hostile_invites_are_trust_errors(text: str) -> None:
    with pytest.raises(TrustError):
        parse_invite(text, NOW)


@given(st.binary(max_size=400))
def test_hostile_chains_and_genesis_are_trust_errors(data: bytes) -> None:
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_chain(data, NOW)
    with pytest.raises(TrustError):
        TrustStore(data)


def test_an_invite_survives_line_breaks() -> None:
    broken = INVITE[:40] + "\n  " + INVITE[40:] + "\n"
    assert parse_invite(broken, NOW).genesis == GENESIS


def test_a_root_revokes_a_key_for_good() -> None:
    store = TrustStore(GENESIS)
    chain = accept_invite(parse_invite(INVITE, NOW), GUEST.node_id, "desk", "bob", NOW)
    store.admit_chain(chain, NOW)
    sealed = make_revocation(ROOT, store, GUEST.node_id, "lost laptop", NOW)
    assert store.admit_revocation(sealed, NOW) and not store.admit_revocation(sealed, NOW), "news once"
    assert store.standing(GUEST.node_id, NOW) is None and store.revocations[GUEST.node_id][0].reason == "lost laptop"
    with pytest.raises(TrustError, match="revoked"):
        store.admit_chain(chain, NOW)


def test_nobody_else_revokes_and_no_root_is_revoked() -> None:
    store = TrustStore(GENESIS)
    with pytest.raises(TrustError, match="founded"):
        make_revocation(GUEST, store, ROOT.node_id, "", NOW)
    with pytest.raises(TrustError, match="root"):
        make_revocation(ROOT, store, ROOT.node_id, "", NOW)
    with pytest.raises(TrustError, match="at most"):
        make_revocation(ROOT, store, GUEST.node_id, "x" * 101, NOW)
    genuine = make_revocation(ROOT, store, GUEST.node_id, "", NOW)
    for bad in (
        genuine[:-1],
        genuine[:40] + bytes([genuine[40] ^ 1]) + genuine[41:],
        make_revocation(ROOT, store, GUEST.node_id, "", NOW + 9999),
    ):
        with pytest.raises(TrustError):
            store.admit_revocation(bad, NOW)
    assert store.revoked == set()


@given(st.binary(max_size=300))
def test_hostile_bytes_are_no_revocation(data: bytes) -> None:
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_revocation(data, NOW)


def admitter() -> tuple[Identity, bytes]:
    identity = Identity(b"\x14" * 32)
    signer = Seals(ROOT, TrustStore(GENESIS).mesh_id)
    chain = admit_node(signer, TrustStore(GENESIS), CHAIN, identity.node_id, "adm", "eve", ROLES, True, NOW)
    return identity, chain


def test_an_admitter_lets_others_in_but_makes_no_admitters() -> None:
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    assert store.check_chain(chain, NOW).can_admit
    signer = Seals(identity, store.mesh_id)
    granted = admit_node(signer, store, chain, GUEST.node_id, "desk", "bob", ("user",), False, NOW)
    standing = store.check_chain(granted, NOW)
    assert (standing.node_id, standing.roles, standing.can_admit) == (GUEST.node_id, ("user",), False)
    with pytest.raises(TrustError, match="makes admitters"):
        admit_node(signer, store, chain, GUEST.node_id, "desk", "bob", ROLES, True, NOW)
    by_invite = accept_invite(
        parse_invite(make_invite(identity, chain, GENESIS, (), 60, NOW), NOW), GUEST.node_id, "d", "b", NOW
    )
    assert store.check_chain(by_invite, NOW).node_id == GUEST.node_id, "three links, and no more"


def test_roles_and_users_only_shrink_along_a_chain() -> None:
    text = make_invite(ROOT, CHAIN, GENESIS, (), 3600, NOW, roles=("user",), for_user="bob")
    invite = parse_invite(text, NOW)
    store = TrustStore(GENESIS)
    chain = accept_invite(invite, GUEST.node_id, "desk", "bob", NOW)
    assert store.check_chain(chain, NOW).roles == ("user",) and store.invited_user(invite) == "bob"
    with pytest.raises(TrustError, match="for user 'bob'"):
        accept_invite(invite, GUEST.node_id, "desk", "eve", NOW)
    # Somebody who writes more into it than he was given is refused by everybody else.
    links = msgspec.msgpack.decode(chain, type=list[bytes])
    greedy = Certificate(GUEST.node_id, "desk", "bob", ROLES, False, int(NOW), int(NOW) + 60, b"s")
    forged = seal(Identity(invite.seed), store.mesh_id, "certificate", msgspec.msgpack.encode(greedy))
    with pytest.raises(TrustError, match="role"):
        store.check_chain(msgspec.msgpack.encode([*links[:-1], forged]), NOW)


def test_a_certificate_holds_no_longer_than_the_invite_it_came_by_until_it_is_renewed() -> None:
    store = TrustStore(GENESIS)
    chain = accept_invite(parse_invite(INVITE, NOW), GUEST.node_id, "desk", "bob", NOW)
    assert store.admit_chain(chain, NOW).not_after == int(NOW) + 3600
    renewed = renew_chain(Seals(ROOT, store.mesh_id), store, CHAIN, GUEST.node_id, NOW + 60)
    later = NOW + 80 * 86_400
    assert store.admit_chain(renewed, NOW + 60).not_after > later
    again = store.standing(GUEST.node_id, later)
    assert again is not None and (again.nick, again.user, again.roles) == ("desk", "bob", ROLES)
    assert store.standing(GUEST.node_id, NOW + 91 * 86_400) is None, "it ends, too"


def test_nobody_is_renewed_whose_certificate_has_ended_or_who_was_revoked_and_no_member_renews() -> None:
    store = TrustStore(GENESIS)
    chain = accept_invite(parse_invite(INVITE, NOW), GUEST.node_id, "desk", "bob", NOW)
    store.admit_chain(chain, NOW)
    root = Seals(ROOT, store.mesh_id)
    with pytest.raises(TrustError, match="has ended"):
        renew_chain(root, store, CHAIN, GUEST.node_id, NOW + 2 * 86_400)
    with pytest.raises(TrustError, match="may not admit"):
        renew_chain(Seals(GUEST, store.mesh_id), store, chain, GUEST.node_id, NOW)
    store.admit_revocation(make_revocation(ROOT, store, GUEST.node_id, "", NOW), NOW)
    with pytest.raises(TrustError, match="revoked"):
        renew_chain(root, store, CHAIN, GUEST.node_id, NOW)
    with pytest.raises(TrustError, match="new one"):
        admit_node(root, store, CHAIN, GUEST.node_id, "desk", "bob", ROLES, False, NOW)


def test_an_admitter_is_renewed_as_one_by_the_founder_alone() -> None:
    store = TrustStore(GENESIS)
    identity, chain = admitter()
    store.admit_chain(chain, NOW)
    assert store.check_chain(
        renew_chain(Seals(ROOT, store.mesh_id), store, CHAIN, identity.node_id, NOW), NOW
    ).can_admit
    other = Identity(b"\x15" * 32)
    by_root = admit_node(Seals(ROOT, store.mesh_id), store, CHAIN, other.node_id, "o", "o", ROLES, True, NOW)
    renewed = renew_chain(Seals(other, store.mesh_id), store, by_root, identity.node_id, NOW)
    assert not store.check_chain(renewed, NOW).can_admit
