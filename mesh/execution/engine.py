"""The protocol that every engine implements, and the part of the job contract that all engines keep.

docs/reference/job-contract.md.
"""

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from cuda_guard.guard import Mount
from mesh.execution.guest_network import VARIABLES
from mesh.execution.secret_files import GuestSecrets
from mesh.execution.session import Session
from mesh.rpc.frames import Order
from placement.advert import WHOLE, Portion, SystemCheckpoints

# Where a guest with a root of its own sees its directories, and its environment.
WORK, CKPT, OUT, CTL, CACHE, INSIDE = "/mesh/work", "/mesh/ckpt", "/mesh/out", "/mesh/ctl", "/mesh/cache", "/mesh/env"
NO_GPUS = "void"  # to NVIDIA's container runtime
NO_DUMPS = SystemCheckpoints(problem="a plain process has none", gpu_problem="a plain process has none")


class EngineError(RuntimeError):
    """A guest could not be started or handled; the text says why and what to do next."""


class BadCommand(EngineError):
    """The command cannot be run: not found or not executable. Another node would fail too. `exit_code`: as shells have it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class BadImage(EngineError):
    """The image is not on this node."""


class Injection(msgspec.Struct, frozen=True):
    """Additions of the node to a guest that uses GPUs under its guard.

    `env` serves a guest that sees the machine's own files. `mounts` are all files that it needs; such a guest sees each at its
    source, one with a root file system of its own at its target.
    """

    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()


class Shown(msgspec.Struct, frozen=True):
    """A directory of the host that the guest may read: a container sees it at `target`; `variable` tells the path."""

    source: str
    target: str
    variable: str


class Launch(msgspec.Struct, frozen=True):
    """Everything an engine needs to start one attempt. Directories and `log_path` are on the host.

    `system`: the guest is saved by `Guest.dump`; `dump` is a directory that `Guest.dump` wrote, to restore from. `resume` is a
    path relative to `ckpt_dir` ("" is the directory itself), None when there is nothing to resume from. `image` is the job's
    name for its image, `image_id` the engine's (`sha256:...`). `gpus` are the portions that the guest holds; it may use up to
    `gpu_share_limit` per cent of the time and `vram_limit_mib` of the memory (0: no more than its portions). `pids` limits its
    processes and threads; `shm_mib` limits its /dev/shm, which counts as its memory; `disk_bps` limits the bytes per second that
    it reads from, and those that it writes to, the disk of its directories. `environment`: a Python environment that the guest
    may read; a container sees it at `INSIDE`. `until`: see `Guest.allow_until`. `wanted` is called now and then while the start
    waits; the start is given up when it returns false. `say` reports a text and its topic to the user while the guest runs.
    `data`: what it may read and not write; `cache_dir` has its caches, if it has any.
    `proxy`: takes a socket that listens on the guest's loopback (`guest_network`), from any thread, before the guest's first
    program runs; the guest then has no other network.
    """

    job: str
    attempt: int
    argv: tuple[str, ...]
    env: dict[str, str]
    work_dir: str
    ckpt_dir: str
    out_dir: str
    ctl_dir: str
    log_path: str
    node: str
    grace_s: float
    system: bool = False
    dump: str | None = None
    resume: str | None = None
    image: str | None = None
    image_id: str | None = None
    gpus: tuple[Portion, ...] = ()
    gpu_share_limit: int = WHOLE
    vram_limit_mib: int = 0
    injection: Injection = Injection()
    memory_mib: int | None = None
    cpus: float | None = None
    pids: int = 4096
    shm_mib: int = 64
    disk_bps: int | None = None
    secrets: GuestSecrets = GuestSecrets()
    environment: str | None = None
    until: float = math.inf
    wanted: Callable[[], bool] = lambda: True
    say: Callable[[str, str], None] = lambda words, about: None
    data: tuple[Shown, ...] = ()
    proxy: Callable[[socket.socket], None] | None = None
    cache_dir: str | None = None

    @property
    def directories(self) -> dict[str, str]:
        """Return the directories that the guest may write, each with where one with a root of its own sees it."""
        caches = {} if self.cache_dir is None else {self.cache_dir: CACHE}
        return {self.work_dir: WORK, self.ckpt_dir: CKPT, self.out_dir: OUT, self.ctl_dir: CTL, **caches}

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(portion.uuid for portion in self.gpus)


class Exit(msgspec.Struct, frozen=True):
    """The end of a guest.

    `code` is the exit status, or 128 + the signal that ended it. `fault` names what the node did to it; the job is not at fault.
    """

    code: int
    oom: bool = False
    detail: str = ""
    fault: str = ""


class Availability(msgspec.Struct, frozen=True):
    """An engine's state on this machine.

    `detail` says why it can or cannot run; `isolation` what a guest is and is not kept from; `system` whether whole guests can
    be saved; `proxies` whether a guest can be left with the network of a proxy alone; `unlimited` what is not limited for a guest
    as a whole, and `limits_by` how to change that.
    """

    ok: bool
    detail: str
    isolation: str = ""
    proxies: bool = False
    system: SystemCheckpoints = NO_DUMPS
    unlimited: tuple[str, ...] = ()
    limits_by: str = ""


class Guest(Protocol):
    """One running attempt."""

    async def wait(self) -> Exit: ...

    async def catches_term(self) -> bool:
        """Return whether any of its processes has a SIGTERM handler now, according to the kernel."""
        ...

    async def terminate(self) -> bool:
        """Send SIGTERM if the guest catches it; return whether it does."""
        ...

    async def pids(self) -> frozenset[int]:
        """Return the ids of all its processes, as this machine numbers them."""
        ...

    async def stands_still(self) -> bool:
        """Return whether all of it is stopped now, because it may not run."""
        ...

    def allow_until(self, boot_s: float) -> None:
        """Let it run until this CLOCK_BOOTTIME moment (`math.inf`: without limit); then it is stopped until it is allowed again.

        A separate process enforces this, so it holds while the daemon is stopped and after the machine has slept.
        """
        ...

    async def open_session(self, order: Order) -> Session:
        """Run one more command as one of its processes: with its variables, files, limits and namespaces.

        The command is stopped and killed with the guest. SessionError if it cannot run now.
        """
        ...

    async def dump(self, directory: Path) -> str:
        """Save the stopped guest, memory and processes, in this new directory; it may run on afterwards.

        Return the kind of node that can restore it (`SystemCheckpoints`). EngineError if it cannot be saved.
        """
        ...

    async def kill(self) -> None:
        """Send SIGKILL to all of the guest; return when nothing of it is left."""
        ...


class Engine(Protocol):
    """A way to run guests. `own_root`: its guests have a root file system of their own, not the machine's."""

    name: str
    own_root: bool

    async def availability(self) -> Availability: ...

    async def start(self, launch: Launch) -> Guest:
        """Start the guest. BadCommand, BadImage or EngineError if it cannot start. If cancelled, it leaves nothing behind."""
        ...

    async def close(self) -> None: ...


