"""Status of jobs in the simulated world: each node publishes its view by the real gossip, and reads those of others.

Only what repair, pruning and placement look at is published again; the times that production publishes now and then are not.
"""

from collections.abc import Set
from functools import lru_cache

from membership.core import Core
from membership.records import Record
from mesh.consensus.participant import Participant
from mesh.consensus.status import decode_status, encode_status, status_of
from mesh.consensus.view import Instant
from mesh.jobs.job_table import OWN, JobTable
from mesh.jobs.own_status import leader_acts, queued_by
from mesh.jobs.status_gossip import NEWS_S, TTL_S, speaks_for
from mesh.model.spec import format_job

SECTION = "jobs/"


class StatusBoard:
    """One node's view of all jobs, on the production job table."""

    def __init__(self, me: bytes, participant: Participant, core: Core) -> None:
        self._me, self._participant, self._core = me, participant, core
        self.table = JobTable()
        self._told: dict[bytes, tuple[object, ...]] = {}
        self._read: dict[tuple[bytes, str], tuple[Record, bytes | None]] = {}  # with the job that it is about

    def publish(self, alive: Set[bytes], at: Instant) -> None:
        """Publish what has changed of the jobs for which this node speaks."""
        participant = self._participant
        jobs = {*participant.witnesses, *participant.runners}
        for job in self._told.keys() - jobs:
            del self._told[job]
            self.table.update(OWN, job, None)
        for job in sorted(jobs):
            witness, runner, leader = (
                participant.witnesses.get(job),
                participant.runners.get(job),
                participant.leaders.get(job),
            )
            acts = leader_acts(leader)
            waiting = None
            if runner is not None:
                record, state, where = runner.record, runner.state, (runner.term, runner.config)
            else:
                assert witness is not None
                kept = witness.witness_record
                record, state, where = kept.record, "pending" if acts else "", (kept.accepted_term, kept.config)
                waiting = None if kept.final else queued_by(leader, at)
            attempt = record.open_attempt
            running = attempt is not None and bool(attempt.running_unix_ms)
            over = witness is not None and witness.finished
            commits = (record.commit, record.predecessor, record.needed, record.outcome)
            over_told = bool(self.table.told_over_by(job))
            late = over and record.outcome is not None and at.unix_ms - record.outcome.ended_unix_ms >= NEWS_S * 1000
            told = (*commits, over, over_told, late, attempt is None, running, waiting is None, state, *where, alive)
            if self._told.get(job) == told:
                continue
            self._told[job] = told
            status = status_of(job, witness, runner, state, "", None, waiting)
            self.table.update(OWN, job, status)
            if speaks_for(status, self._me, runner is not None, acts, alive, over_told, at.unix_ms):
                self._core.publish(SECTION + format_job(job), encode_status(status), TTL_S)

    def read(self, unix: float) -> None:
        """Take in what other nodes publish."""
        found: dict[tuple[bytes, str], Record] = {}
        for record in self._core.records.section(SECTION, unix):
            if record.node != self._me:
                found[record.node, record.section] = record
        for place in self._read.keys() - found.keys():
            self._forget(place)
        for place, record in found.items():
            known = self._read.get(place)
            if known is not None and known[0] is record:
                continue
            status = _decoded(record.body)
            if known is not None and (status is None or status.job != known[1]):
                self._forget(place)
            self._read[place] = (record, None if status is None else status.job)
            if status is not None:
                self.table.update(record.node, status.job, status)

    def _forget(self, place: tuple[bytes, str]) -> None:
        _, job = self._read.pop(place)
        if job is not None:
            self.table.update(place[0], job, None)


_decoded = lru_cache(maxsize=4096)(decode_status)
