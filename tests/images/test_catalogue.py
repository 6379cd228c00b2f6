"""The catalogue of images: signed entries, relayed by any node, kept across restarts, void when the signer is not a member."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import mesh.images.catalogue as catalogue_module
from membership.envelope import MeshSealer, seal
from membership.identity import Identity
from membership.records import Record
from membership.trust import (
    ROLES,
    Certificate,
    TrustError,
    TrustStore,
    User,
    found_mesh,
    make_revocation,
    renew_chain,
)
from mesh.images.allowlist import MAX_PERSONAL, Entry, Image, SignedList, encode_list
from mesh.images.catalogue import KIND, MINE, Catalogue, Shown
from mesh.images.rules import OwnRules
from mesh.util.errors import MeshError
from tests.chains import admitted

NOW = time.time()
A, B = Image(b"a" * 32, b"m" * 32, 7), Image(b"b" * 32)


class Campus:
    """A founder, an admitter and a member; each with certificates."""

    def __init__(self) -> None:
        self.founder, self.admitter, self.guest, self.stranger = (Identity.generate() for _ in range(4))
        self.genesis, self.founder_chain = found_mesh(self.founder, "campus", "root", "ada", NOW)
        self.admitter_chain = self.chain(self.admitter, "adm", "bob", admit=True)
        self.guest_chain = self.chain(self.guest, "guest", "eve")

    def chain(self, identity: Identity, nick: str, user: str | User, admit: bool = False) -> bytes:
        return admitted(self.founder, self.genesis, self.founder_chain, identity.node_id, nick, user, NOW, admit=admit)

    def trust(self, *chains: bytes) -> TrustStore:
        trust = TrustStore(self.genesis)
        for chain in chains:
            trust.admit_chain(chain, NOW)
        return trust

    def said(
        self, identity: Identity, chain: bytes, number: int, *words: Entry, personal: bool = False, checked: bool = True
    ) -> bytes:
        trust, signed = TrustStore(self.genesis), SignedList(number, words, personal)
        payload = encode_list(signed) if checked else msgspec.msgpack.encode(signed)
        sealed = seal(identity, trust.mesh_id, KIND, payload)
        return msgspec.msgpack.encode(Shown(sealed, chain))


@pytest.fixture
def campus() -> Campus:
    return Campus()


def catalogue(
    campus: Campus, root: Path, identity: Identity, *chains: bytes, now: float = NOW, users: Sequence[str] = (MINE,)
) -> Catalogue:
    found = Catalogue(root, identity, campus.trust(*chains), lambda: now, users)
    found.load()
    return found


def record(body: bytes, node: bytes = b"r" * 32) -> Record:
    return Record(node, 1, 1, "images", 2**40, body, 0, len(body))


WORD = Entry("pytorch", 1, True, A)


def test_founder_entry_reaches_all_nodes(campus: Campus, tmp_path: Path) -> None:
    founder = catalogue(campus, tmp_path / "f", campus.founder, campus.founder_chain)
    guest = catalogue(campus, tmp_path / "g", campus.guest, campus.guest_chain)
    assert founder.may_sign() and not guest.may_sign()
    assert guest.rules.listed is None and guest.rules.judge("anything", None).rule == ""
    body = founder.say("pytorch", A, True, campus.founder_chain)
    assert guest.hear(record(body)) and not guest.hear(record(body))
    assert guest.rules.judge("pytorch", None).image == A
    assert guest.rules.judge("anything", None).rule == "not listed"
    assert [credentials.nick for credentials in guest.signers()] == ["root"]
    assert guest.hear(record(founder.say("pytorch", None, False, campus.founder_chain)))
    assert guest.rules.judge("pytorch", None).rule == "not listed", "an empty list is one"


def test_newest_signer_wins(campus: Campus, tmp_path: Path) -> None:
    chains = (campus.founder_chain, campus.admitter_chain)
    founder = catalogue(campus, tmp_path / "f", campus.founder, *chains)
    admitter = catalogue(campus, tmp_path / "a", campus.admitter, *chains)
    one = founder.say("pytorch", A, True, campus.founder_chain)
    admitter.hear(record(one))
    two = admitter.say("pytorch", B, True, campus.admitter_chain)
    for order in ((one, two), (two, one)):
        heard = catalogue(campus, tmp_path / order[0].hex()[-8:], campus.guest, campus.guest_chain)
        for body in order:
            heard.hear(record(body))
        assert heard.rules.judge("pytorch", None).image == B
        assert heard.rules.listed is not None and heard.rules.listed["pytorch"].signer == campus.admitter.node_id


def test_other_signers_are_refused(campus: Campus, tmp_path: Path) -> None:
    heard = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    other = Campus()
    bodies = [
        b"",
        b"\x93nonsense",
        msgspec.msgpack.encode(Shown(b"", b"")),
        campus.said(campus.guest, campus.guest_chain, 1, WORD),
        campus.said(campus.guest, campus.founder_chain, 1, WORD),
        campus.said(campus.stranger, campus.founder_chain, 1, WORD),
        campus.said(campus.stranger, b"", 1, WORD),
        campus.said(campus.admitter, campus.admitter_chain[:-5], 1, WORD),
        other.said(other.founder, other.founder_chain, 1, WORD),
    ]
    good = campus.said(campus.founder, campus.founder_chain, 1, WORD)
    bodies += [good[:-1], good[: len(good) // 2], bytes([good[0]]) + good[2:]]
    for at in range(40, len(good) - len(campus.founder_chain) - 8, 23):
        bodies.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    for body in bodies:
        assert not heard.hear(record(body))
    assert heard.rules.listed is None and list((tmp_path / "list").iterdir()) == []
    assert heard.hear(record(good))


def test_admitter_grants_no_signing(campus: Campus, tmp_path: Path) -> None:
    """A certificate that an admitter signs cannot say `can_admit`, and only a root renews one that does."""
    trust = campus.trust(campus.founder_chain, campus.admitter_chain)
    (link,) = msgspec.msgpack.decode(campus.admitter_chain, type=list[bytes])
    forged = Certificate(
        campus.guest.node_id,
        "g",
        "eve",
        campus.guest.node_id,
        int(NOW) + 1,
        ROLES,
        True,
        int(NOW),
        int(NOW) + 600,
        b"s",
    )
    links = [link, seal(campus.admitter, trust.mesh_id, "certificate", msgspec.msgpack.encode(forged))]
    chain = msgspec.msgpack.encode(links)
    with pytest.raises(TrustError, match="role"):
        trust.admit_chain(chain, NOW)
    heard = catalogue(campus, tmp_path, campus.stranger)
    assert not heard.hear(record(campus.said(campus.guest, chain, 1, WORD)))
    root = MeshSealer(campus.founder, trust.mesh_id)
    again = renew_chain(root, trust, campus.founder_chain, campus.admitter.node_id, NOW)
    assert trust.check_chain(again, NOW).can_admit


def test_older_list_is_ignored(campus: Campus, tmp_path: Path) -> None:
    heard = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    old = campus.said(campus.founder, campus.founder_chain, 1, WORD)
    assert heard.hear(record(campus.said(campus.founder, campus.founder_chain, 2)))
    assert not heard.hear(record(old)) and heard.rules.judge("pytorch", None).rule == "not listed"


async def test_list_survives_restart_and_signer(campus: Campus, tmp_path: Path) -> None:
    heard = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    heard.hear(record(campus.said(campus.admitter, campus.admitter_chain, 1, WORD)))
    await heard.write()
    again = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    assert again.rules.judge("pytorch", None).image == A
    assert set(again.orphans(set())) == {campus.admitter.node_id} and again.orphans({campus.admitter.node_id}) == {}
    third = catalogue(campus, tmp_path / "t", campus.stranger)
    assert third.hear(record(again.orphans(set())[campus.admitter.node_id])), "shown by another, with its certificates"
    much_later = catalogue(campus, tmp_path, campus.guest, now=NOW + 400 * 86_400)
    assert much_later.rules.judge("pytorch", None).rule == "not listed", (
        "a mesh with a list does not come to be one without"
    )
    assert much_later.orphans(set()) == {}


def test_revoked_signer_does_not_count(campus: Campus, tmp_path: Path) -> None:
    trust = campus.trust(campus.guest_chain)
    heard = Catalogue(tmp_path, campus.guest, trust, lambda: NOW)
    heard.load()
    body = campus.said(campus.admitter, campus.admitter_chain, 1, WORD)
    assert heard.hear(record(body)) and heard.rules.judge("pytorch", None).rule == ""
    trust.admit_statement(make_revocation(campus.founder, trust, campus.admitter.node_id, "left", NOW))
    assert heard.rules.judge("pytorch", None).rule == "not listed"
    fresh = Catalogue(tmp_path / "x", campus.guest, trust, lambda: NOW)
    fresh.load()
    assert not fresh.hear(record(body))


async def test_lost_list_of_this_node_that_cannot_be_written_is_not_taken(campus: Campus, tmp_path: Path) -> None:
    """It must be on disk before it counts: a number below one that was published would be refused by all others."""
    founder = catalogue(campus, tmp_path, campus.founder, campus.founder_chain)
    body = record(campus.said(campus.founder, campus.founder_chain, 1, WORD))
    (tmp_path / "list").rmdir()
    (tmp_path / "list").touch()  # fails for root, too
    assert not founder.hear(body)
    (tmp_path / "list").unlink()
    assert founder.hear(body) and not founder.unwritten


async def test_damaged_files_allow_nothing(campus: Campus, tmp_path: Path) -> None:
    heard = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    body = campus.said(campus.founder, campus.founder_chain, 1, WORD)
    heard.hear(record(body))
    await heard.write()
    (path,) = (tmp_path / "list").iterdir()
    path.write_bytes(body[:-30])
    again = catalogue(campus, tmp_path, campus.guest, campus.guest_chain)
    assert again.rules.judge("whatever", None).rule == "not listed"
    assert again.hear(record(body)) and again.rules.judge("pytorch", None).rule == ""
    again.own = OwnRules({"mine": B}, {"jax": (A.config,)})
    assert catalogue(campus, tmp_path, campus.guest, campus.guest_chain).own == again.own
    for damage in (b"", b"{", b'{"denied": 3}', b'{"allow": {}}', b'{"denied": {"a b": []}}', b"\xff"):
        (tmp_path / "own.json").write_bytes(damage)
        with pytest.raises(MeshError, match=r"own\.json.*correct it, or remove it"):
            catalogue(campus, tmp_path, campus.guest, campus.guest_chain)


OWN = Entry("@eve/train", 1, True, A)


def test_own_images_run_on_own_nodes_and_where_the_owner_says(campus: Campus, tmp_path: Path) -> None:
    other = Identity.generate()
    binding = campus.trust().check_chain(campus.guest_chain, NOW).binding
    chains = (campus.guest_chain, campus.chain(other, "other", binding), campus.founder_chain)
    eve = catalogue(campus, tmp_path / "e", campus.guest, *chains)
    assert eve.may_sign("@eve/train") and not eve.may_sign("@ada/train") and not eve.may_sign("train")
    body = eve.say("@eve/train", A, True, campus.guest_chain)
    for root, node, users, runs in (
        ("same user", other, (MINE,), True),
        ("nobody's", other, (), False),
        ("by name", campus.founder, ("eve",), True),
        ("everybody's", campus.founder, ("*",), True),
        ("another user", campus.founder, (MINE,), False),
        ("another name", campus.founder, ("bob",), False),
    ):
        heard = catalogue(campus, tmp_path / root, node, *chains, users=users)
        assert heard.hear(record(body)) and heard.rules.listed is None, "a user's list does not begin one of the mesh"
        verdict = heard.rules.judge("@eve/train", A.config)
        assert (verdict.rule, verdict.image) == (("", A) if runs else ("not listed", None)), root
        assert heard.rules.of_mesh.judge("@eve/train", None).image == A, "everybody may ask for it"
        assert (A.config in heard.rules.shared) == runs and heard.rules.judge("whatever", None).rule == ""
        heard.own = OwnRules({}, {"@eve/train": ()})
        assert heard.rules.judge("@eve/train", A.config).rule == "denied here" and not heard.rules.shared
    again = catalogue(campus, tmp_path / "e", campus.guest, *chains)
    assert again.rules.judge("@eve/train", None).image == A, "its signer keeps it over a restart"
    again.say("@eve/train", None, False, campus.guest_chain)
    assert again.rules.judge("@eve/train", None).rule == "not listed" and again.rules.listed is None


def test_members_sign_nothing_but_images_of_their_user(campus: Campus, tmp_path: Path) -> None:
    heard = catalogue(campus, tmp_path, campus.stranger, users=("*",))
    theirs = Entry("@ada/train", 1, True, A)
    many = [Entry(f"@eve/{number}", 1, True, A) for number in range(MAX_PERSONAL + 1)]
    for bad in (
        campus.said(campus.guest, campus.guest_chain, 1, theirs, personal=True),
        campus.said(campus.guest, campus.guest_chain, 1, OWN, theirs, personal=True),
        campus.said(campus.guest, campus.guest_chain, 1, OWN),
        campus.said(campus.guest, campus.guest_chain, 1),
        campus.said(campus.guest, campus.guest_chain, 1, OWN, WORD, personal=True, checked=False),
        campus.said(campus.guest, campus.guest_chain, 1, *many, personal=True, checked=False),
        campus.said(campus.admitter, campus.admitter_chain, 1, OWN),
    ):
        assert not heard.hear(record(bad)) and heard.rules.listed is None
        assert heard.rules.judge("@ada/train", None).rule == heard.rules.judge("@eve/train", None).rule == "not listed"
    assert heard.hear(record(campus.said(campus.guest, campus.guest_chain, 1, OWN, personal=True)))
    assert heard.rules.judge("@eve/train", None).image == A
    assert list((tmp_path / "list").iterdir()) == [] and not (tmp_path / "personal").exists(), "it is heard again"


def test_admitter_with_images_of_their_own_keeps_the_list_of_the_mesh(campus: Campus, tmp_path: Path) -> None:
    bob = catalogue(campus, tmp_path / "b", campus.admitter, campus.admitter_chain)
    assert bob.may_sign("@bob/x") and not bob.may_sign("@eve/x")
    bodies = [bob.say("@bob/x", A, True, campus.admitter_chain)]
    assert bob.rules.listed is None
    bodies.append(bob.say("pytorch", B, True, campus.admitter_chain))
    bodies.append(bob.say("pytorch", None, False, campus.admitter_chain))
    for number, begun in enumerate((False, True, True)):
        heard = catalogue(campus, tmp_path / str(number), campus.stranger)
        assert heard.hear(record(bodies[number])) and (heard.rules.listed is not None) == begun
    again = catalogue(campus, tmp_path / "b", campus.admitter, campus.admitter_chain)
    assert again.rules.listed == {} and again.rules.judge("@bob/x", None).image == A


def test_users_cannot_fill_the_places_of_admitters(
    campus: Campus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue_module, "MAX_SIGNERS", 1)
    monkeypatch.setattr(catalogue_module, "MAX_PERSONAL_LISTS", 1)
    heard = catalogue(campus, tmp_path, campus.stranger, users=("*",))
    second = Identity.generate()
    chain = campus.chain(second, "second", "sam")
    assert heard.hear(record(campus.said(campus.guest, campus.guest_chain, 1, OWN, personal=True)))
    other = Entry("@sam/train", 1, True, B)
    assert not heard.hear(record(campus.said(second, chain, 1, other, personal=True)))
    assert heard.hear(record(campus.said(campus.founder, campus.founder_chain, 1, WORD)))
    assert not heard.hear(record(campus.said(campus.admitter, campus.admitter_chain, 1, WORD)))
    assert heard.hear(record(campus.said(campus.guest, campus.guest_chain, 2, personal=True)))


def test_newest_images_of_a_user_are_kept(campus: Campus, tmp_path: Path) -> None:
    now = [NOW]
    eve = Catalogue(tmp_path, campus.guest, campus.trust(campus.guest_chain), lambda: now[0])
    eve.load()
    for number in range(MAX_PERSONAL + 2):
        now[0] += 1.0
        eve.say(f"@eve/{(7 * number) % 18}", A, True, campus.guest_chain)
    kept = {alias for alias, row in eve.rules.personal.items() if row.entry.allowed}
    assert kept == {f"@eve/{(7 * number) % 18}" for number in range(2, MAX_PERSONAL + 2)}
