"""Lending, and the results of the owner's orders."""

import msgspec

from mesh.provider.policy import Clocks, Source, Watch
from mesh.provider.presence import Level


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the machine or a GPU (docs/explanation/provider.md). `why`: the causes in words;
    `next_s`: until the next level if all
    stays as it is, None if it would stay too."""

    level: Level
    causes: tuple[Source, ...]
    pressing: bool
    next_s: float | None
    why: str


class Program(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    name: str


class LentGpu(Stand, frozen=True, kw_only=True):
    """`withheld`: the owner has reclaimed this one; `programs`: the owner's, on it now."""

    index: int
    uuid: str
    model: str
    withheld: bool
    programs: list[Program]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's policy (docs/reference/policy.md); hours as they are written."""

    hours: str
    gpu: bool
    ignore: tuple[str, ...]
    keyboard: Watch
    load: float | None
    memory_wait: float | None = None
    notice: float | None
    pause: float
    gpu_clocks: Clocks
    keyboard_clocks: Clocks
    load_clocks: Clocks
    calendar_clocks: Clocks


class Lend(msgspec.Struct, frozen=True, kw_only=True):
    """`lending`, `paused`: the owner's orders; `barred`: why this node may not lend at all; `paused_until_unix`: when a pause
    ends by itself, else 0; `now`: whether it takes guests now. `typed_s`: since the last key press; `load`: cores that others
    than guests use, `memory_wait`: per cent of the time in which one of them waits for memory; None if that is not watched,
    or not visible."""

    lending: bool
    barred: str = ""
    paused: bool
    paused_until_unix: int = 0
    now: bool
    guests: int
    machine: Stand
    gpus: list[LentGpu]
    hours: str
    hours_change_unix: float | None
    typed_s: float | None
    typing_seen_by: list[str]
    load: float | None
    memory_wait: float | None = None
    policy: Policy
    policy_file: str
    problem: str
    warnings: list[str]


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """`withheld`: UUIDs of GPUs that were reclaimed separately; `until_unix`: when a pause ends by itself, else 0.

    `problem`: why a restart forgets the order; empty if it is stored.
    """

    lending: bool
    paused: bool
    withheld: list[str]
    guests: int
    until_unix: int
    problem: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint."""

    seq: int
    step: int | None
    created_unix_ms: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a reclaim for one guest. `leads`: this node runs the job, and is no gang member. `save_s`:
    how long its last checkpoint took to save; `ship_bytes`, `ship_s`: what would be sent, to `sent_to`, as the `turn`th;
    `chance`: of being in time. None where that is not known."""

    job: str
    name: str
    user: str
    gpus: list[str]
    leads: bool
    ran_s: float
    checkpoint: Kept | None
    at_risk_s: float
    at_risk_gpu_s: float
    at_risk_steps: int | None
    heeds_notice: bool | None
    notice_s: float
    save_s: float | None
    ship_bytes: int | None
    ship_s: float | None
    sent_to: str | None
    turn: int | None
    chance: float | None
    in_time: bool | None
    goes_to: str | None
    plan: str
    loses: str


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a reclaim. `gpu`: the UUID, if only one GPU is meant."""

    dry_run: bool
    gpu: str | None
    guests: list[Cost]


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A guest that has left. `stages_ms`: from the order to each stage."""

    job: str
    user: str
    name: str
    reason: str
    lost_s: float
    lost_steps: int | None
    stages_ms: dict[str, float]


class Reclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """A finished reclaim. `reclaimed`: ids of the jobs that have left; `problem`: why a restart forgets it, else empty."""

    reclaimed: list[str]
    gpu: str | None
    seconds: float
    guests: list[Gone]
    problem: str


class Page(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    port: int


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    guests: int
