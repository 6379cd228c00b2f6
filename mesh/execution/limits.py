"""An engine within its owner's ceilings.

A job that asks for more than the ceilings is refused; what it does not ask for is set to the ceiling. Disk use is polled: a log
that is too long is cut, a guest that has written too much is ended, and a system checkpoint that would not fit is not made.

Polling is not a file system quota: between two polls a fast disk takes some gigabytes more. A guest chooses how long a poll
takes, so that has a limit, and the log and the free space are watched meanwhile. Deleted files count while a process has them
open; directories are walked to a depth that no honest tree reaches, and a guest that closes one to the daemon is ended.
A container's root is read-only, and its /tmp and /dev/shm are memory, so its directories and its log are all that it can fill.
"""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from mesh.execution.ceilings import Ceilings
from mesh.execution.disk_usage import BLOCK, Entry, NoRoom, Room, Writers, blocks, tree_bytes, tree_use
from mesh.execution.engine import Availability, Engine, EngineError, Exit, Guest, Launch
from mesh.execution.process.sandbox import HOME, TEMPORARY
from mesh.execution.wrapped import WrappedGuest
from mesh.util import cgroups, trees
from mesh.util.budget import Budget, OverBudget
from mesh.util.byte_text import amount
from mesh.util.mounts import mount_number, numbers_on
from mesh.util.processes import lines_of
from mesh.util.slow_calls import apart

# Poll every 2 s, for at most a twentieth of the time, but at once when free space fell by more than this (own choice).
LOOK_S, LOOK_SHARE, FALL_BYTES = 2.0, 20, 1 << 30
PIDS_S = 2.0  # for an engine to list a session's processes, which takes milliseconds (own choice)
FREE_SHARE = 2  # without a ceiling, a guest may use half of the space that is free when it starts (own choice)
SAMPLE_S = 120.0  # for one sample (own choice): ten million files take half a minute, more if their disk is slow
MOST_LINKS = 1_000_000  # open files and mappings of all its processes, which take some seconds to look at (own choice)
MOST_FILES = 10_000_000  # and directories (own choice); to count so many takes half a minute (own measurement)
PAGE = os.sysconf("SC_PAGESIZE")

log = logging.getLogger(__name__)


