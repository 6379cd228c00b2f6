"""One attempt of a job on this node: its lease, its checkpoints' commits, its departure. No I/O.

The runner owns the term it was handed. Every third of a lease it carries its ledger to the witnesses; the lease it may
rely on counts from the sending of the round that a quorum answered, less a margin, so that it always ends here before it
ends there. Past that moment the guest stands still (or goes on uncommitted, if its owner said so); it goes on if the group
still accepts this term and is killed if it does not. States and transitions: docs/jobs.md.
"""

import math

import msgspec

from mesh.jobs.contract import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, ExitFacts, describe_exit, judge
from mesh.jobs.effects import (
    Committed,
    Effect,
    Ended,
    Kill,
    Launch,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    StateChanged,
)
from mesh.jobs.ledger import Attempt, Commit, Config, Ledger, Outcome, OutcomeKind
from mesh.jobs.messages import Accepted, Closed, Refused, Released, Start
from mesh.jobs.proposer import Fenced, Proposer, healthy_group
from mesh.jobs.spec import JobSpec
from mesh.jobs.steward import WANT_WITNESSES
from mesh.jobs.view import Instant, Timer, TimerTokens, View
from mesh.jobs.witness import RATE_BOUND

RENEWALS_PER_LEASE = 3  # two may be lost; as etcd's and Consul's keep-alives
CUT_OFF = {
    "freeze": ("frozen", "no majority of its witnesses answers"),
    "compute_uncommitted": (
        "uncommitted",
        "no majority of its witnesses answers; it goes on, and nothing of that counts yet",
    ),
}
CUT_OFF_STATES = frozenset(state for state, _ in CUT_OFF.values())
GUEST_RUNS = CUT_OFF_STATES | {"running", "vacating"}


class GuestStarted(msgspec.Struct, frozen=True):
    resumed_step: int | None


class GuestFailed(msgspec.Struct, frozen=True):
    """It could not be started here. `fault` says whether another node could do better."""

    reason: str
    elsewhere: bool


class GuestExited(msgspec.Struct, frozen=True):
    code: int
    oom: bool
    forced_done: bool


class CheckpointFound(msgspec.Struct, frozen=True):
    """The guest has committed something that is newer than what was last stored."""


class CheckpointStored(msgspec.Struct, frozen=True):
    """`manifest` is on this disk and on the `holders`' disks. None when there was nothing new to store."""

    manifest: bytes | None
    holders: tuple[bytes, ...]
    step: int | None


class CheckpointFailed(msgspec.Struct, frozen=True):
    reason: str


class ResultStored(msgspec.Struct, frozen=True):
    manifest: bytes | None
    holders: tuple[bytes, ...]
    detail: str = ""


class Progressed(msgspec.Struct, frozen=True):
    step: int


class VacateWanted(msgspec.Struct, frozen=True):
    grace_s: float
    reason: str


class MigrateWanted(msgspec.Struct, frozen=True):
    """Its user wants it elsewhere: at `to`, if that is not None and can take it."""

    to: bytes | None


class KillWanted(msgspec.Struct, frozen=True):
    reason: str


class CancelWanted(msgspec.Struct, frozen=True):
    pass


RunnerEvent = (
    GuestStarted
    | GuestFailed
    | GuestExited
    | CheckpointFound
    | CheckpointStored
    | CheckpointFailed
    | ResultStored
    | Progressed
    | VacateWanted
    | MigrateWanted
    | KillWanted
    | CancelWanted
)


