"""Blocking calls of the daemon for coroutines: each has a thread while it lasts, and a cancelled one ends with its connection."""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from mesh.api.client import opened

T = TypeVar("T")

THREAD = "asks the daemon"


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """`asyncio.to_thread`, but that none waits for another to begin, and that the program does not wait for it at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # the caller has gone
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # the one who waits is told
            failed = error
        with suppress(RuntimeError):  # its loop is closed
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=copy_context().run, args=(run,), daemon=True, name=THREAD).start()
    return future


async def settled(future: "asyncio.Future[Any]") -> None:
    """Wait until the future is done, however often this is cancelled."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    future.exception()  # whatever it was, it has been seen


class Caller:
    """Makes calls one after the other, as those that read one stream, until it hangs up."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._hung_up = False

    async def call(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` does. If cancelled, close the connection and wait until `work` has ended."""
        answer = self.begin(work)
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            self.hang_up()
            await settled(answer)
            raise
        return answer.result()

    def begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        def connected() -> T:
            opened.set(self._opened)
            return work()

        return in_thread(connected)

    def hang_up(self) -> None:
        """Shut down the connection of what was begun, now or when it is made."""
        self._hung_up = True
        if self._connection is not None:
            with suppress(OSError):  # it is closed
                self._connection.shutdown(socket.SHUT_RDWR)

    def _opened(self, connection: socket.socket) -> None:
        self._connection = connection
        if self._hung_up:
            self.hang_up()
