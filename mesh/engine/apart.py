"""What takes minutes: a thread of its own, for which no exit waits, and which takes no place from what takes a moment."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Callable[[], T], name: str) -> T:
    """What `work` gives or raises. Cancelled, nobody waits for it any more, and it goes on."""
    answer = Future[T]()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
