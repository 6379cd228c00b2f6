"""A bounded memory: what was kept last."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(dict[K, V]):
    """The `most` values that were kept last, in the order in which they were."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> None:
        self.pop(key, None)  # again as the newest
        self[key] = value
        while len(self) > self._most:
            del self[next(iter(self))]
