"""Retention of working directories, which are stored before there is a job, and which several jobs may share.

Jobs name their working directory in their description. A link of a job to one stays in the journal until the job has been over
for some days; then the working directory goes with its last link. One that no job has named for a day goes as well: its
submission failed.

Statuses only hint at a link or an end. A link counts if the description, signed by the job's user, names a working directory of
that user. A job is over only while no node reports that it continues. So a member can keep another user's working directories
here, within that user's bound, and cannot have them removed while anybody reports their jobs.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping

from ckptstore.store import Store
from mesh.consensus.status import JobStatus, is_over
from mesh.journal import Journal
from mesh.model.spec import JobSpec
from mesh.util.backoff import Backoff
from mesh.util.few_at_once import few_at_once

UNNAMED_S = 86_400.0  # longer than any upload before its job is submitted (own choice)
ASKED, AT_ONCE = 16, 4  # jobs whose description is asked for in one round, and at the same time (own choice)
FALSE_S, FALSE_MAX_S = 120.0, 3600.0  # that a hint which no description confirmed is not followed again (own choice)

log = logging.getLogger(__name__)

Views = Mapping[bytes, Collection[JobStatus]]  # of each job, by all nodes that publish one


class Workdirs:
    """`views` returns what nodes publish; `ends` the jobs that are over; `describe` a job's verified description, or None."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        keep_s: float,
        views: Callable[[], Views],
        ends: Callable[[], Collection[bytes]],
        describe: Callable[[bytes], Awaitable[JobSpec | None]],
    ) -> None:
        self._store, self._journal, self._keep_s = store, journal, keep_s
        self._views, self._ends, self._describe = views, ends, describe
        # By working directory: each job, and since when it is over.
        self._links: dict[bytes, dict[bytes, float | None]] = {}
        self._unnamed: dict[bytes, float] = {}  # since when, by the monotonic clock
        self._unconfirmed = Backoff[tuple[bytes, bytes]](FALSE_S, FALSE_MAX_S)  # hints: job, working directory

    async def restore(self) -> None:
        for workdir, job, over_ms in await self._journal.workdirs():
            self._links.setdefault(workdir, {})[job] = None if over_ms is None else over_ms / 1000

    async def name(self, workdir: bytes, job: bytes) -> None:
        """Note that a job needs a working directory; durable on return."""
        await self._link(workdir, job, None)

    async def tidy(self, now_unix: float, now_s: float) -> None:
        """Remove what no job needs. `now_s`: by a clock that nobody sets."""
        infos = await asyncio.to_thread(self._store.manifests)
        users = {info.id: info.user for info in infos if info.kind == "workdir"}
        await self._follow_hints(users, now_s)
        for workdir, job, over in self._changed_ends(now_unix):
            await self._link(workdir, job, over)
        # Until here jobs may have been named. From here to the last removal nothing else runs.
        hinted = {view.workdir for views in self._views().values() for view in views}
        self._unnamed = {
            one: self._unnamed.get(one, now_s) for one in users if one not in self._links and one not in hinted
        }
        for workdir in users:
            if self._is_free(workdir, now_unix, now_s):
                log.info("working directory %s is removed: no job needs it", workdir.hex()[:12])
                self._store.forget(workdir)
        gone = [workdir for workdir in self._links if not self._store.has(workdir)]
        for workdir in gone:
            del self._links[workdir]
        await self._journal.drop_workdirs(gone)

    def _is_free(self, workdir: bytes, now_unix: float, now_s: float) -> bool:
        if jobs := self._links.get(workdir):
            return all(over is not None and over <= now_unix - self._keep_s for over in jobs.values())
        return self._unnamed.get(workdir, now_s) <= now_s - UNNAMED_S

    async def _follow_hints(self, users: Mapping[bytes, str], now_s: float) -> None:
        named = {(job, view.workdir) for job, views in self._views().items() for view in views if view.workdir in users}
        new = {(job, one) for job, one in named if one is not None and job not in self._links.get(one, ())}
        self._unconfirmed.keep_only(new)
        due = [hint for hint in new if self._unconfirmed.is_due(hint, now_s)]
        followed = random.sample(due, min(ASKED, len(due)))  # false hints must not keep true ones waiting
        specs = await few_at_once(AT_ONCE, self._describe, {job for job, _ in followed})
        for job, workdir in followed:
            spec = specs[job]
            if spec is not None and (spec.workdir, spec.user) == (workdir, users[workdir]):
                await self._link(workdir, job, None)
            else:
                self._unconfirmed.failed((job, workdir), now_s)

    def _changed_ends(self, now_unix: float) -> list[tuple[bytes, bytes, float | None]]:
        views, ends = self._views(), self._ends()
        changed = []
        for workdir, jobs in self._links.items():
            for job, over in jobs.items():
                told = is_over(views.get(job, ()))
                ended = over is None and (told or job in ends)
                now_over = None if told is False else now_unix if ended else over
                if now_over != over:
                    changed.append((workdir, job, now_over))
        return changed

    async def _link(self, workdir: bytes, job: bytes, over: float | None) -> None:
        self._links.setdefault(workdir, {})[job] = over
        await self._journal.save_workdir(workdir, job, None if over is None else int(over * 1000))
