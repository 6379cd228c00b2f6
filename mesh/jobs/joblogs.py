"""What attempts on this node have printed, kept after they are gone: one file an attempt, in a directory a job.

They are here for whoever asks why an attempt failed; the copies that travel with checkpoints and results are the durable ones.
"""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from mesh.jobs.spec import format_job

KEPT_S = 7 * 86_400.0  # a week: long enough to come back to a failure after a weekend; ours
KEPT_BYTES = 1 << 30  # then the oldest jobs' logs go first; ours
OWNER = "user"
COPY_KEPT_BYTES = 256 * 1024  # the end of an attempt's, elsewhere, in checkpoints and in results; ours
HEADER_BYTES = 16


class JobLogs:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, job: bytes, number: int, user: str) -> Path:
        """Where the attempt's output goes; an earlier file of that attempt is begun anew."""
        self._claim(job, user)
        path = self.path(job, number)
        path.unlink(missing_ok=True)
        return path

    def path(self, job: bytes, number: int) -> Path:
        return self._home(job) / f"{number:03d}.txt"

    def append_copy(self, job: bytes, number: int, offset: int, data: bytes, user: str) -> int:
        """Take in what an attempt elsewhere has printed from `offset` on; where the copy ends now.

        It begins anew where something is missing, and keeps its last COPY_KEPT_BYTES. The file begins with its own offset.
        """
        path = self._copy(job, number)
        base, end = _bounds(path)
        if offset > end or not path.exists():
            self._claim(job, user)
            path.write_bytes(_header(offset) + data)
            return offset + len(data)
        with path.open("ab") as file:
            file.write(data[end - offset :])
        end = max(end, offset + len(data))
        if end - base > 2 * COPY_KEPT_BYTES:
            kept = path.read_bytes()[-COPY_KEPT_BYTES:]
            path.write_bytes(_header(end - len(kept)) + kept)
        return end

    def read_copy(self, job: bytes, number: int, offset: int) -> bytes:
        """What is kept of an attempt elsewhere, from `offset` on; it says what is not."""
        path = self._copy(job, number)
        base, end = _bounds(path)
        if offset >= end:
            return b""
        with path.open("rb") as file:
            file.seek(HEADER_BYTES + max(0, offset - base))
            data = file.read()
        gap = b"[mesh: %d bytes before this were not kept]\n" % (base - offset) if base > offset else b""
        return gap + data

    def owner(self, job: bytes) -> str | None:
        """Whose logs they are, None if this node has none of the job."""
        try:
            return (self._home(job) / OWNER).read_text()
        except FileNotFoundError:
            return None

    def trim(self, running: set[bytes]) -> None:
        """Let go of old ones, but not of what runs."""
        if not self._directory.is_dir():
            return
        spared = {format_job(job) for job in running}
        homes = sorted((home for home in self._directory.iterdir() if home.name not in spared), key=_newest)
        total = sum(_size(home) for home in homes)
        for home in homes:
            if time.time() - _newest(home) > KEPT_S or total > KEPT_BYTES:
                total -= _size(home)
                shutil.rmtree(home, ignore_errors=True)

    def _claim(self, job: bytes, user: str) -> None:
        home = self._home(job)
        home.mkdir(parents=True, exist_ok=True)
        (home / OWNER).write_text(user)

    def _copy(self, job: bytes, number: int) -> Path:
        return self._home(job) / f"{number:03d}.copy"

    def _home(self, job: bytes) -> Path:
        return self._directory / format_job(job)


def _header(base: int) -> bytes:
    return b"%015d\n" % base


def _bounds(path: Path) -> tuple[int, int]:
    """Where a copy begins and ends in what it is a copy of."""
    try:
        with path.open("rb") as file:
            base = int(file.read(HEADER_BYTES))
            return base, base + path.stat().st_size - HEADER_BYTES
    except (FileNotFoundError, ValueError):
        return 0, 0


def _newest(home: Path) -> float:
    return max((path.stat().st_mtime for path in home.iterdir()), default=0.0)


def _size(home: Path) -> int:
    return sum(path.stat().st_size for path in home.iterdir())


def still_logs(base: Path, live: Path) -> Path:
    """A copy, below `base`, of its earlier logs and of the live one, the end of each: that grows while it would be read."""
    still = base / "logs-still"
    shutil.rmtree(still, ignore_errors=True)
    still.mkdir(parents=True)
    for path in (*(base / "logs").glob("*.txt"), live):
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - COPY_KEPT_BYTES))
            (still / path.name).write_bytes(file.read(COPY_KEPT_BYTES))
    return still
