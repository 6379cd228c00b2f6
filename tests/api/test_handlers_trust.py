"""Orders about the membership of the mesh that are refused before anything is signed."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from membership.identity import format_id
from membership.trust import NameTaken, TrustError
from mesh.api.handlers.trust import TrustHandlers
from mesh.api.requests import ApproveOrder, InviteOrder
from mesh.util.errors import ExitCode, MeshError

YEAR_S = 365 * 86_400.0


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (InviteOrder(ttl_s=59.0), "from a minute to a year"),
        (InviteOrder(ttl_s=YEAR_S + 1), "from a minute to a year"),
        (InviteOrder(ttl_s=float("nan")), "from a minute to a year"),
        (InviteOrder(ttl_s=60.0, user="bob", mine=True), "not both"),
        (InviteOrder(ttl_s=YEAR_S, mine=True, uses=2), "its own invite"),
    ],
)
def test_invite_with_wrong_terms_is_refused(order: InviteOrder, words: str) -> None:
    nothing: Any = None
    with pytest.raises(MeshError, match=words) as refused:
        TrustHandlers(nothing, nothing, nothing).invite(order)
    assert refused.value.code == ExitCode.USAGE


@pytest.mark.parametrize("order", ["revoke", "promote"])
def test_beginning_of_a_nick_names_no_node_in_orders_that_cannot_be_taken_back(order: str) -> None:
    nothing: Any = None
    desk = SimpleNamespace(node_id=b"d" * 32, nick="desk", user="ada")
    membership: Any = SimpleNamespace(members=lambda: [desk])
    handlers = TrustHandlers(nothing, nothing, membership)
    with pytest.raises(MeshError, match="no node called 'des'") as refused:
        handlers.revoke("des", "it is lost") if order == "revoke" else handlers.promote("des")
    assert refused.value.code == ExitCode.NOT_FOUND


class Founder:
    """A founder of a mesh that has `quorum` of them, with some who wait to be let in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quorum: int = 1) -> None:
        self.steps: list[Any] = []
        self.waiting = {
            bytes([number]) * 32: SimpleNamespace(nick=nick, user=user, since_unix=since)
            for number, nick, user, since in ((1, "desk", "ada", 2.0), (2, "den", "bob", 1.0))
        }
        genesis = SimpleNamespace(quorum=quorum, roots=())
        self.trust: Any = SimpleNamespace(seen=dict, revoked=set(), credentials=lambda node, now: None, genesis=genesis)
        self.trust.votes = lambda kind, node: 1
        membership: Any = SimpleNamespace(
            pending_joins=lambda: self.waiting,
            approve=lambda *given: self.steps.append(given),
            publish_statement=self.steps.append,
            members=list,
        )
        self.membership = membership
        nothing: Any = None
        for name in ("promotion", "revocation"):
            monkeypatch.setattr(f"mesh.api.handlers.trust.make_{name}", lambda *given, name=name: name)
        self.handlers = TrustHandlers(nothing, self.trust, membership)


def test_waiting_node_is_admitted_under_the_names_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Founder(monkeypatch)
    told = founder.handlers.approve(ApproveOrder("desk"))
    assert founder.steps == [(bytes([1]) * 32, "desk", "ada", (), False, False)] and told.nick == "desk"
    order = ApproveOrder(format_id(bytes([2]) * 32)[:9].upper(), nick="lab", user="eve", roles=["user"], existing=True)
    told = founder.handlers.approve(order)
    assert founder.steps[1:] == [(bytes([2]) * 32, "lab", "eve", ("user",), False, True)] and told.user == "eve"


@pytest.mark.parametrize("name", ["", "des", "lab"])
def test_only_one_who_waits_can_be_admitted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    founder = Founder(monkeypatch)
    with pytest.raises(MeshError, match=r"no pending join requests match .*\(pending: desk .*, den ") as refused:
        founder.handlers.approve(ApproveOrder(name))
    assert refused.value.code == ExitCode.NOT_FOUND and not founder.steps
    founder.waiting = {node: SimpleNamespace(nick="desk", user="ada") for node in founder.waiting}
    with pytest.raises(MeshError, match="2 pending join requests match"):
        founder.handlers.approve(ApproveOrder("desk"))
    founder.waiting = {}
    with pytest.raises(MeshError, match="pending: none"):
        founder.handlers.approve(ApproveOrder("desk"))


