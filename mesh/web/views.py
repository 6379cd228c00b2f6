"""The contents of each page, from the handlers' answers. Answers that need other nodes follow later."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

from mesh.api import schemas
from mesh.api.queries import UsageQuery
from mesh.api.requests import ReclaimOrder
from mesh.api.routing import Handlers
from mesh.provider.usage import By
from mesh.util.errors import MeshError
from mesh.web.frame import Shown, Viewer
from mesh.web.jobs import job_page, jobs_page
from mesh.web.lend import lend_page
from mesh.web.nodes import nodes_page, week_page
from mesh.web.usage import ledger_page
from placement.queue import HALF_LIFE_S

PATIENCE_S = 0.08  # before a page is shown without an answer (own choice, for 300 ms in all)
JOB_EVERY_S = 3.0
LEDGER_EVERY_S = 60.0  # which asks every node

NOTHING_YET = schemas.mesh.Usage(
    by="user",
    since_unix_ms=0,
    rows=[],
    asked=0,
    silent=[],
    cut=[],
    refused=0,
    half_life_s=HALF_LIFE_S,
    runs=[],
)

A = TypeVar("A")


class Asked(Generic[A]):
    """An answer that takes a while: the last one, asked for again once it is old."""

    def __init__(self, ask: Callable[[], Awaitable[A]], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._task: asyncio.Task[None] | None = None
        self._at = 0.0
        self._last: A | None = None

    async def answer(self) -> A | None:
        """Return the last answer; None if the first one takes longer than a moment."""
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


async def nodes(handlers: Handlers) -> Shown:
    return nodes_page(handlers.node.nodes())


async def jobs(handlers: Handlers, viewer: Viewer) -> Shown:
    return jobs_page(handlers.jobs.rows(), viewer.user, time.time())


async def lend(handlers: Handlers, viewer: Viewer, under_way: str, problem: str) -> Shown:
    cost = handlers.lending.rehearsed(ReclaimOrder()).guests
    return lend_page(viewer, handlers.lending.lend_state(), cost, handlers.lending.notice_s(), under_way, problem)


def week(handlers: Handlers, node: str) -> Shown:
    """Return the week of one node, or of all nodes that publish theirs."""
    rows = handlers.node.nodes()
    if node:
        return week_page(rows, {}, handlers.placement.survival(node))
    weeks = {}
    for row in rows:
        with contextlib.suppress(MeshError):  # it has told nothing yet
            weeks[row.node] = handlers.placement.survival(row.node).week
    return week_page(rows, weeks, None)


class Job:
    def __init__(self, handlers: Handlers, job: str) -> None:
        self._handlers, self._job = handlers, job
        self._stored: Asked[schemas.checkpoints.Store] = Asked(lambda: handlers.checkpoints.stored(job), JOB_EVERY_S)
        self._described: Asked[schemas.jobs.Described] = Asked(lambda: handlers.jobs.describe(job), JOB_EVERY_S)
        self._reasons: Asked[schemas.jobs.Why] = Asked(lambda: handlers.placement.why(job), JOB_EVERY_S)

    async def render(self) -> Shown:
        stored, described, reasons = await asyncio.gather(
            self._stored.answer(), self._described.answer(), self._reasons.answer()
        )
        row = self._handlers.jobs.show(self._handlers.lookup.find_job(self._job))
        return job_page(row, described, reasons, stored.checkpoints if stored else [], time.time())


class Ledger:
    def __init__(self, handlers: Handlers, by: str) -> None:
        self._by = cast(By, by)
        since_s = UsageQuery().since_s
        self._own: Asked[schemas.mesh.Usage] = Asked(
            lambda: handlers.usage.usage(since_s, self._by, True), LEDGER_EVERY_S
        )
        self._all: Asked[schemas.mesh.Usage] = Asked(
            lambda: handlers.usage.usage(since_s, self._by, False), LEDGER_EVERY_S
        )

    async def render(self) -> Shown:
        answered = await self._all.answer()
        answer = answered or await self._own.answer() or NOTHING_YET
        return ledger_page(answer, self._by, answered is None)
