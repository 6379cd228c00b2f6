"""This node's GPUs, shares of them, and receipts."""

from typing import NotRequired, TypedDict

from cuda_guard.auditor import Finding, Foreign


class Device(TypedDict):
    """A GPU, by NVML. `capability`: CUDA's, (0, 0) if it is not told."""

    uuid: str
    model: str
    vram_mib: int
    capability: tuple[int, int]


class Room(TypedDict):
    """So much of one GPU: `share` is per cent of its time."""

    uuid: str
    share: int
    vram_mib: int


class Tenant(TypedDict):
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
    share_now: NotRequired[float]
    memory_by_nvml: NotRequired[int | None]
    gate: NotRequired[str]
    closed_by: NotRequired[list[str]]
    suspended: NotRequired[bool]
    unguarded_calls: NotRequired[list[str]]
    findings: NotRequired[list[Finding]]
    gpu_s: NotRequired[float]
    launches: NotRequired[int]
    memory: NotRequired[int]
    peak: NotRequired[int]
    refused: NotRequired[int]
    processes: NotRequired[int]
    memory_now: NotRequired[int | None]


class Gpu(Device):
    """`foreign`: programs there that are no guest's; None if that is not known."""

    share_free: int
    vram_free_mib: int
    foreign: Foreign | None
    jobs: list[Tenant]


class Gpus(TypedDict):
    """`guards`: this node can hold a job to a share; `gpu_sharing`: its owner allows that. The problems are empty if there are
    none."""

    guards: bool
    gpu_sharing: bool
    problem: str
    audit_problem: str
    pause_problem: str
    gpus: list[Gpu]


class Use(TypedDict):
    """Of one device. `gpu_ns`: its time as the guard measured it, `nvml_ns` as NVML's samples have it; `byte_s`: memory
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


class Receipt(TypedDict):
    """`node`, `submitter`: ids. `gpu_percent`: what it held, 0 is a slot. `reason`: why it ended, empty while it goes on;
    `lost_ms`: of its work, what no checkpoint had when it had to leave; `sealed`: the bytes that `node` has signed, in
    base64."""

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


class Receipts(TypedDict):
    receipts: list[Receipt]


class Shared(TypedDict):
    """What the job has of each of its GPUs from now on."""

    job: str
    share: int
    limit: int
    vram_mib: int
    vram_limit_mib: int


class GpuPaused(TypedDict):
    """`freed`: its memory there is; else `problem` says why not."""

    job: str
    paused: bool
    freed: bool
    problem: str
