"""Logs of jobs: from the node where an attempt ran, else from a witness's copy, the result or a checkpoint."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from ckptstore.cipher import StateCipher
from ckptstore.encoding import Bytes
from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.node import MembershipNode
from mesh.api.handlers.lookup import JobLookup
from mesh.api.queries import LogQuery
from mesh.consensus.status import JobStatus
from mesh.jobs.log_times import (
    MARK_BYTES,
    PIECE_BYTES,
    LogPiece,
    checked,
    decode_marks,
    decode_piece,
    encode_piece,
    offset_since,
    read_piece,
    times_path,
)
from mesh.jobs.logs import COPY_KEPT_BYTES, COPY_MARKS
from mesh.jobs.service import JobService
from mesh.model.record import Attempt
from mesh.model.spec import format_job
from mesh.rpc.client import PeerClient, PeerError
from mesh.rpc.streams import Patience
from mesh.util.errors import ExitCode, MeshError

TAIL_POLL_S = 0.2
LENGTH_BYTES = 4
MOST_FRAME = 4 * PIECE_BYTES  # with the times, in the longest form
LINE = re.compile(rb"[^\n]*\n|[^\n]+")


class LogReader:
    def __init__(
        self, membership: MembershipNode, store: Store, jobs: JobService, peers: PeerClient, lookup: JobLookup
    ) -> None:
        self._membership, self._store, self._jobs = membership, store, jobs
        self._peers, self._lookup = peers, lookup

    async def _pause(self, job: bytes) -> None:
        """Wait until the job's status changes, or for the poll interval."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TAIL_POLL_S):
                await self._jobs.job_table.next_change(job).wait()

    async def follow_log(self, text: str, query: LogQuery) -> AsyncGenerator[bytes, None]:
        """Yield the output of one rank of the job, of all attempts or of one; with `follow`, until it ends."""
        found = self._lookup.find_job(text)
        job, known = found.job, {attempt.number: attempt for attempt in await self._lookup.attempts(found)}
        only = query.attempt
        if only is not None and only not in known:
            raise MeshError(
                f"job {text!r} has had no attempt {only} so far: `mesh describe` lists them", ExitCode.NOT_FOUND
            )
        await self._check_rank(found, known.values(), query.rank)
        lines = LineSelector(query.since_unix_ms, query.timestamps)
        given: dict[int, int] = {}
        complete: set[int] = set()  # ended attempts, read to their last byte
        while True:
            status = self._lookup.statuses().get(job)
            if status is None:
                return
            known |= {attempt.number: attempt for attempt in status.attempts}
            for number, attempt in known.items() if only is None else [(only, known[only])]:
                if number in complete:
                    continue
                if attempt.reason or status.outcome is not None:
                    complete.add(number)
                node = attempt.node_of(query.rank)
                if node is None:
                    continue
                async for piece in self._attempt_log(status, attempt, node, given.get(number, 0), query):
                    if shown := lines.select(number, given.get(number, 0), piece):
                        yield shown
                    given[number] = piece.end
            if not query.follow or status.outcome is not None or only in complete:
                return
            await self._pause(job)

    async def _check_rank(self, status: JobStatus, attempts: Iterable[Attempt], rank: int) -> None:
        """Check that the job had this rank, or may have it in a later attempt."""
        if rank == 0 or any(attempt.node_of(rank) for attempt in attempts):
            return
        most = (await self._lookup.spec_of(status)).most_nodes
        if rank >= most:
            ranks = f"ranks 0 to {most - 1}" if most > 1 else "rank 0 only"
            words = f"job {format_job(status.job)[:8]} has no rank {rank}: it has {ranks} (`--nodes {most}`)"
            raise MeshError(words, ExitCode.NOT_FOUND)

    async def _attempt_log(
        self, status: JobStatus, attempt: Attempt, node: bytes, offset: int, query: LogQuery
    ) -> AsyncIterator[LogPiece]:
        """Yield a node's log of an attempt from `offset`: from that node if it answers, else from a copy."""
        runs = status.outcome is None and not attempt.reason
        given, reachable = offset, self._reachable()
        sources = [node] if node in reachable else []
        if not sources or not runs:
            sources += [witness for witness in status.witnesses if witness in reachable]
        for source in sources:
            follow, since_ms = query.follow and runs, query.since_unix_ms or 0
            async for piece in self._from(source, status.job, attempt.number, node, given, follow, since_ms):
                given = piece.end
                yield piece
            if given > offset:
                break
        kept_with_job = node == attempt.node  # checkpoints and results are rank 0's
        if (
            kept_with_job
            and given == 0
            and not runs
            and (kept := await self._kept_log(status, attempt.number)) is not None
        ):
            yield kept

    async def _from(
        self, source: bytes, job: bytes, number: int, node: bytes, offset: int, follow: bool, since_ms: int
    ) -> AsyncIterator[LogPiece]:
        """Yield what `source` has of the log of an attempt on `node`: the log itself, or a witness's copy."""
        if source == self._lookup.me:
            async for piece in self.tail(job, number, node, offset, follow, since_ms):
                yield piece
            return
        path = f"/v1/jobs/{job.hex()}/log/{number}/{node.hex()}?offset={offset}&follow={int(follow)}&since={since_ms}"
        patience = Patience()
        with suppress(PeerError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            async with AsyncExitStack() as stack:
                async with patience.waiting():
                    response = await stack.enter_async_context(self._peers.stream(source, "GET", path, b""))
                content = response.content
                while True:
                    # A job that runs may print nothing for hours; the log of one that is over has no pauses.
                    async with nullcontext() if follow else patience.waiting():
                        length = int.from_bytes(await content.readexactly(LENGTH_BYTES))
                        data = await content.readexactly(length) if 0 < length <= MOST_FRAME else b""
                    if not data:
                        return
                    piece = decode_piece(data)
                    if piece.offset < offset:
                        return
                    patience.sent(len(data))
                    offset = piece.end
                    yield piece

    def _reachable(self) -> set[bytes]:
        return {member.node_id for member in self._membership.members() if member.present}

    async def _kept_log(self, status: JobStatus, number: int) -> LogPiece | None:
        """Return the end of an attempt's log, from the result or the last checkpoint."""
        kept = status.outcome if status.outcome is not None and status.outcome.manifest else status.commit
        if kept is None or kept.manifest is None:
            return None
        try:
            cipher = await self._lookup.fetch(status, kept.manifest, kept.holders)
            return await asyncio.to_thread(self._read_kept, kept.manifest, f"log/{number:03d}.txt", cipher)
        except (MeshError, StoreError, ValueError):
            return None

    def _read_kept(self, manifest: bytes, path: str, cipher: StateCipher | None) -> LogPiece:
        data = _joined(self._store.read_file(manifest, path, cipher), COPY_KEPT_BYTES)
        times = _joined(self._store.read_file(manifest, str(times_path(Path(path))), cipher), COPY_MARKS * MARK_BYTES)
        return checked(LogPiece(0, data, tuple(decode_marks(times))))

    async def tail(
        self, job: bytes, number: int, node: bytes, offset: int, follow: bool, since_ms: int
    ) -> AsyncIterator[LogPiece]:
        """Yield what this node has of an attempt's output on `node`, from `offset`, at least all since that time; with `follow`,
        until it has ended, if it runs here.
        """
        path = self._jobs.logs.path(job, number)
        if node != self._lookup.me or not path.exists():
            copy = await asyncio.to_thread(self._jobs.logs.read_copy, job, number, node, offset)
            if copy is not None:
                yield copy
            return
        offset = max(offset, await asyncio.to_thread(offset_since, path, since_ms))
        while True:
            attempt = self._jobs.attempts.get(job)
            ended = attempt is None or attempt.number != number
            while (piece := await asyncio.to_thread(read_piece, path, offset)) is not None:
                offset = piece.end
                yield piece
            if ended or not follow:
                return
            await self._pause(job)


def _joined(pieces: Iterable[Bytes], most: int) -> bytes:
    """Join the pieces of a file that another node has written; ValueError if it has more than `most` bytes."""
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) > most:
            raise ValueError("the log in the checkpoint is too long")
    return bytes(found)


