"""An engine within its owner's ceilings: what a job asks for beyond them is refused, what it does not ask for is set, and what it
writes is bounded by looking: a log that is too long is cut, a guest that has written too much is ended. A system checkpoint that
would not fit besides is not made.

Looking is no quota of a file system: between two looks a fast disk takes some gigabytes more. A container's root is read-only,
and its /tmp and /dev/shm are memory, so its directories and its log are all that it can fill.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from mesh.amount import amount
from mesh.engine import cgroups
from mesh.engine.ceilings import Ceilings
from mesh.engine.engine import Availability, Engine, EngineError, Exit, Guest, Launch
from mesh.engine.process import HOME
from mesh.engine.room import NoRoom, Room, Writers, blocks, tree_bytes
from mesh.engine.wrapped import WrappedGuest

LOOK_S, LOOK_SHARE = 2.0, 20  # a look every so often, and at most one part in so many of the time; ours
FREE_SHARE = 2  # without a ceiling, one part in so many of what is free when it starts; ours
PAGE = os.sysconf("SC_PAGESIZE")


class BoundedEngine:
    def __init__(
        self,
        engine: Engine,
        ceilings: Ceilings,
        sets: Callable[[], bool] = lambda: True,
        writers: Writers | None = None,
    ) -> None:
        """`sets`: whether what a job does not ask for is set too. An engine that can bound no more than each process's own memory
        is better left alone there. `writers`: of all engines of the node."""
        self.name, self.own_root = engine.name, engine.own_root
        self._engine, self._ceilings, self._sets = engine, ceilings, sets
        self._writers = Writers() if writers is None else writers
        self._room = Room()  # on the disk where all attempts have their directories

    async def availability(self) -> Availability:
        return await self._engine.availability()

    async def start(self, launch: Launch) -> Guest:
        refusal = self._ceilings.refusal(launch.memory_mib, launch.cpus)
        if refusal:
            raise EngineError(refusal)
        bounds = await asyncio.to_thread(self._bounds, launch)
        bounded = self._ceilings.applied(launch) if self._sets() else launch
        return BoundedGuest(await self._engine.start(bounded), launch, bounds, self._writers, self._room)

    async def close(self) -> None:
        await self._engine.close()

    def _bounds(self, launch: Launch) -> "Bounds":
        before, ceiling = used_bytes(launch), self._ceilings.disk_mib
        most = before + shutil.disk_usage(launch.work_dir).free // FREE_SHARE if ceiling is None else ceiling << 20
        return Bounds(before, most, self._ceilings.log_mib << 20)


class Bounds(NamedTuple):
    """Bytes: what it has on disk when it starts, what it may have there at most, and of that its log."""

    before: int
    most: int
    log: int


class BoundedGuest(WrappedGuest):
    """Ended once it has written too much, by its bounds or for its node's disk; its log is cut."""

    def __init__(self, guest: Guest, launch: Launch, bounds: Bounds, writers: Writers, room: Room) -> None:
        super().__init__(guest)
        self._launch, self._bounds, self._writers, self._room = launch, bounds, writers, room
        self._log, self._place = Path(launch.log_path), Path(launch.work_dir)
        self._log_cut = False
        self._over: dict[str, str] = {}  # what that makes of its exit
        self._watch = asyncio.create_task(self._look(), name=f"disk {launch.job[:8]}")

    async def wait(self) -> Exit:
        end = await self._guest.wait()
        if not self._over:
            self._watch.cancel()
        await asyncio.wait([self._watch])  # one that has ended it says so in the log first
        self._writers.ended(self._place)
        if not self._over:
            await self._keep_log_short()
        return msgspec.structs.replace(end, **self._over)

    async def dump(self, directory: Path) -> str:
        """EngineError where it would take more than is left to the guest, or than is free and promised to no other checkpoint:
        before anything is written, or when it is made, for only then is it known how large it is. Room is kept for it until the
        directory is gone that `directory` is in, where its files are copied to."""
        await asyncio.to_thread(self._see_that_it_fits, directory, await self._memory())
        like = await self._guest.dump(directory)
        await asyncio.to_thread(self._see_that_it_fits, directory, 0)
        return like

    async def _memory(self) -> int:
        """What of it is not on disk. Of its GPUs' memory, which comes to the machine's first, all that it was given."""
        given = sum(portion.vram_mib for portion in self._launch.gpus) << 20
        pids = await self._guest.pids()
        known = await asyncio.to_thread(cgroups.memory_of, min(pids)) if pids else None
        return given + (await asyncio.to_thread(_resident, pids) if known is None else known)

    def _see_that_it_fits(self, directory: Path, memory: int) -> None:
        """With what of it is written already. Its files are copied beside it, and have no holes then."""
        files = sum(tree_bytes(part, _length) for part in parts(self._launch))
        more, used = memory + files, used_bytes(self._launch)
        takes, left = more + tree_bytes(directory), max(0, self._bounds.most - used)
        words = f"a system checkpoint of it takes about {amount(takes)}"
        if takes > left:
            raise EngineError(f"{words}: {amount(left)} of {amount(self._bounds.most)} are left to it on this node")
        try:
            self._room.promise(directory.parent, more)
        except NoRoom as error:
            raise EngineError(f"{words}: {error}") from error

    async def kill(self) -> None:
        await self._guest.kill()
        await self.wait()

    async def _look(self) -> None:
        due = 0.0
        while True:
            await self._keep_log_short()
            begun = time.monotonic()
            if begun >= due:
                used = await asyncio.to_thread(used_bytes, self._launch)
                written = max(0, used - self._bounds.before)
                if used > self._bounds.most:
                    words = f"it wrote {amount(used)}, and may have {amount(self._bounds.most)} on this node"
                    return await self._end({"detail": words})
                if self._writers.wrote(self._place, written):
                    words = f"its node's disk is nearly full, and no guest there wrote more than its {amount(written)}"
                    return await self._end({"fault": words})
                due = begun + LOOK_SHARE * (time.monotonic() - begun)
            await asyncio.sleep(LOOK_S)

    async def _end(self, why: dict[str, str]) -> None:
        self._over = why
        await self._guest.kill()
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_add_line, self._launch.log_path, f"mesh: ended: {', '.join(why.values())}\n")

    async def _keep_log_short(self) -> None:
        """It may print on; told once."""
        words = f"log cut at {amount(self._bounds.log)}: what it prints from here on is not kept"
        line = f"\nmesh: {words}\n".encode()
        if await asyncio.to_thread(_cut, self._log, self._bounds.log, line) and not self._log_cut:
            self._log_cut = True
            self._launch.say(words, "log cut")


def used_bytes(launch: Launch) -> int:
    """On disk, of its directories, its home and its log. What cannot be looked at counts nothing; what is linked to elsewhere
    neither."""
    home = Path(launch.work_dir).parent / HOME
    return blocks(Path(launch.log_path)) + sum(map(tree_bytes, (*parts(launch), home)))


def parts(launch: Launch) -> tuple[Path, ...]:
    return tuple(map(Path, (launch.work_dir, launch.ckpt_dir, launch.out_dir, launch.ctl_dir)))


def _resident(pids: Iterable[int]) -> int:
    """Of these processes' memory; what several of them share counts for each."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return found


def _length(path: Path) -> int:
    """Of a file that is copied, as a whole."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _add_line(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(line)


def _cut(log: Path, most: int, line: bytes) -> bool:
    """Whether it was too long: then what is beyond is gone, and the line is its last. Who writes, goes on at its end."""
    try:
        if log.stat().st_size <= most + len(line):
            return False
        with log.open("r+b") as file:
            file.seek(most)
            file.write(line)  # over what is there, so that nothing comes between
            file.truncate()
    except OSError:
        return False
    return True
