"""Groups of users on a node: who signs them, which a node keeps and announces, and what it keeps at most."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from membership.envelope import seal
from membership.identity import Identity
from mesh.api.handlers.data import DataHandlers
from mesh.data import holdings
from mesh.data.library import DataLibrary
from mesh.data.manifest import (
    GROUP,
    KIND,
    MAX_GROUPS,
    DataManifest,
    Group,
    Reader,
    data_id,
    decode_announced,
    encode_manifest,
)
from tests.data.test_directory import ADA, BOB, EVE, Mesh


class Node:
    """Ada's node, in a mesh with bob and eve. `announced`: what it has published last."""

    def __init__(self, root: Path) -> None:
        self.root, self.mesh = root / "data", Mesh()
        self.announced = b""
        self.start()

    def start(self) -> None:
        """Start the library anew, with what is on the disk."""
        mesh, nothing = self.mesh, None
        membership: Any = SimpleNamespace(
            credentials=mesh.credentials[ADA.node_id],
            chain=mesh.chains[ADA.node_id],
            members=list,
            records=lambda prefix: [],
            publish=self._publish,
        )
        peers: Any = nothing
        self.library = DataLibrary(
            self.root, None, 0.0, {}, ADA, mesh.trust, membership, peers, lambda node, what: None, lambda: None
        )

    def _publish(self, section: str, body: bytes, ttl_s: float) -> None:
        self.announced = body

    def group(self, name: str, *members: Identity, by: Identity = ADA) -> DataManifest | None:
        return self.library.directory.group(Group(self.user(by).key, "whoever", name))

    def user(self, one: Identity) -> Reader:
        own = self.mesh.credentials[one.node_id]
        return Reader(own.user_key, own.user)

    def hears(self, by: Identity, name: str, number: int = 1, **changes: Any) -> bytes:
        """Let the node know a manifest of another node's user."""
        identity, sealed, manifest = self.mesh.made(by, name, number, **changes)
        self.library.directory.remember(identity, sealed, manifest)
        return identity

    def hears_group(self, by: Identity, name: str, *members: Identity, number: int = 1) -> bytes:
        readers = tuple(self.user(one) for one in members)
        return self.hears(by, GROUP + name, number, root=None, chunk_bytes=0, readers=readers)

    def holds(self, by: Identity, name: str, *groups: str) -> None:
        """Let a data set be here that names groups of bob's."""
        named = tuple(Group(self.user(BOB).key, "bob", group) for group in groups)
        self.library.holdings.held.add(self.hears(by, name, groups=named))

    async def tidies(self) -> set[bytes]:
        """Return the groups on the disk, after the node has looked."""
        await self.library.holdings.keep_groups(self.user(ADA).key)
        held, store = self.library.holdings.held, self.library.holdings.store
        groups = {one for one in held if self.library.directory.known[one].is_group}
        assert groups == set(store.held()) & groups == {one for one in store.held() if store.sealed(one)}
        return groups


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.library.open()
    yield node
    await node.library.close()


async def test_group_is_signed_kept_and_announced(node: Node) -> None:
    await node.library.set_group("vision", (node.user(BOB), node.user(EVE)))
    await node.library.set_group("vision", (node.user(BOB),))
    group = node.group("vision")
    assert group is not None and group.readers == (node.user(BOB),) and group.user == "ada"
    (said,) = decode_announced(node.announced).groups
    assert (said.name, said.number, said.user_key) == ("group:vision", group.number, node.user(ADA).key)
    assert not decode_announced(node.announced).sets
    assert await node.tidies() == {said.id}, "the older version goes"
    await node.library.close()
    node.start()
    await node.library.open()
    assert node.group("vision") == group and decode_announced(node.announced).groups == (said,)
    await node.library.set_group("speech", (node.user(BOB),))
    sets = node.library.holdings.store.sets
    identity, sealed, _ = node.mesh.made(ADA, "group:forged", root=None, chunk_bytes=0, readers=(node.user(EVE),))
    sets.joinpath(identity.hex()).write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    sets.joinpath(said.id.hex()).write_bytes(b"?")
    await node.library.close()
    node.start()
    await node.library.open()
    assert node.group("vision") is None and node.group("forged") is None, "damaged on the disk"
    assert node.group("speech") is not None


async def test_group_is_on_the_disk_when_its_user_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(holdings, "write_durably", fail)
        with pytest.raises(OSError, match="the disk is full"):
            await node.library.set_group("vision", (node.user(BOB),))
    assert not node.library.holdings.held and not node.announced
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    await node.library.set_group("vision", (node.user(BOB),))
    assert synced and len(node.library.holdings.held) == 1


