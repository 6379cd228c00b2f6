"""Blobs by SHA-256, on this node's disk: of images, pushed by a client of the registry or fetched, and packages of environments.

blobs/HASH     a whole blob that had this hash; its modification time is its last use
     /*.part   a blob that arrives; it counts for nothing and does not outlive the daemon
tags.json      the names that were pushed
A use of a blob compares it with its hash, unless that was done in this run and the file has not changed since. So damage of this
disk is not passed on.
"""

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
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


class FetchFailed(RuntimeError):
    """The blob cannot be had; the text says why."""


class Part:
    """A blob that arrives, in any order. Calls block. What has come without a gap is hashed already."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{os.urandom(16).hex()}.part"
        self.file = self.path.open("x+b", buffering=0)
        self._lock, self._hash, self._hashed = Lock(), sha256(), 0
        self._later: dict[int, int] = {}  # lengths by their places, of what came and is not hashed

    def write(self, data: bytes, at: int) -> None:
        with self._lock:
            if at < self._hashed:  # it was written before
                self._hash, self._hashed = sha256(), 0
            disk = os.statvfs(self.path.parent)
            free = disk.f_bavail * disk.f_frsize
            if free < len(data) + SPARE_BYTES or os.pwrite(self.file.fileno(), data, at) < len(data):
                raise NoRoom(f"no space for a blob: {free >> 20} MiB free on {self.path.parent}; 1 GiB stays free")
            self._later[at] = len(data)
            while size := self._later.pop(self._hashed, 0):
                self._hash.update(data if at == self._hashed else os.pread(self.file.fileno(), size, self._hashed))
                self._hashed += size

    def digest(self) -> bytes:
        with self._lock:
            while data := os.pread(self.file.fileno(), 1 << 20, self._hashed):
                self._hash.update(data)
                self._hashed += len(data)
            return self._hash.digest()

    def read(self, at: int) -> bytes:
        return os.pread(self.file.fileno(), PIECE_BYTES, at)

    def close(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


class BlobStore:
    """The store. Calls block: run them in a thread. `bound_bytes` limits what was not used for `idle_s`."""

    def __init__(self, root: Path, bound_bytes: int, idle_s: float = IDLE_S) -> None:
        self.bound_bytes, self._idle_s = bound_bytes, idle_s
        self._blobs, self._tags, self._lock = root / "blobs", root / "tags.json", Lock()
        self._sound: dict[bytes, int] = {}  # when the file of a verified blob changed last
        self._known: dict[bytes, Manifest] = {}
        self._blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._blobs.glob("*.part"):
            left.unlink()
        self.tags: dict[str, bytes] = {}
        with suppress(FileNotFoundError, *MALFORMED):  # a name can be pushed again
            tags = msgspec.json.decode(self._tags.read_bytes(), type=dict[str, str])
            self.tags = {name: bytes.fromhex(text) for name, text in tags.items()}

    def path(self, digest: bytes) -> Path:
        return self._blobs / digest.hex()

    def has(self, digest: bytes) -> bool:
        return self.path(digest).is_file()

    def size(self, digest: bytes) -> int | None:
        """Return the length of a blob; None if it is not here."""
        with suppress(OSError):
            return self.path(digest).stat().st_size
        return None

    def use(self, digest: bytes) -> Path | None:
        """Return the file of a blob, verified and marked as used; None if it is not here, or was damaged and is removed."""
        path = self.path(digest)
        try:
            if self._sound.get(digest) != path.stat().st_ctime_ns:
                with path.open("rb") as file:
                    if file_digest(file, "sha256").digest() != digest:
                        path.unlink()
                        return None
            os.utime(path)
            self._sound[digest] = path.stat().st_ctime_ns
        except FileNotFoundError:
            return None
        return path

    def pieces(self, digest: bytes, numbers: Collection[int]) -> Iterator[bytes]:
        """Read pieces of a blob; end early if it is gone."""
        with suppress(FileNotFoundError), self.path(digest).open("rb") as file:
            for number in numbers:
                yield os.pread(file.fileno(), PIECE_BYTES, number * PIECE_BYTES)

    def part(self) -> Part:
        return Part(self._blobs)

    def finish(self, part: Part, digest: bytes, durable: bool = False) -> bool:
        """Make the part a blob if it has this hash; return whether it has. What others have need not be durable: use verifies."""
        if part.digest() != digest:
            return False
        if durable:
            os.fsync(part.file.fileno())
        path = part.path.rename(self.path(digest))
        self._sound[digest] = path.stat().st_ctime_ns
        return True

    def keep(self, data: bytes) -> bytes:
        """Store a small blob; return its hash."""
        digest, part = sha256(data).digest(), self.part()
        try:
            part.write(data, 0)
            self.finish(part, digest, durable=True)
        finally:
            part.close()
        return digest

    # --- what manifests say

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

    def peek(self, digest: bytes) -> Manifest:
        """Return a manifest; an empty one if it is not here, or not a manifest."""
        with suppress(ManifestError, OSError):
            return (self.manifest(digest) if digest else None) or Manifest("")
        return Manifest("")

    def reach(self, digest: bytes) -> set[bytes]:
        """Return a manifest's digest, and those that it names, as far as its manifests are here."""
        manifest = self.peek(digest)
        known = (manifest, *(self.peek(one.hash) for one in manifest.manifests))
        return {digest, *(one.hash for each in known for one in (*each.blobs, *each.manifests))}

    def variant(self, digest: bytes) -> Manifest:
        """Return the manifest for this machine; an empty one if it is not here."""
        manifest = self.peek(digest)
        return self.peek(manifest.for_here.hash) if manifest.for_here is not None else manifest

    def described(self, digest: bytes) -> tuple[int, bool] | None:
        """Return the length of a blob, and whether it is a manifest, as a manifest in memory has it; None if none does."""
        for manifest in list(self._known.values()):
            for one in (*manifest.blobs, *manifest.manifests):
                if one.hash == digest:
                    return one.size, one in manifest.manifests
        return None

    def tag(self, name: str, digest: bytes | None) -> bool:
        """Let a name mean this manifest, or nothing. False if there are too many names."""
        with self._lock:
            tags = {other: known for other, known in self.tags.items() if other != name}
            tags |= {name: digest} if digest is not None else {}
            if len(tags) > MAX_TAGS:
                return False
            write_durably(self._tags, msgspec.json.encode({one: known.hex() for one, known in tags.items()}))
            self.tags = tags
        return True

    # --- space

    def drop(self, digests: Collection[bytes]) -> None:
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove blobs down to the bound, longest unused first, except recently used ones."""
        now, files = time.time(), []
        for path in self._blobs.iterdir():
            with suppress(OSError):
                seen = path.stat()
                files.append((seen.st_mtime, seen.st_size, path))
        total = sum(size for _, size, _ in files)
        for used, size, path in sorted(files):
            if total <= self.bound_bytes or now - used < self._idle_s:
                return
            path.unlink(missing_ok=True)
            total -= size
