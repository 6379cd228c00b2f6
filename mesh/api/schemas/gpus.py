"""This node's GPUs, shares of them, and receipts."""

import msgspec
from msgspec import UNSET, UnsetType

from cuda_guard.auditor import Finding, Foreign


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, by NVML. `capability`: CUDA's, (0, 0) if not known."""

    uuid: str
    model: str
    vram_mib: int
    capability: tuple[int, int]


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one GPU: `share` is per cent of its time."""

    uuid: str
    share: int
    vram_mib: int


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a GPU of this node. `share`, `vram_mib`: guaranteed; the limits: at most. Only of a `guarded` one the rest is
    known: `share_now` with what is lent to it; `memory_by_nvml` and those after it in bytes; `gate`: open or closed, by whom;
    `unguarded_calls`: of the driver, that the guard does not know; `gpu_s` as the guard has measured it; `memory_now`: what it
    may have now, None without a quota; `refused`: allocations."""

    job: str
    name: str
    user: str
    attempt: int
    share: int
    limit: int
    vram_mib: int
    vram_limit_mib: int
    guarded: bool
    share_now: float | UnsetType = UNSET
    memory_by_nvml: int | UnsetType | None = UNSET
    gate: str | UnsetType = UNSET
    closed_by: list[str] | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    unguarded_calls: list[str] | UnsetType = UNSET
    findings: list[Finding] | UnsetType = UNSET
    gpu_s: float | UnsetType = UNSET
    launches: int | UnsetType = UNSET
    memory: int | UnsetType = UNSET
    peak: int | UnsetType = UNSET
    refused: int | UnsetType = UNSET
    processes: int | UnsetType = UNSET
    memory_now: int | UnsetType | None = UNSET


class Gpu(Device, frozen=True, kw_only=True):
    """`foreign`: programs on it that belong to no guest; None if not known."""

    share_free: int
    vram_free_mib: int
    foreign: Foreign | None
    jobs: list[Tenant]


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """`guards`: this node can hold a job to a share; `gpu_sharing`: its owner allows that. The problems are empty if there are
    none."""

    guards: bool
    gpu_sharing: bool
    problem: str
    audit_problem: str
    pause_problem: str
    gpus: list[Gpu]


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one device. `gpu_ns`: its time as the guard measured it, `nvml_ns` as NVML's samples have it; `byte_s`: memory
    charged, in byte seconds, and `nvml_byte_s` held by NVML; `peak` in bytes; `discrepancy`: how much more of the time NVML
    saw, as a part."""

    uuid: str
    gpu_ns: int
    byte_s: int
    launches: int
    peak: int
    nvml_ns: int | None
    nvml_byte_s: int | None
    discrepancy: float | None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`node`, `submitter`: ids. `gpu_percent`: the share that it held, 0 for a slot. `reason`: why it ended, empty while it
    runs; `lost_ms`: work that no checkpoint had when it had to leave; `sealed`: the bytes that `node` has signed, in base64."""

    job: str
    attempt: int
    node: str
    user: str
    from_unix_ms: int
    until_unix_ms: int
    name: str
    submitter: str
    engine: str
    gpu_percent: int
    reason: str
    lost_ms: int
    devices: list[Use]
    sealed: str


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    receipts: list[Receipt]


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A job's share of each of its GPUs from now on."""

    job: str
    share: int
    limit: int
    vram_mib: int
    vram_limit_mib: int


class GpuPaused(msgspec.Struct, frozen=True, kw_only=True):
    """`freed`: its GPU memory was freed; otherwise `problem` has the reason."""

    job: str
    paused: bool
    freed: bool
    problem: str
