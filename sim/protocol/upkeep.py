"""Upkeep of the store of a simulated node, by the production rules: repair, pruning and collection."""

from collections.abc import Mapping, Set

from ckptstore.replication import Settled
from mesh.checkpoints.pruning import forget_superseded
from mesh.checkpoints.repair_plan import LOST_S, Kept, RepairPlan, Shortage
from mesh.consensus.reports import Recopied, RunnerEvent
from mesh.consensus.status import JobStatus
from mesh.consensus.view import Instant
from sim.protocol.checkpoints import FetchProblem, StoringNode
from sim.protocol.status_board import StatusBoard

TURNS = 2
TIDY_S = 15.0  # more often than in production, so that a run has many
YOUNG_S = 60.0  # chunks that no manifest needs stay for as long: longer than any copy here takes


class KeepingNode(StoringNode):
    """A node that copies what lacks holders, and forgets what no job needs."""

    _board: StatusBoard
    _plan: RepairPlan
    _repairing: bool
    _turn: int
    _tidy_at: float

    @property
    def instant(self) -> Instant:
        raise NotImplementedError

    def report(self, job: bytes, event: RunnerEvent) -> None:
        raise NotImplementedError

    def begin_upkeep(self) -> None:
        self._board, self._plan = StatusBoard(self.id, self.participant, self.core), RepairPlan(self.id, LOST_S)
        self._repairing, self._turn = False, self.number
        self._tidy_at = self.boot() + self.world.streams.get(self.name, "tidy").uniform(0.0, TIDY_S)

    def keep_up_in_turn(self) -> None:
        """Publish the status of jobs, repair, and now and then tidy up; not at every call."""
        self._turn += 1
        if self._turn % TURNS == 0:
            self._keep_up()

    def _keep_up(self) -> None:
        members = self.core.swim.table.all()
        alive = frozenset(member.node for member in members if member.present)
        staying = alive - {member.node for member in members if member.draining}
        self._board.publish(alive, self.instant)
        self._board.read(self.unix())
        statuses = self._board.table.all()
        self._repair_what_is_short(statuses, staying)
        if self.boot() >= self._tidy_at:
            self._tidy_at = self.boot() + TIDY_S
            self.tidy(statuses)

    def tidy(self, statuses: Mapping[bytes, JobStatus]) -> None:
        """Forget what jobs have left here and do not need any more."""
        needed = {job: status.needed for job, status in statuses.items()}  # production asks the job's witnesses
        forget_superseded(self.store, needed, self.store.manifests())
        self.store.collect(min_age_s=YOUNG_S, now_unix=self.unix())

    def _repair_what_is_short(self, statuses: Mapping[bytes, JobStatus], staying: Set[bytes]) -> None:
        for shortage in self._plan.look(statuses.values(), staying, set(self.participant.runners), self.boot()):
            if not self._repairing:
                self._repair(shortage)
        for job, found in self._plan.unsure(statuses.values(), self.boot()):
            if not self._repairing:
                self._bring_back(job, found)

    def _bring_back(self, job: bytes, found: Kept) -> None:
        def fetched(problem: FetchProblem | None) -> None:
            self._repairing = False
            self._plan.checked(found, problem is None, self.boot())

        self._repairing = True
        others = [node for node in (*found.nodes, *self.replica_policy(job).fallback) if node != self.id]
        self.fetch(found.manifest, others, fetched)

    def _repair(self, shortage: Shortage) -> None:
        self._plan.began(shortage, self.boot())
        policy = self.replica_policy(shortage.job)
        able = [node for node in policy.fallback if node not in shortage.there]
        if not self.store.has(shortage.manifest) or not able:
            return

        def settled(copies: Settled) -> None:
            self._repairing = False
            if copies.holders:
                holders = self._plan.copied(shortage, copies.holders)
                self.report(shortage.job, Recopied(shortage.manifest, holders))

        self._repairing = True
        self.replicate(self.store.manifest(shortage.manifest), policy, able, shortage.lacking, settled)
