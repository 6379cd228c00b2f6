"""Key shares: the key of what a job saves is split so that a majority of its witnesses can restore it (Shamir 1979, CACM).

The lease holder has the lease from such a majority, and can collect their shares. A single witness, or a node that only holds
checkpoints, learns nothing. Arithmetic is in GF(256), byte by byte, with the polynomial of AES.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations, islice
from typing import Annotated

import msgspec

from ckptstore.cipher import KEY_BYTES, StateCipher
from membership.identity import NodeId, encrypt_to
from membership.lengths import Id
from membership.malformed import MALFORMED
from mesh.model.secrets import Lock
from mesh.model.spec import MAX_WITNESSES

SPLIT_ID_BYTES = 8
MAX_SHARES = 16  # in one answer; an honest node has one of the job's description and `keys.SPLITS_KEPT` (own choice)
MOST_TRIED = 64  # combinations tried if some shares are wrong (own choice)


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The value at `x` of one key's polynomials. Shares with the same `split_id` fit together, and `threshold` of them give
    the key.
    """

    split_id: Id
    threshold: int
    x: int
    value: Id


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A node's part of a job's key: shares of it, or all of it."""

    shares: Annotated[tuple[Share, ...], msgspec.Meta(max_length=MAX_SHARES)] = ()
    key: Id = b""


def seal_shares(cipher: StateCipher, witnesses: Sequence[NodeId], author: bytes) -> Lock:
    """Return the lock of a key for a job of this author (`JobSpec.author`)."""
    sealed = (encrypt_to(node, encode_share(share)) for node, share in split_key(cipher, witnesses).items())
    return Lock(cipher.realm, tuple(sealed), cipher.prove(author))


def split_key(cipher: StateCipher, nodes: Sequence[NodeId]) -> dict[NodeId, Share]:
    """Return a share for each node; any majority of them gives the key."""
    split_id, threshold = os.urandom(SPLIT_ID_BYTES), len(nodes) // 2 + 1
    polynomials = [bytes([byte]) + os.urandom(threshold - 1) for byte in cipher.key]
    return {
        node: Share(split_id, threshold, x, bytes(_evaluate(polynomial, x) for polynomial in polynomials))
        for x, node in enumerate(nodes, 1)
    }


def combine_shares(realm: bytes, shares: Iterable[Share]) -> StateCipher | None:
    """Return the key of this realm, if enough of these shares are correct."""
    splits: dict[tuple[bytes, int], set[Share]] = defaultdict(set)
    for share in shares:
        if _possible(share):
            splits[share.split_id, share.threshold].add(share)
    for (_, threshold), found in splits.items():
        ordered = sorted(found, key=lambda share: share.x)
        for chosen in islice(combinations(ordered, threshold), MOST_TRIED):
            cipher = StateCipher(_interpolate(chosen))
            if cipher.realm == realm:
                return cipher
    return None


def encode_share(share: Share) -> bytes:
    return msgspec.msgpack.encode(share)


def decode_share(data: bytes) -> Share:
    """Decode a share; ValueError if malformed."""
    try:
        share = _share_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not a share of a key: {error}") from error
    if not _possible(share):
        raise ValueError("not a possible share of a key")
    return share


def encode_held(held: Held) -> bytes:
    return msgspec.msgpack.encode(held)


def decode_held(data: bytes) -> Held:
    """Decode what a node has of a key; ValueError if malformed."""
    try:
        return _held_decoder.decode(data)
    except MALFORMED as error:
        raise ValueError(f"not shares of a key: {error}") from error


_share_decoder = msgspec.msgpack.Decoder(Share)
_held_decoder = msgspec.msgpack.Decoder(Held)


def _possible(share: Share) -> bool:
    """Tell whether a witness group can have such a share. A split with a high threshold would take hours to try."""
    majority = MAX_WITNESSES // 2 + 1
    return 1 <= share.threshold <= majority and 1 <= share.x <= MAX_WITNESSES and len(share.value) == KEY_BYTES


def _interpolate(shares: Sequence[Share]) -> bytes:
    """Interpolate the polynomials at 0 (Lagrange)."""
    xs = [share.x for share in shares]
    weights = [reduce(_times, (_times(other, _inverse(other ^ x)) for other in xs if other != x), 1) for x in xs]
    return bytes(
        reduce(
            lambda total, one: total ^ one, (_times(w, s.value[place]) for w, s in zip(weights, shares, strict=True))
        )
        for place in range(KEY_BYTES)
    )


def _evaluate(polynomial: bytes, x: int) -> int:
    return reduce(lambda total, coefficient: _times(total, x) ^ coefficient, reversed(polynomial), 0)


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _inverse(a: int) -> int:
    return reduce(_times, [a] * 254)  # the multiplicative group has 255 elements
