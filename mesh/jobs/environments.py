"""Environments: those of jobs on this node, built by uv or of conda packages once for each lock, platform and Python.

By uv, the Python is one of this machine, or that of the job's image. uv cannot start the latter: it installs wheels for it below
an environment that is laid out here as `venv` does, and that containers see at `INSIDE`. An environment of conda packages has its
own Python. Its files have the path at which guests see them.

environments/<user>/<key>-<build>/env   an environment; `complete` beside it is written last, so one without it is removed
environments/<user>/cache               uv's cache of this user's packages
environments/packages                   the archives that environments were made of, for all users and other nodes (`packages`)
environments/scratch                    directories of programs that run, each removed with its end

A build has a directory of its own: the program of a daemon that was killed may still write into its own.

Users share no unpacked files, since a plain process may write what its daemon's user can. They share archives, each of which is
compared with the hash of the lock when it is unpacked. uv reads two files of the job and runs outside of the guest's sandbox: it
builds no packages, reads no settings, reaches no address but this node's packages, and looks for no workspace above the project
(`BARRIER`). Its only look at an environment with Python is before the first package is in it, since
packages may have code that runs whenever Python starts. Each program has a home and a place for temporary files of its own, where
no other user can put anything and where none of the owner's passwords are.
None of the code of conda packages is run (`rattler_program`).
"""

import asyncio
import ctypes
import logging
import os
import resource
import shutil
import signal
import stat
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from membership.durable import write_durably
from mesh.execution.control_files import read_file
from mesh.execution.disk_usage import blocks, tree_use
from mesh.execution.engine import INSIDE
from mesh.images import blobs
from mesh.jobs.image_python import ImagePython
from mesh.jobs.package_origins import PackageOrigins
from mesh.jobs.packages import HOST, Neighbours, Packages
from mesh.model.environment import (
    CONDA_PLATFORMS,
    EXPLICIT,
    MOST_LOCK_BYTES,
    CondaList,
    Environment,
    EnvironmentRefused,
    PackageFile,
    UvProject,
    conda_packages_of,
    files_of,
    packages_of,
    python_of,
)
from mesh.util import trees
from mesh.util.byte_text import amount
from mesh.util.isolated import isolated
from mesh.util.redaction import redacted
from mesh.util.remembered import Remembered
from mesh.util.text import plural

