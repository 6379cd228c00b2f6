"""Checkpoint writer: puts what one attempt saves into this node's store and onto other nodes' disks."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.compression_policy import CompressionPolicy
from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.manifest import Kind
from ckptstore.mappings import Processes, every_process
from ckptstore.store import SavedManifest, Store
from ckptstore.tree_scan import Scan
from mesh.checkpoints.loss_estimate import LossEstimate
from mesh.checkpoints.replica_policy import ReplicaPolicy
from mesh.checkpoints.replicator import Replicator, Sent
from mesh.checkpoints.save_schedule import SaveSchedule
from mesh.consensus.effects import SaveCheckpoint, SaveResult
from mesh.consensus.reports import CheckpointStored
from mesh.consensus.status import Saving
from mesh.model.spec import JobSpec
from mesh.util.boottime import boot_s

T = TypeVar("T")

log = logging.getLogger(__name__)

RESULT_REPLICAS = 2
RETRY_FOR_S, RETRY_EVERY_S = (
    10.0,
    1.0,
)  # while no node takes a copy: a suspect node is back or dead by then (own choice)
SHOWN_AFTER_S = 2.0  # a faster save is not shown (own choice)


class CheckpointWriter:
    """The writer of one attempt.

    `replica_policy` tells where replicas may go now; `note` writes an event for the user; `cipher` encrypts, once it is
    known; `places` are the prefixes in the store by the directories as the guest sees them; `processes` are the guest's. The
    attribute `note` is the remark on the last checkpoint; `last_save` its new bytes and the seconds it took to store them;
    `state_bytes` all of its bytes.
    """

    def __init__(
        self,
        job: bytes,
        spec: JobSpec,
        store: Store,
        replicator: Replicator,
        seal: Callable[[bytes], bytes],
        replica_policy: Callable[[], ReplicaPolicy],
        loss: LossEstimate,
        save_schedule: SaveSchedule,
        note: Callable[..., None],
        places: Mapping[str, str],
        processes: Processes = every_process,
    ) -> None:
        self.note = ""
        self.last_save: tuple[int, float] | None = None
        self.state_bytes: int | None = None
        self.cipher: StateCipher | None = None
        self._job, self._spec = job, spec
        self._store, self._replicator, self._seal, self._replica_policy = store, replicator, seal, replica_policy
        self._loss, self._cadence, self._note_event = loss, save_schedule, note
        self._places, self._processes, self._left_out = places, processes, False
        self._compression = CompressionPolicy()
        self._holders: tuple[bytes, ...] = ()  # of the last checkpoint
        self._stood_in = ""
        self._saving: Saving | None = None

    @property
    def saving(self) -> Saving | None:
        """Return what is being stored and how far it is, if it takes long."""
        now = self._saving
        return None if now is None or time.time() - now.since_unix_ms / 1000 < SHOWN_AFTER_S else now

    @contextmanager
    def _tells(self, kind: Kind, seq: int) -> Iterator[None]:
        self._saving = Saving(kind, seq, time.time_ns() // 1_000_000)
        try:
            yield
        finally:
            self._saving = None

    def _sends(self, sent: Sent) -> None:
        if self._saving is not None:
            self._saving = msgspec.structs.replace(self._saving, sent=sent.sent, size=sent.size, nodes=sent.nodes)

    async def checkpoint(
        self,
        roots: dict[str, Path],
        order: SaveCheckpoint,
        since_s: float,
        step: int | None,
        resume: str | None = None,
        scans: Mapping[str, Scan] | None = None,
    ) -> CheckpointStored:
        """Store and replicate a checkpoint of what was computed until `since_s`. StoreError, FileChanged if a tree changes
        meanwhile or since its scan, OSError.
        """
        return await _twice(lambda: self._checkpoint(roots, order, since_s, step, resume, scans))

    async def _checkpoint(
        self,
        roots: dict[str, Path],
        order: SaveCheckpoint,
        since_s: float,
        step: int | None,
        resume: str | None,
        scans: Mapping[str, Scan] | None,
    ) -> CheckpointStored:
        assert self._spec.checkpointing is not None
        rules, replica_policy = self._spec.checkpointing, self._replica_policy()
        idle_cores = (os.cpu_count() or 1) - os.getloadavg()[0]
        compress = self._compression.should_compress(self._replicator.bandwidth.mean_bps(self._holders), idle_cores)
        begun = time.monotonic()
        with self._tells("checkpoint", order.seq):
            saved = await self._keep("checkpoint", roots, order, replica_policy, resume, compress, scans)
            self.last_save = (saved.new_bytes, time.monotonic() - begun)
            self.state_bytes = saved.manifest.total_bytes
            if compress:
                self._compression.learn(saved.raw_bytes, saved.new_bytes, time.monotonic() - begun, idle_cores)
            give_up_s = boot_s() + RETRY_FOR_S
            while True:
                copies = await self._replicator.replicate(
                    saved.id,
                    rules.to,
                    replica_policy.fallback,
                    rules.replicas,
                    replica_policy.gone,
                    self._loss,
                    self._sends,
                )
                refusal = replica_policy.refusal(copies.holders, rules.replicas, copies.short)
                if not refusal or boot_s() >= (self._loss.deadline_s or give_up_s):
                    break
                await asyncio.sleep(RETRY_EVERY_S)
                replica_policy = self._replica_policy()
        self._holders = copies.holders
        if refusal:
            raise StoreError(refusal)
        self._loss.stored(since_s, step)
        self._cadence.stored(boot_s(), since_s, saved.new_bytes * max(1, len(copies.holders)))
        text = replica_policy.describe(copies.substitutes)
        if text != self._stood_in:
            self._stood_in = text
            self._note_event(text or "the nodes chosen for checkpoints hold them again", "stand-in")
        self.note = "; ".join(filter(None, [text, copies.short]))
        return CheckpointStored(saved.id, copies.holders, step)

    async def result(
        self, roots: dict[str, Path], order: SaveResult, known: Mapping[str, Scan] | None = None
    ) -> tuple[bytes, tuple[bytes, ...]]:
        """Store and replicate the result, without what is as in `known`; return its manifest and the other holders. StoreError,
        OSError.
        """
        return await _twice(lambda: self._result(roots, order, known))

    async def _result(
        self, roots: dict[str, Path], order: SaveResult, known: Mapping[str, Scan] | None
    ) -> tuple[bytes, tuple[bytes, ...]]:
        replica_policy, rules = self._replica_policy(), self._spec.checkpointing
        chosen = rules.to if rules is not None else ()
        with self._tells("result", order.seq):
            saved = await self._keep("result", roots, order, replica_policy, known=known)
            copies = await self._replicator.replicate(
                saved.id, chosen, replica_policy.fallback, RESULT_REPLICAS, replica_policy.gone, self._loss, self._sends
            )
        return saved.id, copies.holders

    async def _keep(
        self,
        kind: Kind,
        roots: dict[str, Path],
        order: SaveCheckpoint | SaveResult,
        replica_policy: ReplicaPolicy,
        resume: str | None = None,
        compress: bool = True,
        scans: Mapping[str, Scan] | None = None,
        known: Mapping[str, Scan] | None = None,
    ) -> SavedManifest:
        """Save to this node's own store."""
        saved = await asyncio.to_thread(
            self._store.save,
            roots,
            job=self._job,
            config=replica_policy.config,
            term=replica_policy.term,
            seq=order.seq,
            parent=order.parent,
            kind=kind,
            created_unix=int(time.time()),
            seal=self._seal,
            note=None if resume is None else {"resume": resume},
            compress=compress,
            cipher=self.cipher,
            user=self._spec.user,
            places=self._places,
            scans=scans,
            known=known,
            processes=self._processes,
        )
        if saved.left_out and not self._left_out:
            self._left_out = True
            some = f"{saved.left_out[0]}, one of {len(saved.left_out)}," if saved.left_out[1:] else saved.left_out[0]
            self._note_event(f"{some} is not saved: a link out of its directory, a socket or a pipe", "left out")
        return saved


async def _twice(store: Callable[[], Awaitable[T]]) -> T:
    """Store something; again if a chunk that was here already proves damaged, since the program still has its bytes."""
    try:
        return await store()
    except CorruptChunk as error:
        log.warning("%s: what is damaged is stored again", error)
        return await store()
