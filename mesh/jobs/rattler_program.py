"""Solve for conda packages, or fetch them and link them into an environment: by rattler, in a process of its own.

The process has an end and bounds that its caller gives it, and does not end as others do: rattler's threads may still hold Python
objects, and one process of ten would crash (measured with py-rattler 0.28).

Packages are written by others, and rattler takes the paths that they name. So each archive is compared with its hash, unpacked,
and checked as a whole before the first file is linked: no path and no link of a package may lead out of the environment. rattler
then finds the unpacked packages where it keeps its own, and fetches nothing: the addresses that it is given lead nowhere. Scripts
of packages are not run.
"""

import asyncio
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, NamedTuple

from mesh.model.environment import CondaPackage, conda_packages_of
from mesh.util import trees

if TYPE_CHECKING:
    from rattler import RepoDataRecord

FETCHES = 4  # at a time (own choice)
TRIES = 3  # of a fetch (rattler's default)
SECTIONS: tuple[Literal["info", "pkg"], ...] = ("info", "pkg")  # of a .conda; a .tar.bz2 is read whole for either
MOST_INFO_BYTES = 64 << 20  # of each file by which a package describes itself; rattler reads them whole (own choice)


class BadPackage(Exception):
    """A package is not what its lock says, or would write or lead out of the environment."""


class Entry(NamedTuple):
    """A path that a package has in the environment, and where it leads if it is a link."""

    package: str
    path: PurePosixPath
    target: str | None


def main() -> None:
    """Run `solve PLATFORM`, with channels and requirements as JSON in its input, or `install LOCK` with its arguments."""
    order, about, *words = sys.argv[1:]
    try:
        if order == "solve":
            asyncio.run(solve(about, *json.load(sys.stdin)))
        else:
            asyncio.run(install(conda_packages_of(Path(about).read_text()), *words))
    except Exception as error:  # rattler's errors have no common base
        print(f"error: {error}", file=sys.stderr)
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def solve(platform: str, channels: Sequence[str], specs: Sequence[str]) -> None:
    """Print the packages that meet the requirements, on a machine with what this one has."""
    import rattler
    from rattler.virtual_package import VirtualPackage, VirtualPackageOverrides

    records = await rattler.solve(
        channels,
        [rattler.MatchSpec(spec, strict=False) for spec in specs],
        platforms=[rattler.Subdir(platform), "noarch"],
        virtual_packages=VirtualPackage.detect(VirtualPackageOverrides.from_env()),
    )
    for record in records:
        print(f"{record.url}#sha256:{record.sha256.hex() if record.sha256 else ''}")


async def install(packages: Sequence[CondaPackage], place: str, source: str, seen: str) -> None:
    """Make an environment of these packages in the directory `place`; BadPackage if one must not be in any.

    `source`: the address below which archives are, by hash and name; `seen`: where guests see the environment.
    """
    import rattler
    from rattler.package_cache import PackageCache

    env = Path(place)
    unpacked, gate = env.with_name("packages"), asyncio.Semaphore(FETCHES)
    client = rattler.Client([rattler.networking.RetryMiddleware(TRIES)])  # it reads no passwords of the owner

    async def bring(package: CondaPackage) -> "RepoDataRecord":
        async with gate:
            return await _unpack(package, await _fetch(package, source, env.parent, client), unpacked)

    records = await asyncio.gather(*map(bring, packages))
    check(_entries(records, unpacked))
    await rattler.install(
        records,
        env,
        package_cache=PackageCache(unpacked),
        installed_packages=[],
        execute_link_scripts=False,
        show_progress=False,
        alternative_target_prefix=seen,
    )


