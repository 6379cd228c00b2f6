"""The blobs of images, by SHA-256, on this node's disk: pushed by a client of the registry, or fetched from other nodes.

images/blobs/HASH       a whole blob that had this hash; its modification time is its last use
            /HASH.part  pieces of a blob that is being fetched
            /*.push     an upload; like parts, it counts for nothing and does not outlive the daemon
      /tags.json        the names that were pushed
The first use of a blob in each run compares it with its hash, so that damage of this disk is not passed on.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

import msgspec

from membership.durable import write_durably
from membership.malformed import MALFORMED
from mesh.images.oci import MAX_MANIFEST_BYTES, Manifest, ManifestError, decode_oci

PIECE_BYTES = 4 << 20  # small enough to fetch again, large enough for few requests (own choice)
IDLE_S = 600.0  # a blob unused for this long may go; another node or an engine may still read a newer one (own choice)
SPARE_BYTES = 1 << 30  # always left free on the disk (own choice)
MAX_TAGS = 4096  # own choice
KNOWN = 512  # decoded manifests in memory (own choice)


class NoRoom(OSError):
    """The disk is too full; the text says how much is free."""


class Upload:
    """A blob that arrives in order. Calls block."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.used, self.busy = path, 0, time.monotonic(), False
        self._hash = sha256()
        self._file = path.open("xb")

    def write(self, data: bytes) -> None:
        check_room(self.path.parent, len(data))
        self._hash.update(data)
        self.size += self._file.write(data)
        self.used = time.monotonic()

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def finish(self, digest: bytes) -> bool:
        """Make the blob durable if it has this hash; return whether it has. The upload is over in any case."""
        if self._hash.digest() == digest:
            self._file.flush()
            os.fsync(self._file.fileno())
            self.path.rename(self.path.with_name(digest.hex()))
        self.close()
        return self._hash.digest() == digest


class BlobStore:
    """The store. Calls block: run them in a thread. `bound_bytes` limits what is not in use."""

    def __init__(self, root: Path, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._blobs, self._tags = root / "blobs", root / "tags.json"
        self._sound: set[bytes] = set()
        self._held: Counter[bytes] = Counter()
        self._known: dict[bytes, Manifest] = {}
        self._lock = Lock()
        self._blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        for pattern in ("*.part", "*.push", "*.new"):
            for left in self._blobs.glob(pattern):
                left.unlink()
        self.tags: dict[str, bytes] = {}
        with suppress(FileNotFoundError, *MALFORMED):  # a name can be pushed again
            tags = msgspec.json.decode(self._tags.read_bytes(), type=dict[str, str])
            self.tags = {name: bytes.fromhex(text) for name, text in tags.items()}

    @contextmanager
    def holding(self, digests: Collection[bytes]) -> Iterator[None]:
        """Keep these blobs for the duration of the block."""
        with self._lock:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(digests)

    # --- whole blobs

    def path(self, digest: bytes) -> Path:
        return self._blobs / digest.hex()

    def has(self, digest: bytes) -> bool:
        return self.path(digest).is_file()

    def use(self, digest: bytes) -> Path | None:
        """Return the file of a blob, verified and marked as used; None if it is not here, or was damaged and is removed."""
        path = self.path(digest)
        try:
            if digest not in self._sound:
                with path.open("rb") as file:
                    if _hash_of(file.fileno()) != digest:
                        path.unlink()
                        return None
                self._sound.add(digest)
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def drop(self, digests: Collection[bytes]) -> None:
        """Remove blobs that nothing holds."""
        for digest in digests:
            if not self._held[digest]:
                self.path(digest).unlink(missing_ok=True)

    def upload(self) -> Upload:
        return Upload(self._blobs / f"{os.urandom(16).hex()}.push")

    def keep(self, data: bytes) -> bytes:
        """Store a small blob; return its hash."""
        digest = sha256(data).digest()
        check_room(self._blobs, len(data))
        write_durably(self.path(digest), data)
        return digest

    def manifest(self, digest: bytes) -> Manifest | None:
        """Return a manifest; None if it is not here. ManifestError if the blob is something else."""
        known = self._known.get(digest)
        if known is None or not self.has(digest):
            path = self.use(digest)
            if path is None:
                return None
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise ManifestError("the blob is too large for a manifest")
            known = self._known[digest] = decode_oci(path.read_bytes())
            if len(self._known) > KNOWN:
                self._known.pop(next(iter(self._known)), None)
        return known

    def tag(self, name: str, digest: bytes | None) -> bool:
        """Let a name mean this manifest, or nothing. False if there are too many names."""
        with self._lock:
            tags = {other: known for other, known in self.tags.items() if other != name}
            if digest is not None:
                tags[name] = digest
            if len(tags) > MAX_TAGS:
                return False
            write_durably(self._tags, msgspec.json.encode({one: known.hex() for one, known in tags.items()}))
            self.tags = tags
        return True

    def read(self, digest: bytes, number: int) -> bytes:
        """Return one piece. FileNotFoundError if the blob is not here."""
        with self.path(digest).open("rb") as file:
            return os.pread(file.fileno(), PIECE_BYTES, number * PIECE_BYTES)

    # --- blobs that are fetched

    def begin(self, digest: bytes, size: int) -> None:
        """Prepare the file for a blob's pieces."""
        with self._part(digest).open("wb") as file:
            file.truncate(size)

    def write(self, digest: bytes, number: int, data: bytes) -> None:
        with self._part(digest).open("r+b") as file:
            file.seek(number * PIECE_BYTES)
            file.write(data)

    def finish(self, digest: bytes) -> bool:
        """Complete a blob; return whether it has its hash. If not, remove it."""
        path = self._part(digest)
        with path.open("r+b") as file:
            if _hash_of(file.fileno()) != digest:
                path.unlink()
                return False
            os.fsync(file.fileno())
        path.rename(self.path(digest))
        self._sound.add(digest)
        return True

    def _part(self, digest: bytes) -> Path:
        return self._blobs / f"{digest.hex()}.part"

    # --- space

    def check_room(self, size: int) -> None:
        check_room(self._blobs, size)

    def trim(self) -> None:
        """Remove blobs down to the bound, longest unused first, except recently used ones."""
        now, files = time.time(), []
        for path in self._blobs.iterdir():
            with suppress(OSError, ValueError):
                seen = path.stat()
                files.append((seen.st_mtime, seen.st_size, path, bytes.fromhex(path.name)))
        total = sum(size for _, size, _, _ in files)
        for used, size, path, digest in sorted(files):
            if total <= self.bound_bytes or now - used < IDLE_S:
                return
            if not self._held[digest]:
                path.unlink(missing_ok=True)
                total -= size


def check_room(directory: Path, size: int) -> None:
    """Check that `size` more bytes fit. NoRoom if they would fill the disk."""
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < size + SPARE_BYTES:
        raise NoRoom(
            f"no space for {size / 2**30:.1f} GiB of images: {free / 2**30:.1f} GiB free on {directory}, of which "
            f"{SPARE_BYTES >> 30} GiB stay free"
        )


def _hash_of(descriptor: int) -> bytes:
    whole, at = sha256(), 0
    while data := os.pread(descriptor, 1 << 20, at):
        whole.update(data)
        at += len(data)
    return whole.digest()
