"""Clocks and timers of a node, and the members that it takes as staying."""

import pytest

from mesh.consensus.view import STOOD_S, ClockWatch, Instant, Timer, TimerTokens, View
from tests.placement.test_placement import advert


@pytest.mark.parametrize(
    ("boot_s", "wall_s", "stood"),
    [(10.0, 10.0, False), (1.0, 31.0, True), (1.0, 1.001, False), (60.0, 1.0, False), (1.0, 1.0 + 2 * STOOD_S, True)],
)
def test_clock_that_stood_still_is_noticed_by_the_wall_clock(boot_s: float, wall_s: float, stood: bool) -> None:
    watch = ClockWatch()
    assert not watch.stood(Instant(100.0, 9_000_000)), "the first look has nothing to compare"
    assert watch.stood(Instant(100.0 + boot_s, 9_000_000 + round(wall_s * 1000))) is stood
    assert not watch.stood(Instant(101.0 + boot_s, 9_001_000 + round(wall_s * 1000))), "each pause is noticed once"


def test_leaving_node_offers_nothing() -> None:
    stays, leaves = b"s" * 32, b"l" * 32
    adverts = (advert(stays), advert(leaves))
    view = View(stays, frozenset({stays, leaves}), frozenset({leaves}), adverts=adverts)
    assert [offer.node for offer in view.offers] == [stays]


def test_timer_of_an_earlier_attempt_is_void() -> None:
    earlier, later = TimerTokens(1), TimerTokens(2)
    token = earlier.fresh("renew")
    later.fresh("renew")
    assert earlier.is_current(Timer("renew", token))
    assert not later.is_current(Timer("renew", token))
