"""Archive: finished jobs that are on disk only, and return to memory when somebody asks for them or sends a message about them.

A witness never forgets how a job ended (invariant J5), but it need not keep the record in memory. It keeps the newest finished
jobs and those still gossiped; of the others it keeps the id, the outcome and the usage. Of one user it archives a bounded number
of bytes, the jobs that were created last: it takes on no job that may be one of those that it has deleted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from mesh.consensus.effects import WitnessRecord
from mesh.consensus.participant import OF_A_USER_BYTES, Participant
from mesh.consensus.status import ArchivedJob, JobStatus, archived, status_of
from mesh.consensus.witness import Witness
from mesh.jobs.job_table import JobTable
from mesh.jobs.status_gossip import ENDED_TOLD_S
from mesh.journal import Journal
from mesh.model.spec import JobSpec, SpecError

AT_HAND = 1000  # finished jobs in memory, 13 kB each (measured)
TAKEN_OUT_S = 3600.0  # that a job stays in memory after somebody asked for it (own choice)
MOST_FOUND = 20  # matches of a prefix: more are no use to a person


class Archive:
    """The archive of one node.

    `read_spec` opens a job's description. `restore_records` gives witness records back to the participant, `publish` puts a
    job on the job table, and `archived` is called with each job that leaves memory.
    """

    def __init__(
        self,
        journal: Journal,
        participant: Participant,
        job_table: JobTable,
        read_spec: Callable[[bytes, bytes], JobSpec],
        restore_records: Callable[[Sequence[WitnessRecord]], Awaitable[None]],
        publish: Callable[[bytes], None],
        archived: Callable[[bytes], None],
    ) -> None:
        self._journal, self._participant, self._job_table = journal, participant, job_table
        self._read_spec, self._restore_records = read_spec, restore_records
        self._publish, self._archived = publish, archived
        self._taken_out: dict[bytes, float] = {}  # monotonic time of the last request
        self._taking = asyncio.Lock()  # restoring a record twice would lose what happened in between

    async def restore(self) -> None:
        self._participant.dropped = await self._journal.dropped()
        for job in await self._journal.archived():
            self._participant.archived.add(job.job)
            self._job_table.archive(job)

    @property
    def count(self) -> int:
        return len(self._participant.archived)

    def current(self, now_unix: float) -> Iterator[bytes]:
        """Yield this witness's jobs whose status may still have to be published."""
        going: dict[bytes, bool] = {}
        for job, witness in self._participant.witnesses.items():
            outcome = witness.witness_record.record.outcome
            ended_s = now_unix - outcome.ended_unix_ms / 1000 if outcome is not None and witness.finished else 0.0
            if ended_s <= ENDED_TOLD_S or self._job_table.own(job) is None:
                yield job
            elif (place := witness.spec.array) is not None:
                if place.array not in going:
                    going[place.array] = self._job_table.goes_on(place)
                if going[place.array]:
                    yield job

    # --- out of memory

    async def archive_old(self, busy: Collection[bytes], now_unix: float) -> None:
        """Archive jobs that ended more than a day ago, except the newest and those that are `busy` here; arrays as a whole."""
        jobs = [self._summary(status) for group in self._old(busy, now_unix) for status in group]
        if jobs:
            await self._journal.archive(jobs)
        for job in jobs:
            if self._may_go(job.job, busy):  # nobody has asked for it meanwhile, or recovered it
                self._participant.archive(job.job)
                self._job_table.archive(job)
                self._archived(job.job)
        for user_key in {job.user_key for job in jobs}:
            async with self._taking:
                among = frozenset(self._participant.archived)
                until_ms, gone = await self._journal.drop_archived(user_key, among, OF_A_USER_BYTES)
                self._participant.drop(user_key, until_ms, gone)

    def _summary(self, status: JobStatus) -> ArchivedJob:
        spec = self._participant.witnesses[status.job].spec
        return msgspec.structs.replace(archived(status), user_key=spec.user_key, created_unix_ms=spec.created_unix_ms)

    def _old(self, busy: Collection[bytes], now_unix: float) -> Iterator[list[JobStatus]]:
        now = time.monotonic()
        self._taken_out = {job: at for job, at in self._taken_out.items() if now - at < TAKEN_OUT_S}
        groups: dict[bytes, list[JobStatus]] = {}
        for status in self._job_table.by_own_view(self._participant.witnesses).values():
            groups.setdefault(status.array.array if status.array is not None else status.job, []).append(status)
        over = [(_ended_unix(group), group) for group in groups.values() if all(status.outcome for status in group)]
        excess = sum(len(group) for _, group in over) - AT_HAND
        for ended_unix, group in sorted(over, key=lambda one: one[0]):
            if excess <= 0 or now_unix - ended_unix <= ENDED_TOLD_S:
                return
            if all(self._may_go(status.job, busy) for status in group):
                excess -= len(group)
                yield group

    def _may_go(self, job: bytes, busy: Collection[bytes]) -> bool:
        witness = self._participant.witnesses.get(job)
        return witness is not None and witness.finished and job not in busy and job not in self._taken_out

    # --- back to memory

    async def take_out(self, jobs: Iterable[bytes]) -> None:
        """Load those of these jobs that are archived."""
        wanted = set(jobs)
        if self._participant.archived.isdisjoint(wanted):
            return
        async with self._taking:
            records = await self._journal.archived_witness_records(wanted & self._participant.archived)
            self._taken_out |= dict.fromkeys([record.job for record in records], time.monotonic())
            await self._restore_records(records)
        for record in records:
            self._publish(record.job)

    async def find(self, text: str, whole: bool) -> None:
        """Load the jobs that `text` may mean: an id or its prefix, a name, or unless `whole` a prefix of a name."""
        await self.take_out(await self._journal.find_archived(text, whole, MOST_FOUND))

    async def ended_since(self, unix_ms: int) -> list[JobStatus]:
        """Return the status of archived jobs that ended at `unix_ms` or later, without loading them."""
        records = await self._journal.archived_witness_records_since(unix_ms)
        return await asyncio.to_thread(lambda: list(self._statuses(records)))

    def _statuses(self, records: Iterable[WitnessRecord]) -> Iterator[JobStatus]:
        for record in records:
            with suppress(SpecError):
                witness = Witness.restored(record, self._read_spec(record.job, record.spec), 0.0)
                yield status_of(record.job, witness, None, "", "", None)


def _ended_unix(group: Iterable[JobStatus]) -> float:
    return max(status.outcome.ended_unix_ms for status in group if status.outcome is not None) / 1000
