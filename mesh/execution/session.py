"""A session: one command that runs inside a guest beside its job (`mesh exec`, and the relay of `mesh job forward`).

Each direction has a bounded buffer, so a slow reader at one end blocks the writer at the other.
"""

import asyncio
import contextlib
import socket
from typing import Protocol

from mesh.execution.session_framing import HEADER, framed
from mesh.rpc.frames import (
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

FULL_BYTES = 64 * 1024  # buffered in the daemon in each direction (own choice)


class SessionError(RuntimeError):
    """The session cannot be opened now; the text says why."""


class Session(Protocol):
    """A command that runs inside a guest, as a stream of frames in each direction."""

    async def receive(self) -> Frame | None:
        """Return the next output; the last is its Exit or Failed, then None."""
        ...

    async def send(self, frame: Frame) -> None:
        """Send input, its end, a signal or a new terminal size. Wait while it takes no input; one that has ended takes all."""
        ...

    async def close(self) -> None:
        """Hang up: its processes get SIGHUP, and SIGKILL soon after."""
        ...


async def open_process_session(doors: socket.socket, order: Order) -> "ProcessSession":
    """Open a session by handing the guest's watcher one end of a connection; the watcher starts the process in the guest."""
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
    """A session of the `process` engine, over a socket to the process that the watcher started."""

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
            self._writer.transport.abort()  # the other end waits for this
        return frame

    async def _next(self) -> Frame:
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes")
            frame = decode_frame(await self._reader.readexactly(length))
        except (FrameError, OSError, asyncio.IncompleteReadError):
            if self._heard:
                return Failed("the session ended with the job on this node", again_s=MOVES_S)
            return Failed("the job may not run now: it waits for its lease, or is paused; try again", again_s=MOVES_S)
        self._heard = True
        return frame

    async def send(self, frame: Frame) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(framed(encode_frame(frame)))
            await self._writer.drain()

    async def close(self) -> None:
        self._over = True
        self._writer.transport.abort()  # buffered data might never be taken
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