def contract_env(launch: Launch, work: str, ckpt: str, out: str, ctl: str) -> dict[str, str]:
    """Return the environment of a guest that sees its directories at these paths.

    NVIDIA's container runtime, where it is Docker's default, gives a container the GPUs that its variables name; many images say
    `all`. So they are set for every guest; `void` means none (NVIDIA Container Toolkit, "Specialized Configurations").
    """
    resume = "" if launch.resume is None else f"{ckpt}/{launch.resume}".rstrip("/")
    gpus = ",".join(launch.gpu_uuids)
    return {
        **launch.env,
        "MESH": "1",
        "MESH_JOB_ID": launch.job,
        "MESH_ATTEMPT": str(launch.attempt),
        "MESH_CKPT_DIR": ckpt,
        "MESH_RESUME": resume,
        "MESH_OUT_DIR": out,
        "MESH_CTL_DIR": ctl,
        "MESH_WORK_DIR": work,
        "MESH_GRACE_S": f"{launch.grace_s:g}",
        "MESH_NODE": launch.node,
        "MESH_GPU_UUIDS": gpus,
        "CUDA_VISIBLE_DEVICES": gpus,
        "NVIDIA_VISIBLE_DEVICES": gpus or NO_GPUS,
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        **(VARIABLES if launch.proxy is not None else {}),
    }
