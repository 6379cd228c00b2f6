"""This node's GPU guard: prepared in the background, asked for every attempt that uses GPUs, and watching those attempts."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

from cuda_guard.auditor import Finding, Foreign, GpuProcess
from cuda_guard.build import BuildError, libraries
from cuda_guard.driver import Driver, find_driver
from cuda_guard.guard import Guard
from cuda_guard.page import ALONE_WINDOW_MS, Quota
from cuda_guard.symbols import missing_in_guard
from mesh.execution.engine import EngineError, Injection, Launch
from mesh.execution.secret_files import memory_bases, own_directories
from mesh.gpus.audit import Audit
from mesh.gpus.pausing import Pausing
from mesh.gpus.receipts import DeviceUse
from mesh.gpus.tenant import PausingHand, Tenant
from mesh.util import trees
from mesh.util.task_set import TaskSet
from placement.advert import WHOLE, Gpu, Portion

NO_DRIVER = "GPUs cannot be shared: NVIDIA's libcuda.so.1 and libnvidia-ml.so.1 are not on the library path"
ROOM_LOOK_S = 0.01  # between two checks whether lent memory is back (own choice)
ROOM_MARGIN_S = 10.0  # beyond the notice of its borrowers, for them to be killed and their contexts to end (own choice)
NAMED = 5  # unknown driver calls named in one log line (own choice)
LOOK_S = 1.0  # between two audits; NVML's samples cover up to a second

Bypass = Literal["warn", "pause", "kill"]  # the action on a job with a program that bypasses the guard

log = logging.getLogger(__name__)


class Lent(Protocol):
    """Recalls lent memory."""

    def patience_s(self) -> float:
        """Return the longest time that takes, in seconds."""
        ...

    async def look(self, tenants: Sequence[Tenant], tasks: TaskSet) -> None: ...


class NodeGuard:
    """The guard of one node.

    `changed` is called with the reason why there can be no guard, or an empty text once there is one; it is not called without
    GPUs or if `guards` is false. `warn` reports to the owner. `found` reports a tenant's violation and the action taken, `ended`
    its use, `looked` after each audit the programs on GPUs outside tenants. `lent` returns what recalls
    lent memory, and is called at each audit. `pinned_mib`: the host memory that a job without a memory request may pin.
    """

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
        looked: Callable[[dict[str, tuple[GpuProcess, ...]]], Awaitable[None]] | None = None,
        lent: Callable[[], Lent | None] = lambda: None,
    ) -> None:
        self._looked, self._lent = looked, lent
        self._directory, self._gpus, self._changed, self._warn = directory, gpus, changed, warn
        self._pinned_mib = pinned_mib
        self._guards = guards
        self._bypass, self._found, self._ended = bypass, found, ended
        self._guard: Guard | None = None
        self._audit: Audit | None = None
        self._pausing: Pausing | None = None
        self._tasks = TaskSet(log)
        self._problem = "there is no guard yet"
        self._tenants: list[Tenant] = []
        self._numbers = count()

    async def run(self) -> None:
        """Prepare the guard, which may take seconds of compiling, then audit tenants until cancelled."""
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
            await self._tasks.close()

    async def _make_guard(self, driver: Driver | None, uuids: tuple[str, ...]) -> bool:
        """Make the guard; return whether there is one."""
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
        """Warn about calls of a newer driver that the guard does not know."""
        try:
            names = await asyncio.to_thread(missing_in_guard, driver.cuda)
        except (OSError, ValueError) as error:
            log.warning("the driver's calls could not be listed: %s", error)
            return
        if names:
            some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            self._warn(
                f"the GPU driver has {len(names)} calls that the guard does not know ({some}): "
                "programs that look one up by dlsym find none"
            )

    async def pause(self, tenant: Tenant, by: PausingHand = "owner") -> str:
        """Keep a tenant off its GPUs until it is resumed, and free its GPU memory if the driver can.

        Return why its memory stays; empty if it was freed. A pause that has begun is completed even if the caller is cancelled.
        """
        if self._pausing is None:
            return self._problem
        return await asyncio.shield(self._tasks.start(self._pausing.pause(tenant, by), "pause"))

    async def resume(self, tenant: Tenant, by: PausingHand = "owner") -> str:
        """Resume a tenant that was paused, or stopped for bypassing the guard, or drop one reason for its pause.

        Return why it cannot resume; empty if it does.
        """
        if self._pausing is None:
            return self._problem
        return await asyncio.shield(self._tasks.start(self._pausing.resume(tenant, by), "resume"))

    @property
    def pause_problem(self) -> str:
        """Return why a paused guest's memory stays on the GPU; empty if it is freed."""
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
        lent = self._lent()
        if lent is not None:
            await lent.look(self.tenants, self._tasks)
        if self._looked is not None and not audit.problem:
            await self._looked(audit.strangers)

    def _act(self, tenant: Tenant, finding: Finding) -> None:
        """Act by the owner's setting on evidence that no honest job gives: a program that bypasses the guard ignores the gate."""
        if not finding.proves:
            self._warn(f"job {tenant.job[:8]} may use more than its share: {finding.detail}")
            return
        done = {"warn": "its node's owner is told", "pause": "it is stopped", "kill": "it is killed"}[self._bypass]
        self._warn(f"job {tenant.job[:8]} bypasses the guard: {finding.detail}: {done}")
        self._found(tenant, f"it bypasses the GPU guard: {finding.detail}: {done}")
        if tenant.keeper is None:
            return
        if self._bypass == "pause":
            tenant.keeper.freeze("it bypasses the guard")
        elif self._bypass == "kill":
            self._tasks.start(tenant.keeper.kill(), "kill a bypass of the guard")

    @property
    def foreign(self) -> dict[str, Foreign]:
        """Return the use outside guarded jobs, by device: the owner's own."""
        return self._audit.foreign if self._audit is not None else {}

    @property
    def audit_problem(self) -> str:
        """Return why there is no audit; empty if there is."""
        return self._audit.problem if self._audit is not None else self._problem

    @property
    def tenants(self) -> list[Tenant]:
        """Return the current tenants; released ones are dropped."""
        self._tenants = [tenant for tenant in self._tenants if not tenant.released]
        return self._tenants

    def shut_gates(self) -> None:
        """Close the gates of all tenants at once. Thread-safe."""
        for tenant in tuple(self._tenants):
            tenant.shut()

    def tenant(self, job: str) -> Tenant | None:
        """Return the tenant of a job's last attempt here; None if there is none."""
        return next((tenant for tenant in reversed(self.tenants) if tenant.job == job), None)

    def admit(self, launch: Launch, own_root: bool) -> Tenant | None:
        """Guard an attempt that is about to start.

        Return None if it has whole GPUs and runs unguarded. EngineError if it has shares, which could not be enforced.
        """
        try:
            if self._guard is None:
                raise OSError(self._problem)
            name = f"{launch.job}-{next(self._numbers)}"
            quotas = tuple(self._quota(portion, launch) for portion in launch.gpus)
            pinned_mib = self._pinned_mib if launch.memory_mib is None else launch.memory_mib
            guarded = self._guard.admit(name, quotas, own_root, None if pinned_mib is None else pinned_mib << 20)
        except (OSError, ValueError) as error:
            if any(portion.share < WHOLE for portion in launch.gpus):
                raise EngineError(f"its share of a GPU could not be enforced: {error}") from error
            log.warning("job %s has whole GPUs and is not guarded: %s", launch.job[:8], error)
            return None
        mounts = guarded.container_mounts(self._guard.driver) if own_root else guarded.process_files()
        injection = Injection(env={} if own_root else guarded.process_env(), mounts=mounts)
        self._tenants.append(Tenant(name, launch, guarded, injection, self._ended))
        return self._tenants[-1]

    async def make_room(self, tenant: Tenant, wanted: Callable[[], bool]) -> None:
        """Wait until all of a tenant's guaranteed memory is there, after lent memory is recalled.

        EngineError if it does not come back in time, or once the tenant is no longer wanted.
        """
        begun = time.monotonic()
        if tenant.guarded.has_guarantee:
            return
        lent = self._lent()
        if lent is not None:
            await lent.look(self.tenants, self._tasks)
        patience_s = ROOM_MARGIN_S + (0.0 if lent is None else lent.patience_s())
        while not tenant.guarded.has_guarantee:
            if not wanted():
                raise EngineError("it was stopped while it waited for GPU memory lent to other jobs")
            if time.monotonic() - begun > patience_s:
                raise EngineError("GPU memory lent to other jobs was not returned in time")
            await asyncio.sleep(ROOM_LOOK_S)
        took_ms = (time.monotonic() - begun) * 1e3
        log.info("job %s: its guaranteed memory was lent and is back after %.0f ms", tenant.job[:8], took_ms)

    def _quota(self, portion: Portion, launch: Launch) -> Quota:
        context = self._audit.context_bytes(portion.uuid) if self._audit is not None else 0
        if portion.share == WHOLE:
            return Quota(portion.uuid, window_ms=ALONE_WINDOW_MS, context_bytes=context)
        memory, most = portion.vram_mib << 20, max(portion.vram_mib, launch.vram_limit_mib) << 20
        limit = launch.gpu_share_limit
        return Quota(portion.uuid, memory, portion.share, limit, memory_limit=most, context_bytes=context)

    async def close(self) -> None:
        """Release everything, after the guests have ended."""
        for tenant in self.tenants:
            tenant.release()
        if self._guard is not None:
            self._guard.close()
        if self._audit is not None:
            await self._audit.close()


def page_directory(node: bytes) -> Path:
    """Return a new name for this node's page directory, in memory; remove those that earlier daemons of this node have left.

    Another user could take a name that they know.
    """
    bases, prefix = (*memory_bases(), "/tmp"), f"mesh-guard-{node.hex()[:16]}"
    for left in own_directories(bases, prefix):
        trees.remove(left)
    base = next(base for base in bases if base and (base == "/tmp" or os.access(base, os.W_OK | os.X_OK)))
    return Path(base) / f"{prefix}-{os.urandom(8).hex()}"
