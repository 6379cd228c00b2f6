"""How much is believed of what nodes say of their own stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import HORIZONS_S, HOUR, MAX_WEIGHT
from placement.observed import Observed, believed, upper_bound
from tests.placement.test_placement import NODES, advert

NODE = NODES[0]


def seen(lengths: list[float], age: float = 0.0) -> Observed:
    """A node whose stays were so long, and is back since `age`."""
    observed, now = Observed(), 0.0
    for length in lengths:
        observed.see({NODE}, now)
        observed.see(set(), now + length)
        now += length + 60
    observed.see({NODE}, -age)
    return observed


def test_who_leaves_again_and_again_is_not_believed_to_stay() -> None:
    caps = seen([1000.0] * 20).caps(0.0)[NODE]
    assert caps[0] == MAX_WEIGHT, "it did stay for a quarter of an hour"
    assert caps[HOUR] <= 14, "of 20 stays none lasted an hour"
    boast = advert(NODE, weight=64, stays=(64,) * len(HORIZONS_S))
    reined_in = believed(boast, caps)
    assert reined_in.weight == caps[HOUR] and reined_in.stays == caps
    modest = advert(NODE, weight=4, stays=(4,) * len(HORIZONS_S))
    assert believed(modest, caps) == modest and believed(boast, None) is boast


def test_who_leaves_early_or_not_at_all_is_believed_once_it_has_stayed() -> None:
    assert NODE not in seen([300.0] * 30, age=3600.0).caps(0.0), "no stay that reached this age is known to have ended"
    assert NODE not in seen([]).caps(0.0)
    gone = seen([1000.0] * 20)
    gone.see(set(), 10.0)
    assert not gone.caps(20.0), "nobody asks about one that is not there"
    gone.forget(set())
    gone.see({NODE}, 30.0)
    assert not gone.caps(40.0)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_bound_lies_above_the_share(lasted: int, more: int) -> None:
    of = lasted + more
    assert (lasted / of if of else 0.0) <= upper_bound(lasted, of) + 1e-12 <= 1.0 + 1e-9
    if lasted:
        assert upper_bound(lasted, of) >= upper_bound(lasted - 1, of)


def test_the_bound_is_wilsons() -> None:
    from statistics import NormalDist

    assert upper_bound(0, 10) == pytest.approx(2.326**2 / (10 + 2.326**2))
    assert NormalDist().cdf(2.326) == pytest.approx(0.99, abs=1e-4)
