"""Holds this node's containers to their leases, and ends them when its daemon dies: containers, unlike processes, would go on.

A second process, standard library only, that listens on a pipe from the daemon: `until ID SECONDS` (of CLOCK_BOOTTIME; past it
the container is paused until a later line allows more), `gone ID`, `bye`. A pipe that closes without a bye is a crash: containers
are ended as the kill-switch would, and removed over the engine's own socket once that answers.
"""

import asyncio
import contextlib
import http.client
import json
import math
import os
import select
import signal
import socket
import sys
import time
import urllib.parse
from pathlib import Path

from mesh.engine.alarm import Alarm, boot_s
from mesh.engine.alone import alone
from mesh.engine.hunt import run
from mesh.engine.register import Register

LABEL_NODE = "campus-mesh.node"
AGAIN_S = 1.0  # until the engine is asked once more, if it could not do it
TRIES = 60  # to remove what a crashed daemon left; its next start does it otherwise; ours


class Warden:
    """The daemon's side. Lines are short, and far fewer than the pipe holds; one that does not fit is followed by others."""

    def __init__(self, process: asyncio.subprocess.Process, daemon_end: int) -> None:
        self._process = process
        self._daemon_end = daemon_end

    @classmethod
    async def start(cls, docker_socket: str, node: str, register: Register | None) -> "Warden":
        theirs, ours = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *alone("warden"),
            str(theirs),
            docker_socket,
            node,
            str(register.directory) if register is not None else "",
            pass_fds=(theirs,),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        return cls(process, ours)

    def allow_until(self, container: str, until: float) -> None:
        self._tell(f"until {container} {until}\n")

    def gone(self, container: str) -> None:
        self._tell(f"gone {container}\n")

    async def dismiss(self) -> None:
        self._tell("bye\n")
        os.close(self._daemon_end)
        self._daemon_end = -1
        await self._process.wait()

    def _tell(self, line: str) -> None:
        if self._daemon_end >= 0:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, line.encode())


class Ward:
    """What the warden knows: until when each container may run, and which it has paused."""

    def __init__(self, docker_socket: str) -> None:
        self.alarm = Alarm()
        self.dismissed = False
        self._socket = docker_socket
        self._until: dict[str, float] = {}
        self._paused: set[str] = set()
        self._rest = ""

    def read(self, heard: bytes) -> None:
        *lines, self._rest = (self._rest + heard.decode()).split("\n")
        for line in lines:
            match line.split():
                case ["until", container, until]:
                    self._until[container] = float(until)
                case ["gone", container]:
                    self._until.pop(container, None)
                    self._paused.discard(container)
                case ["bye"]:
                    self.dismissed = True

    def enforce(self) -> None:
        self.alarm.clear()
        now, again = boot_s(), math.inf
        for container, until in list(self._until.items()):
            over = now >= until
            if over != (container in self._paused) and not self._pause(container, over):
                again = now + AGAIN_S
        coming = [until for until in self._until.values() if until > now]
        self.alarm.set(min([again, *coming]))

    def _pause(self, container: str, over: bool) -> bool:
        """Whether it is as it should be now. One that has just ended is nobody's to pause: its `gone` is on the way."""
        try:
            status = _call(self._socket, "POST", f"/containers/{container}/{'pause' if over else 'unpause'}")[0]
        except OSError:
            return False
        if status >= http.client.INTERNAL_SERVER_ERROR:
            return False
        if over:
            self._paused.add(container)
        else:
            self._paused.discard(container)
        return True


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def end_guests(register: Register) -> None:
    """Without the engine, which may hang."""
    entries, _ = register.entries()
    run(entry for entry in entries.values() if entry.container)


def remove_containers(docker_socket: str, node: str) -> None:
    """Every one of this node, running or not."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{LABEL_NODE}={node}"]}))
    for container in json.loads(_call(docker_socket, "GET", f"/containers/json?all=1&filters={filters}")[1]):
        _call(docker_socket, "DELETE", f"/containers/{container['Id']}?force=1")


def remove_when_it_answers(docker_socket: str, node: str) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            remove_containers(docker_socket, node)
            return
        time.sleep(AGAIN_S)


def _call(docker_socket: str, method: str, path: str) -> tuple[int, bytes]:
    connection = _UnixConnection(docker_socket)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def main() -> None:
    descriptor, docker_socket, node, register = int(sys.argv[1]), *sys.argv[2:5]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ward = Ward(docker_socket)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    poller.register(ward.alarm, select.POLLIN)
    while not ward.dismissed:
        if descriptor in dict(poller.poll()):
            heard = os.read(descriptor, 4096)
            if not heard:
                if register:
                    end_guests(Register(Path(register)))
                remove_when_it_answers(docker_socket, node)
                return
            ward.read(heard)
        ward.enforce()
