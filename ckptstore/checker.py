"""Reading everything back: what is damaged is found, put away, and what is good in it is kept."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckptstore.errors import CorruptChunk, StoreError
from ckptstore.manifest import decode_manifest
from ckptstore.pack import PackWriter, chunk_id, scan_pack

if TYPE_CHECKING:
    from ckptstore.store import Store


class VerifyReport(msgspec.Struct, frozen=True):
    chunks: int
    bad_chunks: int
    quarantined: tuple[str, ...]
    damaged_manifests: tuple[bytes, ...]


def verify(store: "Store") -> VerifyReport:
    """Read everything; packs with damage are salvaged and moved to `quarantine/`."""
    chunks = bad = 0
    quarantined: list[str] = []
    for path in sorted(store.packs.glob("*.pack")):
        good, wrong, readable = _inspect(path)
        chunks, bad = chunks + good + wrong, bad + wrong
        if wrong or not readable:
            quarantined.append(path.name)
            with store.lock, store.disk_errors():
                salvage(store, path)
    damaged = []
    for path in store.manifest_files.iterdir():
        try:
            identity = bytes.fromhex(path.name)
            _, manifest = decode_manifest(store.sealed(identity), store.unseal)
            if store.index.missing(manifest.chunks):
                damaged.append(identity)
        except (ValueError, StoreError):
            path.rename(store.quarantine / path.name)
            quarantined.append(path.name)
    return VerifyReport(chunks, bad, tuple(quarantined), tuple(damaged))


def _inspect(path: Path) -> tuple[int, int, bool]:
    good = wrong = 0
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                file.seek(offset)
                if chunk_id(file.read(header.stored_length)) == header.id:
                    good += 1
                else:
                    wrong += 1
    except CorruptChunk:
        return good, wrong + 1, False
    return good, wrong, True


def salvage(store: "Store", path: Path) -> None:
    """Copy what is good out of a damaged pack, then put the pack away."""
    writer = PackWriter(store.tmp, store.packs)
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                file.seek(offset)
                data = file.read(header.stored_length)
                if chunk_id(data) == header.id:
                    writer.add(header.id, data)
    except CorruptChunk:
        pass  # everything before the break is already copied
    writer.publish()
    path.rename(store.quarantine / path.name)
    store.index.drop_pack(path.stem)
    store.index.add(writer.name, writer.locations)
