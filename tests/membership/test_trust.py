from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.envelope import MeshSealer, open_envelope, seal
from membership.identity import Identity
from membership.trust import (
    _GENESIS_ID,
    LAST_UNIX,
    MAX_ROOTS,
    MAX_THROUGH,
    MAX_USES,
    ROLES,
    Certificate,
    NameTaken,
    Revocation,
    TrustError,
    TrustStore,
    User,
    admit_node,
    found_mesh,
    make_invite,
    make_promotion,
    make_revocation,
    parse_invite,
    prove_invite,
    renew_chain,
)
from tests.chains import admitted

NOW = 1_800_000_000.0
DAY_S = 86_400
ROOT = Identity(b"\x11" * 32)
GENESIS, CHAIN = found_mesh(ROOT, "lab", "root", "ada", NOW)
ISSUER = TrustStore(GENESIS).admit_chain(CHAIN, NOW)
INVITE = make_invite(ROOT, TrustStore(GENESIS), ISSUER, ("10.0.0.1:7373",), 3600, NOW, user="bob")
GUEST = Identity(b"\x12" * 32)
GUEST_CHAIN = admitted(ROOT, GENESIS, CHAIN, GUEST.node_id, "desk", "bob", NOW)


def test_founder_and_admitted_node_are_members() -> None:
    store = TrustStore(GENESIS)
    founder = store.admit_chain(CHAIN, NOW)
    assert founder.can_admit and founder.binding == User("ada", ROOT.node_id, int(NOW))
    credentials = store.admit_chain(GUEST_CHAIN, NOW)
    assert (credentials.node_id, credentials.nick, credentials.can_admit) == (GUEST.node_id, "desk", False)
    assert credentials.binding == User("bob", GUEST.node_id, int(NOW) + 1)
    assert parse_invite(INVITE, NOW).seeds == ("10.0.0.1:7373",)


def test_node_of_another_mesh_is_refused() -> None:
    other_genesis, other_chain = found_mesh(Identity(b"\x13" * 32), "lab", "x", "eve", NOW)
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_chain(other_chain, NOW)
    assert TrustStore(GENESIS).mesh_id != TrustStore(other_genesis).mesh_id, "the name does not identify a mesh"


def test_ordinary_member_cannot_admit_or_invite_others() -> None:
    store = TrustStore(GENESIS)
    guest = store.admit_chain(GUEST_CHAIN, NOW)
    with pytest.raises(TrustError, match="may not admit"):
        make_invite(GUEST, store, guest, (), 3600, NOW, user="cyd")
    with pytest.raises(TrustError, match="may not admit"):
        admitted(GUEST, GENESIS, GUEST_CHAIN, Identity.generate().node_id, "n", "cyd", NOW)
    # A chain that an ordinary member signs is refused, too.
    links = msgspec.msgpack.decode(GUEST_CHAIN, type=list[bytes])
    forged = certificate(Identity.generate().node_id, "cyd")
    links.append(seal(GUEST, store.mesh_id, "certificate", msgspec.msgpack.encode(forged)))
    with pytest.raises(TrustError, match="may not admit"):
        store.check_chain(msgspec.msgpack.encode(links), NOW)


def certificate(subject: bytes, user: str, **changed: object) -> Certificate:
    usual = Certificate(subject, "n", user, subject, int(NOW) + 1, ROLES, False, int(NOW), int(NOW) + DAY_S, b"s")
    return msgspec.structs.replace(usual, **changed)


def test_invites_are_bounded_and_bound_as_asked() -> None:
    store = TrustStore(GENESIS)
    for uses in (0, MAX_USES + 1):
        with pytest.raises(TrustError, match=f"1 to {MAX_USES} uses"):
            make_invite(ROOT, store, ISSUER, (), 3600, NOW, user="cyd", uses=uses)
    for asked in ({}, {"user": "cyd", "uses": 2}, {"mine": True, "uses": 2}):
        with pytest.raises(TrustError, match="admits one machine"):
            make_invite(ROOT, store, ISSUER, (), 3600, NOW, ssh_key=b"k" * 32, **asked)
    open_to_all = parse_invite(make_invite(GUEST, store, store.admit_chain(GUEST_CHAIN, NOW), (), 3600, NOW), NOW)
    assert open_to_all.grant == b"" and open_to_all.seed == b"", "it only names the mesh"
    own = parse_invite(make_invite(GUEST, store, store.admit_chain(GUEST_CHAIN, NOW), (), 3600, NOW, mine=True), NOW)
    assert store.open_grant(own.grant)[1].mine


