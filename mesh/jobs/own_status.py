"""Own status: this node's view of each job it takes part in, for the job table and, where this node speaks for it, the gossip."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from membership.identity import NodeId, short_id
from mesh.consensus.effects import StateChanged
from mesh.consensus.leader import Leader
from mesh.consensus.participant import Participant
from mesh.consensus.status import JobStatus, status_of
from mesh.consensus.view import Instant
from mesh.jobs.attempt import Attempt
from mesh.jobs.event_log import EventLog
from mesh.jobs.job_table import OWN, JobTable
from mesh.jobs.mesh_view import MeshView, instant
from mesh.jobs.standby import StandbySync
from mesh.jobs.status_gossip import StatusGossip, speaks_for
from mesh.model.events import Kind, describe
from mesh.model.spec import format_job, waiting_place
from placement.queue import Waiting

ACTING = {"asking", "preparing", "offered", "waiting"}  # in any other state a leader's text is outdated
PENDING_EVENT_EVERY_S = 30.0  # a job that waits changes its reason often; one event now and then is enough (own choice)

log = logging.getLogger(__name__)


class OwnStatus:
    """`changed` is called when a job is over for which another may have waited."""

    def __init__(
        self,
        me: NodeId,
        participant: Participant,
        attempts: Mapping[bytes, Attempt],
        standby_sync: StandbySync,
        job_table: JobTable,
        gossip: StatusGossip,
        mesh_view: MeshView,
        event_log: EventLog,
        changed: Callable[[], None],
    ) -> None:
        self._me, self._participant, self._attempts = me, participant, attempts
        self._standby_sync, self._job_table, self._gossip = standby_sync, job_table, gossip
        self._mesh_view, self._event_log, self._changed = mesh_view, event_log, changed
        self._states: dict[bytes, tuple[str, str]] = {}
        self._noted_at: dict[bytes, float] = {}  # monotonic time of the last state event

    def state(self, job: bytes) -> tuple[str, str]:
        """Return the state of the job's leader or runner here, and its detail."""
        return self._states.get(job, ("", ""))

    def on_state(self, job: bytes, changed: StateChanged) -> None:
        """Keep a state that a core reports, and write an event of it unless the job only goes on waiting."""
        old, now = self.state(job), time.monotonic()
        if old == (changed.state, changed.detail):
            return
        self._states[job] = (changed.state, changed.detail)
        waits_on = old[0] == changed.state == "pending"
        if not waits_on or now - self._noted_at.get(job, -PENDING_EVENT_EVERY_S) >= PENDING_EVENT_EVERY_S:
            self._noted_at[job] = now
            self.note(job, "state", changed.detail, old=old[0], new=changed.state)

    def forget_state(self, job: bytes) -> None:
        self._states.pop(job, None)

    def forget(self, job: bytes) -> None:
        """Forget a job that is archived."""
        self.forget_state(job)
        self._gossip.forget(job)

    def note(self, job: bytes, kind: Kind, reason: str, **fields: Any) -> None:
        """Write an event of a job, and log it."""
        attempt = self._attempts.get(job)
        event = self._event_log.add(
            job, kind, reason, attempt=attempt.number if attempt is not None else None, **fields
        )
        log.info("job %s: %s", format_job(job)[:8], describe(event, short_id(event.target) if event.target else ""))

    def publish(self, job: bytes) -> None:
        """Bring this node's view of a job up to date, on the job table and in the gossip."""
        known = self._job_table.own(job)
        witness = self._participant.witnesses.get(job)
        over = known is not None and known.outcome is not None and (witness is None or witness.finished)
        if over and job not in self._participant.runners:
            status: JobStatus | None = known  # only the recovery of a job that forked changes an outcome
        else:
            status = self.status(job)
        overruled = known is not None and known.outcome is not None and status is not None and status.outcome is None
        if status != known:
            if self._job_table.update(OWN, job, status):
                self._changed()
            if status is None or status.outcome is not None:
                self._noted_at.pop(job, None)
            if status is None:
                self._gossip.forget(job)
        runs, acts = job in self._participant.runners, self._leader_acts(job)
        if status is not None and overruled:
            self._gossip.publish(status)  # in place of the end
        elif status is not None and speaks_for(
            status,
            self._me,
            runs,
            acts,
            self._mesh_view.last.alive,
            bool(self._job_table.told_over_by(job)),
            time.time() * 1000,
        ):
            self._gossip.publish(status)

    def status(self, job: bytes) -> JobStatus | None:
        """Return this node's view of a job; None if it takes no part in it."""
        witness, runner = self._participant.witnesses.get(job), self._participant.runners.get(job)
        if witness is None and runner is None:
            return None
        attempt, leader = self._attempts.get(job), self._participant.leaders.get(job)
        acts = runner is not None or self._leader_acts(job)
        state, detail = self.state(job) if acts else ("", "")
        waiting = queued_by(leader, instant()) if runner is None else None
        if attempt is None:
            return status_of(job, witness, runner, state, detail, None, waiting)
        warm = runner is not None and self._standby_sync.is_warm(
            job, runner.spec, runner.next_placement.standby, runner.record.commit
        )
        return status_of(
            job,
            witness,
            runner,
            state,
            attempt.preparing or detail or attempt.held or attempt.note,
            attempt.progress,
            waiting,
            attempt.heeds_notice,
            warm,
            attempt.portions,
            attempt.save_schedule.next,
            attempt.writer.saving,
        )

    def _leader_acts(self, job: bytes) -> bool:
        return leader_acts(self._participant.leaders.get(job))


def leader_acts(leader: Leader | None) -> bool:
    """Tell whether this node's leader moves the job on."""
    return leader is not None and leader.state in ACTING


def queued_by(leader: Leader | None, at: Instant) -> Waiting | None:
    """Return the place in the queue of a job that this leader keeps waiting, None for a job that is held back."""
    if leader is None or not leader_acts(leader) or leader.held_back:
        return None
    return waiting_place(leader.spec, leader.request(leader.witness.witness_record.record, at))
