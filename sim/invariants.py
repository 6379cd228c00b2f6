"""The invariants of jobs (J1 to J8, J10 to J12), each watched by a checker of its own; docs/jobs.md has them in words.

A checker knows nothing of what causes faults. It is shown what nodes save, commit and let their guests do, and looks at every
holder of a lease whenever a node has handled something. J4 and J9 are bounds on time, which `sim.world` waits for.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from mesh.jobs.effects import Cell
from mesh.jobs.ledger import Commit, Seat
from mesh.jobs.messages import Start
from mesh.jobs.spec import job_id
from placement.ranking import rank_nodes
from sim.checkers import Violation

if TYPE_CHECKING:
    from sim.world import JobNode, World


class JobChecker:
    name = ""

    def handled(self, world: "World", job: bytes) -> None:
        """A node has handled something of this job."""

    def proposed(self, world: "World", manifest: bytes, parent: bytes | None) -> None:
        """A checkpoint was stored, and is about to be committed."""

    def committed(self, world: "World", job: bytes, commit: Commit) -> None:
        """A runner has learned that a majority holds this."""

    def saved(self, world: "World", node: "JobNode", cell: Cell) -> None:
        """A witness has this on its disk."""

    def allowed(self, world: "World", node: "JobNode", job: bytes, until: float) -> None:
        """A guest may run, until then by its node's boot clock."""

    def stepped(self, world: "World", node: "JobNode", job: bytes) -> None:
        """A guest has taken a step."""

    def placed(self, world: "World", node: "JobNode", start: Start, to: bytes) -> None:
        """A steward has chosen a host."""

    def launched(self, world: "World", node: "JobNode", job: bytes, spec: bytes) -> None:
        """A guest is about to start, of the job that these bytes describe."""

    def switched(self, world: "World", node: "JobNode") -> None:
        """The owner of this node has just pulled the switch."""

    def recovered(self, world: "World", job: bytes) -> None:
        """Its user made it go on from what was left: what was decided before does not bind any more."""

    def violated(self, world: "World", job: bytes, text: str) -> Violation:
        return Violation(f"{self.name} at {world.kernel.now:.3f} s, job {job.hex()[:8]}: {text}")


class OneLease(JobChecker):
    """J1: at most one valid lease a job, each by its holder's own clock."""

    name = "J1"

    def __init__(self) -> None:
        self.looked = 0

    def handled(self, world: "World", job: bytes) -> None:
        self.looked += 1
        holders = world.holders(job)
        if len(holders) > 1 and job not in world.recovered:
            raise self.violated(world, job, f"leases held by {[(node.name, term) for node, term in holders]}")


class OneChain(JobChecker):
    """J2, J3: every earlier committed checkpoint is an ancestor of every later one, and terms and numbers never fall."""

    name = "J2"

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        self._last: dict[bytes, Commit] = {}
        self.commits = 0

    def proposed(self, world: "World", manifest: bytes, parent: bytes | None) -> None:
        self._parents[manifest] = parent

    def committed(self, world: "World", job: bytes, commit: Commit) -> None:
        self.commits += 1
        last = self._last.get(job)
        self._last[job] = commit
        if last is None or last.manifest == commit.manifest:
            return
        if commit.term < last.term or commit.seq <= last.seq:
            raise self.violated(world, job, f"J3: commit {(commit.term, commit.seq)} after {(last.term, last.seq)}")
        ancestor = commit.parent
        while ancestor is not None and ancestor != last.manifest:
            ancestor = self._parents.get(ancestor)
        if ancestor is None:
            raise self.violated(world, job, f"checkpoint {commit.seq} of term {commit.term} forks the history")

    def recovered(self, world: "World", job: bytes) -> None:
        self._last.pop(job, None)


