"""Which processes a guest has, asked of its engine without waiting for one that hangs."""

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 0.25  # of a look that must not be kept from shutting a gate; ours


class Whereabouts:
    """An engine that has not answered is not asked again before it has; until then what it said last counts."""

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
            if self._asking is asked:  # another may have waited for the same answer, and asked anew since
                self._asking = None
            if asked.exception() is None:
                self._last = asked.result()
        return self._last
