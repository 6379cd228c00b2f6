"""Which files of a working directory stay at home: caches and version control, and what `.gitignore` and `.meshignore` name."""

from pathlib import Path

from pathspec import GitIgnoreSpec

ALWAYS_LEFT = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache")
IGNORE_FILES = (".gitignore", ".meshignore")  # the second can take back, with !, what the first leaves out


class Ignoring:
    """The rules of one working directory, with those of the directories below it as they are come upon."""

    def __init__(self, directory: Path, leave: tuple[str, ...] = ()) -> None:
        self._directory = directory
        self._leave = leave
        self._rules: dict[Path, GitIgnoreSpec] = {}
        self.enter(Path())

    def enter(self, below: Path) -> None:
        """Read the rules of a directory, whose path is relative to the working directory."""
        lines: list[str] = []
        for name in IGNORE_FILES:
            path = self._directory / below / name
            if path.is_file():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            self._rules[below] = GitIgnoreSpec.from_lines(lines)

    def leaves(self, path: Path, is_directory: bool) -> bool:
        """Whether it stays at home; the rules nearest to it have the last word, as with git."""
        if path.name in ALWAYS_LEFT or path.as_posix() in self._leave:
            return True
        for home in path.parents:
            rules = self._rules.get(home)
            if rules is not None:
                text = path.relative_to(home).as_posix() + ("/" if is_directory else "")
                verdict = rules.check_file(text).include
                if verdict is not None:
                    return verdict
        return False
