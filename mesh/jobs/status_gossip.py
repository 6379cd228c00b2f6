"""Status gossip: publishes the status of jobs as membership sections, and puts what other nodes publish on the job table.

One node speaks for each job, and no more often than others need it.
"""

import logging
import time
from collections.abc import Callable, Set
from contextlib import suppress

import msgspec

from membership.identity import NodeId
from membership.node import MembershipNode
from membership.records import MAX_BODY_BYTES, MAX_SECTIONS
from mesh.consensus.status import JobStatus, decode_status, encode_status
from mesh.jobs.job_table import JobTable
from mesh.model.spec import format_job, parse_job

TTL_S = 3600.0
REPEAT_S = 600.0
NEWS_S = 30.0  # an end older than this is not urgent, and whoever should have told it has not
# That the end of a job is published, or while its array goes on; its witnesses know it for ever (`archive.py`).
ENDED_TOLD_S = 86_400.0
SAME_S, COMMITS_S = (
    5.0,
    0.5,
)  # between messages that change neither state nor checkpoint, or the checkpoint alone (own choice)
# Jobs that one node publishes. Of more, those that ended first are left out: others need the ends of an hour ago least.
MOST_PUBLISHED = MAX_SECTIONS * 3 // 4
WAITS_PER_S = 10  # messages of all waiting jobs that change only why they wait (own choice)
RECOVERED = "recovered/"
RECOVERY_TOLD_S = 30 * 86_400.0  # that the order to recover a job is published: longer than a cut (own choice)
FEWER_ATTEMPTS = (4, 1)  # in a status that would be too large for a section
PASSING = {"pending", "starting", "saving", "releasing"}  # states that soon become another


log = logging.getLogger(__name__)


