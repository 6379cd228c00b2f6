"""Run a call in its own daemon thread: one that may take minutes, or one that must not wait until file work is done.

Exit does not wait for it, and it takes no slot of the default executor, which saves and restores fill.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Callable[[], T], name: str) -> T:
    """Return what `work` returns or raises. If cancelled, it runs on and its result is dropped."""
    answer = Future[T]()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
