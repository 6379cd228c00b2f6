"""A job as nodes tell each other about it, and how many such views become one line of `mesh ps`.

Every witness and the runner publish their view as a lane-2 section; whoever asks takes the most advanced one.
"""

from collections.abc import Collection

import msgspec

from mesh.jobs.contract import Progress
from mesh.jobs.ledger import Attempt, Commit, Config, Outcome, OutcomeKind
from mesh.jobs.runner import Runner
from mesh.jobs.spec import ArrayPlace
from mesh.jobs.witness import Witness
from placement.advert import WHOLE, Count, Percent, Portion
from placement.allotment import percent
from placement.queue import Waiting

SHOWN_AS = {
    "acquiring": "starting",
    "gathering": "starting",
    "restoring": "starting",
    "asking": "saving",
    "disbanding": "releasing",
}
RUNNER = 2  # in a rank: it is the runner who says so
ATTEMPTS_SHOWN = 16  # a section must stay small; `mesh describe` asks a witness for the rest


class NextCheckpoint(msgspec.Struct, frozen=True):
    """When the job is to save next, how long after the one before, and seconds of work that are expected to be lost before that
    one is safe; `why`: as `placement.schedule.Due` has it."""

    due_unix: int
    interval_s: float
    loss_s: float
    why: str


class Saving(msgspec.Struct, frozen=True):
    """What is being kept now: its checkpoint or result of that number. `sent` of `size` bytes to so many `nodes`; none of these
    are known while it is written to its host's own store."""

    kind: str
    seq: int
    since_unix_ms: int
    sent: int = 0
    size: int = 0
    nodes: int = 0


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """`rank` orders views: a finished one first, then by term, ledger version and who acts: runner, steward, onlooker."""

    job: bytes
    name: str
    user: str
    submitter: bytes
    command: str
    created_unix_ms: int
    state: str
    detail: str
    rank: tuple[int, int, int, int]
    config: Config
    gpus: Count
    gpu_share: Percent = WHOLE
    gpu_share_limit: Percent = WHOLE
    vram_mib: Count = 0
    vram_limit_mib: Count = 0
    portions: tuple[Portion, ...] = ()  # what it has of its host's GPUs
    attempts: tuple[Attempt, ...] = ()
    array: ArrayPlace | None = None
    priority: int = 0
    saves: bool = False  # whether it has checkpoints
    commit: Commit | None = None
    outcome: Outcome | None = None
    settled: int = 0
    waiting: Waiting | None = None  # what it asks for, while nobody runs it
    runner: bytes | None = None
    heir: bytes | None = None  # who would take its next attempt
    warm: bool = False  # the heir has its last checkpoint
    step: int | None = None
    of: int | None = None
    heeds_notice: bool | None = None  # whether the guest would save at a notice, as far as can be seen from outside
    next_checkpoint: NextCheckpoint | None = None
    saving: Saving | None = None

    def at_risk_s(self, unix_ms: float) -> float:
        """GPU-seconds (or seconds of a slot) that are lost if its host dies then: since its last checkpoint that others hold."""
        last = self.attempts[-1] if self.attempts else None
        if self.outcome is not None or self.runner is None or last is None or not last.running_unix_ms:
            return 0.0
        saved = self.commit.created_unix_ms if self.commit is not None and self.commit.holders else 0
        since_ms = max(saved, last.running_unix_ms)
        return round(max(0.0, unix_ms - since_ms) / 1000 * self.gpu_percent * (1 + len(last.mates)) / WHOLE, 1)

    @property
    def witnesses(self) -> tuple[bytes, ...]:
        return self.config.nodes

    @property
    def gpu_percent(self) -> int:
        """What it uses of one node, in per cent of a GPU."""
        return percent(self.gpus, self.gpu_share)


class PastJob(msgspec.Struct, frozen=True):
    """What stays at hand of a job that has long been over. `used`: seconds times per cent of a GPU, in all."""

    job: bytes
    name: str
    user: str
    array: ArrayPlace | None
    kind: OutcomeKind
    ended_unix_ms: int
    used: int


def past_of(status: JobStatus) -> PastJob:
    """Of a job that is over."""
    assert status.outcome is not None
    used = sum(int(attempt.ran_s) for attempt in status.attempts) * status.gpu_percent
    ended = status.outcome.ended_unix_ms
    return PastJob(status.job, status.name, status.user, status.array, status.outcome.kind, ended, used)


