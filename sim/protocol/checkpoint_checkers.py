"""Checkers of commits: that they can be restored, work lost at a takeover, orderly departures, and `settled`.

They share no code with the rules that they check: majorities are counted here, and steps are those that guests have taken.
"""

from collections import defaultdict

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.participant import Participant
from mesh.model.record import Commit, Config, Voter
from sim.protocol.jobs import JobChecker, JobNode, JobsWorld

ORDERLY = "vacated: "  # begins the reason of an attempt whose release a majority of its witnesses has accepted
LOST = (
    "no node has it whole"  # in the reason of an attempt that gave up a checkpoint, and that does not wait for any node
)


class RestorableElsewhere(JobChecker):
    """The last commit of a job is whole on a node other than the one that made it, unless as many disks of its holders were
    lost as a record says that it has. It is given up as lost only if none of them has it.

    Found by: copies that count before the peer has them; pruning that keeps only what is newest.
    """

    name = "restorable"

    def __init__(self) -> None:
        self._disks: dict[bytes, dict[bytes, bytes]] = {}  # of all nodes, when a manifest was about to be copied
        self._last: dict[bytes, Commit] = {}
        self._given_up: dict[bytes, Commit] = {}
        self._holders: dict[bytes, set[tuple[bytes, ...]]] = defaultdict(set)  # of a manifest, as records name them

    def proposed(self, world: JobsWorld, manifest: bytes, parent: bytes | None) -> None:
        self._disks[manifest] = {node.id: node.disk.name for node in world.nodes}

    def committed(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        last = self._last.get(job)
        if job not in world.recovered and (last is None or commit.seq > last.seq):
            self._last[job] = commit
            self._look(world, job, commit)

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, named = witness_record.job, witness_record.record.commit
        if named is not None:
            self._holders[named.manifest].add(named.holders)
        if witness_record.final:
            self._last.pop(job, None)
        if job in self._last:
            self._look(world, job, self._last[job])

    def ended(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        commit = self._given_up.pop(job, None) if LOST in reason else None
        if commit is not None and self._kept(world, commit.manifest) & set(commit.holders):
            raise self.violated(world, job, f"{node.name} gives up commit {commit.seq}, which a holder has")

    def abandoned(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        self._last.pop(job, None)
        self._given_up[job] = commit

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._last.pop(job, None)

    def _look(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        then = self._disks[commit.manifest]
        now = {node.id: node.disk.name for node in world.nodes if not node.gone}
        makers = {node.store.manifest(commit.manifest).maker for node in world.nodes if node.store.has(commit.manifest)}
        for holders in self._holders[commit.manifest]:
            # A later runner names the one that made it, if that still has it: its copy is not one of those that are looked for.
            kept = sum(now.get(node) == then[node] for node in holders if node not in makers)
            if kept and not self._kept(world, commit.manifest):
                raise self.violated(
                    world,
                    job,
                    f"commit {commit.seq} is whole on no other node; {kept} of {len(holders)} disks are there",
                )

    def _kept(self, world: JobsWorld, manifest: bytes) -> set[bytes]:
        """Return the nodes that have a checkpoint whole, without the one that made it."""
        there = [node for node in world.nodes if not node.gone and node.store.complete(manifest)]
        return {node.id for node in there if node.store.manifest(manifest).maker != node.id}


class ReplicasReturn(JobChecker):
    """Once faults have ended, the last commit of a running job is soon on as many nodes as its user asked for, besides the one
    that made it, or on all that are left. Jobs that have lost most of their witnesses, or were never accepted, are not looked at.

    Found by: nodes that repair nothing; holders that lost their disk and bring nothing back.
    """

    name = "replicas"
    within_s = 90.0  # a holder that is away, a try that just failed, and the copy

    def __init__(self) -> None:
        self._short: dict[tuple[bytes, bytes], float] = {}  # since when this commit of a job has too few copies

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, record = witness_record.job, witness_record.record
        commit, attempt = record.commit, record.attempts[-1] if record.attempts else None
        if (
            not world.healed
            or job not in world.accepted - world.lost
            or witness_record.config != world.groups.get(job)  # this witness may have missed what came after
            or commit is None
        ):
            return
        if attempt is None or attempt.reason or not attempt.running_unix_ms:
            # Others than its runner repair it by the word of statuses, and some may be false.
            self._short.pop((job, commit.manifest), None)
            return
        there = [other for other in world.nodes if not other.gone]
        copies = sum(other.store.complete(commit.manifest) for other in there)
        if copies >= min(commit.wanted + 1, len(there)):
            self._short.pop((job, commit.manifest), None)
        elif world.kernel.now - self._short.setdefault((job, commit.manifest), world.kernel.now) > self.within_s:
            raise self.violated(
                world, job, f"commit {commit.seq} is on {copies} nodes {self.within_s:g} s after faults ended"
            )


class ResumesFromCommit(JobChecker):
    """An attempt starts at least from the step of the last commit of an earlier term.

    Found by: attempts that start from scratch.
    """

    name = "lost work"

    def __init__(self) -> None:
        self._committed: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # (term, step)

    def committed(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        self._committed[job].append((commit.term, commit.step or 0))

    def resumed(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        least = max((saved for earlier, saved in self._committed[job] if earlier < term), default=0)
        if step < least:
            raise self.violated(
                world, job, f"{node.name} starts at step {step}, and step {least} was committed before term {term}"
            )

    def abandoned(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        self._committed.pop(job, None)

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._committed.pop(job, None)


class DeparturesLoseNothing(JobChecker):
    """A guest that has saved and ended at a notice, and whose release is accepted, has lost no step. Not counted: a last save
    that no other node took, and a checkpoint that was given up since.

    Found by: attempts that save nothing at a notice.
    """

    name = "departure"

    def __init__(self) -> None:
        # Guests that ended at a notice: the cores of their node, which a crash ends too, the term and the step.
        self._left: dict[tuple[bytes, JobNode], tuple[Participant, int, int]] = {}
        self._released: dict[bytes, list[tuple[int, int]]] = defaultdict(list)

    def left(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        self._left[job, node] = (node.participant, term, step)

    def not_saved(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        self._left.pop((job, node), None)

    def abandoned(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        self._released.pop(job, None)

    def ended(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        left = self._left.pop((job, node), None)
        if left is not None and left[0] is node.participant and reason.startswith(ORDERLY):
            self._released[job].append(left[1:])

    def resumed(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        self._left.pop((job, node), None)  # that attempt crashed before its release
        least = max((saved for earlier, saved in self._released[job] if earlier < term), default=0)
        if step < least:
            raise self.violated(world, job, f"{node.name} starts at step {step} after a notice at step {least}")

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._released.pop(job, None)


class SettledIsHeld(JobChecker):
    """A commit that a record calls settled is on the disks of a majority of a witness group.

    Found by: runners that call a commit settled as they propose it.
    """

    name = "settled"

    def __init__(self) -> None:
        self._voters: dict[tuple[bytes, bytes], set[Voter]] = defaultdict(set)  # of a job's manifest
        self._groups: dict[tuple[bytes, bytes], set[Config]] = defaultdict(set)  # with which it was accepted

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, record, commit = witness_record.job, witness_record.record, witness_record.record.commit
        if commit is None or job in world.recovered:
            return
        voters, groups = self._voters[job, commit.manifest], self._groups[job, commit.manifest]
        voters.add(Voter(node.id, witness_record.disk))
        groups.add(witness_record.config)
        if record.settled == commit.seq and not any(_most(group, voters) for group in groups):
            raise self.violated(
                world, job, f"{node.name} has commit {commit.seq} as settled; only {len(voters)} disks have it"
            )


def _most(group: Config, voters: set[Voter]) -> bool:
    parts = [set(part) for part in (group.members, group.previous) if part]
    return all(2 * len(part & voters) > len(part) for part in parts)


def all_checkpoint_checkers() -> list[JobChecker]:
    return [RestorableElsewhere(), ReplicasReturn(), ResumesFromCommit(), DeparturesLoseNothing(), SettledIsHeld()]
