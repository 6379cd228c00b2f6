"""The user's working directory as a job takes it along: which files, and how many bytes."""

import os
from fnmatch import fnmatch
from pathlib import Path

from mesh.api.errors import ExitCode, MeshError

LIMIT_BYTES = 1 << 30  # what a person may send without meaning to; data sets belong elsewhere
LIMIT_FILES = 50_000
ALWAYS_LEFT = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache")
IGNORE_FILE = ".meshignore"


def collect_files(directory: Path, leave: tuple[str, ...]) -> dict[str, Path]:
    """The files to take, by their path in the store (`work/...`); MeshError if they are too many or cannot be read.

    Left out: version control and caches, what `.meshignore` names (shell patterns, one a line), and `leave` (the checkpoint
    directory).
    """
    if not directory.is_dir():
        raise MeshError(f"working directory {directory} is not a directory", ExitCode.USAGE)
    patterns = _patterns(directory / IGNORE_FILE)
    found: dict[str, Path] = {}
    total = 0
    for parent, names, files in os.walk(directory):
        here = Path(parent)
        below = here.relative_to(directory)
        names[:] = sorted(n for n in names if not _left_out(below / n, patterns, leave))
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = [name for name in names if name not in links]
        for name in sorted([*files, *links]):
            path = here / name
            if _left_out(below / name, patterns, leave) or not (path.is_file() or path.is_symlink()):
                continue
            total += path.lstat().st_size
            found[f"work/{(below / name).as_posix()}"] = path
            if total > LIMIT_BYTES or len(found) > LIMIT_FILES:
                raise MeshError(
                    f"the working directory {directory} holds more than {LIMIT_BYTES >> 20} MiB or {LIMIT_FILES} files. "
                    f"Run from the project's own directory, name large files in {IGNORE_FILE}, or use --no-workdir.",
                    ExitCode.USAGE,
                )
    return found


def _patterns(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line.rstrip("/") for line in lines if line and not line.startswith("#")]


def _left_out(path: Path, patterns: list[str], leave: tuple[str, ...]) -> bool:
    text = path.as_posix()
    if path.name in ALWAYS_LEFT or text in leave:
        return True
    return any(fnmatch(text, pattern) or fnmatch(path.name, pattern) for pattern in patterns)
