"""Where a job's checkpoints may go, and what its user is told when it is not where he chose."""

from ckptstore.replication import StandIn
from membership.events import MemberView
from mesh.jobs.custody import Custody, custody_of
from mesh.jobs.runner import Runner
from mesh.jobs.spec import Checkpointing
from placement.decision import replica_order
from placement.zones import Hierarchy
from tests.jobs.worlds import JOB, A, B, C, D, E, at, make_advert, make_spec, make_start

ADVERTS = tuple(make_advert(node, zone=zone) for node, zone in zip((A, B, C, D, E), "abbab", strict=True))


def member(node: bytes, state: str = "alive", draining: bool = False) -> MemberView:
    return MemberView(node, f"node{node[0]}", "ada", (), state, 0.0, draining)


def custody(*chosen: bytes, members: tuple[MemberView, ...] | None = None) -> Custody:
    """Of a job that A has submitted, from zone a, and that runs on D."""
    spec = make_spec(checkpointing=Checkpointing(to=chosen))
    runner = Runner(D, "node4", make_start(), spec, at(0))
    there = members or tuple(member(node) for node in (A, B, C, D, E))
    return custody_of(JOB, D, runner, there, Hierarchy(0, ADVERTS))


def test_without_a_choice_copies_go_by_rendezvous() -> None:
    assert custody().fallback == tuple(replica_order(JOB, ADVERTS, {D}, 1, {D})) and custody().gone == {}
    assert custody_of(JOB, D, None, (), Hierarchy(0, ADVERTS)).config == 0


def test_in_place_of_the_chosen_the_users_own_zone_comes_first() -> None:
    order = custody(B).fallback
    assert order[0] == A and set(order) == {A, B, C, E}


def test_whoever_is_known_to_be_gone_is_not_asked_and_the_reason_is_told() -> None:
    members = (member(A), member(B, "dead"), member(C, "alive", draining=True), member(E, "suspect"))
    found = custody(B, C, D, E, members=members)
    assert found.gone == {B: "it is dead", D: "it is no member"} and found.fallback == (A,)
    words = found.told([StandIn(A, B, found.gone[B]), StandIn(b"?", b"!", "full")])
    assert words.split("; ") == [
        "node1 holds checkpoints in place of node2: it is dead",
        "another node holds checkpoints in place of a node: full",
    ]
    assert found.told([]) == ""
