"""When encoding pays, and that it follows what was seen."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.effort import TRY_EVERY, Effort


def test_it_pays_on_a_slow_link_and_not_on_a_fast_one_or_a_busy_machine() -> None:
    for link, cores, pays in (
        (117e6, 2, True),
        (12e6, 0, True),
        (1.2e9, 2, False),
        (117e6, 0.25, False),
        (None, 2, True),
    ):
        assert Effort().pays(link, cores) == pays, (link, cores)


def test_much_that_can_be_saved_pays_on_a_fast_link_too() -> None:
    effort = Effort()
    for _ in range(20):
        effort.learn(10**9, 5 * 10**7, 0.5, 2)
    assert effort.saved > 0.9 and effort.pays(1.2e9, 2)


def test_what_cannot_be_made_smaller_is_tried_again_only_now_and_then() -> None:
    effort = Effort()
    for _ in range(20):
        effort.learn(10**9, 10**9, 1.0, 2)
    tried = [effort.pays(117e6, 2) for _ in range(3 * TRY_EVERY)]
    assert sum(tried) == 3


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.floats(0, 1e6), st.floats(0, 512), st.floats(1, 1e12))
def test_whatever_is_seen_it_stays_a_number(raw: int, stored: int, seconds: float, cores: float, link: float) -> None:
    effort = Effort()
    effort.learn(raw, stored, seconds, cores)
    assert 0 <= effort.saved <= 1 and math.isfinite(effort.codec_bps) and effort.codec_bps > 0
    assert effort.pays(link, cores) in {True, False}
