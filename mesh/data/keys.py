"""Keys of the data sets that are not for everybody.

The node that adds a data set draws its key, and uses it again for the next versions, so that they share chunks. It draws another
once somebody who could have the key is to read no more: a reader who was left out, also of a group, or a node that was revoked.
The manifest names the key (`realm`).

Nodes of the owner and of readers ask each other for it, and keep it in a file that only their node's key opens. A job brings it
in its description, encrypted with the key of its secrets, which no node keeps; the node that runs it has it in memory until the
guest has gone.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ckptstore.cipher import KEY_BYTES, REALM_BYTES, StateCipher
from membership.durable import write_durably
from membership.identity import Identity, NodeId, encrypt_to, short_id
from membership.malformed import MALFORMED
from membership.node import MembershipNode
from membership.trust import TrustStore
from mesh.data.directory import ASK_S, SOURCES, DataDirectory
from mesh.data.manifest import DataError, DataManifest, FetchFailed, Group, Key
from mesh.model.spec import DataNeed
from mesh.rpc.client import PeerClient, PeerError
from mesh.util.processes import no_core_dumps

MOST_GIVEN = 1024  # keys kept of other nodes' data sets; the oldest can be asked for again (own choice)
PURPOSE = b"key of data set "

log = logging.getLogger(__name__)


class KeptKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key on the disk of this node. With a `name`, it is the `number`th that this node drew for its user's data set.

    `readers`: who could have had it; `revoked`: nodes that were revoked before it was drawn. `groups`: `Group.key` and number of
    the groups whose members could have had it; somebody may have come and left since.
    """

    key: Key
    name: str = ""
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    readers: tuple[Key, ...] = ()
    revoked: tuple[Key, ...] = ()
    groups: tuple[tuple[tuple[Key, str], int], ...] = ()


_decode = msgspec.msgpack.Decoder(KeptKey).decode


