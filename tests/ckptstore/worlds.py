"""Stores for tests: a fake seal (a hash, named as such), trees of files, and ways to damage packs."""

import hashlib
from pathlib import Path

from ckptstore.store import SavedManifest, Store

JOB = b"j" * 16


def fake_seal(payload: bytes) -> bytes:
    """Stands in for a signature: enough to see that altered bytes are refused."""
    return hashlib.sha256(payload).digest() + payload


def fake_unseal(sealed: bytes) -> tuple[bytes, bytes]:
    if hashlib.sha256(sealed[32:]).digest() != sealed[:32]:
        raise ValueError("altered")
    return b"signer", sealed[32:]


def open_store(root: Path, quota_bytes: int | None = None) -> Store:
    return Store(root, fake_unseal, quota_bytes=quota_bytes)


def save(
    store: Store, path: Path, seq: int = 1, term: int = 1, parent: bytes | None = None, job: bytes = JOB
) -> SavedManifest:
    return store.save(
        {"ckpt": path},
        job=job,
        config=0,
        term=term,
        seq=seq,
        parent=parent,
        kind="checkpoint",
        created_unix=1_800_000_000,
        seal=fake_seal,
    )


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
