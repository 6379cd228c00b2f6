"""Hours lent and borrowed: each attempt counts once, for its user, in the months of its run."""

from calendar import timegm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.gpus.receipts import DeviceUse, Receipt
from mesh.provider.usage import HOUR_MS, accounts, by_month, newest

NOW = timegm((2026, 11, 22, 12, 0, 0)) * 1000
A, B = b"a" * 32, b"b" * 32
OWNERS = {A: "ada", B: "bob"}


def ran(node: bytes, user: str, begun_h: float, hours: float, gpu_percent: int = 100, **fields: object) -> Receipt:
    """Return the receipt of an attempt that began `begun_h` hours before NOW."""
    begun = NOW - round(begun_h * HOUR_MS)
    made = Receipt("job", 0, node, user, begun, begun + round(hours * HOUR_MS), (), gpu_percent=gpu_percent)
    for name, value in fields.items():
        made = Receipt(**{**{n: getattr(made, n) for n in made.__struct_fields__}, name: value})
    return made


def test_lent_borrowed_and_own_are_separate() -> None:
    measured = (DeviceUse("GPU-1", 1_800_000_000_000, 0, 1, 0),)
    found = accounts(
        [
            ran(A, "bob", 10, 4, 50, devices=measured),
            ran(A, "ada", 5, 1, job="own"),
            ran(B, "bob", 3, 2, 0, job="slot", lost_ms=HOUR_MS // 2, reason="vacated: its owner is back"),
        ],
        0,
        lambda one: OWNERS[one.node],
        lambda one: one.user,
    )
    ada, bob = found["ada"], found["bob"]
    assert (ada.lent_gpu_h, ada.borrowed_gpu_h, ada.own_gpu_h, ada.measured_gpu_h, ada.attempts) == (2, 0, 1, 0.5, 2)
    assert (bob.borrowed_gpu_h, bob.own_slot_h, bob.lost_h, bob.attempts) == (2, 2, 0.5, 2)
    assert bob.own_gpu_h == bob.lent_slot_h == 0


def test_negative_measurement_takes_nothing_from_an_account() -> None:
    measured = (DeviceUse("GPU-1", 1_800_000_000_000, 0, 1, 0), DeviceUse("GPU-2", -1_800_000_000_000, 0, 1, 0))
    found = accounts([ran(A, "bob", 10, 4, devices=measured)], 0, lambda one: OWNERS[one.node], lambda one: one.user)
    assert found["ada"].measured_gpu_h == 0.5


def test_attempt_counts_once_within_period() -> None:
    early, late = ran(A, "bob", 10, 2), ran(A, "bob", 10, 6)
    impossible = [ran(A, "x", 1, 2), ran(A, "y", 2, -1), ran(A, "z", 2, 1, -5, job="z")]
    assert newest([late, early, *impossible[:2]], NOW) == [late] and newest(impossible, NOW) == []
    (account,) = accounts([late], NOW - 5 * HOUR_MS, lambda one: "", lambda one: one.user).values()
    assert account.borrowed_gpu_h == 1
    assert accounts([late], NOW - 3 * HOUR_MS, lambda one: "a", lambda one: "b") == {}


def test_hours_are_split_by_month() -> None:
    first = timegm((2026, 11, 1, 0, 0, 0)) * 1000
    over_the_end = ran(A, "bob", 0, 0, from_unix_ms=first - 3 * HOUR_MS, until_unix_ms=first + HOUR_MS)
    at_new_year = timegm((2026, 1, 1, 0, 0, 0)) * 1000
    year = ran(B, "ada", 0, 0, job="y", from_unix_ms=at_new_year - HOUR_MS, until_unix_ms=at_new_year + 2 * HOUR_MS)
    found = by_month([over_the_end, year, ran(B, "carl", 5, 1, job="others")], 0, A, "ada")
    assert {month: (one.lent_gpu_h, one.borrowed_gpu_h) for month, one in found.items()} == {
        "2026-10": (3, 0),
        "2026-11": (1, 0),
        "2025-12": (0, 1),
        "2026-01": (0, 2),
    }


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 900), st.integers(0, 100)), max_size=8))
def test_totals_conserve_hours(times: list[tuple[int, int, int]]) -> None:
    receipts = [
        ran(A, "bob", begun, min(hours, begun), percent, attempt=number)
        for number, (begun, hours, percent) in enumerate(times)
    ]
    total = sum(min(hours, begun) * percent / 100 for begun, hours, percent in times)
    for found in (
        accounts(receipts, 0, lambda one: "ada", lambda one: one.user),
        by_month(receipts, 0, A, "nobody"),
    ):
        assert sum(one.lent_gpu_h for one in found.values()) == pytest.approx(total)
