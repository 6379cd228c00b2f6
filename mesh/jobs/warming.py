"""Brings a job's last checkpoint, and once its working directory and image, to where it would go next, while it still runs here.

In the background, one copy at a time, the newest first; only chunks that the heir lacks travel. Nothing waits for it: a copy
that fails leaves the job as it was, and is tried again later.
"""

import asyncio
import logging
import time

from ckptstore.errors import StoreError
from membership.identity import NodeId, short_id
from mesh.api.peer import PeerError
from mesh.jobs.courier import Courier
from mesh.jobs.ledger import Commit
from mesh.jobs.runner import Runner
from mesh.jobs.spec import JobSpec, format_job

IMAGE_S = 5.0  # between two questions how far the heir is with the image; ours
AGAIN_S = 30.0  # after a copy that failed: a full disk or a cut rarely mends sooner; ours

log = logging.getLogger(__name__)


class Warming:
    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._turn = asyncio.Semaphore()  # jobs of one node share its network with commits, which come first
        self._copies: dict[bytes, tuple[NodeId, asyncio.Task[None]]] = {}
        self._checkpoints: dict[tuple[bytes, NodeId], bytes] = {}  # the newest that a node is known to have
        self._workdirs: set[tuple[bytes, NodeId]] = set()
        self._images: set[tuple[bytes, NodeId]] = set()  # of jobs that run by an image's hash
        self._not_before: dict[tuple[bytes, NodeId], float] = {}

    def follow(self, job: bytes, runner: Runner | None) -> None:
        """Look at what it has committed, while it runs."""
        commit = runner.ledger.commit if runner is not None and runner.state == "running" else None
        if runner is not None and commit is not None and commit.seq <= runner.ledger.settled:
            self.look(job, runner.spec, runner.onward.heir, commit)

    def look(self, job: bytes, spec: JobSpec, heir: NodeId | None, commit: Commit | None) -> None:
        """Begin to bring the heir what it lacks, unless a copy is under way; called now and then."""
        busy = self._copies.get(job)
        if busy is not None and busy[0] != heir:
            busy[1].cancel()
        if busy is not None or heir is None or commit is None or self.is_warm(job, spec, heir, commit):
            return
        if time.monotonic() >= self._not_before.get((job, heir), 0.0):
            task = asyncio.create_task(self._bring(job, spec, heir, commit), name=f"warm up {format_job(job)[:8]}")
            self._copies[job] = (heir, task)
            task.add_done_callback(lambda ended: self._finished(job, ended))

    def is_warm(self, job: bytes, spec: JobSpec, heir: NodeId | None, commit: Commit | None) -> bool:
        """Whether that node has said that all it needs to go on from this checkpoint is on its disk."""
        if heir is None or commit is None or not self._has_workdir(job, spec, heir):
            return False
        if spec.image_id is not None and (job, heir) not in self._images:
            return False
        return heir in commit.holders or self._checkpoints.get((job, heir)) == commit.manifest

    def holders(self, job: bytes, commit: Commit | None) -> frozenset[NodeId]:
        """Who was brought this checkpoint."""
        if commit is None:
            return frozenset()
        return frozenset(
            node for (of, node), known in self._checkpoints.items() if of == job and known == commit.manifest
        )

    def stop(self, job: bytes) -> None:
        """It is about to leave: its last checkpoint needs the network more."""
        if job in self._copies:
            self._copies[job][1].cancel()

    def forget(self, job: bytes) -> None:
        self.stop(job)
        self._checkpoints = {key: known for key, known in self._checkpoints.items() if key[0] != job}
        self._workdirs = {key for key in self._workdirs if key[0] != job}
        self._images = {key for key in self._images if key[0] != job}
        self._not_before = {key: until for key, until in self._not_before.items() if key[0] != job}

    async def close(self) -> None:
        tasks = [task for _, task in self._copies.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_workdir(self, job: bytes, spec: JobSpec, node: NodeId) -> bool:
        return spec.workdir is None or node in spec.workdir_holders or (job, node) in self._workdirs

    async def _bring(self, job: bytes, spec: JobSpec, heir: NodeId, commit: Commit) -> None:
        try:
            if spec.image_id is not None and (job, heir) not in self._images:
                if await self._courier.bring_image(heir, spec.image_id):
                    self._images.add((job, heir))
                else:  # it fetches it, beside what it gets from here
                    self._not_before[job, heir] = time.monotonic() + IMAGE_S
            async with self._turn:
                if spec.workdir is not None and not self._has_workdir(job, spec, heir):
                    await self._copy(spec.workdir, heir)
                    self._workdirs.add((job, heir))
                if heir not in commit.holders and self._checkpoints.get((job, heir)) != commit.manifest:
                    await self._copy(commit.manifest, heir)
                    self._checkpoints[job, heir] = commit.manifest
        except (PeerError, StoreError, TimeoutError, OSError) as error:
            self._not_before[job, heir] = time.monotonic() + AGAIN_S
            why = str(error) or "it does not answer"
            log.info("job %s: %s is not warmed up: %s", format_job(job)[:8], short_id(heir), why)

    async def _copy(self, manifest: bytes, heir: NodeId) -> None:
        copies = await self._courier.replicate(manifest, (), (heir,), 1)
        if not copies.holders:
            raise PeerError(copies.short)

    def _finished(self, job: bytes, task: asyncio.Task[None]) -> None:
        if self._copies.get(job, (b"", None))[1] is task:
            del self._copies[job]
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
