"""The `process` engine: a plain process tree, with namespaces where the kernel allows them. The embedded default.

It keeps guests apart from each other's processes and ends them for sure; it does NOT keep a guest from the files and the
network of the user it runs as. So by default it runs its owner's own jobs only.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from mesh.engine.alone import alone
from mesh.engine.descent import children_of, descendants_of
from mesh.engine.engine import Availability, BadCommand, EngineError, Exit, Guest, Launch, contract_env
from mesh.engine.frames import Order
from mesh.engine.session import Session, SessionError, open_process_session

START_S = 10.0  # an interpreter's start takes 20 ms; a machine in trouble takes longer
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")


class ProcessEngine:
    name = "process"
    own_root = False

    def __init__(self, *, namespaces: bool = True) -> None:
        self._namespaces = namespaces
        self._isolation = ""

    async def availability(self) -> Availability:
        if not self._isolation:
            self._isolation = await asyncio.to_thread(_probe_isolation) if self._namespaces else "session"
        kept = "its own process, mount and IPC namespaces" if self._isolation == "namespaces" else "its own session"
        words = f"{kept}; no sandbox: a guest can read and write what the daemon's user can, and use its network"
        return Availability(ok=True, detail="ready", isolation=words)

    async def images(self) -> tuple[str, ...]:
        return ()

    async def start(self, launch: Launch) -> Guest:
        env = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        env |= contract_env(launch, launch.work_dir, launch.ckpt_dir, launch.out_dir, launch.ctl_dir)
        env |= _injected(launch.injection.env, env)
        path = env.get("PATH", os.defpath)
        command = launch.argv[0]
        if "/" not in command and shutil.which(command, path=path) is None:
            raise BadCommand(f"command {command!r} is not on this node's PATH")
        spec = {
            "argv": launch.argv,
            "env": env,
            "cwd": launch.work_dir,
            "log": launch.log_path,
            "memory_mib": launch.memory_mib,
            "namespaces": self._namespaces,
            "until": launch.until,
        }
        guest = ProcessGuest()
        await guest.start(spec)
        return guest

    async def close(self) -> None:
        return None


class ProcessGuest:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._daemon_end = -1
        self._doors: socket.socket | None = None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self.isolation = ""

    async def start(self, spec: Mapping[str, object]) -> None:
        theirs, ours = os.pipe()
        status_ours, status_theirs = os.pipe()
        self._doors, doors_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *alone("guest_init"),
                str(theirs),
                str(status_theirs),
                str(doors_theirs.fileno()),
                pass_fds=(theirs, status_theirs, doors_theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            for descriptor in (theirs, ours, status_ours, status_theirs):
                os.close(descriptor)
            self._close_doors()
            raise EngineError(f"cannot start a process: {error.strerror}") from error
        finally:
            doors_theirs.close()
        os.close(theirs)
        os.close(status_theirs)
        self._daemon_end = ours
        await asyncio.to_thread(_write_all, ours, json.dumps(spec).encode() + b"\n")
        os.set_blocking(ours, False)
        self._reader = asyncio.create_task(self._follow(status_ours), name="guest status")
        try:
            async with asyncio.timeout(START_S):
                started = asyncio.create_task(self._started.wait(), name="guest start")
                await asyncio.wait({started, self._reader}, return_when=asyncio.FIRST_COMPLETED)
                started.cancel()
        except TimeoutError as error:
            await self.kill()
            raise EngineError(f"the guest's first process did not come up within {START_S:g} s") from error
        if not self._started.is_set():
            stderr = await self._process.stderr.read() if self._process.stderr is not None else b""
            raise EngineError(f"the guest's first process failed: {stderr.decode(errors='replace')[-400:]}")

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def catches_term(self) -> bool:
        return any(catches(pid, signal.SIGTERM) for pid in self._pids())

    async def terminate(self) -> bool:
        catching = [pid for pid in self._pids() if catches(pid, signal.SIGTERM)]
        for pid in catching:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return bool(catching)

    async def pids(self) -> frozenset[int]:
        """Also of those that it has orphaned, which its watcher adopts where it has no namespace."""
        process = self._process
        return (
            frozenset(descendants_of(process.pid))
            if process is not None and process.returncode is None
            else frozenset()
        )

    async def stands_still(self) -> bool:
        return all(state_of(pid) in "TtZX" for pid in self._pids())

    def allow_until(self, boot_s: float) -> None:
        if self._daemon_end >= 0:
            # A watcher that is gone has ended the guest; one that does not read has two thousand of these to catch up with.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, f"{boot_s}\n".encode())

    async def open_session(self, order: Order) -> Session:
        if self._doors is None:
            raise SessionError("the job has ended here")
        return await open_process_session(self._doors, order)

    async def kill(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._close_pipe()  # the watcher ends whatever is left
        await self.wait()

    async def _follow(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        code = 137
        try:
            while line := await reader.readline():
                fact = json.loads(line)
                if "exit" in fact:
                    code = int(fact["exit"])
                else:
                    self.isolation = fact["isolation"]
                    self._started.set()
        finally:
            transport.close()
            self._close_pipe()
            if self._process is not None:
                await self._process.wait()
            if not self._exit.done():
                self._exit.set_result(Exit(code=code))

    def _close_doors(self) -> None:
        if self._doors is not None:
            self._doors.close()
            self._doors = None

    def _close_pipe(self) -> None:
        self._close_doors()
        if self._daemon_end >= 0:
            os.close(self._daemon_end)
            self._daemon_end = -1

    def _pids(self) -> list[int]:
        """Every process of the job: descendants of the watcher, but the watcher's own child (process 1 of the guest)."""
        if self._process is None or self._process.returncode is not None:
            return []
        firsts = children_of(self._process.pid)
        found: list[int] = []
        queue = [pid for first in firsts for pid in children_of(first)]
        while queue:
            pid = queue.pop()
            found.append(pid)
            queue.extend(children_of(pid))
        return found


def catches(pid: int, signum: int) -> bool:
    """Whether a handler for this signal is installed, by the kernel's own account."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        pass
    return False


def state_of(pid: int) -> str:
    """A process's state as `ps` shows it; X once it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _injected(more: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """What the job itself wants loaded into its programs comes after what its node does."""
    if "LD_PRELOAD" not in more or not env.get("LD_PRELOAD"):
        return more
    return {**more, "LD_PRELOAD": f"{more['LD_PRELOAD']}:{env['LD_PRELOAD']}"}


def _probe_isolation() -> str:
    """What a guest would get, found by starting one that does nothing."""
    import subprocess

    done = subprocess.run(
        alone("guest_init", "print(guest_init.enter_namespaces(True), end='')"),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    return done.stdout or "session"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
