"""Bandwidth learnt from regular transfers."""

import math

import pytest

from ckptstore.bandwidth import (
    AGE_SPREAD,
    DAY_S,
    GUESS_SPREAD,
    LEARN,
    LEAST_BYTES,
    MOST_LOGARITHM,
    PEERS,
    PRIOR_COUNT,
    PRIOR_SPREAD,
    SEEN,
    UNKNOWN,
    Bandwidth,
    SavedRate,
)

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
    for seconds in (0.0, -1.0, math.inf, math.nan):
        known.record(A, 10**7, seconds)
    assert known.mean_bps([A, B, b"c"]) == pytest.approx(1e7) and known.mean_bps([A]) == pytest.approx(1e8)
    known.record(A, LEAST_BYTES, LEAST_BYTES / 2e8)
    assert known.mean_bps([A]) == pytest.approx((1 - LEARN) * 1e8 + LEARN * 2e8)


def test_limited_transfer_counts_only_above_the_promise() -> None:
    known = Bandwidth()
    known.record(A, 10**7, 1.0, held=True)
    assert known.mean_bps([A]) == pytest.approx(1e7) and known.promised_bps(A) is None
    known.record(A, 10**7, 0.2)
    for seconds in (0.2, 1.0):
        known.record(A, 10**7, seconds, held=True)
    assert known.promised_bps(A) == pytest.approx(5e7) and known.path(A).transfers == 1
    for _ in range(SEEN):
        known.record(A, 10**7, 0.1, held=True)
    assert known.promised_bps(A) == pytest.approx(1e8), "a limited transfer is a lower bound"


def weighted(values: list[float]) -> tuple[float, float]:
    """Return mean and variance where the last value counts most, by the weight of each."""
    weights = [LEARN * (1 - LEARN) ** (len(values) - 1 - place) for place in range(len(values))]
    weights[0] /= LEARN
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return mean, sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))


@pytest.mark.parametrize("count", [1, 2, 7, SEEN + 9])
def test_path_estimate_is_of_the_logarithms_with_a_prior_and_ages(count: int) -> None:
    known, rates = Bandwidth(), [1e8 * (1 + number % 3) for number in range(count)]
    for number, rate in enumerate(rates):
        known.record(A, 10**8, 10**8 / rate, now=float(number))
    mean, variance = weighted([math.log(rate) for rate in rates])
    worth = min(count, SEEN)
    squared = (worth * variance + PRIOR_COUNT * PRIOR_SPREAD**2) / (worth + PRIOR_COUNT)
    last = count - 1.0
    for now, days in ((last - 5, 0.0), (last, 0.0), (last + DAY_S / 2, 0.5), (last + 2 * DAY_S, 2.0)):
        found = known.path(A, now=now)
        assert found == known.measured(now)[A]
        assert found.bps == pytest.approx(math.exp(mean)) and found.age_s == days * DAY_S
        assert found.spread == pytest.approx(math.sqrt(squared + AGE_SPREAD**2 * days)) and found.transfers == count
    assert known.path(A, now=10**9).spread == GUESS_SPREAD, "no less is known than of an unknown path"


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
    assert after.promised_bps(A) is None and after.mean_bps([A]) == pytest.approx(math.exp(kept[A].mean))
    for nonsense in (
        SavedRate(math.inf, 0.0, 1),
        SavedRate(math.nan, 0.0, 1),
        SavedRate(-MOST_LOGARITHM, 0.0, 1),
        SavedRate(9.0, math.inf, 1),
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
    for peer in (A, B):
        known.record(peer, 10**7, 1.0)
    assert known.path(b"n" * 32).bps == pytest.approx(10**8), "between three fast and three slow ones"
    known.restore(b"r" * 32, SavedRate(math.log(10**7), 0.0, 1), 0.0)
    assert known.path(b"n" * 32).bps == pytest.approx(10**7)


def test_estimate_from_other_paths_is_their_median_and_as_uncertain_as_they_differ() -> None:
    known, peers = Bandwidth(), [bytes([n]) * 32 for n in range(3)]
    for number, (peer, apart) in enumerate(zip(peers, (0.0, 0.3, 2.0), strict=True), 1):
        for _ in range(number):
            known.record(peer, 10**8, math.exp(-apart), now=number * DAY_S)
    now = 4 * DAY_S
    zone = known.path(A, peers, now)
    apart = math.sqrt((0.3**2 + 1.7**2) / 3)
    widest = max(known.path(peer, now=now).spread for peer in peers)
    assert zone.bps == pytest.approx(1e8 * math.exp(0.3)) and zone.spread == pytest.approx(
        math.hypot(apart, widest / 2)
    )
    assert (zone.transfers, zone.age_s) == (1 + 2 + 3, DAY_S) and known.path(A, peers, 0.0).age_s == 0.0
    known.record(B, 10**8, math.exp(6.0), now=now)
    assert known.path(A, [peers[2], B], now).spread == GUESS_SPREAD


def test_state_is_bounded_and_impossible_transfers_are_ignored() -> None:
    known = Bandwidth()
    for number in range(PEERS + 50):
        known.record(number.to_bytes(32, "big"), 10**8, 1.0)
    assert len(known.measured(0.0)) == PEERS and known.path((0).to_bytes(32, "big")).source == "mesh"
    assert known.promised_bps((0).to_bytes(32, "big")) is None
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        known.record(A, 10**8, seconds)
    assert known.path(A).source == "mesh" and known.mean_bps([A]) is None
    for number in range(PEERS + 50):
        known.restore(number.to_bytes(32, "big"), SavedRate(9.0, 0.0, 1), 0.0)
    assert len(known.measured(0.0)) == PEERS


def test_peer_of_the_last_transfer_is_remembered_longest() -> None:
    known, peers = Bandwidth(), [number.to_bytes(32, "big") for number in range(PEERS)]
    for peer in peers:
        known.record(peer, 10**8, 1.0)
    known.record(peers[0], 10**8, 1.0)
    known.record(A, 10**8, 1.0)
    assert known.measured(0.0).keys() == {*peers, A} - {peers[1]}
    known.record(B, 10**8, 1.0, held=True)
    assert known.mean_bps([B]) is None and len(known.measured(0.0)) == PEERS, "less is known of it than of any other"