def test_invites_and_certificates_expire() -> None:
    with pytest.raises(TrustError, match="has expired"):
        parse_invite(INVITE, NOW + 2 * DAY_S)
    with pytest.raises(TrustError, match="has expired"):
        TrustStore(GENESIS).check_chain(GUEST_CHAIN, NOW + 91 * DAY_S)


def test_invite_key_signs_no_certificate() -> None:
    """An invite is no certificate: its key cannot make a member, in whatever place of a chain (V4, findings 1 and 2)."""
    store = TrustStore(GENESIS)
    invite = parse_invite(INVITE, NOW)
    key = Identity(invite.seed)
    own = seal(key, store.mesh_id, "certificate", msgspec.msgpack.encode(certificate(GUEST.node_id, "ada")))
    (root,) = msgspec.msgpack.decode(CHAIN, type=list[bytes])
    for links in ([own], [invite.grant, own], [root, own], [root, invite.grant, own]):
        with pytest.raises(TrustError):
            store.admit_chain(msgspec.msgpack.encode(links), NOW)
    assert store.seen() == {}


def test_proof_of_an_invite_is_for_one_node_and_name() -> None:
    store = TrustStore(GENESIS)
    invite = parse_invite(INVITE, NOW)
    issuer, grant = store.open_grant(invite.grant)
    assert (issuer, grant.user, grant.uses, grant.mine) == (ROOT.node_id, "bob", 1, False)
    proof = prove_invite(invite, GUEST.node_id, "bob")
    assert store.proves(grant, proof, GUEST.node_id, "bob")
    assert not store.proves(grant, proof, ROOT.node_id, "bob") and not store.proves(grant, proof, GUEST.node_id, "eve")
    assert not store.proves(grant, proof[:-1], GUEST.node_id, "bob")
    other = msgspec.structs.replace(invite, seed=GUEST.seed)
    assert not store.proves(grant, prove_invite(other, GUEST.node_id, "bob"), GUEST.node_id, "bob")
    with pytest.raises(TrustError):
        store.open_grant(invite.grant[:-1])


@pytest.mark.parametrize("name", ["", "a b", "ad\x1b[0m", "\u0430da", "x" * 65, "ada\n"])
def test_user_names_are_plain(name: str) -> None:
    with pytest.raises(TrustError, match="not a user's name"):
        TrustStore(GENESIS).bind(name, GUEST.node_id, NOW)
    forged = seal(
        ROOT, TrustStore(GENESIS).mesh_id, "certificate", msgspec.msgpack.encode(certificate(GUEST.node_id, name))
    )
    with pytest.raises(TrustError, match="invalid fields"):
        TrustStore(GENESIS).admit_chain(msgspec.msgpack.encode([forged]), NOW)


# --- a name belongs to one key


def test_name_of_a_user_is_bound_to_no_other_key() -> None:
    """The name of the founder, or of a member, cannot be given to another key (finding 1)."""
    store = TrustStore(GENESIS)
    store.admit_chain(CHAIN, NOW)
    store.admit_chain(GUEST_CHAIN, NOW)
    other = Identity.generate().node_id
    for name in ("ada", "bob"):
        with pytest.raises(NameTaken, match="is a user already"):
            store.bind(name, other, NOW)
    with pytest.raises(NameTaken):
        make_invite(ROOT, store, ISSUER, (), 3600, NOW, user="bob")
    assert store.bind("bob", other, NOW, existing=True).key == GUEST.node_id
    assert store.bind("bob", GUEST.node_id, NOW).key == GUEST.node_id, "the same machine again"
    with pytest.raises(TrustError, match="not a user yet"):
        store.bind("cyd", other, NOW, existing=True)
    with pytest.raises(NameTaken):
        store.bind("bob", other, NOW + 91 * DAY_S)


@pytest.mark.parametrize("turn", [1, -1])
def test_older_binding_of_a_name_holds_in_any_order(turn: int) -> None:
    """Two admitters bind one name at the same time: every node keeps the same one."""
    first, second = Identity(b"\x21" * 32), Identity(b"\x22" * 32)
    older = User("cyd", first.node_id, int(NOW) + 10)
    newer = User("cyd", second.node_id, int(NOW) + 11)
    chains = [
        admitted(ROOT, GENESIS, CHAIN, key.node_id, key_name, user, NOW + 20)
        for key, key_name, user in ((first, "one", older), (second, "two", newer))
    ]
    store = TrustStore(GENESIS)
    refused = []
    for chain in chains[::turn]:
        try:
            store.admit_chain(chain, NOW + 20)
        except TrustError as error:
            refused.append(str(error))
    assert store.holder("cyd", NOW + 20) == older
    held = store.credentials(first.node_id, NOW + 20)
    assert held is not None and store.credentials(second.node_id, NOW + 20) is None
    if turn < 0:
        assert "belongs to another user" in store.refusal(store.seen()[second.node_id], NOW + 20)
    else:
        assert "belongs to another user" in refused[0]
    # The name is free again when its holder is no member any more.
    store.admit_statement(make_revocation(ROOT, store, first.node_id, "", NOW + 20))
    assert store.admit_chain(chains[1], NOW + 20).user_key == second.node_id


