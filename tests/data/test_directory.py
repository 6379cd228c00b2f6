"""The directory of data sets: whose manifests are taken, and which version of a name is the newest."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptstore.dataset import Link
from membership.envelope import seal
from membership.identity import Identity, NodeId
from membership.trust import TrustStore, found_mesh
from mesh.data import directory as directory_module
from mesh.data.directory import LEARNED, DataDirectory
from mesh.data.manifest import (
    GROUP,
    KIND,
    MAX_SEALED,
    SECTION,
    DataError,
    DataManifest,
    FetchFailed,
    Group,
    Held,
    Reader,
    data_id,
    encode_announced,
    encode_manifest,
)
from mesh.rpc.client import PeerError
from placement.advert import encode_advert
from tests.chains import admitted
from tests.consensus.worlds import make_advert

NOW = time.time()
ADA, BOB, EVE = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"e" * 32)
PICTURES = Link(b"r" * 32, 100, 5, 1)


class Mesh:
    """Nodes of ada (this one), bob and eve, who has come last. What they announce and answer is set by the test."""

    def __init__(self) -> None:
        genesis, chain = found_mesh(ADA, "lab", "desk", "ada", NOW)
        self.chains = {
            ADA.node_id: chain,
            BOB.node_id: admitted(ADA, genesis, chain, BOB.node_id, "bobs", "bob", NOW),
            EVE.node_id: admitted(ADA, genesis, chain, EVE.node_id, "eves", "eve", NOW),
        }
        self.trust = TrustStore(genesis)
        self.credentials = {node: self.trust.admit_chain(one, NOW) for node, one in self.chains.items()}
        self.sections: dict[NodeId, Any] = {}
        self.adverts: dict[NodeId, Any] = {}
        self.answers: dict[tuple[NodeId, bytes], bytes] = {}
        self.asked: list[tuple[NodeId, bytes]] = []
        self.blamed: list[NodeId] = []
        self.kept: set[bytes] = set()
        self.absent: set[NodeId] = set()
        self.status = 404  # of a node that does not give what it has announced
        self.heard: list[DataManifest] = []
        membership: Any = SimpleNamespace(
            credentials=self.credentials[ADA.node_id],
            members=lambda: [
                SimpleNamespace(node_id=one, present=one not in self.absent, user=own.user)
                for one, own in self.credentials.items()
            ],
            records=lambda prefix: list(self.sections.values()),
            record=lambda node, section: self.adverts.get(node) if section == "advert" else None,
        )
        peers: Any = SimpleNamespace(call=self._call)
        self.directory = DataDirectory(
            self.trust,
            membership,
            peers,
            self.kept.__contains__,
            lambda node, what: self.blamed.append(node),
            self._on_heard,
        )

    async def _on_heard(self, manifest: DataManifest) -> None:
        assert manifest in self.directory.known.values()
        self.heard.append(manifest)

    async def _call(self, node: NodeId, method: str, path: str, timeout_s: float, answer_bytes: int) -> bytes:
        assert (timeout_s, answer_bytes) == (directory_module.ASK_S, MAX_SEALED)
        identity = bytes.fromhex(path.split("/")[3])
        self.asked.append((node, identity))
        if (node, identity) not in self.answers:
            raise PeerError("it does not have it", self.status)
        return self.answers[node, identity]

    def made(
        self, by: Identity, name: str = "pictures", number: int = 1, **changes: Any
    ) -> tuple[bytes, bytes, DataManifest]:
        """Return a data set that a node's user has made: its id, the sealed manifest and the manifest."""
        own = self.credentials[by.node_id]
        chain = self.chains[by.node_id]
        plain = DataManifest(1, name, own.user, own.user_key, chain, number, int(NOW), PICTURES, 105)
        manifest = msgspec.structs.replace(plain, **changes)
        sealed = seal(by, self.trust.mesh_id, KIND, encode_manifest(manifest))
        return data_id(sealed), sealed, manifest

    def group(
        self, by: Identity, *members: Identity, number: int = 1, **changes: Any
    ) -> tuple[bytes, bytes, DataManifest]:
        """Return a version of the group `vision` of a node's user."""
        users = [self.credentials[one.node_id] for one in members]
        readers = tuple(Reader(one.user_key, one.user) for one in users)
        return self.made(by, "group:vision", number, **{"root": None, "chunk_bytes": 0, "readers": readers} | changes)

    def announces(self, by: Identity, *sets: tuple[bytes, bytes, DataManifest], gives: bool = True) -> None:
        rows = [
            Held(one, manifest.user_key, manifest.user, manifest.name, manifest.number) for one, _, manifest in sets
        ]
        body = encode_announced(
            [row for row in rows if not row.name.startswith(GROUP)],
            (),
            [row for row in rows if row.name.startswith(GROUP)],
        )
        self.sections[by.node_id] = SimpleNamespace(node=by.node_id, section=SECTION, body=body)
        if gives:
            self.answers |= {(by.node_id, one): sealed for one, sealed, _ in sets}


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


