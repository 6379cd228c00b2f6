"""The watchdog: holds this node's containers to their leases, and kills them when the daemon dies.

Containers, unlike child processes, would otherwise run on. The watchdog is a second process, standard library only, which reads
a pipe from the daemon: `until ID SECONDS` (of CLOCK_BOOTTIME; after it the container is paused until a later line allows more),
`doubt ID` (it may be paused or not: an earlier watchdog knew), `gone ID`, `bye`. It asks the engine to pause a container, so
that the engine knows. If the engine does not answer at once, it freezes the container's control group; if it may not, it kills
the guest, as the kill-switch would. Podman is asked only if the group cannot be frozen from here: it saves no container that it
has paused. A pipe that closes without `bye` means that the daemon crashed: the containers are killed
in the same way, and removed through the engine's socket once it answers.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import math
import os
import select
import signal
import socket
import sys
import time
import urllib.parse
from pathlib import Path

from mesh.execution.docker.freeze_lock import FreezeLock
from mesh.execution.guest_registry import LAPSED, GuestEntry, GuestRegistry
from mesh.execution.process_killer import run
from mesh.util import cgroups
from mesh.util.boottime import Alarm, boot_s
from mesh.util.isolated import isolated

LABEL_NODE = "campus-mesh.node"
LABEL_RUN = "campus-mesh.run"  # of one daemon: a watchdog that is slow must not remove what the next daemon has started
PODMAN = "podman"
AGAIN_S = 1.0  # until the engine is asked again
PING_S = 0.5  # timeout of a ping, which takes 1 ms (own choice)
CALL_S = 1.0  # timeout of a pause, which takes 30 ms (own choice)
SILENT_S = 3.0  # silence of the engine until a guest that only the engine could pause is killed (own choice)
DOUBT_S = 10.0  # in which an engine that comes back may still carry out an old request (own choice)
TRIES = 60  # to remove what a crashed daemon left; otherwise the next start does (own choice)

log = logging.getLogger(__name__)


class Watchdog:
    """The daemon's end of the pipe. A line that does not fit is dropped; later lines supersede it.

    When the process ends, another is started and gets the leases of all containers. Until then there is a `problem`.
    """

    def __init__(self, docker_socket: str, run: str, register: GuestRegistry | None, podman: bool = False) -> None:
        self.freeze_lock = FreezeLock()
        place = str(register.directory) if register is not None else ""
        self._arguments = (docker_socket, run, place, PODMAN if podman else "")
        self._process: asyncio.subprocess.Process
        self._keeper: asyncio.Task[None]
        self._daemon_end = -1
        self._until: dict[str, float] = {}  # by container

    @classmethod
    async def start(
        cls, docker_socket: str, run: str, register: GuestRegistry | None, podman: bool = False
    ) -> "Watchdog":
        """Return a watchdog that runs. OSError if no process can be started."""
        watchdog = cls(docker_socket, run, register, podman)
        try:
            await watchdog._spawn()
        except BaseException:
            watchdog.freeze_lock.close()
            raise
        watchdog._keeper = asyncio.create_task(watchdog._keep(), name="watchdog")
        return watchdog

    @property
    def problem(self) -> str:
        return "" if self._daemon_end >= 0 else "the watchdog of containers has ended, and no other has started yet"

    def allow_until(self, container: str, until: float) -> None:
        self._until[container] = until
        self._tell(f"until {container} {until}\n")

    def gone(self, container: str) -> None:
        self._until.pop(container, None)
        self._tell(f"gone {container}\n")

    async def dismiss(self) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        self._tell("bye\n")
        self._hang_up()
        await self._process.wait()
        self.freeze_lock.close()

    async def _spawn(self) -> None:
        theirs, ours = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *isolated("mesh.execution.docker", "watchdog"),
                str(theirs),
                *self._arguments,
                str(self.freeze_lock.descriptor),
                pass_fds=(theirs, self.freeze_lock.descriptor),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        self._daemon_end = ours

    async def _keep(self) -> None:
        while True:
            await self._process.wait()
            self._hang_up()
            log.error("the watchdog of containers has ended (%s): another is started", self._process.returncode)
            while self._daemon_end < 0:
                try:
                    await self._spawn()
                except OSError as error:
                    log.error("no watchdog of containers can be started: %s", error)
                    await asyncio.sleep(AGAIN_S)
            for container, until in self._until.items():
                self._tell(f"doubt {container}\nuntil {container} {until}\n")
            await asyncio.sleep(AGAIN_S)  # it may end at once

    def _hang_up(self) -> None:
        if self._daemon_end >= 0:
            os.close(self._daemon_end)
            self._daemon_end = -1

    def _tell(self, line: str) -> None:
        if self._daemon_end >= 0:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, line.encode())


class Leases:
    """The watchdog's state: until when each container may run, which are paused, and for which that is in doubt.

    `freeze_lock` keeps it from touching a container that is being dumped, and keeps a container in doubt from being dumped.
    """

    def __init__(
        self, docker_socket: str, register: GuestRegistry | None, freeze_lock: FreezeLock, podman: bool = False
    ) -> None:
        self.alarm = Alarm()
        self.dismissed = False
        self._socket, self._register, self._freeze_lock, self._podman = docker_socket, register, freeze_lock, podman
        self._until: dict[str, float] = {}
        self._still: set[str] = set()
        self._doubtful: dict[str, float] = {}  # container -> end of the doubt
        self._mute_until = 0.0  # no question to the engine before this
        self._silent_since = math.inf
        self._rest = ""

    def read(self, heard: bytes) -> None:
        *lines, self._rest = (self._rest + heard.decode()).split("\n")
        for line in lines:
            match line.split():
                case ["until", container, until]:
                    self._until[container] = float(until)
                case ["doubt", container]:
                    self._doubtful.setdefault(container, 0.0)
                case ["gone", container]:
                    self._until.pop(container, None)
                    self._still.discard(container)
                    self._doubtful.pop(container, None)
                    self._freeze_lock.give(container)
                case ["bye"]:
                    self.dismissed = True

    def enforce(self) -> None:
        self.alarm.clear()
        now, again = boot_s(), math.inf
        for container, until in list(self._until.items()):
            over = now >= until
            if over == (container in self._still) and container not in self._doubtful:
                continue
            if not self._freeze_lock.take(container):
                again = now + AGAIN_S
                continue
            if self._hold(container, over):
                (self._still.add if over else self._still.discard)(container)
            else:
                self._doubtful.setdefault(container, 0.0)  # the lease may be renewed before the kernel has frozen it
            if container in self._doubtful:
                again = now + AGAIN_S
            else:
                self._freeze_lock.give(container)
        coming = [until for until in self._until.values() if until > now]
        self.alarm.set(min([again, *coming]))

    def _hold(self, container: str, over: bool) -> bool:
        """Pause or resume a container; return whether it is now as it should be. Of one that just ended, `gone` is on its way."""
        key, entry = self._entry(container)
        groups = tuple(map(Path, entry.groups)) if entry is not None else ()
        by_group = self._podman and _hold_group(groups, over)
        answered = by_group or self._ask(container, over)
        now = boot_s()
        if answered is None:
            self._doubtful[container] = now + DOUBT_S
        elif now >= self._doubtful.get(container, math.inf):
            del self._doubtful[container]
        if by_group:
            return True  # the kernel freezes it in a moment
        by_group = _hold_group(groups, over)
        frozen = cgroups.are_frozen(groups)
        held = frozen == over if frozen is not None else bool(answered)
        if over and not held and not by_group and entry is not None and now >= self._silent_since + SILENT_S:
            assert self._register is not None
            self._register.mark(key, LAPSED)
            run([entry])
            return True
        return held

    def _ask(self, container: str, over: bool) -> bool | None:
        """Return whether the engine has done it; None if it does not answer in time.

        An engine that does not answer a ping is not asked: it would carry out the request when it is back, when it may be wrong.
        """
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

    def _entry(self, container: str) -> tuple[str, GuestEntry | None]:
        entries = self._register.entries()[0] if self._register is not None else {}
        return next(((key, entry) for key, entry in entries.items() if entry.container == container), ("", None))


def _hold_group(groups: tuple[Path, ...], over: bool) -> bool:
    """Freeze or thaw a guest's control group; return whether that was possible."""
    if over:
        return cgroups.freeze(groups)
    for group in groups:
        cgroups.thaw(group)
    return cgroups.are_frozen(groups) is False


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def end_guests(register: GuestRegistry) -> None:
    """Kill all containers' guests without the engine, which may hang."""
    entries, _ = register.entries()
    run(entry for entry in entries.values() if entry.container)


