"""Logs of attempts: one file per attempt, kept after the attempt is gone, and copies of what running attempts elsewhere print.

A log is named by its job, its attempt and the node that printed it: each node of a gang has one rank.

The files here answer why an attempt failed; the copies inside checkpoints and results are the durable ones. While an attempt
runs, its node sends what is new to the job's witnesses every few seconds, so that a host that dies takes no log with it.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ckptstore.pack import BLOCK_BYTES
from membership.identity import NodeId, short_id
from mesh.jobs.log_times import (
    MARK_BYTES,
    LogPiece,
    encode_piece,
    piece_of,
    read_marks,
    read_piece,
    times_path,
    write_marks,
)
from mesh.model.bounds import MAX_NODES
from mesh.model.record import MAX_ATTEMPTS_KEPT
from mesh.model.spec import format_job
from mesh.rpc.client import PeerClient, PeerError

KEPT_S = 7 * 86_400.0  # a week: long enough to return to a failure after a weekend (own choice)
KEPT_BYTES = 1 << 30  # beyond this the oldest jobs' logs are removed (own choice)
OWNER = "user"
COPY_KEPT_BYTES = 256 * 1024  # the end of a log in copies, checkpoints and results (own choice)
COPIES = max(MAX_ATTEMPTS_KEPT, MAX_NODES)  # of one job's logs elsewhere, the newest: those of the largest gang
COPY_MARKS = 4096  # times kept of a copy: an hour of constant output (own choice)
# What the logs in a checkpoint may take when they are restored, with a block for each file.
SNAPSHOT_BYTES = COPIES * (COPY_KEPT_BYTES + COPY_MARKS * MARK_BYTES + 2 * BLOCK_BYTES) + BLOCK_BYTES
HEADER_BYTES = 16
SHIP_EVERY_S = 2.0  # what the copy of a killed host's log may lack (own choice)
SENT_BYTES = 64 * 1024  # of one attempt each time; a job that prints more loses the middle in the copy
SEND_WITHIN_S = 3.0

log = logging.getLogger(__name__)


class JobLogs:
    """Log files below a directory: one directory per job, with the key of the job's user, in hexadecimal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, job: bytes, number: int, user_key: bytes) -> Path:
        """Return the path for an attempt's output; an earlier file of that attempt is removed."""
        self._claim(job, user_key)
        path = self.path(job, number)
        path.unlink(missing_ok=True)
        times_path(path).unlink(missing_ok=True)
        return path

    def path(self, job: bytes, number: int) -> Path:
        return self._home(job) / f"{number:03d}.txt"

    def append_copy(self, job: bytes, number: int, node: NodeId, piece: LogPiece, user_key: bytes) -> int:
        """Append what an attempt has printed on another node; return the offset at which the copy ends now.

        The copy starts over where something is missing, and keeps its last COPY_KEPT_BYTES. Its header holds its own offset.
        """
        path = self._copy(job, number, node)
        base, end = _bounds(path)
        if piece.offset > end or not path.exists():
            self._claim(job, user_key)
            copies = sorted(self._home(job).glob("*.copy"), key=lambda one: one.stat().st_mtime)
            for oldest in copies[: -COPIES + 1] if path not in copies else ():
                oldest.unlink()
                times_path(oldest).unlink(missing_ok=True)
            path.write_bytes(_header(piece.offset) + piece.data)
            write_marks(path, piece.marks[-COPY_MARKS:])
            return piece.end
        with path.open("ab") as file:
            file.write(piece.data[end - piece.offset :])
        marks = [*read_marks(path), *(mark for mark in piece.marks if mark[1] > end)]
        end = max(end, piece.end)
        if end - base > 2 * COPY_KEPT_BYTES:
            kept = path.read_bytes()[-COPY_KEPT_BYTES:]
            path.write_bytes(_header(end - len(kept)) + kept)
        write_marks(path, marks[-COPY_MARKS:])
        return end

    def read_copy(self, job: bytes, number: int, node: NodeId, offset: int) -> LogPiece | None:
        """Return what is kept of an attempt on another node from `offset` on; None if nothing is."""
        path = self._copy(job, number, node)
        base, end = _bounds(path)
        if offset >= end:
            return None
        start = max(base, offset)
        with path.open("rb") as file:
            file.seek(HEADER_BYTES + start - base)
            return piece_of(path, start, file.read())

    def owner(self, job: bytes) -> bytes | None:
        """Return the key of the user of a job's logs; None if this node has no log of the job."""
        try:
            return bytes.fromhex((self._home(job) / OWNER).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def trim(self, running: set[bytes]) -> None:
        """Remove old logs, except those of running jobs."""
        if not self._directory.is_dir():
            return
        spared = {format_job(job) for job in running}
        homes = sorted((home for home in self._directory.iterdir() if home.name not in spared), key=_newest)
        total = sum(_size(home) for home in homes)
        for home in homes:
            if time.time() - _newest(home) > KEPT_S or total > KEPT_BYTES:
                total -= _size(home)
                shutil.rmtree(home, ignore_errors=True)

    def _claim(self, job: bytes, user_key: bytes) -> None:
        home = self._home(job)
        home.mkdir(parents=True, exist_ok=True)
        (home / OWNER).write_text(user_key.hex())

    def _copy(self, job: bytes, number: int, node: NodeId) -> Path:
        return self._home(job) / f"{number:03d}-{node.hex()}.copy"

    def _home(self, job: bytes) -> Path:
        return self._directory / format_job(job)


def _header(base: int) -> bytes:
    return b"%015d\n" % base


def _bounds(path: Path) -> tuple[int, int]:
    """Return the offsets in the original at which a copy starts and ends."""
    try:
        with path.open("rb") as file:
            base = int(file.read(HEADER_BYTES))
            return base, base + path.stat().st_size - HEADER_BYTES
    except (FileNotFoundError, ValueError):
        return 0, 0


def _newest(home: Path) -> float:
    return max((file.st_mtime for file in _files(home)), default=0.0)


def _size(home: Path) -> int:
    return sum(file.st_size for file in _files(home))


def _files(home: Path) -> Iterator[os.stat_result]:
    """Yield the state of each log of a job; another thread may remove copies meanwhile."""
    for path in home.iterdir():
        with suppress(FileNotFoundError):
            yield path.stat()


def snapshot_logs(base: Path, live: Path) -> Path:
    """Copy the end of the newest earlier logs and of the live one below `base`, with times: the live one grows meanwhile."""
    snapshot = base / "logs-still"
    shutil.rmtree(snapshot, ignore_errors=True)
    snapshot.mkdir(parents=True)
    earlier = sorted((base / "logs").glob("*.txt"), key=lambda path: (len(path.name), path.name))
    for path in (*earlier[-COPIES + 1 :], live):
        piece = _end_of(path, 0, COPY_KEPT_BYTES)
        if piece is not None:
            (snapshot / path.name).write_bytes(piece.data)
            write_marks(snapshot / path.name, [(unix_ms, end - piece.offset) for unix_ms, end in piece.marks])
    return snapshot


class LogShipping:
    """Sends what running attempts print to other nodes. A witness answers with the offset at which its copy ends."""

    def __init__(self, peers: PeerClient) -> None:
        self._peers = peers
        self._sent: dict[tuple[bytes, int, NodeId], int] = {}

    async def ship(self, attempts: Mapping[tuple[bytes, int], tuple[Path, Iterable[NodeId]]]) -> None:
        """Send what each attempt (job, number) has printed since the last call to each of its nodes."""
        wanted = {(*attempt, node) for attempt, (_, nodes) in attempts.items() for node in nodes}
        self._sent = {key: end for key, end in self._sent.items() if key in wanted}
        await asyncio.gather(
            *(self._send(*attempt, node, path) for attempt, (path, nodes) in attempts.items() for node in nodes)
        )

    async def _send(self, job: bytes, number: int, node: NodeId, path: Path) -> None:
        key = (job, number, node)
        piece = await asyncio.to_thread(_end_of, path, self._sent.get(key, 0), SENT_BYTES)
        if piece is None:
            return
        try:
            answer = await self._peers.call(
                node, "PUT", f"/v1/jobs/{job.hex()}/log/{number}", encode_piece(piece), SEND_WITHIN_S
            )
            self._sent[key] = min(max(int(answer), 0), piece.end)  # whatever a hostile witness says
        except (PeerError, ValueError) as error:
            log.debug("a log was not copied to %s: %s", short_id(node), error)


def _end_of(path: Path, after: int, most: int) -> LogPiece | None:
    """Return what was printed from offset `after` on, at most its last bytes and times; None if nothing was."""
    try:
        piece = read_piece(path, max(after, path.stat().st_size - most), most, COPY_MARKS)
    except FileNotFoundError:
        return None
    return piece and msgspec.structs.replace(piece, marks=piece.marks[-COPY_MARKS:])
