"""Weighted rendezvous hashing (Thaler and Ravishankar 1998; Schindler's weights) in integers, bit-equal on every machine.

Each (key, node) draws u in (0, 1) from a keyed hash; the node with the largest weight / -ln(u) wins. A node that goes moves
only its own keys; a heavier weight never loses a rank. No floating point: -log2(u) is computed in fixed point.
"""

from collections.abc import Iterable
from hashlib import blake2b

FRACTION_BITS = 32
_HASH_BITS = 64


def negative_log2(draw: int) -> int:
    """-log2(draw / 2**64) for 0 < draw < 2**64, in units of 2**-32, rounded up to at least 1.

    The classic bit-by-bit logarithm: square the mantissa, read off a bit.
    """
    exponent = draw.bit_length() - 1
    mantissa = draw << (_HASH_BITS - 1 - exponent)  # in [2**63, 2**64)
    fraction = 0
    for _ in range(FRACTION_BITS):
        mantissa = (mantissa * mantissa) >> (_HASH_BITS - 1)
        fraction <<= 1
        if mantissa >> _HASH_BITS:
            mantissa >>= 1
            fraction |= 1
    logarithm = (exponent << FRACTION_BITS) | fraction
    return max(1, (_HASH_BITS << FRACTION_BITS) - logarithm)


def score(key: bytes, node: bytes, weight: int) -> int:
    """The node's score for this key; more is better. Weight 0 never wins against a positive one."""
    digest = blake2b(node, key=key[:64], digest_size=8, person=b"mesh-rendezvous").digest()
    draw = int.from_bytes(digest, "big") | 1
    return (weight << 64) // negative_log2(draw)


def rank(key: bytes, weighted: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """(node, score), best first; ties by node id."""
    scored = [(node, score(key, node, weight)) for node, weight in weighted]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))
