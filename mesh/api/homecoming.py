"""`submit --out DIR`: brings a job's published files home when it is done, whoever asked for that, also after a restart."""

import asyncio
import logging
from typing import TYPE_CHECKING

from mesh.api.errors import ExitCode, MeshError
from mesh.jobs.spec import format_job

if TYPE_CHECKING:
    from mesh.daemon import Daemon

LOOK_S = 1.0
TRIES = 10  # an answer that cannot be had for so many looks is given up, and told

log = logging.getLogger(__name__)


class Homecoming:
    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._wanted: dict[bytes, str] = {}
        self._failed: dict[bytes, int] = {}

    async def want(self, job: bytes, directory: str) -> None:
        self._wanted[job] = directory
        await self._daemon.journal.want(job, directory)

    async def run(self) -> None:
        self._wanted |= await self._daemon.journal.wanted()
        while True:
            await asyncio.sleep(LOOK_S)
            for job, directory in list(self._wanted.items()):
                status = self._daemon.jobs.board.get(job)
                if status is not None and status.outcome is not None:
                    await self._bring(job, directory, bool(status.outcome.manifest))

    async def _bring(self, job: bytes, directory: str, has_files: bool) -> None:
        chronicle = self._daemon.jobs.chronicle
        try:
            if has_files:
                answer = await self._daemon.job_desk.pull(format_job(job), directory)
                chronicle.say(job, "state", f"{answer['files']} files in {directory}", new="brought home")
        except MeshError as error:
            self._failed[job] = self._failed.get(job, 0) + 1
            if self._failed[job] < TRIES and error.code != ExitCode.USAGE:
                return
            log.warning("job %s: its files were not brought to %s: %s", format_job(job)[:8], directory, error)
            chronicle.say(job, "state", str(error), new="not brought home")
        self._wanted.pop(job, None)
        await self._daemon.journal.want(job, "")