class DataKeys:
    """The keys on this node, those that jobs have lent included. Open it before anything else."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        trust: TrustStore,
        membership: MembershipNode,
        peers: PeerClient,
        directory: DataDirectory,
    ) -> None:
        self._root, self._identity, self._trust, self._membership = root, identity, trust, membership
        self._peers, self._directory = peers, directory
        self._kept: dict[bytes, KeptKey] = {}  # by realm
        self._ciphers: dict[bytes, StateCipher] = {}
        self._lent: dict[bytes, list[StateCipher]] = {}  # one for each guest that brought it

    def open(self) -> None:
        """Read what is kept. It blocks."""
        if not self._root.is_dir():
            return
        whole = [path for path in self._root.iterdir() if len(path.name) == 2 * REALM_BYTES]
        for path in sorted(whole, key=lambda path: path.stat().st_mtime):
            try:
                kept = _decode(self._identity.decrypt(path.read_bytes()))
                realm = StateCipher(kept.key).realm
                if path.name != realm.hex():
                    raise ValueError("it is the file of another key")
            except (*MALFORMED, ValueError, OSError) as error:
                log.warning("a key of a data set cannot be read: %s: %s", path, error)
                continue
            self._kept[realm] = kept

    def _keep(self, cipher: StateCipher, kept: KeptKey) -> None:
        """Keep a key; it is on disk on return."""
        no_core_dumps()
        self._root.mkdir(mode=0o700, exist_ok=True)
        sealed = encrypt_to(self._identity.node_id, msgspec.msgpack.encode(kept))
        write_durably(self._root / cipher.realm.hex(), sealed)
        self._kept[cipher.realm] = kept
        given = [realm for realm, one in tuple(self._kept.items()) if not one.name]
        for realm in given[:-MOST_GIVEN]:
            del self._kept[realm]
            self._ciphers.pop(realm, None)
            (self._root / realm.hex()).unlink(missing_ok=True)

    # --- of this user's data sets

    def for_version(self, name: str, readers: Collection[bytes], groups: Sequence[Group] = ()) -> StateCipher:
        """Return the key for the next version of a data set of this user; it is on disk on return. DataError.

        It is the last one that this node drew, unless somebody could have that who is not to read the version.
        """
        newest = {group.key: self._group(group) for group in groups}
        readers = {*readers, *(reader.key for group in newest.values() for reader in group.readers)}
        revoked = self._revoked({self._membership.credentials.user_key, *readers})
        drawn = [kept for kept in tuple(self._kept.values()) if kept.name == name]
        last = max(drawn, key=lambda kept: kept.number, default=KeptKey(b"", name))
        left = any(key not in newest or newest[key].left_out > number for key, number in last.groups)
        named = tuple((key, group.number) for key, group in newest.items())
        if not last.key or not set(last.readers) <= readers or left or not revoked <= set(last.revoked):
            cipher = StateCipher.generate()
            kept = KeptKey(cipher.key, name, last.number + 1, tuple(sorted(readers)), tuple(sorted(revoked)), named)
        else:
            cipher, kept = (
                StateCipher(last.key),
                msgspec.structs.replace(last, readers=tuple(sorted(readers)), groups=named),
            )
        if self._kept.get(cipher.realm) != kept:
            self._keep(cipher, kept)
        return cipher

    def _group(self, group: Group) -> DataManifest:
        if (found := self._directory.group(group)) is None:
            raise DataError(f"there is no {group.full_name}: `mesh data group ls` lists the groups")
        return found

    def _revoked(self, users: Collection[bytes]) -> set[NodeId]:
        """Return the revoked nodes of these users, and those whose user this node does not know."""
        seen = self._trust.seen()
        gone = {node for node in self._trust.revoked if node not in seen}
        for node, one in seen.items():
            if one.user_key in users and not self._trust.revoked.isdisjoint({node, *one.through}):
                gone.add(node)
        return gone

    # --- of all that this node may read

    def known(self, realm: bytes) -> StateCipher | None:
        if realm in self._lent:
            return self._lent[realm][0]
        cipher, kept = self._ciphers.get(realm), self._kept.get(realm)
        if cipher is None and kept is not None:
            cipher = self._ciphers[realm] = StateCipher(kept.key)
        return cipher

    async def cipher(self, identity: bytes, manifest: DataManifest) -> StateCipher | None:
        """Return the key of a version, None of one that is not encrypted. FetchFailed if no node that is there gives it."""
        if not manifest.realm:
            return None
        return self.known(manifest.realm) or await self._asked(identity, manifest)

    async def _asked(self, identity: bytes, manifest: DataManifest) -> StateCipher:
        own = self._membership.credentials
        if not self._directory.may_read(identity, own.user_key):
            raise FetchFailed(f"{manifest.full_name} is encrypted, and not for {own.user}: a job has to bring its key")
        why: dict[NodeId, str] = {}
        for node in self._who_may_have(manifest):
            try:
                path = f"/v1/data/{identity.hex()}/key"
                key = await self._peers.call(node, "GET", path, timeout_s=ASK_S, answer_bytes=KEY_BYTES)
                cipher = of_realm(key, manifest)
            except (PeerError, FetchFailed) as error:
                why[node] = f"{short_id(node)}: {error}"
                continue
            await asyncio.to_thread(self._keep, cipher, KeptKey(cipher.key))
            return cipher
        raise FetchFailed(
            f"no node that is there gives the key of {manifest.full_name}: start one of {manifest.user}'s, or of a reader that "
            f"has it ({'; '.join(why.values()) or 'there is none'})"
        )

    def _who_may_have(self, manifest: DataManifest) -> list[NodeId]:
        """Return other nodes that are there, the owner's first. Names suffice: nothing is told to them."""
        known = [manifest, *filter(None, map(self._directory.group, manifest.groups))]
        readers = {reader.name for one in known for reader in one.readers}
        there = [member for member in self._membership.members() if member.present]
        there.sort(key=lambda member: member.user != manifest.user)
        me = self._membership.credentials.node_id
        found = [one.node_id for one in there if one.user in {manifest.user, *readers} and one.node_id != me]
        return found[:SOURCES]

    # --- that jobs bring

    def lend(self, manifest: DataManifest, key: bytes) -> bytes:
        """Have a key until `give_back` of what this returns. FetchFailed if it is not that of the version."""
        if not key:
            return b""
        no_core_dumps()
        cipher = of_realm(key, manifest)
        self._lent.setdefault(cipher.realm, []).append(cipher)
        return cipher.realm

    def give_back(self, realm: bytes) -> None:
        if realm:
            self._lent[realm].pop()
            if not self._lent[realm]:
                del self._lent[realm]


def of_realm(key: bytes, manifest: DataManifest) -> StateCipher:
    """Return the cipher with a key that is to be a version's. FetchFailed if it is another."""
    cipher = StateCipher(key) if len(key) == KEY_BYTES else None
    if cipher is None or cipher.realm != manifest.realm:
        raise FetchFailed(f"it is not the key of {manifest.full_name}")
    return cipher


def seal_key(job: StateCipher, need: DataNeed, key: StateCipher) -> DataNeed:
    """Return what a job asks for with the key of that data set. `job`: has the key of the job's secrets."""
    return msgspec.structs.replace(need, key=job.encrypt(PURPOSE + need.manifest, key.key))


def open_key(job: StateCipher | None, need: DataNeed) -> bytes:
    """Return the key of a data set that a job brings. FetchFailed if it cannot be opened."""
    try:
        if job is None:
            raise ValueError("the job has no secrets")
        return job.decrypt(PURPOSE + need.manifest, need.key)
    except ValueError as error:
        raise FetchFailed(f"the key that the job brings for {need.name} cannot be opened: {error}") from error
