"""Manifests of data sets: only their owners make them, and hostile ones are refused."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cipher import StateCipher
from ckptstore.dataset import MAX_BYTES, MAX_ENTRIES, Link
from membership.records import MAX_BODY_BYTES
from membership.trust import USER, Credentials, User
from mesh.data.manifest import (
    BLOCK_BYTES,
    DataError,
    DataManifest,
    Group,
    Held,
    Reader,
    check_name,
    check_owner,
    decode_announced,
    decode_manifest,
    encode_announced,
    encode_manifest,
    statement,
)

ADA, EVE, NODE = b"a" * 32, b"e" * 32, b"n" * 32
GOOD = DataManifest(1, "pictures", "ada", ADA, b"chain", 5, 1000, Link(b"r" * 32, 100, 5, 1), 105)
CIPHER = StateCipher(b"the key of a private data set..!")
PROOF = CIPHER.prove(statement(GOOD.key))
PRIVATE = msgspec.structs.replace(GOOD, realm=CIPHER.realm, proof=PROOF)
VISION = Group(EVE, "eve", "vision")
GROUP = DataManifest(1, "group:vision", "ada", ADA, b"chain", 5, 1000, readers=(Reader(EVE, "eve"),), left_out=5)
SIGNER = Credentials(NODE, "node1", "ada", ADA, 0, (USER,), False, b"", 500, 2000)


def test_empty_files_take_space() -> None:
    """Twenty million of them would fill a disk with a data set of no bytes."""
    assert msgspec.structs.replace(GOOD, root=Link(b"r" * 32, 100, 0, 20_000_000)).tree_bytes > 80e9
    assert GOOD.tree_bytes == GOOD.size + BLOCK_BYTES


def test_manifest_survives_its_encoding() -> None:
    named = msgspec.structs.replace(GOOD, groups=(VISION,) * 32)
    for manifest in (GOOD, PRIVATE, GROUP, named, msgspec.structs.replace(GROUP, readers=())):
        assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.sampled_from([CIPHER.realm, b""]) | st.binary(max_size=40), st.just(PROOF) | st.binary(max_size=70))
def test_realm_of_any_bytes_is_that_of_its_author_or_is_refused(realm: bytes, proof: bytes) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.replace(GOOD, realm=realm, proof=proof))
    if len(proof) <= len(PROOF) and (not realm or (realm, proof) == (CIPHER.realm, PROOF)):
        assert decode_manifest(data).realm == realm
    else:
        with pytest.raises(DataError):
            decode_manifest(data)


@pytest.mark.parametrize("changes", [{"user_key": EVE, "user": "eve"}, {"name": "other"}, {"proof": b""}])
def test_key_of_another_data_set_is_not_named(changes: dict[str, object]) -> None:
    """Who has the key gives it to the readers whom a manifest names. All members know the realms of others."""
    with pytest.raises(DataError, match="names a key that its author does not have"):
        decode_manifest(msgspec.msgpack.encode(msgspec.structs.replace(PRIVATE, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"name": "../etc"},
        {"name": "a/b"},
        {"name": "Pictures"},
        {"name": "a\0"},
        {"name": ""},
        {"name": "n" * 65},
        {"user": "ada/eve"},
        {"user": ""},
        {"root": Link(b"r" * 31, 100, 5, 1)},
        {"root": Link(b"r" * 32, 1 << 30, 5, 1)},
        {"root": Link(b"r" * 32, 100, MAX_BYTES + 1, 1)},
        {"root": Link(b"r" * 32, 100, 5, MAX_ENTRIES + 1)},
        {"chunk_bytes": MAX_BYTES + 1024 * MAX_ENTRIES + 1},
        {"user_key": b"short"},
        {"readers": tuple(Reader(ADA, "x") for _ in range(257))},
        {"readers": (Reader(ADA, "x" * 65),)},
        {"number": -1},
        {"realm": b"r" * 31},
        {"realm": b"r" * 33},
        {"realm": CIPHER.realm, "proof": PROOF, "everybody": True},
        {"cache": True, "everybody": True},
        {"cache": True, "readers": (Reader(EVE, "eve"),)},
        {"realm": CIPHER.realm, "proof": PROOF, "root": None},
        {"cache": True, "groups": (VISION,)},
        {"groups": (VISION,) * 33},
        {"groups": (Group(b"short", "eve", "vision"),)},
        {"groups": (Group(EVE, "eve", "group:vision"),)},
        {"groups": (Group(EVE, "eve", "../etc"),)},
        {"groups": (Group(EVE, "e/ve", "vision"),)},
        {"groups": (Group(EVE, "e" * 65, "vision"),)},
        {"left_out": 1},
        {"number": 1 << 63},
    ],
)
def test_hostile_manifest_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DataError):
        decode_manifest(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "group:"},
        {"name": "group:group:vision"},
        {"name": "group:Vision"},
        {"name": "group:" + "n" * 65},
        {"root": GOOD.root},
        {"chunk_bytes": 1},
        {"everybody": True},
        {"cache": True, "readers": ()},
        {"realm": CIPHER.realm, "proof": CIPHER.prove(statement(GROUP.key))},
        {"proof": PROOF},
        {"groups": (VISION,)},
        {"left_out": 6},
        {"left_out": 1 << 63},
        {"number": 1 << 63},
        {"readers": tuple(Reader(EVE, "eve") for _ in range(257))},
        {"readers": (Reader(EVE, "x" * 65),)},
        {"members": [EVE]},
    ],
)
def test_hostile_group_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DataError):
        decode_manifest(msgspec.msgpack.encode(msgspec.to_builtins(GROUP, builtin_types=(bytes,)) | changes))


def test_group_and_data_set_of_one_name_are_two_things() -> None:
    assert GROUP.key == Group(ADA, "whoever", "vision").key != (ADA, "vision") and GROUP.is_group and not GROUP.removes
    removal = msgspec.structs.replace(GOOD, root=None, chunk_bytes=0)
    assert removal.removes and not removal.is_group and not GOOD.removes


def test_manifest_without_groups_is_as_it_was() -> None:
    """Manifests of releases without groups keep their bytes, and so their ids."""
    fields = {"version", "name", "user", "user_key", "chain", "number", "created_unix", "root", "chunk_bytes"}
    assert msgspec.msgpack.decode(encode_manifest(GOOD)).keys() == fields


def test_manifest_may_reach_its_bounds() -> None:
    most = {"chunk_bytes": MAX_BYTES + 1024 * MAX_ENTRIES, "readers": (Reader(EVE, "x" * 64),)}
    manifest = msgspec.structs.replace(GOOD, **most)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    cache = msgspec.structs.replace(GOOD, cache=True)
    assert decode_manifest(encode_manifest(cache)) == cache
    removed = msgspec.structs.replace(GOOD, root=None)
    assert decode_manifest(encode_manifest(removed)) == removed and removed.size == removed.tree_bytes == 0
    with pytest.raises(DataError):
        encode_manifest(msgspec.structs.replace(GOOD, version=2))


def test_content_is_for_its_owner_its_readers_or_everybody() -> None:
    assert GOOD.may_read(ADA) and not GOOD.may_read(EVE)
    assert msgspec.structs.replace(GOOD, readers=(Reader(EVE, "eve"),)).may_read(EVE)
    assert msgspec.structs.replace(GOOD, everybody=True).may_read(EVE)
    named = msgspec.structs.replace(GOOD, groups=(Group(ADA, "ada", "empty"), VISION))
    members = {VISION: {NODE}}
    assert named.may_read(NODE, lambda group: members.get(group, set())) and not named.may_read(NODE)
    assert not named.may_read(EVE, lambda group: members.get(group, set())), "who keeps a group need not be in it"


def test_other_bytes_are_refused() -> None:
    more = msgspec.msgpack.encode({**msgspec.to_builtins(GOOD, builtin_types=(bytes,)), "executable": True})
    for data in (b"", b"\xc0", b"{}", more):
        with pytest.raises(DataError):
            decode_manifest(data)
    with pytest.raises(DataError, match="not a data set's manifest"):
        decode_manifest(bytes(64 << 10))
    with pytest.raises(DataError, match="too long"):
        decode_manifest(bytes((64 << 10) + 1))
    for data in (b"", b"\xc0", b"\x81", msgspec.msgpack.encode({"sets": 5}), msgspec.msgpack.encode({"sets": [[1]]})):
        with pytest.raises(DataError):
            decode_announced(data)


Change = Callable[[], tuple[DataManifest, bytes, Credentials, User | None]]
REFUSED: dict[str, Change] = {
    "by a node that the chain does not name": lambda: (GOOD, EVE, SIGNER, None),
    "by a node of another user": lambda: (GOOD, NODE, msgspec.structs.replace(SIGNER, user_key=EVE), None),
    "in another's name": lambda: (msgspec.structs.replace(GOOD, user="eve"), NODE, SIGNER, None),
    "with another's key": lambda: (msgspec.structs.replace(GOOD, user_key=EVE), NODE, SIGNER, None),
    "by one who may only lend": lambda: (GOOD, NODE, msgspec.structs.replace(SIGNER, roles=("provider",)), None),
    "before its certificate": lambda: (msgspec.structs.replace(GOOD, created_unix=100), NODE, SIGNER, None),
    "after its certificate": lambda: (msgspec.structs.replace(GOOD, created_unix=9000), NODE, SIGNER, None),
    "with a name that is another's now": lambda: (GOOD, NODE, SIGNER, User("ada", EVE, 1)),
}


@pytest.mark.parametrize("made", REFUSED.values(), ids=REFUSED.keys())
def test_only_a_node_of_the_owner_signs(made: Change) -> None:
    check_owner(GOOD, NODE, SIGNER, User("ada", ADA, 0))
    check_owner(GOOD, NODE, SIGNER, None)
    with pytest.raises(DataError):
        check_owner(*made())


def test_clocks_of_an_owners_nodes_may_differ_by_two_minutes() -> None:
    for created, taken in ((379, False), (380, True), (2120, True), (2121, False)):
        manifest = msgspec.structs.replace(GOOD, created_unix=created)
        if taken:
            check_owner(manifest, NODE, SIGNER, None)
            continue
        with pytest.raises(DataError, match="was not valid when the data set was made"):
            check_owner(manifest, NODE, SIGNER, None)


def test_proof_of_a_key_is_about_the_owner_and_the_name_of_a_data_set() -> None:
    assert statement((b"k" * 32, "pictures")) == b"data set " + b"k" * 32 + b"pictures", "other nodes check it"


def test_announcement_is_bounded() -> None:
    rows = [Held(bytes([n]) * 32, ADA, "ada", f"set{n}", 2**50) for n in range(200)]
    body = encode_announced(rows)
    assert len(decode_announced(body).sets) == 96 and len(body) <= MAX_BODY_BYTES
    coming = [bytes([n]) * 32 for n in range(9)]
    longest = encode_announced([msgspec.structs.replace(row, user="u" * 64, name="n" * 64) for row in rows], coming)
    assert 16_000 < len(longest) <= MAX_BODY_BYTES and len(decode_announced(longest).sets) < 96
    assert decode_announced(longest).coming == tuple(coming[:8])
    groups = [msgspec.structs.replace(row, name=f"group:{row.name}") for row in rows]
    long = [msgspec.structs.replace(row, user="u" * 64, name="group:" + "n" * 64) for row in rows]
    for some in (groups, long):
        found = decode_announced(encode_announced(some, coming, some))
        assert found.groups == tuple(some[:32]) and 32 < len(found.sets) <= 96
    for bad in (groups[:33], [msgspec.structs.replace(groups[0], name="group:../x")], [[b"x"]]):
        with pytest.raises(DataError):
            decode_announced(msgspec.msgpack.encode({"groups": bad}))
    for many in (coming, [b"x"]):
        with pytest.raises(DataError):
            decode_announced(msgspec.msgpack.encode({"coming": many}))
    for bad in (msgspec.structs.replace(rows[0], name="../x"), msgspec.structs.replace(rows[0], id=b"x")):
        with pytest.raises(DataError):
            decode_announced(encode_announced([bad]))


def test_names() -> None:
    for name in ("a", "imagenet-1k", "v1.2_x"):
        assert check_name(name) == name
    for name in ("A", "-a", "a-", "a b", "a/b", "ä", "a\n", "."):
        with pytest.raises(DataError):
            check_name(name)
