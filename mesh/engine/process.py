"""The `process` engine: a plain process tree, with namespaces where the kernel allows them. The embedded default.

It keeps guests apart from each other's processes and ends them for sure; it does NOT keep a guest from the files and the
network of the user it runs as. So by default it runs its owner's own jobs only.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mesh.engine.alone import alone
from mesh.engine.descent import Process, catches, descendants_of, process_of, stands_still
from mesh.engine.engine import NO_DUMPS, Availability, BadCommand, EngineError, Exit, Guest, Launch, contract_env
from mesh.engine.frames import Order
from mesh.engine.guestgroup import GuestGroup, make_group
from mesh.engine.killswitch import KillSwitch
from mesh.engine.register import Entry, boot_id
from mesh.engine.seclusion import Seclusion
from mesh.engine.session import Session, SessionError, open_process_session
from mesh.engine.starts import Starts

START_S = 10.0  # an interpreter's start takes 20 ms; a machine in trouble takes longer
WATCHER_TELLS_S = (
    3.0  # until a watcher that says nothing of a guest that has ended is ended itself; it takes 1 ms; ours
)
LIMITS = {"memory": "memory", "pids": "processes", "cpu": "CPU"}
HOME = "home"  # of an attempt: what it leaves there goes with it
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")


ProcessNetwork = Literal["host", "none"]


class ProcessEngine:
    name = "process"
    own_root = False

    def __init__(
        self,
        switch: KillSwitch | None = None,
        *,
        namespaces: bool = True,
        groups: bool = True,
        network: ProcessNetwork = "host",
        seclusion: Seclusion | None = None,
    ) -> None:
        """`namespaces` and `groups`: whether to make what this machine lets us. `network` "none": a guest that cannot be kept
        from the network does not start. `seclusion`: what it is not to see, where it can have namespaces."""
        self._switch, self._own_switch = switch or KillSwitch(), switch is None
        self._namespaces, self._groups, self._network, self._seclusion = namespaces, groups, network, seclusion
        self._limits: frozenset[str] | None = None
        self._isolation = ""
        self._starts = Starts()

    async def availability(self) -> Availability:
        if not self._isolation:
            self._isolation = await asyncio.to_thread(_probe_isolation) if self._namespaces else "session"
        if self._limits is None:
            self._limits = await asyncio.to_thread(_probe_groups) if self._groups else frozenset()
        kept = "its own process, mount and IPC namespaces" if self._isolation == "namespaces" else "its own session"
        names = [words for kind, words in LIMITS.items() if kind in self._limits]
        bounded = f"limits of {', '.join(names)} for all of it" if names else "limits of memory for each process only"
        network, uses = ("no network; ", "") if self._network == "none" else ("", ", and use its network")
        words = f"{kept}; {bounded}; {network}no sandbox: a guest can read and write what the daemon's user can{self._but}{uses}"
        if self._but and os.getuid() == 0:
            words += "; as root it could undo all that"
        if self._network == "none" and self._isolation != "namespaces":
            return Availability(ok=False, detail="guests cannot be kept from the network here (process_network)")
        return Availability(ok=True, detail="ready", isolation=words)

    @property
    def _but(self) -> str:
        if self._seclusion is None or self._isolation != "namespaces":
            return ""
        return " but for its home, the daemon's keys and other jobs"

    @property
    def bounds_memory(self) -> bool:
        """Of a guest as a whole. Known once its availability was asked."""
        return "memory" in (self._limits or ())

    async def start(self, launch: Launch) -> Guest:
        return await self._starts.finish(self._start(launch), launch.job)

    async def _start(self, launch: Launch) -> "ProcessGuest":
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
            "network": self._network,
            "seclusion": await asyncio.to_thread(self._secluded, launch, env),
            "groups": {},
            "until": launch.until,
        }
        entry = Entry(boot_id(), self.name, launch.job, launch.attempt)
        group = await asyncio.to_thread(_group, launch) if self._groups else None
        if group is not None:
            spec["groups"] = group.plain()
            if "memory" in group.kinds:
                spec["memory_mib"] = None  # of all of it together
            entry = dataclasses.replace(entry, groups=group.directories)
        guest = ProcessGuest(self._switch)
        try:
            await guest.start(spec, entry)
        except BaseException:
            if group is not None:
                await asyncio.to_thread(group.remove)
            raise
        return guest

    def _secluded(self, launch: Launch, env: dict[str, str]) -> dict[str, object] | None:
        if self._seclusion is None:
            return None
        private = Path(launch.work_dir).parent / HOME
        private.mkdir(mode=0o700, exist_ok=True)
        found = shutil.which(launch.argv[0], path=env.get("PATH", os.defpath))
        own = [launch.work_dir, launch.ckpt_dir, launch.out_dir, launch.ctl_dir]
        own += [path for value in launch.injection.env.values() for path in value.split(":") if path.startswith("/")]
        programs = [Path(sys.executable), *([Path(found)] if found else ())]
        return self._seclusion.plain(private, [Path(path) for path in own], programs, env)

    async def close(self) -> None:
        await self._starts.close(START_S)
        if self._own_switch:
            await asyncio.to_thread(self._switch.close)


class ProcessGuest:
    def __init__(self, switch: KillSwitch) -> None:
        self._switch = switch
        self._key = ""
        self._first: Process | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._daemon_end = -1
        self._doors: socket.socket | None = None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self.isolation = ""

    async def start(self, spec: Mapping[str, object], entry: Entry) -> None:
        """Its watcher is noted in the register before it is told what to run."""
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
        entry = dataclasses.replace(entry, watcher=process_of(self._process.pid))
        try:
            self._key = await asyncio.to_thread(self._switch.enter, entry)
        except EngineError:
            self._close_pipe()  # it ends: it was told nothing
            os.close(status_ours)
            await self._process.wait()
            raise
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
        if self.isolation == "namespaces" and self._first is not None:
            entry = dataclasses.replace(entry, head=self._first)
            await asyncio.to_thread(self._switch.amend, self._key, entry)
        await asyncio.to_thread(self._switch.started, self._key)

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
        return all(stands_still(pid) for pid in self._pids())

    def allow_until(self, boot_s: float) -> None:
        if self._daemon_end >= 0:
            # A watcher that is gone has ended the guest; one that does not read has two thousand of these to catch up with.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, f"{boot_s}\n".encode())

    async def open_session(self, order: Order) -> Session:
        if self._doors is None:
            raise SessionError("the job has ended here")
        return await open_process_session(self._doors, order)

    async def dump(self, directory: Path) -> str:
        raise EngineError(f"no system checkpoint: {NO_DUMPS.problem}")

    async def kill(self) -> None:
        await self._switch.killed(self._key)
        self._close_pipe()  # its watcher ends too
        try:
            async with asyncio.timeout(WATCHER_TELLS_S):
                await self.wait()
        except TimeoutError:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            await self.wait()

    async def _follow(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        code, first, oom = 137, False, False
        try:
            while line := await reader.readline():
                fact = json.loads(line)
                if "exit" in fact:
                    code, oom = int(fact["exit"]), bool(fact["oom"])
                elif "first" in fact:
                    first, self._first = True, process_of(int(fact["first"]))
                else:
                    self.isolation = fact["isolation"]
                if first and self.isolation:
                    self._started.set()
        finally:
            transport.close()
            self._close_pipe()
            if self._process is not None:
                await self._process.wait()
            fault = await asyncio.to_thread(self._switch.leave, self._key)
            if not self._exit.done():
                self._exit.set_result(Exit(code=code, oom=oom, fault=fault))

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
        """Every process of the job: what descends from the watcher, which adopts orphans too, but for process 1 of the guest."""
        if self._process is None or self._process.returncode is not None:
            return []
        first = self._first.pid if self._first is not None else 0
        return [pid for pid in descendants_of(self._process.pid) if pid != first]


def _injected(more: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """What the job itself wants loaded into its programs comes after what its node does."""
    if "LD_PRELOAD" not in more or not env.get("LD_PRELOAD"):
        return more
    return {**more, "LD_PRELOAD": f"{more['LD_PRELOAD']}:{env['LD_PRELOAD']}"}


def _group(launch: Launch) -> GuestGroup | None:
    group = make_group()
    if group is not None:
        try:
            group.limit(launch.memory_mib, launch.cpus, launch.pids)
        except OSError as error:
            group.remove()
            raise EngineError(f"it cannot be kept to its limits here: {error}") from error
    return group


def _probe_groups() -> frozenset[str]:
    group = make_group()
    if group is None:
        return frozenset()
    group.remove()
    return group.kinds


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
