"""Stores for tests: a fake seal (a hash, named as such), trees of files, and ways to damage packs."""

import hashlib
from pathlib import Path

from ckptstore.coding import RAW
from ckptstore.manifest import Seal
from ckptstore.pack import chunk_name, encode_header, wrap
from ckptstore.store import SavedManifest, Store
from ckptstore.vault import Vault

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


VAULT = Vault(b"a key of a job's, of 32 bytes...")


def save(
    store: Store,
    path: Path,
    seq: int = 1,
    term: int = 1,
    parent: bytes | None = None,
    job: bytes = JOB,
    vault: Vault | None = None,
    encoding: bool = True,
    seal: Seal = fake_seal,
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
        seal=seal,
        encoding=encoding,
        vault=vault,
    )


def stream(ours: Store, theirs: Store, identity: bytes) -> list[memoryview]:
    """The objects that one node sends another for a checkpoint."""
    needed, bases = ours.needed(ours.manifest(identity).chunks)
    missing = set(theirs.missing(needed, bases))
    return list(ours.frames([chunk for chunk in needed if chunk in missing]))


def copy(ours: Store, theirs: Store, saved: SavedManifest) -> int:
    """As two daemons do it; how many bytes went over."""
    receiver, sent = theirs.receive(10**9), 0
    for piece in stream(ours, theirs, saved.id):
        receiver.feed(piece)
        sent += len(piece)
    receiver.finish()
    theirs.accept_manifest(saved.sealed)
    return sent


def frame(data: bytes) -> bytes:
    """A chunk as peers send it, as it is."""
    header, stored = wrap(chunk_name(data), data, len(data), RAW, 0, None)
    return encode_header(header) + stored


def chunk_id(data: bytes) -> bytes:
    return chunk_name(data).id


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
