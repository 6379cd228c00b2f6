"""Manifests: what a tree of files was, signed by the node that saved it.

Sealing is injected, so that this room needs no keys: `Seal` signs a payload, `Unseal` checks a signature and gives the signer.
"""

import stat
from collections.abc import Callable
from typing import Literal

import msgspec
from blake3 import blake3

from ckptstore.errors import BadManifest, BadPath
from ckptstore.pack import CHUNK_BYTES

Seal = Callable[[bytes], bytes]
Unseal = Callable[[bytes], tuple[bytes, bytes]]

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024  # about 6 TB of chunks
MAX_FILES = 1_000_000
MAX_PATH_BYTES, MAX_PART_BYTES = 4096, 255  # PATH_MAX and NAME_MAX of Linux

Kind = Literal["checkpoint", "workdir", "result"]


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    path: str
    mode: int
    size: int
    chunks: tuple[bytes, ...] = ()
    target: str | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    job: bytes
    config: int
    term: int
    seq: int
    parent: bytes | None
    kind: Kind
    created_unix: int
    files: tuple[FileEntry, ...]
    note: dict[str, str] = {}

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def chunks(self) -> list[bytes]:
        """Every chunk once, in order of first use."""
        return list(dict.fromkeys(identity for entry in self.files for identity in entry.chunks))


_decoder = msgspec.msgpack.Decoder(Manifest)


def manifest_id(sealed: bytes) -> bytes:
    return blake3(sealed).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    check_manifest(manifest)
    return msgspec.msgpack.encode(manifest)


def decode_manifest(sealed: bytes, unseal: Unseal) -> tuple[bytes, Manifest]:
    """The signer and the manifest; BadManifest if it is not signed, not well formed or not possible."""
    if len(sealed) > MAX_MANIFEST_BYTES:
        raise BadManifest(f"a manifest of {len(sealed)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    try:
        signer, payload = unseal(sealed)
        manifest = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise BadManifest(f"not a valid manifest: {error}") from error
    check_manifest(manifest)
    return signer, manifest


def check_manifest(manifest: Manifest) -> None:
    if manifest.version != FORMAT_VERSION:
        raise BadManifest(f"manifest version {manifest.version} is not one this node knows; upgrade campus-mesh")
    if len(manifest.job) != 16 or min(manifest.config, manifest.term, manifest.seq) < 0:
        raise BadManifest("a manifest's job, config, term or seq is impossible")
    if manifest.parent is not None and len(manifest.parent) != 32:
        raise BadManifest("a manifest's parent is not an id")
    if len(manifest.files) > MAX_FILES:
        raise BadManifest(f"a manifest may name {MAX_FILES} files")
    seen: set[str] = set()
    links: set[str] = set()
    for entry in manifest.files:
        check_path(entry.path)
        if entry.path in seen:
            raise BadPath(f"{entry.path!r} stands twice in the manifest")
        seen.add(entry.path)
        _check_entry(entry)
        if stat.S_ISLNK(entry.mode):
            links.add(entry.path)
    for path in seen:
        parts = path.split("/")
        if any("/".join(parts[:depth]) in links for depth in range(1, len(parts))):
            raise BadPath(f"{path!r} lies behind a symbolic link")


def check_path(path: str) -> None:
    """BadPath unless this is a plain relative path that stays inside its tree."""
    parts = path.split("/")
    encoded = path.encode(errors="surrogateescape")
    if "\0" in path or not path or len(encoded) > MAX_PATH_BYTES:
        raise BadPath(f"{path[:80]!r} cannot be a path")
    if any(part in {"", ".", ".."} for part in parts):
        raise BadPath(f"{path[:80]!r} is not a plain relative path")
    if any(len(part.encode(errors="surrogateescape")) > MAX_PART_BYTES for part in parts):
        raise BadPath(f"{path[:80]!r} has a part that is too long")


def check_link(path: str, target: str) -> None:
    """BadPath unless the link's target is relative and inside the tree."""
    depth = len(path.split("/")) - 1
    if not target or target.startswith("/") or "\0" in target or len(target) > MAX_PATH_BYTES:
        raise BadPath(f"the link {path!r} points to {target!r}: only relative links inside the tree can be kept")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in {"", "."} else 1
        if depth < 1:  # depth 0 would be beside the prefix (ckpt, work, out)
            raise BadPath(f"the link {path!r} points outside its tree, to {target!r}")


def _check_entry(entry: FileEntry) -> None:
    if stat.S_ISREG(entry.mode):
        expected = -(-entry.size // CHUNK_BYTES)
        if entry.size < 0 or len(entry.chunks) != expected or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: size and chunks do not fit")
        if any(len(identity) != 32 for identity in entry.chunks):
            raise BadManifest(f"{entry.path!r}: a chunk's id is not an id")
    elif stat.S_ISDIR(entry.mode):
        if entry.size or entry.chunks or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: a directory has no bytes")
    elif stat.S_ISLNK(entry.mode):
        if entry.size or entry.chunks or entry.target is None:
            raise BadManifest(f"{entry.path!r}: a link has a target and no bytes")
        check_link(entry.path, entry.target)
    else:
        raise BadManifest(f"{entry.path!r} is neither a file, a directory nor a link")
