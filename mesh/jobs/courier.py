"""Carries checkpoints between stores: the I/O around `ckptstore.replication` and `ckptstore.fetch`.

A copy is: ask which chunks are missing, stream those, hand over the manifest; the peer answers only after its fsync. A fetch
is the same backwards, from several holders at once. Sending again sends only what is missing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.fetch import Fetch, Fetched, Request
from ckptstore.manifest import decode_manifest
from ckptstore.receiver import stream_bytes
from ckptstore.replication import Ask, Replication, Settled
from ckptstore.store import Store
from membership.identity import NodeId, short_id
from mesh.api.peer import PeerClient, PeerError

COPY_TIMEOUT_S = 3600.0
IDLE_TIMEOUT_S = 20.0  # a stream that stands still this long is broken

log = logging.getLogger(__name__)


class FetchError(RuntimeError):
    """A checkpoint could not be brought here; the text says who was asked and why each failed."""


class Replicated(msgspec.Struct, frozen=True):
    holders: tuple[NodeId, ...]
    short: str
    stand_ins: tuple[NodeId, ...]


class Courier:
    def __init__(self, peers: PeerClient, store: Store) -> None:
        self._peers = peers
        self._store = store

    async def replicate(
        self, manifest: bytes, chosen: Sequence[NodeId], fallback: Sequence[NodeId], want: int
    ) -> Replicated:
        """Get a checkpoint onto `want` peers' disks, the user's choice first."""
        plan = Replication(chosen, fallback, want)
        running: dict[asyncio.Task[None], NodeId] = {}
        actions = plan.start()
        try:
            while True:
                for action in actions:
                    if isinstance(action, Settled):
                        return Replicated(action.holders, action.short, tuple(plan.stand_ins))
                    task = asyncio.create_task(self._copy(action, manifest), name=f"copy to {short_id(action.peer)}")
                    running[task] = action.peer
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                actions = []
                for task in done:
                    peer = running.pop(task)
                    error = task.exception()
                    if error is None:
                        actions += plan.durable(peer)
                    elif isinstance(error, PeerError | StoreError | TimeoutError | OSError):
                        actions += plan.failed(peer, str(error) or type(error).__name__)
                    else:
                        raise error
        finally:
            for task in running:
                task.cancel()

    async def fetch(self, manifest: bytes, holders: Sequence[NodeId]) -> None:
        """Bring a checkpoint and all its chunks into the local store; FetchError if nobody can give it whole."""
        if await asyncio.to_thread(self._complete, manifest):
            return
        sealed, sources = await self._fetch_manifest(manifest, holders)
        _, wanted = await asyncio.to_thread(decode_manifest, sealed, self._store.unseal)
        missing = await asyncio.to_thread(self._store.missing, wanted.chunks)
        plan = Fetch(missing, sources)
        running: dict[asyncio.Task[list[bytes]], NodeId] = {}
        actions = plan.start()
        try:
            while True:
                for action in actions:
                    if isinstance(action, Fetched):
                        if action.problem:
                            raise FetchError(action.problem)
                        await asyncio.to_thread(self._store.accept_manifest, sealed)
                        return
                    task = asyncio.create_task(self._pull(action), name=f"fetch from {short_id(action.source)}")
                    running[task] = action.source
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                actions = []
                for task in done:
                    source = running.pop(task)
                    error = task.exception()
                    if error is None:
                        actions += plan.arrived(source, task.result())
                    elif isinstance(error, PeerError | CorruptChunk | TimeoutError | OSError):
                        actions += plan.failed(source, str(error) or type(error).__name__)
                    else:
                        raise error
        finally:
            for task in running:
                task.cancel()

    def _complete(self, manifest: bytes) -> bool:
        try:
            return self._store.has(manifest) and not self._store.missing(self._store.manifest(manifest).chunks)
        except StoreError:
            return False

    async def _fetch_manifest(self, manifest: bytes, holders: Sequence[NodeId]) -> tuple[bytes, list[NodeId]]:
        """The sealed manifest from the first who has it; everybody is a source of chunks until they fail."""
        reasons: list[str] = []
        if self._store.has(manifest):
            return await asyncio.to_thread(self._store.sealed, manifest), list(holders)
        for holder in holders:
            try:
                sealed = await self._peers.call(holder, "GET", f"/v1/manifests/{manifest.hex()}")
            except PeerError as error:
                reasons.append(str(error))
                continue
            return sealed, [holder, *(other for other in holders if other != holder)]
        raise FetchError("; ".join(reasons) or "nobody is known to have it")

    async def _copy(self, action: Ask, manifest: bytes) -> None:
        peer = action.peer
        sealed = await asyncio.to_thread(self._store.sealed, manifest)
        chunks = (await asyncio.to_thread(self._store.manifest, manifest)).chunks
        async with asyncio.timeout(COPY_TIMEOUT_S):
            answer = await self._peers.call(
                peer, "POST", "/v1/chunks/missing", msgspec.msgpack.encode(chunks), timeout_s=IDLE_TIMEOUT_S
            )
            missing = msgspec.msgpack.decode(answer, type=list[bytes])
            wanted = [identity for identity in missing if identity in set(chunks)]
            if wanted:
                async with self._peers.stream(peer, "PUT", "/v1/chunks", self._pieces(wanted)) as response:
                    await response.read()
            await self._peers.call(peer, "PUT", f"/v1/manifests/{manifest.hex()}", sealed)

    async def _pieces(self, ids: list[bytes]) -> AsyncIterator[bytes]:
        frames = await asyncio.to_thread(self._store.frames, ids)
        while True:
            piece = await asyncio.to_thread(next, frames, None)
            if piece is None:
                return
            for start in range(0, len(piece), 1 << 20):
                yield piece[start : start + (1 << 20)]

    async def _pull(self, request: Request) -> list[bytes]:
        receiver = await asyncio.to_thread(self._store.receive, stream_bytes(request.ids))
        body = msgspec.msgpack.encode(list(request.ids))
        try:
            async with self._peers.stream(request.source, "POST", "/v1/chunks/frames", body) as response:
                content: Any = response.content
                while True:
                    async with asyncio.timeout(IDLE_TIMEOUT_S):
                        data = await content.readany()
                    if not data:
                        break
                    await asyncio.to_thread(receiver.feed, data)
            await asyncio.to_thread(receiver.finish)
        finally:
            receiver.abort()
        missing = await asyncio.to_thread(self._store.missing, request.ids)
        return [identity for identity in request.ids if identity not in set(missing)]
