"""The owner's presence: checked once a second, and applied to guests by the owner's policy.

The observations come from here, `console.py`, `load.py` and the guard's audit (programs on the GPUs); `presence.py` interprets
them, and `reclaim.py` acts on guests. It asks no other node and needs no quorum.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cuda_guard.auditor import GpuProcess as OnGpu
from mesh.execution.guest_registry import boot_id
from mesh.gpus.guard import NodeGuard
from mesh.gpus.guest_processes import Whereabouts
from mesh.gpus.inventory import Inventory
from mesh.gpus.inventory import Presence as Held
from mesh.jobs.attempt import Attempt
from mesh.jobs.service import JobService
from mesh.provider.console import Console
from mesh.provider.hours import DAY
from mesh.provider.load import Load, memory_wait
from mesh.provider.memory_recall import Recall
from mesh.provider.policy import MOST_BYTES, Policy, PolicyError, never_lends, read_policy
from mesh.provider.presence import MACHINE, Memory, Presence, Seen, Stand
from mesh.provider.presence_file import Moment, load_memories, save_memories
from mesh.provider.reclaim import Leave, Reclaimer
from mesh.util.boottime import boot_s
from mesh.util.processes import descendants_of, name_of
from mesh.util.slow_calls import apart

LOOK_S = 1.0
STALE_S = 5.0  # age after which an observation of the GPUs no longer counts
DRAWS_BUSY = 20.0  # per cent of a GPU's time from which a graphics program counts as the owner at work (own choice)
COMM_CHARS = 15  # the kernel's limit for a program's name

log = logging.getLogger(__name__)


class Owner:
    """Observes the owner and applies the policy.

    `memory`: the file that outlasts this process. `say` reports to the node's events; `changed` is called when the advert
    changes; `problems` is shown by `mesh status`. `programs`: pids and names of the owner's programs on each GPU.
    """

    def __init__(
        self,
        path: Path,
        memory: Path,
        jobs: JobService,
        guard: NodeGuard,
        inventory: Inventory,
        reclaimer: Reclaimer,
        grace_s: float,
        say: Callable[[str], None],
        changed: Callable[[], None],
        problems: dict[str, str],
    ) -> None:
        self.programs: dict[str, list[tuple[int, str]]] = {}
        self.console = Console()
        self.typed_s: float | None = None
        self.load: float | None = None
        self.memory_wait: float | None = None
        self._path, self._jobs, self._guard, self._inventory, self._reclaimer = path, jobs, guard, inventory, reclaimer
        self._memory = memory
        self._kept: tuple[Memory, ...] | None = None  # None until the memory of an earlier run is read
        self._keeping = asyncio.Lock()
        self._grace_s, self._say, self._changed, self._problems = grace_s, say, changed, problems
        self._uuids = tuple(gpu.uuid for gpu in inventory.gpus)
        self._stamp: object = None
        self._known = False  # a valid policy has been read
        self._load = Load()
        self._own: frozenset[int] = frozenset()
        self._whereabouts: dict[Attempt, Whereabouts] = {}  # of guests
        self._gpus_seen: tuple[float, dict[str, bool | None]] = (0.0, {})
        self._presence = Presence(Policy(), self._uuids)
        self.recall = Recall(guard, reclaimer, jobs, lambda: self.notice_s)

    @property
    def policy(self) -> Policy:
        return self._presence.policy

    @property
    def stands(self) -> dict[str, Stand]:
        return self._presence.stands

    @property
    def notice_s(self) -> float:
        return self._grace_s if self.policy.notice is None else self.policy.notice

    def opens_at(self) -> float | None:
        """Return when the hours of lending next begin or end, in Unix seconds; None if never."""
        return self.policy.hours.changes_at(time.time(), local_minute)

    async def read(self) -> None:
        """Read the policy again if its file has changed.

        An invalid policy is reported and changes nothing; without any valid policy nothing is lent.
        """
        stamp, text = await asyncio.to_thread(_read, self._path, self._stamp)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            if isinstance(text, OSError):
                raise PolicyError(text.strerror or str(text))
            policy = read_policy(text)
        except PolicyError as error:
            kept = "the previous policy stays in force" if self._known else "nothing is lent until it is corrected"
            self._problems["policy"] = f"{self._path}: {error}; {kept}"
            self._say(self._problems["policy"])
            return
        self._problems.pop("policy", None)
        if self._known and policy != self.policy:
            self._say(f"the owner's policy has changed ({self._path.name})")
        self._known = True
        self._presence.take(policy)

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as error:  # no descriptor is free, for example
                log.warning("the owner's presence stays as it was seen last: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Check the owner once."""
        time.tzset()  # the time zone may have changed
        await self.read()
        if self._kept is None:
            await self._remember()
        now, policy = boot_s(), self.policy
        typed_s = load = waits = None
        ours = await self._ours() if policy.keyboard == "all" or policy.load is not None else frozenset[int]()
        if policy.keyboard != "off":
            typed_s = await apart(lambda: self.console.look(policy.keyboard, now, time.time(), ours), "presence")
        if policy.load is not None:
            load = await apart(lambda: self._load.look(now, ours), "presence")
            waits = await apart(lambda: memory_wait(ours), "presence")
        self.typed_s, self.load, self.memory_wait = typed_s, load, waits
        at, foreign = self._gpus_seen
        open_now = policy.hours.hold(local_minute(time.time()))
        seen = Seen(foreign if now - at < STALE_S else {}, self.typed_s, self.load, self.memory_wait, open_now)
        before = self.stands
        self._stand(before, self._presence.step(seen, now))
        await self._keep()

    async def on_gpus_seen(self, strangers: dict[str, tuple[OnGpu, ...]]) -> None:
        """Take the guard's latest observation of the GPUs."""
        ours = await self._ours() if any(strangers.values()) else frozenset[int]()
        ignored = {name[:COMM_CHARS] for name in self.policy.ignore}
        programs: dict[str, list[tuple[int, str]]] = {}
        for uuid, some in strangers.items():
            there = [(one.pid, _name(one.pid)) for one in some if one.pid not in ours and works(one)]
            programs[uuid] = [(pid, name) for pid, name in there if name not in ignored]
        self.programs = programs
        now = boot_s()
        self._gpus_seen = (now, {uuid: bool(some) for uuid, some in programs.items()})
        before = self.stands
        self._stand(before, self._presence.step_gpus(self._gpus_seen[1], now))
        await self._keep()

    async def _remember(self) -> None:
        try:
            kept = await asyncio.to_thread(load_memories, self._memory, _moment())
        except (OSError, ValueError) as error:
            self._say(f"it is unknown whether the owner was present before the restart: {self._memory}: {error}")
            kept = ()
        self._kept = kept
        self._presence.remember(kept)

    async def _keep(self) -> None:
        """Save the state that a restart needs, if it has changed."""
        async with self._keeping:
            memories = self._presence.memories()
            if self._kept is None or _whole(memories) == _whole(self._kept):
                return
            self._kept = memories
            try:
                await asyncio.to_thread(save_memories, self._memory, memories, _moment())
                self._problems.pop("presence", None)
            except OSError as error:
                words = f"{self._memory} cannot be written ({error.strerror})"
                self._problems["presence"] = f"{words}: after a restart, the owner's presence is forgotten"

    async def _ours(self) -> frozenset[int]:
        """Return the processes of helpers and guests. Containers, and guests that lost their fork server, are no descendants."""
        attempts = self._jobs.attempts.values()
        self._whereabouts = {one: self._whereabouts.get(one) or Whereabouts(one.pids) for one in attempts}
        guests = await asyncio.gather(*(where.pids() for where in self._whereabouts.values()))
        with contextlib.suppress(OSError):  # no descriptor is free: those of the last look
            self._own = frozenset(await apart(lambda: descendants_of(os.getpid()), "presence"))
        return self._own.union(*guests)

    def _stand(self, before: dict[str, Stand], after: dict[str, Stand]) -> None:
        """Apply the state: to guests first, then to the log and the advert."""
        self._reclaimer.look(self._presence.stand, self._leave)
        for scope, stand in after.items():
            if (stand.level, stand.causes) != (before[scope].level, before[scope].causes):
                what = "the machine" if scope == MACHINE else scope
                log.info(
                    "%s: %s -> %s%s", what, before[scope].level, stand.level, f": {stand.why}" if stand.why else ""
                )
                if (stand.level == "lend") != (before[scope].level == "lend"):
                    self._say(f"{what} is not lent: {stand.why}" if stand.why else f"{what} is lent again")
        held = self._held(after)
        if held != self._inventory.presence:
            self._inventory.presence = held
            self._changed()

    def _held(self, stands: dict[str, Stand]) -> Held:
        gpus = frozenset(uuid for uuid in self._uuids if stands[uuid].level != "lend")
        machine = stands[MACHINE]
        if not self._known:
            return Held("owner", 0, gpus)
        if machine.level == "lend":
            return Held("", 0, gpus)
        if machine.causes == ("calendar",):
            return Held("hours", int(self.opens_at() or 0), gpus)
        return Held("owner", 0, gpus)

    def _leave(self, stand: Stand) -> Leave:
        return Leave(self.notice_s, self.policy.pause, f"its owner took the machine back: {stand.why}", stand.why)

    def warnings(self) -> list[str]:
        """Return warnings about settings with which nothing is ever lent, or the owner is not seen."""
        policy, lending = self.policy, self._inventory.lending
        found = never_lends(policy)
        if not self._uuids and not self._inventory.slots:
            found.append("never lends: there is no GPU here, and slots is 0 (`mesh up --slots 1`)")
        elif self._uuids and not self._inventory.slots and set(self._uuids) <= set(lending.withheld):
            found.append("never lends: all its GPUs are taken back (`mesh lend`)")
        if not policy.hours.always and (lending.paused or not lending.lending):
            found.append("hours are set, and nothing is lent in them: `mesh lend`")
        if policy.keyboard != "off" and self.typed_s is None:
            found.append("the keyboard is watched, but nothing on this machine shows keyboard use")
        if policy.gpu and self._uuids and self._guard.audit_problem:
            found.append(f"the owner's programs on a GPU are not seen: {self._guard.audit_problem}")
        return found


def works(seen: OnGpu) -> bool:
    """Return whether a program works on the GPU, beyond drawing a little."""
    return seen.computes or (seen.busy or 0.0) >= DRAWS_BUSY


def local_minute(unix_s: float) -> int:
    """Return the minute of the week in local time."""
    shown = time.localtime(unix_s)
    return shown.tm_wday * DAY + shown.tm_hour * 60 + shown.tm_min


def _whole(memories: tuple[Memory, ...]) -> list[Memory]:
    """Round to seconds: the time of the last key press is seen with some jitter."""
    return [
        msgspec.structs.replace(memory, quiet_since=memory.quiet_since and round(memory.quiet_since))
        for memory in memories
    ]


def _moment() -> Moment:
    return Moment(boot_id(), boot_s(), time.time())


def _read(path: Path, stamp: object) -> tuple[object, str | OSError]:
    """Return the file's stamp and, if it differs from `stamp`, its text. A missing file is empty."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            seen = os.fstat(file.fileno())
            mark = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
            return mark, "" if mark == stamp else file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return "none", ""
    except OSError as error:
        return ("unreadable", error.errno), error


def _name(pid: int) -> str:
    try:
        return name_of(pid)
    except OSError:
        return "?"