def test_name_of_a_machine_that_changed_its_user_is_free() -> None:
    store = TrustStore(GENESIS)
    store.admit_chain(GUEST_CHAIN, NOW)
    store.admit_chain(admitted(ROOT, GENESIS, CHAIN, GUEST.node_id, "desk", "cyd", NOW + 9), NOW + 9)
    other = Identity.generate().node_id
    assert store.bind("bob", other, NOW + 9).key == other
    with pytest.raises(NameTaken):
        store.bind("cyd", other, NOW + 9)


def test_equally_old_bindings_are_decided_by_the_key() -> None:
    keys = sorted((Identity(b"\x21" * 32), Identity(b"\x22" * 32)), key=lambda key: key.node_id)
    store = TrustStore(GENESIS)
    for key in reversed(keys):
        user = User("cyd", key.node_id, int(NOW) + 10)
        store.admit_chain(admitted(ROOT, GENESIS, CHAIN, key.node_id, "n", user, NOW + 20), NOW + 20)
    assert store.credentials(keys[0].node_id, NOW + 20) is not None
    assert store.credentials(keys[1].node_id, NOW + 20) is None


def test_admitter_cannot_bind_before_the_founding() -> None:
    """The founder's binding is the oldest, so that no admitter can take the founder's name."""
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    links = msgspec.msgpack.decode(chain, type=list[bytes])
    for bound in (int(NOW), 0):
        forged = certificate(GUEST.node_id, "ada", bound_unix=bound)
        sealed = seal(identity, store.mesh_id, "certificate", msgspec.msgpack.encode(forged))
        with pytest.raises(TrustError, match="before the mesh was founded"):
            store.admit_chain(msgspec.msgpack.encode([*links, sealed]), NOW)


@pytest.mark.parametrize("at_unix", [-1, LAST_UNIX + 1, 2**61])
@pytest.mark.parametrize("field", ["bound_unix", "not_before", "not_after"])
def test_certificate_has_times_that_every_node_can_show(field: str, at_unix: int) -> None:
    """Why a name belongs to another user is said with the day, and whatever asks for credentials says it."""
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    links = msgspec.msgpack.decode(chain, type=list[bytes])
    sealed = seal(
        identity,
        store.mesh_id,
        "certificate",
        msgspec.msgpack.encode(certificate(GUEST.node_id, "cyd", **{field: at_unix})),
    )
    with pytest.raises(TrustError, match="invalid fields"):
        store.admit_chain(msgspec.msgpack.encode([*links, sealed]), NOW)


def test_admitters_two_bindings_of_a_name_in_the_last_year_break_nothing() -> None:
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    links = msgspec.msgpack.decode(chain, type=list[bytes])
    for key, bound_unix in ((GUEST, LAST_UNIX), (Identity(b"\x23" * 32), LAST_UNIX - 1)):
        forged = msgspec.msgpack.encode(certificate(key.node_id, "cyd", bound_unix=bound_unix))
        sealed = seal(identity, store.mesh_id, "certificate", forged)
        store.admit_chain(msgspec.msgpack.encode([*links, sealed]), NOW)
    assert store.credentials(key.node_id, NOW) is not None
    assert "since 9999" in store.refusal(store.seen()[GUEST.node_id], NOW)


def test_renewal_keeps_user_and_roles() -> None:
    """No renewal changes the user's name, key or binding, or the roles, whoever renews (V4)."""
    store = TrustStore(GENESIS)
    store.admit_chain(CHAIN, NOW)
    user = store.bind("cyd", GUEST.node_id, NOW)
    before = store.admit_chain(admitted(ROOT, GENESIS, CHAIN, GUEST.node_id, "desk", user, NOW, roles=("user",)), NOW)
    identity, chain = admitter()
    store.admit_chain(chain, NOW)
    later = NOW + 70 * DAY_S
    for signer, own in ((ROOT, CHAIN), (identity, chain)):
        renewed = renew_chain(MeshSealer(signer, store.mesh_id), store, own, GUEST.node_id, later)
        after = store.check_chain(renewed, later)
        kept = (after.nick, after.user, after.user_key, after.bound_unix, after.roles, after.can_admit)
        assert kept == ("desk", "cyd", GUEST.node_id, before.bound_unix, ("user",), False)


