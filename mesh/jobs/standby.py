"""Standby sync: brings a job's standby its files, image, data sets and last checkpoint, so that a move transfers little.

One copy at a time, in the background.
"""

import asyncio
import logging
import time

from ckptstore.errors import StoreError
from membership.identity import NodeId, short_id
from mesh.checkpoints.replicator import Replicator
from mesh.consensus.runner import Runner
from mesh.model.record import Commit
from mesh.model.spec import JobSpec, format_job
from mesh.rpc.client import PeerError
from mesh.util.task_set import TaskSet

IMAGE_S = 5.0  # between questions about the standby's image (own choice)
AGAIN_S = 30.0  # after a failed copy: a full disk or a partition rarely ends sooner (own choice)

log = logging.getLogger(__name__)


class StandbySync:
    def __init__(self, replicator: Replicator) -> None:
        self._replicator = replicator
        self._turn = asyncio.Semaphore()  # one copy at a time leaves the network to commits
        self._tasks = TaskSet(log)
        self._copies: dict[bytes, tuple[NodeId, asyncio.Task[None]]] = {}
        self._checkpoints: dict[tuple[bytes, NodeId], bytes] = {}  # the newest manifest that a node is known to have
        self._workdirs: set[tuple[bytes, NodeId]] = set()
        self._images: set[tuple[bytes, NodeId]] = set()  # of jobs with an image hash
        self._data: set[tuple[bytes, NodeId]] = set()  # that need bring no data sets any more
        self._not_before: dict[tuple[bytes, NodeId], float] = {}

    def follow(self, job: bytes, runner: Runner | None) -> None:
        """Sync the standby of a running job with its last settled checkpoint."""
        commit = runner.record.commit if runner is not None and runner.state == "running" else None
        if runner is not None and commit is not None and commit.seq <= runner.record.settled:
            self.look(job, runner.spec, runner.next_placement.standby, commit)

    def look(self, job: bytes, spec: JobSpec, standby: NodeId | None, commit: Commit | None) -> None:
        """Start to copy what the standby lacks, unless a copy is under way. Call it now and then."""
        busy = self._copies.get(job)
        if busy is not None and busy[0] != standby:
            busy[1].cancel()
        if busy is not None or standby is None or commit is None or self.is_warm(job, spec, standby, commit):
            return
        if time.monotonic() >= self._not_before.get((job, standby), 0.0):
            task = self._tasks.start(self._bring(job, spec, standby, commit), f"sync standby {format_job(job)[:8]}")
            self._copies[job] = (standby, task)
            task.add_done_callback(lambda ended: self._finished(job, ended))

    def is_warm(self, job: bytes, spec: JobSpec, standby: NodeId | None, commit: Commit | None) -> bool:
        """Tell whether the node has confirmed that all it needs to resume from this checkpoint is on its disk."""
        if standby is None or commit is None or not self._has_workdir(job, spec, standby):
            return False
        if spec.image_id is not None and (job, standby) not in self._images:
            return False
        if spec.data and (job, standby) not in self._data:
            return False
        return standby in commit.holders or self._checkpoints.get((job, standby)) == commit.manifest

    def holders(self, job: bytes, commit: Commit | None) -> frozenset[NodeId]:
        """Return the nodes to which this checkpoint was copied."""
        if commit is None:
            return frozenset()
        return frozenset(
            node for (of, node), known in self._checkpoints.items() if of == job and known == commit.manifest
        )

    def stop(self, job: bytes) -> None:
        """Stop copying: the job is about to leave, and its last checkpoint needs the network more."""
        if job in self._copies:
            self._copies[job][1].cancel()

    def forget(self, job: bytes) -> None:
        self.stop(job)
        self._checkpoints = {key: known for key, known in self._checkpoints.items() if key[0] != job}
        self._workdirs = {key for key in self._workdirs if key[0] != job}
        self._images = {key for key in self._images if key[0] != job}
        self._data = {key for key in self._data if key[0] != job}
        self._not_before = {key: until for key, until in self._not_before.items() if key[0] != job}

    async def close(self) -> None:
        await self._tasks.close()

    def _has_workdir(self, job: bytes, spec: JobSpec, node: NodeId) -> bool:
        return spec.workdir is None or node in spec.workdir_holders or (job, node) in self._workdirs

    async def _bring(self, job: bytes, spec: JobSpec, standby: NodeId, commit: Commit) -> None:
        try:
            if spec.image_id is not None and (job, standby) not in self._images:
                if await self._replicator.bring_image(standby, spec.image_id):
                    self._images.add((job, standby))
                else:  # it fetches the image while files arrive from here
                    self._not_before[job, standby] = time.monotonic() + IMAGE_S
            if (job, standby) not in self._data:
                needs = [need.manifest for need in spec.data if need.manifest]
                if all([await self._replicator.bring_data(standby, need) for need in needs]):
                    self._data.add((job, standby))
                else:  # it fetches them while files arrive from here
                    self._not_before[job, standby] = time.monotonic() + IMAGE_S
            async with self._turn:
                if spec.workdir is not None and not self._has_workdir(job, spec, standby):
                    await self._copy(spec.workdir, standby)
                    self._workdirs.add((job, standby))
                if standby not in commit.holders and self._checkpoints.get((job, standby)) != commit.manifest:
                    await self._copy(commit.manifest, standby)
                    self._checkpoints[job, standby] = commit.manifest
        except (PeerError, StoreError, TimeoutError, OSError) as error:
            self._not_before[job, standby] = time.monotonic() + AGAIN_S
            why = str(error) or "it does not answer"
            log.info("job %s: %s is not ready as standby: %s", format_job(job)[:8], short_id(standby), why)

    async def _copy(self, manifest: bytes, standby: NodeId) -> None:
        copies = await self._replicator.replicate(manifest, (), (standby,), 1)
        if not copies.holders:
            raise PeerError(copies.short)

    def _finished(self, job: bytes, task: asyncio.Task[None]) -> None:
        if self._copies.get(job, (b"", None))[1] is task:
            del self._copies[job]
