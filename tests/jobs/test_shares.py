"""A key in shares: a majority of them gives it, fewer tell nothing, and wrong ones do no harm."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.vault import Vault
from membership.identity import Identity, sealed_to
from mesh.jobs.lock import Lock
from mesh.jobs.shares import (
    Held,
    Share,
    decode_held,
    decode_share,
    encode_held,
    encode_share,
    locked,
    opened,
    shared,
)
from mesh.jobs.spec import SpecError, decode_spec, encode_spec
from tests.jobs.worlds import make_spec

VAULT = Vault(bytes(range(32)))
NODES = tuple(bytes([number]) * 32 for number in range(1, 8))


@settings(max_examples=30)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 7))
def test_any_majority_opens_and_any_fewer_do_not(key: bytes, count: int) -> None:
    vault = Vault(key)
    shares = list(shared(vault, NODES[:count]).values())
    least = count // 2 + 1
    for chosen in combinations(shares, least):
        found = opened(vault.realm, chosen)
        assert found is not None and found.key == key
    for chosen in combinations(shares, least - 1):
        assert opened(vault.realm, chosen) is None


def test_fewer_shares_than_needed_fit_every_key() -> None:
    """So they tell nothing of it: with one of three, each value of the key's first byte has a polynomial through it."""
    first = shared(VAULT, NODES[:3])[NODES[0]]
    keys = {
        found
        for byte in range(256)
        for found in [_joined_first(first, Share(first.lot, 2, 2, bytes([byte]) + bytes(31)))]
    }
    assert keys == set(range(256))


def _joined_first(one: Share, other: Share) -> int:
    from mesh.jobs.shares import _joined

    return _joined((one, other))[0]


def test_wrong_shares_and_those_of_another_lot_do_no_harm() -> None:
    shares = list(shared(VAULT, NODES[:5]).values())
    wrong = [msgspec.structs.replace(share, value=bytes(32)) for share in shares[:2]]
    others = list(shared(VAULT, NODES[:3]).values())[:1] + list(shared(Vault.fresh(), NODES[:3]).values())
    found = opened(VAULT.realm, [*others, *wrong, *shares[1:4]])
    assert found is not None and found.key == VAULT.key
    assert opened(VAULT.realm, [*others, *wrong, *shares[:2]]) is None


def test_a_lock_has_a_share_for_each_witness_that_it_alone_can_read() -> None:
    witnesses = [Identity.generate() for _ in range(3)]
    lock = locked(VAULT, [witness.node_id for witness in witnesses])
    shares = [decode_share(who.unsealed(box)) for who, box in zip(witnesses, lock.shares, strict=True)]
    assert opened(lock.realm, shares[:2]) is not None and lock.realm == VAULT.realm
    with pytest.raises(ValueError, match="not sealed to this node"):
        witnesses[0].unsealed(lock.shares[1])
    with pytest.raises(ValueError, match="not sealed"):
        witnesses[0].unsealed(b"nonsense")
    with pytest.raises(ValueError, match="not a node id"):
        sealed_to(b"\0" * 32, b"data")


@given(st.binary(max_size=120))
def test_hostile_shares_are_one_kind_of_error(data: bytes) -> None:
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
        Share(b"l", 1, 256, bytes(32)),
        Share(b"l", 1, 1, b""),
    ],
)
def test_impossible_shares_are_refused_and_never_put_together(share: Share) -> None:
    with pytest.raises(ValueError, match="possible"):
        decode_share(encode_share(share))
    held = Held((share, *shared(VAULT, NODES[:1]).values()), b"")
    assert opened(VAULT.realm, decode_held(encode_held(held)).shares) is not None
    assert opened(VAULT.realm, [share]) is None


def test_a_job_cannot_have_a_lock_that_fits_no_witnesses() -> None:
    lock = locked(VAULT, [Identity.generate().node_id for _ in range(3)])
    spec = make_spec(lock=lock)
    assert decode_spec(encode_spec(spec)) == spec
    for wrong in (Lock(b"short", lock.shares), Lock(lock.realm, lock.shares[:2]), Lock(lock.realm, (b"x" * 999,) * 3)):
        with pytest.raises(SpecError, match=r"key|lock"):
            encode_spec(make_spec(lock=wrong))
