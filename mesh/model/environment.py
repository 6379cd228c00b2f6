"""Python environments of jobs: which files of the working directory describe one, and which packages a lock may name.

The packages come by `uv export` from a lock that the job's user wrote, and are installed outside of the guest's sandbox. So only
wheels of an index are taken, each by its hash: nothing that would run at installation, and no address or path of the lock's own.
"""

import re
from collections.abc import Iterator

import msgspec

MOST_LOCK_BYTES = 8 << 20  # of a lock; that of a project with 500 packages has 1 MiB (own choice)
MOST_PACKAGES = 2000  # own choice
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_PACKAGE = re.compile(
    rf"{_PART}(?:\[{_PART}(?:,{_PART})*\])?==[A-Za-z0-9.!+_-]+(?: ; [^@#\\\n-][^@#\\\n]*?)?(?: --hash=sha256:[0-9a-f]{{64}})+"
)
_PYTHON = re.compile(r"[0-9<>=!~.,* ]{1,100}")
_INLINE = re.compile(r"(?m)^# /// script\s*$")  # PEP 723


class EnvironmentRefused(ValueError):
    """The job's environment cannot be made anywhere; the text gives the reason and the next command."""


class UvProject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The environment of a project (`pyproject.toml` and `uv.lock`), or of a `script` with inline metadata and its lock."""

    script: str = ""

    @property
    def source(self) -> str:
        return self.script or "pyproject.toml"

    @property
    def lock(self) -> str:
        return f"{self.script}.lock" if self.script else "uv.lock"

    @property
    def lock_command(self) -> str:
        return f"uv lock --script {self.script}" if self.script else "uv lock"


def check_project(project: UvProject) -> None:
    """Raise EnvironmentRefused for a script that is not inside the working directory."""
    parts = project.script.split("/")
    if project.script and (any(part in {"", ".", ".."} for part in parts) or len(project.script) > 1000):
        raise EnvironmentRefused(f"the script {project.script!r} must be a plain path inside the working directory")


def has_metadata(script: str) -> bool:
    """Tell whether a script describes its environment."""
    return _INLINE.search(script) is not None


def packages_of(exported: str) -> list[str]:
    """Return the packages of a lock, one a line; EnvironmentRefused if one is not a wheel of an index, with its hash."""
    found = list(_lines(exported))
    if len(found) > MOST_PACKAGES:
        raise EnvironmentRefused(f"its lock has {len(found)} packages: an environment has at most {MOST_PACKAGES}")
    for line in found:
        if _PACKAGE.fullmatch(line) is None:
            raise EnvironmentRefused(
                f"its lock has {line[:100]!r}: a package must come from an index, with a version and a hash, "
                "and not from a path, an address or a repository"
            )
    return found


def python_of(lock: str) -> str:
    """Return the versions of Python that a lock is for; EnvironmentRefused if it does not say."""
    match = re.search(r'(?m)^requires-python = "([^"\n]*)"$', lock)
    if match is None or _PYTHON.fullmatch(match[1]) is None:
        raise EnvironmentRefused("its lock does not say which versions of Python it is for (requires-python)")
    return match[1]


def _lines(exported: str) -> Iterator[str]:
    for line in exported.replace("\\\n", " ").splitlines():
        words = " ".join(line.split())
        if words and not words.startswith("#"):
            yield words
