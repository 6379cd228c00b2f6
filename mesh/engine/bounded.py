"""An engine within its owner's ceilings: what a job asks for beyond them is refused, what it does not ask for is set, and what it
writes is bounded by looking: a log that is too long is cut, a guest that has written too much is ended. A system checkpoint that
would not fit besides is not made.

Looking is no quota of a file system: between two looks a fast disk takes some gigabytes more. Files that have lost their name
count as long as somebody has them open; directories are looked through to a depth that no honest tree has. A container's root is
read-only, and its /tmp and /dev/shm are memory, so its directories and its log are all that it can fill.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from mesh import trees
from mesh.amount import amount
from mesh.engine import cgroups
from mesh.engine.ceilings import Ceilings
from mesh.engine.engine import Availability, Engine, EngineError, Exit, Guest, Launch
from mesh.engine.process import HOME
from mesh.engine.room import BLOCK, NoRoom, Room, Writers, blocks, tree_bytes, tree_use
from mesh.engine.wrapped import WrappedGuest

LOOK_S, LOOK_SHARE = 2.0, 20  # a look every so often, and at most one part in so many of the time; ours
PIDS_S = 2.0  # for an engine to say which processes are a session's, which takes it some ms; ours
FREE_SHARE = 2  # without a ceiling, one part in so many of what is free when it starts; ours
PAGE = os.sysconf("SC_PAGESIZE")

log = logging.getLogger(__name__)


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
        (before, inodes), ceiling = used(launch), self._ceilings.disk_mib
        most = before + shutil.disk_usage(launch.work_dir).free // FREE_SHARE if ceiling is None else ceiling << 20
        free = free_inodes(launch.work_dir)
        return Bounds(before, most, self._ceilings.log_mib << 20, None if free is None else inodes + free // FREE_SHARE)


class Bounds(NamedTuple):
    """Bytes: what it has on disk when it starts, what it may have there at most, and of that its log. `inodes`: how many files
    and directories it may have; None where the file system has as many as there is room."""

    before: int
    most: int
    log: int
    inodes: int | None = None


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
        more, (size, _) = memory + files, used(self._launch)
        takes, left = more + tree_bytes(directory), max(0, self._bounds.most - size)
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
        try:
            await self._look_on()
        except Exception as error:  # or nobody would look any more
            log.exception("what job %s writes cannot be counted", self._launch.job[:8])
            await self._end({"fault": f"what it writes cannot be counted: {error!r}"})

    async def _look_on(self) -> None:
        due = 0.0
        while True:
            await self._keep_log_short()
            begun = time.monotonic()
            if begun >= due:
                pids = await self._pids()
                try:
                    size, inodes = await asyncio.to_thread(used, self._launch)
                    size += await asyncio.to_thread(nameless_bytes, pids, self._place)
                except trees.TooDeep as error:
                    return await self._end({"detail": f"{error}: what is below is not counted"})
                written = max(0, size - self._bounds.before)
                if size > self._bounds.most:
                    words = f"it wrote {amount(size)}, and may have {amount(self._bounds.most)} on this node"
                    return await self._end({"detail": words})
                if self._bounds.inodes is not None and inodes > self._bounds.inodes:
                    words = f"it made {inodes} files and directories, and may have {self._bounds.inodes} on this node"
                    return await self._end({"detail": words})
                if self._writers.wrote(self._place, written):
                    words = f"its node's disk is nearly full, and no guest there wrote more than its {amount(written)}"
                    return await self._end({"fault": words})
                due = begun + LOOK_SHARE * (time.monotonic() - begun)
            await asyncio.sleep(LOOK_S)

    async def _pids(self) -> frozenset[int]:
        """None of them while its engine hangs, which is asked for those of sessions."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PIDS_S):
                return await self._guest.pids()
        return frozenset()

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


def free_inodes(place: str) -> int | None:
    """None where there are as many as there is room."""
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def used(launch: Launch) -> tuple[int, int]:
    """Bytes on disk, files and directories, of its directories, its home and its log. What cannot be looked at counts nothing;
    what is linked to elsewhere neither."""
    home = Path(launch.work_dir).parent / HOME
    found = [tree_use(part) for part in (*parts(launch), home)]
    return blocks(Path(launch.log_path)) + sum(size for size, _ in found), sum(inodes for _, inodes in found)


def nameless_bytes(pids: Iterable[int], place: Path) -> int:
    """On the disk of `place`, of files that these processes have open or mapped and that have no name any more. Only a file of
    that disk is looked at: one of a file system that the guest itself serves could keep whoever looks for ever."""
    device = place.stat().st_dev
    mine = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    for pid in pids:
        for link in (*_deleted_descriptors(pid, device), *_deleted_maps(pid, mine)):
            with contextlib.suppress(OSError):
                info = os.stat(link)  # noqa: PTH116
                if info.st_dev == device and stat.S_ISREG(info.st_mode) and not info.st_nlink:
                    found[info.st_ino] = info.st_blocks * BLOCK
    return sum(found.values())


def _deleted_descriptors(pid: int, device: int) -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        mounts = [line.split(" ", 3) for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        here = {mount for mount, _, number, _ in mounts if number == f"{os.major(device)}:{os.minor(device)}"}
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            link = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError, IndexError):
                if os.readlink(link).endswith(" (deleted)"):  # noqa: PTH115
                    told = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                    if told.split("mnt_id:", 1)[1].split(None, 1)[0] in here:
                        yield link


def _deleted_maps(pid: int, device: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if line.endswith(" (deleted)") and line.split(None, 4)[3] == device:
                start, _, end = line.split(" ", 1)[0].partition("-")
                yield f"/proc/{pid}/map_files/{int(start, 16):x}-{int(end, 16):x}"


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
