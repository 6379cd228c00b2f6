"""The Python API for coroutines: the nouns of `mesh` with the same words; what asks the daemon is awaited. docs/python-api.md.

Over mesh/futures.py, which does all of it: here each call has a thread while it lasts, and waiting for a job has none.

>>> import asyncio, mesh
>>> async def add():
...     job = await mesh.aio.submit(sum, [1, 2, 3])
...     return await job
>>> asyncio.run(add())
6
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Unpack

from mesh import futures
from mesh.api.errors import MeshError
from mesh.caller import Caller, settled
from mesh.needs import Needs
from mesh.parcel import Terms

T = TypeVar("T")


class Job(Generic[T]):
    """A job of the mesh; `await job` gives its result. Whoever waits for it may be cancelled: the job goes on until `cancel`.

    `future`: the same as `mesh.Job`; of any such job this can be made.
    """

    def __init__(self, future: futures.Job[T]) -> None:
        self.future, self.id = future, future.id
        self._waiting: set[asyncio.Future[None]] = set()
        future.add_done_callback(self._tell)

    def __repr__(self) -> str:
        return f"<mesh.aio.Job {self.id[:8]}{' over' if self.done() else ''}>"

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> T:
        """What its function returns or raises; `concurrent.futures.CancelledError` if it was cancelled, `mesh.JobFailed` if it
        ended without an answer, TimeoutError after `timeout` seconds."""
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
        """All that `mesh ps --json` has of it, as it is now."""
        return await Caller().call(self.future.info)

    async def state(self) -> str:
        """As it is now: `waiting`, `running`, `done`, `failed`, `cancelled` and others (docs/jobs.md)."""
        return await Caller().call(lambda: self.future.state)

    async def running(self) -> bool:
        return await Caller().call(self.future.running)

    async def wait(self, timeout: float | None = None) -> str:
        """Until it is over: its state then. TimeoutError after `timeout` seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        await self._over(timeout)
        while (told := await self.info())["outcome"] is None:  # one that was cancelled ends after its future
            if time.monotonic() >= until:
                raise self.future.late(timeout)
            await asyncio.sleep(futures.LOOK_S)
        return str(told["state"])

    async def cancel(self) -> bool:
        """End it. False if it is over already."""
        return await Caller().call(self.future.cancel)

    async def logs(self, follow: bool = False) -> AsyncGenerator[str, None]:
        """Its output over all its attempts, in pieces; with `follow` until it is over."""
        caller = Caller()
        with closing(self.future.logs(follow)) as pieces:
            while (piece := await caller.call(lambda: next(pieces, None))) is not None:
                yield piece

    async def events(self) -> list[dict[str, Any]]:
        """What all who have a part in it say happened, oldest first."""
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
        """In the thread that has heard of its end."""
        for over in list(self._waiting):
            with suppress(RuntimeError):  # its loop is closed
                over.get_loop().call_soon_threadsafe(over.set_result, None)


class Client:
    """One daemon of this user. `state`: its state directory, as `mesh --state`; without it, as the command line has it."""

    def __init__(self, state: str | Path | None = None) -> None:
        self._client = futures.Client(state)

    async def submit(self, function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
        """Run `function(*args)` on the mesh. Arguments by keyword: `functools.partial`, or `mesh.Call`.

        Cancelled, it waits until the daemon has taken the job, and cancels that; cancelled again, it does not wait.
        """
        return await _submitted(lambda: self._client.submit(function, *args, **terms))

    async def needs(self, function: Callable[..., Any], **terms: Unpack[Terms]) -> Needs:
        """What runs of the same code with `gpus="auto"` have needed so far, in the same image and by the same Python."""
        return await Caller().call(lambda: self._client.needs(function, **terms))

    async def job(self, id: str, results: Literal["pickle", "json"] = "pickle") -> Job[Any]:
        """A job that was submitted before, by its id or the beginning of it, or by its name."""
        return Job(await Caller().call(lambda: self._client.job(id, results)))

    async def jobs(self) -> list[dict[str, Any]]:
        """All jobs that the daemon knows, as `mesh ps --json` has them."""
        return await Caller().call(self._client.jobs)

    async def nodes(self) -> list[dict[str, Any]]:
        """All nodes that the daemon knows, as `mesh nodes --json` has them."""
        return await Caller().call(self._client.nodes)


async def submit(function: Callable[..., T], /, *args: Any, **terms: Unpack[Terms]) -> Job[T]:
    """Run `function(*args)` on the mesh, by this user's daemon. See `Client.submit` and `mesh.parcel.Terms`."""
    return await _submitted(lambda: futures.submit(function, *args, **terms))


async def _submitted(work: Callable[[], futures.Job[T]]) -> Job[T]:
    """Cancelled, it leaves no job that nobody knows of, unless it is cancelled again."""
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
