"""`mesh cp`: a job's files as a tar stream, from where it runs, or from what it saved and published."""

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ckptstore.errors import StoreError
from mesh import trees
from mesh.api.errors import ExitCode, MeshError
from mesh.api.peer import PeerError
from mesh.api.streams import sliced
from mesh.jobs.spec import format_job
from mesh.jobs.status import JobStatus

if TYPE_CHECKING:
    from mesh.daemon import Daemon

PLACES = ("work", "ckpt", "out")  # a path begins with one of these, or is taken to be in the working directory


class NoSuchFile(MeshError):
    def __init__(self, path: str) -> None:
        super().__init__(f"the job has no file {path!r}", ExitCode.NOT_FOUND)


async def copy(daemon: "Daemon", text: str, path: str) -> AsyncIterator[bytes]:
    """A tar of the file or directory, as its owner asks for it; MeshError before the first piece if there is none."""
    status = daemon.job_desk.find_job(text)
    daemon.job_desk.check_owner(status)
    if status.runner is not None and status.outcome is None:
        if status.runner == daemon.me:
            return running_files(daemon, status.job, path)
        return _from_runner(daemon, status, path)
    return await _from_store(daemon, status, path)


def running_files(daemon: "Daemon", job: bytes, path: str) -> AsyncIterator[bytes]:
    """Of the attempt that runs here."""
    attempt = daemon.jobs.attempts.get(job)
    if attempt is None:
        raise MeshError("the job does not run here", ExitCode.NOT_FOUND)
    return _tar(_within(attempt.base, path))


async def _from_runner(daemon: "Daemon", status: JobStatus, path: str) -> AsyncIterator[bytes]:
    assert status.runner is not None
    # In hex: a request is signed with its path as it is written, and URLs have several ways to write one.
    where = f"/v1/jobs/{status.job.hex()}/files?path={path.encode().hex()}"
    try:
        async with daemon.peers.stream(status.runner, "GET", where, b"") as response:
            async for piece in response.content.iter_any():
                yield piece
    except PeerError as error:
        if error.status == 404:
            raise NoSuchFile(path) from error
        raise MeshError(f"its files cannot be reached now: {error}") from error


async def _from_store(daemon: "Daemon", status: JobStatus, path: str) -> AsyncIterator[bytes]:
    """A job that does not run has its last checkpoint, and what it published."""
    place, _, rest = _normal(path).partition("/")
    outcome, commit = status.outcome, status.commit
    kept = {
        "out": outcome and (outcome.manifest, outcome.holders),
        "ckpt": commit and (commit.manifest, commit.holders),
    }
    manifest, holders = kept.get(place) or (None, ())
    if manifest is None:
        name = format_job(status.job)[:8]
        raise MeshError(
            f"job {name} does not run: of it there is ckpt/ (its last checkpoint) and out/ (what it published)"
        )
    vault = await daemon.job_desk.bring(status, manifest, holders)
    directory = TemporaryDirectory(prefix="mesh-cp-")
    try:
        target = Path(directory.name) / place
        await asyncio.to_thread(daemon.store.restore, manifest, target, prefix=place, vault=vault)
        found = _within(Path(directory.name), f"{place}/{rest}")
    except StoreError as error:
        directory.cleanup()
        raise MeshError(f"what the job has saved cannot be read: {error}") from error
    except MeshError:
        directory.cleanup()
        raise

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in _tar(found):
                yield piece
        finally:
            await asyncio.to_thread(directory.cleanup)

    return pieces()


def _normal(path: str) -> str:
    plain = path.strip("/").removeprefix("./")
    return plain if plain.split("/")[0] in PLACES else f"work/{plain}".rstrip("/")


def _within(base: Path, path: str) -> Path:
    """The file that is meant, if it lies in one of the job's own directories, links and all."""
    place = _normal(path).split("/")[0]
    found = Path(os.path.realpath(base / _normal(path)))
    homes = [Path(os.path.realpath(base / name)) for name in PLACES]
    if place not in PLACES or not found.exists() or not any(found.is_relative_to(home) for home in homes):
        raise NoSuchFile(path)
    return found


def _tar(path: Path) -> AsyncIterator[bytes]:
    return sliced(_tar_pieces(path))


def _read_itself(path: Path) -> bytes:
    """OSError if a link has taken its place since it was looked at, or that of a directory on the way: its job may be hostile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(path):  # noqa: PTH115
            raise OSError(f"{path} has moved")
        return file.read()


def _below(top: Path) -> Iterator[Path]:
    """All that is in a directory, each after what it is in. Its job goes on: what it removes meanwhile is left out."""
    if top.is_symlink():
        return
    for directory, inner, files in trees.walk(top):
        inner.sort()
        yield from (Path(directory, name) for name in sorted([*inner, *files]))


def _tar_pieces(path: Path) -> Iterator[bytes]:
    """A tar whose one top entry is named as the path. What changes while it is read comes as it is then."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for found in (path, *_below(path)):
            try:
                info = tar.gettarinfo(found, arcname=(Path(path.name) / found.relative_to(path)).as_posix())
                content = _read_itself(found) if info.isreg() else b""
            except OSError:
                continue  # it was there a moment ago
            if not (info.isreg() or info.isdir() or info.issym()):
                continue
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()
