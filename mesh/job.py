"""For programs that run as jobs: notices, progress, and checkpoints that appear whole. Standard library only, one file.

Works without a mesh too: then there is never a notice, and checkpoints are plain directories. Copy it into an image as it is.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Notice:
    """The node wants this job to save (`checkpoint`) or to save and go (`vacate`) before `deadline_unix` (seconds)."""

    seq: int
    kind: str
    deadline_unix: float
    grace_s: float
    reason: str


_last: tuple[int, Notice | None] = (-1, None)


def notice() -> Notice | None:
    """The latest notice, or None. Costs one stat while nothing has changed, so ask at every step."""
    global _last  # noqa: PLW0603 - the cache of one file
    control = os.environ.get("MESH_CTL_DIR")
    if not control:
        return None
    path = Path(control) / "notice.json"
    try:
        changed = path.stat().st_mtime_ns
        if changed != _last[0]:
            fields = json.loads(path.read_text())
            _last = (changed, Notice(**{name: fields[name] for name in Notice.__dataclass_fields__}))
    except (OSError, ValueError, KeyError, TypeError):
        return _last[1]
    return _last[1]


def should_yield() -> bool:
    """Whether this job has been asked to save and go."""
    latest = notice()
    return latest is not None and latest.kind == "vacate"


def resume_path() -> Path | None:
    """The newest verified checkpoint to go on from, or None for a fresh start."""
    path = os.environ.get("MESH_RESUME")
    return Path(path) if path else None


def progress(step: int, of: int) -> None:
    """Tell the mesh how far the job is; shown by `mesh ps`, and used to count what a departure cost."""
    control = os.environ.get("MESH_CTL_DIR")
    if control:
        temporary = Path(control) / "progress.tmp"
        temporary.write_text(json.dumps({"step": step, "of": of}))
        temporary.rename(Path(control) / "progress.json")


class Checkpoint:
    """Checkpoints as directories `step-NNNNNNNN` that appear under their names only when they are whole and on disk."""

    def __init__(self, directory: str | Path | None = None, keep: int = 2) -> None:
        chosen = directory or os.environ.get("MESH_CKPT_DIR") or "ckpts"
        self.directory = Path(chosen)
        self.keep = keep
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new directory, make it durable, publish it; the newest `keep` stay."""
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f".step-{step:08d}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        for directory, _, files in os.walk(temporary, topdown=False):
            for name in files:
                _sync(Path(directory) / name)
            _sync(Path(directory))
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.directory)
        for old in sorted(self.directory.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint, or None."""
        return max(self.directory.glob("step-*"), default=None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
