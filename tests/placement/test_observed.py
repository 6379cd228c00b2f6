"""Caps on the weights that nodes advertise, from observed stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import HORIZONS_S, HOUR, MAX_WEIGHT
from placement.observed import Observed, capped, upper_bound
from tests.placement.test_placement import NODES, advert

NODE = NODES[0]


def seen(lengths: list[float], age: float = 0.0) -> Observed:
    """Return the observations of a node with stays of these lengths, in a stay of `age` now."""
    observed, now = Observed(), 0.0
    for length in lengths:
        observed.observe({NODE}, now)
        observed.observe({NODE}, now + length / 2)
        observed.observe(set(), now + length)
        now += length + 60
    observed.observe({NODE}, -age)
    return observed


def test_caps_node_that_leaves_repeatedly() -> None:
    caps = seen([1000.0] * 20).caps(0.0)[NODE]
    assert caps[0] == MAX_WEIGHT, "the node did stay for a quarter of an hour"
    assert caps[HOUR] <= 14, "of 20 stays none lasted an hour"
    boast = advert(NODE, weight=64, weights=(64,) * len(HORIZONS_S))
    reined_in = capped(boast, caps)
    assert reined_in.weight == caps[HOUR] and reined_in.weights == caps
    modest = advert(NODE, weight=4, weights=(4,) * len(HORIZONS_S))
    assert capped(modest, caps) == modest and capped(boast, None) is boast


def test_does_not_cap_node_that_outlived_its_early_departures() -> None:
    assert NODE not in seen([300.0] * 30, age=3600.0).caps(0.0), "no stay of this age is known to have ended"
    assert NODE not in seen([]).caps(0.0)
    gone = seen([1000.0] * 20)
    gone.observe(set(), 10.0)
    assert not gone.caps(20.0), "an absent node has no caps"
    gone.keep_only(set())
    gone.observe({NODE}, 30.0)
    assert not gone.caps(40.0)


@given(st.integers(0, 60), st.integers(0, 60))
def test_upper_bound_is_above_share(lasted: int, more: int) -> None:
    of = lasted + more
    assert (lasted / of if of else 0.0) <= upper_bound(lasted, of) + 1e-12 <= 1.0 + 1e-9
    if lasted:
        assert upper_bound(lasted, of) >= upper_bound(lasted - 1, of)


def test_upper_bound_is_wilsons() -> None:
    from statistics import NormalDist

    assert upper_bound(0, 10) == pytest.approx(2.326**2 / (10 + 2.326**2))
    bound = upper_bound(3, 10)
    assert (bound - 0.3) ** 2 == pytest.approx(2.326**2 * bound * (1 - bound) / 10)
    assert NormalDist().cdf(2.326) == pytest.approx(0.99, abs=1e-4)


def test_stay_of_exactly_this_length_counts() -> None:
    assert seen([900.0] * 20).caps(0.0)[NODE][0] == MAX_WEIGHT, "each of them lasted a quarter of an hour"
    assert NODE in seen([600.0] * 20, age=600.0).caps(0.0), "they reached the age of the present one"
    assert upper_bound(0, 1) < 1 == upper_bound(0, 0)


def test_age_of_the_present_stay_counts_before_each_horizon() -> None:
    caps = seen([1000.0] * 20, age=600.0).caps(0.0)[NODE]
    assert caps[0] <= 14, "none of them lasted another quarter of an hour"


def test_last_sixty_four_stays_count() -> None:
    assert NODE in seen([600.0] * 8 + [100_000.0] * 56).caps(0.0)
    assert not seen([600.0] * 8 + [100_000.0] * 64).caps(0.0), "older ones are forgotten"
