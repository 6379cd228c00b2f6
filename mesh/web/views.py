"""What each page shows, by the answers that the unix socket gives. What other nodes have to be asked for comes later."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mesh.api.attendance import survival_of
from mesh.api.errors import MeshError
from mesh.api.explanation import explanation
from mesh.api.lending import lend_state, rehearsed
from mesh.api.orders import ReclaimOrder
from mesh.api.queries import UsageQuery
from mesh.api.usage import usage
from mesh.provider.usage import By
from mesh.web.frame import Shown, Standing
from mesh.web.jobs import job_page, jobs_page
from mesh.web.ledger import ledger_page
from mesh.web.lend import lend_page
from mesh.web.nodes import nodes_page, week_page

if TYPE_CHECKING:
    from mesh.api import answers
    from mesh.daemon import Daemon

PATIENCE_S = 0.08  # before a page is shown without an answer; ours, for 300 ms in all
JOB_EVERY_S = 3.0
LEDGER_EVERY_S = 60.0  # which asks every node

A = TypeVar("A")


class Asked(Generic[A]):
    """An answer that takes a while: the last one, asked for again once it is old."""

    def __init__(self, ask: Callable[[], Awaitable[A]], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._task: asyncio.Task[None] | None = None
        self._at = 0.0
        self._last: A | None = None

    async def answer(self) -> A | None:
        """None while there has been none; it is waited for a moment only."""
        if (self._task is None or self._task.done()) and time.monotonic() - self._at > self._every_s:
            self._task = asyncio.create_task(self._renew(), name="a page's question")
        if self._last is None and self._task is not None:
            await asyncio.wait([self._task], timeout=PATIENCE_S)
        return self._last

    async def _renew(self) -> None:
        with contextlib.suppress(
            MeshError, OSError, RuntimeError
        ):  # the page says what is not known; it is asked again
            self._last = await self._ask()
        self._at = time.monotonic()


async def nodes(daemon: "Daemon") -> Shown:
    return nodes_page(daemon.desk.nodes())


async def jobs(daemon: "Daemon", standing: Standing) -> Shown:
    return jobs_page(daemon.job_desk.job_list(), standing.user, time.time())


async def lend(daemon: "Daemon", standing: Standing, under_way: str, problem: str) -> Shown:
    cost = rehearsed(daemon, ReclaimOrder())["guests"]
    return lend_page(standing, lend_state(daemon), cost, daemon.owner.notice_s, under_way, problem)


def week(daemon: "Daemon", node: str) -> Shown:
    """Of one node, or of all that tell theirs."""
    rows = daemon.desk.nodes()
    if node:
        return week_page(rows, {}, survival_of(daemon, node))
    weeks = {}
    for row in rows:
        with contextlib.suppress(MeshError):  # it has told nothing yet
            weeks[row["node"]] = survival_of(daemon, row["node"])["week"]
    return week_page(rows, weeks, None)


class Job:
    def __init__(self, daemon: "Daemon", job: str) -> None:
        self._daemon, self._job = daemon, job
        self._stored: Asked[answers.checkpoints.Store] = Asked(lambda: daemon.ckpt_desk.stored(job), JOB_EVERY_S)
        self._described: Asked[answers.jobs.Described] = Asked(lambda: daemon.job_desk.describe(job), JOB_EVERY_S)
        self._reasons: Asked[answers.jobs.Why] = Asked(lambda: explanation(daemon, job), JOB_EVERY_S)

    async def render(self) -> Shown:
        stored, described, reasons = await asyncio.gather(
            self._stored.answer(), self._described.answer(), self._reasons.answer()
        )
        desk = self._daemon.job_desk
        row = desk.show(desk.find_job(self._job))
        return job_page(row, described, reasons, stored["checkpoints"] if stored else [], time.time())


class Ledger:
    def __init__(self, daemon: "Daemon", by: str) -> None:
        self._daemon, self._by = daemon, cast(By, by)
        since_s = UsageQuery().since_s
        self._own: Asked[answers.mesh.Usage] = Asked(lambda: usage(daemon, since_s, self._by, True), LEDGER_EVERY_S)
        self._all: Asked[answers.mesh.Usage] = Asked(lambda: usage(daemon, since_s, self._by, False), LEDGER_EVERY_S)

    async def render(self) -> Shown:
        told = await self._all.answer()
        answer: Mapping[str, Any] = (
            told or await self._own.answer() or {"rows": [], "silent": [], "cut": [], "runs": [], "since_unix_ms": 0}
        )
        return ledger_page(answer, self._by, told is None)
