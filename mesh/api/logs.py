"""A job's output over all its attempts: from the node where each ran, else from a witness's copy, its result or checkpoint."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ckptstore.errors import StoreError
from mesh.api.errors import ExitCode, MeshError
from mesh.api.peer import PeerError
from mesh.jobs.ledger import Attempt
from mesh.jobs.status import JobStatus

if TYPE_CHECKING:
    from mesh.api.jobdesk import JobDesk
    from mesh.daemon import Daemon

TAIL_POLL_S = 0.2


class LogReader:
    def __init__(self, daemon: "Daemon", desk: "JobDesk") -> None:
        self._daemon, self._desk = daemon, desk
        self._news = WeakValueDictionary[bytes, asyncio.Event]()  # of the jobs that somebody follows
        daemon.jobs.board.changed = self._wake

    def _wake(self, job: bytes) -> None:
        news = self._news.pop(job, None)
        if news is not None:
            news.set()

    async def _pause(self, job: bytes) -> None:
        """Until more may have been printed, or there is news of the job."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TAIL_POLL_S):
                await self._news.setdefault(job, asyncio.Event()).wait()

    async def follow_log(self, text: str, follow: bool, only: int | None = None) -> AsyncGenerator[bytes, None]:
        """The job's output over all its attempts, or of one; with `follow`, until that ends. MeshError if there is none yet."""
        found = self._desk.find_job(text)
        job, known = found.job, {attempt.number: attempt for attempt in await self._desk.attempts(found)}
        if only is not None and only not in known:
            raise MeshError(
                f"job {text!r} has had no attempt {only} so far: `mesh describe` lists them", ExitCode.NOT_FOUND
            )
        given: dict[int, int] = {}
        told: set[int] = set()  # ended attempts, told to their last byte
        while True:
            status = self._desk.statuses().get(job)
            if status is None:
                return
            known |= {attempt.number: attempt for attempt in status.attempts}
            for attempt in known.values() if only is None else [known[only]]:
                if attempt.number in told:
                    continue
                if attempt.reason or status.outcome is not None:
                    told.add(attempt.number)
                async for piece in self._attempt_log(status, attempt, given.get(attempt.number, 0), follow):
                    given[attempt.number] = given.get(attempt.number, 0) + len(piece)
                    yield piece
            if not follow or status.outcome is not None or only in told:
                return
            await self._pause(job)

    async def _attempt_log(
        self, status: JobStatus, attempt: Attempt, offset: int, follow: bool
    ) -> AsyncIterator[bytes]:
        """From `offset`: the whole log where the attempt ran, if that can be reached, else what was kept of it."""
        runs = status.outcome is None and not attempt.reason
        given, reachable = offset, self._reachable()
        sources = [attempt.node] if attempt.node in reachable else []
        if not sources or not runs:
            sources += [node for node in status.witnesses if node in reachable]
        for source in sources:
            async for piece in self._from(source, status.job, attempt.number, given, follow and runs):
                given += len(piece)
                yield piece
            if given > offset:
                break
        if given == 0 and not runs:
            async for piece in self._kept_log(status, attempt.number):
                yield piece

    async def _from(self, node: bytes, job: bytes, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """What a node has of an attempt's log: the log itself, or a witness's copy."""
        if node == self._daemon.me:
            async for piece in self.tail(job, number, offset, follow):
                yield piece
            return
        path = f"/v1/jobs/{job.hex()}/log/{number}?offset={offset}&follow={int(follow)}"
        with suppress(PeerError):
            async with self._daemon.peers.stream(node, "GET", path, b"") as response:
                async for piece in response.content.iter_any():
                    yield piece

    def _reachable(self) -> set[bytes]:
        return {member.node_id for member in self._daemon.membership.members() if member.present}

    async def _kept_log(self, status: JobStatus, number: int) -> AsyncIterator[bytes]:
        """The end of an attempt's log, from the result or the last checkpoint."""
        kept = status.outcome if status.outcome is not None and status.outcome.manifest else status.commit
        if kept is None or kept.manifest is None:
            return
        try:
            vault = await self._desk.bring(status, kept.manifest, kept.holders)
            data = await asyncio.to_thread(
                lambda: b"".join(self._daemon.store.read_file(kept.manifest, f"log/{number:03d}.txt", vault))  # type: ignore[arg-type]
            )
        except (MeshError, StoreError):
            return
        if data:
            yield data

    async def tail(self, job: bytes, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """What an attempt here has printed, from `offset`; with `follow`, until it has ended."""
        path = self._daemon.jobs.logs.path(job, number)
        if not path.exists():
            copy = await asyncio.to_thread(self._daemon.jobs.logs.read_copy, job, number, offset)
            if copy:
                yield copy
            return
        while True:
            attempt = self._daemon.jobs.attempts.get(job)
            ended = attempt is None or attempt.number != number
            with suppress(FileNotFoundError):
                while data := await asyncio.to_thread(_read_from, path, offset):
                    offset += len(data)
                    yield data
            if ended or not follow:
                return
            await self._pause(job)


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(1 << 20)
