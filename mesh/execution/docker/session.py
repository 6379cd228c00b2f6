"""A session in a container: the engine's `exec`, on a hijacked connection (Docker Engine API: exec, attach).

Its processes are in the container's namespaces and control group, so they are paused and killed with it. The engine ends nothing
when a connection breaks, and has no call for signals: signals are sent from here, to the process id on this machine, after a
check that the process belongs to this container.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import docker.errors
import requests

from mesh.execution.session import FULL_BYTES, SessionError
from mesh.rpc.frames import (
    ERRORS,
    INPUT,
    MOVES_S,
    OUTPUT,
    PIECE_BYTES,
    Data,
    Exit,
    Failed,
    Frame,
    InputEnd,
    Order,
    Resize,
    Signal,
)
from mesh.util.processes import descendants_of

STREAM_HEADER = 8  # one byte for the stream, three unused, four for the length
HANG_UP_S = 2.0  # between SIGHUP and SIGKILL, as in session_agent (own choice)
START_LOOKS, START_EVERY_S = 250, 0.02  # polls of a started session until the engine knows its process
EXIT_LOOKS, EXIT_EVERY_S = 100, 0.05  # polls after the end of output until the engine knows the exit
MAX_HEAD_BYTES = 16 * 1024


async def open_docker_session(run: Any, container: Any, engine_socket: str, order: Order) -> "DockerSession":
    """Open a session. `run` performs a blocking call in the engine's threads. SessionError if the engine refuses."""
    api = container.client.api

    def create() -> tuple[str, int]:
        container.reload()
        environment = {"TERM": order.term or "dumb"} if order.tty else {}
        made = api.exec_create(
            container.id, list(order.argv), stdin=True, stdout=True, stderr=True, tty=order.tty, environment=environment
        )
        return str(made["Id"]), int(container.attrs["State"]["Pid"])

    try:
        identity, head = await run(create)
        reader, writer = await asyncio.open_unix_connection(engine_socket, limit=FULL_BYTES)
    except (docker.errors.APIError, requests.RequestException, OSError, KeyError) as error:
        text = getattr(error, "explanation", None) or error
        raise SessionError(f"the container takes no session now: {text}") from error
    writer.transport.set_write_buffer_limits(FULL_BYTES)
    session = DockerSession(run, api, identity, head, order.tty, reader, writer)
    try:
        await session.begin()
    except BaseException:
        writer.close()
        raise
    if order.tty:
        await session.send(Resize(order.rows, order.columns))
    return session


class DockerSession:
    """One `exec` in a container; implements `Session`."""

    def __init__(
        self,
        run: Any,
        api: Any,
        identity: str,
        head: int,
        tty: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._run, self._api, self._id, self._head, self._tty = run, api, identity, head, tty
        self._reader, self._writer = reader, writer
        self._over = False
        self._kind, self._left = OUTPUT, 0  # stream and remaining bytes of the engine's current piece

    async def begin(self) -> None:
        """Start the command and take over the connection. The response head is bounded."""
        body = json.dumps({"Detach": False, "Tty": self._tty}).encode()
        head = (
            f"POST /exec/{self._id}/start HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            self._writer.write(head.encode() + body)
            await self._writer.drain()
            answer = await self._reader.readuntil(b"\r\n\r\n")
            status = int(answer.split(None, 2)[1])
            if status not in {101, 200}:
                said = (await self._reader.read(MAX_HEAD_BYTES)).decode(errors="replace")
                raise SessionError(f"the container takes no session now: {said.strip()[-300:]}")
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise SessionError(f"the container engine broke off: {error}") from error

    async def receive(self) -> Frame | None:
        if self._over:
            return None
        try:
            frame = await self._output()
        except (OSError, asyncio.IncompleteReadError):
            frame = None
        if frame is not None:
            return frame
        self._over = True
        return await self._exit()

    async def _output(self) -> Data | None:
        if self._tty:
            data = await self._reader.read(PIECE_BYTES)
            return Data(OUTPUT, data) if data else None
        while not self._left:
            header = await self._reader.readexactly(STREAM_HEADER)
            self._kind = ERRORS if header[0] == 2 else OUTPUT
            self._left = int.from_bytes(header[4:], "big")
        data = await self._reader.readexactly(min(self._left, PIECE_BYTES))
        self._left -= len(data)
        return Data(self._kind, data)

    async def _exit(self) -> Frame:
        for _ in range(EXIT_LOOKS):
            found = await self._inspect()
            if found is None:
                break
            if not found.get("Running") and found.get("ExitCode") is not None:
                return Exit(int(found["ExitCode"]) & 255)
            await asyncio.sleep(EXIT_EVERY_S)
        return Failed("the session ended with the job on this node", again_s=MOVES_S)

    async def _inspect(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._run(lambda: self._api.exec_inspect(self._id))
        except (docker.errors.APIError, requests.RequestException):
            return None
        return found

    async def send(self, frame: Frame) -> None:
        match frame:
            case Data(kind=kind, data=data) if kind == INPUT:
                with contextlib.suppress(ConnectionError):
                    self._writer.write(data)
                    await self._writer.drain()
            case InputEnd():
                with contextlib.suppress(OSError):
                    if self._tty:
                        self._writer.write(b"\x04")
                    elif self._writer.can_write_eof():
                        self._writer.write_eof()
            case Resize(rows=rows, columns=columns) if self._tty:
                with contextlib.suppress(docker.errors.APIError, requests.RequestException):
                    await self._run(lambda: self._api.exec_resize(self._id, rows, columns))
            case Signal(name=name):
                await self._signal(signal.Signals[f"SIG{name}"])

    async def close(self) -> None:
        ended, self._over = self._over, True
        self._writer.transport.abort()
        if ended:
            return
        if await self._signal(signal.SIGHUP):
            for _ in range(int(HANG_UP_S / EXIT_EVERY_S)):
                await asyncio.sleep(EXIT_EVERY_S)
                found = await self._inspect()
                if found is None or not found.get("Running"):
                    return
            await self._kill()

    async def pids(self) -> set[int]:
        """Return the ids of its processes on this machine."""
        pid = await self._first()
        return {pid, *descendants_of(pid)} if pid else set()

    async def _first(self) -> int:
        """Return the command's process id, 0 once it has ended. The engine streams output before it knows the id."""
        for _ in range(START_LOOKS):
            found = await self._inspect()
            if found is None or (not found.get("Running") and found.get("ExitCode") is not None):
                break
            if pid := int(found.get("Pid") or 0):
                return pid if self._is_inside(pid) else 0
            await asyncio.sleep(START_EVERY_S)
        return 0

    def _is_inside(self, pid: int) -> bool:
        """Return whether this process is in the container; its id may have been reused."""
        try:
            return Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{self._head}/ns/pid").readlink()
        except OSError:
            return False

    async def _signal(self, number: signal.Signals) -> bool:
        """Signal the command and, if it has its own, its process group; return whether it still existed."""
        pid = await self._first()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid and os.getpgid(pid) == pid:
                os.killpg(pid, number)
            elif pid:
                os.kill(pid, number)
        return bool(pid)

    async def _kill(self) -> None:
        for pid in await self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
