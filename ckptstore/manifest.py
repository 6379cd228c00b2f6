"""The bytes of a checkpoint's manifest: its files and their chunks, signed by the node that saved it.

docs/reference/ckptstore-format.md shows every byte; `pack.py` has the chunks.

Signing is injected, so that this package needs no node key: `Seal` signs a payload, `Unseal` verifies a signature and returns the
signer. Any node can read which chunks a manifest needs; an encrypted list of files needs the key of its realm (`cipher`).
"""

import stat
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from ckptstore.chunker import CHUNK_BYTES, LABEL_BYTES
from ckptstore.cipher import REALM_BYTES, StateCipher
from ckptstore.errors import BadManifest, BadPath, MissingKey
from ckptstore.pack import ID_BYTES
from membership.malformed import MALFORMED

Seal = Callable[[bytes], bytes]
Unseal = Callable[[bytes], tuple[bytes, bytes]]

FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_CHUNKS = 1 << 18  # own choice
MAX_BYTES = MAX_CHUNKS * CHUNK_BYTES  # of all files of a manifest, holes included: 1 TiB
CHUNK_MEMORY_BYTES = 144  # of a chunk in a decoded manifest: its id twice and its length (own measurement)
MAX_FILES = 1_000_000
MAX_DEPTH = 256  # own choice; trees of Bazel and npm have about 40 levels
MAX_PATH_BYTES, MAX_PART_BYTES = 4096, 255  # PATH_MAX and NAME_MAX of Linux

Kind = Literal["checkpoint", "workdir", "result"]


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk of a file: the position of its id in the manifest, and its label (see `chunker.label`)."""

    number: int
    label: bytes


class FileEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    path: str
    mode: int
    size: int
    chunks: tuple[Chunk, ...] = ()
    target: str | None = None


class Tree(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    # More are refused before they are decoded.
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(max_length=MAX_FILES)] = ()
    note: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """`ids` and `lengths` are those of every chunk, once, in order of first use. `tree` is the packed `Tree`, encrypted if
    there is a `realm`; `entries` and `total_bytes` are its size. `user` is the owner of the job."""

    version: int
    job: bytes
    config: int
    term: int
    seq: int
    parent: bytes | None
    kind: Kind
    created_unix: int
    ids: bytes
    lengths: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_CHUNKS)]  # else 16 MiB become 260
    entries: int
    total_bytes: int
    tree: bytes
    realm: bytes = b""
    user: str = ""

    def open(self, cipher: StateCipher | None = None) -> Tree:
        """Decrypt and decode the tree. Raises MissingKey without its key, BadManifest or BadPath if it is invalid."""
        packed = self.tree
        if self.realm:
            if cipher is None or cipher.realm != self.realm:
                raise MissingKey("the list of files is encrypted: only the job's owner and its runners have the key")
            try:
                packed = cipher.decrypt(_purpose(self.job), packed)
            except ValueError as error:
                raise BadManifest(f"the list of files is {error}") from error
        try:
            tree = _tree_decoder.decode(packed)
        except MALFORMED as error:
            raise BadManifest(f"not a valid list of files: {error}") from error
        _check_tree(tree, self.lengths)
        return tree

    @property
    def memory_bytes(self) -> int:
        """Return about what it takes of memory, once its chunks were asked for."""
        return len(self.tree) + CHUNK_MEMORY_BYTES * len(self.lengths)

    @cached_property
    def chunks(self) -> tuple[bytes, ...]:
        return tuple(self.ids[start : start + ID_BYTES] for start in range(0, len(self.ids), ID_BYTES))

    @property
    def sizes(self) -> dict[bytes, int]:
        """Length of each chunk."""
        return dict(zip(self.chunks, self.lengths, strict=True))

    def content(self, entry: FileEntry) -> list[bytes]:
        """Return the ids of a file's chunks."""
        return [self.chunks[chunk.number] for chunk in entry.chunks]


_decoder = msgspec.msgpack.Decoder(Manifest)
_tree_decoder = msgspec.msgpack.Decoder(Tree)


def pack_tree(tree: Tree, job: bytes, lengths: Sequence[int], cipher: StateCipher | None = None) -> bytes:
    """Encode a job's tree for its manifest. Raises BadManifest or BadPath if it is invalid."""
    _check_tree(tree, lengths)
    packed = msgspec.msgpack.encode(tree)
    return packed if cipher is None else cipher.encrypt(_purpose(job), packed)


def _purpose(job: bytes) -> bytes:
    return b"files of " + job


def manifest_id(sealed: bytes) -> bytes:
    return blake3(sealed).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    check_manifest(manifest)
    return msgspec.msgpack.encode(manifest)


def decode_manifest(sealed: bytes, unseal: Unseal) -> tuple[bytes, Manifest]:
    """Return the signer and the manifest; BadManifest if the signature or the content is invalid."""
    check_size(sealed)
    try:
        signer, payload = unseal(sealed)
        manifest = _decoder.decode(payload)
    except (ValueError, *MALFORMED) as error:
        raise BadManifest(f"not a valid manifest: {error}") from error
    check_manifest(manifest)
    return signer, manifest


def check_size(sealed: bytes) -> None:
    if len(sealed) > MAX_MANIFEST_BYTES:
        limit = f"the limit of {MAX_MANIFEST_BYTES}: pack small files into few large ones"
        raise BadManifest(f"a manifest of {len(sealed)} bytes is over {limit}")


