"""Status of jobs in the simulated world: each node publishes its view by the real gossip, and reads those of others.

Only what repair and pruning look at is published again; the times that production publishes now and then are not.
"""

from collections import defaultdict
from collections.abc import Set
from functools import lru_cache

from membership.core import Core
from mesh.consensus.participant import Participant
from mesh.consensus.status import JobStatus, best_of, decode_status, encode_status, status_of
from mesh.jobs.own_status import ACTING
from mesh.jobs.status_gossip import TTL_S, speaks_for
from mesh.model.spec import format_job

SECTION = "jobs/"


class StatusBoard:
    """One node's view of all jobs."""

    def __init__(self, me: bytes, participant: Participant, core: Core) -> None:
        self._me, self._participant, self._core = me, participant, core
        self._own: dict[bytes, JobStatus] = {}
        self._told: dict[bytes, tuple[object, ...]] = {}

    def publish(self, alive: Set[bytes]) -> None:
        """Publish what has changed of the jobs for which this node speaks."""
        participant = self._participant
        jobs = {*participant.witnesses, *participant.runners}
        self._own = {job: status for job, status in self._own.items() if job in jobs}
        for job in sorted(jobs):
            witness, runner, leader = (
                participant.witnesses.get(job),
                participant.runners.get(job),
                participant.leaders.get(job),
            )
            acts = leader is not None and leader.state in ACTING
            if runner is not None:
                record, state, where = runner.record, runner.state, (runner.term, runner.config)
            else:
                assert witness is not None
                kept = witness.witness_record
                record, state, where = kept.record, "pending" if acts else "", (kept.accepted_term, kept.config)
            attempt = record.open_attempt
            running = attempt is not None and bool(attempt.running_unix_ms)
            over = witness is not None and witness.finished
            commits = (record.commit, record.predecessor, record.needed, record.outcome)
            told = (*commits, over, attempt is None, running, state, *where, alive)
            if self._told.get(job) == told:
                continue
            self._told[job] = told
            status = self._own[job] = status_of(job, witness, runner, state, "", None)
            if speaks_for(status, self._me, runner is not None, acts, alive):
                self._core.publish(SECTION + format_job(job), encode_status(status), TTL_S)

    def all(self, unix: float) -> dict[bytes, JobStatus]:
        """Return the most advanced view of each job."""
        views: dict[bytes, list[JobStatus]] = defaultdict(list)
        for job, status in self._own.items():
            views[job].append(status)
        for record in self._core.records.section(SECTION, unix):
            told = _decoded(record.body)
            if told is not None and record.node != self._me:
                views[told.job].append(told)
        return {job: best_of(told) for job, told in views.items()}


_decoded = lru_cache(maxsize=4096)(decode_status)
