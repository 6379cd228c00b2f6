"""Watchers of guests (`guest_init`), forked by a server that the daemon keeps (`fork_server`)."""

import asyncio
import contextlib
import json
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from mesh.execution.engine import EngineError
from mesh.util.isolated import isolated
from mesh.util.processes import Process, lives

START_S = 30.0  # the interpreter starts in 20 ms, and took over 10 s on a loaded emulated machine (make test-machines)
ANSWER_BYTES, ERROR_BYTES = 256, 4096


@dataclass(frozen=True)
class Watcher:
    """A watcher that waits for the line that says what to run. It exits when the daemon's end of its pipe closes."""

    process: Process
    daemon_end: int  # the pipe to it
    status: int  # the pipe from it
    errors: int  # its standard error
    doors: socket.socket  # for the ends of sessions

    @property
    def lives(self) -> bool:
        return lives(self.process)

    async def ended(self) -> str:
        """Wait for its end; return what it wrote to standard error, and close that. Call it once."""
        try:
            pidfd = self.process.open()
            if pidfd is not None:
                try:
                    await _readable(pidfd)
                finally:
                    os.close(pidfd)
            os.set_blocking(self.errors, False)  # a process that it left behind may hold the other end
            with contextlib.suppress(BlockingIOError):
                return os.read(self.errors, ERROR_BYTES).decode(errors="replace")
            return ""
        finally:
            os.close(self.errors)


class ForkServer:
    """The daemon's end of its fork server, which starts before the first watcher and again after somebody killed it."""

    def __init__(self) -> None:
        self._running: tuple[socket.socket, asyncio.subprocess.Process] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> socket.socket:
        """Return the socket for orders, of a new server if there is none. EngineError: no process can be started."""
        async with self._starting:
            if self._running is None:
                orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                orders.setblocking(False)
                with theirs:
                    try:
                        process = await asyncio.create_subprocess_exec(
                            *isolated("mesh.execution.process", "fork_server"),
                            str(theirs.fileno()),
                            pass_fds=(theirs.fileno(),),
                            stdin=asyncio.subprocess.DEVNULL,
                            stdout=asyncio.subprocess.DEVNULL,
                        )
                    except OSError as error:
                        orders.close()
                        raise EngineError(f"cannot start a process: {error.strerror}") from error
                self._running = orders, process
            return self._running[0]

    async def watcher(self) -> Watcher:
        """Return a new watcher. EngineError: no process can be started."""
        for _ in range(2):
            orders = await self.start()
            try:
                async with asyncio.timeout(START_S):
                    return await _ordered(orders)
            except (ConnectionError, BlockingIOError, TimeoutError):
                if self._running is not None and self._running[0] is orders:
                    await self.close()
            except OSError as error:
                raise EngineError(f"cannot start a process: {error.strerror}") from error
        raise EngineError("cannot start a process: the fork server does not answer")

    async def close(self) -> None:
        """End the server. Its watchers go on."""
        running, self._running = self._running, None
        if running is not None:
            orders, process = running
            orders.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ordered(orders: socket.socket) -> Watcher:
    """Order a watcher. ConnectionError: the server has ended; EngineError: it cannot fork; OSError: no descriptor is left."""
    with ExitStack() as ours, ExitStack() as theirs:
        daemon_theirs, daemon_end = _pipe(theirs, ours)
        status, status_theirs = _pipe(ours, theirs)
        errors, errors_theirs = _pipe(ours, theirs)
        doors, doors_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(doors)
        theirs.enter_context(doors_theirs)
        socket.send_fds(orders, [b"!"], [daemon_theirs, status_theirs, errors_theirs, doors_theirs.fileno()])
        theirs.close()
        await _readable(doors.fileno())
        answer = doors.recv(ANSWER_BYTES, socket.MSG_DONTWAIT)
        if not answer:
            raise ConnectionResetError("the fork server has ended")
        found = json.loads(answer)
        if isinstance(found, str):
            raise EngineError(f"cannot start a process: {found}")
        ours.pop_all()
        return Watcher(Process(*found), daemon_end, status, errors, doors)


def _pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    """Return the ends of a new pipe, which these close."""
    read, write = os.pipe()
    reads.callback(os.close, read)
    writes.callback(os.close, write)
    return read, write


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
