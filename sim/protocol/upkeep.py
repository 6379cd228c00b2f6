"""Upkeep of a simulated node, by the production rules: repair, pruning and collection of its store, and ends of other jobs."""

from collections.abc import Mapping, Set
from functools import partial

from ckptstore.replication import Settled
from mesh.checkpoints.pruning import needed_by_all, with_superseded
from mesh.checkpoints.repair_plan import LOST_S, Kept, RepairPlan, Shortage
from mesh.checkpoints.witness_group import Words
from mesh.consensus.reports import Recopied, RunnerEvent
from mesh.consensus.status import JobStatus
from mesh.consensus.view import Instant
from mesh.jobs.awaited_ends import AGAIN_MAX_S, AGAIN_S, may_have_ended, stated_end
from mesh.util.backoff import Backoff
from sim.protocol.asking import AskingNode
from sim.protocol.checkpoints import FetchProblem
from sim.protocol.status_board import StatusBoard

TURNS = 2
TIDY_S = 15.0  # more often than in production, so that a run has many
YOUNG_S = 60.0  # chunks that no manifest needs stay for as long: longer than any copy here takes


class KeepingNode(AskingNode):
    """A node that copies what lacks holders, forgets what no job needs, and learns how the jobs ended that others come after."""

    _plan: RepairPlan
    _repairing: bool
    _turn: int
    _tidy_at: float

    @property
    def instant(self) -> Instant:
        raise NotImplementedError

    def report(self, job: bytes, event: RunnerEvent) -> None:
        raise NotImplementedError

    def observe_soon(self) -> None:
        raise NotImplementedError

    def begin_upkeep(self) -> None:
        self.board, self._plan = StatusBoard(self.id, self.participant, self.core), RepairPlan(self.id, LOST_S)
        self._again, self._asking = Backoff[bytes](AGAIN_S, AGAIN_MAX_S), set[bytes]()
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
        self.board.publish(alive, self.instant)
        self.board.read(self.unix())
        self._repair_what_is_short(self.board.table.by_own_view(self.participant.runners), staying)
        self._ask_for_ends()
        if self.boot() >= self._tidy_at:
            self._tidy_at = self.boot() + TIDY_S
            for job in with_superseded(self.board.table.views(), self.store.manifests()):
                self.words(job, partial(self._forget, job))
            self.store.collect(min_age_s=YOUNG_S, now_unix=self.unix())

    def _forget(self, job: bytes, words: Words) -> None:
        """Forget the checkpoints that a job does not need any more, as most of its witnesses say."""
        if not words.few:
            self.store.forget_old(job, needed_by_all([known.record.needed for known in words.records.values()]))

    def _ask_for_ends(self) -> None:
        lines = may_have_ended(self.participant.leaders.values(), self.board.table)
        awaited = {job: None for jobs in lines.values() for job in jobs}
        self._again.keep_only(awaited)
        for job in awaited:
            if job not in self._asking and self._again.is_due(job, self.boot()):
                self._asking.add(job)
                self.words(job, partial(self._learn_end, job))

    def _learn_end(self, job: bytes, words: Words) -> None:
        self._asking.discard(job)
        self._again.failed(job, self.boot())
        kind = stated_end(words, self.board.table.views_by_node(job))
        if kind is not None:
            self.board.table.end(job, kind, self.described(job).user, self.described(job).array)
            self.observe_soon()

    def _repair_what_is_short(self, statuses: Mapping[bytes, JobStatus], staying: Set[bytes]) -> None:
        for shortage in self._plan.look(statuses.values(), staying, set(self.participant.runners), self.boot()):
            if not self._repairing:
                self._repair(shortage)
        for job, found in self._plan.unsure(self.board.table.every_view(), self.boot()):
            if not self._repairing:
                self._bring_back(job, found)

    def _bring_back(self, job: bytes, found: Kept) -> None:
        def fetched(problem: FetchProblem | None) -> None:
            self._repairing = False
            self._plan.checked(job, found, problem is None, self.boot())

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
