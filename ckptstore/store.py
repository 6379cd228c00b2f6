"""One node's checkpoint store: save, restore, give, receive, verify, collect (format: docs/ckptstore-format.md).

All methods block and may be called from any thread. The order of every write is restic's: temporary file, fsync, rename,
fsync of the directory; packs before manifests.
"""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ckptstore.checker import salvage
from ckptstore.errors import (
    BadManifest,
    BadPath,
    CorruptChunk,
    DiskFull,
    FenceError,
    MissingChunks,
    NotFound,
    QuotaExceeded,
    ReadOnlyStore,
    SaveTorn,
    StoreError,
)
from ckptstore.failpoints import failpoint
from ckptstore.index import Index
from ckptstore.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Kind,
    Manifest,
    Seal,
    Unseal,
    check_link,
    check_path,
    decode_manifest,
    encode_manifest,
    manifest_id,
)
from ckptstore.pack import (
    CHUNK_BYTES,
    PackWriter,
    chunk_id,
    encode_header,
    sync_directory,
)
from ckptstore.receiver import Receiver


class SavedManifest(msgspec.Struct, frozen=True):
    id: bytes
    sealed: bytes
    manifest: Manifest
    new_bytes: int


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


class RestoreReport(msgspec.Struct, frozen=True):
    files: int
    bytes: int


class Collected(msgspec.Struct, frozen=True):
    packs: int
    bytes: int


class Fence(msgspec.Struct, frozen=True):
    """Terms order writers; a config number only breaks ties, since an undecided config may be higher than a decided one."""

    term: int
    config: int


