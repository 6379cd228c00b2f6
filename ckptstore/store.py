"""One node's checkpoint store: save, restore, give, receive, verify, collect (format: docs/ckptstore-format.md).

All methods block and may be called from any thread. The order of every write is restic's: temporary file, fsync, rename,
fsync of the directory; packs before manifests.
"""

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ckptstore.checker import salvage
from ckptstore.coding import Base, Bytes
from ckptstore.collector import Collected, collect
from ckptstore.errors import (
    BadManifest,
    CorruptChunk,
    DiskFull,
    FenceError,
    MissingChunks,
    NotFound,
    QuotaExceeded,
    ReadOnlyStore,
    StoreError,
)
from ckptstore.failpoints import failpoint
from ckptstore.heap import keep_memory, room
from ckptstore.index import Index
from ckptstore.manifest import (
    FORMAT_VERSION,
    Kind,
    Manifest,
    Seal,
    Tree,
    Unseal,
    decode_manifest,
    encode_manifest,
    manifest_id,
    pack_tree,
)
from ckptstore.pack import (
    HEADER_BYTES,
    Location,
    ObjectHeader,
    PackWriter,
    check_stored,
    decode_header,
    open_chunk,
    read_at,
    sync_directory,
    write_at,
)
from ckptstore.receiver import Receiver
from ckptstore.restorer import restore
from ckptstore.vault import Vault

THREADS = min(4, os.cpu_count() or 1)  # that read, hash and encode; each uses up to 24 MiB


class SavedManifest(msgspec.Struct, frozen=True):
    id: bytes
    sealed: bytes
    manifest: Manifest
    new_bytes: int  # that were written
    raw_bytes: int  # that were new, before they were encoded


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
    encrypted: bool
    user: str


class RestoreReport(msgspec.Struct, frozen=True):
    files: int
    bytes: int


class Fence(msgspec.Struct, frozen=True):
    """Terms order writers; a config number only breaks ties, since an undecided config may be higher than a decided one."""

    term: int
    config: int


