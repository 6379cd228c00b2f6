"""Brings what a job has saved to as many nodes again as it was on, when some of these are lost.

Of a job that runs, its runner does so, and the job's record names the new holders from then on. Of one that waits or is over,
the first holder that is left does; who needs it finds the copies since they are where new ones are looked for: at the nodes
that placement names first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Set

import msgspec

from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.identity import NodeId
from mesh.api.peer import PeerError
from mesh.jobs.courier import Courier
from mesh.jobs.custody import Custody
from mesh.jobs.spec import format_job
from mesh.jobs.status import JobStatus

LOST_S, LOCAL_LOST_S = 30.0, 5.0  # for which a holder must be away: longer than a restart; ours
LOOK_EVERY_S = 2.0
AGAIN_S = 60.0  # after nobody could take it; ours

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """Something that a job has saved, and the nodes that are known to have it, who made it or runs the job from it first."""

    manifest: bytes
    nodes: tuple[NodeId, ...]
    others: int  # than who made it, that were to hold it


def kept(status: JobStatus) -> Kept | None:
    """The job's last checkpoint, or its result when it is over."""
    outcome, commit = status.outcome, status.commit
    if outcome is not None:
        if outcome.manifest is None or not outcome.holders:
            return None
        made = status.attempts[-1].node if status.attempts else None
        nodes = dict.fromkeys([*([made] if made is not None else []), *outcome.holders])
        return Kept(outcome.manifest, tuple(nodes), len(outcome.holders))
    if commit is None or not commit.holders:
        return None
    makers = [attempt.node for attempt in status.attempts if attempt.term == commit.term]
    runs = [status.runner] if status.runner is not None and status.state == "running" else []
    return Kept(commit.manifest, tuple(dict.fromkeys([*runs, *makers, *commit.holders])), len(commit.holders))


class Mending:
    """`custody` orders the nodes that may hold a job's state; `tell` hears of new holders, and is given words for the user."""

    def __init__(
        self,
        me: NodeId,
        courier: Courier,
        store: Store,
        custody: Callable[[bytes], Custody],
        tell: Callable[[bytes, bytes, tuple[NodeId, ...], str], None],
    ) -> None:
        self._me, self._courier, self._store, self._custody, self._tell = me, courier, store, custody, tell
        self._more: dict[bytes, tuple[NodeId, ...]] = {}  # holders that the job's record does not name
        self.lost_s = LOST_S
        self._look_at = 0.0
        self._short_since: dict[bytes, float] = {}
        self._task: asyncio.Task[None] | None = None

    def look(self, statuses: Iterable[JobStatus], staying: Set[NodeId], runs_here: Collection[bytes]) -> None:
        """Begin to mend what is short of holders, one at a time; called now and then."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        short: dict[bytes, tuple[JobStatus, int, list[NodeId]]] = {}
        more, self._more = self._more, {}
        for status in statuses:
            found = kept(status)
            if found is None:
                continue
            if found.manifest in more:
                self._more[found.manifest] = more[found.manifest]
            known = dict.fromkeys([*found.nodes, *self._more.get(found.manifest, ())])
            there = [node for node in known if node in staying]
            if len(there) <= found.others and self._is_mine(status, there, runs_here):
                short[found.manifest] = (status, found.others + 1 - len(there), there)
        self._short_since = {manifest: self._short_since.get(manifest, now) for manifest in short}
        for manifest, (status, lacking, there) in short.items():
            if now - self._short_since[manifest] >= self.lost_s and (self._task is None or self._task.done()):
                name = f"mend {format_job(status.job)[:8]}"
                self._task = asyncio.create_task(self._mend(status, manifest, lacking, tuple(there)), name=name)

    def _is_mine(self, status: JobStatus, there: list[NodeId], runs_here: Collection[bytes]) -> bool:
        if status.outcome is None and status.runner is not None:
            return status.job in runs_here and status.state == "running"
        return bool(there) and there[0] == self._me

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _mend(self, status: JobStatus, manifest: bytes, lacking: int, there: tuple[NodeId, ...]) -> None:
        self._short_since[manifest] = time.monotonic() + AGAIN_S - self.lost_s
        job = format_job(status.job)[:8]
        try:
            if not await asyncio.to_thread(self._store.has, manifest):
                return
            custody = self._custody(status.job)
            able = [node for node in custody.fallback if node not in there]
            if not able:
                return
            copies = await self._courier.replicate(manifest, (), able, lacking)
        except (PeerError, StoreError, TimeoutError, OSError) as error:
            log.info("job %s: what it saved lacks %d holders, and could not be copied: %s", job, lacking, error)
            return
        if copies.holders:
            self._more[manifest] = (*self._more.get(manifest, ()), *copies.holders)
            holders = tuple(node for node in (*there, *copies.holders) if node != self._me)
            words = f"{lacking} of the nodes that held what it saved are away; copied to {len(copies.holders)} others"
            self._tell(status.job, manifest, holders, words)
        else:
            log.info("job %s: what it saved lacks %d holders: %s", job, lacking, copies.short)
