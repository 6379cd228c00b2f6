"""The `process` engine: a plain process tree, with namespaces where the kernel allows them. The default.

It separates guests' processes from each other and kills them reliably; it does NOT keep a guest from the files and the network of
the user it runs as. So by default it runs only the owner's own jobs.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mesh.consensus.contract import EXIT_NOT_FOUND
from mesh.execution.abandoned_starts import Starts
from mesh.execution.disk_usage import disk_of
from mesh.execution.engine import NO_DUMPS, Availability, BadCommand, EngineError, Exit, Guest, Launch, contract_env
from mesh.execution.guest_registry import GuestEntry, boot_id
from mesh.execution.killswitch import KillSwitch
from mesh.execution.process import subtree
from mesh.execution.process.confinement import FILES_FROM, SCOPES_FROM
from mesh.execution.process.guest_cgroup import GuestGroup
from mesh.execution.process.sandbox import HOME, SECRETS, TEMPORARY, Sandbox
from mesh.execution.process.watcher import START_S, ForkServer, Watcher
from mesh.execution.session import Session, SessionError, open_process_session
from mesh.rpc.frames import Order
from mesh.util import cgroups
from mesh.util.isolated import isolated
from mesh.util.processes import Process, catches, descendants_of, process_of, stands_still
from mesh.util.slow_calls import apart

WATCHER_REPORTS_S = (
    3.0  # for the watcher to report the end of a guest, usually 1 ms; then it is killed too (own choice)
)
LIMITS = {"memory": "memory", "pids": "processes", "cpu": "CPU", "io": "disk rate"}
HIDDEN = "their home, /tmp and /run, the daemon's keys and other jobs"
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "LD_LIBRARY_PATH")


ProcessNetwork = Literal["host", "none"]


class Kernel(NamedTuple):
    """The kernel's means to keep guests apart: namespaces, the version of Landlock (0: none), a filter of system calls."""

    namespaces: bool
    landlock: int
    filter: bool

    @property
    def hides(self) -> bool:
        return self.namespaces or self.landlock >= FILES_FROM

    def missing(self, hides: bool, network: bool) -> list[str]:
        """Return what guests are not kept from because the kernel cannot. `hides`: files; `network`: guests use the host's."""
        found = []
        if hides and not self.namespaces:
            where = "sockets" if self.hides else "files, sockets"
            found.append(f"namespaces, so the owner's {where} and processes are in reach")
        if network and self.landlock < SCOPES_FROM:
            found.append("Landlock of Linux 6.12, so abstract sockets (X, D-Bus) are in reach")
        if not self.filter:
            found.append("a filter of system calls for this kind of processor")
        return found


