"""This node's guard of its GPUs: made ready beside everything else, asked for each attempt that is to use them, and watching
over those."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

from cuda_guard.auditor import Finding, Foreign, Seen
from cuda_guard.build import BuildError, libraries
from cuda_guard.driver import Driver, find_driver
from cuda_guard.guard import Guard
from cuda_guard.page import ALONE_WINDOW_MS, Quota
from cuda_guard.symbols import unknown_to_the_guard
from mesh.chores import Chores
from mesh.engine.engine import EngineError, Injection, Launch
from mesh.provider.audit import Audit
from mesh.provider.pausing import Pausing
from mesh.provider.receipts import DeviceUse
from mesh.provider.tenant import PausingHand, Tenant
from placement.advert import WHOLE, Gpu, Portion

NO_DRIVER = "GPUs cannot be shared: no libcuda.so.1 and libnvidia-ml.so.1 of NVIDIA's where libraries are looked for"
ROOM_LOOK_S = 0.01  # between two looks at whether what was lent is back; ours
ROOM_MARGIN_S = 10.0  # beyond what those who have it are given: to be killed, and for their contexts to end; ours
NAMED = 5  # of the driver's calls that the guard does not know, in a line of the log; ours
LOOK_S = 1.0  # between two looks at what tenants do; NVML's own samples are of up to a second

Bypass = Literal["warn", "pause", "kill"]  # what happens to a job of which a program is past the guard

log = logging.getLogger(__name__)


class Lent(Protocol):
    """Who sees to it that memory that was lent comes back."""

    def patience_s(self) -> float:
        """How long that takes at most."""
        ...

    async def look(self, tenants: Sequence[Tenant], chores: Chores) -> None: ...


class NodeGuard:
    """`changed` hears why there can be no guard, or an empty word once there is one; without GPUs, or where `guards` says that
    none is wanted, it hears nothing. `warn`: for what the owner should know. `found` hears what a tenant is caught at and what is
    done about it, `ended` what one has used, `looked` after each look who is on the GPUs beside tenants. `lent` is asked at each
    look. `pinned_mib`: of the machine's memory, what a job that does not say how much it needs may have pinned."""

    def __init__(
        self,
        directory: Path,
        gpus: tuple[Gpu, ...],
        changed: Callable[[str], None],
        warn: Callable[[str], None],
        *,
        guards: bool = True,
        bypass: Bypass = "pause",
        pinned_mib: int | None = None,
        found: Callable[[Tenant, str], None] = lambda tenant, text: None,
        ended: Callable[[Tenant, tuple[DeviceUse, ...]], None] = lambda tenant, used: None,
    ) -> None:
        self.looked: Callable[[dict[str, tuple[Seen, ...]]], Awaitable[None]] | None = None
        self.lent: Lent | None = None
        self._directory, self._gpus, self._changed, self._warn = directory, gpus, changed, warn
        self._pinned_mib = pinned_mib
        self._guards = guards
        self._bypass, self._found, self._ended = bypass, found, ended
        self._guard: Guard | None = None
        self._audit: Audit | None = None
        self._pausing: Pausing | None = None
        self._chores = Chores(log)
        self._problem = "there is no guard yet"
        self._tenants: list[Tenant] = []
        self._numbers = count()

    async def run(self) -> None:
        """Get ready, which may take seconds of compiling; then look after the tenants until cancelled."""
        if not self._gpus:
            return
        driver = await asyncio.to_thread(find_driver)
        uuids = tuple(gpu.uuid for gpu in self._gpus)
        self._audit = Audit(uuids, None if driver is None else driver.nvml)
        guarded = self._guards and await self._make_guard(driver, uuids)
        await self._audit.open()
        if driver is not None and guarded:
            self._pausing = Pausing(driver.cuda, self._audit.holders)
            await self._pausing.open()
            log.info("GPUs can be shared: guard ready in %s", self._directory)
            await self._compare(driver)
            self._changed("")
        if self._audit.problem and not guarded:
            return
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self._look(self._audit)
        finally:
            await self._chores.close()

    async def _make_guard(self, driver: Driver | None, uuids: tuple[str, ...]) -> bool:
        """Whether there is one."""
        try:
            if driver is None:
                raise OSError(NO_DRIVER)
            sizes = tuple(gpu.vram_mib << 20 for gpu in self._gpus)
            self._guard = Guard(self._directory, await asyncio.to_thread(libraries), driver, uuids, sizes)
        except (BuildError, OSError) as error:
            self._problem = str(error)
            log.warning("no guard: %s", error)
            self._changed(self._problem)
        return self._guard is not None

    async def _compare(self, driver: Driver) -> None:
        """With a driver newer than the guard."""
        try:
            names = await asyncio.to_thread(unknown_to_the_guard, driver.cuda)
        except (OSError, ValueError) as error:
            log.warning("which calls the driver has is not known: %s", error)
            return
        if names:
            some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            self._warn(
                f"the GPU driver has {len(names)} calls that the guard does not know ({some}): "
                "programs that look for one by dlsym are told that there is none"
            )

    async def pause(self, tenant: Tenant, by: PausingHand = "owner") -> str:
        """Keep it off its GPUs until it is resumed, and free what it has there if the driver can. Why that stays; empty if it
        does not. What has begun is done, also if nobody waits for it any more."""
        if self._pausing is None:
            return self._problem
        return await asyncio.shield(self._chores.start(self._pausing.pause(tenant, by), "pause"))

    async def resume(self, tenant: Tenant, by: PausingHand = "owner") -> str:
        """Let it go on, whether its owner paused it or it was stopped as past the guard; or let go of it by another hand of his.
        Why it cannot; empty if it does."""
        if self._pausing is None:
            return self._problem
        return await asyncio.shield(self._chores.start(self._pausing.resume(tenant, by), "resume"))

    @property
    def pause_problem(self) -> str:
        """Why the memory of a guest that is paused stays on the GPU; empty if it does not."""
        return self._pausing.problem if self._pausing is not None else self._problem

    async def _look(self, audit: Audit) -> None:
        for tenant in self.tenants:
            for name in tenant.new_unguarded_calls():
                self._warn(f"guard degraded: a program of job {tenant.job[:8]} may use {name}, unknown to the guard")
        spoilt = [(tenant, finding) for tenant in self.tenants if (finding := tenant.spoilt_page()) is not None]
        for tenant, finding in [*spoilt, *await audit.look(self.tenants)]:
            if tenant.is_new(finding) and not tenant.released:
                self._act(tenant, finding)
        for uuid, foreign in audit.foreign.items():
            if self._guard is not None:
                self._guard.set_foreign(uuid, foreign.memory)
        if self.lent is not None:
            await self.lent.look(self.tenants, self._chores)
        if self.looked is not None and not audit.problem:
            await self.looked(audit.strangers)

    def _act(self, tenant: Tenant, finding: Finding) -> None:
        """By the owner's word: what is past the guard does not heed a gate."""
        done = {"warn": "its node's owner is told", "pause": "it is stopped", "kill": "it is ended"}[self._bypass]
        self._warn(f"job {tenant.job[:8]} is past the guard: {finding.detail}: {done}")
        self._found(tenant, f"past the guard of its GPUs: {finding.detail}: {done}")
        if tenant.keeper is None:
            return
        if self._bypass == "pause":
            tenant.keeper.freeze("it is past the guard")
        elif self._bypass == "kill":
            self._chores.start(tenant.keeper.kill(), "kill past the guard")

    @property
    def foreign(self) -> dict[str, Foreign]:
        """By device, what is on it beside guarded jobs: the owner's own."""
        return self._audit.foreign if self._audit is not None else {}

    @property
    def audit_problem(self) -> str:
        """Why NVML is not asked; empty if it is."""
        return self._audit.problem if self._audit is not None else self._problem

    @property
    def tenants(self) -> list[Tenant]:
        """Of now: those that are released are forgotten."""
        self._tenants = [tenant for tenant in self._tenants if not tenant.released]
        return self._tenants

    def shut_gates(self) -> None:
        """Of everybody, at once; from any thread."""
        for tenant in tuple(self._tenants):
            tenant.shut()

    def tenant(self, job: str) -> Tenant | None:
        """The last attempt of a job here."""
        return next((tenant for tenant in reversed(self.tenants) if tenant.job == job), None)

    def admit(self, launch: Launch, own_root: bool) -> Tenant | None:
        """Guard an attempt that is about to start. None: it has its GPUs alone, and goes without. EngineError: it has shares,
        and nothing would keep it to them."""
        try:
            if self._guard is None:
                raise OSError(self._problem)
            name = f"{launch.job}-{next(self._numbers)}"
            quotas = tuple(self._quota(portion, launch) for portion in launch.gpus)
            pinned_mib = self._pinned_mib if launch.memory_mib is None else launch.memory_mib
            guarded = self._guard.admit(name, quotas, own_root, None if pinned_mib is None else pinned_mib << 20)
        except (OSError, ValueError) as error:
            if any(portion.share < WHOLE for portion in launch.gpus):
                raise EngineError(f"nothing here would keep it to its share of a GPU: {error}") from error
            log.warning("job %s has its GPUs alone, and is not guarded: %s", launch.job[:8], error)
            return None
        mounts = guarded.container_mounts(self._guard.driver) if own_root else ()
        injection = Injection(env={} if own_root else guarded.process_env(), mounts=mounts)
        self._tenants.append(Tenant(name, launch, guarded, injection, self._ended))
        return self._tenants[-1]

    async def make_room(self, tenant: Tenant, wanted: Callable[[], bool]) -> None:
        """Wait until all that it is guaranteed is there: what of it was lent comes back first. EngineError if it does not, or
        once it is not wanted any more."""
        begun = time.monotonic()
        if tenant.guarded.has_room:
            return
        if self.lent is not None:
            await self.lent.look(self.tenants, self._chores)
        patience_s = ROOM_MARGIN_S + (0.0 if self.lent is None else self.lent.patience_s())
        while not tenant.guarded.has_room:
            if not wanted():
                raise EngineError("it was stopped while it waited for memory of its GPU that was lent to others")
            if time.monotonic() - begun > patience_s:
                raise EngineError("memory of its GPU that was lent to others has not come back")
            await asyncio.sleep(ROOM_LOOK_S)
        took_ms = (time.monotonic() - begun) * 1e3
        log.info("job %s: the memory it is guaranteed was lent, and is there after %.0f ms", tenant.job[:8], took_ms)

    def _quota(self, portion: Portion, launch: Launch) -> Quota:
        context = self._audit.context_bytes(portion.uuid) if self._audit is not None else 0
        if portion.share == WHOLE:
            return Quota(portion.uuid, window_ms=ALONE_WINDOW_MS, context_bytes=context)
        memory, most = portion.vram_mib << 20, max(portion.vram_mib, launch.vram_limit_mib) << 20
        limit = launch.gpu_share_limit
        return Quota(portion.uuid, memory, portion.share, limit, memory_limit=most, context_bytes=context)

    async def close(self) -> None:
        """After the guests."""
        for tenant in self.tenants:
            tenant.release()
        if self._guard is not None:
            self._guard.close()
        if self._audit is not None:
            await self._audit.close()


def page_directory(node: bytes) -> Path:
    """In memory, and apart from that of any other daemon of this machine."""
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), "/run" if os.getuid() == 0 else "", "/dev/shm"]
    base = next((base for base in bases if base and os.access(base, os.W_OK | os.X_OK)), "/tmp")
    return Path(base) / f"mesh-guard-{node.hex()[:16]}"
