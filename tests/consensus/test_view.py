"""Clocks of a node."""

import pytest

from mesh.consensus.view import STOOD_S, ClockWatch, Instant


@pytest.mark.parametrize(
    ("boot_s", "wall_s", "stood"),
    [(10.0, 10.0, False), (1.0, 31.0, True), (1.0, 1.001, False), (60.0, 1.0, False), (1.0, 1.0 + 2 * STOOD_S, True)],
)
def test_clock_that_stood_still_is_noticed_by_the_wall_clock(boot_s: float, wall_s: float, stood: bool) -> None:
    watch = ClockWatch()
    assert not watch.stood(Instant(100.0, 9_000_000)), "the first look has nothing to compare"
    assert watch.stood(Instant(100.0 + boot_s, 9_000_000 + round(wall_s * 1000))) is stood
    assert not watch.stood(Instant(101.0 + boot_s, 9_001_000 + round(wall_s * 1000))), "each pause is noticed once"
