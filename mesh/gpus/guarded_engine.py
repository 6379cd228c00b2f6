"""An engine whose guests use their GPUs under the node's guard.

The wrapped engine knows only what is injected. The gate is closed here, before a guest is stopped or killed, because work queued
on a GPU does not stop with the program that queued it.
"""

import asyncio
import logging
import math
import time
from collections import Counter

import msgspec

from mesh.execution.abandoned_starts import Starts
from mesh.execution.engine import Availability, Engine, EngineError, Exit, Guest, Launch
from mesh.execution.wrapped import WrappedGuest
from mesh.gpus.guard import NodeGuard
from mesh.gpus.tenant import Tenant
from mesh.util.boottime import boot_s

UNDONE_S = 10.0  # for cancelled starts to be undone when the engine is closed (own choice)

log = logging.getLogger(__name__)


class GuardedEngine:
    """An engine that guards every guest with GPUs."""

    def __init__(self, engine: Engine, guard: NodeGuard) -> None:
        self.name, self.own_root = engine.name, engine.own_root
        self._engine, self._guard = engine, guard
        self.starts: Counter[str] = Counter()  # ok, failed
        self._given_up = Starts()

    async def availability(self) -> Availability:
        return await self._engine.availability()

    async def start(self, launch: Launch) -> Guest:
        try:
            guest = await self._start(launch)
        except EngineError:
            self.starts["failed"] += launch.wanted()
            raise
        self.starts["ok"] += 1
        return guest

    async def _start(self, launch: Launch) -> Guest:
        tenant = self._guard.admit(launch, self.own_root) if launch.gpus else None
        if tenant is None:
            return await self._engine.start(launch)
        try:
            await self._guard.make_room(tenant, launch.wanted)
        except BaseException:
            tenant.release()
            raise
        return await self._given_up.finish(self._start_under(tenant, launch), launch.job)

    async def _start_under(self, tenant: Tenant, launch: Launch) -> "GuardedGuest":
        """Start a guarded guest. It stays guarded while anything of it runs, even if its start is cancelled."""
        try:
            guest = await self._engine.start(msgspec.structs.replace(launch, injection=tenant.injection))
        except BaseException:
            tenant.release()
            raise
        tenant.keeper = guarded = GuardedGuest(guest, tenant, launch.until)
        return guarded

    async def close(self) -> None:
        await self._given_up.close(UNDONE_S)
        await self._engine.close()


class GuardedGuest(WrappedGuest):
    """A guest whose gate is open while it may run. A frozen one is stopped whatever its lease allows."""

    def __init__(self, guest: Guest, tenant: Tenant, until: float) -> None:
        super().__init__(guest)
        self._tenant = tenant
        self._until = until
        self._frozen = self._killed = False
        self._timer: asyncio.TimerHandle | None = None
        self._set_gate(until)

    async def wait(self) -> Exit:
        end = await self._guest.wait()
        self._ended()
        return end

    def allow_until(self, boot_s: float) -> None:
        self._until = boot_s
        self._set_gate(boot_s)
        if not self._frozen:
            self._guest.allow_until(boot_s)

    def freeze(self, why: str) -> None:
        self._frozen = True
        self._tenant.set_gate(True, why, by="audit")
        self._guest.allow_until(0.0)

    def thaw(self, why: str) -> None:
        if self._frozen:
            self._frozen = False
            self._guest.allow_until(self._until)
            self._tenant.set_gate(False, why, by="audit")

    async def kill(self) -> None:
        begun, first = time.perf_counter(), not (self._killed or self._tenant.released)
        self._killed = True
        self._tenant.set_gate(True, "it is killed")
        await self._guest.kill()
        if first:
            took_ms = (time.perf_counter() - begun) * 1e3
            log.info("job %s: its processes are gone %.0f ms after its GPU gate closed", self._tenant.job[:8], took_ms)
        self._ended()

    def _set_gate(self, until: float) -> None:
        """Open the gate until this moment, and close it then by a timer."""
        self._stop_timer()
        left_s = until - boot_s()
        self._tenant.set_gate(left_s <= 0, "it may run" if left_s > 0 else "it may not run now")
        if 0 < left_s < math.inf and not self._tenant.released:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._set_gate, until)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ended(self) -> None:
        self._stop_timer()
        self._tenant.release()
