"""Runner: one attempt of a job on this node, with its lease, the commits of its checkpoints and its departure. No I/O.

The runner owns the term that the leader handed over. Three times per lease it renews the lease with a round. The lease
counts from the *sending* of the round that a quorum accepted, less a margin, so it always ends here before it ends there
(Gray and Cheriton 1989, "Leases"). After that the guest is frozen, or runs uncommitted if its spec allows; it continues if
the group still accepts this term and is killed if it does not. States and transitions: docs/explanation/jobs.md.
"""

import math
from collections.abc import Callable

import msgspec

from membership.lengths import MOST_LISTED, shortened
from mesh.consensus.contract import (
    EXIT_CHECKPOINTED,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_TEMPFAIL,
    TERMINATED,
    VACATED,
    ExitFacts,
    describe_exit,
    judge,
)
from mesh.consensus.effects import (
    Abandoned,
    Committed,
    Concluded,
    Effect,
    Ended,
    Kill,
    Launch,
    Left,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    StateChanged,
)
from mesh.consensus.fallback import patience_s
from mesh.consensus.gang import Gang, RankFailed, of_ranks
from mesh.consensus.messages import (
    Accepted,
    Closed,
    Dismiss,
    Enlisted,
    ExtendRun,
    GangMessage,
    Introduced,
    MemberEnded,
    MemberLeaving,
    Refused,
    Released,
    Start,
)
from mesh.consensus.next_placement import GOES_HOME, USER_MOVES, NextPlacement
from mesh.consensus.proposer import Fenced, Proposer
from mesh.consensus.reports import (
    CancelWanted,
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    ClockStood,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    Progressed,
    Recopied,
    ResultStored,
    RunnerEvent,
    VacateWanted,
)
from mesh.consensus.view import Instant, Timer, TimerTokens, View
from mesh.consensus.witness import HELD_SHARE
from mesh.model.record import Attempt, Commit, Config, JobRecord, Outcome, OutcomeKind, Voter
from mesh.model.spec import JobSpec
from placement.preemption import RunningJob

GANG_LOOK_S = 0.5  # while members are enlisted (own choice)
STRANDED_S = (
    2400.0  # HTCondor's default of job_lease_duration, after which a machine drops a job whose submitter is gone
)
RENEWALS_PER_LEASE = 3  # one may be lost; as often as etcd's client sends keep-alives
CUT_OFF = {
    "freeze": ("frozen", "no majority of its witnesses answers"),
    "compute_uncommitted": ("uncommitted", "no majority of its witnesses answers; its work may not count"),
}
CUT_OFF_STATES = frozenset(state for state, _ in CUT_OFF.values())
GUEST_RUNS = CUT_OFF_STATES | {"running", "vacating"}
STOPPABLE = GUEST_RUNS | {"restoring"}  # fetching files may take long


