"""Checkers of what commits promise: work lost at a takeover, orderly departures, and `settled`.

They share no code with the rules that they check: majorities are counted here, and steps are those that guests have taken.
"""

from collections import defaultdict

from mesh.consensus.effects import WitnessRecord
from mesh.model.record import Commit, Config, Voter
from sim.protocol.jobs import JobChecker, JobNode, JobsWorld

ORDERLY = "vacated: "  # begins the reason of an attempt whose release a majority of its witnesses has accepted


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
        self._left: dict[tuple[bytes, JobNode], tuple[int, int]] = {}  # (term, step) of guests that ended at a notice
        self._released: dict[bytes, list[tuple[int, int]]] = defaultdict(list)

    def left(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
        self._left[job, node] = (term, step)

    def not_saved(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        self._left.pop((job, node), None)

    def abandoned(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        self._released.pop(job, None)

    def ended(self, world: JobsWorld, node: JobNode, job: bytes, reason: str) -> None:
        left = self._left.pop((job, node), None)
        if left is not None and reason.startswith(ORDERLY):
            self._released[job].append(left)

    def resumed(self, world: JobsWorld, node: JobNode, job: bytes, term: int, step: int) -> None:
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
    return [ResumesFromCommit(), DeparturesLoseNothing(), SettledIsHeld()]
