"""Stores for tests, with a fake seal (a hash), trees of files, and ways to damage packs."""

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.cipher import StateCipher
from ckptstore.encoding import RAW, Bytes
from ckptstore.manifest import Kind, Seal
from ckptstore.pack import chunk_name, encode_header, wrap
from ckptstore.receiver import Receiver
from ckptstore.store import SavedManifest, Store

JOB = b"j" * 16


def fake_seal(payload: bytes) -> bytes:
    """Seal with a hash instead of a signature; enough to detect altered bytes."""
    return hashlib.sha256(payload).digest() + payload


def fake_unseal(sealed: bytes) -> tuple[bytes, bytes]:
    if hashlib.sha256(sealed[32:]).digest() != sealed[:32]:
        raise ValueError("altered")
    return b"signer", sealed[32:]


def open_store(root: Path, quota_bytes: int | None = None) -> Store:
    return Store(root, fake_unseal, quota_bytes=quota_bytes)


CIPHER = StateCipher(b"a key of a job's, of 32 bytes...")


def save(
    store: Store,
    saved: Path | Mapping[str, Path],
    seq: int = 1,
    term: int = 1,
    parent: bytes | None = None,
    job: bytes = JOB,
    cipher: StateCipher | None = None,
    compress: bool = True,
    seal: Seal = fake_seal,
    prefix: str = "ckpt",
    kind: Kind = "checkpoint",
    created_unix: int = 1_800_000_000,
    **more: Any,
) -> SavedManifest:
    """Save a directory, or several under their prefixes, with what `Store.save` takes besides."""
    return store.save(
        {prefix: saved} if isinstance(saved, Path) else saved,
        job=job,
        config=0,
        term=term,
        seq=seq,
        parent=parent,
        kind=kind,
        created_unix=created_unix,
        seal=seal,
        compress=compress,
        cipher=cipher,
        **more,
    )


def stream(ours: Store, theirs: Store, identity: bytes) -> list[memoryview]:
    """Return the objects that one node sends another for a checkpoint."""
    needed, bases = ours.with_bases(ours.manifest(identity).chunks)
    missing = set(theirs.missing(needed, bases))
    return list(ours.stream([chunk for chunk in needed if chunk in missing]))


def feed(receiver: Receiver, data: Bytes) -> int:
    """Give a receiver bytes of a stream; return the number of chunks that they complete."""
    receiver.expect(len(data))
    return receiver.take(receiver.objects.feed(data))


def copy(ours: Store, theirs: Store, saved: SavedManifest) -> int:
    """Copy a checkpoint as two daemons do; return the bytes sent."""
    receiver, sent = theirs.receive(10**9), 0
    for piece in stream(ours, theirs, saved.id):
        feed(receiver, piece)
        sent += len(piece)
    receiver.finish()
    theirs.accept_manifest(saved.sealed)
    return sent


class Mapping:
    """A mapping of a file, without the copy of the descriptor that Python's own keeps open."""

    def __init__(self, descriptor: int, size: int, rights: int, flags: int) -> None:
        self._libc, self._size = ctypes.CDLL(None, use_errno=True), size
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._address = self._libc.mmap(None, size, rights, flags, descriptor, 0)
        assert self._address != ctypes.c_void_p(-1).value

    def fill(self, byte: int) -> None:
        ctypes.memset(self._address, byte, self._size)

    def close(self) -> None:
        self._libc.munmap(self._address, self._size)


def frame(data: bytes) -> bytes:
    """Return a raw chunk as an object of a stream."""
    header, stored = wrap(chunk_name(data), data, len(data), RAW, 0, None)
    return encode_header(header) + stored


def chunk_id(data: bytes) -> bytes:
    return chunk_name(data).id


def damage(file: Path, place: int, bits: int = 1) -> None:
    """Flip these bits of the byte at a place."""
    data = bytearray(file.read_bytes())
    data[place] ^= bits
    file.write_bytes(data)


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
