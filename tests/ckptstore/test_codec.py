"""Codec: every encoding round-trips; hostile bytes raise one kind of error and use no more memory than announced."""

import contextlib
import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptstore.codec import choose, decode, encode
from ckptstore.encoding import PLANES, RAW, WIDTHS, ZSTD, Encoding
from ckptstore.errors import CorruptChunk

CODINGS = st.one_of(
    st.builds(Encoding, st.sampled_from([RAW, ZSTD]), delta=st.booleans()),
    st.builds(Encoding, st.just(PLANES), st.sampled_from(WIDTHS), st.integers(0, 255), st.booleans()),
)


@given(st.binary(max_size=300), st.binary(min_size=300, max_size=300), CODINGS)
def test_every_encoding_round_trips(data: bytes, other: bytes, encoding: Encoding) -> None:
    base = other[: len(data)]
    stored = encode(data, encoding, base)
    assert bytes(decode(stored, encoding.codec, encoding.width, len(data), base if encoding.delta else None)) == data


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 9), st.integers(0, 300))
def test_hostile_bytes_raise_corrupt_chunk(stored: bytes, codec: int, width: int, length: int) -> None:
    with contextlib.suppress(CorruptChunk):
        assert len(decode(stored, codec, width, length)) == length


@given(st.integers(0, 9), st.integers(0, 9), CODINGS)
def test_base_of_another_length_is_refused(length: int, other: int, encoding: Encoding) -> None:
    assume(length != other)
    stored = encode(bytes(length), encoding, bytes(length))
    with pytest.raises(CorruptChunk):
        decode(stored, encoding.codec, encoding.width, length, bytes(other))


@pytest.mark.parametrize("size", [10, 1 << 26])
def test_decompression_bomb_is_refused(size: int) -> None:
    bomb = encode(bytes(size), Encoding(ZSTD))
    with pytest.raises(CorruptChunk):
        decode(bomb, ZSTD, 0, 9)


def weights(count: int = 1 << 16) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.02, count).astype(np.float32)


def a_step(array: np.ndarray) -> np.ndarray:
    return (array + np.random.default_rng(2).normal(0, 1e-6, array.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (lambda: (os.urandom(1 << 18), None), lambda c: c == Encoding()),
        (lambda: (b"a text that repeats itself. " * 9999, None), lambda c: c.codec == ZSTD),
        (lambda: (weights().tobytes(), None), lambda c: c.codec == PLANES and c.width == 4 and c.planes == 0b1000),
        (lambda: (a_step(weights()).tobytes(), weights().tobytes()), lambda c: c.delta and c.codec == PLANES),
        (lambda: (weights().tobytes(), os.urandom(1 << 18)), lambda c: not c.delta),
        (lambda: (b"", b""), lambda c: c == Encoding()),
        (lambda: (b"abc", b"abd"), lambda c: not c.planes),
    ],
)
def test_best_encoding_is_chosen_on_a_sample(
    make: Callable[[], tuple[bytes, bytes | None]], chosen: Callable[[Encoding], bool]
) -> None:
    data, base = make()
    encoding = choose(data, base)
    assert chosen(encoding), encoding
    assert len(encode(data, encoding, base)) <= len(data) + 32
