"""System checkpoints of one attempt: their parts, and where they lie until they are stored.

    dumps/N/dump   what the engine saved       dumps/N/work, ckpt, out, ctl   the job's files at that time

A dump contains the names and lengths of open files, not their content, so the files are copied while the guest is frozen and
stored with it. A dump that could not be stored is deleted, and the user is informed; the last committed one stands.
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

from mesh.execution.engine import EngineError, Guest
from mesh.util import trees

PARTS = ("work", "ckpt", "out", "ctl")
LOOKS, LOOK_S = 500, 0.02  # for the guest to freeze: a container takes some milliseconds


class Dumped(msgspec.Struct, frozen=True):
    """A dump on this disk: `roots` for the store; `like`: see placement/likeness.py; `directory` holds all of it. The guest
    was frozen for `stood_s`.
    """

    roots: dict[str, Path]
    platform: str
    directory: Path
    stood_s: float


class Dumps:
    """`stand(True)` freezes the guest whatever its lease allows; `stand(False)` lets it continue."""

    def __init__(self, base: Path, stand: Callable[[bool], None]) -> None:
        self._base, self._stand = base, stand
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._pending: Dumped | None = None

    async def last(self, guest: Guest | None) -> Dumped | None:
        """Return the dump that is not stored yet, else make one; None if the guest has ended. EngineError, OSError."""
        async with self._lock:
            if self._pending is None and guest is not None:
                self._pending = await self._take(guest)
                self._stand(False)
            dumped, self._pending = self._pending, None
            return dumped

    async def part(self, guest: Guest) -> None:
        """Make the last dump of a guest that has to leave: it stays frozen. EngineError, OSError."""
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
                raise EngineError(f"the guest did not freeze within {LOOKS * LOOK_S:g} s")
            directory.mkdir(parents=True, mode=0o700)
            platform = await guest.dump(directory / "dump")
            await asyncio.to_thread(_copy_files, self._base, directory)
        except BaseException:
            self._stand(False)
            await asyncio.to_thread(trees.remove, directory)
            raise
        roots = {part: directory / part for part in ("dump", *PARTS)}
        return Dumped(roots, platform, directory, time.monotonic() - begun)


def _copy_files(base: Path, directory: Path) -> None:
    """Copy the job's files: links as links, no pipes and no sockets, which the store does not keep.

    The daemon replaces files in `ctl` meanwhile, so a file may disappear.
    """
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
