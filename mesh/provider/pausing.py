"""Guests that their owner pauses where they are: the gate closes, what they have on the GPU goes to the host, and they live."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from cuda_guard.pause import Pause, PauseError, Step, available
from mesh.provider.tenant import PausingHand, Tenant

BEGINS: dict[PausingHand, str] = {
    "owner": "its owner pauses it",
    "presence": "its owner is there",
    "lender": "memory that was lent to it is needed",
}
ENDS: dict[PausingHand, str] = {
    "owner": "its owner lets it go on",
    "presence": "its owner is gone",
    "lender": "there is room for it again",
}
ABOVE: dict[PausingHand, set[str]] = {"owner": set(), "presence": {"owner"}, "lender": {"owner", "presence"}}

log = logging.getLogger(__name__)


class Pausing:
    """`holders` tells which processes of a tenant are on a GPU. `problem`: why this driver cannot free their memory; empty if it
    can. Without that a pause still keeps a guest from computing."""

    def __init__(self, driver: Path, holders: Callable[[Tenant], Awaitable[tuple[int, ...]]]) -> None:
        self.problem = "the driver was not asked yet"
        self._driver, self._holders = driver, holders
        self._pause = Pause(driver)

    async def open(self) -> None:
        why: str | None = await asyncio.to_thread(available, self._driver)
        self.problem = why or ""
        log.info("GPU memory of guests can be freed in place: %s", self.problem or "yes")

    async def pause(self, tenant: Tenant, by: PausingHand) -> str:
        """Until it is resumed by the same hand. Why its memory stays where it is; empty if it was freed."""
        tenant.set_gate(True, BEGINS[by], by)
        async with tenant.turn:
            if tenant.suspended or tenant.released:
                return ""
            if self.problem:
                return self.problem
            if "audit" in tenant.closed_by or "lease" in tenant.closed_by:
                return "it stands still already, and the driver needs it to run for that"
            pids = await self._holders(tenant)
            try:
                steps = await asyncio.to_thread(self._pause.suspend, pids) if pids else []
            except PauseError as error:
                log.warning("job %s: its GPU memory is not freed: %s", tenant.job[:8], error)
                return str(error)
            tenant.suspended = pids
            if pids:
                tenant.guarded.put_away()
            _log(tenant, f"GPU memory of {len(pids)} processes freed", steps)
            return ""

    async def resume(self, tenant: Tenant, by: PausingHand) -> str:
        """Whoever stopped it, if its owner orders so; else as far as no order of his is against it. Why it cannot go on; empty if
        it does."""
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
                return "its owner is there (`mesh lend`)"
            if tenant.suspended and not tenant.guarded.bring_back():
                return "there is no room for what it had beyond its guarantee"
            try:
                steps = await asyncio.to_thread(self._pause.resume, tenant.suspended) if tenant.suspended else []
            except PauseError as error:
                tenant.guarded.put_away()
                log.warning("job %s: its GPU memory is not brought back: %s", tenant.job[:8], error)
                return str(error)
            if tenant.suspended:
                _log(tenant, "GPU memory brought back", steps)
            tenant.suspended = ()
            tenant.set_gate(False, ENDS[by], "lender")
            tenant.set_gate(False, ENDS[by], by)
            return ""


def _log(tenant: Tenant, what: str, steps: list[Step]) -> None:
    rungs = ", ".join(f"{step['step']} of {step['pid']} {step['ms']:.0f} ms" for step in steps)
    closed_ms = (time.monotonic() - tenant.gate_since) * 1e3
    log.info("job %s: %s: %s; its gate closed %.0f ms ago", tenant.job[:8], what, rungs or "none had any", closed_ms)