async def test_group_says_since_when_nobody_was_left_out(node: Node) -> None:
    bob, eve = node.user(BOB), node.user(EVE)
    told = list[tuple[int, int]]()
    for members in ((bob,), (bob, eve), (bob, eve), (eve,), (eve, bob), (), (bob,)):
        await node.library.set_group("vision", members)
        group = node.group("vision")
        assert group is not None
        told.append((group.number, group.left_out))
    (first, *_), numbers = told, [number for number, _ in told]
    assert numbers == sorted(set(numbers))
    assert [left for _, left in told] == [first[0]] * 3 + [numbers[3]] * 2 + [numbers[5]] * 2


async def test_node_keeps_the_newest_groups_that_its_data_sets_name(node: Node) -> None:
    named, other = node.hears_group(BOB, "vision", EVE), node.hears_group(BOB, "speech", EVE)
    assert await node.tidies() == set()
    node.holds(EVE, "pictures", "vision", "unknown")
    assert await node.tidies() == {named}
    node.holds(EVE, "voices", "speech")
    newer = node.hears_group(BOB, "vision", number=2)
    assert await node.tidies() == {newer, other}, "also one that is removed: an older version could come back"
    node.hears_group(BOB, "vision", EVE, number=1)
    assert await node.tidies() == {newer, other}
    node.library._announce()
    assert {one.id for one in decode_announced(node.announced).groups} == {newer, other}
    node.library.holdings.held = {newer, other}
    assert await node.tidies() == set(), "no data set here names them"


async def test_group_that_is_forgotten_meanwhile_is_not_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {node.hears_group(ADA, name, BOB) for name in ("vision", "speech")}
    keep, known = node.library.holdings.keep_statement, node.library.directory.known

    async def keeps(identity: bytes) -> None:
        for other in groups - {identity}:
            del known[other]
        await keep(identity)

    monkeypatch.setattr(node.library.holdings, "keep_statement", keeps)
    await node.library.holdings.keep_groups(node.user(ADA).key)
    assert len(node.library.holdings.held & groups) == 1


async def test_groups_of_one_user_are_bounded_and_those_of_this_user_announced_first(node: Node) -> None:
    names = [f"group{number}" for number in range(MAX_GROUPS + 8)]
    groups = [node.hears_group(BOB, name, EVE, number=10**15 + number) for number, name in enumerate(names)]
    removed = node.hears_group(BOB, "removed", number=10**15 + 999)
    for start in range(0, len(names), 10):
        node.holds(EVE, f"set{start}", *names[start : start + 10], "removed")
    assert await node.tidies() == set(groups[-MAX_GROUPS:]) and removed not in groups
    await node.library.set_group("own", (node.user(BOB),))
    said = decode_announced(node.announced).groups
    assert len(said) == MAX_GROUPS and (said[0].user, said[0].name) == ("ada", "group:own")


async def test_old_group_is_no_removal(node: Node) -> None:
    """The statement that a data set is removed goes after a month. A group holds until it is changed."""
    old = node.hears(ADA, "group:vision", root=None, chunk_bytes=0, created_unix=int(time.time()) - 7 * 86_400)
    readers = (node.user(BOB),)
    manifest = msgspec.structs.replace(node.library.directory.known[old], created_unix=0, readers=readers, number=2)
    sealed = seal(ADA, node.mesh.trust.mesh_id, KIND, encode_manifest(manifest))
    node.library.directory.remember(data_id(sealed), sealed, manifest)
    assert await node.tidies() == {data_id(sealed)}
    await node.library.space.tidy()
    assert data_id(sealed) in node.library.holdings.held
    assert await node.tidies() == {data_id(sealed)} and node.group("vision") == manifest


async def test_group_says_on_which_node_it_was_changed_last(node: Node) -> None:
    """If two machines change a group at the same time, the later change wins, and the other user sees where it was made."""
    await node.library.set_group("vision", (node.user(BOB),))
    node.hears_group(BOB, "vision", ADA)
    membership = node.library._membership
    found = await DataHandlers(ADA.node_id, node.mesh.trust, membership, node.library).groups("")
    assert [(one.name, one.changed_on) for one in found.groups] == [("ada/vision", "desk"), ("bob/vision", "bobs")]


async def test_group_without_members_removes_no_data_set_of_its_name(node: Node) -> None:
    node.holds(BOB, "vision")
    (held,) = node.library.holdings.held
    await node.library._heard(node.library.directory.known[node.hears_group(BOB, "vision")])
    assert node.library.holdings.held == {held}
    removal = node.hears(EVE, "vision", 2, root=None, chunk_bytes=0)
    await node.library._heard(node.library.directory.known[removal])
    assert node.library.holdings.held == {held}, "it is eve's that is removed"
    removal = node.hears(BOB, "vision", 2, root=None, chunk_bytes=0)
    await node.library._heard(node.library.directory.known[removal])
    assert node.library.holdings.held == {removal}
