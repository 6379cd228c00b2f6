"""Checker: reads and verifies the whole store, salvages damaged packs, and reports damaged manifests."""

import contextlib
from collections.abc import Callable, Container
from pathlib import Path

import msgspec

from ckptstore.errors import CorruptChunk, NotFound, StoreError
from ckptstore.manifest import decode_manifest
from ckptstore.objects import ObjectStore, read_stored
from ckptstore.pack import scan_pack
from ckptstore.store import Store


class VerifyReport(msgspec.Struct, frozen=True):
    chunks: int
    bad_chunks: int
    quarantined: tuple[str, ...]
    damaged_manifests: tuple[bytes, ...]


def verify(store: Store) -> VerifyReport:
    """Read everything; damaged packs are salvaged and moved to `quarantine/`, as are damaged manifests."""
    packs = check_packs(store)
    quarantined, damaged = list(packs.quarantined), []
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
    return VerifyReport(packs.chunks, packs.bad_chunks, tuple(quarantined), tuple(damaged))


def check_packs(
    store: ObjectStore, tell: Callable[[str], None] = lambda words: None, only: Container[str] | None = None
) -> VerifyReport:
    """Read all packs, or `only` these; damaged ones are salvaged and moved to `quarantine/`. `tell` gets the progress."""
    chunks = bad = done = 0
    quarantined: list[str] = []
    sizes: dict[Path, int] = {}
    for path in sorted(path for path in store.packs.glob("*.pack") if only is None or path.stem in only):
        with contextlib.suppress(FileNotFoundError):  # collected meanwhile
            sizes[path] = path.stat().st_size
    total = sum(sizes.values())
    for path, size in sizes.items():
        tell(f"verified {done / 2**30:.1f} of {total / 2**30:.1f} GiB")
        good, wrong, readable = _inspect(store, path)
        chunks, bad, done = chunks + good + wrong, bad + wrong, done + size
        if wrong or not readable:
            quarantined.append(path.name)
            with store.disk_errors():
                store.salvage(path)
    return VerifyReport(chunks, bad, tuple(quarantined), ())


def _inspect(store: ObjectStore, path: Path) -> tuple[int, int, bool]:
    """Return the numbers of good and bad objects in a pack, and False if the pack could not be read to its end."""
    good = wrong = 0
    try:
        with path.open("rb") as file:
            for header, offset in scan_pack(path):
                intact = False
                with contextlib.suppress(CorruptChunk):  # the disk cannot read it
                    intact = store.is_intact(header, read_stored(file.fileno(), header, offset))
                if intact:
                    good += 1
                else:
                    wrong += 1
    except FileNotFoundError:
        return 0, 0, True  # collected meanwhile
    except CorruptChunk:
        return good, wrong + 1, False
    return good, wrong, True
