"""Reads the body of an answer straight into the memory of the objects in it.

aiohttp copies each byte four times on its way to a reader, which costs more than decrypting it (measured: make bench-data). So
once aiohttp has read the head of an answer that says its length, the rest comes by asyncio's buffered protocol. Then aiohttp has
its connection back for the next request.
"""

import asyncio
from types import TracebackType
from typing import Any

from aiohttp import ClientResponse

from ckptstore.errors import CorruptChunk
from ckptstore.pack import ObjectStream, StoredObject
from mesh.rpc.streams import Patience


class DirectBody(asyncio.BufferedProtocol):
    """The body of an answer with a `content_length`, for the duration of a block. Reading pauses while an object waits."""

    def __init__(self, response: ClientResponse, objects: ObjectStream) -> None:
        self._content, self._objects = response.content, objects
        self._whole = list(objects.feed(self._content.read_nowait()))  # what came with the head
        self._left = (response.content_length or 0) - self._content.total_bytes
        connection = response.connection  # None once aiohttp has read all of a short body
        self._problem: BaseException | None = None
        self._patience = Patience()
        self._changed = asyncio.Event()
        self._transport: Any = None if connection is None else connection.transport
        self._http: Any = None if connection is None else connection.protocol
        if self._left and self._transport is None:
            self._problem = ConnectionResetError("the connection is closed")

    def __enter__(self) -> "DirectBody":
        if self._left and self._problem is None:
            self._transport.set_protocol(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left and self._problem is None:
            self._transport.set_protocol(self._http)  # which closes it, since the body is not over

    async def read(self) -> list[StoredObject]:
        """Return the next objects; none at the end. TimeoutError if the holder is too slow, CorruptChunk, OSError."""
        while not self._whole and self._left and self._problem is None:
            self._changed.clear()
            async with self._patience.waiting():
                await self._changed.wait()
        if not self._whole and self._problem is not None:
            raise self._problem
        whole, self._whole = self._whole, []
        if whole and self._left and self._problem is None:
            self._transport.resume_reading()
        return whole

    # --- called by the transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._objects.space()[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self._patience.sent(nbytes)
        try:
            found = self._objects.advance(nbytes)
        except CorruptChunk as error:
            self._transport.set_protocol(self._http)
            self._problem = error
            self._changed.set()
            return
        if found is not None:
            self._whole.append(found)
            self._changed.set()
            if self._left:
                self._transport.pause_reading()
        if not self._left:
            self._transport.set_protocol(self._http)
            self._content.feed_eof()
            self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._problem = exc or ConnectionResetError("the connection was closed")
        self._changed.set()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
