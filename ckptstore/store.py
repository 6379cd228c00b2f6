"""Checkpoint store of one node: save, restore, exchange with peers, collect (format: docs/reference/ckptstore-format.md).

All methods block and may be called from any thread. The order of every write is restic's: temporary file, fsync, rename, fsync
of the directory; packs before manifests.
"""

import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from ckptstore.cipher import StateCipher
from ckptstore.collector import CollectReport, collect
from ckptstore.encoding import Base, Bytes
from ckptstore.errors import (
    BadManifest,
    FenceError,
    MissingChunks,
    NotFound,
    QuotaExceeded,
    StoreError,
    TooLarge,
)
from ckptstore.manifest import (
    FORMAT_VERSION,
    MAX_FILES,
    Kind,
    Manifest,
    Seal,
    Tree,
    Unseal,
    check_size,
    decode_manifest,
    encode_manifest,
    manifest_id,
    pack_tree,
)
from ckptstore.mappings import Processes, every_process
from ckptstore.objects import ObjectStore
from ckptstore.pack import BLOCK_BYTES, UNREADABLE, PackWriter, blocks, sync_directory, write_at
from ckptstore.receiver import Receiver
from ckptstore.restorer import restore
from ckptstore.tree_scan import Scan
from membership.malformed import MALFORMED

THREADS = min(4, os.cpu_count() or 1)  # for reading, hashing and encoding; each uses up to 24 MiB
KNOWN_MANIFESTS, KNOWN_BYTES = 1024, 64 << 20  # decoded manifests kept in memory, and what they take of it (own choice)
WORKDIRS, WORKDIR_BYTES = 4096, 8 << 30  # of another user (own choice)
WORKDIR_SHARE = 4  # at most a quarter of their quota (own choice)

log = logging.getLogger(__name__)

FenceUse = Literal["raise", "check", "ignore"]


class SavedManifest(msgspec.Struct, frozen=True):
    id: bytes
    sealed: bytes
    manifest: Manifest
    new_bytes: int  # written for new chunks
    raw_bytes: int  # size of the new chunks before encoding
    left_out: tuple[str, ...] = ()  # links that lead out of their trees, sockets and pipes


