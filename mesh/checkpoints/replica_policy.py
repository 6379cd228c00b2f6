"""Replica policy: the nodes that may hold a job's checkpoints now, by its user's choice, and replacements for those that
fail. Pure.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ckptstore.replication import Substitute
from membership.events import MemberView
from mesh.consensus.runner import Runner
from mesh.model.record import Commit, JobRecord
from placement.decision import replica_order
from placement.zones import Hierarchy, stand_in_order, zone_of

ABSENT = {"unreachable", "dead", "left", "revoked"}  # states of members that are not asked
NEED_MIB = 1  # free space an advert must show: it is rounded to GiB, and the store refuses what does not fit


class ReplicaPolicy(msgspec.Struct, frozen=True):
    """The group and term that sign a checkpoint, and the nodes that may hold it; evaluated at each save.

    A suspect node may hold it: most suspicions are refuted. It comes last. `gone`: why some cannot. `never`: this node, and
    those that were revoked. What any other holder has may come back, also that of a node which this one has not met.
    """

    config: int
    term: int
    fallback: tuple[bytes, ...]
    gone: Mapping[bytes, str] = {}
    nicks: Mapping[bytes, str] = {}
    never: frozenset[bytes] = frozenset()

    def first(self, order: Sequence[bytes]) -> "ReplicaPolicy":
        """Return the policy with its fallback in this order."""
        return msgspec.structs.replace(self, fallback=tuple(order))

    def sources(self, record: JobRecord, commit: Commit) -> list[bytes]:
        """Return the other nodes that may have a checkpoint: its holders, those that ran the job since, then any."""
        ran = [one.node for one in record.attempts if one.term >= commit.term and one.running_unix_ms]
        known = [node for node in (*commit.holders, *reversed(ran)) if node not in self.never]
        return list(dict.fromkeys([*known, *self.fallback]))

    def refusal(self, holders: Sequence[bytes], want: int, short: str) -> str:
        """Return why a checkpoint with these holders must not be committed; empty if it may be."""
        return f"no other node took it: {short}" if not holders and want and self.fallback else ""

    def describe(self, substitutes: Sequence[Substitute]) -> str:
        """Describe the replacements and their reasons for the user."""
        return "; ".join(
            f"{self.nicks.get(one.peer, 'another node')} holds checkpoints in place of "
            f"{self.nicks.get(one.missed, 'a node')}: {one.reason}"
            for one in substitutes
        )


def replica_policy_of(
    job: bytes, me: bytes, runner: Runner | None, members: Sequence[MemberView], hierarchy: Hierarchy
) -> ReplicaPolicy:
    adverts = hierarchy.adverts
    not_these = {me} | {member.node_id for member in members if member.draining or member.state in ABSENT}
    doubtful = {member.node_id for member in members if member.state == "suspect"}
    rules = runner.spec.checkpointing if runner is not None else None
    if runner is None or rules is None or not rules.to:
        order = replica_order(job, adverts, not_these, NEED_MIB, {me})
    else:
        zones = hierarchy.zones
        home = zone_of(runner.spec.submitter, zones)
        order = stand_in_order(job, adverts, zones, not_these, NEED_MIB, home.name if home is not None else None)
    order.sort(key=lambda node: node in doubtful)
    never = frozenset(member.node_id for member in members if member.state == "revoked") | {me}
    if runner is None:
        return ReplicaPolicy(config=0, term=0, fallback=tuple(order), never=never)
    states = {member.node_id: member.state for member in members}
    chosen = rules.to if rules is not None else ()
    gone = {node: f"it is {states[node]}" for node in chosen if states.get(node) in ABSENT}
    gone |= {node: "it is not a member" for node in chosen if node not in states}
    nicks = {member.node_id: member.nick for member in members}
    return ReplicaPolicy(runner.config.number, runner.term, tuple(order), gone, nicks, never)
