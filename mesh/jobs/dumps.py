"""System checkpoints of one attempt: what belongs to one, and where it lies until it is stored.

dumps/N/dump   what the engine saved       dumps/N/work, ckpt, out, ctl   the job's files, as they were then

A dump has the names and lengths of open files, not what is in them: so the files are copied while the guest stands still, and
stored with it. One that could not be stored is dropped, and its user told; the last that was committed stands.
"""

import asyncio
import itertools
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from mesh import trees
from mesh.engine.engine import EngineError, Guest

PARTS = ("work", "ckpt", "out", "ctl")
LOOKS, LOOK_S = 500, 0.02  # for a guest to stand still: a container takes some milliseconds


class Dumped(msgspec.Struct, frozen=True):
    """`roots` for the store; `like`: see placement/likeness.py; `directory` has all of it. The guest was still for `stood_s`."""

    roots: dict[str, Path]
    like: str
    directory: Path
    stood_s: float


class Dumps:
    """`stand(True)` keeps the guest from running, whatever its lease says; `stand(False)` lets it go on."""

    def __init__(self, base: Path, stand: Callable[[bool], None]) -> None:
        self._base, self._stand = base, stand
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._pending: Dumped | None = None

    async def last(self, guest: Guest | None) -> Dumped | None:
        """The one that is not stored yet, else a new one of this guest; None if that has ended. EngineError, OSError."""
        async with self._lock:
            if self._pending is None and guest is not None:
                self._pending = await self._take(guest)
                self._stand(False)
            dumped, self._pending = self._pending, None
            return dumped

    async def part(self, guest: Guest) -> None:
        """Make the last one of a guest that has to go: it stays still. EngineError, OSError."""
        async with self._lock:
            self._pending = await self._take(guest)

    async def drop(self, dumped: Dumped) -> None:
        await asyncio.to_thread(trees.remove, dumped.directory)

    async def _take(self, guest: Guest) -> Dumped:
        begun = time.monotonic()
        directory = self._base / "dumps" / str(next(self._numbers))
        self._stand(True)
        try:
            for _ in range(LOOKS):
                if await guest.stands_still():
                    break
                await asyncio.sleep(LOOK_S)
            else:
                raise EngineError(f"the guest did not stand still within {LOOKS * LOOK_S:g} s")
            directory.mkdir(parents=True, mode=0o700)
            like = await guest.dump(directory / "dump")
            await asyncio.to_thread(_copy_files, self._base, directory)
        except BaseException:
            self._stand(False)
            await asyncio.to_thread(trees.remove, directory)
            raise
        roots = {part: directory / part for part in ("dump", *PARTS)}
        return Dumped(roots, like, directory, time.monotonic() - begun)


def _copy_files(base: Path, directory: Path) -> None:
    """Links as links, and neither pipes nor sockets, which the store does not keep. The daemon itself replaces files in `ctl`
    meanwhile, so one may be gone."""
    for part in PARTS:
        shutil.copytree(base / part, directory / part, symlinks=True, ignore=_left_out, copy_function=_copy_if_there)


def _left_out(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not _is_kept(Path(directory, name))]


def _is_kept(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _copy_if_there(source: str, destination: str) -> None:
    with suppress(FileNotFoundError):
        shutil.copy2(source, destination, follow_symlinks=False)