def test_member_whose_certificate_is_void_can_be_admitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Founder(monkeypatch)
    old, revoked, valid = (bytes([number]) * 32 for number in (3, 4, 5))
    founder.trust.seen = lambda: {
        node: SimpleNamespace(nick=f"n{node[0]}", user="eve") for node in (old, revoked, valid)
    }
    founder.trust.revoked = {revoked}
    founder.trust.credentials = lambda node, now: object() if node == valid else None
    assert founder.handlers.approve(ApproveOrder("n3")).user == "eve"
    for name in ("n4", "n5"):
        with pytest.raises(MeshError, match="no pending"):
            founder.handlers.approve(ApproveOrder(name))


@pytest.mark.parametrize(("quorum", "admit", "signed"), [(1, True, 0), (2, True, 1), (2, False, 0)])
def test_one_who_may_admit_is_promoted_where_several_founders_must_agree(
    monkeypatch: pytest.MonkeyPatch, quorum: int, admit: bool, signed: int
) -> None:
    founder = Founder(monkeypatch, quorum)
    founder.handlers.approve(ApproveOrder("desk", admit=admit))
    assert founder.steps[1:] == ["promotion"] * signed and founder.steps[0][4] is admit


@pytest.mark.parametrize(("error", "words"), [(NameTaken("ada is taken"), "--existing"), (TrustError("no"), "^no$")])
def test_refused_admission_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    founder = Founder(monkeypatch)

    def refuse(*given: object) -> None:
        raise error

    founder.membership.approve = refuse
    with pytest.raises(MeshError, match=words) as refused:
        founder.handlers.approve(ApproveOrder("desk"))
    assert refused.value.code == ExitCode.REFUSED


def test_waiting_nodes_are_listed_in_the_order_of_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Founder(monkeypatch)
    monkeypatch.setattr("mesh.api.handlers.trust.copy_as", lambda kind, entry, node: entry.nick)
    for node, entry in founder.waiting.items():
        entry.node = node
    assert founder.handlers.pending() == ["den", "desk"]


def test_revocation_names_those_who_came_in_through_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Founder(monkeypatch)
    gone = bytes([9]) * 32
    founder.membership.members = lambda: [SimpleNamespace(node_id=gone, nick="desk", user="ada")]

    def member(number: int, nick: str, through: tuple[bytes, ...], ends: float, own_key: bool) -> Any:
        node = bytes([number]) * 32
        return SimpleNamespace(
            node_id=node, nick=nick, user="bob", user_key=node if own_key else b"k", through=through, not_after=ends
        )

    later = time.time() + 1000
    came = [
        member(1, "z", (gone,), later, True),
        member(2, "a", (gone,), later, False),
        member(3, "expired", (gone,), 1.0, True),
        member(4, "elsewhere", (), later, True),
        member(5, "revoked", (gone,), later, True),
    ]
    founder.trust.seen = lambda: {one.node_id: one for one in came}
    founder.trust.revoked = {bytes([5]) * 32}
    told = founder.handlers.revoke("desk", "lost")
    assert [(one.nick, one.existing) for one in told.lost] == [("z", False), ("a", True)]
    assert founder.steps == ["revocation"] and not told.already
    founder.trust.revoked.add(gone)
    assert founder.handlers.revoke("desk", "lost").already and len(founder.steps) == 1, "it is not published twice"


def test_list_of_members_has_the_revoked_and_the_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Founder(monkeypatch)
    node, unseen = bytes([1]) * 32, bytes([2]) * 32
    seen = SimpleNamespace(nick="desk", user="ada", can_admit=True, roles=("user",), not_after=1.0, through=(unseen,))
    founder.trust.seen = lambda: {node: seen}
    founder.trust.revoked, founder.trust.refusal = {unseen}, lambda credentials, now: "it has ended"
    founder.trust.revocations = {unseen: SimpleNamespace(revoked_unix=5.0, reason="lost")}
    founder.trust.genesis.roots = (unseen,)
    by_node = {row.node: row for row in founder.handlers.trusted()}
    old, gone = by_node[format_id(node)], by_node[format_id(unseen)]
    assert (old.ended, old.problem, old.founder, old.can_admit, old.revoked_unix) == (
        True,
        "it has ended",
        False,
        True,
        None,
    )
    assert (gone.revoked_unix, gone.reason, gone.founder, gone.user, gone.ended) == (5.0, "lost", True, "", False)
    seen.not_after = time.time() + 1000
    assert not next(row for row in founder.handlers.trusted() if row.nick == "desk").ended