_decoder = msgspec.msgpack.Decoder(JobStatus)


def encode_status(status: JobStatus) -> bytes:
    return msgspec.msgpack.encode(status)


def decode_status(data: bytes) -> JobStatus | None:
    """The status, or None for bytes that are none: somebody else's newer version, or nonsense."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def status_of(
    job: bytes,
    witness: Witness | None,
    runner: Runner | None,
    state: str,
    detail: str,
    progress: Progress | None,
    waiting: Waiting | None = None,
    heeds_notice: bool | None = None,
    warm: bool = False,
    portions: tuple[Portion, ...] = (),
    next_checkpoint: NextCheckpoint | None = None,
    saving: Saving | None = None,
) -> JobStatus:
    """This node's view: the runner's if the job runs here, else the witness's; `state` is empty if its steward only watches."""
    if runner is not None:
        spec, ledger, term, config = runner.spec, runner.ledger, runner.term, runner.config
        shown = SHOWN_AS.get(runner.state, runner.state)
    else:
        assert witness is not None
        cell, spec = witness.cell, witness.spec
        ledger, term, config = cell.ledger, cell.accepted_term, cell.config
        shown = state if state in {"pending", "starting"} else "pending"
        if ledger.open_attempt is not None:
            shown, detail = ("running" if ledger.open_attempt.running_unix_ms else "starting"), ""
    outcome = ledger.outcome if witness is not None and witness.finished else None
    if outcome is not None:
        shown, detail = outcome.kind, outcome.detail
    elif ledger.outcome is not None:
        shown, detail = "ending", ""
    last = ledger.attempts[-1] if ledger.attempts else None
    return JobStatus(
        job=job,
        name=spec.name,
        user=spec.user,
        submitter=spec.submitter,
        command=" ".join(spec.argv)[:120],
        created_unix_ms=spec.created_unix_ms,
        state=shown,
        detail=detail[:200],
        rank=(int(outcome is not None), term, ledger.version, RUNNER if runner is not None else int(bool(state))),
        config=config,
        gpus=spec.gpus,
        gpu_share=spec.gpu_share,
        gpu_share_limit=spec.gpu_share_limit,
        vram_mib=spec.vram_mib,
        vram_limit_mib=spec.vram_limit_mib,
        portions=portions if runner is not None and outcome is None else (),
        attempts=ledger.attempts[-ATTEMPTS_SHOWN:],
        array=spec.array,
        priority=spec.priority,
        saves=spec.checkpointing is not None,
        commit=ledger.commit,
        outcome=outcome,
        settled=ledger.settled,
        waiting=waiting if shown == "pending" else None,
        runner=last.node if last is not None and not last.reason else None,
        heir=runner.onward.heir if runner is not None and outcome is None else None,
        warm=warm,
        step=progress.step if progress is not None else last.last_step if last is not None else None,
        of=progress.of if progress is not None else None,
        heeds_notice=heeds_notice,
        next_checkpoint=next_checkpoint if outcome is None else None,
        saving=saving if outcome is None else None,
    )


def best_of(views: Collection[JobStatus]) -> JobStatus:
    """Of one job's views the most advanced, with what only its runner sees. A witness may be ahead of what the runner told."""
    best = max(views, key=lambda view: view.rank)
    runners = [view for view in views if view.rank[3] == RUNNER and view.rank[1] == best.rank[1]]
    if not runners or best.rank[3] == RUNNER:
        return best
    told = max(runners, key=lambda view: view.rank)
    step = best.step if told.step is None else max(told.step, best.step or 0)
    if best.outcome is not None:
        return msgspec.structs.replace(best, of=told.of, step=step, heeds_notice=told.heeds_notice)
    # What the runner said of the heir was of the checkpoint that was the last one then.
    same, holders = told.commit == best.commit, best.commit.holders if best.commit is not None else ()
    return msgspec.structs.replace(
        best,
        detail=told.detail if told.state == best.state else best.detail,
        of=told.of,
        step=step,
        portions=told.portions,
        heir=told.heir,
        warm=told.heir is not None and ((same and told.warm) or told.heir in holders),
        heeds_notice=told.heeds_notice,
        next_checkpoint=told.next_checkpoint,
        saving=told.saving,
    )
