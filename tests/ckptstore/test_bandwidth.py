"""Bandwidth learnt from regular transfers."""

import math

import pytest

from ckptstore.bandwidth import DAY_S, LEAST_BYTES, PEERS, SEEN, UNKNOWN, Bandwidth, SavedRate

A, B = b"a" * 32, b"b" * 32


def test_mean_follows_and_promise_is_a_low_quantile() -> None:
    known = Bandwidth()
    assert known.mean_bps([A]) is None and known.promised_bps(A) is None
    for number in range(10):
        known.record(A, 10**7, 0.1 if number % 5 else 1.0)
    assert 1e7 < (known.mean_bps([A]) or 0) < 1e8 and known.promised_bps(A) == pytest.approx(1e8)
    known.record(A, 10**7, 1.0)
    assert known.promised_bps(A) == pytest.approx(1e7), "a fifth of the transfers were slower"
    for _ in range(SEEN):
        known.record(A, 10**7, 0.05)
    assert known.promised_bps(A) == pytest.approx(2e8), "old transfers are forgotten"


def test_mean_is_of_the_slowest_peer_and_small_transfers_are_ignored() -> None:
    known = Bandwidth()
    known.record(A, 10**7, 0.1)
    known.record(B, 10**7, 1.0)
    known.record(A, LEAST_BYTES - 1, 99.0)
    known.record(A, 10**7, 0.0)
    assert known.mean_bps([A, B, b"c"]) == pytest.approx(1e7) and known.mean_bps([A]) == pytest.approx(1e8)


def test_limited_transfer_counts_only_above_the_promise() -> None:
    known = Bandwidth()
    known.record(A, 10**7, 1.0, held=True)
    assert known.mean_bps([A]) == pytest.approx(1e7) and known.promised_bps(A) is None
    known.record(A, 10**7, 0.2)
    known.record(A, 10**7, 1.0, held=True)
    assert known.promised_bps(A) == pytest.approx(5e7)
    for _ in range(SEEN):
        known.record(A, 10**7, 0.1, held=True)
    assert known.promised_bps(A) == pytest.approx(1e8), "a limited transfer is a lower bound"


def test_path_estimate_widens_with_age_and_spread() -> None:
    known = Bandwidth()
    assert known.path(A) == UNKNOWN
    for _ in range(20):
        known.record(A, 10**8, 1.0, now=1000.0)
    steady = known.path(A, now=1000.0)
    assert steady.source == "measured" and steady.bps == pytest.approx(1e8) and steady.transfers == 20
    assert known.path(A, now=1000.0 + 4 * DAY_S).spread > steady.spread
    for number in range(20):
        known.record(B, 10**8, 0.2 if number % 2 else 5.0, now=1000.0)
    assert known.path(B, now=1000.0).spread > 2 * steady.spread


def test_estimates_are_restored_after_a_restart() -> None:
    kept: dict[bytes, SavedRate] = {}
    known = Bandwidth(kept.__setitem__)
    for number in range(5):
        known.record(A, 10**8, 1.0 + number, now=100.0 + number)
    known.record(B, LEAST_BYTES - 1, 1.0, now=100.0)
    assert kept.keys() == {A}
    after = Bandwidth()
    after.restore(A, kept[A], -896.0)  # the clock restarted
    assert after.path(A, now=1000 - 896.0) == known.path(A, now=104.0 + 1000)
    assert after.promised_bps(A) is None and after.mean_bps([A]) is not None
    for nonsense in (
        SavedRate(math.inf, 0.0, 1),
        SavedRate(math.nan, 0.0, 1),
        SavedRate(9.0, -1.0, 1),
        SavedRate(9.0, 0.0, 0),
    ):
        after.restore(B, nonsense, 0.0)
    assert after.path(B, now=0.0).source == "mesh"


def test_unmeasured_peer_is_estimated_by_its_zone_then_by_all() -> None:
    known, near, far = Bandwidth(), [bytes([n]) * 32 for n in range(3)], b"f" * 32
    for peer in near:
        known.record(peer, 10**8, 0.1)
    known.record(far, 10**7, 1.0)
    zone = known.path(b"n" * 32, near)
    assert zone.source == "zone" and zone.bps == pytest.approx(1e9) and zone.spread > known.path(near[0]).spread
    mesh = known.path(b"n" * 32)
    assert mesh.source == "mesh" and mesh.spread > zone.spread


def test_state_is_bounded_and_impossible_transfers_are_ignored() -> None:
    known = Bandwidth()
    for number in range(PEERS + 50):
        known.record(number.to_bytes(32, "big"), 10**8, 1.0)
    assert len(known.measured(0.0)) == PEERS and known.path((0).to_bytes(32, "big")).source == "mesh"
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        known.record(A, 10**8, seconds)
    assert known.path(A).source == "mesh"
