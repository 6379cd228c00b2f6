"""Background tasks. One that fails is logged and does not stop the others."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN_S = 10.0  # before work that failed is begun again (own choice)


class TaskSet:
    """Background tasks of one component. `failed` is called with the error of a task that failed."""

    def __init__(self, log: logging.Logger, failed: Callable[[BaseException], None] = lambda error: None) -> None:
        self._log, self._failed = log, failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log.error("%s failed", task.get_name(), exc_info=error)
            self._failed(error)


async def restarted(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, log: logging.Logger, fatal: type[Exception]
) -> None:
    """Do lasting work, and begin it again some time after it fails; a `fatal` error is raised."""
    while True:
        try:
            return await work()
        except fatal:
            raise
        except Exception:
            log.exception("%s failed: it begins again in %g s", name, AGAIN_S)
        await asyncio.sleep(AGAIN_S)
