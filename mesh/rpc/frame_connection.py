"""A connection for frames: a WebSocket between two nodes, or between a daemon and its command line.

Each tunnel has its own connection, so TCP's window is its flow control: a slow reader blocks only its own tunnel. There are no
heartbeats, which a blocked receiver would not answer; the kernel detects that the other machine is gone.
"""

import asyncio
import contextlib
import socket
from typing import Any

import aiohttp

from membership.framing import keep_alive
from mesh.rpc.frames import MAX_FRAME_BYTES, Frame, FrameError, decode_frame, encode_frame
from mesh.util.race import race

CLOSE_S = 3.0  # for the other end to confirm a close (own choice)
MESSAGE_LIMIT = MAX_FRAME_BYTES + 1


class Line:
    """One end of a connection.

    `web_socket` is aiohttp's of either side; `transport` the one below it, if aiohttp does not close that itself.
    """

    def __init__(self, web_socket: Any, transport: asyncio.BaseTransport | None = None) -> None:
        self._web_socket, self._transport = web_socket, transport
        below = web_socket if transport is None else transport
        sock = below.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            keep_alive(sock)

    async def receive(self) -> Frame | None:
        """Return the next frame; None at the end. FrameError if the message is not a frame."""
        data = await self.receive_bytes()
        return None if data is None else decode_frame(data)

    async def receive_bytes(self) -> bytes | None:
        while True:
            try:
                message = await self._web_socket.receive()
            except (aiohttp.ClientError, OSError, RuntimeError):
                return None
            if message.type == aiohttp.WSMsgType.BINARY:
                data: bytes = message.data
                return data
            if message.type == aiohttp.WSMsgType.TEXT:
                raise FrameError("frames are bytes, not text")
            if message.type not in {aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG}:
                return None

    async def send(self, frame: Frame) -> None:
        """Send a frame; wait while the other end is slow. After a failure frames are dropped; `receive` reports the end."""
        await self.send_bytes(encode_frame(frame))

    async def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError):
            await self._web_socket.send_bytes(data)

    async def close(self, last: Frame | None = None) -> None:
        """Close the connection cleanly, or abort it if the other end takes nothing."""
        try:
            async with asyncio.timeout(CLOSE_S):
                if last is not None:
                    await self.send(last)
                await self._web_socket.close()
        except (aiohttp.ClientError, OSError, RuntimeError):
            if isinstance(self._transport, asyncio.Transport):
                self._transport.abort()


async def splice(one: Line, other: Line) -> None:
    """Forward messages in both directions until either end closes, then close both."""

    async def forward(source: Line, sink: Line) -> None:
        with contextlib.suppress(FrameError):
            while (data := await source.receive_bytes()) is not None:
                await sink.send_bytes(data)

    try:
        await race("tunnel", forward(one, other), forward(other, one))
    finally:
        await one.close()
        await other.close()