class StatusGossip:
    """`changed` is called when a status arrives for which another job may have waited."""

    def __init__(
        self, me: NodeId, membership: MembershipNode, job_table: JobTable, changed: Callable[[], None]
    ) -> None:
        self._me, self._membership, self._job_table, self._changed = me, membership, job_table, changed
        self._published: dict[bytes, tuple[JobStatus, float]] = {}  # with the monotonic time
        self._left_out_unix_ms = 0  # jobs that ended until then are not published any more
        self._sections: dict[tuple[NodeId, str], bytes] = {}  # the job of each section

    # --- this node's own

    def publish(self, status: JobStatus) -> None:
        """Publish a status, unless the last one is recent enough; then a later call publishes it."""
        outcome = status.outcome
        ended_s = time.time() - outcome.ended_unix_ms / 1000 if outcome is not None else 0.0
        history = ended_s > ENDED_TOLD_S and not self._job_table.goes_on(status.array)
        if history or (outcome is not None and outcome.ended_unix_ms <= self._left_out_unix_ms):
            self._published.pop(status.job, None)
            return
        before, at = self._published.get(status.job, (None, 0.0))
        now = time.monotonic()
        if before is not None and now - at < (REPEAT_S if before == status else self._may_wait_s(before, status)):
            return
        body = _fitting(status)
        if body is None:
            self._published[status.job] = (status, now)
            log.warning("the status of job %s is too large to be published", format_job(status.job)[:8])
            return
        urgent = outcome is not None and ended_s < NEWS_S and (before is None or before.outcome is None)
        if self._membership.publish(f"jobs/{format_job(status.job)}", body, TTL_S, urgent):
            self._published[status.job] = (status, now)
            self._leave_room()

    def _leave_room(self) -> None:
        """Let the sections of the jobs that ended first expire, so that others find room."""
        if len(self._published) > MOST_PUBLISHED:
            ended = [(one.outcome.ended_unix_ms, job) for job, (one, _) in self._published.items() if one.outcome]
            for ended_unix_ms, job in sorted(ended)[: MOST_PUBLISHED // 10]:
                self._left_out_unix_ms = max(self._left_out_unix_ms, ended_unix_ms)
                del self._published[job]

    def _may_wait_s(self, last: JobStatus, status: JobStatus) -> float:
        """Return how long the mesh can do without this status after it was told the other."""
        outdated = status.rank[1] != last.rank[1] or status.rank[3] != last.rank[3]  # for the members of its group
        if outdated or status.outcome != last.outcome or (status.state != last.state and status.state not in PASSING):
            return 0.0
        if status == msgspec.structs.replace(last, detail=status.detail) and status.waiting is not None:
            return max(SAME_S, self._job_table.waiting / WAITS_PER_S)
        return SAME_S if status.commit == last.commit else COMMITS_S

    def publish_recovery(self, job: bytes, order: bytes) -> None:
        """Publish the order of a job's user to recover it, for groups on the other side of a cut."""
        section = RECOVERED + format_job(job)
        known = self._membership.record(self._me, section)
        if (known is None or known.body != order) and len(order) <= MAX_BODY_BYTES:
            self._membership.publish(section, order, RECOVERY_TOLD_S)

    def recoveries(self) -> dict[bytes, list[bytes]]:
        """Return the orders to recover a job that nodes publish, by job."""
        found: dict[bytes, list[bytes]] = {}
        for record in self._membership.records(RECOVERED):
            with suppress(ValueError):
                found.setdefault(parse_job(record.section.removeprefix(RECOVERED)), []).append(record.body)
        return {job: sorted(set(orders)) for job, orders in found.items()}

    def forget(self, job: bytes) -> None:
        self._published.pop(job, None)

    # --- those of others

    def on_section(self, node: NodeId, section: str) -> None:
        """Take in a node's section about a job, which may be new, changed or gone."""
        record = self._membership.record(node, section)
        status = decode_status(record.body) if record is not None else None
        if status is not None and status.outcome is not None and status.outcome.is_ahead(1000 * time.time()):
            status = None
        before = self._sections.pop((node, section), None)
        if before is not None and (status is None or status.job != before):
            self._job_table.update(node, before, None)
        if status is None or node == self._me:
            return
        self._sections[node, section] = status.job
        if self._job_table.update(node, status.job, status):
            self._changed()

    def reload(self) -> None:
        """Take in every section about jobs: at the start, and when membership events were lost."""
        sources: dict[bytes, list[NodeId]] = {}
        for record in self._membership.records("jobs/"):
            self.on_section(record.node, record.section)
            job = self._sections.get((record.node, record.section))
            if job is not None:
                sources.setdefault(job, []).append(record.node)
        self._job_table.keep_only(sources)


def _fitting(status: JobStatus) -> bytes | None:
    """Return a status that fits into a section, if need be with fewer attempts; None if it does not fit.

    Records come from other nodes: a large one must not end this daemon.
    """
    shorter = (msgspec.structs.replace(status, attempts=status.attempts[-most:]) for most in FEWER_ATTEMPTS)
    bodies = map(encode_status, (status, *shorter, msgspec.structs.replace(status, attempts=(), runner=None)))
    return next((body for body in bodies if len(body) <= MAX_BODY_BYTES), None)


def speaks_for(
    status: JobStatus, me: bytes, runs: bool, acting: bool, alive: Set[bytes], over_told: bool, unix_ms: float
) -> bool:
    """Return whether this node publishes the job's status.

    The runner does, else the acting leader, else the first node of the witness group that is alive. That one may have missed
    the end: it was cut off, or its disk is an old copy. A witness that knows of the end publishes it while nobody else does.
    `runs`: the job runs here; `acting`: this node's leader acts; `over_told`: another node says that the job is over.
    """
    if runs or status.rank[3]:
        return True
    if acting or (status.outcome is None and status.runner in alive):
        return False
    if status.outcome is not None and not over_told and unix_ms - status.outcome.ended_unix_ms >= NEWS_S * 1000:
        return True
    first = next((node for node in status.witnesses if node in alive), None)
    return first in {None, me}