def test_revoked_key_is_no_member() -> None:
    store = TrustStore(GENESIS)
    store.admit_chain(CHAIN, NOW)
    store.revoked.add(ROOT.node_id)
    assert store.credentials(ROOT.node_id, NOW) is None
    with pytest.raises(TrustError, match="revoked"):
        store.admit_chain(CHAIN, NOW)


@given(st.integers(6, len(INVITE) - 1), st.sampled_from("ABCxyz019-_"))
def test_mistyped_invite_is_refused_with_advice(place: int, other: str) -> None:
    if INVITE[place] == other:
        return
    text = INVITE[:place] + other + INVITE[place + 1 :]
    try:
        parse_invite(text, NOW)
    except TrustError as error:
        assert "again" in str(error)
    else:
        # Only the unused low bits of the last base64 character can differ without changing a byte.
        assert place == len(INVITE) - 1


@given(st.one_of(st.text(max_size=100), st.binary(max_size=100).map(lambda b: "mesh1-" + b.hex())))
def test_hostile_invites_raise_trust_error(text: str) -> None:
    with pytest.raises(TrustError):
        parse_invite(text, NOW)


@given(st.binary(max_size=400))
def test_hostile_chains_and_genesis_raise_trust_error(data: bytes) -> None:
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_chain(data, NOW)
    with pytest.raises(TrustError):
        TrustStore(data)


def test_invite_with_line_breaks_is_accepted() -> None:
    broken = INVITE[:40] + "\n  " + INVITE[40:] + "\n"
    assert parse_invite(broken, NOW).genesis == GENESIS


def test_root_revokes_a_key_permanently() -> None:
    store = TrustStore(GENESIS)
    chain = GUEST_CHAIN
    store.admit_chain(chain, NOW)
    sealed = make_revocation(ROOT, store, GUEST.node_id, "lost laptop", NOW)
    assert store.admit_statement(sealed) and not store.admit_statement(sealed), "new only once"
    assert store.credentials(GUEST.node_id, NOW) is None and store.revocations[GUEST.node_id].reason == "lost laptop"
    with pytest.raises(TrustError, match="revoked"):
        store.admit_chain(chain, NOW)


@pytest.mark.parametrize("at_unix", [0.0, NOW - DAY_S, NOW + 20 * 365 * DAY_S])
def test_time_of_a_statement_decides_nothing(at_unix: float) -> None:
    store = TrustStore(GENESIS)
    assert store.admit_statement(make_revocation(ROOT, store, GUEST.node_id, "", at_unix))
    assert store.admit_statement(make_promotion(ROOT, store, bytes(32), at_unix))
    assert store.revoked == {GUEST.node_id} and store.promoted == {bytes(32)}


def test_only_a_root_revokes_and_no_root_is_revoked() -> None:
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
        make_revocation(ROOT, store, GUEST.node_id, "", 1e12),
        make_revocation(ROOT, store, GUEST.node_id, "", -1),
    ):
        with pytest.raises(TrustError):
            store.admit_statement(bad)
    hostile = seal(ROOT, store.mesh_id, "revocation", msgspec.msgpack.encode(Revocation(ROOT.node_id, int(NOW), "")))
    with pytest.raises(TrustError, match="root"):
        store.admit_statement(hostile)
    assert store.revoked == set()


@given(st.binary(max_size=300))
def test_hostile_bytes_are_not_a_revocation(data: bytes) -> None:
    with pytest.raises(TrustError):
        TrustStore(GENESIS).admit_statement(data)


def admitter(key: bytes = b"\x14" * 32) -> tuple[Identity, bytes]:
    identity = Identity(key)
    return identity, admitted(ROOT, GENESIS, CHAIN, identity.node_id, "adm", "eve", NOW, admit=True)


def test_admitter_admits_members_but_not_admitters() -> None:
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    assert store.check_chain(chain, NOW).can_admit
    granted = admitted(identity, GENESIS, chain, GUEST.node_id, "desk", "bob", NOW, roles=("user",))
    credentials = store.check_chain(granted, NOW)
    assert (credentials.node_id, credentials.roles, credentials.can_admit) == (GUEST.node_id, ("user",), False)
    with pytest.raises(TrustError, match="may make admitters"):
        admitted(identity, GENESIS, chain, GUEST.node_id, "desk", "bob", NOW, admit=True)


