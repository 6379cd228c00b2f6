"""Checkers of leases and ends from the outside: J1, J5, J6, J10 and J12 of docs/explanation/job-invariants.md.

They share no code with the rules that they check and ask no core what it believes. They see when messages leave, what the disk
of a witness holds as it accepts one, and at which real time guests take steps under which term.
"""

from collections import defaultdict

import msgspec

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import Accept, Accepted, AnyMessage, Promised
from mesh.model.record import Config, Outcome, Voter
from sim.protocol.jobs import JobChecker, JobNode, JobsWorld, decides

HELD = 0.9  # of a lease's length, counted by its holder from sending
DRIFT = 0.02  # of a member's clock against its runner's, at most


class Round(msgspec.Struct):
    """One request of a runner to its witnesses: until when it extends the lease, and the voters that have accepted it."""

    until: float
    config: Config
    accepted: set[Voter]


class Lease(msgspec.Struct):
    """The lease of one attempt, as a majority of disks has accepted it, in kernel time. `life` is the run of its holder."""

    term: int
    owner: bytes
    node: JobNode
    life: int
    rounds: dict[int, Round]
    until: float = 0.0
    returned: bool = False

    def runs(self, now: float) -> bool:
        return now < self.until and not self.returned and self.node.up and self.node.life == self.life


class LeaseChecker(JobChecker):
    """Keeps account of the leases that majorities of disks have accepted."""

    def __init__(self) -> None:
        self.leases: dict[bytes, dict[tuple[int, bytes], Lease]] = defaultdict(dict)

    def sent(self, world: JobsWorld, node: JobNode, to: bytes, message: AnyMessage) -> None:
        match message:
            case Accept() if message.holder == node.id:
                self._asked(world, node, message)
            case Accept():
                for lease in self.leases[message.job].values():
                    if lease.node is node and lease.term == message.term:
                        lease.returned = True
            case Accepted():
                self._accepted(world, node, to, message)

    def _asked(self, world: JobsWorld, node: JobNode, message: Accept) -> None:
        leases, key = self.leases[message.job], (message.term, message.owner)
        if key not in leases:
            leases[key] = Lease(message.term, message.owner, node, node.life, {})
        if message.round not in leases[key].rounds:
            until = world.kernel.now + HELD * world.specs[message.job].lease_s / node.rate
            leases[key].rounds[message.round] = Round(until if message.renews else 0.0, message.config, set())

    def _accepted(self, world: JobsWorld, node: JobNode, to: bytes, message: Accepted) -> None:
        known = node.disk.witness_records.get(message.job)
        if known is None or known.holder != to:
            return
        lease = self.leases[message.job].get((message.term, known.owner))
        if lease is None or lease.node.id != to or message.round not in lease.rounds:
            return
        asked = lease.rounds[message.round]
        asked.accepted.add(Voter(node.id, message.disk))
        if asked.until > lease.until and decides(asked.config, asked.accepted):
            lease.until = asked.until
            self.granted(world, message.job, lease)

    def granted(self, world: JobsWorld, job: bytes, lease: Lease) -> None:
        """Called when a majority of disks has accepted a lease for a longer time."""


class OneLease(LeaseChecker):
    """J1: no two leases of a job run at the same time, each as long as its holder may count it.

    Found by: witnesses that ignore leases or forget them at a restart.
    """

    name = "J1"

    def granted(self, world: JobsWorld, job: bytes, lease: Lease) -> None:
        now = world.kernel.now
        both = [other for other in self.leases[job].values() if other is not lease and other.runs(now)]
        if both and lease.runs(now) and job not in world.recovered:
            texts = [f"{one.node.name} of term {one.term}" for one in (lease, *both)]
            raise self.violated(world, job, f"several leases run: {', '.join(texts)}")


