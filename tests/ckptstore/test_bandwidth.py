"""What is learnt of links from what was sent anyway."""

import pytest

from ckptstore.bandwidth import LEAST_BYTES, SEEN, Bandwidth

A, B = b"a" * 32, b"b" * 32


def test_the_mean_follows_and_a_promise_is_what_was_nearly_always_reached() -> None:
    known = Bandwidth()
    assert known.mean_bps([A]) is None and known.promised_bps(A) is None
    for number in range(10):
        known.saw(A, 10**7, 0.1 if number % 5 else 1.0)
    assert 1e7 < (known.mean_bps([A]) or 0) < 1e8 and known.promised_bps(A) == pytest.approx(1e8)
    known.saw(A, 10**7, 1.0)
    assert known.promised_bps(A) == pytest.approx(1e7), "a fifth were slower"
    for _ in range(SEEN):
        known.saw(A, 10**7, 0.05)
    assert known.promised_bps(A) == pytest.approx(2e8), "long ago is forgotten"


def test_the_slowest_counts_and_small_transfers_say_nothing() -> None:
    known = Bandwidth()
    known.saw(A, 10**7, 0.1)
    known.saw(B, 10**7, 1.0)
    known.saw(A, LEAST_BYTES - 1, 99.0)
    known.saw(A, 10**7, 0.0)
    assert known.mean_bps([A, B, b"c"]) == pytest.approx(1e7) and known.mean_bps([A]) == pytest.approx(1e8)


def test_what_was_held_back_here_says_little_of_the_link() -> None:
    known = Bandwidth()
    known.saw(A, 10**7, 1.0, held=True)
    assert known.mean_bps([A]) == pytest.approx(1e7) and known.promised_bps(A) is None
    known.saw(A, 10**7, 0.2)
    known.saw(A, 10**7, 1.0, held=True)
    assert known.promised_bps(A) == pytest.approx(5e7)
    for _ in range(SEEN):
        known.saw(A, 10**7, 0.1, held=True)
    assert known.promised_bps(A) == pytest.approx(1e8), "at least so much it can carry"