def test_roles_only_shrink_along_a_chain() -> None:
    identity = Identity(b"\x14" * 32)
    chain = admitted(ROOT, GENESIS, CHAIN, identity.node_id, "adm", "eve", NOW, roles=("user",), admit=True)
    store = TrustStore(GENESIS)
    links = msgspec.msgpack.decode(chain, type=list[bytes])
    for changed in ({"roles": ROLES}, {"roles": ("user",), "can_admit": True}, {"roles": ("king",)}):
        forged = certificate(GUEST.node_id, "bob", **changed)
        sealed = seal(identity, store.mesh_id, "certificate", msgspec.msgpack.encode(forged))
        with pytest.raises(TrustError, match="role"):
            store.check_chain(msgspec.msgpack.encode([*links, sealed]), NOW)


@pytest.mark.parametrize("restarted", [False, True])
def test_members_of_a_revoked_admitter_are_dropped_everywhere(restarted: bool) -> None:
    """A running node and one that starts anew judge the admissions of a revoked admitter alike (finding 16)."""
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    store.admit_chain(chain, NOW)
    granted = admitted(identity, GENESIS, chain, GUEST.node_id, "desk", "bob", NOW)
    sealed = make_revocation(ROOT, store, identity.node_id, "stolen", NOW)
    if not restarted:
        store.admit_chain(granted, NOW)
    store.admit_statement(sealed)
    if restarted:
        with pytest.raises(TrustError, match="was revoked: ask for an approval again"):
            store.admit_chain(granted, NOW)
    assert store.credentials(identity.node_id, NOW) is None and store.credentials(GUEST.node_id, NOW) is None
    # The founder admits the machine again: the same key, user and jobs.
    again = admit_node(
        MeshSealer(ROOT, store.mesh_id), store, CHAIN, GUEST.node_id, "desk",
        store.bind("bob", GUEST.node_id, NOW + 5), ROLES, False, NOW + 5,
    )  # fmt: skip
    assert store.admit_chain(again, NOW + 5).user_key == GUEST.node_id
    assert store.credentials(GUEST.node_id, NOW + 5) is not None


def test_older_approval_replaces_that_of_a_revoked_admitter() -> None:
    identity, store, later = Identity(b"\x14" * 32), TrustStore(GENESIS), NOW + DAY_S
    chain = admitted(ROOT, GENESIS, CHAIN, identity.node_id, "adm", "eve", later, admit=True)
    store.admit_chain(chain, later)
    store.admit_chain(admitted(identity, GENESIS, chain, GUEST.node_id, "desk", "bob", later), later)

    def admitted_by() -> bytes:
        store.admit_chain(GUEST_CHAIN, later)
        known = store.credentials(GUEST.node_id, later)
        assert known is not None
        return known.admitter

    assert admitted_by() == identity.node_id, "it ends later"
    store.admit_statement(make_revocation(ROOT, store, identity.node_id, "stolen", later))
    assert admitted_by() == ROOT.node_id


def test_revoked_key_of_a_strangers_chain_is_none_of_ours() -> None:
    store = TrustStore(GENESIS)
    store.admit_chain(GUEST_CHAIN, NOW)
    store.admit_statement(make_revocation(ROOT, store, GUEST.node_id, "lost", NOW))
    assert store.revoked_in(GUEST_CHAIN) == GUEST.node_id
    own = seal(GUEST, store.mesh_id, "certificate", msgspec.msgpack.encode(certificate(GUEST.node_id, "bob")))
    for links in ([own], []):
        assert store.revoked_in(msgspec.msgpack.encode(links)) is None


def test_user_key_given_by_a_revoked_admitter_is_not_kept_for_another_name() -> None:
    """A hostile admitter gives its machine the key of another user; an approval after the revocation does not keep it."""
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    ada = store.admit_chain(CHAIN, NOW)
    evil = Identity(b"\x33" * 32).node_id
    store.admit_chain(
        admitted(identity, GENESIS, chain, evil, "evil", User("mal", ada.user_key, int(NOW) + 9), NOW), NOW
    )
    store.admit_statement(make_revocation(ROOT, store, identity.node_id, "", NOW))
    assert store.bind("mal", evil, NOW + 20).key == evil