class StepsInLease(LeaseChecker):
    """J10: a guest takes no step later than its lease, as a majority of disks has accepted it, lasts by the holder's clock.

    Found by: guests that nothing stops at the end of their lease.
    """

    name = "J10"

    def stepped(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        spec, guest = world.specs[job], node.guests[job]
        if spec.on_partition != "freeze" or node.may_be_behind(job):
            return
        until = max((lease.until for lease in self.leases[job].values() if lease.term == guest.term), default=0.0)
        if world.kernel.now > until + DRIFT * spec.lease_s * guest.gang_member + 1e-6:
            raise self.violated(
                world, job, f"a guest of term {guest.term} on {node.name} took a step outside its lease"
            )


class NoDuplicates(LeaseChecker):
    """J12: under `freeze`, no guest takes a step once a majority of disks has accepted a lease of a higher term, and only one
    guest of a term is not a further member of a gang.

    Found by: members that count their lease from the answer.
    """

    name = "J12"

    def __init__(self) -> None:
        super().__init__()
        self._newest: dict[bytes, int] = defaultdict(int)
        self._runners: dict[tuple[bytes, int], tuple[JobNode, int]] = {}

    def granted(self, world: JobsWorld, job: bytes, lease: Lease) -> None:
        self._newest[job] = max(self._newest[job], lease.term)

    def stepped(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        guest = node.guests[job]
        if world.specs[job].on_partition != "freeze" or job in world.recovered:
            return
        if guest.term < self._newest[job] and not node.may_be_behind(job):
            raise self.violated(world, job, f"{node.name} computes in term {guest.term} after {self._newest[job]}")
        runner = (node, node.life)
        if not guest.gang_member and self._runners.setdefault((job, guest.term), runner) != runner:
            raise self.violated(world, job, f"two guests compute in term {guest.term}")


class OneEnd(JobChecker):
    """J5 and J6: a job ends once, as a majority of disks holds it in one term; a node calls no other end final, and no guest
    takes a step after it.

    Found by: an end that counts before a majority holds it; witnesses that forget ends.
    """

    name = "J5"

    def __init__(self) -> None:
        self._have: dict[tuple[bytes, Config, int, Outcome], set[Voter]] = defaultdict(set)
        self._ends: dict[bytes, Outcome] = {}

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, outcome = witness_record.job, witness_record.record.outcome
        if outcome is None:
            return
        voters = self._have[job, witness_record.config, witness_record.accepted_term, outcome]
        voters.add(Voter(node.id, witness_record.disk))
        if decides(witness_record.config, voters):
            known = self._ends.setdefault(job, outcome)
            if known != outcome:
                raise self.violated(world, job, f"the job ended twice: {known} and {outcome}")
        if witness_record.final and self._ends.get(job) != outcome and job not in world.recovered:
            raise self.violated(world, job, f"{node.name} calls an end final that no majority has: {outcome}")

    def stepped(self, world: JobsWorld, node: JobNode, job: bytes) -> None:
        bound = world.specs[job].on_partition == "freeze" and job not in world.recovered
        if job in self._ends and bound and not node.may_be_behind(job):
            raise self.violated(world, job, f"J6: a guest on {node.name} takes a step after the job's end")

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._ends.pop(job, None)


class OnDisk(JobChecker):
    """A witness says only what its disk holds: a term that it promises, a record that it accepts.

    Found by: promises sent before they are on disk.
    """

    name = "on disk"

    def sent(self, world: JobsWorld, node: JobNode, to: bytes, message: AnyMessage) -> None:
        known = node.disk.witness_records.get(message.job)
        if isinstance(message, Accepted) and (known is None or known.accepted_term < message.term):
            raise self.violated(world, message.job, f"{node.name} accepts term {message.term}, not on its disk")
        if isinstance(message, Promised) and (known is None or known.promised < message.term):
            raise self.violated(world, message.job, f"{node.name} promises term {message.term}, not on its disk")


def all_lease_checkers() -> list[JobChecker]:
    return [OneLease(), StepsInLease(), NoDuplicates(), OneEnd(), OnDisk()]
