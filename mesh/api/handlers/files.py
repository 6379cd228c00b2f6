"""A job's files as a stream: from the node that runs it, or from its checkpoint and published files."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from membership.identity import NodeId
from mesh.api.file_stream import End, frame, packed
from mesh.api.handlers.lookup import JobLookup
from mesh.consensus.status import JobStatus
from mesh.jobs.service import JobService
from mesh.model.spec import format_job
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.streams import Patience, sliced
from mesh.util.errors import ExitCode, MeshError

SILENT = "the node does not answer"
PLACES = ("work", "ckpt", "out")  # a path begins with one of these, or is taken to be in the working directory


class NoSuchFile(MeshError):
    def __init__(self, path: str) -> None:
        super().__init__(f"the job has no file {path!r}", ExitCode.NOT_FOUND)


class FileHandlers:
    def __init__(self, jobs: JobService, peers: PeerClient, lookup: JobLookup) -> None:
        self._jobs, self._peers, self._lookup = jobs, peers, lookup

    async def copy(self, text: str, path: str) -> AsyncIterator[bytes]:
        """Stream a file or directory of this user's job; MeshError before the first piece if it does not exist."""
        status = self._lookup.find_job(text)
        await self._lookup.check_owner(status)
        runner = await self._lookup.runner_of(status.job)  # programs trust these files
        if runner == self._lookup.me:
            return self.running_files(status.job, path)
        if runner is not None:
            return self._from_runner(runner, status.job, path)
        if status.runner is not None and status.outcome is None:
            raise MeshError("most of the job's witnesses do not say where it runs: try again in a moment")
        return await self._from_store(status, path)

    def running_files(self, job: bytes, path: str) -> AsyncIterator[bytes]:
        """Stream files of the attempt that runs here."""
        attempt = self._jobs.attempts.get(job)
        if attempt is None:
            raise MeshError("the job does not run here", ExitCode.NOT_FOUND)
        return sliced(packed(_within(attempt.base, path)))

    async def _from_runner(self, runner: NodeId, job: bytes, path: str) -> AsyncIterator[bytes]:
        # In hex: a request is signed with its path as it is written, and URLs have several ways to write one.
        where = f"/v1/jobs/{job.hex()}/files?path={path.encode().hex()}"
        begun, patience = False, Patience()
        try:
            async with AsyncExitStack() as stack:
                async with patience.waiting():
                    response = await stack.enter_async_context(self._peers.stream(runner, "GET", where, b""))
                while True:
                    async with patience.waiting():
                        piece = await response.content.readany()
                    if not piece:
                        return
                    patience.sent(len(piece))
                    begun = True
                    yield piece
        except (PeerError, TimeoutError) as error:
            if isinstance(error, PeerError) and error.status == 404:
                raise NoSuchFile(path) from error
            if not begun:
                raise MeshError(f"its files cannot be reached now: {str(error) or SILENT}") from error
            yield frame(End(f"{str(error) or SILENT}"[:1000]))

    async def _from_store(self, status: JobStatus, path: str) -> AsyncIterator[bytes]:
        """Return files of a job that does not run: of its last checkpoint, or published ones."""
        place, _, rest = _normal(path).partition("/")
        outcome, commit = status.outcome, status.commit
        if place == "out" and outcome is not None and outcome.manifest is not None:
            manifest, holders = await self._lookup.results(status)
        elif place == "ckpt" and commit is not None:
            manifest, holders = commit.manifest, commit.holders
        else:
            name = format_job(status.job)[:8]
            raise MeshError(
                f"job {name} does not run: of it there is ckpt/ (its last checkpoint) and out/ (what it published)"
            )
        # They are in the clear, and the next start removes what a crash leaves there.
        home = self._jobs.directory
        home.mkdir(parents=True, exist_ok=True)
        directory = TemporaryDirectory(prefix="mesh-cp-", dir=home)
        try:
            await self._lookup.restore(status, manifest, holders, place, Path(directory.name) / place)
            found = _within(Path(directory.name), f"{place}/{rest}")
        except BaseException:
            directory.cleanup()
            raise

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in sliced(packed(found)):
                    yield piece
            finally:
                await asyncio.to_thread(directory.cleanup)

        return pieces()


def _normal(path: str) -> str:
    plain = path.strip("/").removeprefix("./")
    return plain if plain.split("/")[0] in PLACES else f"work/{plain}".rstrip("/")


def _within(base: Path, path: str) -> Path:
    """Return the file, with links resolved; NoSuchFile if it lies outside of the job's directories."""
    place = _normal(path).split("/")[0]
    found = Path(os.path.realpath(base / _normal(path)))
    homes = [Path(os.path.realpath(base / name)) for name in PLACES]
    if place not in PLACES or not found.exists() or not any(found.is_relative_to(home) for home in homes):
        raise NoSuchFile(path)
    return found
