"""How what one attempt saves comes to lie in this node's store and on other nodes' disks."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ckptstore.effort import Effort
from ckptstore.errors import StoreError
from ckptstore.manifest import Kind
from ckptstore.store import SavedManifest, Store
from ckptstore.vault import Vault
from mesh.engine.alarm import boot_s
from mesh.jobs.cadence import Cadence
from mesh.jobs.courier import Courier, Sent
from mesh.jobs.custody import Custody
from mesh.jobs.effects import SaveCheckpoint, SaveResult
from mesh.jobs.reports import CheckpointStored
from mesh.jobs.spec import JobSpec
from mesh.jobs.stake import Stake
from mesh.jobs.status import Saving

RESULT_REPLICAS = 2
TOLD_AFTER_S = 2.0  # what is kept faster is not news; ours


class Deposits:
    """`custody` says where replicas may go now; `say` is for the user. `note`: what is to be known of the last checkpoint;
    `last_save`: its new bytes, and the seconds it took to store them; `state_bytes`: all that it consists of. `vault` seals
    them, once it is known."""

    def __init__(
        self,
        job: bytes,
        spec: JobSpec,
        store: Store,
        courier: Courier,
        seal: Callable[[bytes], bytes],
        custody: Callable[[], Custody],
        stake: Stake,
        cadence: Cadence,
        say: Callable[..., None],
    ) -> None:
        self.note = ""
        self.last_save: tuple[int, float] | None = None
        self.state_bytes: int | None = None
        self.vault: Vault | None = None
        self._job, self._spec = job, spec
        self._store, self._courier, self._seal, self._custody = store, courier, seal, custody
        self._stake, self._cadence, self._say = stake, cadence, say
        self._effort = Effort()
        self._holders: tuple[bytes, ...] = ()  # of its last checkpoint
        self._stood_in = ""
        self._saving: Saving | None = None

    @property
    def saving(self) -> Saving | None:
        """What is being kept, and how far that is, if it takes long."""
        now = self._saving
        return None if now is None or time.time() - now.since_unix_ms / 1000 < TOLD_AFTER_S else now

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
        self, roots: dict[str, Path], order: SaveCheckpoint, since_s: float, step: int | None, resume: str | None = None
    ) -> CheckpointStored:
        """`since_s`: what had been computed until then is in it. StoreError, SaveTorn if a file changes meanwhile; OSError."""
        assert self._spec.checkpointing is not None
        rules, custody = self._spec.checkpointing, self._custody()
        idle_cores = (os.cpu_count() or 1) - os.getloadavg()[0]
        encoding = self._effort.pays(self._courier.bandwidth.mean_bps(self._holders), idle_cores)
        begun = time.monotonic()
        with self._tells("checkpoint", order.seq):
            saved = await self._keep("checkpoint", roots, order, custody, resume, encoding)
            self.last_save = (saved.new_bytes, time.monotonic() - begun)
            self.state_bytes = saved.manifest.total_bytes
            if encoding:
                self._effort.learn(saved.raw_bytes, saved.new_bytes, time.monotonic() - begun, idle_cores)
            copies = await self._courier.replicate(
                saved.id, rules.to, custody.fallback, rules.replicas, custody.gone, self._stake, self._sends
            )
        self._holders = copies.holders
        if not copies.holders and rules.replicas and custody.fallback:
            raise StoreError(f"no other node took it: {copies.short}")
        self._stake.stored(since_s, step)
        self._cadence.stored(boot_s(), since_s, saved.new_bytes * max(1, len(copies.holders)))
        words = custody.told(copies.stand_ins)
        if words != self._stood_in:
            self._stood_in = words
            self._say(words or "the nodes chosen for checkpoints hold them again", "stand-in")
        self.note = "; ".join(filter(None, [words, copies.short]))
        return CheckpointStored(saved.id, copies.holders, step)

    async def result(self, roots: dict[str, Path], order: SaveResult) -> tuple[bytes, tuple[bytes, ...]]:
        """Its manifest, and who else holds it. StoreError, OSError."""
        custody, rules = self._custody(), self._spec.checkpointing
        chosen = rules.to if rules is not None else ()
        with self._tells("result", order.seq):
            saved = await self._keep("result", roots, order, custody)
            copies = await self._courier.replicate(
                saved.id, chosen, custody.fallback, RESULT_REPLICAS, custody.gone, self._stake, self._sends
            )
        return saved.id, copies.holders

    async def _keep(
        self,
        kind: Kind,
        roots: dict[str, Path],
        order: SaveCheckpoint | SaveResult,
        custody: Custody,
        resume: str | None = None,
        encoding: bool = True,
    ) -> SavedManifest:
        """Into this node's own store."""
        return await asyncio.to_thread(
            self._store.save,
            roots,
            job=self._job,
            config=custody.config,
            term=custody.term,
            seq=order.seq,
            parent=order.parent,
            kind=kind,
            created_unix=int(time.time()),
            seal=self._seal,
            note=None if resume is None else {"resume": resume},
            encoding=encoding,
            vault=self.vault,
            user=self._spec.user,
        )