class ProcessEngine:
    """Runs guests as process trees of the daemon's user."""

    name = "process"
    own_root = False

    def __init__(
        self,
        switch: KillSwitch | None = None,
        *,
        namespaces: bool = True,
        groups: bool = True,
        network: ProcessNetwork = "host",
        sandbox: Sandbox | None = None,
        ready: Callable[[], bool] = lambda: False,
    ) -> None:
        """`namespaces` and `groups`: use namespaces and control groups where the machine allows them.

        `network` "none": a guest that cannot be kept from the network does not start. `sandbox`: files hidden from guests that
        have namespaces. `ready`: whether to start the fork server before the first guest, which then does not wait for it.
        """
        self._switch, self._own_switch = switch or KillSwitch(), switch is None
        self._namespaces, self._groups, self._network, self._sandbox = namespaces, groups, network, sandbox
        self._limits: frozenset[str] | None = None
        self._kernel: Kernel | None = None
        self._starts = Starts()
        self._ready, self._fork_server = ready, ForkServer()

    async def availability(self) -> Availability:
        if self._kernel is None:
            found = await asyncio.to_thread(_probe_kernel)
            if found is None:
                return Availability(ok=False, detail=f"a process did not start within {START_S:g} s; it is tried again")
            self._kernel = found._replace(namespaces=self._namespaces and found.namespaces)
        if self._limits is None:
            self._limits = await asyncio.to_thread(_probe_groups) if self._groups else frozenset()
        kernel = self._kernel
        kept = "its own process, mount and IPC namespaces" if kernel.namespaces else "its own session"
        names = [name for kind, name in LIMITS.items() if kind in self._limits]
        bounded = (
            f"limits of {', '.join(names)} for the whole guest" if names else "a memory limit for each process only"
        )
        network, uses = ("no network; ", "") if self._network == "none" else ("", ", and use its network")
        but = f" except {HIDDEN}" if self._hides else ""
        text = (
            f"{kept}; {bounded}; {network}no sandbox: a guest can read and write what the daemon's user can{but}{uses}"
        )
        if but and os.getuid() == 0:
            text += "; as root it could undo all that"
        if missing := kernel.missing(hides=self._sandbox is not None, network=self._network == "host"):
            text += f"; missing here: {', '.join(missing)}"
        if self._network == "none" and not kernel.namespaces:
            return Availability(ok=False, detail="guests cannot be kept from the network here (process_network)")
        lacks = frozenset(LIMITS) - self._limits
        how = await asyncio.to_thread(subtree.remedy, lacks) if lacks else ""
        if self._ready():
            with contextlib.suppress(EngineError):  # the next guest says so
                await self._fork_server.start()
        unlimited = tuple(name for kind, name in LIMITS.items() if kind in lacks)
        return Availability(
            ok=True,
            detail="ready",
            isolation=text,
            proxies=kernel.namespaces,
            unlimited=unlimited,
            limits_by=how,
        )

    @property
    def _hides(self) -> bool:
        """Return whether files are hidden from guests. Known after `availability`."""
        return self._sandbox is not None and self._kernel is not None and self._kernel.hides

    @property
    def bounds_memory(self) -> bool:
        """Return whether memory is limited for the guest as a whole. Known after `availability`."""
        return "memory" in (self._limits or ())

    async def start(self, launch: Launch) -> Guest:
        return await self._starts.finish(self._start(launch), launch.job)

    async def _start(self, launch: Launch) -> "ProcessGuest":
        if launch.secrets.directory is not None and not (self._hides and self._kernel and self._kernel.namespaces):
            raise EngineError(f"a plain process has no {SECRETS} of its own here: name variables, or an image")
        env = self._environment(launch)
        try:
            order, group = await asyncio.to_thread(self._prepared, launch, env)
        except OSError as error:
            raise EngineError(f"its files cannot be prepared: {error}") from error
        spec = {
            "argv": launch.argv,
            "wrap": self._wrap(launch),
            "env": env,
            "cwd": launch.work_dir,
            "log": launch.log_path,
            "memory_mib": launch.memory_mib,
            "namespaces": self._namespaces,
            "network": self._network if launch.proxy is None else "none",
            "proxy": launch.proxy is not None,
            "sandbox": order,
            "reads": self._reads(launch),
            "groups": {},
            "until": launch.until,
        }
        entry = GuestEntry(boot_id(), self.name, launch.job, launch.attempt)
        if group is not None:
            spec["groups"] = group.plain()
            if "memory" in group.kinds:
                spec["memory_mib"] = None  # the group limits the whole guest
            entry = dataclasses.replace(entry, groups=group.directories)
        guest = ProcessGuest(self._switch, tuple(map(Path, entry.groups)), launch.proxy, self.own_root)
        try:
            await guest.start(await self._fork_server.watcher(), spec, entry)
        except BaseException:
            if group is not None:
                await asyncio.to_thread(group.remove)
            raise
        return guest

    def _environment(self, launch: Launch) -> dict[str, str]:
        """Return the variables with which the guest's first program starts."""
        env = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        if (
            self._hides and self._kernel is not None and not self._kernel.namespaces
        ):  # nothing stands for the hidden places
            attempt = Path(launch.work_dir).parent
            env |= {"HOME": str(attempt / HOME), "TMPDIR": str(attempt / TEMPORARY)}
        if launch.environment is not None:
            env["PATH"] = f"{launch.environment}/bin:{env.get('PATH', os.defpath)}"
            env["VIRTUAL_ENV"] = launch.environment
        env |= contract_env(launch, launch.work_dir, launch.ckpt_dir, launch.out_dir, launch.ctl_dir)
        env |= {shown.variable: shown.source for shown in launch.data}
        return env | {**_injected(launch.injection.env, env), **launch.secrets.variables}

    def _wrap(self, launch: Launch) -> list[str]:
        """Return the words in front of every command of the guest, also those of sessions."""
        return []

    def _reads(self, launch: Launch) -> list[str]:
        """Return the paths that the guest may only read."""
        return [shown.source for shown in launch.data] + _injected_files(launch, read_only=True)

    def _prepared(self, launch: Launch, env: Mapping[str, str]) -> tuple[dict[str, Any] | None, GuestGroup | None]:
        """Return what the guest sees (`sandbox.enter`) and its new control groups. EngineError if it must not start."""
        own, order, seen = _own(launch), None, set[Path]()
        if self._sandbox is not None:
            reads, attempt = [Path(path) for path in self._reads(launch)], Path(launch.work_dir).parent
            order = self._sandbox.plain(
                attempt, own, launch.shm_mib, reads, launch.secrets.directory, launch.environment
            )
            seen = set(map(Path, order["kept"]))
        self._check_command(launch, env, {*seen, *own, *map(Path, filter(None, [launch.environment]))})
        return order, _group(launch) if self._groups else None

    def _check_command(self, launch: Launch, env: Mapping[str, str], seen: Collection[Path]) -> None:
        """Raise BadCommand if the guest, which sees these of the hidden places, would not find its command."""
        command = launch.argv[0]

        def hidden(path: Path) -> bool:
            return self._hides and self._sandbox is not None and self._sandbox.hides(path, seen)

        if "/" in command and hidden(Path(launch.work_dir, command)):
            raise BadCommand(
                f"guests on this node do not see {command}: its owner can name its directory in `process_sees` in config.toml",
                EXIT_NOT_FOUND,
            )
        places = [place for place in env.get("PATH", os.defpath).split(":") if not hidden(Path(place))]
        if "/" not in command and shutil.which(command, path=":".join(places)) is None:
            raise BadCommand(f"command {command!r} is not on this node's PATH", EXIT_NOT_FOUND)

    async def close(self) -> None:
        await self._starts.close(START_S)
        await self._fork_server.close()
        if self._own_switch:
            await asyncio.to_thread(self._switch.close)


