"""Compression policy: when it compresses, and how it learns."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.compression_policy import RETRY_EVERY, CompressionPolicy


def test_compresses_on_a_slow_link_and_not_on_a_fast_one_or_a_busy_machine() -> None:
    for link, cores, pays in (
        (117e6, 2, True),
        (12e6, 0, True),
        (1.2e9, 2, False),
        (117e6, 0.25, False),
        (None, 2, True),
    ):
        assert CompressionPolicy().should_compress(link, cores) == pays, (link, cores)


def test_compresses_on_a_fast_link_if_much_is_saved() -> None:
    effort = CompressionPolicy()
    for _ in range(20):
        effort.learn(10**9, 5 * 10**7, 0.5, 2)
    assert effort.saved > 0.9 and effort.should_compress(1.2e9, 2)


def test_incompressible_state_is_retried_rarely() -> None:
    effort = CompressionPolicy()
    for _ in range(20):
        effort.learn(10**9, 10**9, 1.0, 2)
    tried = [effort.should_compress(117e6, 2) for _ in range(3 * RETRY_EVERY)]
    assert sum(tried) == 3


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.floats(0, 1e6), st.floats(0, 512), st.floats(1, 1e12))
def test_estimates_stay_finite(raw: int, stored: int, seconds: float, cores: float, link: float) -> None:
    effort = CompressionPolicy()
    effort.learn(raw, stored, seconds, cores)
    assert 0 <= effort.saved <= 1 and math.isfinite(effort.codec_bps) and effort.codec_bps > 0
    assert effort.should_compress(link, cores) in {True, False}