class OneEnd(JobChecker):
    """J5: a job ends once; J6: once a majority holds its end, nobody is given its lease again."""

    name = "J5"

    def __init__(self) -> None:
        self._outcomes: dict[bytes, object] = {}
        self._told: dict[tuple[bytes, int, int], set[Seat]] = defaultdict(set)
        self._over: set[bytes] = set()

    def saved(self, world: "World", node: "JobNode", cell: Cell) -> None:
        outcome = cell.ledger.outcome
        if outcome is None:
            return
        # Accepted is not decided: another may take its place until one term has a majority.
        seats = self._told[cell.job, cell.config.number, cell.accepted_term]
        seats.add(Seat(node.id, cell.disk))
        if not cell.final and not cell.config.quorum(seats):
            return
        self._over.add(cell.job)
        known = self._outcomes.setdefault(cell.job, outcome)
        if known != outcome:
            raise self.violated(world, cell.job, f"two ends: {known} and {outcome}")

    def allowed(self, world: "World", node: "JobNode", job: bytes, until: float) -> None:
        if job in self._over and until > node.boot():
            raise self.violated(world, job, f"J6: {node.name} was given a lease after the job's end was committed")

    def recovered(self, world: "World", job: bytes) -> None:
        self._outcomes.pop(job, None)
        self._over.discard(job)


class SwitchWorks(JobChecker):
    """J7: when the owner has pulled the switch, no guest takes another step there, whatever the network does."""

    name = "J7"

    def switched(self, world: "World", node: "JobNode") -> None:
        for job, guest in node.guests.items():
            if not guest.ended:
                raise self.violated(world, job, f"a guest of {node.name} outlives the switch")


class AsSubmitted(JobChecker):
    """J8: what starts is what its submitter described, to the byte."""

    name = "J8"

    def __init__(self) -> None:
        self.looked = 0

    def launched(self, world: "World", node: "JobNode", job: bytes, spec: bytes) -> None:
        self.looked += 1
        if job_id(spec) != job or job not in world.lengths:
            raise self.violated(world, job, f"{node.name} starts what nobody has submitted")


class SamePlacement(JobChecker):
    """J11: whoever sees what the steward saw, in whatever order, chooses the same host."""

    name = "J11"

    def placed(self, world: "World", node: "JobNode", start: Start, to: bytes) -> None:
        steward = node.participant.stewards[start.job]
        assert steward.view is not None
        request = steward.request(start.ledger, node.instant)
        offers = list(steward.view.offers)
        world.streams.get("world", "J11").shuffle(offers)
        open_to = rank_nodes(request, offers).first(1, steward.declined)
        if [candidate.node for candidate in open_to] != [to]:
            raise self.violated(world, start.job, f"{node.name} chose a host that nobody else would have")


class StepsInLease(JobChecker):
    """J10: no guest takes a step outside its runner's lease, by that node's boot clock, asleep or not."""

    name = "J10"

    def __init__(self) -> None:
        self.steps = 0

    def stepped(self, world: "World", node: "JobNode", job: bytes) -> None:
        self.steps += 1
        runner, member = node.participant.runners.get(job), node.participant.members.get(job)
        if member is not None:
            inside = node.boot() < member.until or member.spec.on_partition != "freeze"
        else:
            inside = runner is not None and (runner.holds_lease(node.boot()) or runner.spec.on_partition != "freeze")
        if not inside:
            raise self.violated(world, job, f"a step outside the lease on {node.name}")


class NoDuplicates(JobChecker):
    """J12: while somebody holds the lease under a higher term, nobody takes steps under a lower one (under `freeze`)."""

    name = "J12"

    def stepped(self, world: "World", node: "JobNode", job: bytes) -> None:
        host = node.participant.runners.get(job) or node.participant.members.get(job)
        if host is None or host.spec.on_partition != "freeze" or job in world.recovered:
            return
        newer = [holder.name for holder, term in world.holders(job) if term > host.term]
        if newer:
            raise self.violated(world, job, f"{node.name} computes what {newer[0]} computes")


def all_job_checkers() -> list[JobChecker]:
    return [
        OneLease(),
        OneChain(),
        OneEnd(),
        SwitchWorks(),
        AsSubmitted(),
        SamePlacement(),
        StepsInLease(),
        NoDuplicates(),
    ]
