"""Cancelled calls of the asynchronous client to a hanging daemon, on real sockets: no thread or connection remains."""

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mesh.api.async_client import THREAD, Caller, in_thread
from mesh.api.client import Client
from mesh.daemon.layout import Layout
from mesh.sdk import aio, futures
from mesh.util.errors import MeshError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def asking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def nobody_asks() -> bool:
    """Wait until client threads have ended; return whether none remains."""
    for thread in asking():
        thread.join(30)
    return not asking()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[socket.socket]:
    """A server on the daemon's socket path that accepts connections and never answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(Layout(tmp_path).socket))
        server.listen()
        server.setblocking(False)
        yield server


@asynccontextmanager
async def accepted(server: socket.socket) -> AsyncIterator[socket.socket]:
    """Accept the connection of a request; on exit, wait until the client has closed it."""
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


async def test_call_cancelled_before_connecting_ends_on_connecting(silent: socket.socket, tmp_path: Path) -> None:
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
    for _ in range(3):  # repeated cancellation changes nothing
        call.cancel()
        await asyncio.sleep(0)
    assert not call.done()
    may.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert failed and nobody_asks()


async def test_submission_ends_only_at_the_second_cancellation(silent: socket.socket, tmp_path: Path) -> None:
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
    """A job that no daemon knows."""
    return aio.Job(futures.Job(futures.Client(tmp_path), "0123456789"))


async def test_cancelling_a_log_follower_closes_its_connection(silent: socket.socket, job: aio.Job[int]) -> None:
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


async def test_leaving_a_log_stream_ends_thread_and_connection(silent: socket.socket, job: aio.Job[int]) -> None:
    async def first() -> str:
        async for piece in job.logs(follow=True):
            assert nobody_asks()  # no thread waits for the next piece
            return piece
        return ""

    reader = asyncio.create_task(first())
    async with accepted(silent) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, HEAD + b"5\r\nfirst\r\n")
        assert await reader == "first"


async def test_cancelling_a_wait_leaves_the_job_running(job: aio.Job[int]) -> None:
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


async def test_each_waiter_gets_the_exception_of_the_job(job: aio.Job[int]) -> None:
    job.future.set_exception(KeyError("gone"))
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            await job
    cancelled = aio.Job(futures.Job[int](job.future.client, "9876543210"))
    waiting = asyncio.create_task(cancelled.result())
    await asyncio.sleep(0)
    cancelled.future.set_cancelled()
    with pytest.raises(concurrent.futures.CancelledError):  # an Exception, so this coroutine continues
        await waiting
