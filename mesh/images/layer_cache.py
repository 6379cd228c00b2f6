"""A bounded cache of image layers on disk, by hash: layers to give to other nodes, and layers being fetched.

images/layers/HASH          a whole layer's tar; its modification time is its last use
                  HASH.part  pieces of a layer, each at its place; hashing finds which are valid
      /manifests/IMAGE      the manifest of an image; useful while its layers are here
Data on disk is not trusted: every piece is compared with its hash before it is sent.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import IO

from blake3 import blake3

from membership.durable import write_durably
from mesh.images.image_manifest import (
    PIECE_BYTES,
    ImageManifest,
    ImageManifestError,
    Layer,
    decode_image_manifest,
    encode_image_manifest,
)

IDLE_S = (
    600.0  # a layer unused for this long may be removed; another node may still be fetching a newer one (own choice)
)
PART_S = 86_400.0  # after which a partial layer is removed (own choice)
SPARE_BYTES = 1 << 30  # always left free on the disk (own choice)

log = logging.getLogger(__name__)


class NoRoom(OSError):
    """The disk is too full; the text says how much is free."""


class DamagedLayer(ValueError):
    """A layer on this disk does not match its hash; it was removed."""


class LayerStore:
    """The cache. Calls block: run them in a thread. `bound_bytes` limits layers that are not in use."""

    def __init__(self, root: Path, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._layers, self._image_manifests = root / "layers", root / "manifests"
        self._held: Counter[bytes] = Counter()
        self._lock = Lock()
        for directory in (self._layers, self._image_manifests):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._layers.glob("new-*"):
            left.unlink()

    @contextmanager
    def holding(self, digests: Collection[bytes]) -> Iterator[None]:
        """Keep these layers, complete or not, for the duration of the block."""
        held = set(digests)
        with self._lock:
            self._held.update(held)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(held)

    # --- whole layers

    def has(self, layer: Layer) -> bool:
        with suppress(OSError):
            return self._whole(layer.digest).stat().st_size == layer.size
        return False

    def image_manifest(self, image: bytes) -> ImageManifest | None:
        """Return an image's manifest if all of its layers are here."""
        path = self._image_manifests / image.hex()
        try:
            image_manifest = decode_image_manifest(path.read_bytes(), image)
        except FileNotFoundError:
            return None
        except (ImageManifestError, OSError) as error:
            log.warning("%s: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        return image_manifest if all(self.has(layer) for layer in image_manifest.layers) else None

    def keep(self, image: bytes, image_manifest: ImageManifest) -> None:
        write_durably(self._image_manifests / image.hex(), encode_image_manifest(image_manifest))

    def take(self, content: IO[bytes], wanted: Collection[bytes]) -> tuple[bytes, Layer | None]:
        """Read a whole file; return its hash, and the stored layer if the hash is in `wanted`."""
        whole, pieces, size = sha256(), bytearray(), 0
        temporary = self._layers / f"new-{os.urandom(8).hex()}"
        try:
            with temporary.open("xb") as file:
                while data := _read_fully(content, PIECE_BYTES):
                    self.check_room(len(data))
                    whole.update(data)
                    pieces += blake3(data).digest()
                    size += file.write(data)
                if whole.digest() not in wanted:
                    return whole.digest(), None
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._whole(whole.digest()))
            return whole.digest(), Layer(whole.digest(), size, bytes(pieces))
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, layer: Layer, number: int) -> bytes:
        """Return one piece. DamagedLayer if its hash is wrong, FileNotFoundError if the layer was removed."""
        path = self._whole(layer.digest)
        with path.open("rb") as file:
            data = os.pread(file.fileno(), layer.length(number), number * PIECE_BYTES)
        if blake3(data).digest() != layer.hashes[number]:
            path.unlink(missing_ok=True)
            raise DamagedLayer(f"layer {layer.digest.hex()[:12]} was damaged on this disk and is removed")
        return data

    def blocks(self, layer: Layer) -> Iterator[bytes]:
        with self._whole(layer.digest).open("rb") as file:
            while data := file.read(1 << 20):
                yield data

    def sound(self, layer: Layer) -> bool:
        """Return whether a layer matches its hash; remove it if not."""
        whole = sha256()
        for block in self.blocks(layer):
            whole.update(block)
        if whole.digest() != layer.digest:
            self._whole(layer.digest).unlink(missing_ok=True)
        return whole.digest() == layer.digest

    def used(self, digests: Collection[bytes]) -> None:
        for digest in digests:
            with suppress(OSError):
                os.utime(self._whole(digest))

    # --- layers that are fetched

    def begun(self, layer: Layer) -> set[bytes]:
        """Return the valid pieces that are here already; prepare the file for the others."""
        path, found = self._part(layer.digest), set()
        if path.exists() and path.stat().st_size == layer.size:
            with path.open("rb") as file:
                for piece, data in zip(layer.hashes, iter(lambda: file.read(PIECE_BYTES), b""), strict=False):
                    if blake3(data).digest() == piece:
                        found.add(piece)
        else:
            with path.open("wb") as file:
                file.truncate(layer.size)
        return found

    def write(self, digest: bytes, offset: int, data: bytes) -> None:
        descriptor = os.open(self._part(digest), os.O_WRONLY)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)
        finally:
            os.close(descriptor)

    def finish(self, layer: Layer) -> bool:
        """Complete a layer; return whether it matches its hash. If not, remove it."""
        path, whole = self._part(layer.digest), sha256()
        with path.open("r+b") as file:
            while data := file.read(1 << 20):
                whole.update(data)
            os.fsync(file.fileno())
        if whole.digest() != layer.digest:
            path.unlink()
            return False
        path.rename(self._whole(layer.digest))
        return True

    # --- space

    def check_room(self, size: int) -> None:
        """Check that `size` more bytes fit. NoRoom if they would fill the disk."""
        free = os.statvfs(self._layers).f_bavail * os.statvfs(self._layers).f_frsize
        if free < size + SPARE_BYTES:
            raise NoRoom(
                f"no space for {size / 2**30:.1f} GiB of image layers: {max(0, free) / 2**30:.1f} GiB free on "
                f"{self._layers}, of which {SPARE_BYTES >> 30} GiB stay free"
            )

    def stored_bytes(self) -> int:
        size = 0
        for path in self._layers.iterdir():
            with suppress(FileNotFoundError):  # it was completed or removed in between
                size += path.stat().st_blocks * 512
        return size

    def trim(self) -> None:
        """Remove layers down to the bound, longest unused first, except recently used ones."""
        now, files = time.time(), []
        for path in self._layers.iterdir():
            with suppress(OSError, ValueError):
                seen, digest = path.stat(), bytes.fromhex(path.name.removesuffix(".part"))
                if path.suffix == ".part" and now - seen.st_mtime > PART_S and not self._held[digest]:
                    path.unlink()
                    continue
                files.append((seen.st_mtime, seen.st_blocks * 512, path, digest))
        total = sum(size for _, size, _, _ in files)
        for used, size, path, digest in sorted(files):
            if total <= self.bound_bytes or now - used < IDLE_S:
                return
            if not self._held[digest] and path.suffix != ".part":
                path.unlink(missing_ok=True)
                total -= size

    def _whole(self, digest: bytes) -> Path:
        return self._layers / digest.hex()

    def _part(self, digest: bytes) -> Path:
        return self._layers / f"{digest.hex()}.part"


def _read_fully(content: IO[bytes], count: int) -> bytes:
    """Read `count` bytes, or fewer at the end."""
    parts = []
    while count and (data := content.read(count)):
        parts.append(data)
        count -= len(data)
    return b"".join(parts)
