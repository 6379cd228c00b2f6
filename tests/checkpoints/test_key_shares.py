"""Key shares: a majority restores the key, fewer reveal nothing, and wrong shares are ignored."""

from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.cipher import StateCipher
from membership.identity import Identity, encrypt_to
from mesh.checkpoints import key_shares
from mesh.checkpoints.key_shares import (
    MOST_TRIED,
    Held,
    Share,
    _interpolate,
    combine_shares,
    decode_held,
    decode_share,
    encode_held,
    encode_share,
    seal_shares,
    split_key,
)
from mesh.model.secrets import Lock
from mesh.model.spec import SpecError, decode_spec, encode_spec
from tests.consensus.worlds import make_spec

CIPHER = StateCipher(bytes(range(32)))
NODES = tuple(bytes([number]) * 32 for number in range(1, 6))


@settings(max_examples=30)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 5))
def test_only_a_majority_of_shares_restores_the_key(key: bytes, count: int) -> None:
    cipher = StateCipher(key)
    shares = list(split_key(cipher, NODES[:count]).values())
    least = count // 2 + 1
    for chosen in combinations(shares, least):
        found = combine_shares(cipher.realm, chosen)
        assert found is not None and found.key == key
    for chosen in combinations(shares, least - 1):
        assert combine_shares(cipher.realm, chosen) is None


def test_fewer_shares_than_needed_fit_every_key() -> None:
    """Each value of the key's first byte fits one of three shares, so that share alone reveals nothing."""
    first = split_key(CIPHER, NODES[:3])[NODES[0]]
    keys = {
        found
        for byte in range(256)
        for found in [_joined_first(first, Share(first.split_id, 2, 2, bytes([byte]) + bytes(31)))]
    }
    assert keys == set(range(256))


def _joined_first(one: Share, other: Share) -> int:
    return _interpolate((one, other))[0]


def test_shares_are_random() -> None:
    splits = [split_key(CIPHER, NODES[:3]) for _ in range(2)]
    values = {share.value for split in splits for share in split.values()}
    assert len(values) == 6 and CIPHER.key not in values
    for value in values:
        assert len({byte ^ of_key for byte, of_key in zip(value, CIPHER.key, strict=True)}) > 1, "each byte has its own"


def test_many_shares_of_other_splits_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []

    def interpolate(shares: Sequence[Share]) -> bytes:
        joined.append(len(shares))
        assert len(joined) < 1000, "it tries far too many"
        return _interpolate(shares)

    monkeypatch.setattr(key_shares, "_interpolate", interpolate)
    others = [share for _ in range(9) for share in split_key(StateCipher.generate(), NODES[:5]).values()]
    own = list(split_key(CIPHER, NODES[:5]).values())[:3]
    found = combine_shares(CIPHER.realm, [*others, *own])
    assert found is not None and found.key == CIPHER.key
    joined.clear()
    forged = [Share(b"l", 3, 1 + x % 5, bytes([x]) * 32) for x in range(30)]
    assert combine_shares(CIPHER.realm, forged) is None and len(joined) <= MOST_TRIED


def test_key_is_restored_despite_wrong_shares_and_shares_of_other_splits() -> None:
    shares = list(split_key(CIPHER, NODES[:5]).values())
    wrong = [msgspec.structs.replace(share, value=bytes(32)) for share in shares[:2]]
    others = list(split_key(CIPHER, NODES[:3]).values())[:1] + list(
        split_key(StateCipher.generate(), NODES[:3]).values()
    )
    found = combine_shares(CIPHER.realm, [*others, *wrong, *shares[1:4]])
    assert found is not None and found.key == CIPHER.key
    assert combine_shares(CIPHER.realm, [*others, *wrong, *shares[:2]]) is None


def test_lock_has_one_share_per_witness_readable_only_by_that_witness() -> None:
    witnesses = [Identity.generate() for _ in range(3)]
    lock = seal_shares(CIPHER, [witness.node_id for witness in witnesses], b"author")
    shares = [decode_share(who.decrypt(box)) for who, box in zip(witnesses, lock.shares, strict=True)]
    assert combine_shares(lock.realm, shares[:2]) is not None and lock.realm == CIPHER.realm
    with pytest.raises(ValueError, match="not encrypted to this node"):
        witnesses[0].decrypt(lock.shares[1])
    with pytest.raises(ValueError, match="not encrypted"):
        witnesses[0].decrypt(b"nonsense")
    with pytest.raises(ValueError, match="not a node id"):
        encrypt_to(b"\0" * 32, b"data")


@given(st.binary(max_size=120))
def test_hostile_shares_raise_only_value_errors(data: bytes) -> None:
    for decode in (decode_share, decode_held):
        try:
            decode(data)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "share",
    [
        Share(b"l", 0, 1, bytes(32)),
        Share(b"l", 1, 0, bytes(32)),
        Share(b"l", 1, 6, bytes(32)),
        Share(b"l", 4, 1, bytes(32)),
        Share(b"l", 1, 1, b""),
    ],
)
def test_impossible_shares_are_refused_and_never_combined(share: Share) -> None:
    with pytest.raises(ValueError, match="possible"):
        decode_share(encode_share(share))
    held = Held((share, *split_key(CIPHER, NODES[:1]).values()), b"")
    assert combine_shares(CIPHER.realm, decode_held(encode_held(held)).shares) is not None
    assert combine_shares(CIPHER.realm, [share]) is None


def test_answer_with_too_many_shares_is_refused() -> None:
    shares = [Share(b"l", 3, 1 + x % 5, bytes([x]) * 32) for x in range(17)]
    assert decode_held(encode_held(Held(tuple(shares[:16])))).shares == tuple(shares[:16])
    with pytest.raises(ValueError, match="length <= 16"):
        decode_held(encode_held(Held(tuple(shares))))


def test_job_with_a_malformed_lock_is_refused() -> None:
    lock = seal_shares(CIPHER, [Identity.generate().node_id for _ in range(3)], b"author")
    spec = make_spec(lock=lock)
    assert decode_spec(encode_spec(spec)) == spec
    for wrong in (Lock(b"short", lock.shares), Lock(lock.realm, lock.shares[:2]), Lock(lock.realm, (b"x" * 999,) * 3)):
        with pytest.raises(SpecError, match=r"key|lock"):
            encode_spec(make_spec(lock=wrong))
