"""Manifests of data sets, signed by their owners, and what nodes publish about them. No I/O.

A data set is named by its owner's key and a name, so no other member can take the name. Each version is a manifest that a node of
the owner signs, with its certificates; of two versions the one with the higher number counts. A version without a root says that
the data set is removed.

A group of users is a manifest, too: its name begins with `group:`, and it has members and no content. A data set may name groups:
whoever is in their newest versions may read it.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import msgspec
from blake3 import blake3

from ckptstore.cipher import REALM_BYTES, SIGNATURE_BYTES, is_proof
from ckptstore.dataset import MAX_BYTES, MAX_ENTRIES, Link, check_root
from ckptstore.errors import BadManifest
from membership.malformed import MALFORMED
from membership.records import MAX_BODY_BYTES
from membership.trust import CLOCK_GRACE_S, USER, Credentials, User

KIND = "data"  # envelope kind of a manifest
SECTION = "data"  # where a node says what it holds
BLOCK_BYTES = 4096  # of most file systems
FORMAT_VERSION = 1
MAX_READERS = 256  # own choice
MAX_SEALED = 64 * 1024  # a sealed manifest with 256 readers and its signer's certificates has less
MAX_ANNOUNCED = 96  # data sets that one node announces: a section holds 16 KiB
MAX_COMING = 8  # data sets that one node announces it is fetching (own choice)
MAX_GROUPS = 32  # that a data set names; of one user, kept at a node; announced by a node (own choice)
GROUP = "group:"  # before the name of a group, so that a data set may have the same name
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")  # lower case, so that no two differ in case alone
OWNED = re.compile(r"[A-Za-z0-9_.@+-]{1,64}/(?:group:)?" + NAME.pattern)

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class DataError(ValueError):
    """A manifest, a name or an announcement is not valid; the text says why."""


class FetchFailed(RuntimeError):
    """A data set could not be brought here; the text says why."""


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """A user who may read a data set. The key decides; the name is for people."""

    key: Key
    name: str


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A group whose members may read a data set. Its owner's key and its name decide; `user` is for people."""

    user_key: Key
    user: str
    name: str

    @property
    def key(self) -> tuple[bytes, str]:
        """Return what names the group among all manifests (`DataManifest.key`)."""
        return self.user_key, GROUP + self.name

    @property
    def full_name(self) -> str:
        return f"{GROUP}{self.user}/{self.name}"


Members = Callable[[Group], Collection[bytes]]  # returns the keys of the users in a group


def nobody(group: Group) -> Collection[bytes]:
    """Return the members of a group that is not known."""
    return ()


class DataManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One version of a data set. `chain`: the certificates of the node that signed it. `chunk_bytes`: what a node without any of
    it has to fetch. `realm`: names the key with which its chunks and pages are encrypted; empty if they are not. `proof`: that
    its author has that key, so that nobody is given the key of another data set for theirs. `cache`: its owner's jobs add to it.
    `groups`: their members may read it. A group has members in `readers`; `left_out`: number of the newest version of it in which
    one of the version before was missing.
    """

    version: Natural
    name: str
    user: str
    user_key: Key
    chain: bytes
    number: Natural
    created_unix: Natural
    root: Link | None = None
    chunk_bytes: Natural = 0
    readers: Annotated[tuple[Reader, ...], msgspec.Meta(max_length=MAX_READERS)] = ()
    everybody: bool = False
    realm: Annotated[bytes, msgspec.Meta(max_length=REALM_BYTES)] = b""
    proof: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""
    cache: bool = False
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    left_out: Natural = 0

    @property
    def full_name(self) -> str:
        return f"{self.user}/{self.name}"

    @property
    def key(self) -> tuple[bytes, str]:
        """Return what names the data set, whatever its version."""
        return self.user_key, self.name

    @property
    def is_group(self) -> bool:
        return self.name.startswith(GROUP)

    @property
    def removes(self) -> bool:
        """Tell whether it says that a data set is removed."""
        return self.root is None and not self.is_group

    @property
    def size(self) -> int:
        return self.root.size if self.root is not None else 0

    @property
    def tree_bytes(self) -> int:
        """Return what its unpacked files take, at least a block each."""
        return self.size + BLOCK_BYTES * (self.root.entries if self.root is not None else 0)

    def may_read(self, user_key: bytes, members: Members = nobody) -> bool:
        """Tell whether a user may have the content. `members`: of a group, as far as groups are known."""
        named = user_key == self.user_key or any(reader.key == user_key for reader in self.readers)
        return self.everybody or named or any(user_key in members(group) for group in self.groups)


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A data set that a node has whole, or whose removal it knows."""

    id: Key
    user_key: Key
    user: str
    name: str
    number: Natural


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data sets that a node announces. `coming`: ids of those that it is fetching; it gives others the chunks it has.

    `groups`: groups of users whose manifests it has.
    """

    sets: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MAX_ANNOUNCED)] = ()
    coming: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_COMING)] = ()
    groups: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()


_decoder, _announced = msgspec.msgpack.Decoder(DataManifest), msgspec.msgpack.Decoder(Announced)


def data_id(sealed: bytes) -> bytes:
    return blake3(sealed).digest()


def check_name(name: str) -> str:
    """Return a valid name of a data set. DataError if it is not valid."""
    if not NAME.fullmatch(name):
        raise DataError(
            f"{name[:80]!r} cannot be a data set's name: up to 64 lower-case letters, digits and . _ - between them"
        )
    return name


def statement(key: tuple[bytes, str]) -> bytes:
    """Return what the `proof` of a data set with this key (`DataManifest.key`) says."""
    user_key, name = key
    return b"data set " + user_key + name.encode()


def encode_manifest(manifest: DataManifest) -> bytes:
    check_manifest(manifest)
    return msgspec.msgpack.encode(manifest)


def decode_manifest(payload: bytes) -> DataManifest:
    """Decode a manifest whose signature was verified. DataError if it is not valid."""
    if len(payload) > MAX_SEALED:
        raise DataError("a data set's manifest is too long")
    try:
        manifest = _decoder.decode(payload)
    except MALFORMED as error:
        raise DataError(f"not a data set's manifest: {error}") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: DataManifest) -> None:
    if manifest.version != FORMAT_VERSION:
        raise DataError(f"version {manifest.version} of data sets is unknown to this node: upgrade campus-mesh")
    for name in (manifest.name.removeprefix(GROUP), *(group.name for group in manifest.groups)):
        check_name(name)
    owned = (manifest.full_name, *(f"{group.user}/{group.name}" for group in manifest.groups))
    if not all(map(OWNED.fullmatch, owned)):
        raise DataError("the owner's name is not valid")
    content = (manifest.root, manifest.chunk_bytes, manifest.everybody, manifest.realm, manifest.proof, manifest.cache)
    if manifest.is_group and (any(content) or manifest.groups or manifest.left_out > manifest.number):
        raise DataError("a group has members, and neither content nor groups")
    if manifest.left_out and not manifest.is_group:
        raise DataError("only a group says when somebody was left out")
    if manifest.chunk_bytes > MAX_BYTES + 1024 * MAX_ENTRIES or any(len(one.name) > 64 for one in manifest.readers):
        raise DataError("the manifest's numbers or readers are out of range")
    realms = {0} if manifest.everybody or manifest.root is None else {0, REALM_BYTES}
    if len(manifest.realm) not in realms:
        raise DataError("a data set is encrypted with one key, and not at all if it is for everybody or removed")
    if manifest.realm and not is_proof(manifest.realm, statement(manifest.key), manifest.proof):
        raise DataError("the data set names a key that its author does not have: it is copied from another one")
    if manifest.cache and (manifest.readers or manifest.groups or manifest.everybody):
        raise DataError("a cache is for its owner alone")
    if manifest.root is not None:
        try:
            check_root(manifest.root)
        except BadManifest as error:
            raise DataError(str(error)) from error


def check_owner(manifest: DataManifest, signer: bytes, credentials: Credentials, holder: User | None) -> None:
    """Raise DataError unless a node of the named owner signed the manifest while it was a member.

    `credentials`: of the manifest's own chain; `holder`: to whom the owner's name belongs now.
    """
    named = (credentials.node_id, credentials.user, credentials.user_key)
    if named != (signer, manifest.user, manifest.user_key):
        raise DataError("the data set is signed by another user than its owner")
    if USER not in credentials.roles:
        raise DataError(f"{credentials.nick} may lend, but own no data sets")
    if not credentials.not_before - CLOCK_GRACE_S <= manifest.created_unix <= credentials.not_after + CLOCK_GRACE_S:
        raise DataError("the certificate of its signer was not valid when the data set was made")
    if holder is not None and holder.key != manifest.user_key:
        raise DataError(f"the name {manifest.user!r} belongs to another user now")


def encode_announced(held: list[Held], coming: Sequence[bytes] = (), groups: Sequence[Held] = ()) -> bytes:
    """Encode the first ones, as many as fit a section."""
    count, first, some = MAX_ANNOUNCED, tuple(coming[:MAX_COMING]), tuple(groups[:MAX_GROUPS])
    while len(body := msgspec.msgpack.encode(Announced(tuple(held[:count]), first, some))) > MAX_BODY_BYTES:
        count -= 1
    return body


def decode_announced(body: bytes) -> Announced:
    """Decode what a node says that it has. DataError if it is not valid."""
    try:
        found = _announced.decode(body)
    except MALFORMED as error:
        raise DataError(f"not an announcement of data sets: {error}") from error
    for held in (*found.sets, *found.groups):
        if not OWNED.fullmatch(f"{held.user}/{held.name}"):
            raise DataError("an announced name is not valid")
    return found
