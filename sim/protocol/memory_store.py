"""A checkpoint store in memory, with the rules of `ckptstore.store.Store` on which the protocol relies.

`tests/ckptstore/test_store_contract.py` holds both to the same rules. It knows nothing of files: a saved state is a set of
chunk ids with their sizes. It is durable when a method returns, so it belongs to a simulated disk.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from ckptstore.errors import DiskFull, FenceError, MissingChunks, NotFound, QuotaExceeded
from ckptstore.manifest import Kind
from ckptstore.pack import BLOCK_BYTES
from ckptstore.store import Fence, FenceUse, ManifestInfo


class Saved(msgspec.Struct, frozen=True):
    """A manifest as nodes exchange it: the sizes of its chunks by id, the step of the saved state, and the node that made it."""

    info: ManifestInfo
    chunks: Mapping[bytes, int]
    step: int
    maker: bytes


class _Chunk(msgspec.Struct):
    size: int
    touched_unix: float


class MemoryStore:
    """`full` makes every write fail, as a full disk does."""

    def __init__(self, quota_bytes: int | None = None) -> None:
        self.quota_bytes = quota_bytes
        self.full = False
        self._chunks: dict[bytes, _Chunk] = {}
        self._manifests: dict[bytes, Saved] = {}
        self._fences: dict[bytes, Fence] = {}

    def free(self) -> None:
        """Give the store all the room that it can take."""
        self.quota_bytes, self.full = None, False

    # --- writing

    def save(
        self,
        chunks: Mapping[bytes, int],
        *,
        job: bytes,
        config: int,
        term: int,
        seq: int,
        parent: bytes | None,
        kind: Kind,
        step: int = 0,
        maker: bytes = b"",
        now_unix: float = 0.0,
    ) -> Saved:
        """Save a state; only new chunks are written. The store is unchanged if they do not fit."""
        name = repr((job, config, term, seq, parent, kind, sorted(chunks), step, maker, now_unix)).encode()
        info = ManifestInfo(
            id=blake2b(name, digest_size=32).digest(),
            job=job,
            kind=kind,
            config=config,
            term=term,
            seq=seq,
            parent=parent,
            created_unix=int(now_unix),
            total_bytes=sum(chunks.values()),
            files=len(chunks),
            realm=b"",
            user="sim",
            sealed_bytes=BLOCK_BYTES,
            chunk_bytes=sum(chunks.values()),
        )
        saved = Saved(info, dict(chunks), step, maker)
        new = {identity: size for identity, size in chunks.items() if identity not in self._chunks}
        self._check_room(sum(new.values()) + info.stored_bytes)
        self._write(chunks, now_unix)
        self._accept(saved, "raise")
        return saved

    def receive(self, chunks: Mapping[bytes, int], now_unix: float = 0.0) -> None:
        """Keep chunks from a peer: all of them, or none if they do not fit."""
        self._check_room(sum(size for identity, size in chunks.items() if identity not in self._chunks))
        self._write(chunks, now_unix)

    def accept_manifest(self, saved: Saved, fence: FenceUse = "raise") -> bytes:
        """Accept a manifest whose chunks are all here; return its id."""
        if not self.has(saved.info.id):
            self._check_room(saved.info.stored_bytes)
        self._accept(saved, fence)
        return saved.info.id

    def _accept(self, saved: Saved, fence: FenceUse) -> None:
        info = saved.info
        missing = [identity for identity in saved.chunks if identity not in self._chunks]
        if missing:
            raise MissingChunks(f"{len(missing)} chunks of this checkpoint are not in this store", missing)
        if fence != "ignore" and info.kind != "workdir":
            known, wanted = self.fence(info.job), Fence(info.term, info.config)
            if (wanted.term, wanted.config) < (known.term, known.config):
                raise FenceError(f"term {wanted.term} of this job was replaced by term {known.term}")
            if fence == "raise":
                self._fences[info.job] = wanted
        self._manifests.setdefault(info.id, saved)

    def _write(self, chunks: Mapping[bytes, int], now_unix: float) -> None:
        for identity, size in chunks.items():
            self._chunks[identity] = _Chunk(size, now_unix)

    def _check_room(self, more: int) -> None:
        if self.full:
            raise DiskFull("the disk is full: free some space; earlier checkpoints are safe")
        if self.quota_bytes is not None and self.stored_bytes() + more > self.quota_bytes:
            raise QuotaExceeded("the store is full and nothing was saved: raise the limit or delete checkpoints")

    # --- reading

    def stored_bytes(self) -> int:
        chunks = sum(chunk.size for chunk in self._chunks.values())
        return chunks + sum(saved.info.stored_bytes for saved in self._manifests.values())

    def fence(self, job: bytes) -> Fence:
        return self._fences.get(job, Fence(0, 0))

    def has(self, identity: bytes) -> bool:
        return identity in self._manifests

    def missing(self, ids: Iterable[bytes], now_unix: float = 0.0) -> list[bytes]:
        """Return which of these chunks are not here. The others are held for a while, so that they need not be sent."""
        missing = []
        for identity in dict.fromkeys(ids):
            if identity in self._chunks:
                self._chunks[identity].touched_unix = max(now_unix, self._chunks[identity].touched_unix)
            else:
                missing.append(identity)
        return missing

    def complete(self, identity: bytes) -> bool:
        """Tell whether a manifest is here with all its chunks; unlike `missing`, it holds nothing."""
        return self.has(identity) and all(chunk in self._chunks for chunk in self._manifests[identity].chunks)

    def manifest(self, identity: bytes) -> Saved:
        if identity not in self._manifests:
            raise NotFound(f"checkpoint {identity.hex()[:12]} is not in this store")
        return self._manifests[identity]

    def sizes(self, ids: Sequence[bytes]) -> dict[bytes, int]:
        """Return the chunks for a peer; MissingChunks if any is not here."""
        missing = [identity for identity in ids if identity not in self._chunks]
        if missing:
            raise MissingChunks(f"{len(missing)} of the requested chunks are not in this store", missing)
        return {identity: self._chunks[identity].size for identity in ids}

    def manifests(self, job: bytes | None = None) -> list[ManifestInfo]:
        """Return every manifest, of one job or all, oldest first."""
        found = [saved.info for saved in self._manifests.values() if job is None or saved.info.job == job]
        return sorted(found, key=lambda info: (info.job, info.term, info.seq))

    # --- upkeep

    def forget(self, identity: bytes) -> None:
        self._manifests.pop(identity, None)

    def forget_old(self, job: bytes, needed: Collection[int]) -> list[bytes]:
        """Forget a job's checkpoints below the highest number needed, except the needed ones; return the forgotten ids."""
        newest = max(needed, default=0)
        checkpoints = [info for info in self.manifests(job) if info.kind == "checkpoint"]
        old = [info.id for info in checkpoints if info.seq < newest and info.seq not in needed]
        for identity in old:
            self.forget(identity)
        return old

    def collect(self, *, min_age_s: float, now_unix: float) -> None:
        """Remove the chunks that no manifest reaches and that were not touched for `min_age_s`."""
        reachable = {identity for saved in self._manifests.values() for identity in saved.chunks}
        for identity, chunk in list(self._chunks.items()):
            if identity not in reachable and now_unix - chunk.touched_unix >= min_age_s:
                del self._chunks[identity]
