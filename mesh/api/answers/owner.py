"""What is lent, and what became of an order of its owner."""

from typing import TypedDict

from mesh.provider.policy import Clocks, Source, Watch
from mesh.provider.presence import Level


class Stand(TypedDict):
    """How the machine, or a GPU, stands (docs/provider.md). `why`: the causes in words; `next_s`: until the next level if all
    stays as it is, None if it would stay too."""

    level: Level
    causes: tuple[Source, ...]
    pressing: bool
    next_s: float | None
    why: str


class Program(TypedDict):
    pid: int
    name: str


class LentGpu(Stand):
    """`withheld`: its owner has taken this one back; `programs`: his own, on it now."""

    index: int
    uuid: str
    model: str
    withheld: bool
    programs: list[Program]


class Policy(TypedDict):
    """The owner's, as docs/provider.md has it; hours as they are written."""

    hours: str
    gpu: bool
    ignore: tuple[str, ...]
    keyboard: Watch
    load: float | None
    notice: float | None
    pause: float
    gpu_clocks: Clocks
    keyboard_clocks: Clocks
    load_clocks: Clocks
    calendar_clocks: Clocks


class Lend(TypedDict):
    """`lending`, `paused`: its owner's word; `paused_until_unix`: when a pause ends by itself, else 0; `now`: whether it takes
    guests now. `typed_s`: since somebody typed; `load`: cores that others than guests use; None where that is not looked at."""

    lending: bool
    paused: bool
    paused_until_unix: int
    now: bool
    guests: int
    machine: Stand
    gpus: list[LentGpu]
    hours: str
    hours_change_unix: float | None
    typed_s: float | None
    typing_seen_by: list[str]
    load: float | None
    policy: Policy
    policy_file: str
    problem: str
    warnings: list[str]


class Paused(TypedDict):
    """`withheld`: UUIDs of GPUs that are taken back one by one; `until_unix`: when a pause ends by itself, else 0."""

    lending: bool
    paused: bool
    withheld: list[str]
    guests: int
    until_unix: int


class Kept(TypedDict):
    """A committed checkpoint."""

    seq: int
    step: int | None
    created_unix_ms: int


class Cost(TypedDict):
    """What taking the machine back would cost one guest. `leads`: this node runs the job, and is no mate of a gang. `save_s`:
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


class Rehearsed(TypedDict):
    """What it would cost. `gpu`: the UUID, if only one is meant."""

    dry_run: bool
    gpu: str | None
    guests: list[Cost]


class Gone(TypedDict):
    """How a guest left. `rungs_ms`: from the order until it was there, by rung."""

    job: str
    user: str
    name: str
    reason: str
    lost_s: float
    lost_steps: int | None
    rungs_ms: dict[str, float]


class Reclaimed(TypedDict):
    """Done: `reclaimed` has the ids of the jobs that are gone."""

    reclaimed: list[str]
    gpu: str | None
    seconds: float
    guests: list[Gone]


class Page(TypedDict):
    url: str
    port: int


class Leaving(TypedDict):
    pid: int
    guests: int
