"""Checkers of the invariants of jobs (J2, J3, J7, J8, J11, J13 to J15); docs/explanation/job-invariants.md explains them.

A checker knows nothing of the injected faults. It sees what nodes save and commit and what their guests do. J4 and J9 are bounds
on time: the run in `sim.protocol.jobs` waits for them itself. `lease_checkers.py` has J1, J5, J6, J10 and J12. Each checker
names the removed rules that it detects in tests/sim/test_jobs.py.
"""

from collections import defaultdict

from membership.envelope import OVERHEAD
from membership.identity import ID_BYTES
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.messages import Start
from mesh.model.record import Commit, Config, JobRecord, Voter
from mesh.model.spec import job_id, waiting_place
from placement.ranking import rank_nodes
from sim.protocol.checkpoint_checkers import all_checkpoint_checkers
from sim.protocol.guest_checkers import all_guest_checkers
from sim.protocol.jobs import LIE, JobChecker, JobNode, JobsWorld, decides
from sim.protocol.lease_checkers import all_lease_checkers
from sim.protocol.queue_checkers import all_queue_checkers
from sim.protocol.revocation_checkers import RevokedNodes


class OneChain(JobChecker):
    """J2 and J3: committed checkpoints form one chain, and terms and sequence numbers never fall. The chain may fork only where
    a record says that a checkpoint is abandoned.

    Found by: witnesses that accept lower terms; promises sent before they are on disk.
    """

    name = "J2"

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}
        self._last: dict[bytes, Commit] = {}

    def proposed(self, world: JobsWorld, manifest: bytes, parent: bytes | None) -> None:
        self._parents[manifest] = parent

    def committed(self, world: JobsWorld, job: bytes, commit: Commit) -> None:
        last = self._last.get(job)
        if last is not None and self._descends(last, commit.manifest):
            return  # late word of a commit that others have built on
        self._last[job] = commit
        if last is None:
            return
        if commit.term < last.term or commit.seq <= last.seq:
            raise self.violated(world, job, f"J3: commit {(commit.term, commit.seq)} after {(last.term, last.seq)}")
        if not self._descends(commit, last.manifest) and last.manifest not in world.given_up:
            raise self.violated(world, job, f"checkpoint {commit.seq} of term {commit.term} forks the history")

    def _descends(self, commit: Commit, manifest: bytes) -> bool:
        ancestor: bytes | None = commit.manifest
        while ancestor is not None and ancestor != manifest:
            ancestor = self._parents.get(ancestor)
        return ancestor is not None

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._last.pop(job, None)


class GroupOrder(JobChecker):
    """J15: a witness never goes back to an older group.

    Found by: witnesses that accept stale groups.
    """

    name = "J15"

    def __init__(self) -> None:
        self._orders: dict[tuple[bytes, bytes, bytes], tuple[int, int, bool]] = {}

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        config = witness_record.config
        voter = (witness_record.job, node.id, witness_record.disk)
        order = (config.term, config.number, not config.previous)
        if order < self._orders.get(voter, order):
            before = self._orders[voter]
            raise self.violated(world, witness_record.job, f"{node.name} went from group {before} back to {order}")
        self._orders[voter] = order


class OneGroup(JobChecker):
    """J15: the witness groups that most of their members have on disk form one chain: each majority of one meets each majority of
    the one before, and none decides again after a later one.

    Found by: changes of the group without a joint round.
    """

    name = "group"

    def __init__(self) -> None:
        self._held: dict[bytes, dict[Voter, Config]] = defaultdict(dict)
        self._decided: dict[bytes, list[Config]] = defaultdict(list)

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, config = witness_record.job, witness_record.config
        held, decided = self._held[job], self._decided[job]
        voter = Voter(node.id, witness_record.disk)
        if held.get(voter) == config:
            return
        held[voter] = config
        if (
            config in decided
            or job in world.recovered
            or not decides(config, [one for one in held if held[one] == config])
        ):
            return
        if decided and (config.term, config.number) < (decided[-1].term, decided[-1].number):
            raise self.violated(world, job, f"group {config.number} decides after group {decided[-1].number}")
        if decided and not _meet(decided[-1], config):
            raise self.violated(world, job, f"group {config.number} decides without group {decided[-1].number}")
        decided.append(config)


def _meet(one: Config, other: Config) -> bool:
    """Tell whether each majority of one group shares a voter with each majority of the other."""
    return any(
        len(part) // 2 + 1 + len(against) // 2 + 1 > len(part | against)
        for part in (set(one.members), set(one.previous))
        for against in (set(other.members), set(other.previous))
        if part and against
    )