MARK, ENV, CACHE, PACKAGES, SCRATCH = "complete", "env", "cache", "packages", "scratch"
BARRIER = "[tool.uv.workspace]\n"  # a workspace without members: uv looks no further up
ASK_S, BUILD_S = 60.0, 1800.0  # for uv to read a lock, and to fetch and install it (own choice)
LOOK_S = 2.0  # between looks at the size of what is built (own choice)
MOST_TEXT = 1 << 16  # of uv's messages
MOST_MEMORY = 2 << 30  # of each program: a marker in a lock of 1 KB can take any (own choice)
REMEMBERED = 8  # locks, and Pythons (own choice); the largest locks have 16 MiB with their project
SCRIPT_HEAD = 4096  # of a program: where it names its interpreter
QUIET = ("--no-config", "--no-python-downloads", "--no-progress", "--color", "never")
PASSED = ("PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
NO_UV = "uv is not installed on this node: its owner can run `pip install uv`, or see https://docs.astral.sh/uv"
NO_CONDA = "py-rattler is not installed on this node: its owner can run `pip install py-rattler` beside campus-mesh"

log = logging.getLogger(__name__)


class NoEnvironment(OSError):
    """This node cannot make the environment; another one may."""


class OwnPython(NamedTuple):
    """A Python of this machine."""

    path: Path
    version: str
    stamp: tuple[int, ...]

    @property
    def identity(self) -> str:
        return f"{self.path.resolve()}\0{self.version}"


Tell = Callable[[int], None]


class Recipe(NamedTuple):
    """How an environment is made: `make` does it in a new directory, and tells how many packages came.

    `base`: on what the result depends besides the packages.
    """

    tool: str
    packages: Sequence[str]
    base: str
    make: Callable[[Path, Tell], Awaitable[None]]


class Environments:
    """`index` and `channels`: where packages may come from outside the mesh (`PackageOrigins`).

    A node whose index wants a password gives no packages to `neighbours`: they may not be for everybody.
    """

    def __init__(
        self, directory: Path, index: str, quota_bytes: int, channels: Sequence[str], neighbours: Neighbours
    ) -> None:
        self._directory, self._quota = directory, quota_bytes
        origins = PackageOrigins(index, [channel.rstrip("/") for channel in channels])
        self.packages = Packages(directory / PACKAGES, quota_bytes, origins, "@" not in index, neighbours)
        self._reading = asyncio.Lock()  # one lock at a time: it takes memory
        self._building = asyncio.Lock()  # one at a time: it takes the disk and the network
        self._used = Counter[Path]()
        self._packages = Remembered[tuple[bool, str, str], list[str]](REMEMBERED)
        # By the versions that are wanted: uv needs half a second to find one.
        self._pythons = Remembered[str, OwnPython](REMEMBERED)
        self._of_images = Remembered[str, ImagePython](REMEMBERED)  # by the engine's id of the image

    async def python_of(self, image_id: str | None, ask: Callable[[], Awaitable[ImagePython]]) -> ImagePython:
        """Return the Python of an image, which is asked once."""
        found = self._of_images.get(image_id) if image_id is not None else None
        if found is None:
            found = await ask()
        if image_id is not None:
            self._of_images.keep(image_id, found)
        return found

    async def ready(
        self,
        user_key: bytes,
        environment: Environment,
        work: Path,
        say: Callable[[str], None],
        inside: ImagePython | None = None,
        contained: bool = False,
    ) -> Path:
        """Return the job's environment once it is here; `release` ends its use.

        `inside`: the Python of its image, for one by uv; `contained`: its guest sees it at `INSIDE`.
        NoEnvironment if this node cannot make it, EnvironmentRefused if none can.
        """
        texts = [await asyncio.to_thread(_read, work, name, environment) for name in environment.files]
        if isinstance(environment, CondaList):
            recipe = self._conda_recipe(texts[0], contained)
        else:
            recipe = await self._uv_recipe(bool(environment.script), texts[0], texts[1], inside)
        user = self._directory / blake2b(user_key, digest_size=8).hexdigest()
        asked = "\0".join([*recipe.packages, recipe.base, os.uname().machine])
        key = blake2b(asked.encode(), digest_size=16).hexdigest()
        place = self._found(user, key)
        if place is None:
            what = f"{plural(len(recipe.packages), 'package')} by {recipe.tool}"
            say(f"{what}, once another environment is made" if self._building.locked() else what)
            async with self._building:
                place = self._found(user, key)  # another job may have waited for the same one
                if place is None:
                    place = user / f"{key}-{os.urandom(4).hex()}"
                    await self._build(place, recipe, lambda came: say(f"{what}, of which {came} came"))
        self._used[place] += 1
        os.utime(place / MARK)  # the time of its last use
        return place / ENV

    def _found(self, user: Path, key: str) -> Path | None:
        return next((place for place in user.glob(f"{key}-*") if (place / MARK).exists()), None)

    def release(self, environment: Path) -> None:
        self._used[environment.parent] -= 1
        self._used += Counter()  # drops zeros

    def clear(self) -> None:
        """Remove what a crash has left half built."""
        trees.remove(self._directory / SCRATCH)
        for place in self._places():
            if not (place / MARK).exists():
                trees.remove(place)

    async def _build(self, place: Path, recipe: Recipe, tell: Tell) -> None:
        await asyncio.to_thread(trees.remove, place)
        try:
            await self._make_room()
            await asyncio.to_thread(place.mkdir, 0o700, parents=True)
            await recipe.make(place, tell)
            await asyncio.to_thread(_sync, place)
            await asyncio.to_thread(write_durably, place / MARK, b"")
        except BaseException:
            await asyncio.to_thread(trees.remove, place)
            raise

    # --- by uv

    async def _uv_recipe(self, script: bool, source: str, lock: str, inside: ImagePython | None) -> Recipe:
        packages = await self._packages_of(script, source, lock)
        wanted = python_of(lock)
        if inside is not None:
            inside.check(wanted)
        python = inside or await self._own_python(wanted)
        files = files_of(packages, lock)

        async def make(place: Path, tell: Tell) -> None:
            await self._install_wheels(place, packages, files, python, tell)

        return Recipe("uv", packages, python.identity, make)

    async def _packages_of(self, script: bool, source: str, lock: str) -> list[str]:
        """Return the packages of a lock by uv, which reads these files in a directory of their own."""
        found = self._packages.get((script, source, lock))
        if found is None:
            copied = UvProject("script.py" if script else "")  # its own name could be read as an option
            async with self._reading, self._scratch() as scratch:
                (scratch / "pyproject.toml").write_text(BARRIER)
                alone = scratch / "project"
                alone.mkdir()
                (alone / copied.source).write_text(source)
                (alone / copied.lock).write_text(lock)
                which = ["--script", copied.script] if script else ["--no-emit-project"]
                order = ["export", "--frozen", "--offline", "--no-header", "--no-annotate"]
                exported = await self._ran(_uv(*order, "--format", "requirements-txt", *which), ASK_S, alone)
            found = packages_of(exported)
        self._packages.keep((script, source, lock), found)
        return found

    async def _own_python(self, wanted: str) -> OwnPython:
        """Return a Python of this machine of one of these versions."""
        found = self._pythons.get(wanted)
        if found is None or found.stamp != _stamp(found.path):  # it was upgraded
            found_at = await self._ran(_uv("python", "find", "--offline", "--no-project", wanted), ASK_S)
            path = Path(found_at.strip())
            version = await self._ran([str(path), "-I", "-c", "import sys; print(sys.version, sys.platform)"], ASK_S)
            found = OwnPython(path, version, _stamp(path))
        self._pythons.keep(wanted, found)
        return found

    async def _install_wheels(
        self,
        place: Path,
        packages: Sequence[str],
        files: Sequence[PackageFile],
        python: OwnPython | ImagePython,
        tell: Tell,
    ) -> None:
        env = place / ENV
        if isinstance(python, OwnPython):
            made_by = _uv("venv", "--offline", "--no-project", "--python", str(python.path), str(env))
            await self._ran(made_by, ASK_S, place)
            there = ["--python", str(env / "bin" / "python")]
        else:
            site = await asyncio.to_thread(_lay_out, env, python)
            there = ["--python", sys.executable, "--target", str(site)]
            there += ["--python-version", python.version, "--python-platform", python.platform]
        if packages:
            listed = place / "packages.txt"
            listed.write_text("\n".join(packages) + "\n")
            order = ["pip", "install", "--no-deps", "--require-hashes", "--no-build", "--requirements", str(listed)]
            order += [*there, "--cache-dir", str(place.parent / CACHE)]
            async with self._source(files, tell) as variables:
                index = {"UV_DEFAULT_INDEX": f"http://{HOST}/simple", "UV_HTTP_TIMEOUT": f"{BUILD_S:.0f}"}
                await self._ran(_uv(*order), BUILD_S, place, bounded=True, variables=variables | index)
        if isinstance(python, ImagePython):
            await asyncio.to_thread(_place_scripts, env, site)
            await asyncio.to_thread(_let_read, env)

    @asynccontextmanager
    async def _source(self, files: Sequence[PackageFile], tell: Tell) -> AsyncIterator[dict[str, str]]:
        """Serve packages to a program with these variables. NoEnvironment says which it could not get."""
        async with self.packages.serve(files, tell) as build:
            try:
                yield dict(build.variables)
            except NoEnvironment as error:
                if not build.problems:
                    raise
                problem = redacted(build.problems[0].encode(), ()).decode()
                raise NoEnvironment(f"its environment cannot be made on this node: {problem}") from error

    # --- of conda packages

    def _conda_recipe(self, lock: str, contained: bool) -> Recipe:
        if not has_conda():
            raise NoEnvironment(NO_CONDA)
        packages, here = conda_packages_of(lock), CONDA_PLATFORMS.get(os.uname().machine, "another platform")
        other = next((package.subdir for package in packages if package.subdir not in {here, "noarch"}), None)
        if other is not None:
            raise NoEnvironment(f"its lock is for {other}, and this node is {here}")
        listed, seen = [str(package) for package in packages], INSIDE if contained else ""

        async def make(place: Path, tell: Tell) -> None:
            lock, env = place / "packages.txt", place / ENV
            lock.write_text("\n".join([EXPLICIT, *listed]) + "\n")
            program = isolated("mesh.jobs", "rattler_program", packages=True)
            words = [str(lock), str(env), f"http://{HOST}", seen or str(env)]
            async with self._source([package.archive for package in packages], tell) as variables:
                await self._ran([*program, "install", *words], BUILD_S, place, bounded=True, variables=variables)
            await asyncio.to_thread(trees.remove, place / "packages")
            if contained:
                await asyncio.to_thread(_let_read, env)

        return Recipe("conda", listed, f"conda at {seen}", make)

    # --- disk

    def _places(self) -> list[Path]:
        return [place for place in self._directory.glob("*/*-*") if place.is_dir()]

    async def _make_room(self) -> None:
        """Remove packages beyond their bound, and environments and caches that nobody uses until half of the quota is free.

        The longest unused go first, and caches last.
        """

        def age(place: Path) -> float:
            with suppress(OSError):
                return (place / MARK).stat().st_mtime
            return 0.0

        await asyncio.to_thread(self.packages.store.trim)
        for old in [*sorted(self._places(), key=age), *self._directory.glob(f"*/{CACHE}")]:
            if not await asyncio.to_thread(self._takes_over, self._quota // 2):
                return
            if not self._used[old]:
                (old / MARK).unlink(missing_ok=True)  # at once: from now on nobody finds it
                log.info(
                    "environment %s is removed: the environments take more than half of env_cache_gib", old.name[:8]
                )
                await asyncio.to_thread(trees.remove, old)

    def _takes_over(self, most_bytes: int) -> bool:
        """Tell whether the environments take more, cannot be counted, or have filled the disk.

        uv links the files of an environment into its cache.
        """
        if shutil.disk_usage(self._directory).free < blobs.SPARE_BYTES:
            return True
        try:
            return tree_use([self._directory], most_bytes, of=partial(blocks, of_link=True))[0] > most_bytes
        except trees.OutOfReach:
            return True

    async def _watch_size(self) -> None:
        """Return once the environments take more than the quota."""
        while True:
            if await asyncio.to_thread(self._takes_over, self._quota):
                return
            await asyncio.sleep(LOOK_S)

    # --- programs

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        """Make a directory that is removed after its use."""
        place = self._directory / SCRATCH / os.urandom(8).hex()
        place.mkdir(0o700, parents=True)
        try:
            yield place
        finally:
            await asyncio.to_thread(trees.remove, place)

    async def _ran(
        self,
        words: Sequence[str],
        within_s: float,
        where: Path | None = None,
        bounded: bool = False,
        variables: Mapping[str, str] = {},
    ) -> str:
        """Return what a program prints; NoEnvironment if it fails, takes too long, or, if `bounded`, fills the quota.

        Any user can read the arguments of a program, and nobody else its `variables`.
        """
        async with self._scratch() as home:
            env = {name: os.environ[name] for name in (*PASSED, *map(str.lower, PASSED)) if name in os.environ}
            env |= {"HOME": str(home), "TMPDIR": str(home), "UV_NO_BUILD": "1", "NO_COLOR": "1", **variables}
            # The Pythons that uv has installed for the owner are some of this machine.
            env["UV_PYTHON_INSTALL_DIR"] = str(Path.home() / ".local/share/uv/python")
            return await self._ran_with(env, words, within_s, where or home, bounded)

    async def _ran_with(
        self, env: Mapping[str, str], words: Sequence[str], within_s: float, where: Path, bounded: bool
    ) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=where,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most_memory = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY)
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (most_memory, most_memory))
        assert process.stdout is not None and process.stderr is not None
        most = MOST_LOCK_BYTES
        reading = asyncio.gather(_first(process.stdout, most), _first(process.stderr, MOST_TEXT), process.wait())
        watching = asyncio.ensure_future(self._watch_size()) if bounded else None
        try:
            waited = [future for future in (reading, watching) if future is not None]
            await asyncio.wait(waited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            full = bounded and await asyncio.to_thread(self._takes_over, self._quota)  # it may end before a look
            if full or not reading.done():
                room = f"more than {amount(self._quota)} (env_cache_gib), or all but {amount(blobs.SPARE_BYTES)} of the disk"
                why = room if full else f"more than {within_s:g} s"
                raise NoEnvironment(f"its environment takes {why} on this node")
            shown, told, code = reading.result()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            ending = [future for future in (reading, watching) if future is not None]
            for future in ending:
                future.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await process.wait()
        if code:
            text = " ".join(redacted(told, ()).decode(errors="replace").split())
            text = text.partition("error: ")[2] or text  # before that, uv names Pythons of this machine
            raise NoEnvironment(f"its environment cannot be made on this node: {text[-400:]}")
        return shown.decode()


def _lay_out(env: Path, python: ImagePython) -> Path:
    """Make an empty environment as `venv` does, for the Python of an image; return where its packages go."""
    (env / "bin").mkdir(parents=True)
    site = env / "lib" / python.name / "site-packages"
    site.mkdir(parents=True)
    (env / "lib64").symlink_to("lib")  # some distributions look there
    for name in ("python", "python3", python.name):
        (env / "bin" / name).symlink_to(python.path)
    home = python.path.rpartition("/")[0]
    (env / "pyvenv.cfg").write_text(
        f"home = {home}\ninclude-system-site-packages = false\nversion = {python.version}\n"
    )
    return site


def _place_scripts(env: Path, site: Path) -> None:
    """Move the programs of packages to the environment's own, and have them start the Python that a container sees."""
    for path in (site / "bin").glob("*"):
        mode, place = path.lstat().st_mode, env / "bin" / path.name
        if not stat.S_ISREG(mode) or not mode & stat.S_IXUSR or os.path.lexists(place):
            continue
        with path.open("rb") as source:
            head = source.read(SCRIPT_HEAD)
            if not head.startswith(b"#!"):
                path.rename(place)
                continue
            path.unlink()  # it may be a link into the cache
            with place.open("wb") as target:
                target.write(head.replace(sys.executable.encode(), f"{INSIDE}/bin/python".encode(), 1))
                shutil.copyfileobj(source, target)
        place.chmod(0o755)
    with suppress(OSError):
        (site / "bin").rmdir()


def _let_read(env: Path) -> None:
    """Let others read and run what the owner may: a container of root's daemon has another user, and a service's umask is 077."""
    for path in chain([env], (Path(entry.path) for entry in trees.walk(env))):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            rights = mode & (stat.S_IRUSR | stat.S_IXUSR)
            path.chmod(stat.S_IMODE(mode) | rights >> 3 | rights >> 6)


def _stamp(python: Path) -> tuple[int, ...]:
    """Return what changes with the program; empty if it is gone."""
    with suppress(OSError):
        found = python.stat()
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
    return ()


def _uv(*words: str) -> list[str]:
    """Return a command of uv. NoEnvironment if it is not here."""
    program = find_uv()
    if program is None:
        raise NoEnvironment(NO_UV)
    return [program, *words, *QUIET]


def find_uv() -> str | None:
    """Return the program uv: on the PATH, or of the Python package; None if neither is here."""
    found = shutil.which("uv")
    if found is None:
        with suppress(ImportError, FileNotFoundError):
            from uv import find_uv_bin  # type: ignore[import-not-found,unused-ignore]

            found = str(find_uv_bin())
    return found


def has_conda() -> bool:
    """Tell whether this node can make environments of conda packages."""
    return find_spec("rattler") is not None


def _read(work: Path, name: str, environment: Environment) -> str:
    """Read a file of the job; its directories may be links that it made."""
    path = work / name
    try:
        if not path.resolve().is_relative_to(work.resolve()):
            raise EnvironmentRefused(f"{name} is not inside the working directory")
        data = read_file(path, MOST_LOCK_BYTES)
        text = data.decode()
    except FileNotFoundError as error:
        raise EnvironmentRefused(
            f"the working directory has no {name}: `{environment.lock_command}` makes the lock"
        ) from error
    except UnicodeDecodeError as error:
        raise EnvironmentRefused(f"{name} is not UTF-8") from error
    if len(data) > MOST_LOCK_BYTES:
        raise EnvironmentRefused(f"{name} is larger than {amount(MOST_LOCK_BYTES)}")
    return text


async def _first(reader: asyncio.StreamReader, most: int) -> bytes:
    """Return the first bytes of a stream, and read the rest."""
    kept = b""
    while piece := await reader.read(1 << 16):
        kept += piece[: most - len(kept)]
    return kept


def _sync(place: Path) -> None:
    """Bring what was written to the disk: the mark must not be there before it."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs: {place}")
    finally:
        os.close(descriptor)
