"""Files on a connection: read ahead from the disk while the wire is busy; and chunks that come, kept if it breaks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from aiohttp import ClientError, StreamReader, web

from ckptstore.errors import StoreError
from ckptstore.pacing import Background
from ckptstore.receiver import Receiver
from mesh.api.wire import Cargo, Wire

SLICE_BYTES = 1 << 20  # in one write
IDLE_S = 20.0  # a stream that stands still this long is broken

log = logging.getLogger(__name__)

T = TypeVar("T", bytes, memoryview)


async def sliced(frames: Iterator[T]) -> AsyncIterator[T]:
    """What a thread reads, in pieces of a size that suits a socket."""
    ahead = asyncio.ensure_future(asyncio.to_thread(next, frames, None))
    try:
        while (frame := await ahead) is not None:
            ahead = asyncio.ensure_future(asyncio.to_thread(next, frames, None))
            for start in range(0, len(frame), SLICE_BYTES):
                yield frame[start : start + SLICE_BYTES]
    finally:
        ahead.cancel()


class Given(NamedTuple):
    """An answer that was given: `size` in bytes; `held` as its lane has it (`Lane.held`)."""

    response: web.StreamResponse
    size: int
    seconds: float
    held: bool


async def given(request: web.Request, wire: Wire, frames: Iterator[T], cargo: Cargo) -> Given:
    """Answer with these, as background traffic; once the other end has all of it."""
    response = web.StreamResponse()
    await response.prepare(request)
    begun, size = time.monotonic(), 0
    async with wire.lane(Background(), cargo) as lane:
        lane.bind(request.transport)
        async for piece in sliced(frames):
            size += len(piece)
            await response.write(piece)
        await response.write_eof()
        await lane.drained()
    return Given(response, size, time.monotonic() - begun, lane.held)


async def taken(content: StreamReader, receiver: Receiver) -> int:
    """Feed all that comes and make it durable: how many chunks were new. If the stream breaks, what is whole is kept.

    CorruptChunk and other StoreErrors leave nothing; TimeoutError if it stands still.
    """
    await fed(content, receiver)
    return await asyncio.to_thread(receiver.finish)


async def fed(content: StreamReader, receiver: Receiver) -> None:
    """The same, but what has come is not durable yet: that is `receiver.finish`."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="taken")  # one, so that all is done in its order
    # A piece is stored while the next one comes: a quarter faster (own measurement).
    feeding: asyncio.Future[None] = loop.create_future()
    feeding.set_result(None)
    try:
        while True:
            async with asyncio.timeout(IDLE_S):
                data = await content.readany()
            await feeding
            if not data:
                return
            feeding = loop.run_in_executor(thread, _feed, receiver, data)
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


def _feed(receiver: Receiver, data: bytes) -> None:
    try:
        receiver.feed(data)
    except StoreError:
        receiver.abort()  # at once: if the stream breaks too, nothing of it may be kept
        raise


def _keep(receiver: Receiver) -> None:
    try:
        count = receiver.keep()
    except (StoreError, OSError) as error:
        log.info("what had arrived of a broken stream could not be kept: %s", error)
    else:
        log.info("a stream broke; %d chunks of it are kept", count)
