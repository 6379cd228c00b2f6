"""Every way of storing a chunk gives it back, and hostile bytes give one kind of error and no more memory than was announced."""

import contextlib
import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codec import choose, decode, encode
from ckptstore.coding import PLANES, RAW, WIDTHS, ZSTD, Coding
from ckptstore.errors import CorruptChunk

CODINGS = st.one_of(
    st.builds(Coding, st.sampled_from([RAW, ZSTD]), delta=st.booleans()),
    st.builds(Coding, st.just(PLANES), st.sampled_from(WIDTHS), st.integers(0, 255), st.booleans()),
)


@given(st.binary(max_size=300), st.binary(min_size=300, max_size=300), CODINGS)
def test_every_coding_gives_the_chunk_back(data: bytes, other: bytes, coding: Coding) -> None:
    base = other[: len(data)]
    stored = encode(data, coding, base)
    assert bytes(decode(stored, coding.codec, coding.width, len(data), base if coding.delta else None)) == data


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 9), st.integers(0, 300))
def test_hostile_bytes_are_one_kind_of_error(stored: bytes, codec: int, width: int, length: int) -> None:
    with contextlib.suppress(CorruptChunk):
        assert len(decode(stored, codec, width, length)) == length


@pytest.mark.parametrize("size", [10, 1 << 26])
def test_a_bomb_is_not_unpacked(size: int) -> None:
    bomb = encode(bytes(size), Coding(ZSTD))
    with pytest.raises(CorruptChunk):
        decode(bomb, ZSTD, 0, 9)


def weights(count: int = 1 << 16) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.02, count).astype(np.float32)


def a_step(array: np.ndarray) -> np.ndarray:
    return (array + np.random.default_rng(2).normal(0, 1e-6, array.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (lambda: (os.urandom(1 << 18), None), lambda c: c == Coding()),
        (lambda: (b"a text that repeats itself. " * 9999, None), lambda c: c.codec == ZSTD),
        (lambda: (weights().tobytes(), None), lambda c: c.codec == PLANES and c.width == 4 and c.planes == 0b1000),
        (lambda: (a_step(weights()).tobytes(), weights().tobytes()), lambda c: c.delta and c.codec == PLANES),
        (lambda: (weights().tobytes(), os.urandom(1 << 18)), lambda c: not c.delta),
        (lambda: (b"", b""), lambda c: c == Coding()),
        (lambda: (b"abc", b"abd"), lambda c: not c.planes),
    ],
)
def test_the_best_way_is_found_on_a_sample(
    make: Callable[[], tuple[bytes, bytes | None]], chosen: Callable[[Coding], bool]
) -> None:
    data, base = make()
    coding = choose(data, base)
    assert chosen(coding), coding
    assert len(encode(data, coding, base)) <= len(data) + 32
