"""The user's working directory as a job takes it along: which files, and how many bytes."""

import os
from pathlib import Path

from mesh.api.errors import ExitCode, MeshError
from mesh.jobs.ignoring import Ignoring

LIMIT_BYTES = 1 << 30  # what a person may send without meaning to; data sets belong elsewhere
LIMIT_FILES = 50_000


def collect_files(directory: Path, leave: tuple[str, ...]) -> dict[str, Path]:
    """The files to take, by their path in the store (`work/...`); MeshError if they are too many or cannot be read.

    Left out: what `Ignoring` says, and `leave` (the checkpoint directory).
    """
    if not directory.is_dir():
        raise MeshError(f"working directory {directory} is not a directory", ExitCode.USAGE)
    ignoring = Ignoring(directory, leave)
    found: dict[str, Path] = {}
    total = 0
    for parent, names, files in os.walk(directory):
        here = Path(parent)
        below = here.relative_to(directory)
        if below != Path():
            ignoring.enter(below)
        names[:] = sorted(n for n in names if not ignoring.leaves(below / n, True))
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = [name for name in names if name not in links]
        for name in sorted([*files, *links]):
            path = here / name
            if ignoring.leaves(below / name, False) or not (path.is_file() or path.is_symlink()):
                continue
            total += path.lstat().st_size
            found[f"work/{(below / name).as_posix()}"] = path
            if total > LIMIT_BYTES or len(found) > LIMIT_FILES:
                raise MeshError(
                    f"the working directory {directory} holds more than {LIMIT_BYTES >> 20} MiB or {LIMIT_FILES} files. "
                    f"Run from the project's own directory, name large files in .meshignore, or use --no-workdir.",
                    ExitCode.USAGE,
                )
    return found
