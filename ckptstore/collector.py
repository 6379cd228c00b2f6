"""Making room: packs that nothing reaches go once they are old enough, and those of which little is reached are written anew.

There is no lock to take over a mesh, and none is held here while others save and receive (kopia's way): whoever relies on a chunk
that is here touches its pack, a pack that was touched lately stays, and no manifest is published unless all its chunks are here.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckptstore.errors import CorruptChunk, MissingChunks
from ckptstore.failpoints import failpoint
from ckptstore.pack import HEADER_BYTES, Location, PackWriter, check_stored, is_foreign, sync_directory

if TYPE_CHECKING:
    from ckptstore.store import Store

REPACK_BELOW = 0.5  # of a pack's bytes still reached; ours


class Collected(msgspec.Struct, frozen=True):
    packs: int
    bytes: int


def collect(store: "Store", *, min_age_s: float, now_unix: float, keep: Collection[bytes] = ()) -> Collected:
    """Remove what neither a manifest nor `keep` reaches, from packs that nobody has touched for `min_age_s`."""
    reachable = set(keep)
    for info in store.manifests():
        reachable.update(store.manifest(info.id).chunks)
    reachable = set(store.index.with_bases(reachable)[0])
    packs = removed = 0
    for path in list(store.packs.glob("*.pack")):
        try:
            before = path.stat()
        except FileNotFoundError:
            continue
        chunks = store.index.chunks_of(path.stem)
        live = {identity: where for identity, where in chunks.items() if identity in reachable}
        living = sum(where.length for where in live.values())
        if now_unix - before.st_mtime < min_age_s or living > before.st_size * REPACK_BELOW:
            continue
        sync_directory(store.manifest_files)  # or a crash could bring a manifest back whose packs are gone
        try:
            replaced = _replace(store, path, live, before.st_mtime_ns)
        except (CorruptChunk, MissingChunks):
            continue  # `verify` sorts out what is damaged
        if replaced:
            packs, removed = packs + 1, removed + before.st_size - living
    return Collected(packs, removed)


def _replace(store: "Store", path: Path, live: dict[bytes, Location], touched_ns: int) -> bool:
    """Write what lives to a new pack and remove the old one; False if somebody has come to rely on it meanwhile."""
    writer = PackWriter(store.tmp, store.packs, is_foreign(path))
    try:
        for identity in live:
            header, whole = store.object(identity)
            check_stored(header, whole[HEADER_BYTES:])
            writer.add(header, whole[HEADER_BYTES:])
        with store.lock:
            if path.stat().st_mtime_ns != touched_ns:
                writer.abort()
                return False
            writer.publish()
            if live:
                store.index.move(writer.name, writer.locations, writer.foreign)
            failpoint("collect-before-unlink")
            store.index.drop_pack(path.stem)
            path.unlink()
            failpoint("collect-after-unlink")
    except BaseException:
        writer.abort()
        raise
    return True