async def test_manifest_is_learnt_from_any_holder(mesh: Mesh) -> None:
    pictures = mesh.made(BOB)
    mesh.announces(EVE, pictures)
    mesh.announces(BOB, pictures)
    await mesh.directory.learn()
    assert mesh.directory.known == {pictures[0]: pictures[2]} and mesh.heard == [pictures[2]]
    assert mesh.directory.sealed(pictures[0]) == pictures[1] and not mesh.blamed
    await mesh.directory.learn()
    assert len(mesh.asked) == 1, "it is known"


@pytest.mark.parametrize("kind", ["data set", "group"])
@pytest.mark.parametrize("lie", ["another", "signer", "name", "stranger", "kind", "mesh", "chain", "taken"])
async def test_false_manifest_is_refused_and_its_giver_blamed(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, lie: str, kind: str
) -> None:
    made = mesh.made if kind == "data set" else mesh.group
    one, sealed, manifest = made(BOB)
    if lie == "another":
        sealed = made(BOB, number=2)[1]
    elif lie == "signer":  # eve signs what bob's chain would own
        one, sealed, manifest = made(EVE, user="bob", user_key=manifest.user_key, chain=manifest.chain)
    elif lie == "name":
        one, sealed, manifest = made(EVE, user="bob")
    elif lie == "taken":  # bob's name belongs to eve by now
        eve = SimpleNamespace(key=mesh.credentials[EVE.node_id].user_key)
        monkeypatch.setattr(mesh.trust, "holder", lambda name, now_unix: eve)
    elif lie == "chain":
        one, sealed, manifest = made(BOB, chain=b"?")
    else:
        signer = Identity(b"x" * 32) if lie == "stranger" else BOB
        mesh_id = mesh.trust.mesh_id if lie != "mesh" else bytes(len(mesh.trust.mesh_id))
        sealed = seal(signer, mesh_id, KIND if lie != "kind" else "job", encode_manifest(manifest))
        one = data_id(sealed)
    mesh.announces(EVE, (one, sealed, manifest))
    await mesh.directory.learn()
    assert not mesh.directory.known and mesh.blamed == [EVE.node_id] and not mesh.heard
    with pytest.raises(DataError):
        mesh.directory.opened(one, sealed)
    await mesh.directory.learn()
    assert len(mesh.asked) == 1, "it is not asked for again at once"
    with pytest.raises(FetchFailed) as failed:
        await mesh.directory.manifest(one)
    assert (str(failed.value) == "no node gives its manifest") == (lie == "another")


