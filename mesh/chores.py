"""Work that goes on beside its owner's own, kept until it ends. What goes wrong in it is logged, and ends nothing else."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Chores:
    """`failed` hears what one ended with, besides the log."""

    def __init__(self, log: logging.Logger, failed: Callable[[BaseException], None] = lambda error: None) -> None:
        self._log, self._failed = log, failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what goes on, and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log.error("%s failed", task.get_name(), exc_info=error)
            self._failed(error)
