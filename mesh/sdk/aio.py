"""The Python API for coroutines: the nouns of `mesh` with the same words; what asks the daemon is awaited.
docs/how-to/python-api.md.

Over mesh/sdk/futures.py, which does all of it: here each call has a thread while it lasts, and waiting for a job has none.

>>> import asyncio, mesh
>>> async def add():
...     job = await mesh.sdk.aio.submit(sum, [1, 2, 3])
...     return await job
>>> asyncio.run(add())
6
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Unpack

from mesh.api.async_client import Caller, settled
from mesh.sdk import futures
from mesh.sdk.payload import Terms
from mesh.sdk.resource_history import Needs
from mesh.util.errors import MeshError

T = TypeVar("T")


class Job(Generic[T]):
    """A job of the mesh; `await job` gives its result. Cancelling the waiting task does not cancel the job; `cancel` does.

    `future`: the same job as a `mesh.Job`.
    """

    def __init__(self, future: futures.Job[T]) -> None:
        self.future, self.id = future, future.id
        self._waiting: set[asyncio.Future[None]] = set()
        future.add_done_callback(self._tell)

    def __repr__(self) -> str:
        return f"<mesh.sdk.aio.Job {self.id[:8]}{' over' if self.done() else ''}>"

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> T:
        """Return the function's result, or raise its exception.

        `concurrent.futures.CancelledError` if it was cancelled, `mesh.JobFailed` if it ended without an answer, TimeoutError
        after `timeout` seconds.
        """
        await self._over(timeout)
        return self.future.result()

    async def exception(self, timeout: float | None = None) -> BaseException | None:
        await self._over(timeout)
        return self.future.exception()

    def done(self) -> bool:
        return self.future.done()

    def cancelled(self) -> bool:
        return self.future.cancelled()

    async def info(self) -> dict[str, Any]:
        """Return its present state, as `mesh ps --json` has it."""
        return await Caller().call(self.future.info)

    async def state(self) -> str:
        """Return its present state: `waiting`, `running`, `done`, `failed`, `cancelled` and others (docs/explanation/jobs.md)."""
        return await Caller().call(lambda: self.future.state)

    async def running(self) -> bool:
        return await Caller().call(self.future.running)

    async def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended and return its state. TimeoutError after `timeout` seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        await self._over(timeout)
        while (found := await self.info())["outcome"] is None:  # a cancelled job ends after its future
            if time.monotonic() >= until:
                raise self.future.late(timeout)
            await asyncio.sleep(futures.POLL_S)
        return str(found["state"])

    async def cancel(self) -> bool:
        """Cancel it. Return False if it has ended already."""
        return await Caller().call(self.future.cancel)

    async def logs(
        self, follow: bool = False, since: datetime | None = None, timestamps: bool = False, rank: int = 0
    ) -> AsyncGenerator[str, None]:
        """Yield the output of all its attempts in pieces, as `Job.logs` does."""
        caller = Caller()
        with closing(self.future.logs(follow, since, timestamps, rank)) as pieces:
            while (piece := await caller.call(lambda: next(pieces, None))) is not None:
                yield piece

    async def events(self) -> list[dict[str, Any]]:
        """Return its events from all nodes involved, oldest first."""
        return await Caller().call(self.future.events)

    async def migrate(self, to: str = "") -> dict[str, Any]:
        """Move it to a node, or to the best other one."""
        return await Caller().call(lambda: self.future.migrate(to))

    async def _over(self, timeout: float | None) -> None:
        over = asyncio.get_running_loop().create_future()
        self._waiting.add(over)
        try:
            if not self.done():
                await asyncio.wait([over], timeout=timeout)
        finally:
            self._waiting.discard(over)
        if not self.done():
            raise self.future.late(timeout)

    def _tell(self, future: object) -> None:
        """Pass on its end, from the thread that learned of it."""
        for over in list(self._waiting):
            with suppress(RuntimeError):  # its loop is closed
                over.get_loop().call_soon_threadsafe(over.set_result, None)


class Client:
    """A client of this user's daemon. `state`: its state directory, as for `mesh --state` (default: that of the command line)."""

    def __init__(self, state: str | Path | None = None) -> None:
        self._client = futures.Client(state)

    async def submit(self, function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
        """Run `function(*args)` on the mesh. Arguments by keyword: `functools.partial`, or `mesh.Call`.

        Cancelled, it waits until the daemon has taken the job, and cancels that; cancelled again, it does not wait.
        """
        return await _submitted(lambda: self._client.submit(function, *args, **terms))

    async def needs(self, function: Callable[..., Any], **terms: Unpack[Terms]) -> Needs:
        """Return what earlier runs of the same code with `gpus="auto"` needed, in the same image and Python."""
        return await Caller().call(lambda: self._client.needs(function, **terms))

    async def job(self, id: str, results: Literal["pickle", "json"] = "pickle") -> Job[Any]:
        """Return a job by its name, its id or the beginning of its id."""
        return Job(await Caller().call(lambda: self._client.job(id, results)))

    async def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs that the daemon knows, as `mesh ps --json` has them."""
        return await Caller().call(self._client.jobs)

    async def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes that the daemon knows, as `mesh nodes --json` has them."""
        return await Caller().call(self._client.nodes)


async def submit(function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
    """Run `function(*args)` on the mesh through this user's daemon. See `Client.submit` and `mesh.sdk.payload.Terms`."""
    return await _submitted(lambda: futures.submit(function, *args, **terms))


async def _submitted(work: Callable[[], futures.Job[T]]) -> Job[T]:
    """Submit a call. If cancelled, cancel the job too, unless cancelled again."""
    caller = Caller()
    made = caller.begin(work)
    try:
        await asyncio.wait([made])
    except asyncio.CancelledError:
        try:
            await asyncio.wait([made])
        except asyncio.CancelledError:  # the daemon may hang
            caller.hang_up()
        await settled(made)
        if made.exception() is None:
            with suppress(MeshError):
                await Caller().call(made.result().cancel)
        raise
    return Job(made.result())
