"""Backoff: what fails is tried again ever more rarely, each thing by itself."""

from mesh.util.backoff import Backoff
from mesh.util.few_at_once import few_at_once


def test_rest_doubles_with_each_failure_up_to_its_bound() -> None:
    backoff, now, rests = Backoff[str](5.0, 30.0), 100.0, list[float]()
    assert backoff.is_due("one", now)
    for failures in range(1, 6):
        assert backoff.failed("one", now) == failures
        due = next(later for later in range(100) if backoff.is_due("one", now + later))
        rests.append(due)
        now += due
    assert rests == [5, 10, 20, 30, 30]
    assert backoff.is_due("other", 0.0), "each rests alone"
    backoff.forget("one")
    assert backoff.is_due("one", now) and backoff.failed("one", now) == 1


def test_ten_thousand_failures_overflow_nothing() -> None:
    backoff = Backoff[str](1.0, 60.0)
    assert [backoff.failed("one", 0.0) for _ in range(10_000)][-1] == 10_000 and backoff.is_due("one", 60.0)


def test_only_what_is_still_of_interest_is_remembered() -> None:
    backoff = Backoff[str](5.0, 5.0)
    backoff.failed("one", 0.0)
    backoff.failed("two", 0.0)
    backoff.keep_only({"two"})
    assert backoff.is_due("one", 0.0) and not backoff.is_due("two", 0.0)


async def test_each_key_gets_its_result() -> None:
    async def square(number: int) -> int:
        return number * number

    assert await few_at_once(2, square, range(5)) == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
