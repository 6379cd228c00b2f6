"""Garbage collector: removes old packs without reachable chunks, and rewrites those with few.

No lock spans the mesh, and none is held here while others save and receive (kopia's approach). A writer that relies on an
existing chunk touches its pack, a recently touched pack is kept, and a manifest is published only if all its chunks are present.
"""

from collections.abc import Container
from pathlib import Path

import msgspec

from ckptstore.errors import CorruptChunk, MissingChunks
from ckptstore.objects import ObjectStore
from ckptstore.pack import HEADER_BYTES, Location, PackWriter, check_stored, is_foreign, sync_directory

REPACK_BELOW = 0.5  # share of a pack's bytes still reachable (own choice)


class CollectReport(msgspec.Struct, frozen=True):
    packs: int
    bytes: int


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
    packs = removed = 0
    sync_directory(manifests)  # else a crash could bring back a manifest whose packs are removed
    for path in [path for path in store.packs.glob("*.pack") if only is None or path.stem in only]:
        try:
            before = path.stat()
        except FileNotFoundError:
            continue
        chunks = store.index.chunks_of(path.stem)
        live = {identity: where for identity, where in chunks.items() if identity in reachable}
        live_bytes = sum(where.length for where in live.values())
        if now_unix - before.st_mtime < min_age_s or live_bytes > before.st_size * REPACK_BELOW:
            continue
        try:
            replaced = _replace(store, path.stem, live, before.st_mtime_ns)
        except (CorruptChunk, MissingChunks):
            continue  # `verify` handles damaged packs
        if replaced:
            packs, removed = packs + 1, removed + before.st_size - live_bytes
    return CollectReport(packs, removed)


def _replace(store: ObjectStore, pack: str, live: dict[bytes, Location], touched_ns: int) -> bool:
    """Copy the live objects to a new pack and remove the old one; False if the old one was touched meanwhile."""
    path = store.packs / f"{pack}.pack"
    writer = PackWriter(store.tmp, store.packs, is_foreign(path))
    try:
        for identity in live:
            header, data = store.object(identity)
            check_stored(header, data[HEADER_BYTES:])
            writer.add(header, data[HEADER_BYTES:])
        with store.lock:
            if path.stat().st_mtime_ns != touched_ns:
                writer.abort()
                return False
            writer.publish()
            if live:
                store.index.move(writer.name, writer.locations, writer.foreign)
            store.index.drop_pack(pack)
            path.unlink()
    except BaseException:
        writer.abort()
        raise
    return True
