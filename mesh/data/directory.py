"""The data sets of the mesh: what nodes announce, and the manifests that owners have signed.

Names come from announcements. A manifest may come from any node, since only its owner can have signed it.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from membership.envelope import EnvelopeError, open_envelope
from membership.identity import NodeId, short_id
from membership.node import MembershipNode
from membership.records import Record
from membership.trust import TrustError, TrustStore
from mesh.data.manifest import (
    GROUP,
    KIND,
    MAX_SEALED,
    SECTION,
    Announced,
    DataError,
    DataManifest,
    FetchFailed,
    Group,
    Held,
    check_owner,
    data_id,
    decode_announced,
    decode_manifest,
)
from mesh.rpc.client import PeerClient, PeerError
from placement.advert import AdvertError, decode_advert

LEARNED = 16  # manifests asked for at a look (own choice)
MAX_KNOWN = 4096  # manifests in memory, and refused and missing ones remembered (own choice)
ASK_S = 5.0  # timeout of a short call on a LAN with loaded machines
SOURCES = 8  # holders asked at a time (own choice)
AGAIN_S = 30.0  # until a refused or missing one is asked for again: certificates may have come since (own choice)

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


class DataDirectory:
    """The known manifests. `keeps`: whether one stays known in any case; `blame` reports a node that sent wrong data;
    `heard` is called with each manifest that comes from another node.
    """

    def __init__(
        self,
        trust: TrustStore,
        membership: MembershipNode,
        peers: PeerClient,
        keeps: Callable[[bytes], bool],
        blame: Callable[[NodeId, str], None],
        heard: Callable[[DataManifest], Awaitable[None]],
    ) -> None:
        self._trust, self._membership, self._peers = trust, membership, peers
        self._keeps, self._blame, self._heard = keeps, blame, heard
        self.known: dict[bytes, DataManifest] = {}
        self._sealed: dict[bytes, bytes] = {}
        self._newest: dict[tuple[bytes, str], bytes] = {}
        self._members: dict[bytes, frozenset[bytes]] = {}  # of each known version of a group
        self._refused: dict[bytes, tuple[str, float]] = {}  # why, until when it is not asked for again
        self._lacking: dict[tuple[NodeId, bytes], float] = {}  # what a node claims and does not give, until when
        self._seen: dict[NodeId, tuple[Record, Announced]] = {}

    def opened(self, identity: bytes, sealed: bytes) -> DataManifest:
        """Return a manifest that its owner has signed. DataError."""
        if data_id(sealed) != identity:
            raise DataError("the manifest is not the one that was named")
        try:
            signer, payload = open_envelope(sealed, self._trust.mesh_id, KIND)
            manifest = decode_manifest(payload)
            credentials = self._trust.read_chain(manifest.chain)
        except (EnvelopeError, TrustError) as error:
            raise DataError(f"the data set's owner is not a member of this mesh: {error}") from error
        check_owner(manifest, signer, credentials, self._trust.holder(manifest.user, time.time()))
        return manifest

    def remember(self, identity: bytes, sealed: bytes, manifest: DataManifest) -> None:
        while len(self.known) >= MAX_KNOWN:
            spare = self._spare(manifest.user_key)
            if spare is None:
                break
            del self.known[spare], self._sealed[spare]
            self._members.pop(spare, None)
            self._newest = {key: one for key, one in self._newest.items() if one != spare}
        self.known[identity], self._sealed[identity] = manifest, sealed
        if manifest.is_group:
            self._members[identity] = frozenset(reader.key for reader in manifest.readers)
        newest = self._newest.get(manifest.key)
        if newest is None or (self.known[newest].number, newest) < (manifest.number, identity):
            self._newest[manifest.key] = identity

    def _spare(self, coming: bytes) -> bytes | None:
        """Return the manifest to forget for one of a user: the first of who then has most of those that need not be kept.

        So a member that signs many costs no other user one.
        """
        spare = {one: manifest.user_key for one, manifest in self.known.items() if not self._keeps(one)}
        count = Counter([coming, *spare.values()])
        return max(spare, key=lambda one: count[spare[one]], default=None)

    def claims(self) -> Iterator[tuple[NodeId, Held]]:
        """Yield what the other nodes that are there announce to have, groups included."""
        return ((node, held) for node, said in self._announced() for held in (*said.sets, *said.groups))

    def _announced(self) -> Iterator[tuple[NodeId, Announced]]:
        there = {member.node_id for member in self._membership.members() if member.present}
        for record in self._membership.records(SECTION):
            if (
                record.section != SECTION
                or record.node not in there
                or record.node == self._membership.credentials.node_id
            ):
                continue
            seen = self._seen.get(record.node)
            if seen is None or seen[0] is not record:
                try:
                    seen = (record, decode_announced(record.body))
                except DataError as error:
                    log.info("node %s: %s", short_id(record.node), error)
                    seen = (record, Announced())
                self._seen[record.node] = seen
            yield record.node, seen[1]

    def holders(self, identity: bytes) -> list[NodeId]:
        """Return the other nodes that say they have a data set whole."""
        return [node for node, held in self.claims() if held.id == identity]

    def lends(self, node: NodeId) -> bool:
        """Tell whether a node lends now, as its advert says."""
        record = self._membership.record(node, "advert")
        try:
            return record is not None and decode_advert(node, record.body).lending
        except AdvertError:
            return False

    def fetching(self, identity: bytes) -> list[NodeId]:
        """Return the other nodes that say they fetch a data set, and give on what has come."""
        return [node for node, said in self._announced() if identity in said.coming]

    def sealed(self, identity: bytes) -> bytes | None:
        return self._sealed.get(identity)

    def newest(self) -> list[tuple[bytes, DataManifest]]:
        """Return the newest known version of each data set that is not removed."""
        return self._newest_of_all(lambda one: one.root is not None)

    def groups(self) -> list[tuple[bytes, DataManifest]]:
        """Return the newest known version of each group, those without members included."""
        return self._newest_of_all(lambda one: one.is_group)

    def _newest_of_all(self, wanted: Callable[[DataManifest], bool]) -> list[tuple[bytes, DataManifest]]:
        found = [(identity, self.known[identity]) for identity in self._newest.values()]
        return sorted((one for one in found if wanted(one[1])), key=lambda one: (one[1].full_name, one[1].user_key))

    def group(self, group: Group) -> DataManifest | None:
        """Return the newest known version of a group."""
        identity = self._newest.get(group.key)
        return None if identity is None else self.known[identity]

    def members(self, group: Group) -> Collection[bytes]:
        """Return the keys of the users in a group, by its newest known version; nobody's if it is not known."""
        return self._members.get(self._newest.get(group.key, b""), ())

    def is_newest(self, identity: bytes) -> bool:
        return self._newest.get(self.known[identity].key) == identity

    def newest_of(self, key: tuple[bytes, str]) -> bytes | None:
        """Return the newest known version of a user's data set, even if that says that it is removed."""
        return self._newest.get(key)

    def with_newest(self, identity: bytes) -> tuple[DataManifest, DataManifest]:
        """Return a known version of a data set, and the newest known one, even if that says that it is removed."""
        manifest = self.known[identity]
        return manifest, self.known[self._newest.get(manifest.key, identity)]

    def may_read(self, identity: bytes, user_key: bytes) -> bool:
        """Tell whether a user may read a known version, by that and by the newest known one, and by the newest known groups."""
        return all(one.may_read(user_key, self.members) for one in self.with_newest(identity))

    async def resolve(self, name: str) -> tuple[bytes, DataManifest] | None:
        """Return the newest version of `NAME` of this node's user, or of `USER/NAME`; None if there is none."""
        found = await self._named(name)
        if found is None or found[1].root is None:
            return None
        await self.learn_groups(found[1])
        return found

    async def resolve_group(self, name: str) -> tuple[bytes, DataManifest] | None:
        """Return the newest version of the group `NAME` of this node's user, or of `USER/NAME`; None if nobody is in it."""
        found = await self._named(name, GROUP)
        return found if found is not None and found[1].readers else None

    async def learn_groups(self, manifest: DataManifest) -> None:
        """Ask for the announced groups that a data set names, where they are newer than those known."""
        if manifest.groups:
            await self.learn({(group.user, group.key[1]) for group in manifest.groups})

    async def _named(self, name: str, kind: str = "") -> tuple[bytes, DataManifest] | None:
        own = self._membership.credentials
        user, slash, last = name.rpartition("/")
        last = kind + last
        await self.learn({(user or own.user, last)})
        if not slash or user == own.user:
            keys = {own.user_key}
        elif (holder := self._trust.holder(user, time.time())) is not None:
            keys = {holder.key}
        else:  # no machine of that user was seen since this node started: by what is kept here, if that is of one user
            keys = {
                key for (key, called), one in self._newest.items() if (self.known[one].user, called) == (user, last)
            }
        identity = self._newest.get((keys.pop(), last)) if len(keys) == 1 else None
        return None if identity is None else (identity, self.known[identity])

    async def learn(self, wanted: Collection[tuple[str, str]] = ()) -> None:
        """Ask for manifests that are announced and newer than those known; of some names (user, name) if they are `wanted`."""
        unknown: dict[bytes, list[NodeId]] = {}
        claimed: dict[NodeId, list[bytes]] = {}
        for node, held in self.claims():
            newest = self._newest.get((held.user_key, held.name))
            if held.id in self.known or (wanted and (held.user, held.name) not in wanted):
                continue
            if self._refused.get(held.id, ("", 0.0))[1] > time.monotonic():
                continue
            if self._lacking.get((node, held.id), 0.0) > time.monotonic():
                continue
            if newest is None or (self.known[newest].number, newest) < (held.number, held.id):
                unknown.setdefault(held.id, []).append(node)
                claimed.setdefault(node, []).append(held.id)
        some = self._in_turn(claimed, {user for user, _ in wanted})
        await asyncio.gather(*(self._ask_manifest(identity, unknown[identity]) for identity in some))

    def _in_turn(self, claimed: Mapping[NodeId, list[bytes]], users: Collection[str]) -> list[bytes]:
        """Return LEARNED ids: one of each node, these users' nodes first, then a second of each, and so on.

        So a node's false claims keep those of no other node waiting. The rest is at random.
        """
        theirs = {member.node_id for member in self._membership.members() if member.user in users}
        nodes = sorted(random.sample(list(claimed), len(claimed)), key=lambda node: node not in theirs)
        rounds = zip_longest(*(random.sample(claimed[node], len(claimed[node])) for node in nodes))
        found = dict.fromkeys(one for ids in rounds for one in ids if one is not None)
        return list(found)[:LEARNED]

    async def _ask_manifest(self, identity: bytes, nodes: Sequence[NodeId]) -> None:
        for node in nodes[:SOURCES]:
            try:
                sealed = await self._peers.call(
                    node, "GET", f"/v1/data/{identity.hex()}", timeout_s=ASK_S, answer_bytes=MAX_SEALED
                )
                manifest = self.opened(identity, sealed)
            except PeerError as error:
                log.info("data set %s: %s", identity.hex()[:12], error)
                if error.status == 404:
                    _remember(self._lacking, (node, identity), time.monotonic() + AGAIN_S)
                continue
            except DataError as error:
                self._blame(node, f"of data set {identity.hex()[:12]}, {error}")
                if data_id(sealed) != identity:  # other nodes may give the right one
                    _remember(self._lacking, (node, identity), time.monotonic() + AGAIN_S)
                    continue
                _remember(self._refused, identity, (str(error), time.monotonic() + AGAIN_S))
                return
            self.remember(identity, sealed, manifest)
            await self._heard(manifest)
            return

    async def manifest(self, identity: bytes) -> DataManifest:
        """Return a manifest, after asking for it if need be. FetchFailed."""
        if identity not in self.known:
            holders = self.holders(identity)
            if not holders:
                raise FetchFailed("no node that is there has it: `mesh data ls`")
            await self._ask_manifest(identity, holders)
        if identity not in self.known:
            raise FetchFailed(self._refused.get(identity, ("no node gives its manifest", 0.0))[0])
        return self.known[identity]


def _remember(known: dict[K, V], key: K, value: V) -> None:
    """Add to a dictionary of at most MAX_KNOWN, which forgets the oldest."""
    while len(known) >= MAX_KNOWN:
        del known[next(iter(known))]
    known[key] = value
