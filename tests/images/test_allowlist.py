"""The mesh's list of images: one list of many signers' entries, whatever is said and in whatever order it is heard."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh.images.allowlist import (
    ANYTHING,
    MAX_ALIAS,
    MAX_COUNTER,
    MAX_LIST_BYTES,
    MAX_PERSONAL,
    Entry,
    Image,
    ListError,
    SignedList,
    amended,
    check_alias,
    decode_list,
    encode_list,
    image_hash,
    merged,
)

SIGNERS = [bytes([n]) * 32 for n in range(1, 5)]
ALIASES = ["pytorch", "jax:2", "lab/tool", "@ada/tool", "@ada@uni.edu/tool"]

images = st.builds(Image, st.binary(min_size=32, max_size=32), st.sampled_from([b"", b"m" * 32]), st.integers(0, 2**40))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    allowed = draw(st.booleans())
    return Entry(
        draw(st.sampled_from(ALIASES)),
        draw(st.integers(0, 5) | st.just(MAX_COUNTER)),
        allowed,
        draw(images) if allowed else None,
    )


lists = st.builds(
    SignedList, st.integers(0, 100), st.lists(entries(), max_size=3, unique_by=lambda entry: entry.alias).map(tuple)
)
meshes = st.dictionaries(st.sampled_from(SIGNERS), lists)


@given(meshes)
def test_merge_is_order_independent(mesh: dict[bytes, SignedList]) -> None:
    for order in permutations(mesh):
        assert merged({signer: mesh[signer] for signer in order}) == merged(mesh)


@given(meshes)
def test_newest_entry_of_alias_wins(mesh: dict[bytes, SignedList]) -> None:
    found = merged(mesh)
    said = [(entry, signer) for signer, signed in mesh.items() for entry in signed.entries]
    assert set(found) == {entry.alias for entry, _ in said}
    for entry, signer in said:
        holds = found[entry.alias]
        assert (entry.counter, signer) <= (holds.entry.counter, holds.signer)


@given(meshes, st.sampled_from(SIGNERS), st.sampled_from(ALIASES), images, st.booleans())
def test_amended_entry_wins(mesh: dict[bytes, SignedList], me: bytes, alias: str, image: Image, allowed: bool) -> None:
    before = merged(mesh)
    if alias in before and before[alias].entry.counter >= MAX_COUNTER:
        with pytest.raises(ListError, match="revoke its signer"):
            amended(me, mesh, alias, image, allowed, 7)
        return
    own = amended(me, mesh, alias, image, allowed, 7)
    after = merged({**mesh, me: own})
    assert own.number > mesh.get(me, SignedList(0)).number and decode_list(encode_list(own)) == own
    if allowed:
        assert after[alias].signer == me and after[alias].entry.image == image
    else:
        assert alias not in after or not after[alias].entry.allowed
    untouched = set(ALIASES) - {alias}
    assert {name: after.get(name) for name in untouched} == {name: before.get(name) for name in untouched}


@given(st.binary(max_size=400))
def test_malformed_list_is_refused(data: bytes) -> None:
    try:
        found = decode_list(data)
    except ListError:
        return
    assert encode_list(found)


@given(
    st.builds(
        SignedList,
        st.integers(0, 9),
        st.lists(
            st.builds(
                Entry,
                st.text(max_size=4)
                | st.sampled_from([*ALIASES, ANYTHING, "../x", "a b", "sha256:" + "0" * 64, "x" * 200]),
                st.integers(0, 9),
                st.booleans(),
                st.none() | st.builds(Image, st.binary(max_size=40), st.binary(max_size=40)),
            ),
            max_size=4,
        ).map(tuple),
    )
)
def test_forged_list_has_only_valid_entries(signed: SignedList) -> None:
    try:
        found = decode_list(msgspec.msgpack.encode(signed))
    except ListError:
        return
    assert len({entry.alias for entry in found.entries}) == len(found.entries)
    for entry in found.entries:
        assert entry.alias == ANYTHING or check_alias(entry.alias)
        assert (entry.image is None) == (not entry.allowed or entry.alias == ANYTHING)
        assert entry.image is None or len(entry.image.config) == 32


JAX, MINE = Entry("jax", 1, True, Image(b"i" * 32)), Entry("@ada/jax", 1, True, Image(b"i" * 32))


def personal(count: int) -> tuple[Entry, ...]:
    return tuple(msgspec.structs.replace(MINE, alias=f"@ada/x{number}") for number in range(count))


@pytest.mark.parametrize(
    "signed",
    [
        SignedList(1, (Entry("jax", 1, True),)),
        SignedList(1, (msgspec.structs.replace(JAX, allowed=False),)),
        SignedList(1, (msgspec.structs.replace(JAX, alias=ANYTHING),)),
        SignedList(1, (msgspec.structs.replace(JAX, alias="../x"),)),
        SignedList(1, (msgspec.structs.replace(JAX, alias="x" * (MAX_ALIAS + 1)),)),
        SignedList(1, (msgspec.structs.replace(JAX, image=Image(b"i" * 31)),)),
        SignedList(1, (msgspec.structs.replace(JAX, image=Image(b"i" * 32, b"m" * 31)),)),
        SignedList(1, (JAX, JAX)),
        SignedList(1, personal(MAX_PERSONAL + 1)),
        SignedList(1, (JAX, MINE), personal=True),
    ],
)
def test_invalid_list_is_neither_read_nor_signed(signed: SignedList) -> None:
    with pytest.raises(ListError):
        decode_list(msgspec.msgpack.encode(signed))
    with pytest.raises(ListError):
        encode_list(signed)


@pytest.mark.parametrize(
    "signed",
    [
        SignedList(1, (Entry(ANYTHING, 1, True), Entry("jax", 2, False))),
        SignedList(1, (msgspec.structs.replace(JAX, alias="x" * MAX_ALIAS, image=Image(b"i" * 32, b"m" * 32)),)),
        SignedList(1, personal(MAX_PERSONAL), personal=True),
        SignedList(1, (JAX, MINE)),
    ],
)
def test_valid_list_is_read_as_it_was_signed(signed: SignedList) -> None:
    assert decode_list(encode_list(signed)) == signed


def test_list_for_an_own_image_has_the_time_as_its_number() -> None:
    me = SIGNERS[0]
    first = amended(me, {}, MINE.alias, MINE.image, True, 700)
    assert (first.number, first.entries[0].counter, first.personal) == (700, 700, True)
    later = amended(me, {me: first}, MINE.alias, MINE.image, True, 5)
    assert (later.number, later.entries[0].counter) == (701, 701), "also with a clock that was set back"
    assert amended(me, {}, "jax", JAX.image, True, 700).entries[0].counter == 1
    newest = SignedList(1, (msgspec.structs.replace(JAX, counter=MAX_COUNTER - 1),))
    assert amended(me, {me: newest}, "jax", JAX.image, True, 1).entries[0].counter == MAX_COUNTER
    with pytest.raises(ListError, match="revoke its signer"):
        amended(me, {me: SignedList(MAX_COUNTER)}, "jax", JAX.image, True, 1)


def test_list_holds_sixty_images() -> None:
    mesh: dict[bytes, SignedList] = {}
    with pytest.raises(ListError, match="mesh image deny ALIAS --mesh"):
        for number in range(1000):
            image = Image(number.to_bytes(32, "big"), b"m" * 32, 2**35)
            mesh[SIGNERS[0]] = amended(SIGNERS[0], mesh, f"lab/image-with-a-long-name-{number}:v1", image, True, 1)
    assert 60 <= len(mesh[SIGNERS[0]].entries) < 1000
    assert len(encode_list(mesh[SIGNERS[0]])) <= MAX_LIST_BYTES


def test_denial_is_kept_only_against_others() -> None:
    one, two = SIGNERS[:2]
    image = Image(b"i" * 32)
    mesh = {one: amended(one, {}, "jax", image, True, 1)}
    assert amended(one, mesh, "jax", None, False, 1).entries == ()
    mesh[two] = amended(two, mesh, "jax", None, False, 1)
    assert not merged(mesh)["jax"].entry.allowed
    mesh[one] = amended(one, mesh, "jax", image, True, 1)
    assert merged(mesh)["jax"].entry.image == image


@pytest.mark.parametrize("alias", ["", "-x", "a b", "x/", "a\n", "ü", "x" * 129, "sha256:" + "a" * 64, "*", "a\0b"])
def test_invalid_alias_is_refused(alias: str) -> None:
    with pytest.raises(ListError):
        check_alias(alias)


@given(st.text(max_size=80))
def test_hash_is_distinguished_from_name(text: str) -> None:
    assume(not text.startswith("sha256:"))
    assert image_hash(text) is None
    assert image_hash("sha256:" + "0a" * 32) == b"\n" * 32
    assert image_hash("sha256:" + "0A" * 32) is None