def test_renewal_is_refused_if_expired_or_revoked_or_by_ordinary_members() -> None:
    store = TrustStore(GENESIS)
    store.admit_chain(GUEST_CHAIN, NOW)
    root = MeshSealer(ROOT, store.mesh_id)
    with pytest.raises(TrustError, match="has expired"):
        renew_chain(root, store, CHAIN, GUEST.node_id, NOW + 91 * DAY_S)
    with pytest.raises(TrustError, match="may not admit"):
        renew_chain(MeshSealer(GUEST, store.mesh_id), store, GUEST_CHAIN, GUEST.node_id, NOW)
    store.admit_statement(make_revocation(ROOT, store, GUEST.node_id, "", NOW))
    with pytest.raises(TrustError, match="revoked"):
        renew_chain(root, store, CHAIN, GUEST.node_id, NOW)
    with pytest.raises(TrustError, match="join with a new key"):
        admitted_again = store.bind("bob", GUEST.node_id, NOW)
        admit_node(root, store, CHAIN, GUEST.node_id, "desk", admitted_again, ROLES, False, NOW)


def test_only_the_founder_renews_an_admitter_as_admitter() -> None:
    store = TrustStore(GENESIS)
    identity, chain = admitter()
    store.admit_chain(chain, NOW)
    assert store.check_chain(
        renew_chain(MeshSealer(ROOT, store.mesh_id), store, CHAIN, identity.node_id, NOW), NOW
    ).can_admit
    other = Identity(b"\x15" * 32)
    by_root = admitted(ROOT, GENESIS, CHAIN, other.node_id, "o", "o", NOW, admit=True)
    renewed = renew_chain(MeshSealer(other, store.mesh_id), store, by_root, identity.node_id, NOW)
    assert not store.check_chain(renewed, NOW).can_admit


# --- the keys that a member came in through


def bound(signer: Identity, chain: bytes, node: Identity, through: tuple[bytes, ...] = (), at: float = NOW) -> bytes:
    store = TrustStore(GENESIS)
    whose = User("bob", GUEST.node_id, int(NOW) + 1)
    sealer = MeshSealer(signer, store.mesh_id)
    return admit_node(sealer, store, chain, node.node_id, "desk", whose, ROLES, False, at, through=through)


def renewed(signer: Identity, chain: bytes, member: bytes, at: float) -> bytes:
    store = TrustStore(GENESIS)
    node = store.admit_chain(member, at).node_id
    return renew_chain(MeshSealer(signer, store.mesh_id), store, chain, node, at)


def test_no_renewal_sheds_a_key_that_a_member_came_in_through() -> None:
    identity, chain = admitter()
    other = Identity(b"\x15" * 32)
    others = admitted(ROOT, GENESIS, CHAIN, other.node_id, "o", "o", NOW, admit=True)
    member = bound(identity, chain, GUEST)
    for at, (signer, own) in enumerate([(ROOT, CHAIN), (other, others), (ROOT, CHAIN), (ROOT, CHAIN)], int(NOW)):
        member = renewed(signer, own, member, at)
    assert {*TrustStore(GENESIS).check_chain(member, NOW + 9).through} == {identity.node_id, other.node_id}
    for culprit in (identity, other):
        store = TrustStore(GENESIS)
        store.admit_chain(member, NOW + 9)
        store.admit_statement(make_revocation(ROOT, store, culprit.node_id, "stolen", NOW))
        assert store.credentials(GUEST.node_id, NOW + 9) is None and store.revoked_in(member) == culprit.node_id
        with pytest.raises(TrustError, match="was revoked: ask for an approval again"):
            store.admit_chain(member, NOW + 9)


def test_members_that_founders_admit_and_renew_came_in_through_nobody() -> None:
    store = TrustStore(GENESIS)
    assert store.check_chain(renewed(ROOT, CHAIN, GUEST_CHAIN, NOW), NOW).through == ()
    assert store.check_chain(bound(ROOT, CHAIN, GUEST, (ROOT.node_id,)), NOW).through == ()


def test_admitter_passes_on_the_keys_that_it_came_in_through() -> None:
    """Whatever an admitter leaves out of a certificate, its own chain names."""
    first = Identity(b"\x16" * 32)
    identity = Identity(b"\x14" * 32)
    store = TrustStore(GENESIS)
    whose = User("eve", identity.node_id, int(NOW) + 1)
    chain = admit_node(
        MeshSealer(ROOT, store.mesh_id), store, CHAIN, identity.node_id, "adm", whose, ROLES, True, NOW,
        through=(first.node_id,),
    )  # fmt: skip
    member = bound(identity, chain, GUEST)
    assert store.admit_chain(member, NOW).through == (first.node_id, identity.node_id)
    store.admit_statement(make_revocation(ROOT, store, first.node_id, "stolen", NOW))
    assert store.credentials(GUEST.node_id, NOW) is None and store.revoked_in(member) == first.node_id


