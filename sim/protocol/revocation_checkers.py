"""Checker of revocations under running jobs: docs/explanation/trust.md says what they end.

It looks at disks and messages only: a node knows of a revocation once its disk has the founder's statement.
"""

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import (
    Accepted,
    AnyMessage,
    Enlist,
    Enlisted,
    Introduce,
    Introduced,
    PreVoteGranted,
    Promised,
    RunGranted,
    Start,
    StartAnswer,
)
from sim.protocol.jobs import JobChecker, JobNode, JobsWorld
from sim.protocol.membership import MembershipNode

LATE_S = 30.0  # what came before the statement: the slowest fsync of a simulated disk, and a lease
GRANTS = (Accepted, Promised, PreVoteGranted, RunGranted)
PLACES = (Start, Enlist, Introduce)


class RevokedNodes(JobChecker):
    """A node that knows of a revocation gives the revoked node neither votes nor leases nor jobs, and takes on no job that the
    revoked node has submitted; one that it has taken on goes on. Soon after faults have ended, a revoked node computes nothing.

    Found by: nodes that go by certificates alone; nodes that take any description with a signature.
    """

    name = "revoked"

    def __init__(self) -> None:
        self._since: dict[tuple[bytes, bytes, bytes], float] = {}
        self._taken_on: set[tuple[bytes, bytes, bytes]] = set()

    def sent(self, world: JobsWorld, node: JobNode, to: bytes, message: AnyMessage) -> None:
        if not world.revocations:
            return
        job = message.job
        if isinstance(message, GRANTS + PLACES) and to != node.id and self._knows(world, node, to):
            text = f"{node.name} sends {type(message).__name__} to {world.by_id[to].name}, which it knows to be revoked"
            raise self.violated(world, job, text)
        takes = isinstance(message, StartAnswer | Enlisted) and message.taken
        takes = takes or (isinstance(message, Introduced) and not message.problem)
        if takes and job not in node.disk.witness_records and self._may_not_take_on(world, node, job):
            raise self.violated(world, job, f"{node.name} takes on a job whose submitter it knows to be revoked")

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, key = witness_record.job, (node.id, node.disk.name, witness_record.job)
        if key in self._taken_on:
            return
        self._taken_on.add(key)
        if world.revocations and self._may_not_take_on(world, node, job):
            raise self.violated(world, job, f"{node.name} witnesses a job whose submitter it knows to be revoked")

    def stepped(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        guest, group = node.guests[job], world.groups.get(job)
        if node.id not in world.revocations or world.specs[job].on_partition != "freeze":
            return
        if group is None or guest.gang_member or node.may_be_behind(job):  # a member goes by its runner
            return
        others = [world.by_id[voter] for voter in group.nodes if voter != node.id]
        if others and all(self._knows(world, other, node.id) for other in others):
            raise self.violated(world, job, f"a guest on {node.name} computes, which its witnesses know to be revoked")

    def _may_not_take_on(self, world: JobsWorld, node: JobNode, job: bytes) -> bool:
        return job in world.specs and self._knows(world, node, world.specs[job].submitter)

    def _knows(self, world: JobsWorld, node: MembershipNode, subject: bytes) -> bool:
        """Tell whether a node has had the revocation of a subject on its disk for a while."""
        assert isinstance(node, JobNode)
        if world.revocations.get(subject) not in node.disk.revocations:
            return False
        since = self._since.setdefault((node.id, node.disk.name, subject), world.kernel.now)
        return world.kernel.now - since > LATE_S