class BoundedEngine:
    """An engine whose guests stay within the owner's ceilings."""

    def __init__(
        self,
        engine: Engine,
        ceilings: Ceilings,
        sets: Callable[[], bool] = lambda: True,
        writers: Writers | None = None,
    ) -> None:
        """`sets`: also set limits that a job does not ask for; no for an engine that can only limit each process's memory.

        `writers`: shared by all engines of the node.
        """
        self.name, self.own_root = engine.name, engine.own_root
        self._engine, self._ceilings, self._sets = engine, ceilings, sets
        self._writers = Writers() if writers is None else writers
        self._room = Room()  # of the disk that holds all attempts' directories

    async def availability(self) -> Availability:
        return await self._engine.availability()

    async def start(self, launch: Launch) -> Guest:
        refusal = self._ceilings.refusal(launch.memory_mib, launch.cpus)
        if refusal:
            raise EngineError(refusal)
        try:
            bounds = await apart(lambda: self._bounds(launch), "disk use")
        except OSError as error:
            raise EngineError(f"its disk use cannot be measured: {error}") from error
        bounded = self._ceilings.applied(launch, self._sets())
        return BoundedGuest(await self._engine.start(bounded), launch, bounds, self._writers, self._room)

    async def close(self) -> None:
        await self._engine.close()

    def _bounds(self, launch: Launch) -> "Bounds":
        before, inodes = used(launch)
        most = disk_limit(self._ceilings, Path(launch.work_dir), before)
        free = free_inodes(launch.work_dir)
        files = MOST_FILES if free is None else min(MOST_FILES, inodes + free // FREE_SHARE)
        return Bounds(before, most, self._ceilings.log_mib << 20, files)


class Bounds(NamedTuple):
    """Disk limits of one guest, in bytes: `before` is its use at the start, `most` its limit, `log` the limit of its log.

    `inodes`: its limit of files and directories.
    """

    before: int
    most: int
    log: int
    inodes: int = MOST_FILES


class BoundedGuest(WrappedGuest):
    """A guest that is ended when it writes more than its bounds or than the node's disk can hold; its log is cut."""

    def __init__(self, guest: Guest, launch: Launch, bounds: Bounds, writers: Writers, room: Room) -> None:
        super().__init__(guest)
        self._launch, self._bounds, self._writers, self._room = launch, bounds, writers, room
        self._log, self._place = Path(launch.log_path), Path(launch.work_dir)
        self._log_cut = False
        self._over: dict[str, str] = {}  # fields of its exit if it was ended
        self._trim = asyncio.create_task(self._trim_log(), name=f"log {launch.job[:8]}")
        self._watch = asyncio.create_task(self._look(), name=f"disk {launch.job[:8]}")

    async def wait(self) -> Exit:
        end = await self._guest.wait()
        self._trim.cancel()
        if not self._over:
            self._watch.cancel()
        await asyncio.wait([self._watch])  # if it has ended the guest, it writes that to the log first
        self._writers.ended(self._place)
        if not self._over:
            await self._keep_log_short()
        return msgspec.structs.replace(end, **self._over)

    async def dump(self, directory: Path) -> str:
        """Save the guest. EngineError if that takes more than the guest has left, or than is free and not reserved.

        This is checked before anything is written and again when the size is known. The space stays reserved until the parent of
        `directory`, where its files are copied to, is removed.
        """
        memory = await self._memory()
        await apart(lambda: self._see_that_it_fits(directory, memory), "disk use")
        platform = await self._guest.dump(directory)
        await apart(lambda: self._see_that_it_fits(directory, 0), "disk use")
        return platform

    async def _memory(self) -> int:
        """Return the bytes of its memory, with all GPU memory that it was given: that is copied to main memory first."""
        given = sum(portion.vram_mib for portion in self._launch.gpus) << 20
        pids = await self._guest.pids()
        known = await asyncio.to_thread(cgroups.memory_of, min(pids)) if pids else None
        return given + (await apart(lambda: _resident(pids), "memory") if known is None else known)

    def _see_that_it_fits(self, directory: Path, memory: int) -> None:
        """Check a dump of `memory` bytes, besides what is written already. Files are copied without holes."""
        files, _ = tree_use(parts(self._launch), of=_length)
        more, (size, _) = memory + files, used(self._launch)
        takes, left = more + tree_bytes(directory), max(0, self._bounds.most - size)
        text = f"a system checkpoint of it takes about {amount(takes)}"
        if takes > left:
            raise EngineError(f"{text}: it has {amount(left)} of {amount(self._bounds.most)} left on this node")
        try:
            self._room.promise(directory.parent, more)
        except NoRoom as error:
            raise EngineError(f"{text}: {error}") from error

    async def kill(self) -> None:
        await self._guest.kill()
        await self.wait()

    async def _look(self) -> None:
        try:
            await self._look_on()
        except Exception as error:  # without the poll, nothing would bound the guest
            log.exception("the disk use of job %s cannot be measured", self._launch.job[:8])
            await self._end({"fault": f"its disk use cannot be measured: {error!r}"})

    async def _look_on(self) -> None:
        due, enough, size = 0.0, 0, self._bounds.before
        while True:
            begun, free = time.monotonic(), _free_bytes(self._place)
            if begun >= due or free < enough:
                pids, least = await self._pids(), self._enough(free, size)
                sample = asyncio.ensure_future(apart(lambda: self._sample(pids), "disk use"))  # noqa: B023  (it is awaited here)
                try:
                    while not (await asyncio.wait([sample], timeout=LOOK_S))[0]:
                        if _free_bytes(self._place) < least:
                            text = "its disk use takes too long to measure, and its node's disk fills"
                            return await self._end({"fault": text})
                    size, inodes = await sample
                except (trees.OutOfReach, OverBudget) as error:
                    return await self._end({"detail": f"{error}: the rest cannot be counted"})
                finally:
                    sample.cancel()
                written = max(0, size - self._bounds.before)
                if size > self._bounds.most:
                    text = f"it wrote {amount(size)}, and its limit on this node is {amount(self._bounds.most)}"
                    return await self._end({"detail": text})
                if inodes > self._bounds.inodes:
                    text = (
                        f"it made {inodes} files and directories, and its limit on this node is {self._bounds.inodes}"
                    )
                    return await self._end({"detail": text})
                if self._writers.wrote(self._place, written):
                    text = f"its node's disk is nearly full, and no guest there wrote more than its {amount(written)}"
                    return await self._end({"fault": text})
                due = begun + LOOK_SHARE * (time.monotonic() - begun)
                enough = self._enough(free, size)
            await asyncio.sleep(LOOK_S)

    def _enough(self, free: int, size: int) -> int:
        """Return the free bytes below which it may have passed its limit, if it has held `size` when `free` were free."""
        return free - max(FALL_BYTES, self._bounds.most - size)

    def _sample(self, pids: frozenset[int]) -> tuple[int, int]:
        """Return its bytes on disk and its files and directories. OutOfReach and OverBudget: they cannot be counted."""
        spend = Budget(SAMPLE_S).spend
        size, inodes = used(self._launch, self._bounds.most, self._bounds.inodes, spend)
        return size + nameless_bytes(pids, self._place, Budget(SAMPLE_S, MOST_LINKS).spend), inodes

    async def _pids(self) -> frozenset[int]:
        """Return its processes; none while its engine, which lists those of sessions, hangs, or no descriptor is free."""
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(PIDS_S):
                return await self._guest.pids()
        return frozenset()

    async def _end(self, why: dict[str, str]) -> None:
        self._over = why
        await self._guest.kill()
        with contextlib.suppress(OSError):
            line = f"mesh: ended: {', '.join(why.values())}\n"
            await apart(lambda: _add_line(self._launch.log_path, line), "log")

    async def _trim_log(self) -> None:
        while True:
            await self._keep_log_short()
            await asyncio.sleep(LOOK_S)

    async def _keep_log_short(self) -> None:
        """Cut a log that is too long, and report that once. The guest may print on."""
        text = f"log cut at {amount(self._bounds.log)}: later output is not kept"
        line = f"\nmesh: {text}\n".encode()
        if await apart(lambda: _cut(self._log, self._bounds.log, line), "log") and not self._log_cut:
            self._log_cut = True
            self._launch.say(text, "log cut")


def disk_limit(ceilings: Ceilings, place: Path, used: int = 0) -> int:
    """Return the bytes that an attempt in `place` may hold, of which it has `used` some."""
    if ceilings.disk_mib is not None:
        return ceilings.disk_mib << 20
    return used + shutil.disk_usage(place).free // FREE_SHARE


def _free_bytes(place: Path) -> int:
    try:
        return shutil.disk_usage(place).free
    except OSError:  # it is being removed
        return sys.maxsize


def free_inodes(place: str) -> int | None:
    """Return the number of free inodes; None if the file system has no fixed number."""
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def used(
    launch: Launch,
    most_bytes: float = math.inf,
    most_inodes: float = math.inf,
    spend: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Return the bytes on disk and the files and directories of its directories, its home, its /tmp and its log.

    The targets of links do not count, nor what comes after one of these limits. OutOfReach if any cannot be counted.
    """
    attempt, log = Path(launch.work_dir).parent, blocks(Path(launch.log_path))
    places = (*parts(launch), attempt / HOME, attempt / TEMPORARY)
    size, inodes = tree_use(places, most_bytes - log, most_inodes, spend=spend)
    return log + size, inodes


def nameless_bytes(pids: Iterable[int], place: Path, spend: Callable[[], None] = lambda: None) -> int:
    """Return the bytes of deleted files on the disk of `place` that these processes have open or mapped.

    `spend` is called for each process, open file and mapping, and may raise.
    Only files of that disk are read: a file system that the guest itself serves could block the reader for ever.
    """
    device = place.stat().st_dev
    mine = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    for pid in pids:
        spend()
        for link in (*_deleted_descriptors(pid, device, spend), *_deleted_maps(pid, mine, spend)):
            with contextlib.suppress(OSError):
                info = os.stat(link)  # noqa: PTH116
                if info.st_dev == device and stat.S_ISREG(info.st_mode) and not info.st_nlink:
                    found[info.st_ino] = info.st_blocks * BLOCK
    return sum(found.values())


def _deleted_descriptors(pid: int, device: int, spend: Callable[[], None]) -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        here = numbers_on(pid, f"{os.major(device)}:{os.minor(device)}")
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            spend()
            link = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError, IndexError):
                if os.readlink(link).endswith(" (deleted)") and mount_number(pid, name) in here:  # noqa: PTH115
                    yield link


def _deleted_maps(pid: int, device: str, spend: Callable[[], None]) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in lines_of(f"/proc/{pid}/maps"):
            spend()
            if line.endswith(" (deleted)") and line.split(None, 4)[3] == device:
                start, _, end = line.split(" ", 1)[0].partition("-")
                yield f"/proc/{pid}/map_files/{int(start, 16):x}-{int(end, 16):x}"


def parts(launch: Launch) -> tuple[Path, ...]:
    return tuple(map(Path, launch.directories))


def _resident(pids: Iterable[int]) -> int:
    """Return the resident bytes of these processes; shared memory counts for each of them."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return found


def _length(entry: Entry) -> int:
    """Return the length of a regular file, holes included; 0 for others."""
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        trees.check_reach(error)
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _add_line(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(line)


def _cut(log: Path, most: int, line: bytes) -> bool:
    """Cut a log to `most` bytes and append `line`; return whether it was too long. Writers continue at its new end."""
    try:
        if log.stat().st_size <= most + len(line):
            return False
        with log.open("r+b") as file:
            file.seek(most)
            file.write(line)  # overwrite before truncating, so that nothing comes in between
            file.truncate()
    except OSError:
        return False
    return True
