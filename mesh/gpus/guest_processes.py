"""A guest's processes, asked of its engine without blocking on one that hangs."""

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 0.25  # a longer wait could delay closing a gate (own choice)


class Whereabouts:
    """The processes of one guest. While a question is unanswered, no other is asked and the last answer counts."""

    def __init__(self, ask: Callable[[], Awaitable[frozenset[int]]]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[frozenset[int]] | None = None
        self._last: frozenset[int] = frozenset()

    async def pids(self) -> frozenset[int]:
        asked = self._asking
        if asked is None:
            asked = self._asking = asyncio.ensure_future(self._ask())
        done, _ = await asyncio.wait([asked], timeout=PATIENCE_S)
        if done:
            if self._asking is asked:  # another caller may have asked again since
                self._asking = None
            if asked.exception() is None:
                self._last = asked.result()
        return self._last
