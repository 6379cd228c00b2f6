"""Decisions on join requests by one node, and what it takes from the sections of others."""

from pathlib import Path

import msgspec
import pytest

from membership.admission import (
    DECIDED,
    ENDORSED,
    INVITED,
    PENDING,
    PENDING_EXPIRY_S,
    PUBLISH_S,
    REQUESTS_PER_S,
    Admission,
    AdmissionPolicy,
    Decision,
    JoinAnswer,
    PendingJoin,
    Published,
    decode_decisions,
    decode_pending,
    encode_pending,
    make_join_request,
    open_join_request,
    read_answer,
)
from membership.envelope import MeshSealer, seal
from membership.identity import Identity, format_id
from membership.ratelimit import BURST_S
from membership.reconcile import FrameError
from membership.snapshot import UsedInvites
from membership.trust import (
    MAX_THROUGH,
    PROVIDER,
    ROLES,
    USER,
    Grant,
    Invite,
    User,
    admit_node,
    make_invite,
    make_revocation,
    parse_invite,
    prove_invite,
)
from tests.chains import admitted
from tests.membership.test_core import GENESIS, NOW, ROOT, ROOT_CHAIN, CoreNode, meet

STRANGER, GUEST = Identity(b"\x61" * 32), Identity(b"\x67" * 32)


class Desk:
    """A node that answers join requests."""

    def __init__(self, name: str, directory: Path, policy: AdmissionPolicy | None = None) -> None:
        self.node = CoreNode(name)
        self.core, self.me = self.node.core, self.node.identity.node_id
        self.used = UsedInvites(directory / f"{name}-invites")
        self.used.read(NOW)
        self.admission = Admission(self.node.identity, self.core, policy or AdmissionPolicy(), self.used, {}, self.node)

    def ask(self, request: bytes, host: str = "10.0.0.9") -> JoinAnswer:
        return read_answer(self.admission.answer(request, host), 1, self.node.unix())[2]

    def decided(self) -> dict[bytes, Decision]:
        record = self.core.records.get(self.me, DECIDED, self.node.unix())
        return decode_decisions(record.body) if record is not None else {}

    def notice(self, section: str) -> None:
        self.admission.noticed(section)
        self.admission.tick()


def invite(issuer: Desk, **terms: object) -> Invite:
    trust = issuer.core.trust
    credentials = trust.credentials(issuer.me, NOW)
    assert credentials is not None
    return parse_invite(make_invite(issuer.node.identity, trust, credentials, (), 3600, NOW, **terms), NOW)  # type: ignore[arg-type]


def pending(using: Invite, node: Identity = STRANGER, name: str = "login") -> PendingJoin:
    return open_join_request(invited_request(using, node, name)[1:], "h", int(NOW))[0]


def invited_request(using: Invite, node: Identity = STRANGER, name: str = "login") -> bytes:
    return make_join_request(node, 1, "desk", name, using.grant, prove_invite(using, node.node_id, name))


def stranger_chain(node: Identity = STRANGER, user: str | User = "eve", roles: tuple[str, ...] = ROLES) -> bytes:
    return admitted(ROOT, GENESIS, ROOT_CHAIN, node.node_id, "desk", user, NOW, roles=roles)


def publish_decision(by: CoreNode, decision: Decision, about: Identity = STRANGER) -> None:
    by.core.publish(DECIDED, msgspec.msgpack.encode({about.node_id: decision}), 600)


# --- decisions that others publish


def test_chain_that_an_admitter_publishes_is_given_to_its_node(tmp_path: Path) -> None:
    desk, root = Desk("ann", tmp_path), CoreNode("root")
    publish_decision(root, Decision(stranger_chain()))
    meet(root, desk.node)
    assert desk.ask(make_join_request(STRANGER, 1, "d", "u")).state == "admitted"


def test_chain_that_another_member_publishes_is_not_given(tmp_path: Path) -> None:
    desk, bob = Desk("ann", tmp_path), CoreNode("bob")
    publish_decision(bob, Decision(stranger_chain()))
    meet(bob, desk.node)
    assert desk.ask(make_join_request(STRANGER, 1, "d", "u")).state == "waiting"


