"""Repair: copies what a job has saved to further nodes when some of its holders are lost.

For a running job its runner does so, and the job record names the new holders. For a waiting or finished job the first
remaining holder does; readers find the new copies at the nodes that placement names first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Set

import msgspec

from ckptstore.errors import StoreError
from ckptstore.store import Store
from membership.identity import NodeId
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Replicator
from mesh.consensus.status import JobStatus
from mesh.model.spec import format_job
from mesh.rpc.client import PeerError

LOST_S, LOCAL_LOST_S = 30.0, 5.0  # that a holder must be away: longer than a restart (own choice)
LOOK_EVERY_S = 2.0
RETRY_S = 60.0  # after no node could take a copy (own choice)

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """A saved checkpoint or result, and the nodes known to have it: first the node that made it or runs the job from it."""

    manifest: bytes
    nodes: tuple[NodeId, ...]
    others: int  # wanted holders besides the node that made it


def kept(status: JobStatus) -> Kept | None:
    """Return the job's last checkpoint, or its result when it is over."""
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


class Repair:
    """`replica_policy` orders the nodes that may hold a job's state; `report` is called with new holders and a text for the
    user.
    """

    def __init__(
        self,
        me: NodeId,
        replicator: Replicator,
        store: Store,
        replica_policy: Callable[[bytes], ReplicaPolicy],
        report: Callable[[bytes, bytes, tuple[NodeId, ...], str], Awaitable[None]],
        lost_s: float = LOST_S,
    ) -> None:
        self._me, self._replicator, self._store = me, replicator, store
        self._replica_policy, self._report = replica_policy, report
        self._more: dict[bytes, tuple[NodeId, ...]] = {}  # holders that the job record does not name
        self._lost_s = lost_s
        self._look_at = 0.0
        self._short_since: dict[bytes, float] = {}
        self._task: asyncio.Task[None] | None = None

    def look(self, statuses: Iterable[JobStatus], staying: Set[NodeId], runs_here: Collection[bytes]) -> None:
        """Start to repair what lacks holders, one at a time. Call it now and then."""
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
            if now - self._short_since[manifest] >= self._lost_s and (self._task is None or self._task.done()):
                name = f"repair {format_job(status.job)[:8]}"
                self._task = asyncio.create_task(self._repair(status, manifest, lacking, tuple(there)), name=name)

    def _is_mine(self, status: JobStatus, there: list[NodeId], runs_here: Collection[bytes]) -> bool:
        if status.outcome is None and status.runner is not None:
            return status.job in runs_here and status.state == "running"
        return bool(there) and there[0] == self._me

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repair(self, status: JobStatus, manifest: bytes, lacking: int, there: tuple[NodeId, ...]) -> None:
        self._short_since[manifest] = time.monotonic() + RETRY_S - self._lost_s
        job = format_job(status.job)[:8]
        try:
            if not await asyncio.to_thread(self._store.has, manifest):
                return
            replica_policy = self._replica_policy(status.job)
            able = [node for node in replica_policy.fallback if node not in there]
            if not able:
                return
            copies = await self._replicator.replicate(manifest, (), able, lacking)
        except (PeerError, StoreError, TimeoutError, OSError) as error:
            log.info("job %s: what it saved lacks %d holders, and could not be copied: %s", job, lacking, error)
            return
        if copies.holders:
            self._more[manifest] = (*self._more.get(manifest, ()), *copies.holders)
            holders = tuple(node for node in (*there, *copies.holders) if node != self._me)
            words = f"{lacking} of the nodes that held what it saved are away; copied to {len(copies.holders)} others"
            await self._report(status.job, manifest, holders, words)
        else:
            log.info("job %s: what it saved lacks %d holders: %s", job, lacking, copies.short)
