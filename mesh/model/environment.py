"""Environments of jobs: which files of the working directory describe one, and which packages a lock may name.

The job's user wrote the lock, and its packages are installed outside of the guest's sandbox. With uv, the packages come from `uv
export`, and only wheels of an index are taken, each by its hash: nothing that would run at installation, and no address or path
of the lock's own. With conda, the lock is a list of addresses with hashes, and a node takes only those in its owner's channels.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from ckptstore.errors import BadPath
from ckptstore.manifest import check_path
from membership.lengths import SAID

MOST_LOCK_BYTES = 8 << 20  # of a lock; that of a project with 500 packages has 1 MiB (own choice)
MOST_PACKAGES = 2000  # own choice
CONDA_PLATFORMS = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}  # conda's names of machines
EXPLICIT = "@EXPLICIT"  # the line before the addresses of a list of packages, as conda writes it
ONE_ENVIRONMENT = "a job has one environment: leave out --uv or --conda"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_PACKAGE = re.compile(
    rf"{_PART}(?:\[{_PART}(?:,{_PART})*\])?==[A-Za-z0-9.!+_-]+(?: ; [^@#\\\n-][^@#\\\n]*?)?(?: --hash=sha256:[0-9a-f]{{64}})+"
)
_PYTHON = re.compile(r"[0-9<>=!~.,* ]{1,100}")
_CONDA_PACKAGE = re.compile(
    r"(?P<channel>https?://[A-Za-z0-9._:/~+-]{1,200})/(?P<subdir>[a-z0-9-]{1,30})/"
    r"(?P<file>(?P<name>[a-z0-9_][a-z0-9_.-]{0,99})-[A-Za-z0-9_][A-Za-z0-9_.!+]{0,59}-[A-Za-z0-9_][A-Za-z0-9_.+]{0,59}"
    r"(?:\.conda|\.tar\.bz2))#(?:sha256:)?(?P<sha256>[0-9a-f]{64})"
)
# A file of a package in a lock of uv, the name of a wheel (PEP 427), and that of a source package, which uv names in errors.
_LOCKED = re.compile(r'(?:url|path) = "([^"\n]{1,2000})", hash = "sha256:([0-9a-f]{64})"')
_WHEEL = re.compile(
    r"[A-Za-z0-9_.]+-[A-Za-z0-9_.!+]+(?:-[0-9][A-Za-z0-9_.]*)?-[A-Za-z0-9_.]+-[A-Za-z0-9_.]+-(?P<platform>[A-Za-z0-9_.]+)\.whl"
)
_SOURCE = re.compile(r"[A-Za-z0-9_.!+-]+\.(?:tar\.gz|zip)")
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
    def files(self) -> tuple[str, ...]:
        return self.source, self.lock

    @property
    def lock_command(self) -> str:
        return f"uv lock --script {self.script}" if self.script else "uv lock"


class CondaList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The environment of a list of conda packages, with addresses and hashes as `conda list --explicit --sha256` prints them."""

    lock: str

    @property
    def files(self) -> tuple[str, ...]:
        return (self.lock,)

    @property
    def lock_command(self) -> str:
        return f"mesh run --conda {self.lock.removesuffix('.lock')}"


Environment = UvProject | CondaList


class PackageFile(NamedTuple):
    """The archive of a package, as a lock names it.

    A wheel is below the name of its project in an index (`place`), a conda package below its platform in a `channel`.
    """

    name: str
    sha256: bytes
    place: str
    channel: str = ""

    def fits(self, machine: str) -> bool:
        """Tell whether Linux on machines of this kind may use it; an image or a Python may still not."""
        wheel = _WHEEL.fullmatch(self.name)
        if wheel is None:
            return self.channel != ""
        platform = wheel["platform"]
        return platform == "any" or ("linux" in platform and machine in platform)


class CondaPackage(NamedTuple):
    """A package of a channel, for machines of this `subdir`; `file`: its archive there."""

    channel: str
    subdir: str
    file: str
    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.channel}/{self.subdir}/{self.file}#sha256:{self.sha256}"

    @property
    def archive(self) -> PackageFile:
        return PackageFile(self.file, bytes.fromhex(self.sha256), self.subdir, self.channel)


def is_inside(path: str) -> bool:
    """Tell whether this is a plain path inside the working directory, which every file system takes."""
    try:
        check_path(path)
    except BadPath:
        return False
    return len(path) <= SAID


def check_environment(environment: Environment) -> None:
    """Raise EnvironmentRefused for a file that is not inside the working directory."""
    for name in environment.files:
        if not is_inside(name):
            raise EnvironmentRefused(f"{name!r} must be a plain path inside the working directory")


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


def files_of(packages: Sequence[str], lock: str) -> list[PackageFile]:
    """Return the files of these packages of a lock of uv. Only names and hashes are taken from it, no addresses."""
    from packaging.utils import canonicalize_name

    names = dict[str, str]()
    for address, sha256 in _LOCKED.findall(lock):
        name = unquote(urlsplit(address).path.rpartition("/")[2])
        if len(name) <= 255 and (_WHEEL.fullmatch(name) or _SOURCE.fullmatch(name)):
            names[sha256] = name
    found = []
    for line in packages:
        project = canonicalize_name(re.split(r"[\[=]", line, maxsplit=1)[0])
        hashes = re.findall("--hash=sha256:([0-9a-f]{64})", line)
        found += [PackageFile(names[one], bytes.fromhex(one), project) for one in hashes if one in names]
    return found


def conda_packages_of(lock: str) -> list[CondaPackage]:
    """Return the packages of a list; EnvironmentRefused if one is not an address of a package, with its hash."""
    _, mark, listed = f"\n{lock}".partition(f"\n{EXPLICIT}\n")
    if not mark:
        raise EnvironmentRefused(f"its lock is no list of conda packages: it has no line {EXPLICIT}")
    lines = list(_lines(listed))
    if not lines:
        raise EnvironmentRefused("its lock has no packages")
    if len(lines) > MOST_PACKAGES:
        raise EnvironmentRefused(f"its lock has {len(lines)} packages: an environment has at most {MOST_PACKAGES}")
    found = []
    for line in lines:
        match = _CONDA_PACKAGE.fullmatch(line)
        if match is None:
            raise EnvironmentRefused(
                f"its lock has {line[:100]!r}: a package must be an address of a channel with its SHA-256, "
                "as `conda list --explicit --sha256` prints it"
            )
        found.append(CondaPackage(**match.groupdict()))
    twice = next((name for name, times in Counter(package.name for package in found).items() if times > 1), None)
    if twice is not None:
        raise EnvironmentRefused(f"its lock has {twice} twice")
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
