"""Tunnel targets inside a job: a port on its loopback, or a socket in its control directory.

docs/explanation/tunnels.md gives the reasons.
"""

import asyncio
import contextlib
import os
import re
import stat
import sys

import msgspec

from mesh.execution.session import Session
from mesh.jobs.attempt import Attempt
from mesh.rpc.frames import (
    ERRORS,
    LISTENS_S,
    MOVES_S,
    OUTPUT,
    PIECE_BYTES,
    Data,
    Exit,
    Failed,
    Frame,
    InputEnd,
    Order,
)
from mesh.util.errors import ExitCode, MeshError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
EXEC, PORT, SOCKET = "exec", "port-", "socket-"
CONNECTED = b"+"  # the first byte of a connected relay
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes of POSIX shells


class TunnelTarget(msgspec.Struct, frozen=True):
    """A tunnel's target: a port on the guest's loopback, a socket in its control directory, or a command if neither is given."""

    port: int = 0
    socket: str = ""


def parse_target(text: str) -> TunnelTarget:
    """Parse a target; ValueError if it names none."""
    if text == EXEC:
        return TunnelTarget()
    number = text.removeprefix(PORT)
    if number != text and number.isascii() and number.isdigit() and len(number) <= 5 and 1 <= int(number) <= 65_535:
        return TunnelTarget(port=int(number))
    name = text.removeprefix(SOCKET)
    if name != text and NAME.fullmatch(name):
        return TunnelTarget(socket=name)
    raise ValueError(f"no tunnel leads to {text[:80]!r}")


class NotRunning(MeshError):
    """The job is not running here now, but may be soon."""

    again_s = MOVES_S


class NotListening(NotRunning):
    again_s = LISTENS_S


async def reach(attempt: Attempt, where: TunnelTarget) -> tuple[Session, bytes]:
    """Connect to a target; return the session and the bytes that have already arrived. NotListening, MeshError, SessionError."""
    if where.socket:
        return await _reach_socket(attempt, where.socket), b""
    return await _reach_port(attempt, where.port)


async def _reach_port(attempt: Attempt, port: int) -> tuple[Session, bytes]:
    """Connect by a process of the guest: a container here has no other network than its loopback."""
    if attempt.guest is None:
        raise NotRunning("the job is being started")
    python = "python3" if attempt.engine.own_root else sys.executable
    session = await attempt.guest.open_session(Order((python, "-I", "-S", "-c", RELAY, str(port))))
    try:
        first = await session.receive()
        if not isinstance(first, Data) or first.kind != OUTPUT or first.data[:1] != CONNECTED:
            raise await _why_not(session, first, port)
    except BaseException:
        await session.close()
        raise
    return session, first.data[1:]


async def _why_not(session: Session, first: Frame | None, port: int) -> MeshError:
    """Return why a relay did not connect, from its output and its exit."""
    output, frame = b"", first
    while frame is not None:
        if isinstance(frame, Failed):
            return NotRunning(frame.text)
        if isinstance(frame, Exit) and frame.code in {NOT_EXECUTABLE, NOT_FOUND}:
            return MeshError(
                "the image has no python3, by which a port is reached; let the job listen on a socket in $MESH_CTL_DIR and "
                "forward that: `mesh job forward JOB NAME.sock`"
            )
        if isinstance(frame, Data) and frame.kind == ERRORS and len(output) < 300:
            output += frame.data
        frame = await session.receive()
    return NotListening(output.decode(errors="replace").strip()[-300:] or f"nothing in the job answers on port {port}")


async def _reach_socket(attempt: Attempt, name: str) -> Session:
    """Connect by the socket's path, whatever network the guest has."""
    try:
        descriptor = open_control(attempt, name, os.O_PATH)
    except (OSError, ValueError) as error:
        raise NotListening(f"the job has no socket {name} in its control directory (yet)") from error
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise MeshError(f"{name} is not a socket", ExitCode.NOT_FOUND)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}", limit=PIECE_BYTES)
    except OSError as error:
        raise NotListening(f"nobody in the job listens on {name} (yet)") from error
    finally:
        os.close(descriptor)
    return SocketSession(reader, writer)


class SocketSession:
    """A socket as a session: what arrives is its output."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._over = False

    async def receive(self) -> Frame | None:
        if self._over:
            return None
        try:
            data = await self._reader.read(PIECE_BYTES)
        except OSError:
            data = b""
        self._over = not data
        return Data(OUTPUT, data) if data else Exit(0)

    async def send(self, frame: Frame) -> None:
        with contextlib.suppress(OSError):
            if isinstance(frame, Data):
                self._writer.write(frame.data)
                await self._writer.drain()
            elif isinstance(frame, InputEnd):
                self._writer.write_eof()

    async def close(self) -> None:
        self._writer.transport.abort()


def open_control(attempt: Attempt, name: str, flags: int) -> int:
    """Open a file of the control directory, never through a link: the guest may have placed links there."""
    if NAME.fullmatch(name) is None:
        raise ValueError(name)
    directory = os.open(attempt.base / "ctl", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)


# Runs inside the guest with any Python 3: connects its standard streams to a port on loopback. It writes one byte when
# connected. IPv4, then IPv6, since programs listen on either. It reads no more than the other side has taken.
RELAY = """
import socket, sys, threading, os
port, error = int(sys.argv[1]), None
for host in ("127.0.0.1", "::1"):
    try:
        peer = socket.create_connection((host, port), 5)
        break
    except OSError as found:
        error = error or found
else:
    sys.exit("nothing in the job answers on port %d: %s" % (port, error.strerror or error))
peer.settimeout(None)
def inwards():
    try:
        while True:
            data = os.read(0, 32768)
            if not data:
                break
            peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def outwards():
    data = b"+"
    try:
        while data:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view):]
            data = peer.recv(32768)
    except OSError:
        pass
threading.Thread(target=inwards, daemon=True).start()
outwards()
os._exit(0)
"""