def test_member_comes_in_through_a_bounded_number_of_keys() -> None:
    keys = tuple(bytes([number]) * 32 for number in range(MAX_THROUGH))
    identity, chain = admitter()
    store = TrustStore(GENESIS)
    assert store.check_chain(bound(ROOT, CHAIN, GUEST, keys), NOW).through == keys
    assert store.check_chain(bound(identity, chain, GUEST, keys[1:]), NOW).through == (identity.node_id, *keys[1:])
    with pytest.raises(TrustError, match="ask for an approval"):
        bound(identity, chain, GUEST, keys)
    for bad in ((*keys, keys[0]), (b"short",)):
        with pytest.raises(TrustError, match="came in through more"):
            bound(ROOT, CHAIN, GUEST, bad)


def test_further_machine_of_a_user_returns_to_it_only_by_a_persons_word() -> None:
    """A hostile admitter made its machine one of bob's: no open mesh or allow list may do that again by itself."""
    identity, chain = admitter()
    evil = Identity(b"\x33" * 32)
    store = TrustStore(GENESIS)
    store.admit_chain(GUEST_CHAIN, NOW)
    store.admit_chain(bound(identity, chain, evil), NOW)
    assert store.bind("bob", evil.node_id, NOW + 5).key == GUEST.node_id, "nobody was revoked: it has just expired"
    store.admit_statement(make_revocation(ROOT, store, identity.node_id, "stolen", NOW))
    with pytest.raises(NameTaken, match="revoked"):
        store.bind("bob", evil.node_id, NOW + 5)
    assert store.bind("bob", evil.node_id, NOW + 5, existing=True).key == GUEST.node_id


@pytest.mark.parametrize("first", [0, 1])
def test_machines_of_a_user_that_all_came_in_through_a_revoked_key_return_in_any_order(first: int) -> None:
    identity, chain = admitter()
    shelf = Identity(b"\x33" * 32)
    store = TrustStore(GENESIS)
    for node in (GUEST, shelf):
        store.admit_chain(bound(identity, chain, node), NOW)
    store.admit_statement(make_revocation(ROOT, store, identity.node_id, "stolen", NOW))
    for node in ((GUEST, shelf), (shelf, GUEST))[first]:
        if node is shelf:
            with pytest.raises(NameTaken, match="revoked"):
                store.bind("bob", node.node_id, NOW + 5)
        whose = store.bind("bob", node.node_id, NOW + 5, existing=node is shelf)
        assert whose.key == GUEST.node_id
        again = admit_node(
            MeshSealer(ROOT, store.mesh_id), store, CHAIN, node.node_id, "desk", whose, ROLES, False, NOW + 5
        )
        assert store.admit_chain(again, NOW + 5).through == ()
    assert len(store.machines(GUEST.node_id, NOW + 5)) == 2


# --- founders


SECOND, THIRD = Identity(b"\x51" * 32), Identity(b"\x52" * 32)


def three_founders(quorum: int = 2) -> tuple[bytes, bytes, TrustStore]:
    others = (SECOND.node_id, THIRD.node_id)
    genesis, chain = found_mesh(ROOT, "lab", "root", "ada", NOW, others, quorum)
    store = TrustStore(genesis)
    store.admit_chain(chain, NOW)
    return genesis, chain, store


def test_revocation_takes_effect_at_the_quorum_of_founders() -> None:
    genesis, chain, store = three_founders()
    store.admit_chain(admitted(ROOT, genesis, chain, GUEST.node_id, "desk", "bob", NOW), NOW)
    for _ in range(3):
        store.admit_statement(make_revocation(ROOT, store, GUEST.node_id, "lost", NOW))
        assert store.votes("revocation", GUEST.node_id) == 1, "one founder counts once"
    assert store.credentials(GUEST.node_id, NOW) is not None and GUEST.node_id not in store.revoked
    with pytest.raises(TrustError, match="only a node that founded"):
        make_revocation(GUEST, store, GUEST.node_id, "", NOW)
    assert store.admit_statement(make_revocation(SECOND, store, GUEST.node_id, "", NOW))
    assert store.credentials(GUEST.node_id, NOW) is None and store.revocations[GUEST.node_id].reason == "lost"