@pytest.mark.parametrize("answer", [None, b"?"])
async def test_manifest_that_was_not_given_is_asked_for_again_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    one, sealed, manifest = mesh.made(BOB)
    mesh.announces(EVE, (one, sealed, manifest), gives=False)
    if answer is not None:
        mesh.answers[EVE.node_id, one] = answer
    await mesh.directory.learn()
    mesh.answers[EVE.node_id, one] = sealed
    begun = time.monotonic()
    monkeypatch.setattr(directory_module.time, "monotonic", lambda: begun + directory_module.AGAIN_S + 1)
    await mesh.directory.learn()
    assert one in mesh.directory.known


@pytest.mark.parametrize("lie", [None, b"?"])
async def test_node_that_does_not_give_a_manifest_hides_it_on_no_other(mesh: Mesh, lie: bytes | None) -> None:
    pictures = mesh.made(BOB)
    mesh.announces(EVE, pictures, gives=False)
    if lie is not None:
        mesh.answers[EVE.node_id, pictures[0]] = lie
    await mesh.directory.learn()
    assert mesh.blamed == ([] if lie is None else [EVE.node_id])
    mesh.announces(BOB, pictures)
    await mesh.directory.learn()
    assert pictures[0] in mesh.directory.known and len(mesh.asked) == 2
    both = mesh.made(BOB, name="voices")
    mesh.announces(EVE, both, gives=False)
    if lie is not None:
        mesh.answers[EVE.node_id, both[0]] = lie
    mesh.announces(BOB, both)
    await mesh.directory.learn()
    assert both[0] in mesh.directory.known, "the next one is asked at once"


async def test_node_that_was_too_busy_is_asked_again_at_once(mesh: Mesh) -> None:
    pictures, mesh.status = mesh.made(BOB), 503
    mesh.announces(BOB, pictures, gives=False)
    for _ in range(2):
        await mesh.directory.learn()
    assert mesh.asked == [(BOB.node_id, pictures[0])] * 2


async def test_few_holders_are_asked_at_a_time(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "SOURCES", 1)
    pictures = mesh.made(BOB)
    mesh.announces(EVE, pictures, gives=False)
    mesh.announces(BOB, pictures)
    with pytest.raises(FetchFailed, match="no node gives its manifest"):
        await mesh.directory.manifest(pictures[0])
    assert len(mesh.asked) == 1


async def test_manifest_that_is_known_is_asked_of_nobody(mesh: Mesh) -> None:
    pictures = mesh.made(BOB)
    mesh.directory.remember(*pictures)
    assert await mesh.directory.manifest(pictures[0]) == pictures[2] and not mesh.asked


async def test_versions_of_one_number_have_the_same_order_on_each_node(mesh: Mesh) -> None:
    """Two machines of a user may add a version in the same moment."""
    one, other = mesh.made(BOB), mesh.made(BOB, created_unix=int(NOW) + 1)
    for first, then in ((one, other), (other, one)):
        node = Mesh()
        for version in (first, then):
            node.directory.remember(*version)
        assert node.directory.newest_of(one[2].key) == max(one[0], other[0])


async def test_only_newer_versions_are_asked_for_and_the_newest_counts(mesh: Mesh) -> None:
    old, new = mesh.made(BOB, number=1), mesh.made(BOB, number=2)
    mesh.announces(BOB, new)
    await mesh.directory.learn()
    mesh.announces(EVE, old)
    await mesh.directory.learn()
    assert mesh.asked == [(BOB.node_id, new[0])]
    mesh.directory.remember(*old)
    assert [one for one, _ in mesh.directory.newest()] == [new[0]]
    assert mesh.directory.is_newest(new[0]) and not mesh.directory.is_newest(old[0])
    assert mesh.directory.newest_of(new[2].key) == new[0]


async def test_one_holder_that_does_not_answer_is_passed_over(mesh: Mesh) -> None:
    pictures = mesh.made(BOB)
    mesh.announces(EVE, pictures, gives=False)
    mesh.announces(BOB, pictures)
    assert await mesh.directory.manifest(pictures[0]) == pictures[2] and len(mesh.asked) == 2
    with pytest.raises(FetchFailed, match="no node that is there has it"):
        await mesh.directory.manifest(b"?" * 32)