class Runner:
    def __init__(self, me: bytes, nick: str, start: Start, spec: JobSpec, at: Instant) -> None:
        self.me = me
        self.spec = spec
        self.job = start.job
        self.state = "acquiring"
        self.lease_until = 0.0
        self._tokens = TimerTokens(start.term)
        attempt = Attempt(
            number=start.ledger.next_attempt,
            node=me,
            nick=nick,
            term=start.term,
            started_unix_ms=at.unix_ms,
            seen_unix_ms=at.unix_ms,
        )
        self.attempt = attempt
        ledger = msgspec.structs.replace(start.ledger, prefer=None).with_attempt(attempt)
        self._proposer = Proposer(start.job, start.spec, start.term, start.config, ledger, me)
        self._saving = False
        self._found = False
        self._exited: GuestExited | None = None
        self._vacate_reason = ""
        self._cancelled = False
        self._overtime = False
        self._ending = ""  # why the attempt ends, once that is settled

    @property
    def term(self) -> int:
        return self._proposer.term

    @property
    def ledger(self) -> Ledger:
        return self._proposer.ledger

    @property
    def config(self) -> Config:
        return self._proposer.config

    def holds_lease(self, now: float) -> bool:
        return now < self.lease_until

    def begin(self, at: Instant) -> list[Effect]:
        deadline = at.now + self.spec.lease_s * 2
        return [
            *self._propose(at),
            self._timer("acquire", deadline),
            StateChanged("starting", "taking the lease"),
        ]

    def observe(self, view: View, at: Instant) -> list[Effect]:
        """Replace witnesses that left or died, while a majority stands."""
        if self.state in {"acquiring", "ended"} or self._proposer.config.previous:
            return []
        group = healthy_group(self._proposer.config, view, WANT_WITNESSES)
        if set(group) == set(self._proposer.config.members):
            return []
        self._proposer.change_group(group)
        return self._propose(at)

    def on_timer(self, timer: Timer, at: Instant) -> list[Effect]:
        if not self._tokens.is_current(timer) or self.state == "ended":
            return []
        match timer.name:
            case "renew":
                return self._renew(at)
            case "lease":
                # It may come a rounding error early, and does not come twice.
                self.lease_until = min(self.lease_until, at.now)
                return self._lease_ran_out(at)
            case "grace":
                return [Kill(f"grace of the notice is over ({self._vacate_reason})")]
            case "max time":
                self._overtime = True
                return self._vacate(self.spec.grace_s, f"it has run for its {self.spec.max_time_s:g} s", at)
            case "acquire" if self.state == "acquiring":
                self.state = "ended"
                return [Ended("could not take the lease", None)]
        return []

    def on_accepted(self, sender: bytes, message: Accepted, at: Instant) -> list[Effect]:
        if self.state == "ended":
            return []
        effects: list[Effect] = []
        if message.cancel_wanted and message.term == self.term and not self._cancelled:
            effects += self.handle(CancelWanted(), at)
        joint = bool(self._proposer.config.previous)
        decided = self._proposer.on_accepted(sender, message)
        if decided is None:
            return effects
        if joint and not self._proposer.config.previous:
            effects += self._propose(at)  # tell the new group that it stands alone
        if self._proposer.holder is not None:
            until = decided.sent_at + self.spec.lease_s * (1 - RATE_BOUND)
            if until > self.lease_until:
                self.lease_until = until
                effects += [self._timer("lease", until), self._allow()]
        return effects + self._on_decided(decided.ledger, at)

    def on_refused(self, sender: bytes, message: Refused, at: Instant) -> list[Effect]:
        if self.state == "ended":
            return []
        answer = self._proposer.on_refused(sender, message)
        if not isinstance(answer, Fenced):
            return list(answer)
        guest_runs = self._exited is None and self.state not in {"acquiring"}
        self.state = "ended"
        self.lease_until = 0.0
        outcome = answer.finished.outcome if answer.finished is not None else None
        kill: list[Effect] = [Kill("a newer attempt has taken over")] if guest_runs else []
        return [*kill, Ended("fenced: a newer attempt has taken over", outcome)]

    def handle(self, event: RunnerEvent, at: Instant) -> list[Effect]:
        if self.state == "ended":
            return []
        match event:
            case GuestStarted(resumed_step=step):
                self.state = "running"
                self._amend_attempt(running_unix_ms=at.unix_ms, resumed_step=step, last_step=step)
                effects: list[Effect] = [*self._propose(at), StateChanged("running", "")]
                if self.spec.max_time_s is not None:
                    effects.append(self._timer("max time", at.now + max(0.0, self.spec.max_time_s - self.ledger.ran_s)))
                if self._vacate_reason:  # the owner came back while we were starting
                    effects.append(Kill(self._vacate_reason))
                # Fetching its files can outlast the lease, while nobody could be asked for another.
                return [*effects, *self._lease_ran_out(at)]
            case GuestFailed(reason=reason, elsewhere=elsewhere):
                return self._could_not_start(reason, elsewhere, at)
            case GuestExited():
                return self._on_exit(event, at)
            case CheckpointFound():
                self._found = True
                return self._save_if_due(at)
            case CheckpointStored():
                return self._on_stored(event, at)
            case CheckpointFailed(reason=reason):
                self._saving = False
                note = StateChanged(self.state, f"checkpoint not stored: {reason}")
                return [note, *(self._conclude(at) if self._exited is not None else [])]
            case ResultStored():
                return self._on_result(event, at)
            case Progressed(step=step):
                self.attempt = msgspec.structs.replace(self.attempt, last_step=step)
                return []
            case VacateWanted(grace_s=grace_s, reason=reason):
                return self._vacate(grace_s, reason, at)
            case MigrateWanted(to=to):
                if self._vacate_reason or self._ending or self.state not in GUEST_RUNS:
                    return []
                self._proposer.ledger = self.ledger.amended(prefer=to)
                return self._vacate(self.spec.grace_s, "its user moves it", at)
            case KillWanted(reason=reason):
                self._vacate_reason = self._vacate_reason or reason
                return [Kill(reason)] if self.state in GUEST_RUNS else []
            case CancelWanted():
                if self._cancelled:
                    return []
                self._cancelled = True
                return [Kill("cancelled")] if self.state in GUEST_RUNS else []

    # --- the lease

    def _propose(self, at: Instant) -> list[Effect]:
        every = self.spec.lease_s / RENEWALS_PER_LEASE
        return [*self._proposer.propose(at.now), self._timer("renew", at.now + every)]

    def _allow(self) -> RunUntil:
        return RunUntil(self.lease_until if self.spec.on_partition == "freeze" else math.inf)

    def _renew(self, at: Instant) -> list[Effect]:
        if not self._ending:
            self._amend_attempt(seen_unix_ms=at.unix_ms)
        return self._propose(at)

    def _lease_ran_out(self, at: Instant) -> list[Effect]:
        if self.holds_lease(at.now) or self.state != "running":
            return []
        self.state, why = CUT_OFF[self.spec.on_partition]
        return [StateChanged(self.state, why)]

    def _on_decided(self, ledger: Ledger, at: Instant) -> list[Effect]:
        effects: list[Effect] = []
        commit = ledger.commit
        if commit is not None and commit.seq > self.ledger.settled:
            # Told with the next round: until then somebody may still have to go back to the one before.
            self._proposer.ledger = self.ledger.amended(settled=commit.seq)
            effects.append(Committed(commit))
        if ledger.outcome is not None or (self._ending and self._proposer.holder is None and not ledger.open_attempt):
            self.state = "ended"
            self.lease_until = 0.0
            released = Released(job=self.job, term=self.term)
            closed = Closed(job=self.job, term=self.term, ledger=ledger)
            sends = [Send(node, released if ledger.outcome is None else closed) for node in self.config.nodes]
            return [*effects, *sends, Ended(self._ending, ledger.outcome)]
        if self.state == "acquiring":
            self.state = "restoring"
            return [*effects, Launch(ledger), StateChanged("starting", "fetching its files")]
        if self.state in CUT_OFF_STATES and self.holds_lease(at.now):
            self.state = "running"
            return [*effects, StateChanged("running", ""), *self._save_if_due(at)]
        return effects

    # --- checkpoints

    def _save_if_due(self, at: Instant) -> list[Effect]:
        if self._saving or not self._found or self._exited is not None or not self.holds_lease(at.now):
            return []
        self._found = False
        return [self._save(final=False)]

    def _save(self, final: bool) -> SaveCheckpoint:
        self._saving = True
        commit = self.ledger.commit
        return SaveCheckpoint(
            seq=(commit.seq if commit else 0) + 1, parent=commit.manifest if commit else None, final=final
        )

    def _on_stored(self, event: CheckpointStored, at: Instant) -> list[Effect]:
        self._saving = False
        effects: list[Effect] = []
        if event.manifest is not None:
            before = self.ledger.commit
            commit = Commit(
                seq=(before.seq if before else 0) + 1,
                term=self.term,
                manifest=event.manifest,
                parent=before.manifest if before else None,
                holders=event.holders,
                step=event.step,
                created_unix_ms=at.unix_ms,
            )
            self._proposer.ledger = self.ledger.amended(commit=commit)
            effects += self._propose(at)
        if self._exited is not None:
            return effects + self._conclude(at)
        return effects + self._save_if_due(at)

    # --- the end

    def _vacate(self, grace_s: float, reason: str, at: Instant) -> list[Effect]:
        if self._vacate_reason:
            return []
        self._vacate_reason = reason
        if self.state == "acquiring":
            return self._release("vacated: " + reason, at)
        if self.state not in GUEST_RUNS:
            return []
        self.state = "vacating"
        return [
            Notify("vacate", grace_s, reason),
            self._timer("grace", at.now + grace_s),
            StateChanged("vacating", f"{grace_s:g} s: {reason}"),
        ]

    def _on_exit(self, event: GuestExited, at: Instant) -> list[Effect]:
        self._exited = event
        self._tokens.cancel("grace")
        self.state = "saving"
        changed = StateChanged("saving", describe_exit(event.code, event.oom))
        if self.spec.checkpointing is not None and not self._cancelled:
            # Whatever was committed before the end counts, however the end came.
            self._found = self._saving
            return [changed] if self._saving else [changed, self._save(final=True)]
        return [changed, *self._conclude(at)]

    def _conclude(self, at: Instant) -> list[Effect]:
        """The guest is gone and its last checkpoint is stored (or could not be)."""
        assert self._exited is not None
        if self._ending:
            return []  # settled already: a checkpoint that was under way came after
        exited = self._exited
        if self._found and not self._saving and self.spec.checkpointing is not None and not self._cancelled:
            self._found = False
            return [self._save(final=True)]
        words = describe_exit(exited.code, exited.oom)
        if self._cancelled:
            self._ending = "cancelled"
            return [self._result()]
        if self._overtime:
            return self._fail(f"it has run for its {self.spec.max_time_s:g} s", True, at)
        verdict = judge(
            ExitFacts(
                code=exited.code,
                oom=exited.oom,
                vacating=bool(self._vacate_reason),
                has_checkpoints=self.spec.checkpointing is not None,
                forced_done=exited.forced_done,
                on_exit_0=self.spec.on_exit_0,
            )
        )
        match verdict:
            case "done":
                self._ending = "done"
                return [self._result()]
            case "vacated":
                return self._release(f"vacated: {self._vacate_reason}", at)
            case "checkpointed":
                return self._release("checkpointed", at)
            case "elsewhere":
                self._exclude_me()
                return self._release(f"asked for another node ({words})", at)
            case "failed":
                hopeless = exited.code in {EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE}
                return self._fail(words, hopeless, at)

    def _fail(self, words: str, hopeless: bool, at: Instant) -> list[Effect]:
        errors = self.ledger.errors + 1
        if errors <= self.spec.error_budget and not hopeless:
            self._proposer.ledger = self.ledger.amended(errors=errors)
            self._exclude_me()
            return self._release(f"failed ({words}), retry {errors} of {self.spec.error_budget}", at)
        self._ending = f"failed ({words})"
        return [self._result()]

    def _could_not_start(self, reason: str, elsewhere: bool, at: Instant) -> list[Effect]:
        if self._cancelled or not elsewhere:
            self._exited = GuestExited(code=EXIT_NOT_EXECUTABLE, oom=False, forced_done=False)
            self._ending = "cancelled" if self._cancelled else f"failed ({reason})"
            return [self._result()]
        self._exclude_me()
        return self._release(f"could not start: {reason}", at)

    def _result(self) -> SaveResult:
        commit = self.ledger.commit
        return SaveResult(seq=(commit.seq if commit else 0) + 1, parent=commit.manifest if commit else None)

    def _on_result(self, event: ResultStored, at: Instant) -> list[Effect]:
        kind: OutcomeKind = "failed"
        if self._ending in {"done", "cancelled"}:
            kind = "done" if self._ending == "done" else "cancelled"
        outcome = Outcome(
            kind=kind,
            detail=self._ending + (f"; {event.detail}" if event.detail else ""),
            exit_code=self._exited.code if self._exited is not None else None,
            manifest=event.manifest,
            holders=event.holders,
            ended_unix_ms=at.unix_ms,
        )
        self._proposer.ledger = self.ledger.amended(outcome=outcome)
        return self._close(at)

    def _release(self, reason: str, at: Instant) -> list[Effect]:
        self._ending = reason
        return self._close(at)

    def _close(self, at: Instant) -> list[Effect]:
        """Write the attempt's end into the ledger and give the lease back."""
        self.state = "releasing"
        # From the moment it is offered back: a witness may have given it on before we hear of it.
        self.lease_until = 0.0
        code = self._exited.code if self._exited is not None else None
        self._amend_attempt(reason=self._ending, ended_unix_ms=at.unix_ms, seen_unix_ms=at.unix_ms, exit_code=code)
        self._proposer.holder = None
        return self._propose(at)

    def _exclude_me(self) -> None:
        if self.me not in self.ledger.excluded:
            self._proposer.ledger = self.ledger.amended(excluded=(*self.ledger.excluded, self.me))

    def _amend_attempt(self, **changes: object) -> None:
        self.attempt = msgspec.structs.replace(self.attempt, **changes)
        self._proposer.ledger = self.ledger.with_attempt(self.attempt)

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)
