"""One command that runs inside a guest beside its job: `mesh exec`, and the relay of `mesh forward`. What every engine offers.

Whoever reads a session slowly holds up what runs in it, and the other way round: there is a bounded buffer in each direction.
"""

import asyncio
import contextlib
import socket
from typing import Protocol

from mesh.engine.frames import (
    MAX_FRAME_BYTES,
    MOVES_S,
    Exit,
    Failed,
    Frame,
    FrameError,
    Opened,
    Order,
    decode_frame,
    encode_frame,
)
from mesh.engine.sessionwire import HEADER, framed

FULL_BYTES = 64 * 1024  # that wait in the daemon, in either direction; ours


class SessionError(RuntimeError):
    """It cannot be opened now; the text says why."""


class Session(Protocol):
    async def receive(self) -> Frame | None:
        """What it writes, at last its Exit (or Failed); None from then on."""
        ...

    async def send(self, frame: Frame) -> None:
        """Input, its end, a signal, a new size of the terminal. Waits while it takes no input; one that has ended takes all."""
        ...

    async def close(self) -> None:
        """Hang up: what runs in it gets SIGHUP, and SIGKILL soon after."""
        ...


async def open_process_session(doors: socket.socket, order: Order) -> "ProcessSession":
    """Hand the guest's watcher the other end of a connection, for a process that it adds to the guest."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            doors.setblocking(False)
            socket.send_fds(doors, [b"session"], [theirs.fileno()])
    except OSError as error:
        ours.close()
        raise SessionError("the job has ended here, or its first process does not answer") from error
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=FULL_BYTES)
    writer.transport.set_write_buffer_limits(FULL_BYTES)
    session = ProcessSession(reader, writer)
    await session.send(order)
    return session


class ProcessSession:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._heard = self._over = False

    async def receive(self) -> Frame | None:
        if self._over:
            return None
        frame = await self._next()
        while isinstance(frame, Opened):
            frame = await self._next()
        self._over = isinstance(frame, Exit | Failed)
        if self._over:
            self._writer.transport.abort()  # which its other end waits for
        return frame

    async def _next(self) -> Frame:
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes")
            frame = decode_frame(await self._reader.readexactly(length))
        except (FrameError, OSError, asyncio.IncompleteReadError):
            if self._heard:
                return Failed("it was ended with the job on this node", again_s=MOVES_S)
            return Failed("the job may not run now: it waits for its lease, or is paused; try again", again_s=MOVES_S)
        self._heard = True
        return frame

    async def send(self, frame: Frame) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(framed(encode_frame(frame)))
            await self._writer.drain()

    async def close(self) -> None:
        self._over = True
        self._writer.transport.abort()  # what waits to be sent may wait for ever
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
