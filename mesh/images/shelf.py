"""Images that were fetched and lie on the engine: how long each has not been used, and which make room. An owner's bounds.

images/fetched/HASH   empty; its modification time is when a job was last about to start from it
Only what this node has fetched, and nobody has given another name since, is ever removed: not what its owner put there. The
engine itself refuses to remove what a container uses, running or not.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from mesh.engine.imagestore import StoredImage
from mesh.images.layers import IDLE_S

DAY_S = 86_400.0


class Bounds(msgspec.Struct, frozen=True):
    """What may stay: so many bytes of all, each unused for no longer than this."""

    most_bytes: int
    unused_s: float


class Surplus(msgspec.Struct, frozen=True):
    """An image that is to go, and why."""

    image: StoredImage
    unused_s: float
    why: str


class Shelf:
    """Its files are looked at in a thread."""

    def __init__(self, root: Path) -> None:
        self._marks = root / "fetched"
        self._marks.mkdir(parents=True, exist_ok=True, mode=0o700)

    def used(self, image: bytes) -> None:
        """Now."""
        (self._marks / image.hex()).touch(mode=0o600)

    def unused(self, images: Collection[bytes]) -> dict[bytes, float]:
        """For how many seconds each of these has not been used. Who is not known begins now; of others nothing is kept."""
        now, found = time.time(), dict[bytes, float]()
        for image in images:
            with suppress(FileNotFoundError):
                found[image] = max(0.0, now - (self._marks / image.hex()).stat().st_mtime)
            if image not in found:
                self.used(image)
                found[image] = 0.0
        for mark in self._marks.iterdir():
            if mark.name not in {image.hex() for image in images}:
                mark.unlink(missing_ok=True)
        return found


def surplus(images: Iterable[StoredImage], unused: dict[bytes, float], bounds: Bounds) -> list[Surplus]:
    """What goes, the longest unused first; nothing that was used a moment ago: a job may be about to start from it; nor what has
    come since `unused` was asked. Layers that images share are counted with each of them, as the engine does."""
    known = (image for image in images if image.fetched and image.id in unused)
    fetched = sorted(known, key=lambda image: (-unused[image.id], image.id))
    total, found = sum(image.size for image in fetched), list[Surplus]()
    for image in fetched:
        idle_s = unused[image.id]
        if idle_s < IDLE_S:
            break
        if idle_s >= bounds.unused_s:
            why = "nobody has used it for so long"
        elif total > bounds.most_bytes:
            why = "fetched images take more than they may"
        else:
            break
        found.append(Surplus(image, idle_s, why))
        total -= image.size
    return found
