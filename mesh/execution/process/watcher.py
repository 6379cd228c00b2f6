"""Watchers of guests (`guest_init`): an interpreter takes longer to start than the rest of a guest, so one is kept ready."""

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass

from mesh.execution.engine import EngineError
from mesh.util.isolated import isolated


@dataclass(frozen=True)
class Watcher:
    """A watcher that waits for the line that says what to run. It exits when the daemon's end of its pipe closes."""

    process: asyncio.subprocess.Process
    daemon_end: int  # the pipe to it
    status: int  # the pipe from it
    doors: socket.socket  # for the ends of sessions

    def close(self) -> None:
        self.doors.close()
        os.close(self.daemon_end)
        os.close(self.status)


async def start_watcher() -> Watcher:
    theirs, ours = os.pipe()
    status_ours, status_theirs = os.pipe()
    doors, doors_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = False
    try:
        process = await asyncio.create_subprocess_exec(
            *isolated("mesh.execution.process", "guest_init"),
            str(theirs),
            str(status_theirs),
            str(doors_theirs.fileno()),
            pass_fds=(theirs, status_theirs, doors_theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        kept = True
    except OSError as error:
        raise EngineError(f"cannot start a process: {error.strerror}") from error
    finally:
        doors_theirs.close()
        os.close(theirs)
        os.close(status_theirs)
        if not kept:
            doors.close()
            os.close(ours)
            os.close(status_ours)
    return Watcher(process, ours, status_ours, doors)


class SpareWatcher:
    """At most one watcher that is ready for the next guest."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[Watcher] | None = None

    def prepare(self) -> None:
        """Start a watcher, unless there is one."""
        if self._starting is None:
            self._starting = asyncio.create_task(start_watcher(), name="spare watcher")

    async def take(self) -> Watcher:
        """Return the spare watcher, or a new one. EngineError: no process can be started."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(EngineError):
                spare = await starting
                if spare.process.returncode is None:
                    return spare
                spare.close()
        return await start_watcher()

    async def close(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(EngineError):
                spare = await starting
                spare.close()
                await spare.process.wait()
