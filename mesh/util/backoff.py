"""Backoff: when each of many things is tried again that did not succeed. No I/O."""

from collections.abc import Collection, Hashable
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Backoff(Generic[K]):
    """A thing rests for `first_s` after its first failure, and twice as long after each further one, at most `most_s`.

    Times are seconds of one clock that nobody sets.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._rests: dict[K, tuple[int, float, float]] = {}  # failures, the last rest, and when it ends

    def is_due(self, key: K, now_s: float) -> bool:
        return now_s >= self._rests.get(key, (0, 0.0, -inf))[2]

    def failures(self, key: K) -> int:
        return self._rests.get(key, (0, 0.0, 0.0))[0]

    def failed(self, key: K, now_s: float) -> int:
        """Let a thing rest; return how often it has failed."""
        failures, rest_s, _ = self._rests.get(key, (0, 0.0, 0.0))
        rest_s = min(self._most_s, max(self._first_s, 2 * rest_s))
        self._rests[key] = (failures + 1, rest_s, now_s + rest_s)
        return failures + 1

    def forget(self, key: K) -> None:
        self._rests.pop(key, None)

    def keep_only(self, keys: Collection[K]) -> None:
        """Forget all other things."""
        self._rests = {key: rest for key, rest in self._rests.items() if key in keys}