def check_manifest(manifest: Manifest) -> None:
    if manifest.version != FORMAT_VERSION:
        raise BadManifest(f"manifest version {manifest.version} is unknown to this node: upgrade campus-mesh")
    if len(manifest.job) != 16 or min(manifest.config, manifest.term, manifest.seq) < 0:
        raise BadManifest("a manifest's job, config, term or seq is invalid")
    if manifest.parent is not None and len(manifest.parent) != 32:
        raise BadManifest("a manifest's parent is not an id")
    if len(manifest.lengths) > MAX_CHUNKS or manifest.entries > MAX_FILES:
        raise BadManifest(f"a manifest names at most {MAX_CHUNKS} chunks and {MAX_FILES} files")
    if len(manifest.ids) != ID_BYTES * len(manifest.lengths):
        raise BadManifest("a manifest's chunks are not as many ids as lengths")
    if len(set(manifest.chunks)) != len(manifest.chunks):
        raise BadManifest("a manifest's chunks are not unique ids")
    if not all(0 < n <= CHUNK_BYTES for n in manifest.lengths):
        raise BadManifest("a manifest's chunks have invalid lengths")
    if len(manifest.user) > MAX_PART_BYTES:
        raise BadManifest("the name of a manifest's user is too long")
    if len(manifest.realm) not in {0, REALM_BYTES} or min(manifest.entries, manifest.total_bytes) < 0:
        raise BadManifest("a manifest's realm or size is invalid")


def _check_tree(tree: Tree, lengths: Sequence[int]) -> None:
    if len(tree.files) > MAX_FILES:
        raise BadManifest(f"a manifest may name at most {MAX_FILES} files")
    seen: set[str] = set()
    directories: set[str] = set()
    for entry in tree.files:
        check_path(entry.path)
        if entry.path in seen:
            raise BadPath(f"{entry.path!r} occurs twice in the manifest")
        seen.add(entry.path)
        _check_entry(entry, lengths)
        if stat.S_ISDIR(entry.mode):
            directories.add(entry.path)
    for path in seen:
        parent = path.rpartition("/")[0]
        # Only the top may be implied (`ckpt` of `ckpt/step-5`): a path could imply 255 directories that no bound counts.
        if parent not in directories and ("/" in parent or parent in seen):
            raise BadPath(f"{path[:80]!r} lies in no directory of the manifest")


def check_path(path: str) -> None:
    """Raise BadPath unless this is a plain relative path that stays inside its tree."""
    parts = path.split("/")
    encoded = path.encode(errors="surrogateescape")
    if "\0" in path or not path or len(encoded) > MAX_PATH_BYTES:
        raise BadPath(f"{path[:80]!r} is not a valid path")
    if len(parts) > MAX_DEPTH:
        raise BadPath(f"{path[:80]!r} is nested more than {MAX_DEPTH} levels deep")
    if any(part in {"", ".", ".."} for part in parts):
        raise BadPath(f"{path[:80]!r} is not a plain relative path")
    if any(len(part.encode(errors="surrogateescape")) > MAX_PART_BYTES for part in parts):
        raise BadPath(f"{path[:80]!r} has a component that is too long")


def check_text(path: str) -> None:
    """Raise BadPath if a manifest cannot hold this path, since its bytes are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        shown = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise BadPath(f"the name {shown} is not UTF-8, so it cannot be saved: rename it") from error


def check_link(path: str, target: str) -> None:
    """Raise BadPath unless the link stays inside the tree, whatever the other links of the tree are.

    A target is relative, with `..` at its beginning only: it goes up through the link's own parents, which are directories. After
    a name, `..` could go up from where another link leads (CVE-2025-4517).
    """
    if not target or target.startswith("/") or "\0" in target or len(target) > MAX_PATH_BYTES:
        raise BadPath(f"the link {path!r} points to {target!r}: only relative links inside the tree can be saved")
    parts = [part for part in target.split("/") if part not in {"", "."}]
    names = [place for place, part in enumerate(parts) if part != ".."]
    ups = names[0] if names else len(parts)
    if ".." in parts[ups:]:
        raise BadPath(f"the link {path!r} points to {target!r}: `..` may stand at the beginning only")
    if path.count("/") - ups < 1:  # depth 0 is outside the prefix (ckpt, work, out)
        raise BadPath(f"the link {path!r} points outside its tree, to {target!r}")


def _check_entry(entry: FileEntry, lengths: Sequence[int]) -> None:
    if stat.S_ISREG(entry.mode):
        for chunk in entry.chunks:
            if not 0 <= chunk.number < len(lengths) or len(chunk.label) != LABEL_BYTES:
                raise BadManifest(f"{entry.path!r}: a chunk is invalid")
        if sum(lengths[chunk.number] for chunk in entry.chunks) != entry.size or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: its size does not match its chunks")
    elif stat.S_ISDIR(entry.mode):
        if entry.size or entry.chunks or entry.target is not None:
            raise BadManifest(f"{entry.path!r}: a directory cannot have content")
    elif stat.S_ISLNK(entry.mode):
        if entry.size or entry.chunks or entry.target is None:
            raise BadManifest(f"{entry.path!r}: a link needs a target and cannot have content")
        check_link(entry.path, entry.target)
    else:
        raise BadManifest(f"{entry.path!r} is neither a file, a directory nor a link")
