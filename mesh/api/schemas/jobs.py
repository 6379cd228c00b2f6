"""Jobs that run, wait or are over."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mesh.api.schemas.gpus import Room
from mesh.api.schemas.owner import Kept
from mesh.consensus.status import NextCheckpoint
from mesh.model.record import OutcomeKind


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """`job`: the job, or the array of the `jobs`; `witnesses`: the number of nodes that keep its record."""

    job: str
    jobs: list[str]
    workdir_bytes: int
    witnesses: int
    warning: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A job's place in an array of `of` jobs: it runs `batch` indices from `index` on."""

    array: str
    index: int
    of: int
    batch: int
    label: str


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint or result that takes more than two seconds to save. `sent` of `bytes` to so many
    `nodes`, 0 while it is written to its host's own store."""

    kind: str
    seq: int
    since_unix_ms: int
    sent: int
    bytes: int
    nodes: int


class Checkpoint(Kept, frozen=True, kw_only=True):
    """`manifest`: its id in the store; `holders`: the nodes that have it on disk, of `wanted`; `at_risk`: fewer than wanted."""

    manifest: str
    holders: list[str]
    wanted: int = 0
    at_risk: bool = False


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on one node. `reason`: why it ended, empty while it runs; times are 0 until then."""

    number: int
    node: str
    term: int
    started_unix_ms: int
    running_unix_ms: int
    ended_unix_ms: int
    seen_unix_ms: int
    reason: str
    exit_code: int | None
    resumed_step: int | None
    last_step: int | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    kind: OutcomeKind
    detail: str
    exit_code: int | None
    ended_unix_ms: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job. `node`: where it runs; `gang`: the other members of its gang; `standby`: who would take its next attempt, `warm`:
    the standby has its last checkpoint. `step` of `of`: its progress, as it reports it. `at_risk_s`: GPU-seconds (or seconds of a
    slot) lost if its host died now. `heeds_notice`: whether it would save at a notice, None if that cannot be seen."""

    job: str
    name: str
    array: Place | None
    priority: int
    user: str
    submitter: str
    command: str
    created_unix_ms: int
    state: str
    detail: str
    node: str | None
    gang: list[str]
    standby: str | None
    warm: bool
    gpus: int
    gpu_share: int
    gpu_share_limit: int
    vram_mib: int
    vram_limit_mib: int
    gpu_portions: list[Room]
    witnesses: list[str]
    step: int | None
    of: int | None
    at_risk_s: float
    heeds_notice: bool | None
    next_checkpoint: NextCheckpoint | None
    saving: Saving | None = None
    checkpoint: Checkpoint | None
    attempts: list[Attempt]
    outcome: Outcome | None


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """`archived`: the number of archived jobs, which are not listed."""

    jobs: list[Job]
    archived: int = 0


class OneJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`actor`: the node that reports the event, `node`: its id; `id`: its number on this node, or `gap`: an event before it
    is missing. `text` is made of the other fields."""

    id: int | UnsetType = UNSET
    gap: bool | UnsetType = UNSET
    unix_ms: int
    job: str | None
    actor: str
    node: str
    seq: int
    kind: str
    attempt: int | None
    number: int | None
    step: int | None
    old: str
    new: str
    reason: str
    target: str
    text: str


class Events(msgspec.Struct, frozen=True, kw_only=True):
    events: list[Event]


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """`asked`: the fields that the job was submitted with; `group`: the number of its group of witnesses."""

    job: Job
    asked: dict[str, Any]
    group: int
    events: list[Event]


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """A job's peak use, by `receipts` receipts; `vram_mib`: the most of one GPU, None if no guard has measured it."""

    job: str
    receipts: int
    vram_mib: int | None
    ran_s: float


class Placing(msgspec.Struct, frozen=True, kw_only=True):
    """`mode`: flat, or two-level; then the zone and its coordinator."""

    mode: str
    two_level_since: int
    zone: str | None
    coordinator: str | None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """`score`: an integer beyond 2**53, so a string."""

    nick: str
    score: str
    weight: int
    advert_version: int


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    nick: str
    reasons: list[str]


class InOrder(msgspec.Struct, frozen=True, kw_only=True):
    """`advert_now`: the current version of its advert; None if there is none."""

    nick: str
    advert_version: int
    weight: int
    advert_now: int | None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    by: str
    unix_ms: int
    rule: int
    attempt: int
    order: list[InOrder]
    declined: list[str]
    places_kept_for_others: list[str]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the `request` or of the `campus`; `in_s`: seconds until it happens, if that is known."""

    of: str
    text: str
    in_s: float | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking for the next attempt: `candidates` best first, and the refused nodes. `decision`: the last one that is known;
    `would`: the nearest changes that would let the job start, None unless asked for; `remaining_s`: its expected running time."""

    job: str
    array: Place | None
    state: str
    detail: str
    node: str | None
    witnesses: list[str]
    standby: str | None
    warm: bool
    attempts: list[Attempt]
    placement: Placing
    submitted_by: str
    explanation: list[str]
    candidates: list[Candidate]
    refused: list[Refused]
    remaining_s: int
    decision: Decision | None
    would: list[Change] | None


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    array: Place | None
    state: str
    already: bool


class AllCancelled(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[Cancelled]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Files that this node is to bring to `directory`, or to add to `caches`. `problem`: why the last try failed; `over`:
    there is no other try."""

    job: str
    directory: str
    caches: list[str] = []
    problem: str
    over: bool


class Deliveries(msgspec.Struct, frozen=True, kw_only=True):
    deliveries: list[Delivery]


class Migrating(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    attempt: int
    from_: str = msgspec.field(name="from")
    to: str


class At(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    step: int | None


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """`done`: the job was recovered; otherwise the cost of it. `lost`, `kept`: its witnesses; `key_problem`: why its files cannot
    be read."""

    job: str
    done: bool
    key_problem: str
    lost: list[str]
    kept: list[str]
    witnesses: list[str]
    checkpoint: At | None
    checkpoint_unix_ms: int | None


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    destination: str
    files: int
    bytes: int


class Control(msgspec.Struct, frozen=True, kw_only=True):
    text: str
