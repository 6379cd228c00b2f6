"""Jobs that have long been over: on disk, out of memory, and taken out again when somebody names one or says anything of it.

A witness knows for ever how a job ended (invariant J5), but need not have all of that at hand: of those that are over it keeps
the newest in memory, and all that the mesh is still told of. Of the others there is the id, how they ended, and what they used.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from mesh.chores import Chores
from mesh.jobs.board import Board
from mesh.jobs.effects import Cell
from mesh.jobs.herald import ENDED_TOLD_S
from mesh.jobs.journal import Journal
from mesh.jobs.participant import Participant
from mesh.jobs.spec import JobSpec, SpecError, format_job
from mesh.jobs.status import JobStatus, past_of, status_of
from mesh.jobs.witness import Witness

AT_HAND = 1000  # jobs that are over and in memory, 13 kB each (own measurement)
TAKEN_OUT_S = 3600.0  # for which one stays in memory that somebody has asked for; ours
MOST_FOUND = 20  # that begin alike: nobody means so many; ours

log = logging.getLogger(__name__)


class Past:
    """`read_spec` opens a job's description; `take_up` gives the parts of these cells back to the participant, `show` a job to
    the board; `left` hears of each job that is put away."""

    def __init__(
        self,
        journal: Journal,
        participant: Participant,
        board: Board,
        read_spec: Callable[[bytes, bytes], JobSpec],
        take_up: Callable[[Sequence[Cell]], Awaitable[None]],
        show: Callable[[bytes], None],
        left: Callable[[bytes], None],
    ) -> None:
        self._journal, self._participant, self._board = journal, participant, board
        self._read_spec, self._take_up, self._show, self._left = read_spec, take_up, show, left
        self._taken_out: dict[bytes, float] = {}  # when last
        self._taking = asyncio.Lock()  # none is taken out twice, which would lose what happened in between
        self._chores = Chores(log)

    async def restore(self) -> None:
        for past in await self._journal.past():
            self._participant.away.add(past.job)
            self._board.put_away(past)

    async def close(self) -> None:
        await self._chores.close()

    @property
    def count(self) -> int:
        """How many are put away."""
        return len(self._participant.away)

    def present(self, now_unix: float) -> Iterator[bytes]:
        """The jobs of this witness of which there may be something to tell."""
        for job, witness in self._participant.witnesses.items():
            outcome = witness.cell.ledger.outcome
            ended_s = now_unix - outcome.ended_unix_ms / 1000 if outcome is not None and witness.finished else 0.0
            if ended_s <= ENDED_TOLD_S or self._board.own(job) is None:
                yield job

    # --- away

    async def put_away(self, busy: Collection[bytes], now_unix: float) -> None:
        """Those that have been over for a day, but for the newest; an array as a whole. With those that are `busy` something
        goes on here."""
        past = [past_of(status) for group in self._old(busy, now_unix) for status in group]
        if past:
            await self._journal.put_away(past)
        for one in past:
            if one.job not in self._taken_out:  # nobody has asked for it meanwhile
                self._participant.put_away(one.job)
                self._board.put_away(one)
                self._left(one.job)

    def _old(self, busy: Collection[bytes], now_unix: float) -> Iterator[list[JobStatus]]:
        now = time.monotonic()
        self._taken_out = {job: at for job, at in self._taken_out.items() if now - at < TAKEN_OUT_S}
        groups: dict[bytes, list[JobStatus]] = {}
        for status in self._board.all().values():
            groups.setdefault(status.array.array if status.array is not None else status.job, []).append(status)
        over = [(_ended(group), group) for group in groups.values() if all(status.outcome for status in group)]
        more = sum(len(group) for _, group in over) - AT_HAND
        for ended_unix, group in sorted(over, key=lambda one: one[0]):
            if more <= 0 or now_unix - ended_unix <= ENDED_TOLD_S:
                return
            if all(self._may_go(status.job, busy) for status in group):
                more -= len(group)
                yield group

    def _may_go(self, job: bytes, busy: Collection[bytes]) -> bool:
        witness = self._participant.witnesses.get(job)
        return witness is not None and witness.finished and job not in busy and job not in self._taken_out

    # --- out again

    async def take_out(self, jobs: Iterable[bytes]) -> None:
        """Have those of them in memory again that are away."""
        wanted = set(jobs)
        if self._participant.away.isdisjoint(wanted):
            return
        async with self._taking:
            cells = await self._journal.past_cells(wanted & self._participant.away)
            self._taken_out |= dict.fromkeys([cell.job for cell in cells], time.monotonic())
            await self._take_up(cells)
        for cell in cells:
            self._show(cell.job)

    async def find(self, text: str, whole: bool) -> None:
        """The same with those that `text` may mean: an id, or its beginning, or a name, or, if that need not be `whole`, the
        beginning of one."""
        await self.take_out(await self._journal.past_like(text, whole, MOST_FOUND))

    async def ended_since(self, unix_ms: int) -> list[JobStatus]:
        """All that are put away and were not over before then, and stay where they are."""
        cells = await self._journal.past_cells_since(unix_ms)
        return await asyncio.to_thread(lambda: list(self._statuses(cells)))

    def _statuses(self, cells: Iterable[Cell]) -> Iterator[JobStatus]:
        for cell in cells:
            with suppress(SpecError):
                witness = Witness.restored(cell, self._read_spec(cell.job, cell.spec), 0.0)
                yield status_of(cell.job, witness, None, "", "", None)

    def at_hand(self, job: bytes, then: Callable[[], None]) -> None:
        """Do this with the job in memory: now, or soon."""
        if job in self._participant.away:
            self._chores.start(self._then(job, then), f"take out {format_job(job)[:8]}")
        else:
            then()

    async def _then(self, job: bytes, then: Callable[[], None]) -> None:
        await self.take_out((job,))
        then()


def _ended(group: Iterable[JobStatus]) -> float:
    """When the last of them was over, in Unix time."""
    return max(status.outcome.ended_unix_ms for status in group if status.outcome is not None) / 1000
