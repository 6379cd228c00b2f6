"""Awaited ends: how the jobs ended for which jobs of this node's leaders wait, by the word of their witnesses.

They come after those jobs, or are of one array with a limit. A status that says so only hints at an end: any member can publish
one, and could start or fail the jobs of others that way. The ends in an array are published while it goes on (`StatusGossip`),
so that a node that starts late hears of the first ones, too.

Any member can publish statuses of invented jobs. So each node's claims are a line of their own, and the lines share the slots.
"""

import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from membership.identity import NodeId
from mesh.checkpoints.witness_group import Words
from mesh.consensus.leader import Leader
from mesh.consensus.participant import Participant
from mesh.consensus.status import JobStatus
from mesh.jobs.job_table import JobTable
from mesh.jobs.own_status import leader_acts
from mesh.jobs.vouching import Vouching
from mesh.model.record import Outcome, OutcomeKind
from mesh.model.spec import format_job
from mesh.util.backoff import Backoff
from mesh.util.task_set import TaskSet

AGAIN_S, AGAIN_MAX_S = 1.0, 300.0  # after the witnesses of a job have confirmed no end (own choice)
AT_ONCE = 16  # jobs asked about (own choice)

log = logging.getLogger(__name__)


class Line(NamedTuple):
    """The jobs that one node has this one ask about: those its jobs come after, or (`in_array`) those that it says are over."""

    in_array: bool
    node: NodeId


def may_have_ended(leaders: Iterable[Leader], job_table: JobTable) -> dict[Line, dict[bytes, NodeId]]:
    """Return, by line, the jobs that may be over for which jobs of these leaders wait, each with the submitter of such a job."""
    lines = defaultdict[Line, dict[bytes, NodeId]](dict)
    waiting = [leader.spec for leader in leaders if leader_acts(leader) and not leader.witness.finished]
    for spec in waiting:
        for job in filter(job_table.may_be_over, (*spec.after, *spec.after_any)):
            lines[Line(False, spec.submitter)][job] = spec.submitter
    arrays = {spec.array.array: spec.submitter for spec in waiting if spec.array is not None and spec.array.limit}
    for array, submitter in arrays.items():
        for job in filter(job_table.may_be_over, job_table.jobs_of(array)):
            for node in job_table.told_over_by(job):
                lines[Line(True, node)][job] = submitter
    return lines


def stated_end(words: Words, views: Mapping[NodeId, JobStatus]) -> OutcomeKind | None:
    """Return how a job has ended, if most of these witnesses state that it has and how; None otherwise.

    Of a few witnesses one is enough if another node says the same, as a witness or in its view of the job: one may lie.
    """
    stated = defaultdict[OutcomeKind, set[NodeId]](set)
    for node, record in words.records.items():
        if record.final and record.record.outcome is not None:
            stated[record.record.outcome.kind].add(node)
    for kind, nodes in sorted(stated.items()):
        told = {node for node, view in views.items() if view.outcome is not None and view.outcome.kind == kind}
        if len(nodes | told) > 1 if words.few else 2 * len(nodes) > len(words.records):
            return kind
    return None


def stated_outcome(words: Words) -> Outcome | None:
    """Return the outcome of a job that most of its witnesses state; None otherwise, also where a few are all that answer."""
    stated = Counter(known.record.outcome for known in words.records.values() if known.final)
    for outcome, count in stated.items():
        if outcome is not None and not words.few and 2 * count > len(words.records):
            return outcome
    return None


def one_stated(words: Words) -> Outcome | None:
    """Return the outcome of a job that most of its witnesses state, or all of a few that answer and know one: they may lie."""
    ended = {known.record.outcome for known in words.records.values() if known.final} - {None}
    return ended.pop() if words.few and len(ended) == 1 else stated_outcome(words)


class AwaitedEnds:
    """Asks about few jobs at a time, and ever more rarely about those that are not over. `learned` is called with each end.

    Jobs that others come after go first; then the line with the fewest jobs being asked about.
    """

    def __init__(
        self, participant: Participant, job_table: JobTable, vouching: Vouching, learned: Callable[[], None]
    ) -> None:
        self._participant, self._job_table, self._vouching = participant, job_table, vouching
        self._learned = learned
        self._again = Backoff[bytes](AGAIN_S, AGAIN_MAX_S)
        self._lines: dict[Line, deque[tuple[bytes, NodeId]]] = {}  # the jobs that are due
        self._asking: dict[bytes, Line] = {}
        self._tasks = TaskSet(log)

    def look(self) -> None:
        """Ask about the awaited jobs that may be over. Call it now and then."""
        lines = may_have_ended(self._participant.leaders.values(), self._job_table)
        self._again.keep_only({job for jobs in lines.values() for job in jobs})
        self._lines = {}
        for line, jobs in lines.items():
            due = [job for job in jobs if self._is_due(job)]
            due.sort(key=self._again.failures)
            self._lines[line] = deque((job, jobs[job]) for job in due)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._lines and len(self._asking) < AT_ONCE:
            asked = Counter(self._asking.values())
            line = min(self._lines, key=lambda line: (line.in_array, asked[line], random.random()))
            if not self._lines[line]:
                del self._lines[line]
                continue
            job, submitter = self._lines[line].popleft()
            if self._is_due(job):  # another line may have had its turn
                self._asking[job] = line
                self._tasks.start(self._ask(job, submitter), f"ask for the end of {format_job(job)[:8]}")

    def _is_due(self, job: bytes) -> bool:
        return job not in self._asking and self._again.is_due(job, time.monotonic())

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask(self, job: bytes, submitter: NodeId) -> None:
        """Ask the witnesses of a job; the submitter of the one that waits knows its description, too."""
        try:
            spec = await self._vouching.describe(job, submitter)
            words = await self._vouching.words(job)
        finally:
            del self._asking[job]
            self._again.failed(job, time.monotonic())  # unless it is over: then nobody asks again
        kind = stated_end(words, self._job_table.views_by_node(job))
        if spec is not None and kind is not None:
            self._job_table.end(job, kind, spec.user, spec.array)
            self._learned()
        self._ask_next()
