"""Ask an image for its Python, in a guest with the rights of a job.

The answer is not trusted: it decides only which wheels guests of this image see.
"""

import asyncio
import os
import re
from pathlib import Path

import msgspec

from membership.malformed import MALFORMED
from mesh.consensus.contract import EXIT_NOT_FOUND
from mesh.execution.control_files import read_file
from mesh.execution.disk_usage import tree_use
from mesh.execution.engine import BadCommand, Engine, EngineError, Guest, Launch
from mesh.model.environment import EnvironmentRefused

WITHIN_S = 60.0  # for the image's Python to start and tell (own choice)
MOST_BYTES = 4096  # of what it prints
MOST_WRITTEN, MOST_FILES = 1 << 20, 100  # bytes and files in its directories and log (own choice)
LOOK_S = 0.2  # between two looks at them (own choice)
MEMORY_MIB, PIDS = 256, 32  # own choice; a Python that prints a line needs 10 MiB
GLIBC_MINORS = (17, 28, *range(31, 41))  # the versions 2.x that uv knows wheels for (`uv pip install --help`)
TELL = """
import json, os, sys
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION")
except (ValueError, OSError):
    libc = None
python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
kind = sys.implementation.name
kind += " without a GIL" if "t" in sys.abiflags else ""
kind += " of 32 bits" if sys.maxsize < 2**32 else ""
print(json.dumps([python, list(sys.version_info[:3]), kind, libc or "musl"]))
"""
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._+-]{1,100}){1,20}")
_GLIBC = re.compile(r"glibc 2\.([0-9]{1,3})(?:\.[0-9]{1,3})?")

_decoder = msgspec.json.Decoder(tuple[str, tuple[int, int, int], str, str])


class ImagePython(msgspec.Struct, frozen=True):
    """`path`: the program in the image; `version`: with three numbers; `platform`: as uv names it."""

    path: str
    version: str
    platform: str

    @property
    def name(self) -> str:
        """Return the name of its program and of its directory of packages, as `python3.12`."""
        return "python" + self.version.rpartition(".")[0]

    @property
    def identity(self) -> str:
        return "\0".join((self.path, self.version, self.platform))

    def check(self, wanted: str) -> None:
        """Raise EnvironmentRefused unless a lock for these versions of Python is for this one."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            fits = SpecifierSet(wanted).contains(self.version)
        except InvalidSpecifier as error:
            raise EnvironmentRefused(f"its lock names no versions of Python: {wanted}") from error
        if not fits:
            raise EnvironmentRefused(f"its lock is for Python {wanted}, and its image has {self.version}")


async def ask(engine: Engine, place: Path, image: str, image_id: str | None, job: str, node: str) -> ImagePython:
    """Ask an image, in a guest whose files are in the new directory `place`.

    EnvironmentRefused if no environment fits the image; EngineError if it cannot be asked on this node.
    """
    directories = [place / name for name in ("work", "ckpt", "out", "ctl")]
    for directory in directories:
        directory.mkdir(parents=True)
    work, ckpt, out, ctl = map(str, directories)
    launch = Launch(
        job=job,
        attempt=0,
        argv=("python3", "-I", "-c", TELL),
        env={},
        work_dir=work,
        ckpt_dir=ckpt,
        out_dir=out,
        ctl_dir=ctl,
        log_path=str(place / "log"),
        node=node,
        grace_s=0.0,
        image=image,
        image_id=image_id,
        memory_mib=MEMORY_MIB,
        pids=PIDS,
    )
    try:
        code = await _end(await engine.start(launch), place, image)
    except BadCommand:
        code = EXIT_NOT_FOUND
    if code == EXIT_NOT_FOUND:
        raise EnvironmentRefused(f"image {image} has no python3 for an environment: leave out --uv, or add one to it")
    if code != 0:
        raise EngineError(f"the python3 of image {image} does not say what it is: it ended with {code}")
    return parse(await asyncio.to_thread(read_file, place / "log", MOST_BYTES), image)


async def _end(guest: Guest, place: Path, image: str) -> int:
    """Return the exit status of a guest, which is killed if it takes too long or writes too much below `place`."""
    waiting = asyncio.ensure_future(guest.wait())
    try:
        async with asyncio.timeout(WITHIN_S):
            while not waiting.done():
                await asyncio.wait([waiting], timeout=LOOK_S)
                written, files = await asyncio.to_thread(tree_use, [place], MOST_WRITTEN, MOST_FILES)
                if written > MOST_WRITTEN or files > MOST_FILES:
                    raise EnvironmentRefused(f"the python3 of image {image} writes files before it says what it is")
            return waiting.result().code
    except TimeoutError as error:
        raise EngineError(f"its image did not say in {WITHIN_S:g} s what its python3 is") from error
    finally:
        waiting.cancel()
        await guest.kill()


def parse(told: bytes, image: str) -> ImagePython:
    """Return what an image has told; EnvironmentRefused if that names no Python with wheels."""
    try:
        path, version, kind, libc = _decoder.decode(told)
    except MALFORMED as error:
        raise EnvironmentRefused(f"the python3 of image {image} does not say what it is: {error}") from error
    if _PATH.fullmatch(path) is None or not all(0 <= part < 1000 for part in version):
        raise EnvironmentRefused(f"the python3 of image {image} is at no plain path, or of no plain version")
    if kind != "cpython":
        raise EnvironmentRefused(
            f"the python3 of image {image} is {kind[:40]!r}: environments are for the usual CPython"
        )
    return ImagePython(path, ".".join(map(str, version)), _platform(libc, image))


def _platform(libc: str, image: str) -> str:
    machine = os.uname().machine
    if libc == "musl":
        return f"{machine}-unknown-linux-musl"
    found = _GLIBC.fullmatch(libc)
    fitting = [minor for minor in GLIBC_MINORS if found is not None and minor <= int(found[1])]
    if not fitting:
        raise EnvironmentRefused(f"image {image} has the C library {libc[:40]!r}: no wheels are made for that")
    return f"{machine}-manylinux_2_{fitting[-1]}"
