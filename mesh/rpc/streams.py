"""Streams of files and chunks: outgoing data is read ahead from disk; incoming chunks are kept if the stream breaks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from aiohttp import ClientError, StreamReader, web

from ckptstore.errors import StoreError
from ckptstore.pacing import Background
from ckptstore.pack import StoredObject
from ckptstore.receiver import Receiver
from membership.identity import NodeId
from mesh.rpc.memory import HELD
from mesh.rpc.pacing import Cargo, Lane, Wire

SLICE_BYTES = 256 << 10  # in one write: of 1 MiB, it costs a sender an eighth more (own measurement)
IDLE_S = 20.0  # a stream without data for this long is broken

STALL_S, STALL_BYTES = 30.0, 64 * 1024  # a peer that sends less in this time is taken for gone (own choice)

log = logging.getLogger(__name__)

T = TypeVar("T", bytes, memoryview)


async def read_within(content: StreamReader, limit: int) -> bytes | None:
    """Read a stream to its end; None if it has over `limit` bytes."""
    data = bytearray()
    async for piece in content.iter_any():
        data += piece
        if len(data) > limit:
            return None
    return bytes(data)


async def sliced(frames: Iterator[T]) -> AsyncIterator[T]:
    """Read frames in a thread and yield them in pieces that suit a socket."""
    ahead = asyncio.ensure_future(asyncio.to_thread(next, frames, None))
    try:
        while (frame := await ahead) is not None:
            ahead = asyncio.ensure_future(asyncio.to_thread(next, frames, None))
            for start in range(0, len(frame), SLICE_BYTES):
                yield frame[start : start + SLICE_BYTES]
    finally:
        ahead.cancel()


class Patience:
    """The time left for a peer in a stream without pauses of its own, so that a peer that drips holds nobody for ever.

    Only the time spent in `waiting` counts, until the peer has sent STALL_BYTES.
    """

    def __init__(self) -> None:
        self._left, self._count, self._begun = STALL_S, 0, 0.0
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait for the peer; TimeoutError if it is too slow."""
        self._begun = time.monotonic()
        async with asyncio.timeout(max(0.0, self._left)) as self._limit:
            yield
        self._limit = None
        self._left -= time.monotonic() - self._begun

    def sent(self, count: int) -> None:
        self._count += count
        if self._count >= STALL_BYTES:
            self._left, self._count, self._begun = STALL_S, 0, time.monotonic()
            if self._limit is not None:  # one wait may be for more than STALL_BYTES
                self._limit.reschedule(asyncio.get_running_loop().time() + STALL_S)


class Given(NamedTuple):
    """A finished answer: `size` in bytes; `held` as in `Lane.held`."""

    response: web.StreamResponse
    size: int
    seconds: float
    held: bool


async def given(request: web.Request, wire: Wire, frames: Iterator[T], kind: str, to: NodeId, size: int = 0) -> Given:
    """Send these frames to a node as the answer, as background traffic, in its turn; return when it has all of them.

    If the `size` is known (not 0), the answer says it. HTTPBadRequest, which nobody reads any more, if the other end leaves or
    takes less than STALL_BYTES in STALL_S.
    """
    if (held := request.get(HELD)) is not None:
        held.waits = True
    async with wire.giving.hold(to, 1, request.transport):
        return await _given(request, wire, frames, Cargo(kind, to, size=size))


async def _given(request: web.Request, wire: Wire, frames: Iterator[T], cargo: Cargo) -> Given:
    response = web.StreamResponse()
    response.content_length = cargo.size or None
    await response.prepare(request)
    begun, size = time.monotonic(), 0
    async with wire.lane(Background(), cargo) as lane:
        lane.bind(request.transport)
        try:
            async for piece in sliced(frames):
                size += len(piece)
                await _moving(response.write(piece), lane)
            if cargo.size not in {0, size}:
                response.force_close()  # the other end waits for the rest
            await _moving(response.write_eof(), lane)
            await lane.drained()
        except (ConnectionResetError, TimeoutError) as error:
            if request.transport is not None:
                request.transport.abort()  # else the server waits until the other end has read the rest
            raise web.HTTPBadRequest(text="the other end has left, or does not read") from error
    return Given(response, size, time.monotonic() - begun, lane.held)


async def _moving(write: Coroutine[Any, Any, None], lane: Lane) -> None:
    """Wait for a write while the other end takes data; TimeoutError if it takes less than STALL_BYTES in STALL_S."""
    writing = asyncio.ensure_future(write)
    try:
        while not writing.done():
            before = lane.sent  # what has arrived: at a low `upload_mbps`, one piece takes minutes
            await asyncio.wait([writing], timeout=STALL_S)
            if not writing.done() and lane.sent - before < STALL_BYTES:
                raise TimeoutError
        await writing
    finally:
        writing.cancel()


async def finished(receiver: Receiver) -> int:
    """Make a stream durable that was received whole; return the number of new chunks. CorruptChunk leaves nothing."""
    return await asyncio.shield(asyncio.to_thread(receiver.finish))  # it closes the pack, whoever leaves meanwhile


async def received(content: StreamReader, receiver: Receiver, patience: Patience | None = None) -> None:
    """Receive a stream without making it durable, which `finished` does. If it breaks, whole chunks are kept; StoreErrors leave
    nothing. TimeoutError after IDLE_S seconds without data, or as `patience` says of a stream without pauses.
    """

    async def read() -> list[StoredObject]:
        while True:
            async with asyncio.timeout(IDLE_S) if patience is None else patience.waiting():
                data = await content.readany()
            if patience is not None:
                patience.sent(len(data))
            receiver.expect(len(data))
            if (whole := list(receiver.objects.feed(data))) or not data:
                return whole

    await fed(read, receiver)


async def fed(read: Callable[[], Awaitable[list[StoredObject]]], receiver: Receiver) -> None:
    """Let the receiver take, in a thread, what is `read` until that is empty."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="taken")  # one thread keeps the order
    # Store objects while the next ones arrive: a quarter faster (own measurement).
    feeding: asyncio.Future[None] = loop.create_future()
    feeding.set_result(None)
    try:
        while True:
            objects = await read()
            await feeding
            if not objects:
                return
            feeding = loop.run_in_executor(thread, _take, receiver, objects)
    except StoreError:
        await loop.run_in_executor(thread, receiver.abort)
        raise
    except BaseException as error:
        keeping = loop.run_in_executor(thread, _keep, receiver)
        if isinstance(error, ClientError | TimeoutError | OSError):
            await asyncio.gather(feeding, keeping, return_exceptions=True)
        raise
    finally:
        thread.shutdown(wait=False)


def _take(receiver: Receiver, objects: list[StoredObject]) -> None:
    try:
        receiver.take(objects)
    except StoreError:
        receiver.abort()  # at once: if the stream also breaks, nothing of it may be kept
        raise


def _keep(receiver: Receiver) -> None:
    try:
        count = receiver.keep()
    except (StoreError, OSError) as error:
        log.info("the chunks of a broken stream could not be kept: %s", error)
    else:
        log.info("a stream broke; kept %d of its chunks", count)
