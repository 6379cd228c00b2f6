"""A task that several callers wait for. It ends with the last of them, unless it is kept."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class SharedTask:
    """The task. `kept`: it continues even if nobody waits for it."""

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.kept, self._waiting = False, 0
        self.task = asyncio.create_task(work, name=name)

    async def wait(self, report: Callable[[], object] | None = None, every_s: float | None = None) -> None:
        """Wait for its end, and raise its error; none if it was cancelled. Until then, call `report` every so many seconds."""
        self._waiting += 1
        try:
            while not self.task.done():
                if report is not None:
                    report()
                await asyncio.wait([self.task], timeout=every_s)
            if not self.task.cancelled():
                self.task.result()
        finally:
            self._waiting -= 1
            if not self._waiting and not self.kept:
                self.task.cancel()

    async def end(self) -> None:
        """Cancel it and wait for its end."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