class HonestEnd(JobChecker):
    """J14: neither one witness nor any other member can end a job, or change the record or the group of one that has ended.

    Found by: witnesses that believe one of them, or any record under an order to recover the job.
    """

    name = "J14"

    def __init__(self) -> None:
        self._ended: dict[bytes, JobRecord] = {}
        self._groups: dict[tuple[bytes, bytes], object] = {}  # by job and disk: that of an old copy has a new name

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, record = witness_record.job, witness_record.record
        if record.outcome is not None and record.outcome.detail.startswith(LIE):
            raise self.violated(world, job, f"{node.name} believed the {record.outcome.detail}")
        if witness_record.final and self._ended.setdefault(job, record) != record:
            raise self.violated(world, job, f"{node.name} has another record of its end than others")
        group = (witness_record.config.members, witness_record.config.previous)
        if witness_record.final and self._groups.setdefault((job, witness_record.disk), group) != group:
            raise self.violated(world, job, f"{node.name} takes up another group after its end")

    def recovered(self, world: JobsWorld, job: bytes) -> None:
        self._ended.pop(job, None)
        self._groups = {key: group for key, group in self._groups.items() if key[0] != job}


class PlacedLease(JobChecker):
    """J13: a witness accepts a lease only of the node to which a leader of the job has given that term, and that its user lets
    run it. No guest starts on another node.

    Found by: witnesses that accept terms, leases or groups from any member, or a lease from any witness.
    """

    name = "J13"

    def __init__(self) -> None:
        self._placed: set[tuple[bytes, int, bytes]] = set()

    def placed(self, world: JobsWorld, node: JobNode, start: Start, to: bytes) -> None:
        self._placed.add((start.job, start.term, to))

    def saved(self, world: JobsWorld, node: JobNode, witness_record: WitnessRecord) -> None:
        job, holder, term = witness_record.job, witness_record.holder, witness_record.promised
        if holder is not None and (job, term, holder) not in self._placed:
            raise self.violated(
                world, job, f"{node.name} accepts a lease of term {term} that no leader gave its holder"
            )
        if holder is not None and holder in world.specs[job].not_on:
            raise self.violated(world, job, f"{node.name} accepts the lease of a node that the job's user excludes")

    def launched(self, world: JobsWorld, node: JobNode, job: bytes, spec: bytes) -> None:
        if node.id in world.specs[job].not_on:
            raise self.violated(world, job, f"a guest starts on {node.name}, which the job's user excludes")


class KillSwitch(JobChecker):
    """J7: after the owner pulls the kill switch, no guest runs on that node, whatever the network does.

    Found by: a kill switch that waits for the lease.
    """

    name = "J7"

    def switched(self, world: JobsWorld, node: JobNode) -> None:
        for job, guest in node.guests.items():
            if not guest.ended:
                raise self.violated(world, job, f"a guest on {node.name} survived the kill switch")


class SignedSpec(JobChecker):
    """J8: a guest starts only from the exact bytes that its submitter signed.

    Found by: nodes that accept a forged job description.
    """

    name = "J8"

    def launched(self, world: JobsWorld, node: JobNode, job: bytes, spec: bytes) -> None:
        stated, signer = world.specs.get(job), spec[1 : 1 + ID_BYTES]
        if stated is None or job_id(spec[OVERHEAD:]) != job or signer != stated.submitter:
            raise self.violated(world, job, f"{node.name} starts a job that nobody submitted")


class SamePlacement(JobChecker):
    """J11: every node with the leader's view, in any order, chooses the same host.

    Found by: a leader that ranks hosts for another attempt.
    """

    name = "J11"

    def placed(self, world: JobsWorld, node: JobNode, start: Start, to: bytes) -> None:
        leader = node.participant.leaders[start.job]
        assert leader.view is not None
        request = leader.request(start.record, node.instant)
        offers = list(leader.view.offers)
        if leader.view.queue is not None:
            offers = leader.view.queue.left_for(waiting_place(leader.spec, request), offers)
        world.streams.get("world", "J11").shuffle(offers)
        open_to = rank_nodes(request, offers).first(1, leader.declined)
        if [candidate.node for candidate in open_to] != [to]:
            raise self.violated(world, start.job, f"{node.name} chose another host than the ranking of its view gives")


def all_job_checkers() -> list[JobChecker]:
    """Return every checker of a world with jobs."""
    return [
        OneChain(),
        GroupOrder(),
        OneGroup(),
        HonestEnd(),
        PlacedLease(),
        KillSwitch(),
        SignedSpec(),
        SamePlacement(),
        *all_lease_checkers(),
        *all_checkpoint_checkers(),
        *all_guest_checkers(),
        RevokedNodes(),
        *all_queue_checkers(),
    ]
