"""Working directory of a job: the files to send, and their size."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.errors import BadPath
from ckptstore.manifest import check_link
from membership.identity import STATE_FILES
from mesh.util.errors import ExitCode, MeshError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT_BYTES = 1 << 30  # what a person may send by accident; `mesh data` is for more
LIMIT_FILES = 50_000
ALWAYS_IGNORED = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache")
IGNORE_FILES = (".gitignore", ".meshignore")  # a rule with ! in the second takes back one of the first


class IgnoreRules:
    """The ignore rules of a working directory: git's, and those of the directories below it once they are entered."""

    def __init__(self, directory: Path, ignored: tuple[str, ...] = ()) -> None:
        self._directory = directory
        self._ignored = ignored
        self._rules: dict[Path, GitIgnoreSpec] = {}
        self.enter(Path())

    def enter(self, below: Path) -> None:
        """Read the rules of a directory, given by its path below the working directory."""
        lines: list[str] = []
        for name in IGNORE_FILES:
            path = self._directory / below / name
            if path.is_file():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            from pathspec import GitIgnoreSpec

            self._rules[below] = GitIgnoreSpec.from_lines(lines)

    def ignores(self, path: Path, is_directory: bool) -> bool:
        """Return whether a file is left out; the nearest rules decide, as with git."""
        if path.name in ALWAYS_IGNORED or path.as_posix() in self._ignored:
            return True
        for parent in path.parents:
            rules = self._rules.get(parent)
            if rules is not None:
                text = path.relative_to(parent).as_posix() + ("/" if is_directory else "")
                verdict = rules.check_file(text).include
                if verdict is not None:
                    return verdict
        return False


def collect_files(directory: Path, ignored: tuple[str, ...]) -> dict[str, Path]:
    """Return the files and directories to send, by their path in the store (`work/...`).

    Left out is what the ignore rules name, and `ignored` (the checkpoint directory). MeshError: too many, not readable, a link
    that leads out, or a node's state directory, which holds its key.
    """
    if not directory.is_dir():
        raise MeshError(f"working directory {directory} is not a directory", ExitCode.USAGE)
    rules = IgnoreRules(directory, ignored)
    found: dict[str, Path] = {}
    total = 0
    for parent, names, files in os.walk(directory):
        here = Path(parent)
        below = here.relative_to(directory)
        if {*files} >= STATE_FILES:
            raise MeshError(
                f"the working directory {directory} holds {here}: the state of a node, with its key, which no other machine may "
                "have. Run from the project's own directory, name it with --workdir, or use --no-workdir.",
                ExitCode.USAGE,
            )
        if below != Path():
            rules.enter(below)
        names[:] = sorted(n for n in names if not rules.ignores(below / n, True))
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = [name for name in names if name not in links]
        others = [name for name in sorted([*files, *links]) if not rules.ignores(below / name, False)]
        others = [name for name in others if (here / name).is_file() or (here / name).is_symlink()]
        for name in (*names, *others):
            path = here / name
            sent = f"work/{(below / name).as_posix()}"
            if path.is_symlink():
                _check_link(sent, path)
            info = path.lstat()
            total += 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            found[sent] = path
            if total > LIMIT_BYTES or len(found) > LIMIT_FILES:
                raise MeshError(
                    f"the working directory {directory} holds more than {LIMIT_BYTES >> 20} MiB or {LIMIT_FILES} files. "
                    f"Run from the project's own directory, share large data with `mesh data add` and --data, name the rest in "
                    f".meshignore, or use --no-workdir.",
                    ExitCode.USAGE,
                )
    return found


def _check_link(sent: str, path: Path) -> None:
    target = str(path.readlink())
    try:
        check_link(sent, target)
    except BadPath as error:
        raise MeshError(
            f"{sent.removeprefix('work/')} in the working directory is a link to {target}, and a job gets only links that stay "
            "inside its directory. Name it, or the directory that it is in, in .gitignore or .meshignore to leave it out.",
            ExitCode.USAGE,
        ) from error
