"""Nodes that may hold a job's checkpoints, and the report to users whose chosen nodes hold none."""

from ckptstore.replication import Substitute
from membership.events import MemberView
from mesh.checkpoints.replica_policy import ReplicaPolicy, replica_policy_of
from mesh.consensus.runner import Runner
from mesh.model.record import Commit, JobRecord
from mesh.model.spec import Checkpointing
from placement.decision import replica_order
from placement.zones import Hierarchy
from tests.consensus.worlds import JOB, A, B, C, D, E, at, make_advert, make_spec, make_start

ADVERTS = tuple(make_advert(node, zone=zone) for node, zone in zip((A, B, C, D, E), "abbab", strict=True))


def member(node: bytes, state: str = "alive", draining: bool = False) -> MemberView:
    return MemberView(node, f"node{node[0]}", "ada", (), state, 0.0, draining)


def replica_policy(*chosen: bytes, members: tuple[MemberView, ...] | None = None) -> ReplicaPolicy:
    """Return the policy of a job that A submitted from zone a and that runs on D."""
    spec = make_spec(checkpointing=Checkpointing(to=chosen))
    runner = Runner(D, "node4", make_start(), spec, at(0))
    there = members or tuple(member(node) for node in (A, B, C, D, E))
    return replica_policy_of(JOB, D, runner, there, Hierarchy(0, ADVERTS))


def test_default_replica_order_is_rendezvous_order() -> None:
    assert replica_policy().fallback == tuple(replica_order(JOB, ADVERTS, {D}, 1, {D})) and replica_policy().gone == {}
    assert replica_policy_of(JOB, D, None, (), Hierarchy(0, ADVERTS)).config == 0


def test_fallback_order_starts_in_the_users_own_zone() -> None:
    order = replica_policy(B).fallback
    assert order[0] == A and set(order) == {A, B, C, E}


def test_suspect_nodes_come_last() -> None:
    alive = replica_policy().fallback
    suspects = tuple(member(node, "suspect" if node in alive[:2] else "alive") for node in (A, B, C, D, E))
    assert replica_policy(members=suspects).fallback == (*alive[2:], *alive[:2])


def test_departed_nodes_are_skipped_and_the_reason_is_reported() -> None:
    members = (member(A), member(B, "dead"), member(C, "alive", draining=True), member(E, "suspect"))
    found = replica_policy(B, C, D, E, members=members)
    assert found.gone == {B: "it is dead", D: "it is not a member"} and found.fallback == (A, E)
    words = found.describe([Substitute(A, B, found.gone[B]), Substitute(b"?", b"!", "full")])
    assert words.split("; ") == [
        "node1 holds checkpoints in place of node2: it is dead",
        "another node holds checkpoints in place of a node: full",
    ]
    assert found.describe([]) == ""


def test_checkpoint_without_a_holder_is_refused_where_there_is_a_node() -> None:
    policy = replica_policy()
    assert policy.refusal((), 2, "they are full") == "no other node took it: they are full"
    assert policy.refusal((A,), 2, "one is full") == "" and policy.refusal((), 0, "") == ""
    assert ReplicaPolicy(0, 0, ()).refusal((), 2, "there is no node") == "", "a lone node keeps its own"


def test_revoked_node_is_not_asked_for_state() -> None:
    members = (member(A), member(B, "dead"), member(C, "revoked"), member(D))
    policy = replica_policy(members=members)
    assert policy.never == {C, D}
    commit = Commit(1, 1, b"1" * 32, None, (C, B, E), None, 0)
    found = policy.sources(JobRecord(commit=commit), commit)
    assert found[:2] == [B, E] and C not in found, "this node has not met E: that says nothing of its store"
