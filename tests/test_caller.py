"""Coroutines that ask a daemon that hangs: a cancelled one leaves no thread and no connection. The sockets are real."""

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mesh import aio, futures
from mesh.api.errors import MeshError
from mesh.caller import THREAD, Caller, in_thread
from mesh.client import Client
from mesh.layout import Layout

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def asking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def nobody_asks() -> bool:
    """Those that have given their answer still have to end."""
    for thread in asking():
        thread.join(30)
    return not asking()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """Takes connections where the daemon of this state directory would, and says nothing of itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(Layout(tmp_path).socket))
        server.listen()
        server.setblocking(False)
        yield server


@asynccontextmanager
async def accepted(server: socket.socket) -> AsyncIterator[socket.socket]:
    """The connection of a request; at the end, the other side must have closed it."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(server)
    with connection:
        assert (await loop.sock_recv(connection, 4096)).startswith((b"GET /v1/jobs", b"POST /v1/jobs"))
        yield connection
        while await loop.sock_recv(connection, 4096):
            pass


async def test_a_cancelled_call_ends_while_the_daemon_hangs(silent: socket.socket, tmp_path: Path) -> None:
    daemon = Client(Layout(tmp_path).socket)
    call = asyncio.create_task(Caller().call(lambda: daemon.get("/v1/jobs", timeout_s=None)))
    async with accepted(silent):
        assert asking()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert nobody_asks()


async def test_a_call_that_is_cancelled_before_it_connects_ends_when_it_does(
    silent: socket.socket, tmp_path: Path
) -> None:
    daemon, may = Client(Layout(tmp_path).socket), threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        may.wait()
        try:
            daemon.get("/v1/jobs", timeout_s=None)
        except MeshError as error:
            failed.append(error)

    call = asyncio.create_task(Caller().call(work))
    await asyncio.sleep(0)
    for _ in range(3):  # however often
        call.cancel()
        await asyncio.sleep(0)
    assert not call.done()
    may.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert failed and nobody_asks()


async def test_a_submission_waits_for_the_daemon_until_it_is_cancelled_again(
    silent: socket.socket, tmp_path: Path
) -> None:
    made = asyncio.create_task(aio.Client(tmp_path).submit(pow, 2, 3))
    async with accepted(silent):
        made.cancel()
        assert not (await asyncio.wait([made], timeout=0.1))[0]
        made.cancel()
        with pytest.raises(asyncio.CancelledError):
            await made
        assert nobody_asks()


@pytest.fixture
def job(tmp_path: Path) -> aio.Job[int]:
    """That no daemon knows."""
    return aio.Job(futures.Job(futures.Client(tmp_path), "0123456789"))


async def test_a_followed_log_is_shut_down_by_who_is_cancelled(silent: socket.socket, job: aio.Job[int]) -> None:
    pieces: asyncio.Queue[str] = asyncio.Queue()

    async def listen() -> None:
        async for piece in job.logs(follow=True):
            pieces.put_nowait(piece)

    listener = asyncio.create_task(listen())
    async with accepted(silent) as connection:
        half_a_letter = "é".encode()[:1]
        await asyncio.get_running_loop().sock_sendall(connection, HEAD + b"6\r\nfirst" + half_a_letter + b"\r\n")
        assert await pieces.get() == "first"
        listener.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener
        assert nobody_asks()


async def test_a_log_that_is_left_has_no_thread_and_then_no_connection(
    silent: socket.socket, job: aio.Job[int]
) -> None:
    async def first() -> str:
        async for piece in job.logs(follow=True):
            assert nobody_asks()  # nobody waits for the next piece
            return piece
        return ""

    reader = asyncio.create_task(first())
    async with accepted(silent) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, HEAD + b"5\r\nfirst\r\n")
        assert await reader == "first"


async def test_who_waits_for_a_job_may_give_up_and_the_job_goes_on(job: aio.Job[int]) -> None:
    waiting = [asyncio.create_task(job.wait()), *(asyncio.ensure_future(job) for _ in range(100))]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match=r"job 01234567 is not over after 0\.01 s"):
        await job.result(0.01)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert not job.done() and nobody_asks()
    await in_thread(lambda: job.future.set_result(7))
    assert set(await asyncio.gather(*waiting[1:])) == {7} == {await job}
    assert await job.exception() is None and job.done() and not job.cancelled()


async def test_what_a_job_raised_is_raised_again_for_each(job: aio.Job[int]) -> None:
    job.future.set_exception(KeyError("gone"))
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            await job
    cancelled = aio.Job(futures.Job[int](job.future.client, "9876543210"))
    waiting = asyncio.create_task(cancelled.result())
    await asyncio.sleep(0)
    cancelled.future.set_cancelled()
    with pytest.raises(concurrent.futures.CancelledError):  # an Exception: this coroutine goes on
        await waiting