@pytest.mark.parametrize("chain", [stranger_chain(Identity(b"\x62" * 32)), b"?"], ids=["of another node", "malformed"])
def test_wrong_chain_of_an_admitter_is_not_given(tmp_path: Path, chain: bytes) -> None:
    desk, root = Desk("ann", tmp_path), CoreNode("root")
    publish_decision(root, Decision(chain))
    meet(root, desk.node)
    assert desk.ask(make_join_request(STRANGER, 1, "d", "u")).state == "waiting"


def test_refusal_of_an_invite_counts_from_its_issuer(tmp_path: Path) -> None:
    desk, root = Desk("ann", tmp_path), Desk("root", tmp_path)
    using = invite(root, user="eve")
    publish_decision(root.node, Decision(problem="used up"))
    meet(root.node, desk.node)
    assert desk.ask(invited_request(using)).problem == "used up"


def test_refusal_of_an_invite_by_another_member_does_not_count(tmp_path: Path) -> None:
    desk, bob = Desk("ann", tmp_path), CoreNode("bob")
    root = Desk("root", tmp_path)
    using = invite(root, user="eve")
    publish_decision(bob, Decision(problem="no"))
    meet(root.node, bob, desk.node)
    assert desk.ask(invited_request(using)).state == "waiting"


# --- decisions of this node


def test_refused_invite_does_not_count_against_another(tmp_path: Path) -> None:
    """Neither at its issuer, nor at another node, nor when the machine asks with the first one again."""
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    first, second, third = (invite(root, user=user) for user in ("eve", "bob", "dan"))
    for using, number in ((first, 0x63), (second, 0x64)):
        assert root.ask(invited_request(using, Identity(bytes([number]) * 32))).state == "admitted"
    ann.core.publish(INVITED, encode_pending([pending(first)]), 600)
    meet(root.node, ann.node)
    root.notice(INVITED)
    meet(root.node, ann.node)
    assert "is a user already" in ann.ask(invited_request(first)).problem, "its issuer has published the refusal"
    published = root.core.records.get(root.me, DECIDED, root.node.unix())
    for using in (first, second, first, second):
        assert "is a user already" in root.ask(invited_request(using)).problem
    assert root.core.records.get(root.me, DECIDED, root.node.unix()) == published, "its answers are no gossip"
    assert ann.ask(invited_request(third)).state == "waiting"
    ann.core.publish(INVITED, encode_pending([pending(third)]), 600)
    meet(root.node, ann.node)
    root.notice(INVITED)
    meet(root.node, ann.node)
    assert ann.ask(invited_request(third)).state == "admitted"


def test_refused_machine_is_admitted_at_the_issuer_with_a_new_invite(tmp_path: Path) -> None:
    root = Desk("root", tmp_path)
    first = invite(root, user="eve")
    root.ask(invited_request(first, Identity(b"\x63" * 32)))
    assert "is a user already" in root.ask(invited_request(first)).problem
    assert root.ask(invited_request(invite(root, user="bob"))).state == "admitted"


