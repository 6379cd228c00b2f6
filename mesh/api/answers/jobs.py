"""What runs, has run and waits."""

from typing import Any, NotRequired, TypedDict

from mesh.api.answers.gpus import Room
from mesh.api.answers.owner import Kept
from mesh.jobs.ledger import OutcomeKind


class Submitted(TypedDict):
    """`job`: the job, or the array of the `jobs`; `witnesses`: how many keep its record."""

    job: str
    jobs: list[str]
    workdir_bytes: int
    witnesses: int
    warning: str


class Place(TypedDict):
    """In an array of so many."""

    array: str
    index: int
    of: int


class NextCheckpoint(TypedDict):
    """When it is to save next, how long after the one before, seconds of work expected to be lost before that one is safe, and
    what set it (docs/schedule.md)."""

    due_unix: int
    interval_s: float
    loss_s: float
    why: str


class Saving(TypedDict):
    """What is being kept for more than two seconds: its checkpoint or result number `seq`. `sent` of `bytes` to so many
    `nodes`, 0 while it is written to its host's own store."""

    kind: str
    seq: int
    since_unix_ms: int
    sent: int
    bytes: int
    nodes: int


class Checkpoint(Kept):
    """`manifest`: its id in the store; `holders`: who has it on disk."""

    manifest: str
    holders: list[str]


class Attempt(TypedDict):
    """One stay on one node. `reason`: why it ended, empty while it lasts; times are 0 until then."""

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


class Outcome(TypedDict):
    kind: OutcomeKind
    detail: str
    exit_code: int | None
    ended_unix_ms: int


class Job(TypedDict):
    """`node`: where it runs; `mates`: of a gang, the others; `heir`: who would take its next attempt, `warm`: and has its last
    checkpoint already. `step` of `of`: how far it says it is. `at_risk_s`: GPU-seconds (or seconds of a slot) lost if its host
    died now. `heeds_notice`: whether it would save at a notice, None if that cannot be seen."""

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
    mates: list[str]
    heir: str | None
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
    saving: Saving | None
    checkpoint: Checkpoint | None
    attempts: list[Attempt]
    outcome: Outcome | None


class Jobs(TypedDict):
    """`put_away`: how many more this node remembers that have long been over."""

    jobs: list[Job]
    put_away: int


class OneJob(TypedDict):
    job: Job


class Event(TypedDict):
    """`actor`: who says it, `node`: its id; `id`: its number among what this node has seen, or `gap`: something before it is
    missing; the other fields are what `text` is made of."""

    id: NotRequired[int]
    gap: NotRequired[bool]
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


class Events(TypedDict):
    events: list[Event]


class Described(TypedDict):
    """`asked`: what it was submitted with, without what was left out; `group`: the number of its group of witnesses."""

    job: Job
    asked: dict[str, Any]
    group: int
    events: list[Event]


class Needs(TypedDict):
    """By so many `receipts`; `vram_mib`: the most of one GPU, None where no guard has measured it."""

    job: str
    receipts: int
    vram_mib: int | None
    ran_s: float


class Placing(TypedDict):
    """`mode`: flat, or two-level; then which zone, and who coordinates it."""

    mode: str
    two_level_since: int
    zone: str | None
    coordinator: str | None


class Candidate(TypedDict):
    """`score`: an integer beyond 2**53, so a string."""

    nick: str
    score: str
    weight: int
    advert_version: int


class Refused(TypedDict):
    nick: str
    reasons: list[str]


class InOrder(TypedDict):
    """`advert_now`: the version of its advert by now; None if it is gone."""

    nick: str
    advert_version: int
    weight: int
    advert_now: int | None


class Decision(TypedDict):
    by: str
    unix_ms: int
    rule: int
    attempt: int
    order: list[InOrder]
    declined: list[str]
    places_kept_for_others: list[str]


class Change(TypedDict):
    """Of the `request` or of the `campus`; `in_s`: when that is, if it is known."""

    of: str
    text: str
    in_s: float | None


class Why(TypedDict):
    """Of its next attempt: `candidates` best first, and who is refused; `decision`: the last one that is known; `would`: the
    nearest changes that would let it start, None unless they were asked for. `remaining_s`: how long it is likely to go on."""

    job: str
    state: str
    detail: str
    node: str | None
    witnesses: list[str]
    heir: str | None
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


class Cancelled(TypedDict):
    job: str
    state: str
    already: bool


class AllCancelled(TypedDict):
    jobs: list[Cancelled]


Migrating = TypedDict("Migrating", {"job": str, "attempt": int, "from": str, "to": str})  # `from` is a word of Python


class At(TypedDict):
    seq: int
    step: int | None


class Recovered(TypedDict):
    """`done`: it goes on; else what that would mean. `lost`, `kept`: its witnesses; `locked_out`: why its files cannot be
    read."""

    job: str
    done: bool
    locked_out: str
    lost: list[str]
    kept: list[str]
    witnesses: list[str]
    checkpoint: At | None
    checkpoint_unix_ms: int | None


class Pulled(TypedDict):
    job: str
    destination: str
    files: int
    bytes: int


class Control(TypedDict):
    text: str