class ProcessGuest:
    """A process tree that runs one attempt, below its watcher (`guest_init`)."""

    def __init__(
        self,
        switch: KillSwitch,
        groups: tuple[Path, ...] = (),
        proxy: Callable[[socket.socket], None] | None = None,
        own_root: bool = False,
    ) -> None:
        self._switch, self._groups, self._proxy = switch, groups, proxy
        self._own_root = own_root
        self._key = ""
        self._first: Process | None = None
        self._watcher: Watcher | None = None
        self._errors = ""
        self._daemon_end = -1
        self._doors: socket.socket | None = None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self.isolation = ""

    async def start(self, watcher: Watcher, spec: Mapping[str, object], entry: GuestEntry) -> None:
        """Register the watcher, and only then tell it what to run."""
        self._watcher, self._daemon_end, self._doors = watcher, watcher.daemon_end, watcher.doors
        entry = dataclasses.replace(entry, watcher=watcher.process)
        try:
            self._key = await asyncio.to_thread(self._switch.add, entry)
        except EngineError:
            self._close_pipe()  # the watcher exits without a job
            os.close(watcher.status)
            await watcher.ended()
            raise
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed: `_follow` hears of it
            await asyncio.to_thread(_write_all, self._daemon_end, json.dumps(spec).encode() + b"\n")
        os.set_blocking(self._daemon_end, False)
        self._reader = asyncio.create_task(self._follow(watcher), name="guest status")
        try:
            async with asyncio.timeout(START_S):
                started = asyncio.create_task(self._started.wait(), name="guest start")
                await asyncio.wait({started, self._reader}, return_when=asyncio.FIRST_COMPLETED)
                started.cancel()
        except TimeoutError as error:
            await self.kill()
            raise EngineError(f"the guest's first process did not come up within {START_S:g} s") from error
        if not self._started.is_set():
            words = self._errors[-400:].strip() or "it ended before it could say why; its memory may be too small"
            raise EngineError(f"the guest's first process failed: {words}")
        if self.isolation == "namespaces" and self._first is not None:
            entry = dataclasses.replace(entry, head=self._first)
        await asyncio.to_thread(self._register_started, entry)

    def _register_started(self, entry: GuestEntry) -> None:
        if entry.head is not None:
            self._switch.update(self._key, entry)
        self._switch.check_started(self._key)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    def ended(self, call: Callable[[], None]) -> None:
        """Have `call` called when the guest has ended."""
        self._exit.add_done_callback(lambda _: call())

    async def catches_term(self) -> bool:
        return await apart(lambda: any(catches(pid, signal.SIGTERM) for pid in self._told()), "notice")

    async def terminate(self) -> bool:
        return await apart(self._terminate, "notice")

    def _terminate(self) -> bool:
        pids = self._told()
        catching = [pid for pid in pids if catches(pid, signal.SIGTERM)]
        # A helper with a session of its own (W&B's, and every program in Go "catches" SIGTERM) would end before it is done.
        own = [pid for pid in catching if _session(pid) == _session(min(pids, key=_age))]
        for pid in own or catching:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return bool(catching)

    async def pids(self) -> frozenset[int]:
        return await apart(self._family, "its processes")

    async def stands_still(self) -> bool:
        return await apart(self._stands_still, "its processes")

    def _stands_still(self) -> bool:
        return bool(cgroups.are_frozen(self._groups)) or all(stands_still(pid) for pid in self._pids())

    def allow_until(self, boot_s: float) -> None:
        if self._daemon_end >= 0:
            # A watcher that is gone has killed the guest; one that does not read has a full pipe of these to read.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._daemon_end, f"{boot_s}\n".encode())

    async def open_session(self, order: Order) -> Session:
        if self._doors is None:
            raise SessionError("the job has ended here")
        return await open_process_session(self._doors, order)

    async def dump(self, directory: Path) -> str:
        raise EngineError(f"no system checkpoint: {NO_DUMPS.problem}")

    async def kill(self) -> None:
        await self._switch.kill_and_wait(self._key)
        self._close_pipe()  # the watcher exits too
        try:
            async with asyncio.timeout(WATCHER_REPORTS_S):
                await self.wait()
        except TimeoutError:
            if self._watcher is not None:
                self._watcher.process.kill()
            await self.wait()

    async def _follow(self, watcher: Watcher) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(watcher.status, "rb", 0)
        )
        code, first, oom, reported = 137, False, False, False
        try:
            while line := await reader.readline():
                fact = json.loads(line)
                if "exit" in fact:
                    code, oom, reported = int(fact["exit"]), bool(fact["oom"]), True
                elif "first" in fact:
                    first, self._first = True, process_of(int(fact["first"]))
                    if self._proxy is not None and self._doors is not None:
                        _, descriptors, _, _ = socket.recv_fds(self._doors, 16, 1, socket.MSG_DONTWAIT)
                        self._proxy(socket.socket(fileno=descriptors[0]))
                else:
                    self.isolation = fact["isolation"]
                if first and self.isolation:
                    self._started.set()
        finally:
            transport.close()
            self._close_pipe()
            self._errors = await watcher.ended()
            if not reported:  # the watcher was killed, perhaps by its guest
                await self._switch.kill_and_wait(self._key)
                await apart(lambda: cgroups.remove_groups(tuple(map(str, self._groups))), "its groups")
            fault = await asyncio.to_thread(self._switch.remove, self._key)
            if not self._exit.done():
                self._exit.set_result(Exit(code=code, oom=oom, fault=fault))

    def _close_pipe(self) -> None:
        if self._doors is not None:
            self._doors.close()
            self._doors = None
        if self._daemon_end >= 0:
            os.close(self._daemon_end)
            self._daemon_end = -1

    def _told(self) -> list[int]:
        """Return the processes that get a notice: those in the guest's own root, not the program that made it."""
        if not self._own_root or self._first is None:
            return self._pids()
        outside = _root(self._first.pid)
        return [pid for pid in self._pids() if _root(pid) not in (None, outside)]

    def _pids(self) -> list[int]:
        """Return every process of the job: the watcher's descendants without process 1 of the guest."""
        return sorted(self._family() - {self._first.pid if self._first is not None else 0})

    def _family(self) -> frozenset[int]:
        """Return the watcher's descendants. It adopts orphans if there is no PID namespace."""
        with contextlib.suppress(OSError):  # no descriptor is free
            if self._watcher is not None and self._watcher.lives:
                return frozenset(descendants_of(self._watcher.process.pid))
        return frozenset()


