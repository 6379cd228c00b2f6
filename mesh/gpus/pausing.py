"""Pausing guests in place: the gate closes, their GPU memory moves to the host, and their processes live on."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from cuda_guard.pause import CHECKPOINTED, Pause, PauseError, Step, available
from mesh.gpus.tenant import PausingHand, Tenant
from mesh.util.text import plural

BEGINS: dict[PausingHand, str] = {
    "owner": "the owner pauses it",
    "presence": "the owner is present",
    "lender": "memory lent to it is needed",
}
ENDS: dict[PausingHand, str] = {
    "owner": "the owner resumes it",
    "presence": "the owner is gone",
    "lender": "there is room for it again",
}
ABOVE: dict[PausingHand, set[str]] = {"owner": set(), "presence": {"owner"}, "lender": {"owner", "presence"}}

log = logging.getLogger(__name__)


class Pausing:
    """Pauses and resumes tenants.

    `holders` lists a tenant's processes on a GPU. `problem`: why this driver cannot free their memory; empty if it can. Even
    then, a pause keeps a guest from computing.
    """

    def __init__(self, driver: Path, holders: Callable[[Tenant], Awaitable[tuple[int, ...]]]) -> None:
        self.problem = "the driver was not asked yet"
        self._driver, self._holders = driver, holders
        self._pause = Pause(driver)

    async def open(self) -> None:
        why: str | None = await asyncio.to_thread(available, self._driver)
        self.problem = why or ""
        log.info("GPU memory of guests can be freed in place: %s", self.problem or "yes")

    async def pause(self, tenant: Tenant, by: PausingHand) -> str:
        """Pause a tenant until the same hand resumes it. Return why its memory stays; empty if it was freed."""
        tenant.set_gate(True, BEGINS[by], by)
        async with tenant.turn:
            if tenant.suspended or tenant.released:
                return ""
            if self.problem:
                return self.problem
            if "audit" in tenant.closed_by or "lease" in tenant.closed_by:
                return "it is stopped already, and the driver needs it to run for that"
            pids = await self._holders(tenant)
            try:
                steps = await asyncio.to_thread(self._pause.suspend, pids) if pids else []
            except PauseError as error:
                log.warning("job %s: its GPU memory is not freed: %s", tenant.job[:8], error)
                return str(error)
            tenant.suspended = pids
            if pids:
                tenant.guarded.release_memory()
            _log(tenant, f"GPU memory of {plural(len(pids), 'process', 'processes')} freed", steps)
            return ""

    async def resume(self, tenant: Tenant, by: PausingHand) -> str:
        """Resume a tenant: on the owner's order in any case, otherwise unless a stronger reason holds it.

        Return why it cannot resume; empty if it does.
        """
        async with tenant.turn:
            if tenant.closed_by & ABOVE[by]:
                tenant.set_gate(False, ENDS[by], by)
                return ""
            if tenant.suspended and "lease" in tenant.closed_by:
                return "its lease is over"
            if tenant.keeper is not None and by == "owner":
                tenant.keeper.thaw("its owner lets it go on")
            if by == "owner" and "presence" in tenant.closed_by:
                tenant.set_gate(False, ENDS[by], by)
                return "its owner is there (`mesh status`)"
            if tenant.suspended and not tenant.guarded.reserve_memory():
                return "there is no room for what it had beyond its guarantee"
            try:
                steps = await asyncio.to_thread(self._pause.resume, tenant.suspended) if tenant.suspended else []
            except PauseError as error:
                _stays(tenant, error.states)
                log.warning("job %s: its GPU memory is not brought back: %s", tenant.job[:8], error)
                return str(error)
            if tenant.suspended:
                _log(tenant, "GPU memory brought back", steps)
            tenant.suspended = ()
            tenant.set_gate(False, ENDS[by], "lender")
            tenant.set_gate(False, ENDS[by], by)
            return ""


def _stays(tenant: Tenant, states: dict[int, int] | None) -> None:
    """Record where the memory of a tenant is that could not be resumed. Where the driver does not say, it may be on the GPU."""
    if states is None:
        return
    suspended = tuple(pid for pid, state in states.items() if state == CHECKPOINTED)
    if suspended and len(suspended) == len(states):
        tenant.guarded.release_memory()
    tenant.suspended = suspended


def _log(tenant: Tenant, what: str, steps: list[Step]) -> None:
    stages = ", ".join(f"{step['step']} of {step['pid']} {step['ms']:.0f} ms" for step in steps)
    closed_ms = (time.monotonic() - tenant.gate_since) * 1e3
    log.info("job %s: %s: %s; its gate closed %.0f ms ago", tenant.job[:8], what, stages or "none had any", closed_ms)