class ManifestInfo(msgspec.Struct, frozen=True):
    id: bytes
    job: bytes
    kind: Kind
    config: int
    term: int
    seq: int
    parent: bytes | None
    created_unix: int
    total_bytes: int
    files: int
    realm: bytes  # of its key; empty if it is not encrypted
    user: str
    sealed_bytes: int
    chunk_bytes: int  # of its chunks, decoded

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that the manifest itself takes of a quota: whole blocks."""
        return blocks(self.sealed_bytes)


class RestoreReport(msgspec.Struct, frozen=True):
    files: int
    bytes: int

    @property
    def disk_bytes(self) -> int:
        """Return what they take of a disk, holes included: at least a block for each file, directory and link."""
        return self.bytes + BLOCK_BYTES * self.files


class Fence(msgspec.Struct, frozen=True):
    """The highest (term, config) accepted for a job.

    Terms order writers; config numbers only break ties, since an undecided config may be higher than a decided one.
    """

    term: int
    config: int


class Store(ObjectStore):
    """The object store with manifests and fences. `user` is the node's own user; chunks of other users' jobs are foreign."""

    def __init__(
        self, root: Path, unseal: Unseal, *, quota_bytes: int | None = None, foreign_quota_bytes: int | None = None
    ) -> None:
        super().__init__(root, quota_bytes=quota_bytes, foreign_quota_bytes=foreign_quota_bytes)
        self.unseal = unseal
        self.user = ""
        self.manifest_files, self._fences = root / "manifests", root / "fences"
        self._known: dict[bytes, Manifest] = {}  # the oldest first
        self._known_bytes = 0
        self._infos: dict[bytes, ManifestInfo] = {}
        self._wanted: dict[object, Collection[bytes]] = {}  # chunks of manifests that are being fetched
        with self.disk_errors():
            for directory in (self.manifest_files, self._fences):
                directory.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptstore")

    def close(self) -> None:
        self._pool.shutdown()
        super().close()

    # --- saving

    def save(
        self,
        roots: Mapping[str, Path],
        *,
        job: bytes,
        config: int,
        term: int,
        seq: int,
        parent: bytes | None,
        kind: Kind,
        created_unix: int,
        seal: Seal,
        note: dict[str, str] | None = None,
        compress: bool = True,
        cipher: StateCipher | None = None,
        user: str = "",
        places: Mapping[str, str] | None = None,
        whole: bool = True,
        scans: Mapping[str, Scan] | None = None,
        known: Mapping[str, Scan] | None = None,
        processes: Processes = every_process,
    ) -> SavedManifest:
        """Save files and directories under their prefixes, for the job of `user`, encrypted if there is a `cipher`. Directories
        come with their contents if `whole`.

        Only new chunks are written. With `compress` they are compressed, or stored as deltas to chunks of `parent` where that is
        shorter. What is under a prefix is saved as it was at one moment; FileChanged, with the store unchanged, if it changes too
        often for that, or has since its scan in `scans`. What is as in `known` is left out. `places`, `processes`: see `Saver`.
        """
        from ckptstore.saver import Saver

        with self.disk_errors():
            writer = PackWriter(self.tmp, self.packs, user != self.user, lambda: self.check_incoming(False))
            self.incoming.add(writer)
            try:
                bases = self._bases(parent, cipher) if compress else {}

                def read(identity: bytes) -> Bytes:
                    return self.chunk(identity, cipher)

                saver = Saver(writer, self._pool, THREADS, self.hold, read, bases, compress, cipher, places, processes)
                for prefix, path in sorted(roots.items()):
                    saver.add(prefix, path, whole, (scans or {}).get(prefix), (known or {}).get(prefix))
                manifest = Manifest(
                    version=FORMAT_VERSION,
                    job=job,
                    config=config,
                    term=term,
                    seq=seq,
                    parent=parent,
                    kind=kind,
                    created_unix=created_unix,
                    ids=saver.ids,
                    lengths=tuple(saver.lengths),
                    entries=len(saver.files),
                    total_bytes=sum(entry.size for entry in saver.files),
                    tree=pack_tree(Tree(tuple(saver.files), note or {}), job, saver.lengths, cipher),
                    realm=cipher.realm if cipher is not None else b"",
                    user=user,
                )
                sealed = seal(encode_manifest(manifest))
                check_size(sealed)
                with self.keeping:  # of two that fit only alone, one is kept
                    self.incoming.discard(writer)
                    self.check_quota(writer.bytes_written + blocks(len(sealed)))
                    self.publish_pack(writer)
            except BaseException:
                writer.abort()
                raise
            finally:
                self.incoming.discard(writer)
            identity = self._accept(sealed, manifest)
            return SavedManifest(
                identity, sealed, manifest, writer.bytes_written, writer.raw_bytes, tuple(saver.left_out)
            )

    def _bases(self, parent: bytes | None, cipher: StateCipher | None) -> dict[bytes, Base]:
        """Return the chunks of an earlier checkpoint by label, as bases for deltas; for a chunk that is a delta, its base."""
        if parent is None or not self.has(parent):
            return {}
        try:
            manifest = self.manifest(parent)
            if manifest.realm != (cipher.realm if cipher is not None else b""):
                return {}
            files = manifest.open(cipher).files
        except StoreError as error:
            log.warning("chunks are stored whole, since the checkpoint before cannot be read: %s", error)
            return {}
        found: dict[bytes, Base] = {}
        for entry in files:
            for chunk in entry.chunks:
                identity = manifest.chunks[chunk.number]
                where = self.index.find(identity)
                if where is not None and where.base is not None:
                    identity = where.base
                    where = self.index.find(identity)
                if where is not None and where.base is None:
                    found[chunk.label] = Base(identity, manifest.lengths[chunk.number])
        return found

    # --- restoring

    def restore(
        self,
        identity: bytes,
        destination: Path,
        *,
        prefix: str = "",
        cipher: StateCipher | None = None,
        limit_bytes: int | None = None,
        most: int = MAX_FILES,
    ) -> RestoreReport:
        """Write the files below `prefix` to `destination`, which must not exist or be empty: all of them, verified, or none.

        TooLarge, before anything is written, if they are more than `most`, or take more than `limit_bytes`; holes count, and a
        block for each.
        """
        manifest = self.manifest(identity)
        cut = prefix + "/" if prefix else ""
        entries = [entry for entry in manifest.open(cipher).files if entry.path.startswith(cut)]
        report = RestoreReport(files=len(entries), bytes=sum(entry.size for entry in entries))
        if len(entries) > most:
            raise TooLarge(f"they are {len(entries)} files and directories, and at most {most} are taken")
        if limit_bytes is not None and report.disk_bytes > limit_bytes:
            raise TooLarge(
                f"its files take {report.disk_bytes} bytes (holes count), and there is room for {limit_bytes}"
            )
        with self.disk_errors():
            restore(manifest, entries, cut, destination, lambda one: self.chunk(one, cipher), self._pool, THREADS)
        return report

    def read_file(self, identity: bytes, path: str, cipher: StateCipher | None = None) -> Iterator[Bytes]:
        """Yield the bytes of one file of a manifest, verified chunk by chunk."""
        manifest = self.manifest(identity)
        for entry in manifest.open(cipher).files:
            if entry.path == path and stat.S_ISREG(entry.mode):
                for chunk in manifest.content(entry):
                    yield self.chunk(chunk, cipher)
                return
        raise NotFound(f"{path!r} is not a file of this checkpoint")

    # --- manifests

    def manifest(self, identity: bytes) -> Manifest:
        with self.lock:
            known = self._known.get(identity)
        if known is not None:
            return known
        sealed = self.sealed_manifest(identity)
        _, manifest = decode_manifest(sealed, self.unseal)
        with self.lock:
            self._remember(identity, manifest)
        return manifest

    def _remember(self, identity: bytes, manifest: Manifest) -> None:
        """Keep a decoded manifest in memory, within the bounds; the caller holds the lock."""
        self._drop_known(identity)
        self._known[identity] = manifest
        self._known_bytes += manifest.memory_bytes
        while len(self._known) > KNOWN_MANIFESTS or self._known_bytes > KNOWN_BYTES:
            self._drop_known(next(iter(self._known)))

    def _drop_known(self, identity: bytes) -> None:
        known = self._known.pop(identity, None)
        self._known_bytes -= known.memory_bytes if known is not None else 0

    def sealed_manifest(self, identity: bytes) -> bytes:
        try:
            sealed = (self.manifest_files / identity.hex()).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"checkpoint {identity.hex()[:12]} is not in this store") from error
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise BadManifest(f"the manifest of checkpoint {identity.hex()[:12]} is damaged") from error
        if manifest_id(sealed) != identity:
            raise BadManifest(f"the manifest of checkpoint {identity.hex()[:12]} is damaged")
        return sealed

    def manifests(self, job: bytes | None = None) -> list[ManifestInfo]:
        """Return every readable manifest, of one job or all, oldest first."""
        found = []
        for path in self.manifest_files.iterdir():
            try:
                identity = bytes.fromhex(path.name)
                info = self._infos.get(identity) or self._infos.setdefault(identity, self._info(identity, path))
            except (ValueError, StoreError, FileNotFoundError):
                continue
            if job is None or info.job == job:
                found.append(info)
        return sorted(found, key=lambda info: (info.job, info.term, info.seq))

    def _info(self, identity: bytes, path: Path) -> ManifestInfo:
        manifest = self.manifest(identity)
        return ManifestInfo(
            id=identity,
            job=manifest.job,
            kind=manifest.kind,
            config=manifest.config,
            term=manifest.term,
            seq=manifest.seq,
            parent=manifest.parent,
            created_unix=manifest.created_unix,
            total_bytes=manifest.total_bytes,
            files=manifest.entries,
            realm=manifest.realm,
            user=manifest.user,
            sealed_bytes=path.stat().st_size,
            chunk_bytes=sum(manifest.lengths),
        )

    # --- quotas

    def stored_bytes(self) -> int:
        return super().stored_bytes() + sum(info.stored_bytes for info in self.manifests())

    def foreign_bytes(self) -> int:
        manifests = sum(info.stored_bytes for info in self.manifests() if info.user != self.user)
        return super().foreign_bytes() + manifests

    def has(self, identity: bytes) -> bool:
        return (self.manifest_files / identity.hex()).exists()

    def accept_manifest(self, sealed: bytes, fence: FenceUse = "raise") -> bytes:
        """Accept a manifest whose chunks are all here; return its id. Durable on return.

        `fence`: raise it to the manifest's term (its writer is known to hold that), only check it, or ignore it (the manifest
        was asked for by its id).
        """
        _, manifest = decode_manifest(sealed, self.unseal)
        if not self.has(manifest_id(sealed)):
            self.check_room()
            self.check_quota(blocks(len(sealed)), manifest.user != self.user)
            if manifest.kind == "workdir" and manifest.user != self.user and fence != "ignore":
                self._check_workdirs(manifest, len(sealed))
        return self._accept(sealed, manifest, fence)

    def _check_workdirs(self, manifest: Manifest, sealed_bytes: int) -> None:
        """Raise QuotaExceeded if another user's working directories become too many, or too large together.

        Chunks that they share count once. The manifests that are here are read for that only where it decides.
        """
        infos = [info for info in self.manifests() if (info.kind, info.user) == ("workdir", manifest.user)]
        quota = self.foreign_quota_bytes
        limit = WORKDIR_BYTES if quota is None else min(WORKDIR_BYTES, quota // WORKDIR_SHARE)
        room = limit - blocks(sealed_bytes) - sum(info.stored_bytes for info in infos)
        if len(infos) < WORKDIRS and room >= 0:
            if sum(manifest.lengths) + sum(info.chunk_bytes for info in infos) <= room:
                return
            sizes = dict(manifest.sizes)
            for info in infos:
                sizes |= self.manifest(info.id).sizes
            if sum(sizes.values()) <= room:
                return
        raise QuotaExceeded(f"this node holds as many working directories of {manifest.user} as it takes")

    def _accept(self, sealed: bytes, manifest: Manifest, fence: FenceUse = "raise") -> bytes:
        identity = manifest_id(sealed)
        self.missing(manifest.chunks)  # it holds the others, so that no collection removes them from here on
        with self.lock, self.disk_errors():
            missing = self.index.missing(manifest.chunks)
            if missing:
                raise MissingChunks(f"{len(missing)} chunks of this checkpoint are not in this store", missing)
            if fence != "ignore":
                self._check_fence(manifest, moves=fence == "raise")
            if not self.has(identity):
                self._write_durably(self.manifest_files / identity.hex(), sealed)
                self._remember(identity, manifest)
        return identity

    def forget(self, identity: bytes) -> None:
        """Remove a manifest; the next collection removes its chunks unless something else needs them."""
        (self.manifest_files / identity.hex()).unlink(missing_ok=True)
        with self.lock:
            self._drop_known(identity)
            self._infos.pop(identity, None)

    def forget_old(self, job: bytes, needed: Collection[int]) -> list[bytes]:
        """Forget a job's checkpoints below the highest number needed, except the needed ones; return the forgotten ids.

        A newer one stays, whatever its term: it may have been committed without this node knowing yet.
        """
        newest = max(needed, default=0)
        checkpoints = [info for info in self.manifests(job) if info.kind == "checkpoint"]
        forgotten = [info.id for info in checkpoints if info.seq < newest and info.seq not in needed]
        for identity in forgotten:
            self.forget(identity)
        return forgotten

    # --- fences

    def fence(self, job: bytes) -> Fence:
        """Return a job's fence; FenceError if it cannot be read, since a lower one would let a replaced writer back in."""
        path = self._fences / job.hex()
        try:
            return msgspec.json.decode(path.read_bytes(), type=Fence)
        except FileNotFoundError:
            return Fence(0, 0)
        except (OSError, *MALFORMED) as error:
            raise FenceError(
                f"the file {path} is damaged, so this store takes no more checkpoints of job {job.hex()}; once nothing "
                "but its present attempt runs, remove the file"
            ) from error

    def _check_fence(self, manifest: Manifest, moves: bool) -> None:
        """Refuse a writer that was replaced, and record the highest one. Workdirs have no writer to fence."""
        if manifest.kind == "workdir":
            return
        known, wanted = self.fence(manifest.job), Fence(manifest.term, manifest.config)
        if (wanted.term, wanted.config) < (known.term, known.config):
            raise FenceError(f"term {wanted.term} of this job was replaced by term {known.term}")
        if moves and wanted != known:
            path = self._fences / manifest.job.hex()
            self._write_durably(path, msgspec.json.encode(wanted))

    # --- exchange with peers

    def base_candidates(self, job: bytes) -> tuple[bytes, ...]:
        """Return the chunks of a job here on which peers may send deltas."""
        known = {identity for info in self.manifests(job) for identity in self.manifest(info.id).chunks}
        places = ((identity, self.index.find(identity)) for identity in self.index.with_bases(known)[0])
        return tuple(identity for identity, where in places if where is not None and where.base is None)

    def receive(self, max_bytes: int, foreign: bool = False) -> Receiver:
        """Begin to receive up to `max_bytes` from a peer, for a job of another user if `foreign`."""
        self.check_quota(0, foreign)
        with self.disk_errors():
            return Receiver(self, max_bytes, foreign)

    # --- upkeep

    @contextmanager
    def wanted(self, chunks: Collection[bytes]) -> Iterator[None]:
        """Keep these chunks from being collected, once they are here: their manifest comes last. It waits for nothing."""
        key = object()
        self._wanted[key] = chunks
        try:
            yield
        finally:
            del self._wanted[key]

    def packs_of(self, manifest: bytes) -> set[str]:
        """Return the names of the packs that have the chunks of a manifest, or their bases."""
        return {place.pack for chunk in self.manifest(manifest).chunks for place in self.index.places(chunk)}

    def collect(self, *, min_age_s: float, now_unix: float) -> CollectReport:
        """Remove what no manifest reaches, here or on its way, from packs that were not touched for `min_age_s`."""
        with self.disk_errors():
            reachable = set().union(*tuple(self._wanted.values()))
            for info in self.manifests():
                with suppress(NotFound, BadManifest):  # forgotten or damaged meanwhile
                    reachable.update(self.manifest(info.id).chunks)
            reachable = set(self.index.with_bases(reachable)[0])
            return collect(self, self.manifest_files, reachable, min_age_s=min_age_s, now_unix=now_unix)

    # --- writing

    def _write_durably(self, path: Path, data: bytes) -> None:
        temporary = self.tmp / f"{path.name}.{os.urandom(4).hex()}"
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                write_at(descriptor, data, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
