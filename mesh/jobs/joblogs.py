"""What attempts on this node have printed, kept after they are gone: one file an attempt, in a directory a job.

They are here for whoever asks why an attempt failed; the copies that travel with checkpoints and results are the durable ones.
"""

import shutil
import time
from pathlib import Path

from mesh.jobs.spec import format_job

KEPT_S = 7 * 86_400.0  # a week: long enough to come back to a failure after a weekend; ours
KEPT_BYTES = 1 << 30  # then the oldest jobs' logs go first; ours
OWNER = "user"


class JobLogs:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, job: bytes, number: int, user: str) -> Path:
        """Where the attempt's output goes; an earlier file of that attempt is begun anew."""
        home = self._home(job)
        home.mkdir(parents=True, exist_ok=True)
        (home / OWNER).write_text(user)
        path = self.path(job, number)
        path.unlink(missing_ok=True)
        return path

    def path(self, job: bytes, number: int) -> Path:
        return self._home(job) / f"{number:03d}.txt"

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

    def _home(self, job: bytes) -> Path:
        return self._directory / format_job(job)


def _newest(home: Path) -> float:
    return max((path.stat().st_mtime for path in home.iterdir()), default=0.0)


def _size(home: Path) -> int:
    return sum(path.stat().st_size for path in home.iterdir())
