"""Who can open what a job saves: its key is cut into shares, of which a majority of its witnesses is needed (Shamir, CACM 1979).

Whoever holds the job's lease has it from such a majority, and can collect their shares; one witness alone, or a node that only
keeps checkpoints, learns nothing. Arithmetic is in GF(256), byte by byte, with AES's polynomial.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations, islice

import msgspec

from ckptstore.decoding import decoded
from ckptstore.vault import KEY_BYTES, Vault
from membership.identity import NodeId, sealed_to
from mesh.jobs.lock import Lock

LOT_BYTES = 8
MOST_TRIED = 64  # ways to put shares together, should some be wrong; ours


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The value at `x` of one key's polynomials; shares of one `lot` fit together, `threshold` of them give the key."""

    lot: bytes
    threshold: int
    x: int
    value: bytes


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of a job's key: shares of it, or all of it."""

    shares: tuple[Share, ...] = ()
    key: bytes = b""


def locked(vault: Vault, witnesses: Sequence[NodeId]) -> Lock:
    sealed = (sealed_to(node, encode_share(share)) for node, share in shared(vault, witnesses).items())
    return Lock(vault.realm, tuple(sealed))


def shared(vault: Vault, nodes: Sequence[NodeId]) -> dict[NodeId, Share]:
    """A share for each, any majority of which gives the key."""
    lot, threshold = os.urandom(LOT_BYTES), len(nodes) // 2 + 1
    polynomials = [bytes([byte]) + os.urandom(threshold - 1) for byte in vault.key]
    return {
        node: Share(lot, threshold, x, bytes(_evaluate(polynomial, x) for polynomial in polynomials))
        for x, node in enumerate(nodes, 1)
    }


def opened(realm: bytes, shares: Iterable[Share]) -> Vault | None:
    """The vault of this realm, if enough of these shares are right."""
    lots: dict[tuple[bytes, int], set[Share]] = defaultdict(set)
    for share in shares:
        if _possible(share):
            lots[share.lot, share.threshold].add(share)
    for (_, threshold), found in lots.items():
        ordered = sorted(found, key=lambda share: share.x)
        for chosen in islice(combinations(ordered, threshold), MOST_TRIED):
            if len({share.x for share in chosen}) == threshold:
                vault = Vault(_joined(chosen))
                if vault.realm == realm:
                    return vault
    return None


def encode_share(share: Share) -> bytes:
    return msgspec.msgpack.encode(share)


def decode_share(data: bytes) -> Share:
    """ValueError for what is none."""
    share = decoded(_share_decoder, data, "a share of a key")
    if not _possible(share):
        raise ValueError("not a possible share of a key")
    return share


def encode_held(held: Held) -> bytes:
    return msgspec.msgpack.encode(held)


def decode_held(data: bytes) -> Held:
    """ValueError for what is none."""
    return decoded(_held_decoder, data, "shares of a key")


_share_decoder = msgspec.msgpack.Decoder(Share)
_held_decoder = msgspec.msgpack.Decoder(Held)


def _possible(share: Share) -> bool:
    return 1 <= share.threshold <= 255 and 1 <= share.x <= 255 and len(share.value) == KEY_BYTES


def _joined(shares: Sequence[Share]) -> bytes:
    """The polynomials' values at 0 (Lagrange)."""
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
    return reduce(_times, [a] * 254)  # the group has 255 elements