def test_endorser_gives_no_role_that_it_lacks(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    using = invite(ann, mine=True)
    lesser = admitted(ROOT, GENESIS, ROOT_CHAIN, ann.me, "ann", "ann", NOW + 1, roles=("user",))
    ann.core.publish_chain(lesser)
    ann.core.publish(ENDORSED, encode_pending([pending(using)]), 600)
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    machine = root.core.trust.credentials(STRANGER.node_id, NOW)
    assert machine is not None
    assert machine.roles == ("user",)


def test_endorsement_ends_with_the_certificate_of_its_author(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    ann.core.publish(ENDORSED, encode_pending([pending(invite(ann, mine=True))]), 600)
    meet(root.node, ann.node)
    trust = root.core.trust
    trust.admit_statement(make_revocation(ROOT, trust, ann.me, "", NOW))
    root.notice(ENDORSED)
    assert trust.credentials(STRANGER.node_id, NOW) is None


def test_endorsement_admits_a_machine_that_asked_with_an_invite_of_the_endorser(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    assert ann.ask(invited_request(invite(ann, mine=True))).state == "waiting"
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    meet(root.node, ann.node)
    machine = root.core.trust.credentials(STRANGER.node_id, NOW)
    assert machine is not None and machine.user_key == ann.me
    assert ann.ask(invited_request(invite(ann, mine=True))).state == "admitted"


def test_invite_waits_while_the_file_of_uses_is_held(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    root.used.held = True
    using = invite(root, user="eve")
    assert root.ask(invited_request(using)).state == "waiting"
    ann.core.publish(INVITED, encode_pending([pending(using)]), 600)
    meet(root.node, ann.node)
    root.notice(INVITED)
    assert root.used.count == 0
    root.used.held = False
    root.admission.tick()
    assert root.used.count == 1 and root.core.trust.credentials(STRANGER.node_id, NOW) is not None


def test_machine_goes_with_the_member_that_endorsed_it(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    ann.core.publish(ENDORSED, encode_pending([pending(invite(ann, mine=True))]), 600)
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    trust = root.core.trust
    machine = trust.credentials(STRANGER.node_id, NOW)
    assert machine is not None and machine.through == (ann.me,)
    trust.admit_statement(make_revocation(ROOT, trust, ann.me, "stolen", NOW))
    assert trust.credentials(STRANGER.node_id, NOW) is None
    # It asks again, with its own key and the name that it had: a person decides.
    assert root.ask(make_join_request(STRANGER, 1, "desk", "ann")).state == "waiting"
    root.admission.approve(STRANGER.node_id, "desk", "ann", existing=True)
    again = trust.credentials(STRANGER.node_id, NOW)
    assert again is not None and (again.user_key, again.through) == (ann.me, ())


def test_former_member_gets_the_roles_back_that_it_had(tmp_path: Path) -> None:
    """An approval without roles let a machine lend that had been admitted to submit alone."""
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    ann.core.publish(ENDORSED, encode_pending([pending(invite(ann, mine=True, roles=(USER,)))]), 600)
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    trust = root.core.trust
    trust.admit_statement(make_revocation(ROOT, trust, ann.me, "stolen", NOW))
    for asked, roles in (((), (USER,)), ((PROVIDER,), (PROVIDER,))):
        root.admission.approve(STRANGER.node_id, "desk", "ann", asked, existing=True)
        again = trust.credentials(STRANGER.node_id, NOW)
        assert again is not None and again.roles == roles


def test_member_that_lost_its_certificate_gets_it_with_the_keys_that_it_came_in_through(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), CoreNode("ann")
    ann.core.publish_chain(_through(ann, (GUEST.node_id,)))
    meet(root.node, ann)
    again = root.ask(make_join_request(ann.identity, 1, "ann", "ann"))
    assert again.granted and root.core.trust.check_chain(again.granted, NOW).through == (GUEST.node_id,)


def test_invite_of_a_member_that_came_in_through_too_many_is_refused_before_it_is_used(tmp_path: Path) -> None:
    ann = Desk("ann", tmp_path)
    ann.core.publish_chain(_through(ann.node, tuple(bytes([number]) * 32 for number in range(MAX_THROUGH))))
    using = invite(ann, mine=True)
    assert f"came in through {MAX_THROUGH} others" in ann.ask(invited_request(using)).problem
    assert ann.used.take(ann.core.trust.open_grant(using.grant)[1], bytes(32), NOW)


def _through(node: CoreNode, keys: tuple[bytes, ...]) -> bytes:
    trust = node.core.trust
    own = trust.seen()[node.identity.node_id]
    sealer = MeshSealer(ROOT, trust.mesh_id)
    return admit_node(
        sealer, trust, ROOT_CHAIN, own.node_id, own.nick, own.binding, ROLES, False, NOW + 1, through=keys
    )


def test_endorsement_of_a_machine_that_did_not_ask_for_it_admits_nothing(tmp_path: Path) -> None:
    """Nobody adds another person's machine to their own user, by whatever that machine has signed."""
    root, ann, bob = Desk("root", tmp_path), Desk("ann", tmp_path), Desk("bob", tmp_path)
    own = invite(bob, mine=True)
    asked = open_join_request(make_join_request(STRANGER, 1, "desk", "carol")[1:], "h", 0)[0]
    forged = make_join_request(
        bob.node.identity, 1, "desk", "carol", own.grant, prove_invite(own, STRANGER.node_id, "carol")
    )
    for endorsed in (
        Published(asked.sealed, "h", 0),  # without an invite
        Published(pending(invite(root, user="carol")).sealed, "h", 0),  # with one for a user of its own
        Published(pending(invite(ann, mine=True)).sealed, "h", 0),  # with one of another member
        Published(pending(invite(root, mine=True)).sealed, "h", 0),
        Published(forged[1:2] + STRANGER.node_id + forged[34:], "h", 0),  # with bob's, but signed by bob
    ):
        bob.core.publish(ENDORSED, msgspec.msgpack.encode([endorsed]), 600)
        meet(root.node, bob.node)
        root.notice(ENDORSED)
        assert root.core.trust.seen().keys() & {STRANGER.node_id} == set()


def test_endorsed_invite_for_another_user_admits_nothing(tmp_path: Path) -> None:
    """Its issuer was an admitter when it made the invite: it may not admit users any more, and adds none to its own."""
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    grant = Grant(GUEST.node_id, "carol", False, ROLES, 1, int(NOW), int(NOW) + 3600, b"")
    sealed = seal(ann.node.identity, ann.core.trust.mesh_id, "grant", msgspec.msgpack.encode(grant))
    using = Invite(GENESIS, (), int(NOW) + 3600, "ann", GUEST.seed, sealed)
    assert "may not admit users any more" in ann.ask(invited_request(using)).problem
    ann.core.publish(ENDORSED, encode_pending([pending(using)]), 600)
    meet(root.node, ann.node)
    root.notice(ENDORSED)
    assert root.core.trust.credentials(STRANGER.node_id, NOW) is None


def test_issuer_gives_no_role_that_it_lacks(tmp_path: Path) -> None:
    """Its certificate has fewer roles than at the time of the invite."""
    root = Desk("root", tmp_path)
    using = invite(root, user="eve")
    lesser = admitted(ROOT, GENESIS, ROOT_CHAIN, root.me, "root", "ada", NOW + 1, roles=("user",))
    root.core.publish_chain(lesser)
    root.ask(invited_request(using))
    machine = root.core.trust.credentials(STRANGER.node_id, NOW)
    assert machine is not None and machine.roles == ("user",)


def test_invite_is_left_to_its_issuer(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    ann.core.publish(INVITED, encode_pending([pending(invite(ann, mine=True))]), 600)
    meet(root.node, ann.node)
    root.notice(INVITED)
    assert root.core.trust.credentials(STRANGER.node_id, NOW) is None


def test_invite_issued_here_admits_a_machine_that_asked_elsewhere(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), CoreNode("ann")
    ann.core.publish(INVITED, encode_pending([pending(invite(root, user="eve"))]), 600)
    meet(root.node, ann)
    root.notice(INVITED)
    assert root.core.trust.credentials(STRANGER.node_id, NOW) is not None


def test_invite_whose_use_cannot_be_written_is_decided_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, ann = Desk("root", tmp_path), CoreNode("ann")
    ann.core.publish(INVITED, encode_pending([pending(invite(root, user="eve"))]), 600)
    meet(root.node, ann)

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as disk:
        disk.setattr("membership.snapshot.write_durably", full)
        root.notice(INVITED)
    assert root.core.trust.credentials(STRANGER.node_id, NOW) is None
    root.admission.tick()
    assert root.core.trust.credentials(STRANGER.node_id, NOW) is not None


def test_revoked_machine_uses_up_no_invite(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), CoreNode("ann")
    using = invite(root, user="eve", uses=1)
    ann.core.publish(INVITED, encode_pending([pending(using)]), 600)
    meet(root.node, ann)
    trust = root.core.trust
    trust.admit_statement(make_revocation(ROOT, trust, STRANGER.node_id, "", NOW))
    root.notice(INVITED)
    assert root.ask(invited_request(using, Identity(b"\x63" * 32))).state == "admitted"


def test_class_gets_users_of_its_own_with_numbers_after_equal_names(tmp_path: Path) -> None:
    root = Desk("root", tmp_path)
    using, machines = invite(root, user="lab", uses=3), [Identity(bytes([n]) * 32) for n in (0x70, 0x71, 0x72)]
    for machine in machines:
        assert root.ask(invited_request(using, machine, "bob")).state == "admitted"
    known = [root.core.trust.credentials(machine.node_id, root.node.unix()) for machine in machines]
    assert [one.user for one in known if one is not None] == ["lab-bob", "lab-bob-2", "lab-bob-3"]
    assert "all 3 uses" in root.ask(invited_request(using)).problem
    alone = invite(root, user="ann-lee")
    assert root.ask(invited_request(alone, Identity(b"\x73" * 32), "login")).state == "admitted"
    ann = root.core.trust.credentials(Identity(b"\x73" * 32).node_id, root.node.unix())
    assert ann is not None and ann.user == "ann-lee"
    assert "ann-lee is a user already" in root.ask(invited_request(alone, Identity(b"\x74" * 32))).problem


def test_invite_of_a_node_that_is_no_member_any_more_is_refused(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    meet(root.node, ann.node)
    using = invite(ann, mine=True)
    assert root.ask(invited_request(using)).state == "waiting"
    trust = root.core.trust
    trust.admit_statement(make_revocation(ROOT, trust, ann.me, "", NOW))
    assert "no member of the mesh" in root.ask(invited_request(using, Identity(b"\x63" * 32))).problem


@pytest.mark.parametrize("nick", ["", " nick=tower"])
def test_allow_list_admits_a_machine_to_a_user_that_exists(tmp_path: Path, nick: str) -> None:
    allow_list = tmp_path / "allow"
    root = Desk("root", tmp_path, AdmissionPolicy(allow_list))
    other = Identity(b"\x75" * 32)
    assert root.ask(make_join_request(STRANGER, 1, "desk", "eve")).state == "waiting", "there is no list yet"
    allow_list.write_text(f"{format_id(STRANGER.node_id)} user=eve{nick}\n{format_id(other.node_id)} user=eve\n")
    for node in (STRANGER, other):
        assert root.ask(make_join_request(node, 1, "desk", "login")).state == "admitted"
    first, second = (root.core.trust.credentials(node.node_id, root.node.unix()) for node in (STRANGER, other))
    assert first is not None and second is not None
    assert first.nick == (nick.partition("=")[2] or "desk")
    assert (first.user, first.user_key, second.user_key) == ("eve", STRANGER.node_id, STRANGER.node_id)


def test_requests_that_other_nodes_have_are_shown_until_they_are_decided(tmp_path: Path) -> None:
    root, ann = Desk("root", tmp_path), Desk("ann", tmp_path)
    member, decided = Identity(b"\x76" * 32), Identity(b"\x77" * 32)
    for number, node in enumerate((STRANGER, member, decided)):
        ann.ask(make_join_request(node, 1, "desk", "u"), f"10.0.{number}.9")
    ann.node.now = 10.0
    ann.admission.tick()
    meet(root.node, ann.node)
    assert set(root.admission.pending()) == {STRANGER.node_id, member.node_id, decided.node_id}
    root.core.trust.admit_chain(stranger_chain(member, "mel"), NOW)
    publish_decision(root.node, Decision(stranger_chain(decided, "dee")), decided)
    assert set(root.admission.pending()) == {STRANGER.node_id}


def test_what_a_waiting_machine_asks_for_is_read_as_it_signed_it(tmp_path: Path) -> None:
    """A member that publishes a request under another name, or in another machine's name, changes nothing."""
    root, ann, bob = Desk("root", tmp_path), Desk("ann", tmp_path), CoreNode("bob")
    sealed = make_join_request(STRANGER, 1, "carols-ws", "carol")[1:]
    forged = [
        Published(make_join_request(bob.identity, 1, "evil", "carol2")[1:34] + sealed[33:], "h", 0),
        Published(sealed[:33] + make_join_request(bob.identity, 1, "evil", "carol2")[34:], "h", 0),
        Published(sealed.replace(b"carols-ws", b"evil-nick"), "h", 0),
    ]
    bob.core.publish(PENDING, msgspec.msgpack.encode(forged), 600)
    meet(bob, root.node)
    assert root.admission.pending() == {}
    ann.ask(b"J" + sealed)
    meet(ann.node, root.node)
    (shown,) = root.admission.pending().values()
    assert (shown.node, shown.nick, shown.user) == (STRANGER.node_id, "carols-ws", "carol")


def test_request_with_an_invite_among_those_of_strangers_is_ignored(tmp_path: Path) -> None:
    root, bob = Desk("root", tmp_path), CoreNode("bob")
    junk = make_join_request(STRANGER, 1, "n", "u", b"junk", b"junk")
    bob.core.publish(PENDING, encode_pending([open_join_request(junk[1:], "h", 0)[0]]), 600)
    meet(bob, root.node)
    assert root.admission.pending() == {}


def test_machine_that_asks_again_changes_the_published_list_only_with_another_wish(tmp_path: Path) -> None:
    desk = Desk("ann", tmp_path)
    published: list[bytes] = []
    for nonce, user in ((1, "carol"), (2, "carol"), (3, "cyd")):
        desk.node.now += PUBLISH_S[PENDING]
        desk.admission.answer(make_join_request(STRANGER, nonce, "desk", user), "10.0.0.9")
        (record,) = desk.core.records.section(PENDING, desk.node.unix())
        published.append(record.body)
    assert published[0] == published[1] != published[2]
    assert decode_pending(published[2], 1)[0].user == "cyd"


def test_stranger_that_changes_its_name_causes_little_gossip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new name was published within a second, and before all other news."""
    desk = Desk("ann", tmp_path)
    urgent: list[bool] = []
    publish = desk.core.publish

    def counted(section: str, body: bytes, ttl_s: float, urgently: bool = False) -> bool:
        urgent.append(urgently)
        return publish(section, body, ttl_s, urgently)

    monkeypatch.setattr(desk.core, "publish", lambda *what, urgent: counted(*what, urgent))
    for second in range(30):
        desk.node.now += 1.0
        desk.admission.answer(make_join_request(STRANGER, second, "desk", f"carol{second}"), "10.0.0.9")
        desk.admission.tick()
    assert urgent == [False] * 3


def test_requests_of_one_address_are_limited_before_they_are_read(tmp_path: Path) -> None:
    desk = Desk("root", tmp_path)
    request = make_join_request(STRANGER, 1, "d", "u")
    for _ in range(int(REQUESTS_PER_S * BURST_S)):
        desk.ask(request, "2001:db8::1")
    with pytest.raises(FrameError, match="too many join requests"):
        desk.ask(request, "2001:db8::2")
    assert desk.ask(request, "2001:db8:0:1::1").state == "waiting"


def test_pending_request_ends_when_its_node_is_a_member(tmp_path: Path) -> None:
    desk = Desk("ann", tmp_path)
    desk.ask(make_join_request(STRANGER, 1, "d", "u"))
    desk.core.trust.admit_chain(stranger_chain(), NOW)
    desk.node.now = 10.0
    desk.admission.tick()
    (record,) = desk.core.records.section("pending", desk.node.unix())
    assert msgspec.msgpack.decode(record.body) == []


def test_pending_request_ends_when_its_node_asks_no_more(tmp_path: Path) -> None:
    desk = Desk("ann", tmp_path)
    desk.ask(make_join_request(STRANGER, 1, "d", "u"))
    desk.node.now = PENDING_EXPIRY_S + 1
    desk.admission.tick()
    (record,) = desk.core.records.section("pending", desk.node.unix())
    assert msgspec.msgpack.decode(record.body) == []