async def _fetch(package: CondaPackage, source: str, scratch: Path, client: object) -> Path:
    """Fetch the archive with the hash of the lock."""
    from rattler.package_streaming import download_to_path

    path = scratch / package.file
    await download_to_path(client, f"{source}/{package.sha256}/{package.file}", path)  # type: ignore[arg-type]
    if await asyncio.to_thread(_digest, path) != package.sha256:
        raise BadPackage(f"{package.file} has another hash than in the lock")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _unpack(package: CondaPackage, archive: Path, unpacked: Path) -> "RepoDataRecord":
    """Unpack an archive where rattler looks for it, and return what it says about itself."""
    from rattler import PackageRecord, RepoDataRecord
    from rattler.package_streaming import PackageArchive, extract

    stem = package.file.removesuffix(".conda").removesuffix(".tar.bz2")
    try:
        whole = await PackageArchive.from_path(archive)
        for section in SECTIONS if archive.suffix == ".conda" else SECTIONS[1:]:
            await whole.list_files(section)  # `extract` leaves out what would lead out; this is an error
    except OSError as error:
        raise BadPackage(f"{package.file}: {error}") from error
    await asyncio.to_thread(extract, archive, unpacked / stem)
    await asyncio.to_thread(archive.unlink)
    info = unpacked / stem / "info"
    files = [file.lstat() for file in info.glob("*.json")]
    if info.is_symlink() or any(not stat.S_ISREG(file.st_mode) or file.st_size > MOST_INFO_BYTES for file in files):
        raise BadPackage(f"{package.file} describes itself by a link, or by more than {MOST_INFO_BYTES >> 20} MiB")
    record = PackageRecord.from_index_json(info / "index.json")
    if (called := f"{record.name.normalized}-{record.version}-{record.build}") != stem:
        raise BadPackage(f"{package.file} says that it is {called[:100]!r}")
    return RepoDataRecord(record, package.file, f"file:///not/to/be/fetched/{package.file}", package.channel)


def _entries(records: Sequence["RepoDataRecord"], unpacked: Path) -> Iterable[Entry]:
    """Return what the packages list, at the paths that it gets. BadPackage if one has a link that leads out of it."""
    from rattler import PathsJson

    python = next((record for record in records if record.name.normalized == "python"), None)
    minor = "" if python is None else ".".join(str(python.version).split(".")[:2])
    site = PurePosixPath((python and python.python_site_packages_path) or f"lib/python{minor}/site-packages")
    places = {"site-packages": site, "python-scripts": PurePosixPath("bin")}
    yield Entry("python", site, None)
    for record in records:
        name = f"{record.name.normalized}-{record.version}-{record.build}"
        root = unpacked / name
        has = {
            PurePosixPath(entry.path).relative_to(root): os.readlink(entry) if entry.is_symlink() else None  # noqa: PTH115
            for entry in trees.walk(root)
        }
        check(Entry(name, *one) for one in has.items())  # rattler reads files through links, also through unlisted ones
        for listed in PathsJson.from_package_directory(root).paths:
            path = PurePosixPath(listed.relative_path)
            if path not in has:  # nor is it read through a link
                raise BadPackage(f"{name} lists a path that is not its own: {str(path)[:100]!r}")
            yield Entry(name, path, has[path])
            if record.noarch.python:
                top, *rest = path.parts
                yield Entry(name, places.get(top, PurePosixPath(top)).joinpath(*rest), has[path])


def check(entries: Iterable[Entry]) -> None:
    """Raise BadPackage unless everything stays inside the environment.

    Links are relative and go up only at their beginning, and nothing lies beyond a link. So each path is where its name says, and
    each link ends inside, whichever others it passes.
    """
    found = list(entries)
    links = {entry.path: entry.package for entry in found if entry.target is not None}
    for package, path, target in found:
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise BadPackage(f"{package} has a path that leads out of the environment: {str(path)[:100]!r}")
        beyond = next((links[parent] for parent in path.parents if parent in links), None)
        if beyond is not None:
            raise BadPackage(f"{package} has {str(path)[:100]!r} beyond a link of {beyond}")
        if target is not None:
            steps = PurePosixPath(target).parts
            up = next((place for place, step in enumerate(steps) if step != ".."), len(steps))
            if target.startswith("/") or ".." in steps[up:] or up >= len(path.parts):
                raise BadPackage(f"{package} has a link that leads out of the environment: {str(path)[:100]!r}")