def _root(pid: int) -> tuple[int, int] | None:
    """Return the device and inode of a process's root directory; None if it has ended."""
    try:
        found = Path(f"/proc/{pid}/root").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _age(pid: int) -> tuple[float, int]:
    """Return what orders processes by age, the oldest first."""
    found = process_of(pid)
    return (math.inf if found is None else found.started, pid)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _injected(more: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """Put the job's own LD_PRELOAD after the node's."""
    if "LD_PRELOAD" not in more or not env.get("LD_PRELOAD"):
        return more
    return {**more, "LD_PRELOAD": f"{more['LD_PRELOAD']}:{env['LD_PRELOAD']}"}


def _own(launch: Launch) -> list[Path]:
    """Return the paths of the attempt, and of the node's guard, that the guest may write."""
    return [Path(path) for path in [*launch.directories, *_injected_files(launch, read_only=False)]]


def _injected_files(launch: Launch, read_only: bool) -> list[str]:
    return [str(mount.source) for mount in launch.injection.mounts if mount.read_only == read_only]


def _group(launch: Launch) -> GuestGroup | None:
    group = subtree.make_group()
    if group is not None:
        try:
            disk = disk_of(launch.work_dir) if launch.disk_bps is not None else None
            group.limit(launch.memory_mib, launch.cpus, launch.pids, disk and (disk.number, launch.disk_bps))
        except OSError as error:
            group.remove()
            raise EngineError(f"its limits cannot be enforced here: {error}") from error
    return group


def _probe_groups() -> frozenset[str]:
    group = subtree.make_group()
    if group is None:
        return frozenset()
    group.remove()
    return group.kinds


def _probe_kernel() -> Kernel | None:
    """Find out what would keep a guest apart, by starting one that does nothing; None if the machine is too slow to say."""
    import subprocess

    try:
        done = subprocess.run(
            isolated("mesh.execution.process", "guest_init", "guest_init.probe()"),
            capture_output=True,
            text=True,
            check=False,
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        return None
    return Kernel(**json.loads(done.stdout)) if done.stdout else Kernel(False, 0, False)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
