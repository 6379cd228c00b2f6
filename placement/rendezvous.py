"""Rendezvous hashing (Thaler and Ravishankar 1998) in integers, bit-equal on every machine.

Each (key, node) pair has a draw, uniform in [0, 2**64). The node with the highest score wins, so a node that leaves moves only
its own keys. With weights (Schindler's method) the score is weight / -log2(draw / 2**64): shares are proportional to weights,
and a larger weight never lowers a node's rank.

The draws of all nodes are computed at once. Their hashes lie side by side in one long integer, a *lane* of 128 bits each;
multiplying, shifting and masking that integer mixes all of them in C (MurmurHash3's finaliser, keyed by BLAKE2b of the key).
This takes 65 us for 1,000 nodes; one keyed BLAKE2b for each node took 475 us.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from struct import Struct

FRACTION_BITS = 32
DRAWS = 2**64
_BITS = 64
_LANE_BYTES = 16
_LANE_MASK = DRAWS - 1
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53  # fmix64 of MurmurHash3
_TABLE_BITS = 11
_REST_BITS = _BITS - 1 - _TABLE_BITS


@lru_cache(maxsize=1 << 16)
def lane(node: bytes) -> bytes:
    """Return the node's 16 bytes of the long integer."""
    return blake2b(node, digest_size=8, person=b"mesh-hrw2-node").digest() + bytes(_LANE_BYTES - 8)


def draws(key: bytes, lanes: Sequence[bytes]) -> Sequence[int]:
    """Return the draw of each lane for this key: pseudorandom, 0 to 2**64 - 1, and independent of the other lanes."""
    if not lanes:
        return ()
    ones, mask, unpack = _frame(len(lanes))
    secret = blake2b(key[:64], digest_size=16, person=b"mesh-hrw2-key").digest()
    odd, other = int.from_bytes(secret[:8], "little") | 1, int.from_bytes(secret[8:], "little")
    mixed = (int.from_bytes(b"".join(lanes), "little") ^ other * ones) * odd & mask
    mixed = (mixed ^ mixed >> 32 & mask) * _MIX_1 & mask
    mixed = (mixed ^ mixed >> 29 & mask) * _MIX_2 & mask
    mixed ^= mixed >> 32 & mask
    return unpack(mixed.to_bytes(_LANE_BYTES * len(lanes), "little"))[::2]


@lru_cache(maxsize=128)
def _frame(count: int) -> tuple[int, int, Callable[[bytes], tuple[int, ...]]]:
    """Return an integer with a one in each lane, a mask of the lower half of each lane, and the function that splits lanes."""
    ones = int.from_bytes((b"\1" + bytes(_LANE_BYTES - 1)) * count, "little")
    return ones, ones * _LANE_MASK, Struct(f"<{2 * count}Q").unpack


def negative_log2(draw: int) -> int:
    """Return -log2(draw / 2**64) for 0 < draw < 2**64, in units of 2**-32 and at least 1. It never rises with the draw.

    Interpolated in a table of 2048 chords: never below the logarithm, and at most 4.4e-8 and one unit above it.
    """
    exponent = draw.bit_length() - 1
    mantissa = draw << (_BITS - 1 - exponent)  # in [2**63, 2**64)
    place = (mantissa >> _REST_BITS) - (1 << _TABLE_BITS)
    rest = mantissa & ((1 << _REST_BITS) - 1)
    table = _table()
    upper, lower = table[place], table[place + 1]
    return max(1, ((_BITS - 1 - exponent) << FRACTION_BITS) + upper - ((upper - lower) * rest >> _REST_BITS))


@cache
def _table() -> tuple[int, ...]:
    """Return 1 - log2(m) for 2049 values of m from 1 to 2, rounded up."""
    return tuple(_table_entry(place) for place in range(1 << _TABLE_BITS, (2 << _TABLE_BITS) + 1))


def _table_entry(place: int) -> int:
    """Compute one entry bit by bit: square the mantissa, read off a bit of the logarithm."""
    if place == 2 << _TABLE_BITS:
        return 0
    mantissa, logarithm = place << _REST_BITS, 0
    for _ in range(FRACTION_BITS):
        mantissa = (mantissa * mantissa) >> (_BITS - 1)
        logarithm <<= 1
        if mantissa >> _BITS:
            mantissa >>= 1
            logarithm |= 1
    return (1 << FRACTION_BITS) - logarithm


def score(draw: int, weight: int) -> int:
    """Return the score of a node of this weight; higher is better. Weight 0 never wins against a positive weight."""
    return weighed(weight) // negative_log2(draw | 1)


def weighed(weight: int) -> int:
    """Return the numerator of a score."""
    return weight << _BITS


def best_first(
    found: Sequence[int], weights: Sequence[int], nodes: Sequence[bytes], numerators: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (index, score), highest score first. `found` (draws), `weights` and `nodes` are parallel; `numerators` is indexed by
    weight. Within one weight the draws alone decide, so one score per weight is computed at a time."""
    places: dict[int, list[tuple[int, bytes, int]]] = {}
    for place, weight in enumerate(weights):
        if weight in places:
            places[weight].append((found[place], nodes[place], place))
        else:
            places[weight] = [(found[place], nodes[place], place)]
    heads = {weight: max(places[weight]) for weight in sorted(places, reverse=True)}
    scores: dict[int, int] = {}
    while heads:
        first, above, most = 0, -1, -1
        for weight, (draw, _, _) in heads.items():
            if draw > above:
                above = draw
                if weight not in scores:
                    scores[weight] = numerators[weight] // negative_log2(draw | 1)
                if scores[weight] > most:
                    first, most = weight, scores[weight]
        place = heads[first][2]
        del scores[first]
        yield place, most
        rest = places[first]
        rest.sort()
        rest.pop()
        if rest:
            heads[first] = rest[-1]
        else:
            del heads[first]


def rank(key: bytes, weighted: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Return (node, score) pairs, best first; ties are broken by node id."""
    pairs = list(weighted)
    found = draws(key, [lane(node) for node, _ in pairs])
    scored = [(node, score(draw, weight)) for (node, weight), draw in zip(pairs, found, strict=True)]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))
