"""Holds this node's containers to their leases, and ends them when its daemon dies: containers, unlike processes, would go on.

A second process, standard library only, that listens on a pipe from the daemon: `until ID SECONDS` (of CLOCK_BOOTTIME; past it
the container is paused until a later line allows more), `gone ID`, `bye`. The engine is asked to pause it, so that it knows; one
that does not answer at once does not keep a guest going: its control group is frozen then, and where that may not be done from
here the guest is ended, as the kill-switch would. A pipe that closes without a bye is a crash: containers are ended in the same
way, and removed over the engine's own socket once that answers.
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

from mesh.engine import cgroups
from mesh.engine.alarm import Alarm, boot_s
from mesh.engine.alone import alone
from mesh.engine.hunt import run
from mesh.engine.register import Entry, Register
from mesh.engine.turns import Turns

LABEL_NODE = "campus-mesh.node"
AGAIN_S = 1.0  # until the engine is asked once more, if it could not do it
PING_S = 0.5  # for an engine to say that it is there, which takes it 1 ms; ours
CALL_S = 1.0  # for it to pause a container, which takes it 30 ms; ours
SILENT_S = 3.0  # of an engine, until a guest that only it could have paused is ended; ours
DOUBT_S = 10.0  # in which an engine that comes back may still do what it was asked long ago; ours
TRIES = 60  # to remove what a crashed daemon left; its next start does it otherwise; ours


class Warden:
    """The daemon's side. Lines are short, and far fewer than the pipe holds; one that does not fit is followed by others."""

    def __init__(self, process: asyncio.subprocess.Process, daemon_end: int, turns: Turns) -> None:
        self._process = process
        self._daemon_end = daemon_end
        self.turns = turns

    @classmethod
    async def start(cls, docker_socket: str, node: str, register: Register | None) -> "Warden":
        theirs, ours = os.pipe()
        turns = Turns()
        process = await asyncio.create_subprocess_exec(
            *alone("warden"),
            str(theirs),
            docker_socket,
            node,
            str(register.directory) if register is not None else "",
            str(turns.descriptor),
            pass_fds=(theirs, turns.descriptor),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        return cls(process, ours, turns)

    def allow_until(self, container: str, until: float) -> None:
        self._tell(f"until {container} {until}\n")

    def gone(self, container: str) -> None:
        self._tell(f"gone {container}\n")

    async def dismiss(self) -> None:
        self._tell("bye\n")
        os.close(self._daemon_end)
        self._daemon_end = -1
        await self._process.wait()
        self.turns.close()

    def _tell(self, line: str) -> None:
        if self._daemon_end >= 0:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, line.encode())


class Ward:
    """What the warden knows: until when each container may run, which of them stand still, and of which that is doubtful. By
    `turns` one that is being dumped is left alone, and none is dumped that is in doubt."""

    def __init__(self, docker_socket: str, register: Register | None, turns: Turns) -> None:
        self.alarm = Alarm()
        self.dismissed = False
        self._socket, self._register, self._turns = docker_socket, register, turns
        self._until: dict[str, float] = {}
        self._still: set[str] = set()
        self._doubtful: dict[str, float] = {}  # until when
        self._mute_until = 0.0  # the engine
        self._silent_since = math.inf
        self._rest = ""

    def read(self, heard: bytes) -> None:
        *lines, self._rest = (self._rest + heard.decode()).split("\n")
        for line in lines:
            match line.split():
                case ["until", container, until]:
                    self._until[container] = float(until)
                case ["gone", container]:
                    self._until.pop(container, None)
                    self._still.discard(container)
                    self._doubtful.pop(container, None)
                    self._turns.give(container)
                case ["bye"]:
                    self.dismissed = True

    def enforce(self) -> None:
        self.alarm.clear()
        now, again = boot_s(), math.inf
        for container, until in list(self._until.items()):
            over = now >= until
            if over == (container in self._still) and container not in self._doubtful:
                continue
            if not self._turns.take(container):
                again = now + AGAIN_S
                continue
            held = self._hold(container, over)
            if held:
                (self._still.add if over else self._still.discard)(container)
            if container not in self._doubtful:
                self._turns.give(container)
                if held:
                    continue
            again = now + AGAIN_S
        coming = [until for until in self._until.values() if until > now]
        self.alarm.set(min([again, *coming]))

    def _hold(self, container: str, over: bool) -> bool:
        """Whether it stands still now, or runs, as it should. One that has just ended is nobody's: its `gone` is on the way."""
        answered = self._ask(container, over)
        now = boot_s()
        if answered is None:
            self._doubtful[container] = now + DOUBT_S
        elif now >= self._doubtful.get(container, math.inf):
            del self._doubtful[container]
        entry = self._entry(container)
        groups = tuple(map(Path, entry.groups)) if entry is not None else ()
        frozen = cgroups.are_frozen(groups)
        if frozen is not None and frozen != over:
            if over:
                cgroups.freeze(groups)
            else:
                for group in groups:
                    cgroups.thaw(group)
            frozen = cgroups.are_frozen(groups)
        held = frozen == over if frozen is not None else bool(answered)
        if over and not held and entry is not None and now >= self._silent_since + SILENT_S:
            run([entry])
            return True
        return held

    def _ask(self, container: str, over: bool) -> bool | None:
        """Whether the engine has done it; None if it does not answer in time. Not even asked where it says nothing at all: it
        would do it when it is back, whatever holds by then."""
        if boot_s() < self._mute_until:
            return None
        try:
            _call(self._socket, "GET", "/_ping", PING_S)
            status = _call(self._socket, "POST", f"/containers/{container}/{'pause' if over else 'unpause'}", CALL_S)[0]
        except (OSError, http.client.HTTPException):
            self._mute_until = boot_s() + AGAIN_S / 2
            self._silent_since = min(self._silent_since, boot_s())
            return None
        self._silent_since = math.inf
        return status < http.client.INTERNAL_SERVER_ERROR

    def _entry(self, container: str) -> Entry | None:
        entries = self._register.entries()[0] if self._register is not None else {}
        return next((entry for entry in entries.values() if entry.container == container), None)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def end_guests(register: Register) -> None:
    """Without the engine, which may hang."""
    entries, _ = register.entries()
    run(entry for entry in entries.values() if entry.container)


def remove_containers(docker_socket: str, node: str) -> None:
    """Every one of this node, running or not, and then their networks."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{LABEL_NODE}={node}"]}))
    for container in json.loads(_call(docker_socket, "GET", f"/containers/json?all=1&filters={filters}")[1]):
        _call(docker_socket, "DELETE", f"/containers/{container['Id']}?force=1")
    for network in json.loads(_call(docker_socket, "GET", f"/networks?filters={filters}")[1]):
        _call(docker_socket, "DELETE", f"/networks/{network['Id']}")


def remove_when_it_answers(docker_socket: str, node: str) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            remove_containers(docker_socket, node)
            return
        time.sleep(AGAIN_S)


def _call(docker_socket: str, method: str, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    connection = _UnixConnection(docker_socket, timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def main() -> None:
    descriptor, docker_socket, node = int(sys.argv[1]), *sys.argv[2:4]
    register = Register(Path(sys.argv[4])) if sys.argv[4] else None
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ward = Ward(docker_socket, register, Turns(int(sys.argv[5])))
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    poller.register(ward.alarm, select.POLLIN)
    while not ward.dismissed:
        if descriptor in dict(poller.poll()):
            heard = os.read(descriptor, 4096)
            if not heard:
                if register is not None:
                    end_guests(register)
                remove_when_it_answers(docker_socket, node)
                return
            ward.read(heard)
        ward.enforce()
