"""Who may hold a job's checkpoints now: by its user's choice, and in place of whom that does not work. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from ckptstore.replication import StandIn
from membership.events import MemberView
from mesh.jobs.runner import Runner
from placement.decision import replica_order
from placement.zones import Hierarchy, stand_in_order, zone_of

ABSENT = {"unreachable", "dead", "left", "revoked"}  # states of a member that is not worth asking
NEED_MIB = 1  # what the advert must have free: it is rounded to GiB, and the store itself refuses what does not fit


class Custody(msgspec.Struct, frozen=True):
    """Who the checkpoint is signed for and who may hold it; asked anew at each save. `gone`: why some cannot."""

    config: int
    term: int
    fallback: tuple[bytes, ...]
    gone: Mapping[bytes, str] = {}
    nicks: Mapping[bytes, str] = {}

    def first(self, order: Sequence[bytes]) -> "Custody":
        """The same, with its fallback in this order."""
        return msgspec.structs.replace(self, fallback=tuple(order))

    def told(self, stand_ins: Sequence[StandIn]) -> str:
        """Who holds checkpoints in place of whom, and why, for the user."""
        return "; ".join(
            f"{self.nicks.get(one.peer, 'another node')} holds checkpoints in place of "
            f"{self.nicks.get(one.missed, 'a node')}: {one.reason}"
            for one in stand_ins
        )


def custody_of(
    job: bytes, me: bytes, runner: Runner | None, members: Sequence[MemberView], hierarchy: Hierarchy
) -> Custody:
    adverts = hierarchy.adverts
    not_these = {me} | {member.node_id for member in members if member.draining or member.state != "alive"}
    rules = runner.spec.checkpointing if runner is not None else None
    if runner is None or rules is None or not rules.to:
        order = replica_order(job, adverts, not_these, NEED_MIB, {me})
    else:
        zones = hierarchy.zones
        home = zone_of(runner.spec.submitter, zones)
        order = stand_in_order(job, adverts, zones, not_these, NEED_MIB, home.name if home is not None else None)
    if runner is None:
        return Custody(config=0, term=0, fallback=tuple(order))
    states = {member.node_id: member.state for member in members}
    chosen = rules.to if rules is not None else ()
    gone = {node: f"it is {states[node]}" for node in chosen if states.get(node) in ABSENT}
    gone |= {node: "it is no member" for node in chosen if node not in states}
    nicks = {member.node_id: member.nick for member in members}
    return Custody(runner.config.number, runner.term, tuple(order), gone, nicks)
