"""The one protocol behind which guests run, and the part of the job contract that every engine keeps (docs/job-contract.md)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from cuda_guard.guard import Mount
from mesh.engine.frames import Order
from mesh.engine.session import Session
from placement.advert import WHOLE, Portion
from placement.likeness import SystemCheckpoints

NO_DUMPS = SystemCheckpoints(problem="a plain process has none", gpu_problem="a plain process has none")


class EngineError(RuntimeError):
    """A guest could not be started or handled; the text says why and what to do next."""


class BadCommand(EngineError):
    """The command cannot be run: not found or not executable. Another node would fare no better."""


class BadImage(EngineError):
    """The image is not on this node."""


class Injection(msgspec.Struct, frozen=True):
    """What its node puts between a guest and its GPUs: variables for one that sees the machine's own files, mounts for one
    with a root of its own."""

    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()


class Launch(msgspec.Struct, frozen=True):
    """Everything an engine needs to start one attempt. Directories and `log_path` are on the host.

    `system`: it will be saved by `Guest.dump`; `dump` is a directory that this made, to go on from. `resume` is a path relative
    to `ckpt_dir` ("" is the directory itself), None when there is nothing to resume from. `image` is what the job calls its
    image, `image_id` what the engine does (`sha256:...`). `gpus` are the portions it was given, of which it may have up to
    `gpu_share_limit` per cent of the time and `vram_limit_mib` (0: no more) of the memory. `pids` bounds its processes and
    threads, `shm_mib` its /dev/shm, which is part of its memory. `until`: see `Guest.allow_until`. `wanted` is asked now
    and then while its start waits for something: whether it is to start still. `say` tells its user something while it runs, in
    words and what it is about.
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
    until: float = math.inf
    wanted: Callable[[], bool] = lambda: True
    say: Callable[[str, str], None] = lambda words, about: None

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(portion.uuid for portion in self.gpus)


class Exit(msgspec.Struct, frozen=True):
    """`code` is the exit status, or 128 + the signal that ended it. `fault`: what its node did to it; the job is not to blame."""

    code: int
    oom: bool = False
    detail: str = ""
    fault: str = ""


class Availability(msgspec.Struct, frozen=True):
    """Whether an engine can run here, in words; `isolation` says what a guest is kept from, and what not; `system`, whether its
    guests can be saved as a whole."""

    ok: bool
    detail: str
    isolation: str = ""
    system: SystemCheckpoints = NO_DUMPS


class Guest(Protocol):
    """One running attempt."""

    async def wait(self) -> Exit: ...

    async def catches_term(self) -> bool:
        """Whether anything of it catches SIGTERM now, by the kernel's account."""
        ...

    async def terminate(self) -> bool:
        """Send SIGTERM if the guest catches it; whether it does."""
        ...

    async def pids(self) -> frozenset[int]:
        """All of its processes, as this machine numbers them."""
        ...

    async def stands_still(self) -> bool:
        """Whether nothing of it runs now, because it may not."""
        ...

    def allow_until(self, boot_s: float) -> None:
        """Let it run until this moment of CLOCK_BOOTTIME (`math.inf`: for ever); past it, it stands still until it is allowed
        again. A process of its own keeps it to that, so it holds while the daemon stands still or the machine has slept."""
        ...

    async def open_session(self, order: Order) -> Session:
        """Run one more command in it, as one of its processes: with its variables, files, limits and namespaces, stopped and
        killed with it. SessionError if that cannot be now."""
        ...

    async def dump(self, directory: Path) -> str:
        """Save all of it, memory and processes, in this new directory, while it stands still; it may go on afterwards. Says what
        a node must be, to go on from it (placement/likeness.py). EngineError if that cannot be."""
        ...

    async def kill(self) -> None:
        """SIGKILL to everything of the guest; returns when nothing of it is left."""
        ...


class Engine(Protocol):
    """`own_root`: its guests have a root file system of their own, not the machine's."""

    name: str
    own_root: bool

    async def availability(self) -> Availability: ...

    async def start(self, launch: Launch) -> Guest:
        """Start the guest; BadCommand, BadImage or EngineError if that cannot be. Cancelled, it leaves nothing."""
        ...

    async def close(self) -> None: ...


def contract_env(launch: Launch, work: str, ckpt: str, out: str, ctl: str) -> dict[str, str]:
    """The environment of a guest that sees its directories at these paths."""
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
    }
