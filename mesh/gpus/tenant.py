"""A tenant: an attempt on this node's GPUs, from when its guard is ready until nothing of it runs."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from cuda_guard.auditor import Finding, Measured
from cuda_guard.guard import GuardedJob, Usage, share_of
from cuda_guard.page import AUDITS
from mesh.execution.engine import Injection, Launch
from mesh.gpus.guest_processes import Whereabouts
from mesh.gpus.receipts import DeviceUse, Tally
from placement.advert import Portion

PausingHand = Literal["owner", "presence", "lender"]  # the owner's order; the owner's presence; a recall of lent memory
GateHand = Literal["lease", "audit"] | PausingHand  # reasons to close a gate; it is open without any

GATE = "job %s: GPU gate %s in %.0f µs: %s"

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Controls a tenant's processes."""

    async def pids(self) -> frozenset[int]: ...

    def freeze(self, why: str) -> None:
        """Stop its processes until they are thawed, whatever its lease allows."""
        ...

    def thaw(self, why: str) -> None: ...

    async def kill(self) -> None: ...


class Tenant:
    """An attempt on this node's GPUs, guarded until it is released.

    `name`: unique among tenants; `keeper`: set once it has started; `ended` is called with its use when it is released.
    """

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
        self.suspended: tuple[int, ...] = ()  # processes whose GPU memory the driver has moved to the host
        self.turn = asyncio.Lock()  # held while it is suspended or resumed
        self._ended = ended
        self._tally = Tally(len(launch.gpus), time.monotonic())
        self._pids: frozenset[int] = frozenset()
        self._whereabouts: Whereabouts | None = None
        self._named: set[str] = set()

    def set_gate(self, closed: bool, why: str, by: GateHand = "lease") -> None:
        """Close or open the gate for one reason. While it is closed, the job's programs wait before every launch."""
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
        """Close the gate for the kill-switch, in its thread, without waiting for anything, not even the log."""
        if self.released or self.gate_closed:
            return
        begun = time.perf_counter()
        self.guarded.set_gate(True)
        self.closed_by.add("lease")
        self.gate_closed, self.gate_since = True, time.monotonic()
        fields = (GATE, self.job[:8], "closed", (time.perf_counter() - begun) * 1e6, "it is killed")
        threading.Thread(target=log.info, args=fields, name="gate log", daemon=True).start()

    def usage(self) -> tuple[Usage, ...]:
        """Return its use, in the order of its portions."""
        return self.guarded.usage()

    def charges(self) -> dict[int, tuple[int, ...]]:
        return {} if self.released else self.guarded.charges()

    async def pids(self) -> frozenset[int]:
        """Return its processes, with those of the last check: NVML still lists them for a while."""
        if self._whereabouts is None and self.keeper is not None:
            self._whereabouts = Whereabouts(self.keeper.pids)
        before = self._pids
        self._pids = await self._whereabouts.pids() if self._whereabouts is not None else frozenset()
        return before | self._pids

    def count(self, held: tuple[Measured | None, ...]) -> None:
        """Add a sample of its use, with NVML's where available."""
        if not self.released:
            self._tally.advance(time.monotonic(), self.usage(), held)

    def held_now(self, place: int) -> int | None:
        """Return NVML's last sample of the bytes on one of its devices; None before the first."""
        return self._tally.held_now(place)

    def is_new(self, finding: Finding) -> bool:
        """Record a finding; return whether it is the first of its kind for that process."""
        known = any((one.kind, one.uuid, one.pid) == (finding.kind, finding.uuid, finding.pid) for one in self.findings)
        if not known:
            self.findings.append(finding)
        return not known

    def shares_now(self) -> tuple[float, ...]:
        """Return its current shares in per cent, with what is lent to it."""
        return tuple(share_of(self.guarded.pages, place) for place in range(len(self.portions)))

    def unguarded_calls(self) -> list[str]:
        """Return driver calls that its programs looked up and the guard does not know."""
        return self.guarded.pages.audited()

    def change(self, portions: tuple[Portion, ...], limit: int, vram_limit_mib: int = 0) -> None:
        """Enforce other portions from now on. ValueError if it already uses more memory."""
        self._set_memory(portions, vram_limit_mib)
        for use, portion in zip(self.usage(), portions, strict=True):  # after the limit is set it cannot grow
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
        """Return the GPUs on which it lacks guaranteed memory."""
        return set() if self.released or self.guarded.has_guarantee else {portion.uuid for portion in self.portions}

    def owes(self, needed: set[str]) -> int:
        """Return the bytes on these GPUs beyond what it may have now."""
        if self.released or self.suspended:
            return 0
        return sum(self.guarded.excess(place) for place, portion in enumerate(self.portions) if portion.uuid in needed)

    def spoilt_page(self) -> Finding | None:
        """Return a finding if its programs changed the length of its page (the owner's memory) or flooded it with locks."""
        if self.released:
            return None
        if self.guarded.pages.restore_length():
            detail = "its programs have changed the length of the page that they share with the guard"
        elif self.guarded.lock_flooded:
            detail = "its programs have flooded the page that they share with the guard with locks"
        else:
            return None
        return Finding("page", self.name, self.portions[0].uuid, 0, detail)

    def new_unguarded_calls(self) -> list[str]:
        """Return unknown calls since the last time; at most AUDITS in all, since programs could write new ones for ever."""
        fresh = [name for name in self.unguarded_calls() if name not in self._named][: AUDITS - len(self._named)]
        self._named.update(fresh)
        return fresh

    def release(self) -> None:
        """Release the guard, once nothing of it runs."""
        if not self.released:
            self.count(())
            used = self._tally.uses(self.usage())
            self.released = True
            self.guarded.close()
            self._ended(self, used)
