"""Retention: removes what jobs have left in this node's store: what nobody needs at once, results of finished jobs when space
is low.

The job that ended first is removed first, and none before it has been over for some days: its submitter may still want the
result. A job counts as over from the time when this node learned it, by its own clock, and only while no node reports that it
continues. What a job that goes on does not need any more is removed by the word of its witnesses.
"""

import asyncio
import logging
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ckptstore.collector import CollectReport
from ckptstore.store import ManifestInfo, Store
from mesh.checkpoints.pruning import longest_over, with_superseded
from mesh.consensus.status import JobStatus, is_over
from mesh.journal import Journal
from mesh.model.spec import format_job
from mesh.util.backoff import Backoff
from mesh.util.few_at_once import few_at_once

COLLECT_MIN_AGE_S = 900.0  # longer than from the last chunk of an upload to its manifest; kopia uses 24 h, over WANs
FULL_SHARE = 0.9  # of what the store may take, or of its disk (own choice)
ASKED, AT_ONCE = 64, 4  # jobs whose witnesses are asked in one round, and at the same time (own choice)
SILENT_S, SILENT_MAX_S = 120.0, 3600.0  # that a job is not asked about again after no answer (own choice)

log = logging.getLogger(__name__)


Views = Mapping[bytes, Collection[JobStatus]]  # of each job, by all nodes that publish one


class Retention:
    """`keep_s`: how long what a finished job has left stays in any case. `needed` asks a job's witnesses for the numbers of the
    checkpoints that it needs; none if they do not answer.
    """

    def __init__(
        self, store: Store, journal: Journal, keep_s: float, needed: Callable[[bytes], Awaitable[Collection[int]]]
    ) -> None:
        self._store, self._journal, self._keep_s, self._needed = store, journal, keep_s, needed
        self._silent = Backoff[bytes](SILENT_S, SILENT_MAX_S)  # jobs whose witnesses did not answer
        self._over: dict[bytes, float] = {}  # end (Unix time) of finished jobs with data here

    async def restore(self) -> None:
        self._over = {job: unix_ms / 1000 for job, unix_ms in (await self._journal.ended()).items()}

    async def tidy(self, views: Views, now_unix: float, now_s: float) -> None:
        """Free space, given what nodes publish of all known jobs. `now_s`: by a clock that nobody sets."""
        infos = await asyncio.to_thread(self._store.manifests)
        here = {info.job for info in infos}
        await self._note(views, here, now_unix)
        self._silent.keep_only(here)
        hinted = [job for job in with_superseded(views, infos) if self._silent.is_due(job, now_s)]
        asked = random.sample(hinted, min(ASKED, len(hinted)))  # false hints must not keep true ones waiting
        needed = await few_at_once(AT_ONCE, self._needed, asked)
        for job, numbers in needed.items():
            if numbers:
                self._silent.forget(job)
            else:
                self._silent.failed(job, now_s)
        await asyncio.to_thread(self._remove, needed, infos, now_unix)

    async def _note(self, views: Views, here: set[bytes], now_unix: float) -> None:
        known = {job: is_over(views.get(job, ())) for job in here}
        over = [job for job in here if known[job] and job not in self._over]
        new = [
            job for job in over if await self._journal.submitted(job) is None
        ]  # jobs submitted here keep their results
        gone = [job for job in self._over if known.get(job) is False or job not in here]
        if new or gone:
            await self._journal.note_ended(new, gone, int(now_unix * 1000))
        self._over = {job: at for job, at in self._over.items() if job not in gone} | dict.fromkeys(new, now_unix)

    def _remove(self, needed: Mapping[bytes, Collection[int]], infos: Sequence[ManifestInfo], now_unix: float) -> None:
        for job, numbers in needed.items():
            self._store.forget_old(job, numbers)
        waiting_bytes = self._collect().waiting_bytes  # they go without anything else
        since = {job: at for job, at in self._over.items() if at <= now_unix - self._keep_s}
        over = list(longest_over(infos, since, excess_bytes(self._store) - waiting_bytes))
        for info in over:
            days = (now_unix - since[info.job]) / 86_400
            words = "%s %d of job %s, over for %.0f days, is removed: the store's room is nearly used up"
            log.info(words, info.kind, info.seq, format_job(info.job)[:8], days)
            self._store.forget(info.id)
        if over:
            self._collect()

    def _collect(self) -> CollectReport:
        return self._store.collect(min_age_s=COLLECT_MIN_AGE_S, now_unix=time.time())


def excess_bytes(store: Store, disk: Callable[..., tuple[int, int, int]] = shutil.disk_usage) -> int:
    """Return by how many bytes the store exceeds nine tenths of what it may take; 0 or less if it does not."""
    stored = store.stored_bytes()
    total, _, free = disk(store.root)
    over = [min(stored, int(total * (1 - FULL_SHARE)) - free)]
    if store.quota_bytes is not None:
        over.append(stored - int(store.quota_bytes * FULL_SHARE))
    if store.foreign_quota_bytes is not None:
        over.append(store.foreign_bytes() - int(store.foreign_quota_bytes * FULL_SHARE))
    return max(over)
