"""Checker: reads and verifies the whole store, salvages damaged packs, and reports damaged manifests."""

from pathlib import Path

import msgspec

from ckptstore.errors import CorruptChunk, NotFound, StoreError
from ckptstore.manifest import decode_manifest
from ckptstore.objects import read_stored
from ckptstore.pack import ObjectHeader, check_stored, open_chunk, scan_pack
from ckptstore.store import Store


class VerifyReport(msgspec.Struct, frozen=True):
    chunks: int
    bad_chunks: int
    quarantined: tuple[str, ...]
    damaged_manifests: tuple[bytes, ...]


def verify(store: Store) -> VerifyReport:
    """Read everything; damaged packs are salvaged and moved to `quarantine/`, as are damaged manifests."""
    chunks = bad = 0
    quarantined: list[str] = []
    for path in sorted(store.packs.glob("*.pack")):
        good, wrong, readable = _inspect(store, path)
        chunks, bad = chunks + good + wrong, bad + wrong
        if wrong or not readable:
            quarantined.append(path.name)
            with store.lock, store.disk_errors():
                store.salvage(path)
    damaged = []
    for path in store.manifest_files.iterdir():
        try:
            identity = bytes.fromhex(path.name)
            _, manifest = decode_manifest(store.sealed_manifest(identity), store.unseal)
            if store.index.missing(manifest.chunks):
                damaged.append(identity)
        except NotFound:
            continue  # removed meanwhile
        except (ValueError, StoreError):
            path.rename(store.quarantine / path.name)
            quarantined.append(path.name)
    return VerifyReport(chunks, bad, tuple(quarantined), tuple(damaged))


def _is_good(store: Store, header: ObjectHeader, stored: bytes) -> bool:
    """Return True if an object decodes to the bytes of its id.

    Of an encrypted one, and of a delta whose base is not here, only the stored bytes can be verified.
    """
    try:
        check_stored(header, stored)
        if header.encrypted:
            return True
        if header.base is None:
            open_chunk(header, stored, None)
        elif store.index.find(header.base) is not None:
            open_chunk(header, stored, store.chunk(header.base))
    except StoreError:
        return False
    return True


def _inspect(store: Store, path: Path) -> tuple[int, int, bool]:
    """Return the numbers of good and bad objects in a pack, and False if the pack could not be read to its end."""
    good = wrong = 0
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                if _is_good(store, header, read_stored(file, header, offset)):
                    good += 1
                else:
                    wrong += 1
    except FileNotFoundError:
        return 0, 0, True  # collected meanwhile
    except CorruptChunk:
        return good, wrong + 1, False
    return good, wrong, True
