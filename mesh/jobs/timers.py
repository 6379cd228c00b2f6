"""The timers that job cores have set: one of each name for each role of a job; a newer one replaces it."""

import asyncio
from collections.abc import Callable, Iterable

Key = tuple[bytes, str, str]  # job, role, name


class Timers:
    def __init__(self) -> None:
        self._set: dict[Key, asyncio.TimerHandle] = {}

    def set(self, key: Key, delay_s: float, ring: Callable[[], object]) -> None:
        self.stop([key])
        self._set[key] = asyncio.get_running_loop().call_later(max(0.0, delay_s), ring)

    def stop(self, keys: Iterable[Key] | None = None) -> None:
        """These, or all."""
        for key in list(self._set) if keys is None else keys:
            timer = self._set.pop(key, None)
            if timer is not None:
                timer.cancel()
