"""Reading everything back: what is damaged is found, put away, and what is good in it is kept."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from ckptstore.errors import CorruptChunk, NotFound, StoreError
from ckptstore.manifest import decode_manifest
from ckptstore.pack import HEADER_BYTES, ObjectHeader, PackWriter, check_stored, is_foreign, open_chunk, scan_pack

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
        good, wrong, readable = _inspect(store, path)
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
        except NotFound:
            continue  # it has been removed meanwhile
        except (ValueError, StoreError):
            path.rename(store.quarantine / path.name)
            quarantined.append(path.name)
    return VerifyReport(chunks, bad, tuple(quarantined), tuple(damaged))


def _payload(file: BinaryIO, header: ObjectHeader, offset: int) -> bytes:
    file.seek(offset + HEADER_BYTES)
    return file.read(header.stored_length)


def _is_good(store: "Store", header: ObjectHeader, stored: bytes) -> bool:
    """Whether it gives the bytes that its id says; of one that is sealed, or leans on what is not here, only whether it is as it
    was stored."""
    try:
        check_stored(header, stored)
        if header.sealed:
            return True
        if header.base is None:
            open_chunk(header, stored, None)
        elif store.index.find(header.base) is not None:
            open_chunk(header, stored, store.chunk(header.base))
    except StoreError:
        return False
    return True


def _inspect(store: "Store", path: Path) -> tuple[int, int, bool]:
    good = wrong = 0
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                if _is_good(store, header, _payload(file, header, offset)):
                    good += 1
                else:
                    wrong += 1
    except FileNotFoundError:
        return 0, 0, True  # it has been collected meanwhile
    except CorruptChunk:
        return good, wrong + 1, False
    return good, wrong, True


def salvage(store: "Store", path: Path) -> None:
    """Copy what is good out of a damaged pack, then put the pack away."""
    writer = PackWriter(store.tmp, store.packs, is_foreign(path))
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                stored = _payload(file, header, offset)
                with contextlib.suppress(CorruptChunk):
                    check_stored(header, stored)
                    writer.add(header, stored)
    except CorruptChunk:
        pass  # everything before the break is already copied
    writer.publish()
    path.rename(store.quarantine / path.name)
    store.index.drop_pack(path.stem)
    store.index.add(writer.name, writer.locations, writer.foreign)
