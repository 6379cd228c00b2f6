"""Keys of data sets: who gets which, when another is drawn, and what is on the disk."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cipher import StateCipher
from membership.identity import Identity, encrypt_to
from mesh.data import keys as module
from mesh.data.directory import ASK_S
from mesh.data.keys import DataKeys, open_key, seal_key
from mesh.data.manifest import DataError, DataManifest, FetchFailed, Group, Reader
from mesh.model.spec import DataNeed
from mesh.rpc.client import PeerError

ADA, BOB, EVE = b"a" * 32, b"b" * 32, b"e" * 32
SET = b"i" * 32
NAMES = {BOB: "bob", EVE: "eve"}
VISION, OTHERS = Group(b"p" * 32, "prof", "vision"), Group(b"p" * 32, "prof", "others")
JOB = StateCipher(b"the key of the secrets of a job.")


class World:
    """A node of ada's, what it knows of members and revocations, and what other nodes answer when it asks for keys."""

    def __init__(self, root: Path) -> None:
        self.root, self.identity = root / "keys", Identity.generate()
        self.revoked, self.absent = set[bytes](), set[bytes]()
        self.seen = {
            node: SimpleNamespace(user_key=user, through=through)
            for node, user, through in (
                (b"A" * 32, ADA, ()),
                (b"B" * 32, BOB, ()),
                (b"C" * 32, BOB, (b"B" * 32,)),
                (b"E" * 32, EVE, ()),
            )
        }
        self.answers: dict[bytes, bytes | None] = {}
        self.asked: list[bytes] = []
        self.readable = True
        self.groups: dict[Group, DataManifest] = {}

    @property
    def keys(self) -> DataKeys:
        """Return the keys as a daemon that starts now has them."""
        trust: Any = SimpleNamespace(revoked=self.revoked, seen=lambda: self.seen)
        own = SimpleNamespace(node_id=b"A" * 32, user_key=ADA, user="ada")
        names = {b"A" * 32: "ada", b"B" * 32: "bob", b"C" * 32: "bob", b"E" * 32: "eve", b"F" * 32: "ada"}
        members = [
            SimpleNamespace(node_id=node, user=user, present=node not in self.absent) for node, user in names.items()
        ]
        membership: Any = SimpleNamespace(credentials=own, members=lambda: members)
        peers: Any = SimpleNamespace(call=self._call)
        directory: Any = SimpleNamespace(may_read=lambda identity, user: self.readable, group=self.groups.get)
        keys = DataKeys(self.root, self.identity, trust, membership, peers, directory)
        keys.open()
        return keys

    async def _call(self, node: bytes, method: str, path: str, timeout_s: float, answer_bytes: int) -> bytes:
        assert (method, path, answer_bytes, timeout_s) == ("GET", f"/v1/data/{SET.hex()}/key", 32, ASK_S)
        self.asked.append(node)
        if (key := self.answers.get(node)) is None:
            raise PeerError("this node does not have the key of the data set")
        return key

    def set_group(self, number: int, left_out: int, *members: bytes) -> None:
        """Let the group be known in a version of this number. `left_out`: of the newest version that left somebody out."""
        readers = tuple(Reader(one, NAMES[one]) for one in members)
        self.groups[VISION] = DataManifest(
            1, "group:vision", "prof", b"p" * 32, b"", number, 1, readers=readers, left_out=left_out
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def version(cipher: StateCipher | None) -> DataManifest:
    realm = b"" if cipher is None else cipher.realm
    return DataManifest(1, "pictures", "ada", ADA, b"", 1, 1, readers=(Reader(BOB, "bob"),), realm=realm)


def test_versions_have_one_key_until_somebody_is_to_read_no_more(world: World) -> None:
    first = world.keys.for_version("pictures", [])
    assert world.keys.for_version("pictures", []).key == first.key, "after a restart, too, or an add could not go on"
    assert world.keys.for_version("others", []).key != first.key
    shared = world.keys.for_version("pictures", [BOB])
    assert shared.key == first.key, "a new reader costs nothing"
    both = world.keys.for_version("pictures", [EVE, BOB])
    assert both.key == first.key
    without = world.keys.for_version("pictures", [EVE])
    assert without.key != first.key, "bob could have the key"
    assert world.keys.for_version("pictures", [EVE, BOB]).key == without.key
    assert world.keys.for_version("pictures", []).key not in {first.key, without.key}
    other = world.keys.for_version("pictures", [EVE])
    assert world.keys.for_version("pictures", [BOB]).key != other.key, "one has come, another is to read no more"
    drawn = world.keys.for_version("voices", [BOB])
    assert world.keys.for_version("voices", []).key != drawn.key
    for cipher in (first, without):
        known = world.keys.known(cipher.realm)
        assert known is not None and known.key == cipher.key, "older versions stay readable"


def test_another_key_is_drawn_after_a_revocation_that_concerns_a_reader(world: World) -> None:
    keys = world.keys
    first = keys.for_version("pictures", [BOB])
    world.revoked.add(b"E" * 32)
    assert keys.for_version("pictures", [BOB]).key == first.key, "eve's node never had it"
    world.revoked.add(b"B" * 32)
    second = keys.for_version("pictures", [BOB])
    assert second.key != first.key and keys.for_version("pictures", [BOB]).key == second.key
    world.revoked.add(b"?" * 32)
    third = keys.for_version("pictures", [BOB])
    assert third.key != second.key, "nobody knows whose node that was"
    world.revoked.add(b"A" * 32)
    fourth = keys.for_version("pictures", [BOB])
    assert fourth.key != third.key, "another node of the owner's"
    world.seen[b"D" * 32] = SimpleNamespace(user_key=BOB, through=(b"E" * 32,))
    assert keys.for_version("pictures", [BOB]).key != fourth.key, "bob's, if it is, came in by eve's node"


def test_another_key_is_drawn_once_a_member_of_a_group_is_left_out(world: World) -> None:
    world.set_group(5, 5, BOB)
    first = world.keys.for_version("pictures", [], [VISION])
    assert world.keys.for_version("pictures", [], [VISION]).key == first.key
    world.set_group(6, 5, BOB, EVE)
    assert world.keys.for_version("pictures", [], [VISION]).key == first.key, "a new member costs nothing"
    world.set_group(7, 7, BOB)
    second = world.keys.for_version("pictures", [], [VISION])
    assert second.key != first.key, "eve could have the key"
    assert world.keys.for_version("pictures", [BOB], [VISION]).key == second.key
    world.set_group(8, 8)
    third = world.keys.for_version("pictures", [BOB], [VISION])
    assert third.key != second.key and world.keys.for_version("pictures", [BOB], [VISION]).key == third.key


def test_member_who_came_and_left_unseen_could_have_the_key(world: World) -> None:
    world.set_group(5, 5, BOB)
    first = world.keys.for_version("pictures", [], [VISION])
    later = world.keys.for_version("voices", [BOB])
    assert world.keys.for_version("voices", [BOB], [VISION]).key == later.key
    world.set_group(9, 8, BOB)  # version 7 had eve, and version 8 left them out
    assert world.keys.for_version("pictures", [], [VISION]).key != first.key
    assert world.keys.for_version("voices", [BOB], [VISION]).key != later.key


def test_another_key_is_drawn_for_a_version_that_leaves_out_a_group(world: World) -> None:
    world.set_group(5, 5, BOB)
    world.groups[OTHERS] = msgspec.structs.replace(world.groups[VISION], name="group:others")
    first = world.keys.for_version("pictures", [BOB], [VISION])
    assert world.keys.for_version("pictures", [BOB], [VISION, OTHERS]).key == first.key
    assert world.keys.for_version("pictures", [BOB], [OTHERS]).key != first.key, "vision had others meanwhile, perhaps"


def test_revoked_node_of_a_member_could_have_the_key(world: World) -> None:
    world.set_group(5, 5, BOB)
    first = world.keys.for_version("pictures", [], [VISION])
    world.revoked.add(b"E" * 32)
    assert world.keys.for_version("pictures", [], [VISION]).key == first.key
    world.revoked.add(b"B" * 32)
    assert world.keys.for_version("pictures", [], [VISION]).key != first.key


def test_no_key_is_drawn_for_a_group_that_is_not_known(world: World) -> None:
    with pytest.raises(DataError, match="there is no group:prof/vision"):
        world.keys.for_version("pictures", [BOB], [VISION])
    assert not world.root.exists()


async def test_key_is_asked_for_at_nodes_of_members(world: World) -> None:
    cipher = StateCipher.generate()
    world.set_group(5, 5, EVE)
    world.answers = {b"E" * 32: cipher.key}
    manifest = msgspec.structs.replace(version(cipher), readers=(), groups=(VISION, OTHERS))
    assert await world.keys.cipher(SET, manifest) is not None and world.asked == [b"F" * 32, b"E" * 32]


def test_files_of_keys_open_with_the_key_of_the_node_alone(world: World) -> None:
    cipher = world.keys.for_version("pictures", [BOB])
    (path,) = world.root.iterdir()
    assert cipher.key not in path.read_bytes() and b"pictures" not in path.read_bytes() and BOB not in path.read_bytes()
    assert world.root.stat().st_mode & 0o077 == 0
    world.identity = Identity.generate()
    assert world.keys.known(cipher.realm) is None


def test_key_is_on_the_disk_before_anything_is_encrypted_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, synced, write = world.keys, list[int](), module.write_durably
    monkeypatch.setattr(module, "write_durably", lambda path, data: Path("/nowhere/key").write_bytes(data))
    with pytest.raises(FileNotFoundError):
        keys.for_version("pictures", [])
    monkeypatch.setattr(module, "write_durably", write)
    monkeypatch.setattr(os, "fsync", synced.append)
    cipher = keys.for_version("pictures", [])
    assert world.keys.known(cipher.realm) is not None and synced


def test_key_is_in_no_core_dump(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[None]()
    monkeypatch.setattr(module, "no_core_dumps", lambda: asked.append(None))
    cipher = world.keys.for_version("pictures", [])
    assert len(asked) == 1
    world.keys.lend(version(cipher), cipher.key)
    assert len(asked) == 2


@given(st.binary(max_size=200), st.booleans())
def test_damaged_file_of_a_key_is_no_key(tmp_path_factory: pytest.TempPathFactory, data: bytes, sealed: bool) -> None:
    world = World(tmp_path_factory.mktemp("node"))
    world.root.mkdir()
    name = world.root / os.urandom(32).hex()
    name.write_bytes(encrypt_to(world.identity.node_id, data) if sealed else data)
    assert world.keys.known(bytes.fromhex(name.name)) is None


def test_file_of_another_key_is_not_taken_for_it(world: World) -> None:
    cipher = world.keys.for_version("pictures", [])
    (path,) = world.root.iterdir()
    path.rename(path.with_name("ab" * 32))
    assert world.keys.known(cipher.realm) is None and world.keys.known(b"\xab" * 32) is None
    os.utime(world.root / ("ab" * 32), (1, 1))
    (world.root / ("cd" * 32)).mkdir()
    os.utime(world.root / ("cd" * 32), (1, 1))
    other = world.keys.for_version("pictures", [])
    assert world.keys.known(other.realm) is not None, "what is wrong hides no other"


@pytest.mark.parametrize("wrong", [b"w" * 32, b"short"])
async def test_reader_asks_the_owner_and_other_readers_and_keeps_what_it_gets(world: World, wrong: bytes) -> None:
    cipher = StateCipher.generate()
    world.answers = {b"F" * 32: wrong, b"B" * 32: cipher.key, b"E" * 32: cipher.key}
    found = await world.keys.cipher(SET, version(cipher))
    assert found is not None and found.key == cipher.key
    assert world.asked == [b"F" * 32, b"B" * 32], "the owner's, whose answer is another key; then a reader's"
    world.asked.clear()
    again = await world.keys.cipher(SET, version(cipher))
    assert again is not None and again.key == cipher.key and world.asked == []
    assert await world.keys.cipher(SET, version(None)) is None


async def test_few_nodes_that_are_there_are_asked_for_a_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cipher = StateCipher.generate()
    world.absent = {b"F" * 32}
    with pytest.raises(FetchFailed):
        await world.keys.cipher(SET, version(cipher))
    assert world.asked == [b"B" * 32, b"C" * 32]
    monkeypatch.setattr(module, "SOURCES", 1)
    with pytest.raises(FetchFailed):
        await world.keys.cipher(SET, version(cipher))
    assert world.asked[2:] == [b"B" * 32]


async def test_key_that_nobody_gives_and_one_of_no_reader(world: World) -> None:
    with pytest.raises(FetchFailed, match="no node that is there gives the key of ada/pictures"):
        await world.keys.cipher(SET, version(StateCipher.generate()))
    world.asked.clear()
    world.readable = False
    with pytest.raises(FetchFailed, match="is encrypted, and not for ada"):
        await world.keys.cipher(SET, version(StateCipher.generate()))
    assert not world.asked


async def test_keys_of_others_are_bounded_and_own_ones_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GIVEN", 2)
    keys, ciphers = world.keys, [StateCipher.generate() for _ in range(4)]
    own = keys.for_version("pictures", [])
    for cipher in ciphers:
        world.answers[b"F" * 32] = cipher.key
        await keys.cipher(SET, version(cipher))
        assert keys.known(cipher.realm) is not None
    assert [keys.known(one.realm) is not None for one in ciphers] == [False, False, True, True]
    assert keys.known(own.realm) is not None and len(list(world.root.iterdir())) == 3
    newer, older = sorted(cipher.realm for cipher in ciphers[2:])
    for number, realm in enumerate((older, newer)):
        os.utime(world.root / realm.hex(), (number, number))
    keys, world.answers[b"F" * 32] = world.keys, ciphers[0].key
    await keys.cipher(SET, version(ciphers[0]))
    assert keys.known(newer) is not None and keys.known(older) is None, "the oldest goes"


def test_key_that_a_job_brings_is_here_while_its_guests_are(world: World) -> None:
    cipher, other = StateCipher.generate(), StateCipher.generate()
    keys, need = world.keys, DataNeed("ada/pictures", SET)
    brought = seal_key(JOB, need, cipher)
    assert cipher.key not in brought.key and open_key(JOB, brought) == cipher.key
    one, two = (keys.lend(version(cipher), open_key(JOB, brought)) for _ in range(2))
    keys.give_back(one)
    assert keys.known(cipher.realm) is not None
    keys.give_back(two)
    assert keys.known(cipher.realm) is None and not world.root.exists(), "it was in memory alone"
    for wrong in (other.key, b"short"):
        with pytest.raises(FetchFailed, match="it is not the key of ada/pictures"):
            keys.lend(version(cipher), wrong)
    for job, need in ((other, brought), (None, brought), (JOB, DataNeed("ada/x", b"x" * 32, key=brought.key))):
        with pytest.raises(FetchFailed, match="cannot be opened"):
            open_key(job, need)


@given(st.binary(max_size=100))
def test_hostile_key_of_a_job_is_refused(data: bytes) -> None:
    with pytest.raises(FetchFailed):
        open_key(JOB, DataNeed("ada/pictures", SET, key=data))
