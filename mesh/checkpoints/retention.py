"""Retention: removes what jobs have left in this node's store: what nobody needs at once, results of finished jobs when space
is low.

The job that ended first is removed first, and none before it has been over for some days: its submitter may still want the
result. A job counts as over from the time when this node learned it, by its own clock, and only while no node reports that it
continues.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from ckptstore.store import ManifestInfo, Store
from mesh.checkpoints.pruning import forget_superseded, longest_over
from mesh.consensus.status import JobStatus
from mesh.journal import Journal
from mesh.model.spec import format_job

COLLECT_MIN_AGE_S = 900.0  # longer than from the last chunk of an upload to its manifest; kopia uses 24 h, over WANs
FULL_SHARE = 0.9  # of what the store may take, or of its disk (own choice)

log = logging.getLogger(__name__)


class Retention:
    """`keep_s`: how long what a finished job has left stays in any case."""

    def __init__(self, store: Store, journal: Journal, keep_s: float) -> None:
        self._store, self._journal, self._keep_s = store, journal, keep_s
        self._over: dict[bytes, float] = {}  # end (Unix time) of finished jobs with data here

    async def restore(self) -> None:
        self._over = {job: unix_ms / 1000 for job, unix_ms in (await self._journal.ended()).items()}

    async def tidy(self, statuses: Mapping[bytes, JobStatus], now_unix: float) -> None:
        """Free space, given the status of all known jobs."""
        infos = await asyncio.to_thread(self._store.manifests)
        await self._note(statuses, {info.job for info in infos}, now_unix)
        await asyncio.to_thread(self._remove, statuses, infos, now_unix)

    async def _note(self, statuses: Mapping[bytes, JobStatus], here: set[bytes], now_unix: float) -> None:
        known = [statuses[job] for job in here if job in statuses]
        over = [status.job for status in known if status.outcome is not None and status.job not in self._over]
        new = [
            job for job in over if await self._journal.submitted(job) is None
        ]  # jobs submitted here keep their results
        goes_on = {status.job for status in known if status.outcome is None}
        gone = [job for job in self._over if job in goes_on or job not in here]
        if new or gone:
            await self._journal.note_ended(new, gone, int(now_unix * 1000))
        self._over = {job: at for job, at in self._over.items() if job not in gone} | dict.fromkeys(new, now_unix)

    def _remove(self, statuses: Mapping[bytes, JobStatus], infos: Sequence[ManifestInfo], now_unix: float) -> None:
        forget_superseded(self._store, statuses, infos)
        since = {job: at for job, at in self._over.items() if at <= now_unix - self._keep_s}
        for info in longest_over(infos, since, excess_bytes(self._store)):
            days = (now_unix - since[info.job]) / 86_400
            words = "%s %d of job %s, over for %.0f days, is removed: the store's room is nearly used up"
            log.info(words, info.kind, info.seq, format_job(info.job)[:8], days)
            self._store.forget(info.id)
        self._store.collect(min_age_s=COLLECT_MIN_AGE_S, now_unix=time.time())


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
