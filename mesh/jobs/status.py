"""A job as nodes tell each other about it, and how many such views become one line of `mesh ps`.

Every witness and the runner publish their view as a lane-2 section; whoever asks takes the most advanced one.
"""

from collections.abc import Iterable

import msgspec

from mesh.jobs.contract import Progress
from mesh.jobs.ledger import Attempt, Commit, Config, Outcome
from mesh.jobs.runner import Runner
from mesh.jobs.witness import Witness
from placement.queue import Waiting

ATTEMPTS_SHOWN = 16  # a section must stay small; `mesh describe` asks a witness for the rest


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
    gpus: int
    attempts: tuple[Attempt, ...] = ()
    excluded: tuple[bytes, ...] = ()
    commit: Commit | None = None
    outcome: Outcome | None = None
    settled: int = 0
    waiting: Waiting | None = None  # what it asks for, while nobody runs it
    runner: bytes | None = None
    step: int | None = None
    of: int | None = None

    @property
    def witnesses(self) -> tuple[bytes, ...]:
        return self.config.nodes


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
) -> JobStatus:
    """This node's view: the runner's if the job runs here, else the witness's; `state` is empty if its steward only watches."""
    if runner is not None:
        spec, ledger, term, config = runner.spec, runner.ledger, runner.term, runner.config
        shown = runner.state if runner.state not in {"acquiring", "restoring"} else "starting"
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
        rank=(int(outcome is not None), term, ledger.version, 2 if runner is not None else int(bool(state))),
        config=config,
        gpus=spec.gpus,
        attempts=ledger.attempts[-ATTEMPTS_SHOWN:],
        excluded=ledger.excluded,
        commit=ledger.commit,
        outcome=outcome,
        settled=ledger.settled,
        waiting=waiting if shown == "pending" else None,
        runner=last.node if last is not None and not last.reason else None,
        step=progress.step if progress is not None else last.last_step if last is not None else None,
        of=progress.of if progress is not None else None,
    )


def merge_statuses(views: Iterable[JobStatus]) -> dict[bytes, JobStatus]:
    """One status a job: the most advanced view, with the progress that only the runner's own view shows."""
    best: dict[bytes, JobStatus] = {}
    progress: dict[tuple[bytes, int], JobStatus] = {}
    for view in views:
        known = best.get(view.job)
        if known is None or view.rank > known.rank:
            best[view.job] = view
        if view.of is not None:
            progress[view.job, view.rank[1]] = view
    for job, view in best.items():
        seen = progress.get((job, view.rank[1]))
        if seen is not None:
            best[job] = msgspec.structs.replace(view, of=seen.of, step=max(seen.step or 0, view.step or 0))
    return best
