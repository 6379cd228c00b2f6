"""Layers of images on this node's disk, by their hash: what it gives to others, and what it has fetched of one so far. Bounded.

images/layers/HASH          a whole layer's tar; its modification time is when it was last used
                  HASH.part  pieces of one, each at its place; which of them are right is found by hashing them
      /dockets/IMAGE        the docket of an image; worth something while its layers are here
Nothing here is believed because it is here: a piece is compared with its hash before it is given to anybody.
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
from mesh.images.docket import PIECE_BYTES, Docket, DocketError, Layer, decode_docket, encode_docket

IDLE_S = 600.0  # unused for so long, a layer makes room for others; others may be in the middle of fetching it; ours
PART_S = 86_400.0  # after which what was fetched of a layer is given up; ours
SPARE_BYTES = 1 << 30  # that are left on the disk in any case; ours

log = logging.getLogger(__name__)


class NoRoom(OSError):
    """The disk is too full; the text says by how much."""


class DamagedLayer(ValueError):
    """What is on this disk is not what its name says; it has been thrown away."""


class LayerStore:
    """All of it blocks: call it in a thread. `bound_bytes` is what may stay of layers that nobody uses."""

    def __init__(self, root: Path, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self._layers, self._dockets = root / "layers", root / "dockets"
        self._held: Counter[bytes] = Counter()
        self._lock = Lock()
        for directory in (self._layers, self._dockets):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._layers.glob("new-*"):
            left.unlink()

    @contextmanager
    def holding(self, digests: Collection[bytes]) -> Iterator[None]:
        """These layers stay, whether they are complete or not."""
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

    def docket(self, image: bytes) -> Docket | None:
        """What an image is made of, if all of its layers are here."""
        path = self._dockets / image.hex()
        try:
            docket = decode_docket(path.read_bytes(), image)
        except FileNotFoundError:
            return None
        except (DocketError, OSError) as error:
            log.warning("%s: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        return docket if all(self.has(layer) for layer in docket.layers) else None

    def keep(self, image: bytes, docket: Docket) -> None:
        write_durably(self._dockets / image.hex(), encode_docket(docket))

    def take(self, content: IO[bytes], wanted: Collection[bytes]) -> tuple[bytes, Layer | None]:
        """Read all of a file: its hash, and the layer that it is, kept, if that is among those `wanted`."""
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
        """One piece; DamagedLayer if it is not what it should be, FileNotFoundError if the layer has had to make room."""
        path = self._whole(layer.digest)
        with path.open("rb") as file:
            data = os.pread(file.fileno(), layer.length(number), number * PIECE_BYTES)
        if blake3(data).digest() != layer.hashes[number]:
            path.unlink(missing_ok=True)
            raise DamagedLayer(f"layer {layer.digest.hex()[:12]} was damaged on this disk; it is thrown away")
        return data

    def blocks(self, layer: Layer) -> Iterator[bytes]:
        with self._whole(layer.digest).open("rb") as file:
            while data := file.read(1 << 20):
                yield data

    def sound(self, layer: Layer) -> bool:
        """Whether it is what it is called; it is thrown away if not."""
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
        """The pieces of it that are here already and right; its file is ready for the others."""
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
        """Whether its pieces together are the layer that it is called; if not, they are thrown away."""
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

    # --- room

    def check_room(self, size: int) -> None:
        """NoRoom if so much more would fill the disk."""
        free = os.statvfs(self._layers).f_bavail * os.statvfs(self._layers).f_frsize
        if free < size + SPARE_BYTES:
            raise NoRoom(
                f"no room for {size / 2**30:.1f} GiB of image layers: {max(0, free) / 2**30:.1f} GiB are free on "
                f"{self._layers}, of which {SPARE_BYTES >> 30} are kept"
            )

    def stored_bytes(self) -> int:
        size = 0
        for path in self._layers.iterdir():
            with suppress(FileNotFoundError):  # it has just been completed, or has gone
                size += path.stat().st_blocks * 512
        return size

    def trim(self) -> None:
        """Down to the bound, the longest unused first; but nothing that was used a moment ago."""
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
    """So many bytes, or fewer at the end."""
    parts = []
    while count and (data := content.read(count)):
        parts.append(data)
        count -= len(data)
    return b"".join(parts)