async def test_name_means_the_data_set_of_its_user(mesh: Mesh) -> None:
    mine, bobs = mesh.made(ADA, number=1), mesh.made(BOB, number=9)
    for one in (mine, bobs):
        mesh.directory.remember(*one)
    assert await mesh.directory.resolve("pictures") == (mine[0], mine[2])
    assert await mesh.directory.resolve("ada/pictures") == (mine[0], mine[2])
    assert await mesh.directory.resolve("bob/pictures") == (bobs[0], bobs[2])
    assert await mesh.directory.resolve("eve/pictures") is None
    assert await mesh.directory.resolve("nobody/pictures") is None


async def test_data_sets_of_one_name_hide_no_other_users(mesh: Mesh) -> None:
    mesh.directory.remember(*mesh.made(ADA, number=9))
    theirs = mesh.made(BOB), mesh.made(EVE)
    mesh.announces(BOB, theirs[0])
    mesh.announces(EVE, theirs[1])
    assert await mesh.directory.resolve("bob/pictures") == (theirs[0][0], theirs[0][2])
    assert mesh.asked == [(BOB.node_id, theirs[0][0])], "only what is wanted is asked for"


async def test_name_of_a_user_whose_machines_are_away_means_what_is_kept_here(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node has started again, and has seen none of them since."""
    monkeypatch.setattr(mesh.trust, "holder", lambda name, now_unix: None)
    bobs, other = mesh.made(BOB), mesh.made(EVE)
    mesh.directory.remember(*bobs)
    assert await mesh.directory.resolve("bob/pictures") == (bobs[0], bobs[2])
    assert await mesh.directory.resolve("eve/pictures") is None
    mesh.directory.remember(other[0], other[1], msgspec.structs.replace(other[2], user="bob"))
    assert await mesh.directory.resolve("bob/pictures") is None, "two users of that name"
    monkeypatch.undo()
    assert await mesh.directory.resolve("bob/pictures") == (bobs[0], bobs[2]), "the present one has been seen"


async def test_removed_data_set_has_no_name(mesh: Mesh) -> None:
    mesh.directory.remember(*mesh.made(BOB, number=1))
    mesh.directory.remember(*mesh.made(BOB, number=2, root=None, chunk_bytes=0))
    assert await mesh.directory.resolve("bob/pictures") is None and not mesh.directory.newest()


async def test_reader_of_the_newest_version_alone_may_not_read_an_older_one(mesh: Mesh) -> None:
    bob = mesh.credentials[BOB.node_id].user_key
    old, new = mesh.made(ADA), mesh.made(ADA, number=2, readers=(Reader(bob, "bob"),))
    for one in (old, new):
        mesh.directory.remember(*one)
    assert not mesh.directory.may_read(old[0], bob) and mesh.directory.may_read(new[0], bob)


async def test_members_of_the_newest_known_group_may_read(mesh: Mesh) -> None:
    ada, bob, eve = (mesh.credentials[one.node_id].user_key for one in (ADA, BOB, EVE))
    vision = Group(bob, "bob", "vision")
    pictures = mesh.made(ADA, groups=(vision,))
    mesh.directory.remember(*pictures)

    def who() -> set[bytes]:
        return {one for one in (ada, bob, eve) if mesh.directory.may_read(pictures[0], one)}

    assert who() == {ada}, "a group that is not known lets nobody in"
    mesh.announces(BOB, mesh.group(BOB, EVE))
    await mesh.directory.learn()
    assert who() == {ada, eve}
    mesh.announces(BOB, mesh.group(BOB, BOB, number=3))
    await mesh.directory.learn()
    assert who() == {ada, bob}
    mesh.directory.remember(*mesh.group(BOB, EVE, number=2))
    assert who() == {ada, bob}, "an older version comes late"
    mesh.directory.remember(*mesh.made(BOB, "vision", 9, root=None, chunk_bytes=0, readers=(Reader(eve, "eve"),)))
    mesh.directory.remember(*mesh.group(EVE, EVE, number=9))
    assert who() == {ada, bob}, "neither a data set nor the group of another user has these members"
    mesh.directory.remember(*mesh.group(BOB, number=4))
    assert who() == {ada}, "it is removed"


async def test_name_means_a_group_or_a_data_set(mesh: Mesh) -> None:
    mesh.directory.remember(*mesh.made(BOB, "vision"))
    assert await mesh.directory.resolve_group("bob/vision") is None
    vision = mesh.group(BOB, EVE)
    mesh.announces(BOB, vision)
    assert await mesh.directory.resolve_group("bob/vision") == (vision[0], vision[2])
    assert (
        await mesh.directory.resolve("bob/group:vision") is None
        and await mesh.directory.resolve_group("vision") is None
    )
    assert [one.name for _, one in mesh.directory.newest()] == ["vision"]
    assert mesh.directory.groups() == [(vision[0], vision[2])]
    mesh.directory.remember(*mesh.group(BOB, number=2))
    assert await mesh.directory.resolve_group("bob/vision") is None, "nobody is in it"


async def test_groups_of_a_data_set_are_asked_for_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be learnt in time, but a job must not fail before that."""
    monkeypatch.setattr(directory_module, "LEARNED", 1)
    for _ in range(8):
        mesh = Mesh()
        vision = Group(mesh.credentials[BOB.node_id].user_key, "bob", "vision")
        pictures, members = mesh.made(EVE, groups=(vision,)), mesh.group(BOB, ADA)
        mesh.announces(EVE, pictures, *(mesh.made(EVE, name=f"flood{number}") for number in range(9)))
        mesh.announces(BOB, members)
        assert await mesh.directory.resolve("eve/pictures") == (pictures[0], pictures[2])
        assert mesh.directory.group(vision) == members[2] and not mesh.blamed


async def test_claims_are_those_of_other_nodes_that_are_there(mesh: Mesh) -> None:
    pictures = mesh.made(BOB)
    for node in (ADA, BOB, EVE):
        mesh.announces(node, pictures)
    mesh.absent = {EVE.node_id}
    assert mesh.directory.holders(pictures[0]) == [BOB.node_id]
    for node in (ADA, BOB, EVE):
        body = encode_announced([], [pictures[0]])
        mesh.sections[node.node_id] = SimpleNamespace(node=node.node_id, section=SECTION, body=body)
    assert mesh.directory.fetching(pictures[0]) == [BOB.node_id] and mesh.directory.holders(pictures[0]) == []
    assert mesh.directory.fetching(b"?" * 32) == []
    mesh.sections[BOB.node_id] = SimpleNamespace(node=BOB.node_id, section=SECTION, body=b"\xc1")
    assert mesh.directory.fetching(pictures[0]) == [], "an announcement that cannot be read claims nothing"
    mesh.sections[BOB.node_id] = SimpleNamespace(node=BOB.node_id, section=SECTION + "-of-later", body=body)
    assert mesh.directory.fetching(pictures[0]) == []


@pytest.mark.parametrize(("lending", "body"), [(True, None), (False, None), (False, b"\xc1")])
def test_node_lends_if_its_advert_says_so(mesh: Mesh, lending: bool, body: bytes | None) -> None:
    body = body or encode_advert(make_advert(BOB.node_id, lending=lending))
    mesh.adverts[BOB.node_id] = SimpleNamespace(body=body)
    assert mesh.directory.lends(BOB.node_id) == lending and not mesh.directory.lends(EVE.node_id)


async def test_manifests_in_memory_are_bounded_and_what_is_here_stays(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "MAX_KNOWN", 3)
    here = mesh.made(EVE, name="here")
    mesh.directory.remember(*here)
    mesh.kept.add(here[0])
    for number in range(5):
        mesh.directory.remember(*mesh.made(EVE, name=f"flood{number}"))
    assert len(mesh.directory.known) == 3 and here[0] in mesh.directory.known
    assert len(mesh.directory.newest()) == len(mesh.directory._sealed) == 3
    mesh.kept.update(mesh.directory.known)
    also = mesh.made(BOB)
    mesh.directory.remember(*also)
    assert mesh.directory.sealed(also[0]) == also[1] and len(mesh.directory.known) == 4, "nothing may be forgotten"
    newer = mesh.made(EVE, name="here", number=2)
    mesh.directory.remember(*newer)
    mesh.directory.remember(*mesh.made(BOB, name="last"))
    assert newer[0] not in mesh.directory.known and mesh.directory.with_newest(here[0]) == (here[2], here[2])


def test_what_nodes_refuse_or_lack_is_remembered_for_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_KNOWN", 3)
    known: dict[int, int] = {}
    for number in range(5):
        directory_module._remember(known, number, number)
    assert known == {2: 2, 3: 3, 4: 4}


async def test_manifests_of_one_member_displace_those_of_no_other(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten cache would begin anew, and a forgotten removal bring a data set back."""
    monkeypatch.setattr(directory_module, "MAX_KNOWN", 5)
    others = [mesh.made(ADA), mesh.made(BOB, name="gone", root=None), mesh.made(BOB)]
    for one in others:
        mesh.directory.remember(*one)
    flood = [mesh.made(EVE, name=f"flood{number}") for number in range(9)]
    for one in flood:
        mesh.directory.remember(*one)
    assert list(mesh.directory.known) == [one[0] for one in (*others, *flood[-2:])]
    for number in range(9):
        mesh.directory.remember(*mesh.group(EVE, BOB, number=number))
    assert {one[0] for one in others} < mesh.directory.known.keys() and len(mesh.directory.known) == 5
    assert len(mesh.directory._members) == 2
    for one in others:
        assert mesh.directory.newest_of(one[2].key) == one[0]


async def test_one_look_asks_for_a_bounded_number_of_manifests(mesh: Mesh) -> None:
    mesh.announces(EVE, *(mesh.made(EVE, name=f"flood{number}") for number in range(LEARNED + 5)))
    await mesh.directory.learn()
    assert len(mesh.asked) == LEARNED


async def test_each_look_asks_in_an_order_of_its_own(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node can tell which of its claims, or whose, are asked for first."""
    claimed = {BOB.node_id: [b"1", b"2"], EVE.node_id: [b"3", b"4"]}
    orders = {tuple(mesh.directory._in_turn(claimed, ())) for _ in range(100)}
    assert {order[0] for order in orders} == {b"1", b"2", b"3", b"4"}
    assert all({*order[:2]} & {b"1", b"2"} and {*order[:2]} & {b"3", b"4"} for order in orders), "one of each"


async def test_claims_of_sets_that_nobody_gives_hide_no_other(mesh: Mesh) -> None:
    false = [mesh.made(EVE, name=f"flood{number}") for number in range(2 * LEARNED)]
    true = mesh.made(BOB, name="true")
    mesh.announces(EVE, *false, gives=False)
    mesh.announces(BOB, true)
    await mesh.directory.learn()
    assert true[0] in mesh.directory.known
    for _ in range(3):
        await mesh.directory.learn()
    assert len(mesh.asked) == 2 * LEARNED + 1, "what a node does not give is not asked for again at once"


async def test_name_is_asked_for_at_nodes_of_its_user_first(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "LEARNED", 1)
    for number in range(10):
        true, false = mesh.made(BOB, number=number + 1), mesh.made(BOB, number=number + 100)
        mesh.announces(EVE, false, gives=False)
        mesh.announces(BOB, true)
        found = await mesh.directory.resolve("bob/pictures")
        assert found is not None and found[0] == true[0]
