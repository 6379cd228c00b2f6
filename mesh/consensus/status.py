"""Status of a job as nodes publish it, and the choice of one status among the views of several nodes.

Every witness and the runner publish their view as a membership section; a reader takes the most advanced one.
"""

import shlex
from collections.abc import Collection, Hashable, Iterator
from functools import lru_cache
from typing import Annotated, TypeVar, cast

import msgspec

from membership.lengths import Id, Text, shortened
from membership.malformed import MALFORMED
from mesh.consensus.contract import Progress
from mesh.consensus.runner import Runner
from mesh.consensus.witness import Witness
from mesh.model.record import Attempt, Attempts, Commit, Config, Needed, Number, Outcome, OutcomeKind, Seconds, Voter
from mesh.model.spec import JOB_ID_BYTES, ArrayPlace, SpecError, check_array
from placement.advert import MAX_GPUS, WHOLE, Count, Percent, Portion
from placement.allocation import gpu_percent
from placement.queue import HALF_LIFE_S, Priority, Waiting

T = TypeVar("T", bytes, str, Voter)

SHOWN_AS = {
    "acquiring": "starting",
    "gathering": "starting",
    "restoring": "starting",
    "awaiting": "running",
    "asking": "saving",
    "disbanding": "releasing",
}
RUNNER = 2  # the runner's place in a rank
Role = Annotated[int, msgspec.Meta(ge=0, le=RUNNER)]
SHARED_BYTES = 128  # a node and its disk take 40, a user's name at most 64
COUNTED_S = 4 * HALF_LIFE_S  # that the attempts of a job count as usage: what is older has lost most of it (own choice)
ATTEMPTS_SHOWN = 16  # a section stays small; `mesh describe` asks a witness for the rest


class NextCheckpoint(msgspec.Struct, frozen=True):
    """When the job is to save next, the interval since the last save, and the seconds of work expected to be lost before that
    save is safe. `why`: as in `placement.schedule.Due`.
    """

    due_unix: Number
    interval_s: Seconds
    loss_s: Seconds
    why: Text


