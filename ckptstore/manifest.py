"""Manifests: what a tree of files was, signed by the node that saved it.

Signing is injected, so that this room needs no node's key: `Seal` signs a payload, `Unseal` checks a signature and gives the
signer. What the tree was is readable to those who hold the key of its realm only (`vault`); which chunks it needs, to everybody.
"""

import stat
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import msgspec
from blake3 import blake3

from ckptstore.errors import BadManifest, BadPath, Locked
from ckptstore.layout import CHUNK_BYTES, LABEL_BYTES
from ckptstore.pack import ID_BYTES
from ckptstore.vault import REALM_BYTES, Vault

Seal = Callable[[bytes], bytes]
Unseal = Callable[[bytes], tuple[bytes, bytes]]

FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 64 * 1024 * 1024  # about 4 TB of chunks
MAX_FILES = 1_000_000
MAX_DEPTH = 256  # Bazel's and npm's trees have some 40 levels; ours
MAX_PATH_BYTES, MAX_PART_BYTES = 4096, 255  # PATH_MAX and NAME_MAX of Linux

Kind = Literal["checkpoint", "workdir", "result"]


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a file: the number of its id in the manifest, and by which label its former self is found."""

    number: int
    label: bytes


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    path: str
    mode: int
    size: int
    chunks: tuple[Chunk, ...] = ()
    target: str | None = None


class Tree(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    files: tuple[FileEntry, ...] = ()
    note: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """`ids` are those of every chunk, once, in order of first use, and `lengths` theirs; `tree` is the packed `Tree` of files
    that are made of them, hidden if there is a `realm`; `entries` and `total_bytes` say how much there is in it, `user` whose it
    is."""

    version: int
    job: bytes
    config: int
    term: int
    seq: int
    parent: bytes | None
    kind: Kind
    created_unix: int
    ids: bytes
    lengths: tuple[int, ...]
    entries: int
    total_bytes: int
    tree: bytes
    realm: bytes = b""
    user: str = ""

    def open(self, vault: Vault | None = None) -> Tree:
        """What the tree was; Locked without its key, BadManifest or BadPath if there can be no such tree."""
        packed = self.tree
        if self.realm:
            if vault is None or vault.realm != self.realm:
                raise Locked("its files are sealed: the key is with the job's owner and its runners")
            try:
                packed = vault.show(_purpose(self.job), packed)
            except ValueError as error:
                raise BadManifest(f"its list of files is {error}") from error
        try:
            tree = _tree_decoder.decode(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadManifest(f"not a valid list of files: {error}") from error
        _check_tree(tree, self.lengths)
        return tree

    @cached_property
    def chunks(self) -> tuple[bytes, ...]:
        return tuple(self.ids[start : start + ID_BYTES] for start in range(0, len(self.ids), ID_BYTES))

    @property
    def sizes(self) -> dict[bytes, int]:
        """Of each chunk."""
        return dict(zip(self.chunks, self.lengths, strict=True))

    def content(self, entry: FileEntry) -> list[bytes]:
        """The ids of a file's chunks."""
        return [self.chunks[chunk.number] for chunk in entry.chunks]


_decoder = msgspec.msgpack.Decoder(Manifest)
_tree_decoder = msgspec.msgpack.Decoder(Tree)


def pack_tree(tree: Tree, job: bytes, lengths: Sequence[int], vault: Vault | None = None) -> bytes:
    """The tree of this job as it stands in a manifest; BadManifest or BadPath if it cannot be one."""
    _check_tree(tree, lengths)
    packed = msgspec.msgpack.encode(tree)
    return packed if vault is None else vault.hide(_purpose(job), packed)


def _purpose(job: bytes) -> bytes:
    return b"files of " + job


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
    if len(manifest.ids) % ID_BYTES or len(set(manifest.chunks)) != len(manifest.chunks):
        raise BadManifest("a manifest's chunks are not ids, each once")
    if len(manifest.lengths) != len(manifest.chunks) or not all(0 < n <= CHUNK_BYTES for n in manifest.lengths):
        raise BadManifest("a manifest's chunks have impossible lengths")
    if len(manifest.user) > MAX_PART_BYTES:
        raise BadManifest("a manifest's user has too long a name")
    if len(manifest.realm) not in {0, REALM_BYTES} or min(manifest.entries, manifest.total_bytes) < 0:
        raise BadManifest("a manifest's realm or size is impossible")


def _check_tree(tree: Tree, lengths: Sequence[int]) -> None:
    if len(tree.files) > MAX_FILES:
        raise BadManifest(f"a manifest may name {MAX_FILES} files")
    seen: set[str] = set()
    links: set[str] = set()
    for entry in tree.files:
        check_path(entry.path)
        if entry.path in seen:
            raise BadPath(f"{entry.path!r} stands twice in the manifest")
        seen.add(entry.path)
        _check_entry(entry, lengths)
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
    if len(parts) > MAX_DEPTH:
        raise BadPath(f"{path[:80]!r} is nested more than {MAX_DEPTH} levels deep")
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


def _check_entry(entry: FileEntry, lengths: Sequence[int]) -> None:
    if stat.S_ISREG(entry.mode):
        for chunk in entry.chunks:
            if not 0 <= chunk.number < len(lengths) or len(chunk.label) != LABEL_BYTES:
                raise BadManifest(f"{entry.path!r}: a chunk of it is impossible")
        if sum(lengths[chunk.number] for chunk in entry.chunks) != entry.size or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: size and chunks do not fit")
    elif stat.S_ISDIR(entry.mode):
        if entry.size or entry.chunks or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: a directory has no bytes")
    elif stat.S_ISLNK(entry.mode):
        if entry.size or entry.chunks or entry.target is None:
            raise BadManifest(f"{entry.path!r}: a link has a target and no bytes")
        check_link(entry.path, entry.target)
    else:
        raise BadManifest(f"{entry.path!r} is neither a file, a directory nor a link")