class Store:
    """`quota_bytes` bounds all that is kept, `foreign_quota_bytes` what peers bring of other users than `user`, who is the
    node's own."""

    def __init__(
        self, root: Path, unseal: Unseal, *, quota_bytes: int | None = None, foreign_quota_bytes: int | None = None
    ) -> None:
        keep_memory()
        self.root = root
        self.unseal = unseal
        self.quota_bytes, self.foreign_quota_bytes = quota_bytes, foreign_quota_bytes
        self.user = ""
        self.packs, self.manifest_files = root / "packs", root / "manifests"
        self._fences, self.tmp, self.quarantine = root / "fences", root / "tmp", root / "quarantine"
        self.lock = threading.Lock()
        self._known: dict[bytes, Manifest] = {}
        with self.disk_errors():
            for directory in (self.packs, self.manifest_files, self._fences, self.tmp, self.quarantine):
                directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.tmp.iterdir():
                leftover.unlink()
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptstore")
            self.index = Index(root / "index.sqlite", self.packs)
            for path in self.index.damaged:
                salvage(self, path)

    def close(self) -> None:
        self._pool.shutdown()
        self.index.close()

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
        encoding: bool = True,
        vault: Vault | None = None,
        user: str = "",
    ) -> SavedManifest:
        """Store these files and directories under their prefixes; only chunks that are new are written, and with `encoding` as
        the difference to the `parent`'s where that is shorter; sealed in a `vault`. `user` is whose they are.

        SaveTorn if a file changes meanwhile; then nothing is visible and nothing is lost.
        """
        from ckptstore.saver import Saver

        with self.disk_errors():
            writer = PackWriter(self.tmp, self.packs, user != self.user)
            try:
                bases = self._bases(parent, vault) if encoding else {}

                def read(identity: bytes) -> Bytes:
                    return self.chunk(identity, vault)

                saver = Saver(writer, self._pool, THREADS, self.hold, read, bases, encoding, vault)
                for prefix, path in sorted(roots.items()):
                    saver.add(prefix, path)
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
                    tree=pack_tree(Tree(tuple(saver.files), note or {}), job, saver.lengths, vault),
                    realm=vault.realm if vault is not None else b"",
                    user=user,
                )
                sealed = seal(encode_manifest(manifest))
                self.check_quota(writer.bytes_written)
            except BaseException:
                writer.abort()
                raise
            self.publish_pack(writer)
            identity = self._accept(sealed, manifest)
            return SavedManifest(identity, sealed, manifest, writer.bytes_written, writer.raw_bytes)

    def _bases(self, parent: bytes | None, vault: Vault | None) -> dict[bytes, Base]:
        """An earlier checkpoint's chunks by label, as far as others may lean on them; of a chunk that leans itself, its base."""
        if parent is None or not self.has(parent):
            return {}
        manifest = self.manifest(parent)
        if manifest.realm != (vault.realm if vault is not None else b""):
            return {}
        found: dict[bytes, Base] = {}
        for entry in manifest.open(vault).files:
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
        self, identity: bytes, destination: Path, *, prefix: str = "", vault: Vault | None = None
    ) -> RestoreReport:
        """Write the files below `prefix` to `destination`, which must not exist or be empty: all of them, verified, or none."""
        manifest = self.manifest(identity)
        cut = prefix + "/" if prefix else ""
        entries = [entry for entry in manifest.open(vault).files if entry.path.startswith(cut)]
        with self.disk_errors():
            restore(manifest, entries, cut, destination, lambda one: self.chunk(one, vault), self._pool, THREADS)
        return RestoreReport(files=len(entries), bytes=sum(entry.size for entry in entries))

    def read_file(self, identity: bytes, path: str, vault: Vault | None = None) -> Iterator[Bytes]:
        """The bytes of one file of a manifest, verified chunk by chunk."""
        manifest = self.manifest(identity)
        for entry in manifest.open(vault).files:
            if entry.path == path and stat.S_ISREG(entry.mode):
                for chunk in manifest.content(entry):
                    yield self.chunk(chunk, vault)
                return
        raise NotFound(f"{path!r} is not a file of this checkpoint")

    def chunk(self, identity: bytes, vault: Vault | None = None) -> Bytes:
        """One chunk, verified; CorruptChunk, MissingChunks or Locked."""
        header, whole = self.object(identity)
        base = None
        if header.base is not None:
            former, bytes_of_it = self.object(header.base)
            base = open_chunk(former, bytes_of_it[HEADER_BYTES:], None, vault)
        return open_chunk(header, whole[HEADER_BYTES:], base, vault)

    def object(self, identity: bytes) -> tuple[ObjectHeader, memoryview]:
        """How a chunk is stored here: its header, and all its bytes, of which the stored ones are not looked at."""
        where, descriptor = self._open(identity)
        view = room(where.length)
        try:
            filled = read_at(descriptor, view, where.offset)
        finally:
            os.close(descriptor)
        try:
            header = decode_header(view[:HEADER_BYTES])
            if filled < where.length or header.id != identity or header.stored_length != where.length - HEADER_BYTES:
                raise CorruptChunk("an object is not the one the index says")
        except CorruptChunk as error:
            raise CorruptChunk(f"a chunk in pack {where.pack} is damaged: run `mesh ckpt verify`") from error
        return header, view

    def _open(self, identity: bytes) -> tuple[Location, int]:
        where = self.index.find(identity)
        while where is not None:
            try:
                return where, os.open(self.packs / f"{where.pack}.pack", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                before, where = where, self.index.find(identity)  # its pack may have been written anew
                if where == before:
                    raise MissingChunks("a pack has gone from this store", [identity]) from error
        raise MissingChunks("a chunk is not in this store", [identity])

    # --- manifests

    def manifest(self, identity: bytes) -> Manifest:
        known = self._known.get(identity)
        if known is None:
            _, known = decode_manifest(self.sealed(identity), self.unseal)
            self._known[identity] = known
            if len(self._known) > 1024:
                self._known.pop(next(iter(self._known)))
        return known

    def sealed(self, identity: bytes) -> bytes:
        try:
            sealed = (self.manifest_files / identity.hex()).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"checkpoint {identity.hex()[:12]} is not in this store") from error
        if manifest_id(sealed) != identity:
            raise BadManifest(f"the manifest of checkpoint {identity.hex()[:12]} is damaged")
        return sealed

    def manifests(self, job: bytes | None = None) -> list[ManifestInfo]:
        """Every readable manifest, of one job or all, oldest first."""
        found = []
        for path in self.manifest_files.iterdir():
            try:
                identity = bytes.fromhex(path.name)
                manifest = self.manifest(identity)
            except (ValueError, StoreError):
                continue
            if job is None or manifest.job == job:
                found.append(
                    ManifestInfo(
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
                        encrypted=bool(manifest.realm),
                        user=manifest.user,
                    )
                )
        return sorted(found, key=lambda info: (info.job, info.term, info.seq))

    def has(self, identity: bytes) -> bool:
        return (self.manifest_files / identity.hex()).exists()

    def accept_manifest(self, sealed: bytes) -> bytes:
        """Take a manifest, once every chunk of it is here; its id. Durable on return."""
        _, manifest = decode_manifest(sealed, self.unseal)
        return self._accept(sealed, manifest)

    def _accept(self, sealed: bytes, manifest: Manifest) -> bytes:
        identity = manifest_id(sealed)
        with self.lock, self.disk_errors():
            missing = self.index.missing(manifest.chunks)
            if missing:
                raise MissingChunks(f"{len(missing)} chunks of this checkpoint are not here", missing)
            self._raise_fence(manifest)
            if not self.has(identity):
                self._publish_manifest(identity, sealed, manifest)
        return identity

    def forget(self, identity: bytes) -> None:
        """Drop a manifest; its chunks go with the next collection if nothing else needs them."""
        (self.manifest_files / identity.hex()).unlink(missing_ok=True)
        self._known.pop(identity, None)

    def prune(self, job: bytes, committed_seq: int, keep: int) -> list[bytes]:
        """Forget a job's checkpoints before the `keep` that end with the committed one.

        A newer one stays, whatever its term: it may be committed by the time we hear of it, and that one is the job's only state.
        """
        checkpoints = [info for info in self.manifests(job) if info.kind == "checkpoint"]
        gone = [info.id for info in checkpoints if info.seq <= committed_seq - keep]
        for identity in gone:
            self.forget(identity)
        return gone

    # --- fences

    def fence(self, job: bytes) -> Fence:
        try:
            return msgspec.json.decode((self._fences / job.hex()).read_bytes(), type=Fence)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return Fence(0, 0)

    def _raise_fence(self, manifest: Manifest) -> None:
        """Refuse a writer that was replaced; remember the highest. Workdirs have no writer to fence."""
        if manifest.kind == "workdir":
            return
        known, wanted = self.fence(manifest.job), Fence(manifest.term, manifest.config)
        if (wanted.term, wanted.config) < (known.term, known.config):
            raise FenceError(f"term {wanted.term} of this job was replaced by term {known.term}")
        if wanted != known:
            path = self._fences / manifest.job.hex()
            self._write_durably(path, msgspec.json.encode(wanted), "fence-before-rename")

    # --- exchange with peers

    def missing(self, ids: Sequence[bytes], alone: Collection[bytes] = ()) -> list[bytes]:
        """Which of these chunks are not here, or lean on others although they are to stand `alone`. The rest will be here for a
        while, so that whoever asks need not send it."""
        held: set[str] = set()
        gone = []
        for identity in dict.fromkeys(ids):
            where = self.hold(identity, held)
            if where is None or (where.base is not None and identity in alone):
                gone.append(identity)
        return gone

    def needed(self, ids: Sequence[bytes]) -> tuple[list[bytes], set[bytes]]:
        """These chunks and those they lean on here, each after its base; and which those are."""
        return self.index.with_bases(ids)

    def size_of(self, ids: Sequence[bytes]) -> int:
        """The bytes of the stream of these."""
        places = map(self.index.find, ids)
        return sum(where.length for where in places if where is not None)

    def stand_alone(self, job: bytes) -> tuple[bytes, ...]:
        """The chunks of a job that others may lean on here."""
        known = {identity for info in self.manifests(job) for identity in self.manifest(info.id).chunks}
        places = ((identity, self.index.find(identity)) for identity in self.index.with_bases(known)[0])
        return tuple(identity for identity, where in places if where is not None and where.base is None)

    def frames(self, ids: Sequence[bytes]) -> Iterator[memoryview]:
        """The stream of these objects for a peer; MissingChunks before the first byte if one is not here."""
        missing = [identity for identity in ids if self.index.find(identity) is None]
        if missing:
            raise MissingChunks(f"{len(missing)} of the asked chunks are not in this store", missing)
        return self._frames(ids)

    def _frames(self, ids: Sequence[bytes]) -> Iterator[memoryview]:
        for identity in ids:
            header, whole = self.object(identity)
            check_stored(header, whole[HEADER_BYTES:])
            yield whole

    def receive(self, max_bytes: int, user: str | None = None) -> Receiver:
        """Begin to take chunks from a peer, up to a total; of this user's job, else the node's own."""
        foreign = user is not None and user != self.user
        self.check_quota(0, foreign)
        with self.disk_errors():
            return Receiver(self, max_bytes, foreign)

    # --- upkeep

    def collect(self, *, min_age_s: float, now_unix: float, keep: Collection[bytes] = ()) -> Collected:
        """Make room; see `collector`."""
        with self.disk_errors():
            return collect(self, min_age_s=min_age_s, now_unix=now_unix, keep=keep)

    def hold(self, identity: bytes, held: set[str]) -> Location | None:
        """Where a chunk is, if it can be read here; its pack, and its base's, will not be collected for a while.

        `held` remembers the packs for a caller who asks again and again.
        """
        with self.lock:
            places = self.index.places(identity)
            for pack in {place.pack for place in places} - held:
                try:
                    os.utime(self.packs / f"{pack}.pack")
                except FileNotFoundError:
                    return None
                held.add(pack)
            return places[0] if places else None

    def stored_bytes(self) -> int:
        size = 0
        for path in self.packs.glob("*.pack"):
            with suppress(FileNotFoundError):  # it has just been collected
                size += path.stat().st_size
        return size

    def foreign_bytes(self) -> int:
        """Of them, what is of other users' jobs."""
        size = 0
        for name in self.index.foreign_packs():
            with suppress(FileNotFoundError):
                size += (self.packs / f"{name}.pack").stat().st_size
        return size

    def room(self) -> int | None:
        """How many bytes of other users peers may still bring, as far as quotas say."""
        limits = [] if self.quota_bytes is None else [self.quota_bytes - self.stored_bytes()]
        if self.foreign_quota_bytes is not None:
            limits.append(self.foreign_quota_bytes - self.foreign_bytes())
        return max(0, min(limits)) if limits else None

    # --- writing

    def publish_pack(self, writer: PackWriter) -> None:
        try:
            writer.publish()
        except BaseException:
            writer.abort()
            raise
        if writer.locations:
            self.index.add(writer.name, writer.locations, writer.foreign)

    def _publish_manifest(self, identity: bytes, sealed: bytes, manifest: Manifest) -> None:
        path = self.manifest_files / identity.hex()
        self._write_durably(path, sealed, "manifest-before-rename")
        failpoint("manifest-after-rename")
        self._known[identity] = manifest

    def _write_durably(self, path: Path, data: bytes, point: str) -> None:
        temporary = self.tmp / f"{path.name}.{os.urandom(4).hex()}"
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                write_at(descriptor, data, 0)
                failpoint("manifest-before-fsync")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            failpoint(point)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def check_quota(self, more: int, foreign: bool = False) -> None:
        limit = self.foreign_quota_bytes if foreign else None
        if limit is not None and self.foreign_bytes() + more > limit:
            raise QuotaExceeded(
                f"this node keeps {limit / 2**30:.1f} GiB for others (foreign_quota_gib), and that is full"
            )
        if self.quota_bytes is not None and self.stored_bytes() + more > self.quota_bytes:
            raise QuotaExceeded(
                f"the store may hold {self.quota_bytes / 2**30:.1f} GiB (store_quota_gib); nothing was saved"
            )

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise DiskFull(
                    f"no room left for {self.root}: free some space; earlier checkpoints are safe"
                ) from error
            if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
                raise ReadOnlyStore(f"cannot write in {error.filename or self.root}: {error.strerror}") from error
            raise
