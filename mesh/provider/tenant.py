"""An attempt on this node's GPUs, from the moment that its guard is ready until nothing of it runs any more."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from cuda_guard.auditor import Finding, Held
from cuda_guard.guard import GuardedJob, Usage, share_of
from cuda_guard.page import AUDITS
from mesh.engine.engine import Injection, Launch
from mesh.provider.receipts import DeviceUse, Tally
from mesh.provider.whereabouts import Whereabouts
from placement.advert import Portion

PausingHand = Literal["owner", "presence", "lender"]  # his order; that he is there; memory that was lent is needed
GateHand = Literal["lease", "audit"] | PausingHand  # who closes a gate; it is open when nobody does

GATE = "job %s: GPU gate %s in %.0f µs: %s"

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Who has a tenant's processes in hand."""

    async def pids(self) -> frozenset[int]: ...

    def freeze(self, why: str) -> None:
        """Its processes stand still, whatever its lease says, until they are thawed."""
        ...

    def thaw(self, why: str) -> None: ...

    async def kill(self) -> None: ...


class Tenant:
    """An attempt on this node's GPUs, under guard until it is released. `name`: its own among all tenants; `keeper`: once it has
    started; `ended` is told its use when it is released."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        guarded: GuardedJob,
        injection: Injection,
        ended: Callable[["Tenant", tuple[DeviceUse, ...]], None],
    ) -> None:
        self.name, self.job, self.attempt = name, launch.job, launch.attempt
        self.portions, self.limit = launch.gpus, launch.gpu_share_limit
        self.vram_limit_mib = launch.vram_limit_mib
        self.injection = injection
        self.gate_closed = False
        self.released = False
        self.guarded = guarded
        self.keeper: Keeper | None = None
        self.findings: list[Finding] = []
        self.began_unix_ms = time.time_ns() // 1_000_000
        self.gate_since = time.monotonic()
        self.closed_by: set[GateHand] = set()
        self.suspended: tuple[int, ...] = ()  # processes of which the driver has put away what they had
        self.turn = asyncio.Lock()  # of whoever suspends or resumes it
        self._ended = ended
        self._tally = Tally(len(launch.gpus), time.monotonic())
        self._pids: frozenset[int] = frozenset()
        self._whereabouts: Whereabouts | None = None
        self._named: set[str] = set()

    def set_gate(self, closed: bool, why: str, by: GateHand = "lease") -> None:
        """While it is closed the job's programs wait before whatever they would launch."""
        if closed:
            self.closed_by.add(by)
        else:
            self.closed_by.discard(by)
        closed = bool(self.closed_by)
        if self.released or closed == self.gate_closed:
            return
        begun = time.perf_counter()
        self.guarded.set_gate(closed)
        self.gate_closed = closed
        self.gate_since = time.monotonic()
        took_us = (time.perf_counter() - begun) * 1e6
        log.info(GATE, self.job[:8], "closed" if closed else "opened", took_us, why)

    def shut(self) -> None:
        """Close the gate for the kill-switch, from its thread: nothing is waited for, the log neither."""
        if self.released or self.gate_closed:
            return
        begun = time.perf_counter()
        self.guarded.set_gate(True)
        self.closed_by.add("lease")
        self.gate_closed, self.gate_since = True, time.monotonic()
        said = (GATE, self.job[:8], "closed", (time.perf_counter() - begun) * 1e6, "it is killed")
        threading.Thread(target=log.info, args=said, name="gate log", daemon=True).start()

    def usage(self) -> tuple[Usage, ...]:
        """In the order of its portions."""
        return self.guarded.usage()

    def charges(self) -> dict[int, tuple[int, ...]]:
        return {} if self.released else self.guarded.charges()

    async def pids(self) -> frozenset[int]:
        """Its processes, with those that it had at the last look: NVML still shows them for a while."""
        if self._whereabouts is None and self.keeper is not None:
            self._whereabouts = Whereabouts(self.keeper.pids)
        before = self._pids
        self._pids = await self._whereabouts.pids() if self._whereabouts is not None else frozenset()
        return before | self._pids

    def count(self, held: tuple[Held | None, ...]) -> None:
        """A look at what it holds, and what it holds by NVML, where that was asked."""
        if not self.released:
            self._tally.advance(time.monotonic(), self.usage(), held)

    def held_now(self, place: int) -> int | None:
        """Bytes on one of its devices, as NVML told them last; None before it has."""
        return self._tally.held_now(place)

    def is_new(self, finding: Finding) -> bool:
        """Whether nothing of this kind was found of that process before; it is kept."""
        known = any((one.kind, one.uuid, one.pid) == (finding.kind, finding.uuid, finding.pid) for one in self.findings)
        if not known:
            self.findings.append(finding)
        return not known

    def shares_now(self) -> tuple[float, ...]:
        """In per cent, with what is lent to it."""
        return tuple(share_of(self.guarded.pages, place) for place in range(len(self.portions)))

    def unguarded_calls(self) -> list[str]:
        """What its programs have looked for in the driver that the guard does not know."""
        return self.guarded.pages.audited()

    def change(self, portions: tuple[Portion, ...], limit: int, vram_limit_mib: int = 0) -> None:
        """Hold it to these from now on. ValueError if it has more memory than that already."""
        self._set_memory(portions, vram_limit_mib)
        for use, portion in zip(self.usage(), portions, strict=True):  # it cannot have grown any more
            if use.memory > max(portion.vram_mib, vram_limit_mib) << 20:
                self._set_memory(self.portions, self.vram_limit_mib)
                raise ValueError(f"it uses {use.memory / 2**20:.0f} MiB of {use.uuid} already")
        for place, portion in enumerate(portions):
            self.guarded.set_share(place, portion.share, limit)
        self.portions, self.limit, self.vram_limit_mib = portions, limit, vram_limit_mib

    def _set_memory(self, portions: tuple[Portion, ...], vram_limit_mib: int) -> None:
        for place, portion in enumerate(portions):
            self.guarded.set_memory(place, portion.vram_mib << 20, max(portion.vram_mib, vram_limit_mib) << 20)

    def lacks(self) -> set[str]:
        """GPUs of which it has not yet all the memory that it is guaranteed."""
        return set() if self.released or self.guarded.has_room else {portion.uuid for portion in self.portions}

    def owes(self, needed: set[str]) -> int:
        """Bytes that were lent to it and are still on these GPUs, beyond what it may have now."""
        if self.released or self.suspended:
            return 0
        return sum(self.guarded.over(place) for place, portion in enumerate(self.portions) if portion.uuid in needed)

    def spoilt_page(self) -> Finding | None:
        """Its programs have cut or lengthened the file of its page, which is the owner's memory, or clogged it with locks."""
        if self.released:
            return None
        if self.guarded.pages.restore_length():
            detail = "its programs have changed the length of the page that they share with the guard"
        elif self.guarded.clogged:
            detail = "its programs have clogged the page that they share with the guard with locks"
        else:
            return None
        return Finding("page", self.name, self.portions[0].uuid, 0, detail)

    def new_unguarded_calls(self) -> list[str]:
        """Since this was asked last; no more in all than a page has room for, for its programs can write new ones for ever."""
        fresh = [name for name in self.unguarded_calls() if name not in self._named][: AUDITS - len(self._named)]
        self._named.update(fresh)
        return fresh

    def release(self) -> None:
        """Once nothing of it runs any more."""
        if not self.released:
            self.count(())
            used = self._tally.uses(self.usage())
            self.released = True
            self.guarded.close()
            self._ended(self, used)
