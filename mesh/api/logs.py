"""A job's output over all its attempts, from wherever each one ran: live from its node, else from its last checkpoint."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.errors import StoreError
from mesh.api.errors import MeshError
from mesh.api.peer import PeerError
from mesh.jobs.status import JobStatus

if TYPE_CHECKING:
    from mesh.api.desk import Desk
    from mesh.daemon import Daemon

TAIL_POLL_S = 0.2


class LogReader:
    def __init__(self, daemon: "Daemon", desk: "Desk") -> None:
        self._daemon, self._desk = daemon, desk

    async def follow_log(self, text: str, follow: bool) -> AsyncIterator[bytes]:
        """The job's output over all its attempts; with `follow`, until it ends."""
        job = self._desk.find_job(text).job
        given: dict[int, int] = {}
        while True:
            status = self._desk.statuses().get(job)
            if status is None:
                return
            for attempt in status.attempts:
                async for piece in self._attempt_log(status, attempt.number, given.get(attempt.number, 0), follow):
                    given[attempt.number] = given.get(attempt.number, 0) + len(piece)
                    yield piece
            if not follow or status.outcome is not None:
                return
            await asyncio.sleep(TAIL_POLL_S)

    async def _attempt_log(self, status: JobStatus, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        running = self._daemon.jobs.attempts.get(status.job)
        if running is not None and running.number == number:
            async for piece in self.tail(status.job, number, offset, follow):
                yield piece
            return
        last = status.attempts[-1]
        if status.runner is not None and last.number == number and status.outcome is None:
            path = f"/v1/jobs/{status.job.hex()}/log/{number}?offset={offset}&follow={int(follow)}"
            with suppress(PeerError):
                async with self._daemon.peers.stream(status.runner, "GET", path, b"") as response:
                    async for piece in response.content.iter_any():
                        yield piece
            return
        if offset == 0 or status.outcome is not None:
            async for piece in self._kept_log(status, number, offset):
                yield piece

    async def _kept_log(self, status: JobStatus, number: int, offset: int) -> AsyncIterator[bytes]:
        """An ended attempt's log, from the result or the last checkpoint."""
        kept = status.outcome if status.outcome is not None and status.outcome.manifest else status.commit
        if kept is None or kept.manifest is None:
            return
        try:
            await self._desk.bring(status, kept.manifest, kept.holders)
            data = await asyncio.to_thread(
                lambda: b"".join(self._daemon.store.read_file(kept.manifest, f"log/{number:03d}.txt"))  # type: ignore[arg-type]
            )
        except (MeshError, StoreError):
            return
        if data[offset:]:
            yield data[offset:]

    async def tail(self, job: bytes, number: int, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """A running attempt's log from `offset`; with `follow`, until the attempt has ended."""
        while True:
            attempt = self._daemon.jobs.attempts.get(job)
            ended = attempt is None or attempt.number != number
            if attempt is not None and attempt.number == number:
                with suppress(FileNotFoundError):
                    data = await asyncio.to_thread(_read_from, attempt.log_path, offset)
                    offset += len(data)
                    if data:
                        yield data
                        continue
            if ended or not follow:
                return
            await asyncio.sleep(TAIL_POLL_S)


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(1 << 20)
