"""Rendezvous hashing (Thaler and Ravishankar 1998) in integers, bit-equal on every machine.

Each (key, node) has a draw, uniform in [0, 2**64), and whoever has the best one wins: a node that goes moves only its own keys.
With weights (Schindler's) the largest weight / -log2(draw / 2**64) wins, so shares are proportional to weights and a heavier
weight never loses a rank.

The draws of all nodes are made at once: their hashes lie side by side in one long integer, a *lane* of 128 bits each, and
multiplying, shifting and masking that integer mixes all of them in C (MurmurHash3's finaliser, keyed by BLAKE2b of the key). For
a thousand nodes that takes 65 us, where one keyed BLAKE2b each took 475 us.
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
    """The node's place in the long integer."""
    return blake2b(node, digest_size=8, person=b"mesh-hrw2-node").digest() + bytes(_LANE_BYTES - 8)


def draws(key: bytes, lanes: Sequence[bytes]) -> Sequence[int]:
    """For each lane its draw with this key: 0 to 2**64 - 1, as if at random, and the same whoever else takes part."""
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
    """A one in each lane, the lower half of each lane, and what takes the lanes apart."""
    ones = int.from_bytes((b"\1" + bytes(_LANE_BYTES - 1)) * count, "little")
    return ones, ones * _LANE_MASK, Struct(f"<{2 * count}Q").unpack


def negative_log2(draw: int) -> int:
    """-log2(draw / 2**64) for 0 < draw < 2**64, in units of 2**-32 and at least 1; never less for a smaller draw.

    A table of 2048 chords: never below the logarithm, and above it by 4.4e-8 and one unit at most.
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
    """1 - log2(m) for 2049 values of m from 1 to 2, rounded up; bit by bit: square the mantissa, read off a bit."""
    return tuple(_exactly(place) for place in range(1 << _TABLE_BITS, (2 << _TABLE_BITS) + 1))


def _exactly(place: int) -> int:
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
    """What a node of this weight makes of its draw; more is better. Weight 0 never wins against a positive one."""
    return weighed(weight) // negative_log2(draw | 1)


def weighed(weight: int) -> int:
    """A score's numerator."""
    return weight << _BITS


def best_first(
    found: Sequence[int], weights: Sequence[int], nodes: Sequence[bytes], numerators: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(place, score) by their scores. `found`, `weights` and `nodes` are of the same places; `numerators` are of each weight.
    Whoever is no heavier than another and has drawn worse comes after it, so few scores are ever computed."""
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
    """(node, score), best first; ties by node id."""
    pairs = list(weighted)
    found = draws(key, [lane(node) for node, _ in pairs])
    scored = [(node, score(draw, weight)) for (node, weight), draw in zip(pairs, found, strict=True)]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))