def remove_containers(docker_socket: str, run: str) -> None:
    """Remove all containers of this run of a daemon, running or not, and then their networks."""
    filters = urllib.parse.quote(json.dumps({"label": [f"{LABEL_RUN}={run}"]}))
    for container in json.loads(_call(docker_socket, "GET", f"/containers/json?all=1&filters={filters}")[1]):
        _call(docker_socket, "DELETE", f"/containers/{container['Id']}?force=1&v=1")
    for network in json.loads(_call(docker_socket, "GET", f"/networks?filters={filters}")[1]):
        _call(docker_socket, "DELETE", f"/networks/{network['Id']}")


def remove_when_it_answers(docker_socket: str, run: str) -> None:
    for _ in range(TRIES):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            remove_containers(docker_socket, run)
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
    descriptor, docker_socket, of_run = int(sys.argv[1]), *sys.argv[2:4]
    register = GuestRegistry(Path(sys.argv[4])) if sys.argv[4] else None
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    leases = Leases(docker_socket, register, FreezeLock(int(sys.argv[6])), sys.argv[5] == PODMAN)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    poller.register(leases.alarm, select.POLLIN)
    while not leases.dismissed:
        if descriptor in dict(poller.poll()):
            heard = os.read(descriptor, 4096)
            if not heard:
                if register is not None:
                    end_guests(register)
                remove_when_it_answers(docker_socket, of_run)
                return
            leases.read(heard)
        leases.enforce()
