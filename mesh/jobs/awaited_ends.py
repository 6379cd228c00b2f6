"""Awaited ends: how the jobs ended after which jobs of this node's leaders come, by the word of their witnesses.

A status that says so only hints at it: any member can publish one, and could start or fail the jobs of others that way. The
places of an array are counted by statuses: a false one starts a job of it too early, and no job fails.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import inf

from membership.identity import NodeId
from mesh.consensus.effects import WitnessRecord
from mesh.consensus.leader import Leader
from mesh.consensus.participant import Participant
from mesh.jobs.job_table import JobTable
from mesh.jobs.own_status import leader_acts
from mesh.jobs.vouching import Vouching
from mesh.model.record import OutcomeKind
from mesh.model.spec import format_job
from mesh.util.task_set import TaskSet

AGAIN_S = 5.0  # after no witness has confirmed an end (own choice)

log = logging.getLogger(__name__)


def may_have_ended(leaders: Iterable[Leader], job_table: JobTable) -> dict[bytes, NodeId]:
    """Return the jobs that may be over after which jobs of these leaders come, each with the submitter of one that waits for it.

    The table counts the places of the arrays whose limit these leaders keep.
    """
    leading = [leader for leader in leaders if not leader.witness.finished]
    job_table.await_arrays(
        {leader.spec.array.array for leader in leading if leader.spec.array and leader.spec.array.limit}
    )
    waiting = [leader.spec for leader in leading if leader.spec.after and leader_acts(leader)]
    return {job: spec.submitter for spec in waiting for job in spec.after if job_table.may_be_over(job)}


def stated_end(records: Collection[WitnessRecord]) -> OutcomeKind | None:
    """Return how a job has ended, if most of these witnesses state that it has and how; None otherwise."""
    ends = Counter(record.record.outcome.kind for record in records if record.final and record.record.outcome)
    kind, count = ends.most_common(1)[0] if ends else (None, 0)
    return kind if 2 * count > len(records) else None


class AwaitedEnds:
    """`learned` is called when an end is known."""

    def __init__(
        self, participant: Participant, job_table: JobTable, vouching: Vouching, learned: Callable[[], None]
    ) -> None:
        self._participant, self._job_table, self._vouching = participant, job_table, vouching
        self._learned = learned
        self._not_before: dict[bytes, float] = {}
        self._tasks = TaskSet(log)

    def look(self) -> None:
        """Ask about the awaited jobs that may be over. Call it now and then."""
        after = may_have_ended(self._participant.leaders.values(), self._job_table)
        now = time.monotonic()
        self._not_before = {job: self._not_before.get(job, 0.0) for job in after}
        for job, submitter in after.items():
            if now >= self._not_before[job]:
                self._not_before[job] = inf  # until it has been asked
                self._tasks.start(self._ask(job, submitter), f"ask for the end of {format_job(job)[:8]}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask(self, job: bytes, submitter: NodeId) -> None:
        """Ask the witnesses of a job; the submitter of the one that waits knows its description, too."""
        try:
            spec = await self._vouching.describe(job, submitter)
            records = await self._vouching.words(job)
        finally:
            self._not_before[job] = time.monotonic() + AGAIN_S
        kind = stated_end(records)
        if spec is not None and kind is not None:
            self._job_table.end(job, kind, spec.array)
            self._learned()
