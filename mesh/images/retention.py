"""Retention of fetched images on the engine, within the owner's bounds.

images/fetched/HASH   empty; its modification time is the last start of a job from this image
Only images that this node fetched and nobody has renamed since are ever removed, never the owner's own. The engine refuses to
remove an image that a container uses, running or not.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from mesh.images.blobs import IDLE_S
from mesh.images.engine import StoredImage

DAY_S = 86_400.0


class Bounds(msgspec.Struct, frozen=True):
    """Limits of fetched images: total bytes, and seconds without use."""

    most_bytes: int
    unused_s: float


class Surplus(msgspec.Struct, frozen=True):
    """An image to remove, with the reason."""

    image: StoredImage
    unused_s: float
    why: str


class UsageMarks:
    """Records when each fetched image was last used. Calls block."""

    def __init__(self, root: Path) -> None:
        self._marks = root / "fetched"
        self._marks.mkdir(parents=True, exist_ok=True, mode=0o700)

    def used(self, image: bytes) -> None:
        """Record a use of an image now."""
        (self._marks / image.hex()).touch(mode=0o600)

    def unused(self, images: Collection[bytes]) -> dict[bytes, float]:
        """Return for how many seconds each of these images has not been used; unknown ones start at 0. Drop other records."""
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
    """Return the images to remove, longest unused first.

    Recently used images stay, since a job may be starting from one, and so do images that arrived after `unused` was computed.
    Shared layers count for each image, as the engine counts them.
    """
    known = (image for image in images if image.fetched and image.id in unused)
    fetched = sorted(known, key=lambda image: (-unused[image.id], image.id))
    total, found = sum(image.size for image in fetched), list[Surplus]()
    for image in fetched:
        idle_s = unused[image.id]
        if idle_s < IDLE_S:
            break
        if idle_s >= bounds.unused_s:
            why = "unused for too long"
        elif total > bounds.most_bytes:
            why = "fetched images exceed their limit"
        else:
            break
        found.append(Surplus(image, idle_s, why))
        total -= image.size
    return found
