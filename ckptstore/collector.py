"""Garbage collector: removes old packs without reachable chunks, and rewrites those with few.

No lock spans the mesh, and none is held here while others save and receive (kopia's approach). A writer that relies on an
existing chunk touches its pack, a recently touched pack is kept, and a manifest is published only if all its chunks are present.
"""

import contextlib
import os
from collections.abc import Container
from pathlib import Path

import msgspec

from ckptstore.errors import CorruptChunk, MissingChunks
from ckptstore.objects import ObjectStore
from ckptstore.pack import HEADER_BYTES, Location, PackWriter, check_stored, is_foreign, sync_directory

# A pack whose time is later than now by more than this has it from a wrong clock, not from a touch meanwhile (own choice).
AHEAD_S = 86_400.0
REPACK_BELOW = 0.5  # share of a pack's bytes still reachable (own choice)


class CollectReport(msgspec.Struct, frozen=True):
    """`waiting_bytes`: of packs that nothing reaches and that are too young to be removed."""

    packs: int
    bytes: int
    waiting_bytes: int = 0


def collect(
    store: ObjectStore,
    manifests: Path,
    reachable: Container[bytes],
    *,
    min_age_s: float,
    now_unix: float,
    only: Container[str] | None = None,
) -> CollectReport:
    """Remove chunks outside `reachable` from packs that were not touched for `min_age_s`; `only` from these if they are given.

    `manifests` is the directory of the manifests that reach the chunks.
    """
    packs = removed = waiting = 0
    sync_directory(manifests)  # else a crash could bring back a manifest whose packs are removed
    sparse = list[tuple[Path, os.stat_result, dict[bytes, Location], int]]()
    for path in [path for path in store.packs.glob("*.pack") if only is None or path.stem in only]:
        with contextlib.suppress(FileNotFoundError):  # another collection, or `verify`, was faster: here and below
            before = path.stat()
            chunks = store.index.chunks_of(path.stem)
            live = {identity: where for identity, where in chunks.items() if identity in reachable}
            live_bytes = sum(where.length for where in live.values())
            young = -AHEAD_S < now_unix - before.st_mtime < min_age_s
            waiting += before.st_size if young and not live else 0
            if young or live_bytes > before.st_size * REPACK_BELOW or not store.index.knows(path.stem):
                continue
            if live:
                sparse.append((path, before, live, live_bytes))
            elif _remove(store, path, before):
                packs, removed = packs + 1, removed + before.st_size
    for path, before, live, live_bytes in sparse:  # last, since a rewritten pack needs room first
        with contextlib.suppress(FileNotFoundError, CorruptChunk, MissingChunks):  # `verify` handles damaged packs
            if _rewrite(store, path, live, before):
                packs, removed = packs + 1, removed + before.st_size - live_bytes
    return CollectReport(packs, removed, waiting)


def _rewrite(store: ObjectStore, path: Path, live: dict[bytes, Location], before: os.stat_result) -> bool:
    """Copy the live objects to a new pack and remove the old one; False if the old one was touched meanwhile."""
    writer = PackWriter(store.tmp, store.packs, is_foreign(path))
    try:
        for identity in live:
            header, data = store.object(identity)
            check_stored(header, data[HEADER_BYTES:])
            writer.add(header, data[HEADER_BYTES:])
        writer.sync()
        return _remove(store, path, before, writer)
    finally:
        writer.abort()


def _remove(store: ObjectStore, path: Path, before: os.stat_result, successor: PackWriter | None = None) -> bool:
    """Remove a pack, once its successor is durable; False if it was touched meanwhile."""
    with store.lock:
        if path.stat().st_mtime_ns != before.st_mtime_ns:
            return False
        if successor is not None:
            successor.publish()
            store.index.move(path.stem, successor.name, successor.locations, successor.foreign)
        store.index.drop_pack(path.stem)
        path.unlink()
    return True