class Saving(msgspec.Struct, frozen=True):
    """The checkpoint or result being stored, by its number. `sent` of `size` bytes have gone to `nodes` nodes; all are 0
    while it is written to the local store.
    """

    kind: Text
    seq: Number
    since_unix_ms: Number
    sent: Number = 0
    size: Number = 0
    nodes: Number = 0


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """One node's view of a job. `rank` orders views: a final one first, then by term, record version and role (runner,
    leader, other).
    """

    job: Id
    name: Text
    user: Text
    submitter: Id
    command: Text
    created_unix_ms: Number
    state: Text
    detail: Text
    rank: tuple[Number, Number, Number, Role]
    config: Config
    gpus: Count
    gpu_share: Percent = WHOLE
    gpu_share_limit: Percent = WHOLE
    vram_mib: Count = 0
    vram_limit_mib: Count = 0
    portions: Annotated[tuple[Portion, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()  # of its host's GPUs
    attempts: Attempts = ()
    array: ArrayPlace | None = None
    priority: Priority = 0
    saves: bool = False  # whether it has checkpoints
    commit: Commit | None = None
    outcome: Outcome | None = None
    predecessor: Commit | None = None
    abandoned: Commit | None = None
    needed: Needed = ()
    waiting: Waiting | None = None  # its request, while it queues
    runner: Id | None = None
    standby: Id | None = None  # the node that would take the next attempt
    warm: bool = False  # the standby has its last checkpoint
    step: Number | None = None
    of: Number | None = None
    heeds_notice: bool | None = None  # whether the guest saves at a notice, as far as this can be observed
    next_checkpoint: NextCheckpoint | None = None
    saving: Saving | None = None
    workdir: Id | None = None  # the manifest of its working directory

    def at_risk_s(self, unix_ms: float) -> float:
        """Return the GPU-seconds (or seconds of a slot) that are lost if the host dies at `unix_ms`: those since the last
        replicated checkpoint.
        """
        last = self.attempts[-1] if self.attempts else None
        if self.outcome is not None or self.runner is None or last is None or not last.running_unix_ms:
            return 0.0
        saved = self.commit.created_unix_ms if self.commit is not None and self.commit.holders else 0
        since_ms = max(saved, last.running_unix_ms)
        return round(max(0.0, unix_ms - since_ms) / 1000 * self.held_percent(last) / WHOLE, 1)

    @property
    def witnesses(self) -> tuple[bytes, ...]:
        return self.config.nodes

    @property
    def counted(self) -> Iterator[tuple[Attempt, int]]:
        """Yield the attempts that ran, the newest first, with the seconds of each that count as usage. The nodes that ran them
        state their times, and those of one job may not outweigh all others.
        """
        left_s = COUNTED_S
        for attempt in reversed(self.attempts):
            ran_s = min(int(attempt.ran_s), left_s)
            left_s -= ran_s
            yield attempt, ran_s

    def held_percent(self, attempt: Attempt) -> int:
        """Return what an attempt holds on all of its nodes, in per cent of a GPU."""
        return gpu_percent(self.gpus, self.gpu_share) * (1 + len(attempt.gang))


class ArchivedJob(msgspec.Struct, frozen=True):
    """The summary of an archived job that stays in memory. `used`: seconds times per cent of a GPU, in total. `user_key` and
    `created_unix_ms`: by its signed description; empty if an earlier release has archived it.
    """

    job: bytes
    name: str
    user: str
    array: ArrayPlace | None
    kind: OutcomeKind
    ended_unix_ms: int
    used: int
    user_key: bytes = b""
    created_unix_ms: int = 0


def archived(status: JobStatus) -> ArchivedJob:
    """Return the summary of a finished job."""
    assert status.outcome is not None
    used = sum(ran_s * status.held_percent(attempt) for attempt, ran_s in status.counted)
    ended = status.outcome.ended_unix_ms
    return ArchivedJob(status.job, status.name, status.user, status.array, status.outcome.kind, ended, used)


_decoder = msgspec.msgpack.Decoder(JobStatus)


def encode_status(status: JobStatus) -> bytes:
    return msgspec.msgpack.encode(status)


def decode_status(data: bytes) -> JobStatus | None:
    """Decode a status; None for anything else, such as a newer version or what no job can be."""
    try:
        status = _decoder.decode(data)
        if status.array is not None:
            check_array(status.array)
    except (SpecError, *MALFORMED):
        return None
    if not _is_possible(status):
        return None
    # A node may know thousands of jobs. They name the same few nodes and users, which take half of their memory otherwise.
    replace = msgspec.structs.replace
    return replace(
        status,
        user=_shared(status.user),
        submitter=_shared(status.submitter),
        state=_shared(status.state),
        config=replace(status.config, members=tuple(_shared(voter) for voter in status.config.members)),
        attempts=tuple(replace(one, node=_shared(one.node), nick=_shared(one.nick)) for one in status.attempts),
    )


def _is_possible(status: JobStatus) -> bool:
    """Tell whether the parts of a status fit together: its readers rely on that."""
    ranked = status.rank[0] == (status.outcome is not None)
    return len(status.job) == JOB_ID_BYTES and ranked and (status.runner is None or bool(status.attempts))


def _shared(value: T) -> T:
    """Return one object for all equal values; a long one, as only a hostile node sends it, as it is."""
    size = len(value.node) + len(value.disk) if isinstance(value, Voter) else len(value)
    return cast(T, _first(value)) if size <= SHARED_BYTES else value


@lru_cache(maxsize=8192)
def _first(value: Hashable) -> Hashable:
    return value


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
    """Return this node's view: the runner's if the job runs here, else the witness's. `state` is empty if the leader only
    watches.
    """
    if runner is not None:
        spec, record, term, config = runner.spec, runner.record, runner.term, runner.config
        shown = SHOWN_AS.get(runner.state, runner.state)
    else:
        assert witness is not None
        witness_record, spec = witness.witness_record, witness.spec
        record, term, config = witness_record.record, witness_record.accepted_term, witness_record.config
        shown = state if state in {"pending", "starting"} else "pending"
        if record.open_attempt is not None:
            shown, detail = ("running" if record.open_attempt.running_unix_ms else "starting"), ""
    outcome = record.outcome if witness is not None and witness.finished else None
    if outcome is not None:
        shown, detail = outcome.kind, outcome.detail
    elif record.outcome is not None:
        shown, detail = "ending", ""
    last = record.attempts[-1] if record.attempts else None
    return JobStatus(
        job=job,
        name=spec.name,
        user=spec.user,
        submitter=spec.submitter,
        command=shlex.join(spec.argv)[:120],
        created_unix_ms=spec.created_unix_ms,
        state=shown,
        detail=shortened(detail, 200),
        rank=(int(outcome is not None), term, record.version, RUNNER if runner is not None else int(bool(state))),
        config=config,
        gpus=spec.gpus,
        gpu_share=spec.gpu_share,
        gpu_share_limit=spec.gpu_share_limit,
        vram_mib=spec.vram_mib,
        vram_limit_mib=spec.vram_limit_mib,
        portions=portions if runner is not None and outcome is None else (),
        attempts=record.attempts[-ATTEMPTS_SHOWN:],
        array=spec.array,
        priority=spec.priority,
        saves=spec.checkpointing is not None,
        commit=record.commit,
        outcome=outcome,
        predecessor=record.predecessor,
        abandoned=record.abandoned,
        needed=record.needed,
        waiting=waiting if shown == "pending" else None,
        runner=last.node if last is not None and not last.reason else None,
        standby=runner.next_placement.standby if runner is not None and outcome is None else None,
        warm=warm,
        step=progress.step if progress is not None else last.last_step if last is not None else None,
        of=progress.of if progress is not None else None,
        heeds_notice=heeds_notice,
        next_checkpoint=next_checkpoint if outcome is None else None,
        saving=saving if outcome is None else None,
        workdir=spec.workdir,
    )


def is_over(views: Collection[JobStatus]) -> bool | None:
    """Tell whether a job is over: only while no view says that it continues. None without a view."""
    return all(view.outcome is not None for view in views) if views else None


def best_of(views: Collection[JobStatus]) -> JobStatus:
    """Return the most advanced view of a job, with what only its runner sees. A witness may be ahead of the runner's last
    status.
    """
    best = max(views, key=lambda view: view.rank)
    runners = [view for view in views if view.rank[3] == RUNNER and view.rank[1] == best.rank[1]]
    if not runners or best.rank[3] == RUNNER:
        return best
    latest = max(runners, key=lambda view: view.rank)
    step = best.step if latest.step is None else max(latest.step, best.step or 0)
    if best.outcome is not None:
        return msgspec.structs.replace(best, of=latest.of, step=step, heeds_notice=latest.heeds_notice)
    # The runner's `warm` is about the checkpoint that was the last one then.
    same, holders = latest.commit == best.commit, best.commit.holders if best.commit is not None else ()
    return msgspec.structs.replace(
        best,
        detail=latest.detail if latest.state == best.state else best.detail,
        of=latest.of,
        step=step,
        portions=latest.portions,
        standby=latest.standby,
        warm=latest.standby is not None and ((same and latest.warm) or latest.standby in holders),
        heeds_notice=latest.heeds_notice,
        next_checkpoint=latest.next_checkpoint,
        saving=latest.saving,
    )