def framed(piece: LogPiece) -> bytes:
    """Return a piece with its length, for another node."""
    data = encode_piece(piece)
    return len(data).to_bytes(LENGTH_BYTES) + data


class LineSelector:
    """Selects the lines of a job's output that began at `since_ms` or later, and stamps them. Attempts follow each other."""

    def __init__(self, since_ms: int | None, timestamps: bool) -> None:
        self._since_ms, self._timestamps = since_ms, timestamps
        self._attempt: int | None = None
        self._line_ended, self._shown = True, False  # the line before; the current line

    def select(self, attempt: int, given: int, piece: LogPiece) -> bytes:
        """Return what to show of an attempt's next piece, after a line on what is missing since `given`."""
        found = bytearray()
        if attempt != self._attempt:
            if self._shown and not self._line_ended and self._timestamps:
                found += b"\n"
            self._attempt, self._line_ended = attempt, True
        timed = [*piece.timed()]
        if self._since_ms is None:
            if piece.offset > given:
                timed.insert(0, (timed[0][0], b"[mesh: %d bytes before this were not kept]\n" % (piece.offset - given)))
            if not self._timestamps:
                return b"".join(data for _, data in timed)
        for unix_ms, data in timed:
            for line in LINE.findall(data):
                if self._line_ended:
                    self._shown = self._since_ms is None or unix_ms >= self._since_ms
                    if self._shown and self._timestamps:
                        found += stamp(unix_ms)
                if self._shown:
                    found += line
                self._line_ended = line.endswith(b"\n")
        return bytes(found)


def stamp(unix_ms: int) -> bytes:
    """Return a time as `docker logs --timestamps` prints it, and a space."""
    seconds, ms = divmod(unix_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z ".encode()
