"""Recall of GPU memory that was lent to a job beyond its guarantee and that another job needs now, in stages.

    notice    the job's limit has fallen: new allocations are refused, and it may free memory by itself
    leave     a job that saves is asked to leave by the reclaim stages (notice, save, ship, kill), so it loses nothing
    pause     the memory of a job that cannot save moves to the host if the driver can; it resumes when there is room again
    kill      if neither is possible

Lent limits apply again as soon as there is room, without a message. Each stage logs how long it took.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from mesh.gpus.guard import NodeGuard
from mesh.gpus.tenant import Tenant
from mesh.jobs.service import JobService
from mesh.model.spec import parse_job
from mesh.provider.reclaim import Leave, Reclaimer
from mesh.util.task_set import TaskSet

GIVE_BACK_S = 2.0  # a caching allocator frees unused memory at its first refusal (own choice)
AGAIN_S = 5.0  # before another try to resume a paused tenant (own choice)
REASON = "memory of a GPU that was lent to it is needed for what another job is guaranteed"
WHY = "memory that was lent is needed"

log = logging.getLogger(__name__)


class _Debt:
    """The bytes that one tenant owes since a time, and the task that recalls them."""

    def __init__(self, owed: int, now: float) -> None:
        self.owed, self.since = owed, now
        self.pressed: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        """Return whether nothing has been done about it yet, or that has failed."""
        task = self.pressed
        return task is None or (task.done() and not task.cancelled() and task.exception() is not None)


class Recall:
    """Recalls lent memory. `notice_s`: the notice of a guest that must leave."""

    def __init__(self, guard: NodeGuard, reclaimer: Reclaimer, jobs: JobService, notice_s: Callable[[], float]) -> None:
        self._guard, self._reclaimer, self._jobs, self._notice_s = guard, reclaimer, jobs, notice_s
        self._debts: dict[str, _Debt] = {}
        self._again_at = 0.0

    def patience_s(self) -> float:
        """Return the longest time, in seconds, until the needed memory is back."""
        return GIVE_BACK_S + self._notice_s()

    async def look(self, tenants: Sequence[Tenant], tasks: TaskSet) -> None:
        """Check all tenants, once a second and when a new tenant lacks memory."""
        now = time.monotonic()
        here = {tenant.name: tenant for tenant in tenants}
        # A tenant above its guarantee that takes memory from no other only gets no more.
        needed = set[str]().union(*(tenant.lacks() for tenant in tenants))
        for name in self._debts.keys() - here.keys():
            self._settled(name, "it has left", now)
        for name, tenant in here.items():
            owed = tenant.owes(needed)
            if not owed:
                self._settled(name, "its memory is on the host" if tenant.suspended else "it freed the memory", now)
                continue
            debt = self._debts.get(name)
            if debt is None:
                self._debts[name] = _Debt(owed, now)
                self._notice(tenant, owed)
            elif debt.is_due and now - debt.since >= GIVE_BACK_S:
                debt.pressed = tasks.start(self._press(tenant, needed), f"recall {tenant.job[:8]}")
        away = [tenant for tenant in tenants if "lender" in tenant.closed_by]
        if away and now >= self._again_at:
            self._again_at = now + AGAIN_S
            for tenant in away:
                tasks.start(self._bring_back(tenant), f"bring back {tenant.job[:8]}")

    def _notice(self, tenant: Tenant, owed: int) -> None:
        words = f"{owed / 2**20:.0f} MiB of GPU memory lent to it are needed: it gets no more"
        log.info("job %s: stage notice: %s, and has %.0f s to free them", tenant.job[:8], words, GIVE_BACK_S)
        self._jobs.event_log.add(parse_job(tenant.job), "state", words, attempt=tenant.attempt, new="memory recalled")

    def _settled(self, name: str, how: str, now: float) -> None:
        debt = self._debts.pop(name, None)
        if debt is not None:
            took_ms, mib = (now - debt.since) * 1e3, debt.owed / 2**20
            log.info("tenant %s: %.0f MiB lent to it are back after %.0f ms: %s", name, mib, took_ms, how)

    async def _press(self, tenant: Tenant, needed: set[str]) -> None:
        job = parse_job(tenant.job)
        attempt = self._jobs.attempts.get(job)
        if attempt is None:
            return
        saves = attempt.spec.checkpointing is not None and attempt.heeds_notice is not False
        if (
            not saves
            and not self._guard.pause_problem
            and not await self._guard.pause(tenant, by="lender")
            and not tenant.owes(needed)
        ):
            words = f"{REASON}; its data is on the host, and it resumes when there is room"
            self._jobs.event_log.add(job, "state", words, attempt=tenant.attempt, new="gpu paused")
            return
        await self._reclaimer.leave([job], Leave(self._notice_s(), 0.0, REASON, WHY, by_hand=True))

    async def _bring_back(self, tenant: Tenant) -> None:
        problem = await self._guard.resume(tenant, by="lender")
        if problem:
            log.info("job %s: it cannot resume yet: %s", tenant.job[:8], problem)
        else:
            self._jobs.event_log.add(
                parse_job(tenant.job),
                "state",
                "there is room again for the memory lent to it",
                attempt=tenant.attempt,
                new="goes on",
            )