@pytest.mark.parametrize("turn", [1, -1])
def test_promotion_takes_effect_at_the_quorum_of_founders(turn: int) -> None:
    """A certificate of one founder lets nobody admit others; two founders' statements and the certificate do, in any order."""
    genesis, chain, store = three_founders()
    identity = Identity(b"\x14" * 32)
    granted = admitted(ROOT, genesis, chain, identity.node_id, "adm", "eve", NOW, admit=True)
    assert not store.admit_chain(granted, NOW).can_admit
    with pytest.raises(TrustError, match="may not admit"):
        admitted(identity, genesis, granted, GUEST.node_id, "desk", "bob", NOW)
    forged = seal(identity, store.mesh_id, "certificate", msgspec.msgpack.encode(certificate(GUEST.node_id, "bob")))
    links = msgspec.msgpack.encode([*msgspec.msgpack.decode(granted, type=list[bytes]), forged])
    with pytest.raises(TrustError, match="may not admit"):
        store.check_chain(links, NOW)
    with pytest.raises(TrustError, match="make admitters"):
        make_promotion(identity, store, identity.node_id, NOW)
    statements = [make_promotion(founder, store, identity.node_id, NOW) for founder in (ROOT, THIRD)]
    for sealed in statements[::turn]:
        assert not store.check_chain(granted, NOW).can_admit
        store.admit_statement(sealed)
    assert store.check_chain(granted, NOW).can_admit
    member = admit_node(
        MeshSealer(identity, store.mesh_id), store, granted, GUEST.node_id, "desk",
        store.bind("bob", GUEST.node_id, NOW), ROLES, False, NOW,
    )  # fmt: skip
    assert store.admit_chain(member, NOW).user == "bob"


def test_promoted_admitter_is_known_as_one_without_a_new_certificate() -> None:
    genesis, chain, store = three_founders()
    identity = Identity(b"\x14" * 32)
    store.admit_chain(admitted(ROOT, genesis, chain, identity.node_id, "adm", "eve", NOW, admit=True), NOW)
    for founder in (ROOT, SECOND):
        store.admit_statement(make_promotion(founder, store, identity.node_id, NOW))
    known = store.credentials(identity.node_id, NOW)
    assert known is not None and known.can_admit


def test_each_founder_admits_members() -> None:
    genesis, chain, store = three_founders()
    own = admitted(ROOT, genesis, chain, SECOND.node_id, "second", "cyd", NOW)
    assert store.admit_chain(own, NOW).can_admit
    member = admitted(SECOND, genesis, own, GUEST.node_id, "desk", "bob", NOW)
    assert store.admit_chain(member, NOW).admitter == SECOND.node_id


@pytest.mark.parametrize(
    ("others", "quorum"),
    [
        ((ROOT.node_id,), 1),
        ((SECOND.node_id,), 3),
        ((), 0),
        ((b"short",), 1),
        ((b"r" * 32,) * 20, 1),
        (tuple(bytes([n]) * 32 for n in range(100, 100 + MAX_ROOTS)), 1),
    ],
)
def test_impossible_founders_are_refused(others: tuple[bytes, ...], quorum: int) -> None:
    with pytest.raises(TrustError, match="founders"):
        found_mesh(ROOT, "lab", "root", "ada", NOW, others, quorum)


def test_mesh_that_none_of_its_founders_has_signed_is_refused() -> None:
    _, payload = open_envelope(GENESIS, _GENESIS_ID, "genesis")
    assert TrustStore(seal(ROOT, _GENESIS_ID, "genesis", payload)).founder == ROOT.node_id
    with pytest.raises(TrustError, match="not signed by one of its roots"):
        TrustStore(seal(SECOND, _GENESIS_ID, "genesis", payload))


# --- any number of revocations


def test_statements_of_one_founder_take_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hostile founder of three ends no revocation by the other two."""
    monkeypatch.setattr("membership.trust.MAX_STATEMENTS", 30)
    store = three_founders()[2]
    hostile, *honest = SECOND, ROOT, THIRD
    kept = 0
    for number in range(30):
        with suppress(TrustError):
            kept += store.admit_statement(make_promotion(hostile, store, bytes([number]) * 32, NOW))
    assert kept == 10
    for founder in honest:
        store.admit_statement(make_revocation(founder, store, GUEST.node_id, "", NOW))
    assert GUEST.node_id in store.revoked


def test_revocations_have_a_bound_at_which_the_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """No revocation is dropped silently (V8): before the bound each takes effect, at the bound nobody signs one."""
    monkeypatch.setattr("membership.trust.MAX_STATEMENTS", 60)
    store = TrustStore(GENESIS)
    for number in range(60):
        subject = bytes([number]) * 32
        assert store.admit_statement(make_revocation(ROOT, store, subject, "x" * 100, NOW))
    assert len(store.revoked) == 60
    with pytest.raises(TrustError, match="the most that nodes keep"):
        make_revocation(ROOT, store, GUEST.node_id, "", NOW)
    late = make_revocation(ROOT, TrustStore(GENESIS), GUEST.node_id, "", NOW)
    with pytest.raises(TrustError, match="the most that nodes keep"):
        store.admit_statement(late)
    assert GUEST.node_id not in store.revoked