class Runner:
    """`rendezvous` gives an address of this node, with a port that is free now, for a job on several nodes. `owner` names this
    attempt: a node that gets the same order twice makes two.
    """

    def __init__(
        self,
        me: bytes,
        nick: str,
        start: Start,
        spec: JobSpec,
        at: Instant,
        view: View | None = None,
        rendezvous: Callable[[], tuple[str, int]] = lambda: ("", 0),
        owner: bytes = b"",
    ) -> None:
        self.me = me
        self.spec_bytes = start.spec
        self._view = view
        self._rendezvous = rendezvous
        self._gang = Gang(start.job, spec, start.spec, start.term) if spec.most_nodes > 1 else None
        self.next_placement = NextPlacement(me, start.job, spec)
        self.spec = spec
        self.job = start.job
        self.state = "acquiring"
        self.lease_until = 0.0
        self._tokens = TimerTokens(start.term)
        attempt = Attempt(
            number=start.record.next_attempt,
            node=me,
            nick=nick,
            term=start.term,
            started_unix_ms=at.unix_ms,
            seen_unix_ms=at.unix_ms,
        )
        self.attempt = attempt
        record = msgspec.structs.replace(start.record, prefer=None).with_attempt(attempt)
        self._proposer = Proposer(
            start.job, start.spec, start.term, start.config, record, me, warrant=start.warrant, owner=owner
        )
        self._saving = False
        self._found = False
        self._exited: GuestExited | None = None
        self._first_commit = start.record.next_commit
        self._vacate_reason = ""
        self._cancelled, self._cancelling = False, set[Voter]()  # witnesses that say so
        self._outcome: Outcome | None = None
        self._member_failed = False
        self._time_up = ""  # why it may not continue, here or elsewhere
        self._abandoned: Abandoned | None = None
        self._ending = ""  # why the attempt ends, once decided

    @property
    def term(self) -> int:
        return self._proposer.term

    @property
    def record(self) -> JobRecord:
        return self._proposer.record

    @property
    def config(self) -> Config:
        return self._proposer.config

    @property
    def running_job(self) -> RunningJob:
        """Return the attempt as a candidate for preemption; the node itself knows its GPUs."""
        saves, since = self.spec.checkpointing is not None, self.attempt.running_unix_ms // 1000
        return RunningJob(self.job, self.me, self.spec.priority, since, saves and self.state == "running")

    @property
    def has_place(self) -> bool:
        """Tell whether this node keeps a place for the attempt: until its end is being released."""
        return self.state not in {"releasing", "ended"}

    @property
    def gathers(self) -> bool:
        """Tell whether it waits for the other nodes of its gang."""
        return self._gang is not None and self.state in {"acquiring", "gathering"}

    def holds_lease(self, now: float) -> bool:
        return now < self.lease_until

    def begin(self, at: Instant) -> list[Effect]:
        deadline = at.now + self.spec.lease_s * 2
        return [*self._propose(at), self._timer("acquire", deadline), StateChanged("starting", "taking the lease")]

    def observe(self, view: View, at: Instant) -> list[Effect]:
        """Replace witnesses that left or died while a majority stands; look for the next placement."""
        self._view = view
        if self.state in {"acquiring", "ended"}:
            return []
        return [*self._look_next_placement(at), *self._regroup(at), *self._make_way(view, at)]

    def _make_way(self, view: View, at: Instant) -> list[Effect]:
        """Give up the place of a guest that has been frozen for long while other jobs wait."""
        stranded = self.state == "frozen" and at.now >= self.lease_until + STRANDED_S
        if not stranded or view.queue is None or self._vacate_reason:
            return []
        reason = f"no majority of its witnesses has answered for {STRANDED_S / 60:g} minutes, and other jobs wait"
        return self.handle(KillWanted(reason), at)

    def _regroup(self, at: Instant) -> list[Send]:
        if self._view is None:
            return []
        return self._proposer.regroup(self._view, at.now, 0.9 * self.spec.lease_s / RENEWALS_PER_LEASE)

    def on_introduced(self, sender: bytes, message: Introduced, at: Instant) -> list[Effect]:
        if self.state in {"acquiring", "ended"}:
            return []
        self._proposer.on_introduced(sender, message, at.now)
        return [*self._regroup(at)]

    def on_timer(self, timer: Timer, at: Instant) -> list[Effect]:
        if not self._tokens.is_current(timer) or self.state == "ended":
            return []
        match timer.name:
            case "renew":
                return self._renew(at)
            case "lease":
                # The timer may fire a rounding error early, and does not fire twice.
                self.lease_until = min(self.lease_until, at.now)
                return self._lease_ran_out(at)
            case "grace":
                return [Kill(f"grace of the notice is over ({self._vacate_reason})")]
            case "max time":
                return self._time_is_up(f"it has run for its {self.spec.max_time_s:g} s", at)
            case "deadline":
                return self._time_is_up("its deadline has passed", at)
            case "home":
                return self._look_next_placement(at)
            case "gang" if self._gang is not None:
                return self._look_at_gang(self._gang, at)
            case "acquire" if self.state == "acquiring":
                self.state = "ended"
                return [Ended("could not take the lease")]
        return []

    def on_accepted(self, sender: bytes, message: Accepted, at: Instant) -> list[Effect]:
        if self.state == "ended" or not self._proposer.asks(sender):
            return []
        effects: list[Effect] = []
        if message.cancel_wanted and message.term == self.term and not self._cancelled:
            # One witness alone cannot end a job that runs (J14), unless it is its user's own.
            self.config.count(self._cancelling, Voter(sender, message.disk))
            if sender == self.spec.submitter or self._proposer.config.quorum(self._cancelling):
                effects += self.handle(CancelWanted(), at)
        joint = bool(self._proposer.config.previous)
        decided = self._proposer.on_accepted(sender, message)
        if decided is None:
            return effects
        if joint and not self._proposer.config.previous:
            effects += self._propose(at)  # the new group learns that it decides alone
        if self._proposer.holder is not None and decided.renews:
            until = decided.sent_at + self.spec.lease_s * HELD_SHARE
            if until > self.lease_until:
                self.lease_until = until
                effects += [self._timer("lease", until), self._allow()]
        effects += self._on_decided(decided.record, at)
        # Rounds that follow each other quickly put the renewal off, and the view may not change again.
        return effects + (self._regroup(at) if self.state != "ended" else [])

    def on_refused(self, sender: bytes, message: Refused, at: Instant) -> list[Effect]:
        if self.state == "ended" or not self._proposer.asks(sender):
            return []
        answer = self._proposer.on_refused(sender, message)
        overruled = message.term == self.term and message.promised > self.term
        if overruled and self.lease_until and not self.holds_lease(at.now):
            # Otherwise its renewals would keep the answering witnesses from granting the lease to others.
            answer = Fenced()
        return self.fenced() if isinstance(answer, Fenced) else list(answer)

    def fenced(self) -> list[Effect]:
        """End at once: another attempt, or another group, has the job."""
        guest_runs = self._exited is None and self.state not in {"acquiring"}
        self.state = "ended"
        self.lease_until = 0.0
        kill: list[Effect] = [Kill("a newer attempt has taken over")] if guest_runs else []
        if self._gang is not None:
            kill += self._gang.disband()
        return [*kill, Ended("fenced: a newer attempt has taken over")]

    def handle(self, event: RunnerEvent, at: Instant) -> list[Effect]:
        if self.state == "ended":
            return []
        match event:
            case GuestStarted(resumed_step=step):
                self.state = "running"
                self._amend_attempt(running_unix_ms=at.unix_ms, resumed_step=step, last_step=step)
                if self.record.unfetched_unix_ms:
                    self._proposer.record = self.record.amended(unfetched_unix_ms=0)
                self.next_placement.began(at.now)
                effects: list[Effect] = [
                    *self._propose(at),
                    StateChanged("running", ""),
                    *self._look_next_placement(at),
                ]
                effects += self._deadline(at)
                if self.spec.max_time_s is not None:
                    effects.append(self._timer("max time", at.now + max(0.0, self.spec.max_time_s - self.record.ran_s)))
                why = "cancelled" if self._cancelled else self._vacate_reason
                if why:  # it arrived during the start
                    effects.append(Kill(why))
                # Fetching files can outlast the lease while no majority can renew it.
                return [*effects, *self._lease_ran_out(at)]
            case GuestFailed():
                return self._could_not_start(event, at)
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
            case Recopied(manifest=manifest, holders=holders):
                commit = self.record.commit
                if commit is None or commit.manifest != manifest or self._ending:
                    return []
                commit = msgspec.structs.replace(commit, holders=holders[:MOST_LISTED])
                self._proposer.record = self.record.amended(commit=commit)
                return self._propose(at)
            case Progressed(step=step):
                self.attempt = msgspec.structs.replace(self.attempt, last_step=step)
                return []
            case VacateWanted(grace_s=grace_s, reason=reason, to=to):
                return self._vacate(grace_s, reason, at, to)
            case MigrateWanted(to=to):
                if self._vacate_reason or self._ending or self.state not in GUEST_RUNS:
                    return []
                return self._vacate(self.spec.grace_s, USER_MOVES, at, to)
            case KillWanted(reason=reason):
                if self.state == "awaiting":
                    return self._vacate(0.0, reason, at)
                if not self._vacate_reason:
                    self._prefer(None)
                self._vacate_reason = self._vacate_reason or reason
                return [Kill(reason)] if self.state in STOPPABLE else []
            case ClockStood():
                self._proposer.clock_stood()
                self.lease_until = min(self.lease_until, at.now)
                return [self._allow(), *self._lease_ran_out(at), *self._propose(at), *self._deadline(at)]
            case CancelWanted():
                if self._cancelled:
                    return []
                self._cancelled = True
                if self.state == "gathering":
                    return self._could_not_start(GuestFailed("cancelled", elsewhere=False), at)
                if self.state == "awaiting":
                    return self._conclude(at)
                return [Kill("cancelled")] if self.state in STOPPABLE else []

    def _deadline(self, at: Instant) -> list[Effect]:
        deadline_ms = self.spec.deadline_unix_ms
        if deadline_ms is None or self.state not in GUEST_RUNS:
            return []
        return [self._timer("deadline", at.now + max(0.0, (deadline_ms - at.unix_ms) / 1000))]

    def _look_next_placement(self, at: Instant) -> list[Effect]:
        """Find the standby, and go home once home has been free long enough."""
        if self._view is not None:
            self.next_placement.look(self._view, self.record, at)
        due = self.next_placement.due(self.record)
        if due is None or self._vacate_reason or self._cancelled or self.state not in CUT_OFF_STATES | {"running"}:
            self._tokens.cancel("home")
            return []
        if at.now >= due and self.state == "running" and self.record.commit is not None:
            return self._vacate(self.spec.grace_s, GOES_HOME, at, self.next_placement.home)
        return [self._timer("home", due if at.now < due else at.now + self.spec.home.settle_s)]

    # --- the gang

    def on_gang(self, sender: bytes, message: GangMessage, at: Instant) -> list[Effect]:
        """Handle a gang member's message."""
        gang = self._gang
        if gang is None or message.term != self.term or self.state == "ended":
            return [Send(sender, Dismiss(job=self.job, term=message.term, grace_s=0.0, reason="its attempt is over"))]
        match message:
            case Enlisted():
                effects: list[Effect] = [*gang.on_enlisted(sender, message, at)]
                return effects + (self._look_at_gang(gang, at) if self.state == "gathering" else [])
            case ExtendRun():
                effects = [*gang.on_may_run(sender, message, self.lease_until - at.now, at)]
            case MemberEnded():
                gang.on_ended(sender, message, at)
                effects = []
            case MemberLeaving():
                gang.on_leaving(sender, message)
                effects = []
            case _:
                return []
        return effects + self._judge_gang(gang, at)

    def _look_at_gang(self, gang: Gang, at: Instant) -> list[Effect]:
        timer = self._timer("gang", at.now + self.spec.lease_s / RENEWALS_PER_LEASE)
        if self.state == "disbanding":
            return self._close(at)
        if self.state != "gathering":
            gang.look(at.now)
            return [timer, *self._judge_gang(gang, at)]
        enough = gang.gathered(at.now)
        if enough:
            return [timer, *self._begin_gang(gang, at)]
        if enough is None:
            others = self.next_placement.others(self._view, self.record.attempts, at) if self._view is not None else []
            return [self._timer("gang", at.now + GANG_LOOK_S), *gang.gather(others, self.record, at)]
        text = f"only {1 + len(gang.members)} of {self.spec.least_nodes} nodes had a place at the same time"
        return self._release(text, at)

    def _begin_gang(self, gang: Gang, at: Instant) -> list[Effect]:
        self.state = "restoring"
        host, port = self._rendezvous()
        place, sends = gang.begin(host, port, self.record, at)
        self._amend_attempt(gang=tuple((member.node, member.nick) for member in gang.members))
        where = ", ".join(member.nick for member in gang.members) or "nobody else"
        return [*sends, *self._propose(at), Launch(self.record, place), StateChanged("starting", f"with {where}")]

    def _judge_gang(self, gang: Gang, at: Instant) -> list[Effect]:
        """One member that is lost or fails means notice for all; what it means for the job is decided when they have ended."""
        if self.state == "asking":
            return self._conclude(at)
        if self.state == "disbanding":
            return self._close(at)
        if self._vacate_reason or not (gang.broken or gang.failed):
            return self._conclude(at) if self.state == "awaiting" else []
        self._member_failed = not gang.broken
        return self._vacate(self.spec.grace_s, gang.broken or of_ranks(gang.failed, self.job), at)

    # --- the lease

    def _propose(self, at: Instant, renew: bool = False) -> list[Effect]:
        sends = self._proposer.propose(at.now, renew)
        every = self.spec.lease_s / RENEWALS_PER_LEASE
        return [*sends, self._timer("renew", at.now + every)] if self._proposer.renews else [*sends]

    def _allow(self) -> RunUntil:
        return RunUntil(self.lease_until if self.spec.on_partition == "freeze" else math.inf)

    def _renew(self, at: Instant) -> list[Effect]:
        if not self._ending:
            self._amend_attempt(seen_unix_ms=at.unix_ms)
        return [*self._regroup(at), *self._propose(at, renew=True)]

    def _lease_ran_out(self, at: Instant) -> list[Effect]:
        if self.holds_lease(at.now) or self.state != "running":
            return []
        self.state, why = CUT_OFF[self.spec.on_partition]
        return [StateChanged(self.state, why)]

    def _on_decided(self, record: JobRecord, at: Instant) -> list[Effect]:
        effects: list[Effect] = []
        # An answer to an earlier round changes nothing of a record that says how the job ended.
        commit = record.commit
        if commit is not None and commit.seq > self.record.settled and record.outcome == self.record.outcome:
            # Sent with the next round: until then an attempt may still have to resume from the checkpoint before.
            self._proposer.record = self.record.amended(settled=commit.seq, needed=record.named)
            effects.append(Committed(commit))
        if record.outcome is not None or (self._ending and self._proposer.holder is None and not record.open_attempt):
            self.state = "ended"
            self.lease_until = 0.0
            released = Released(job=self.job, term=self.term)
            closed = Closed(job=self.job, term=self.term, record=record)
            effects += [Send(node, released if record.outcome is None else closed) for node in self.config.nodes]
            effects += [self._abandoned] if self._abandoned is not None else []
            effects.append(Ended(self._ending))
            return effects if record.outcome is None else [*effects, Concluded(record.outcome)]
        if self.state == "acquiring" and self._gang is not None:
            self.state = "gathering"
            return [*effects, *self._look_at_gang(self._gang, at)]
        if self.state == "acquiring":
            self.state = "restoring"
            return [*effects, Launch(record), StateChanged("starting", "fetching its files")]
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
        return SaveCheckpoint(*self.record.next_commit, final)

    def _on_stored(self, event: CheckpointStored, at: Instant) -> list[Effect]:
        self._saving = False
        if self._ending:
            return []  # the result has this checkpoint's number and does not wait for it
        effects: list[Effect] = []
        if event.manifest is not None:
            wanted = self.spec.checkpointing.copies if self.spec.checkpointing is not None else 0
            self._proposer.record = self.record.with_commit(
                self.term, event.manifest, event.holders, event.step, at.unix_ms, event.platform, wanted
            )
            effects += self._propose(at)
        if self._exited is not None:
            return effects + self._conclude(at)
        return effects + self._save_if_due(at)

    # --- the end

    def _time_is_up(self, why: str, at: Instant) -> list[Effect]:
        self._time_up = why
        return self._vacate(self.spec.grace_s, why, at)

    def _prefer(self, node: bytes | None) -> None:
        """Name the node of the next attempt, else the standby; the leader follows if that node can still take the job."""
        if self.record.outcome is None:
            self._proposer.record = self.record.amended(prefer=node or self.next_placement.standby)

    def _vacate(self, grace_s: float, reason: str, at: Instant, to: bytes | None = None) -> list[Effect]:
        if self._vacate_reason:
            return []
        self._vacate_reason = reason
        self._prefer(to)
        if self.state in {"acquiring", "gathering"}:
            return self._release(VACATED + reason, at)
        if self.state == "awaiting":
            return self._conclude(at)
        if self.state not in GUEST_RUNS:
            return [Kill(reason)] if self.state == "restoring" else []
        self.state = "vacating"
        return [
            *(self._gang.dismiss(grace_s, reason, at.now) if self._gang is not None else ()),
            Notify("vacate", grace_s, reason),
            self._timer("grace", at.now + grace_s),
            StateChanged("vacating", f"{grace_s:g} s: {reason}"),
        ]

    def _on_exit(self, event: GuestExited, at: Instant) -> list[Effect]:
        self._exited = event
        self._tokens.cancel("grace")
        self.state = "saving"
        ordered = "cancelled" if self._cancelled else self._vacate_reason if event.code in TERMINATED else ""
        changed = StateChanged("saving", ordered or describe_exit(event.code, event.oom))
        if self.spec.checkpointing is not None and not self._cancelled:
            # What the guest committed before its end counts, whatever the exit code.
            self._found = self._saving
            return [changed] if self._saving else [changed, self._save(final=True)]
        return [changed, *self._conclude(at)]

    def _conclude(self, at: Instant) -> list[Effect]:
        """Decide how the attempt ends: its guest is gone, and its last checkpoint is stored or could not be."""
        assert self._exited is not None
        if self._ending:
            return []  # decided already
        exited = self._exited
        if self._found and not self._saving and self.spec.checkpointing is not None and not self._cancelled:
            self._found = False
            return [self._save(final=True)]
        words = describe_exit(exited.code, exited.oom)
        if self._cancelled:
            self._ending = "cancelled"
            return [self._result()]
        if self._time_up:
            return self._fail(self._time_up, False, at)
        if self._gang is not None and (self._member_failed or (exited.code and not self._vacate_reason)):
            if not self._gang.sure():
                self.state = "asking"
                return []
            if self._gang.broken:
                return self._release(VACATED + self._gang.broken, at)
            if self._gang.failed and not exited.fault:  # the first failure is unknown
                own = [] if self._member_failed else [RankFailed(0, self.attempt.nick, exited.code, words)]
                ended = [*own, *self._gang.failed]
                failed = [one for one in ended if one.code not in {EXIT_CHECKPOINTED, EXIT_TEMPFAIL}]
                words = of_ranks(failed or ended, self.job)
                if failed:
                    self._exited = msgspec.structs.replace(exited, code=failed[0].code)
                    return self._fail(words, any(self._may_retry(one.code) for one in failed), at)
                if any(one.code == EXIT_TEMPFAIL for one in ended):
                    return self._release(f"asked for other nodes ({words})", at)
                return self._run_again(at)
        if self._gang is not None and not exited.code and not exited.forced_done:
            running = self._gang.running
            if self._vacate_reason and (running or self.spec.on_exit_0 == "resume"):
                return self._release(VACATED + self._vacate_reason, at)
            if running:
                self.state = "awaiting"
                return [StateChanged("running", f"rank 0 has ended, waiting for {', '.join(running)}")]
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
                return self._release(VACATED + self._vacate_reason, at)
            case "checkpointed":
                return self._run_again(at)
            case "elsewhere":
                self._blame_this_node()
                return self._release(f"asked for another node ({words})", at)
            case "failed" if exited.fault:
                self._blame_this_node()
                return self._release(f"{exited.fault} ({words})", at)
            case "failed":
                return self._fail(words, self._may_retry(exited.code), at)

    def _run_again(self, at: Instant) -> list[Effect]:
        """Run the job again from what its guest has saved. If that is nothing new, it would do the same at once without end."""
        if self.spec.checkpointing is None:
            return self._fail("exit 85: it asks to run again, but the job saves no checkpoints (--ckpt)", True, at)
        if self.record.next_commit == self._first_commit:
            self._blame_this_node()
            return self._release("asked to run again without a new checkpoint", at)
        return self._release("checkpointed", at)

    def _may_retry(self, code: int) -> bool:
        """Tell whether the error budget covers this exit code."""
        codes = self.spec.retry_codes
        return code in codes if codes else code not in {EXIT_NOT_FOUND, EXIT_NOT_EXECUTABLE}

    def _fail(self, words: str, may_retry: bool, at: Instant) -> list[Effect]:
        errors = self.record.errors + 1
        if errors <= self.spec.error_budget and may_retry:
            self._proposer.record = self.record.amended(errors=errors)
            self._blame_this_node()
            return self._release(f"failed ({words}), retry {errors} of {self.spec.error_budget}", at)
        self._ending = f"failed ({words})"
        return [self._result()]

    def _could_not_start(self, failure: GuestFailed, at: Instant) -> list[Effect]:
        if self._cancelled or not failure.elsewhere:
            self.state = "saving"  # the end is decided: nothing is gathered or launched any more
            self._exited = GuestExited(code=failure.exit_code, oom=False, forced_done=False)
            self._ending = "cancelled" if self._cancelled else f"failed ({failure.reason})"
            return [self._result()]
        if failure.unfetched and not self._vacate_reason and self.record.commit is not None:
            return self._could_not_fetch(failure, self.record.commit, at)
        self._amend_attempt(fault=not self._vacate_reason)
        words = VACATED + self._vacate_reason if self._vacate_reason else f"could not start: {failure.reason}"
        return self._release(words, at)

    def _could_not_fetch(self, failure: GuestFailed, commit: Commit, at: Instant) -> list[Effect]:
        """Give up a checkpoint that no node can give, once it is lost or the job has waited for long enough."""
        since = self.record.unfetched_unix_ms or at.unix_ms
        waited_s = (at.unix_ms - since) / 1000
        patience = patience_s(self.record, failure.predecessor_here, self.spec.lease_s)
        if failure.unfetched == "away" and waited_s < patience:
            self._proposer.record = self.record.amended(unfetched_unix_ms=since)
            self._blame_this_node()
            return self._release(f"could not start: {failure.reason}", at)
        self._proposer.record = self.record.without_commit()
        instead = self.record.commit
        target = f"checkpoint {instead.seq}" if instead is not None else "the beginning"
        why = f"no node has it whole ({failure.reason})"
        if failure.unfetched == "away":
            why = f"no node gave it for {waited_s:.0f} s ({failure.reason})"
        self._abandoned = Abandoned(commit, instead, f"{why}; the job continues from {target}")
        return self._release(f"checkpoint {commit.seq} is abandoned: {self._abandoned.reason}", at)

    def _result(self) -> SaveResult:
        return SaveResult(*self.record.next_commit)

    def _on_result(self, event: ResultStored, at: Instant) -> list[Effect]:
        ends = self._ending
        kind: OutcomeKind = "done" if ends == "done" else "cancelled" if ends == "cancelled" else "failed"
        outcome = Outcome(
            kind=kind,
            detail=shortened(self._ending + (f"; {event.detail}" if event.detail else "")),
            # Of a job that was out of time it is only how the notice ended.
            exit_code=self._exited.code if self._exited is not None and not self._time_up else None,
            manifest=event.manifest,
            holders=event.holders[:MOST_LISTED],
            ended_unix_ms=at.unix_ms,
        )
        self._outcome = outcome
        return self._close(at)

    def _release(self, reason: str, at: Instant) -> list[Effect]:
        self._ending = reason
        return self._close(at)

    def _close(self, at: Instant) -> list[Effect]:
        """Write the end of the attempt into the record and release the lease, once none of its guests computes any more."""
        if self._gang is not None and not self._gang.quiet(at.now):
            self.state = "disbanding"
            return [*self._gang.disband(), self._timer("gang", at.now + GANG_LOOK_S)]
        self.state = "releasing"
        disband = self._gang.disband() if self._gang is not None else []
        code = self._exited.code if self._exited is not None else None
        self._amend_attempt(reason=self._ending, ended_unix_ms=at.unix_ms, seen_unix_ms=at.unix_ms, exit_code=code)
        if self._outcome is not None:
            # From now on the record stays as it is: witnesses believe no other of this end. The lease stays with it, until they
            # know that most have it; without one, any of them could have another end accepted in a later term.
            self._proposer.record = self.record.amended(outcome=self._outcome)
        else:
            # From the release on, a witness may grant it to another node before its answer arrives.
            self.lease_until, self._proposer.holder = 0.0, None
        return [*disband, *self._propose(at), Left(self._ending)]

    def _blame_this_node(self) -> None:
        self._amend_attempt(fault=True)

    def _amend_attempt(self, **changes: object) -> None:
        self.attempt = msgspec.structs.replace(self.attempt, **changes)
        self._proposer.record = self.record.with_attempt(self.attempt)

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)
