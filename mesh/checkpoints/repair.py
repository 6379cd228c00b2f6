"""Repair: copies what a job has saved to further nodes when some of its holders are lost, and back to this node if it lost
its disk (`repair_plan.py` decides).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Set

from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.identity import NodeId
from mesh.checkpoints.repair_plan import LOST_S, Kept, RepairPlan, Shortage
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Expected, FetchError, Replicator
from mesh.consensus.status import JobStatus
from mesh.model.spec import JobSpec, format_job
from mesh.rpc.client import PeerError

LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)


class Repair:
    """`replica_policy` orders the nodes that may hold a job's state; `report` is called with new holders and a text for the
    user. `relied_on` returns the description of a job whose witnesses say that it goes on from this manifest, else None: any
    member can publish a status.
    """

    def __init__(
        self,
        me: NodeId,
        replicator: Replicator,
        store: Store,
        replica_policy: Callable[[bytes], ReplicaPolicy],
        report: Callable[[bytes, bytes, tuple[NodeId, ...], str], Awaitable[None]],
        relied_on: Callable[[bytes, bytes], Awaitable[JobSpec | None]],
        lost_s: float = LOST_S,
    ) -> None:
        self._me, self._replicator, self._store = me, replicator, store
        self._replica_policy, self._report, self._relied_on = replica_policy, report, relied_on
        self._plan = RepairPlan(me, lost_s)
        self._look_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def look(
        self,
        statuses: Iterable[JobStatus],
        views: Iterable[JobStatus],
        staying: Set[NodeId],
        runs_here: Collection[bytes],
    ) -> None:
        """Start to repair what lacks holders, one at a time. Call it now and then. `views`: all that nodes say of jobs."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for shortage in self._plan.look(statuses, staying, runs_here, now):
            if self._task is None or self._task.done():
                name = f"repair {format_job(shortage.job)[:8]}"
                self._task = asyncio.create_task(self._repair(shortage), name=name)
        for job, found in self._plan.unsure(views, now):
            if self._task is None or self._task.done():
                name = f"bring back {format_job(job)[:8]}"
                self._task = asyncio.create_task(self._bring_back(job, found), name=name)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _bring_back(self, job: bytes, found: Kept) -> None:
        """Fetch what this node should have, if it lost its disk. It takes no transfer if it is here."""
        others = [node for node in (*found.nodes, *self._replica_policy(job).fallback) if node != self._me]
        here = False
        try:
            spec = await self._relied_on(job, found.manifest)
            if spec is not None:
                await self._replicator.fetch(found.manifest, others, Expected.of(job, spec))
                here = True
        except (FetchError, PeerError, StoreError, TimeoutError, OSError) as error:
            log.info("job %s: this node lacks what it should have of it: %s", format_job(job)[:8], error)
        self._plan.checked(job, found, here, time.monotonic())

    def _has(self, shortage: Shortage) -> bool:
        return self._store.has(shortage.manifest) and self._store.manifest(shortage.manifest).job == shortage.job

    async def _repair(self, shortage: Shortage) -> None:
        self._plan.began(shortage, time.monotonic())
        job, lacking = format_job(shortage.job)[:8], shortage.lacking
        try:
            if not await asyncio.to_thread(self._has, shortage):
                return
            replica_policy = self._replica_policy(shortage.job)
            able = [node for node in replica_policy.fallback if node not in shortage.there]
            if not able:
                return
            copies = await self._replicator.replicate(shortage.manifest, (), able, lacking)
        except (PeerError, StoreError, TimeoutError, OSError) as error:
            log.info("job %s: what it saved lacks %d holders, and could not be copied: %s", job, lacking, error)
            return
        if copies.holders:
            holders = self._plan.copied(shortage, copies.holders)
            why = "too few nodes held what it saved"
            if not shortage.at_risk:
                why = f"{lacking} of the nodes that held what it saved are away"
            words = f"{why}; copied to {len(copies.holders)} others"
            await self._report(shortage.job, shortage.manifest, holders, words)
        else:
            log.info("job %s: what it saved lacks %d holders: %s", job, lacking, copies.short)