class Store:
    def __init__(self, root: Path, unseal: Unseal, *, quota_bytes: int | None = None) -> None:
        self.root = root
        self.unseal = unseal
        self._quota_bytes = quota_bytes
        self.packs, self.manifest_files = root / "packs", root / "manifests"
        self._fences, self.tmp, self.quarantine = root / "fences", root / "tmp", root / "quarantine"
        self.lock = threading.Lock()
        self._writers = 0  # open saves and receipts; collection waits for none to be open
        self._known: dict[bytes, Manifest] = {}
        with self.disk_errors():
            for directory in (self.packs, self.manifest_files, self._fences, self.tmp, self.quarantine):
                directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.tmp.iterdir():
                leftover.unlink()
            self.index = Index(root / "index.sqlite", self.packs)
            for path in self.index.damaged:
                salvage(self, path)

    def close(self) -> None:
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
    ) -> SavedManifest:
        """Store these files and directories under their prefixes; only chunks that are new are written.

        SaveTorn if a file changes meanwhile; then nothing is visible and nothing is lost.
        """
        with self.writing(), self.disk_errors():
            writer = PackWriter(self.tmp, self.packs)
            try:
                files: list[FileEntry] = []
                for prefix, path in sorted(roots.items()):
                    check_path(prefix)
                    self._save_tree(prefix, path, files, writer)
                manifest = Manifest(
                    version=FORMAT_VERSION,
                    job=job,
                    config=config,
                    term=term,
                    seq=seq,
                    parent=parent,
                    kind=kind,
                    created_unix=created_unix,
                    files=tuple(files),
                    note=note or {},
                )
                sealed = seal(encode_manifest(manifest))
                self.check_quota(writer.bytes_written)
            except BaseException:
                writer.abort()
                raise
            self.publish_pack(writer)
            identity = manifest_id(sealed)
            self._raise_fence(manifest)
            self._publish_manifest(identity, sealed, manifest)
            return SavedManifest(identity, sealed, manifest, writer.bytes_written)

    def _save_tree(self, prefix: str, path: Path, files: list[FileEntry], writer: PackWriter) -> None:
        try:
            info = path.lstat()
        except FileNotFoundError as error:
            raise SaveTorn(f"{path} went away while it was being saved") from error
        if stat.S_ISLNK(info.st_mode):
            target = str(path.readlink())
            check_link(prefix, target)
            files.append(FileEntry(prefix, info.st_mode, 0, (), target))
        elif stat.S_ISDIR(info.st_mode):
            files.append(FileEntry(prefix, info.st_mode, 0))
            for child in sorted(path.iterdir()):
                self._save_tree(f"{prefix}/{child.name}", child, files, writer)
        elif stat.S_ISREG(info.st_mode):
            files.append(self._save_file(prefix, path, writer))
        else:
            raise BadPath(f"{path} is a socket, pipe or device: only files, directories and links can be saved")

    def _save_file(self, prefix: str, path: Path, writer: PackWriter) -> FileEntry:
        check_path(prefix)
        try:
            with path.open("rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                chunks: list[bytes] = []
                size = 0
                while True:
                    data = _read_exactly(file.fileno(), CHUNK_BYTES)
                    if not data:
                        break
                    identity = chunk_id(data)
                    if self.index.find(identity) is None:
                        writer.add(identity, data)
                    chunks.append(identity)
                    size += len(data)
                after = path.lstat()
        except FileNotFoundError as error:
            raise SaveTorn(f"{path} went away while it was being saved") from error
        if _fingerprint(before) != _fingerprint(after) or size != after.st_size:
            raise SaveTorn(f"{path} changed while it was being saved")
        return FileEntry(prefix, after.st_mode, size, tuple(chunks))

    # --- restoring

    def restore(self, identity: bytes, destination: Path, *, prefix: str = "") -> RestoreReport:
        """Write the files below `prefix` to `destination`, which must not exist or be empty: all of them, verified, or none."""
        manifest = self.manifest(identity)
        cut = prefix + "/" if prefix else ""
        entries = [entry for entry in manifest.files if entry.path.startswith(cut)]
        temporary = destination.with_name(f"{destination.name}.restoring-{os.urandom(4).hex()}")
        total = 0
        with self.disk_errors():
            destination.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            try:
                for entry in sorted(entries, key=lambda entry: (stat.S_ISLNK(entry.mode), entry.path)):
                    self._restore_entry(entry, temporary / entry.path.removeprefix(cut))
                    total += entry.size
                for entry in reversed(entries):
                    if stat.S_ISDIR(entry.mode):
                        (temporary / entry.path.removeprefix(cut)).chmod(stat.S_IMODE(entry.mode) & 0o777 | 0o700)
                failpoint("restore-before-rename")
                if destination.exists():
                    destination.rmdir()
                temporary.rename(destination)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return RestoreReport(files=len(entries), bytes=total)

    def _restore_entry(self, entry: FileEntry, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(entry.mode):
            path.mkdir(exist_ok=True)
        elif stat.S_ISLNK(entry.mode):
            assert entry.target is not None
            path.symlink_to(entry.target)
        else:
            with path.open("xb") as file:
                for identity in entry.chunks:
                    file.write(self.chunk(identity))
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(entry.mode) & 0o777)

    def read_file(self, identity: bytes, path: str) -> Iterator[bytes]:
        """The bytes of one file of a manifest, verified chunk by chunk."""
        for entry in self.manifest(identity).files:
            if entry.path == path and stat.S_ISREG(entry.mode):
                for chunk in entry.chunks:
                    yield self.chunk(chunk)
                return
        raise NotFound(f"{path!r} is not a file of this checkpoint")

    def chunk(self, identity: bytes) -> bytes:
        """One chunk, verified; CorruptChunk or MissingChunks."""
        where = self.index.find(identity)
        if where is None:
            raise MissingChunks("a chunk is not in this store", [identity])
        try:
            with (self.packs / f"{where.pack}.pack").open("rb", buffering=0) as file:
                file.seek(where.offset)
                data = _read_exactly(file.fileno(), where.length)
        except FileNotFoundError as error:
            raise MissingChunks("a pack has gone from this store", [identity]) from error
        if chunk_id(data) != identity:
            raise CorruptChunk(
                f"a chunk in pack {where.pack} is damaged: run `mesh doctor`, or fetch it from a replica"
            )
        return data

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
                        files=len(manifest.files),
                    )
                )
        return sorted(found, key=lambda info: (info.job, info.term, info.seq))

    def has(self, identity: bytes) -> bool:
        return (self.manifest_files / identity.hex()).exists()

    def accept_manifest(self, sealed: bytes) -> bytes:
        """Take a manifest from a peer, once every chunk of it is here; its id. Durable on return."""
        _, manifest = decode_manifest(sealed, self.unseal)
        missing = self.index.missing(manifest.chunks)
        if missing:
            raise MissingChunks(f"{len(missing)} chunks of this checkpoint have not arrived", missing)
        identity = manifest_id(sealed)
        with self.writing(), self.disk_errors():
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

    def missing(self, ids: Sequence[bytes]) -> list[bytes]:
        return self.index.missing(ids)

    def frames(self, ids: Sequence[bytes]) -> Iterator[bytes]:
        """The stream of these objects for a peer; MissingChunks before the first byte if one is not here."""
        missing = self.index.missing(ids)
        if missing:
            raise MissingChunks(f"{len(missing)} of the asked chunks are not in this store", missing)
        return self._frames(ids)

    def _frames(self, ids: Sequence[bytes]) -> Iterator[bytes]:
        for identity in ids:
            data = self.chunk(identity)
            yield encode_header(identity, len(data)) + data

    def receive(self, max_bytes: int) -> Receiver:
        """Begin to take chunks from a peer, up to a total."""
        self.check_quota(0)
        with self.disk_errors():
            return Receiver(self, max_bytes)

    # --- upkeep

    def collect(self, *, min_age_s: float, now_unix: float, keep: Collection[bytes] = ()) -> Collected:
        """Remove packs that nothing reaches and that are old enough; nothing while anything is being written."""
        with self.lock:
            if self._writers:
                return Collected(0, 0)
            reachable = set(keep)
            for info in self.manifests():
                reachable.update(self.manifest(info.id).chunks)
            packs = removed = 0
            for path in list(self.packs.glob("*.pack")):
                age = now_unix - path.stat().st_mtime
                if age < min_age_s or any(identity in reachable for identity in self.index.chunks_of(path.stem)):
                    continue
                size = path.stat().st_size
                failpoint("collect-before-unlink")
                self.index.drop_pack(path.stem)
                path.unlink()
                failpoint("collect-after-unlink")
                packs, removed = packs + 1, removed + size
            return Collected(packs, removed)

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.packs.glob("*.pack"))

    # --- writing

    def publish_pack(self, writer: PackWriter) -> None:
        try:
            writer.publish()
        except BaseException:
            writer.abort()
            raise
        if writer.locations:
            self.index.add(writer.name, writer.locations)

    def _publish_manifest(self, identity: bytes, sealed: bytes, manifest: Manifest) -> None:
        path = self.manifest_files / identity.hex()
        self._write_durably(path, sealed, "manifest-before-rename")
        failpoint("manifest-after-rename")
        self._known[identity] = manifest

    def _write_durably(self, path: Path, data: bytes, point: str) -> None:
        temporary = self.tmp / f"{path.name}.{os.urandom(4).hex()}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                failpoint("manifest-before-fsync")
                os.fsync(file.fileno())
            failpoint(point)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def check_quota(self, more: int) -> None:
        if self._quota_bytes is not None and self.stored_bytes() + more > self._quota_bytes:
            raise QuotaExceeded(
                f"the store may hold {self._quota_bytes / 2**30:.1f} GiB (store_quota_gib); nothing was saved"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self.lock:
            self._writers += 1
        try:
            yield
        finally:
            with self.lock:
                self._writers -= 1

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


def _fingerprint(info: os.stat_result) -> tuple[int, int, int, int]:
    # Size and time alone may lie within one clock tick, so the inode and the change time count too.
    return (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _read_exactly(descriptor: int, count: int) -> bytes:
    pieces: list[bytes] = []
    while count:
        piece = os.read(descriptor, count)
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
