"""Memory of a GPU that was lent beyond what its jobs are guaranteed, and is needed now: how it comes back, rung by rung.

    notice    the job's limit has fallen already: it is refused what it would allocate, and told; it may give back by itself
    leave     one that saves is asked to go by its owner's ladder (notice, save, ship, kill), for it loses nothing so
    pause     of one that cannot save, what it has goes to the host where the driver can; it goes on when there is room again
    kill      where neither can be

What was lent is in force again when there is room: nobody has to be told. Each rung leaves a line in the log with what it took.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from mesh.chores import Chores
from mesh.jobs.service import JobService
from mesh.jobs.spec import parse_job
from mesh.provider.guard import NodeGuard
from mesh.provider.ladder import Ladder, Leave
from mesh.provider.tenant import Tenant

GIVE_BACK_S = 2.0  # a caching allocator frees what it does not need at its first refusal; ours
AGAIN_S = 5.0  # before one that was put away is tried again; ours
REASON = "memory of a GPU that was lent to it is needed for what another job is guaranteed"
WHY = "memory that was lent is needed"

log = logging.getLogger(__name__)


class _Debt:
    """Of one tenant, since when; what was done about it."""

    def __init__(self, owed: int, now: float) -> None:
        self.owed, self.since = owed, now
        self.pressed: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        """Nothing is done about it yet, or that has failed."""
        task = self.pressed
        return task is None or (task.done() and not task.cancelled() and task.exception() is not None)


class Recall:
    """`notice_s`: what a guest that must go is given."""

    def __init__(self, guard: NodeGuard, ladder: Ladder, jobs: JobService, notice_s: Callable[[], float]) -> None:
        self._guard, self._ladder, self._jobs, self._notice_s = guard, ladder, jobs, notice_s
        self._debts: dict[str, _Debt] = {}
        self._again_at = 0.0
        guard.lent = self

    def patience_s(self) -> float:
        """How long it takes at most until what is needed is there."""
        return GIVE_BACK_S + self._notice_s()

    async def look(self, tenants: Sequence[Tenant], chores: Chores) -> None:
        """Once a second, and when somebody comes for whom there is no room yet."""
        now = time.monotonic()
        here = {tenant.name: tenant for tenant in tenants}
        # Who has more than its guarantee and harms nobody only gets no more.
        needed = set[str]().union(*(tenant.lacks() for tenant in tenants))
        for name in self._debts.keys() - here.keys():
            self._settled(name, "it is gone", now)
        for name, tenant in here.items():
            owed = tenant.owes(needed)
            if not owed:
                self._settled(name, "its memory is on the host" if tenant.suspended else "it has given back", now)
                continue
            debt = self._debts.get(name)
            if debt is None:
                self._debts[name] = _Debt(owed, now)
                self._notice(tenant, owed)
            elif debt.is_due and now - debt.since >= GIVE_BACK_S:
                debt.pressed = chores.start(self._press(tenant, needed), f"recall {tenant.job[:8]}")
        away = [tenant for tenant in tenants if "lender" in tenant.closed_by]
        if away and now >= self._again_at:
            self._again_at = now + AGAIN_S
            for tenant in away:
                chores.start(self._bring_back(tenant), f"bring back {tenant.job[:8]}")

    def _notice(self, tenant: Tenant, owed: int) -> None:
        words = f"{owed / 2**20:.0f} MiB of its GPU memory were lent to it and are needed: it gets no more"
        log.info("job %s: rung notice: %s, and has %.0f s to give them back", tenant.job[:8], words, GIVE_BACK_S)
        self._jobs.chronicle.say(parse_job(tenant.job), "state", words, attempt=tenant.attempt, new="memory recalled")

    def _settled(self, name: str, how: str, now: float) -> None:
        debt = self._debts.pop(name, None)
        if debt is not None:
            took_ms, mib = (now - debt.since) * 1e3, debt.owed / 2**20
            log.info("tenant %s: %.0f MiB that were lent to it are back after %.0f ms: %s", name, mib, took_ms, how)

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
            words = f"{REASON}; what it had there is on the host, and it goes on when there is room"
            self._jobs.chronicle.say(job, "state", words, attempt=tenant.attempt, new="gpu paused")
            return
        await self._ladder.leave([job], Leave(self._notice_s(), 0.0, REASON, WHY, by_hand=True))

    async def _bring_back(self, tenant: Tenant) -> None:
        problem = await self._guard.resume(tenant, by="lender")
        if problem:
            log.info("job %s: it cannot go on yet: %s", tenant.job[:8], problem)
        else:
            self._jobs.chronicle.say(
                parse_job(tenant.job),
                "state",
                "there is room for what was lent to it",
                attempt=tenant.attempt,
                new="goes on",
            )
