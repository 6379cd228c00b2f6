"""One node's part in every job it knows: witness, steward and runner, wired to each other, still without I/O.

The daemon and the simulator drive this same object: messages, timers and local facts go in, effects come out, each with
the job and role it belongs to.
"""

from collections.abc import Callable, Sequence, Set
from random import Random
from typing import Literal

import msgspec

from mesh.jobs.effects import Effect, Ended, SaveCell, Send, SetTimer
from mesh.jobs.gang import Member
from mesh.jobs.ledger import Config, Ledger, Seat
from mesh.jobs.messages import (
    Accept,
    Accepted,
    AnyMessage,
    Begin,
    Cancel,
    Closed,
    Dismiss,
    Enlist,
    Enlisted,
    Leaving,
    MakeRoom,
    MateEnded,
    MayRun,
    Migrate,
    Prepare,
    Promised,
    Refused,
    Released,
    Run,
    Start,
    StartAnswer,
    Told,
    Willing,
    Would,
)
from mesh.jobs.proposer import Fenced, Proposer
from mesh.jobs.recovery import Plan
from mesh.jobs.reports import (
    CancelWanted,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    RunnerEvent,
    VacateWanted,
)
from mesh.jobs.runner import Runner
from mesh.jobs.spec import JobSpec, SpecError, format_job
from mesh.jobs.steward import PATIENCE_S, PREPARED_S, Steward
from mesh.jobs.view import Instant, Timer, TimerTokens, View
from mesh.jobs.witness import Witness, unknown_job
from placement.preemption import must_yield
from placement.request import Request

Role = Literal["witness", "steward", "runner", "member", "submitter"]

RESUBMIT_S = 1.0  # an unanswered round of a submission is sent again; ours
SUBMIT_WITHIN_S = 10.0  # then the user is told that no majority answered


class Directed(msgspec.Struct, frozen=True):
    """An effect and whose it is."""

    job: bytes
    role: Role
    effect: Effect


class Submitted(msgspec.Struct, frozen=True):
    """The answer to a submission: None when a majority of witnesses has the job on disk, else why not."""

    job: bytes
    problem: str | None


class Rules(msgspec.Struct, frozen=True):
    """Judgements that need keys or the machine; pure functions for the simulator.

    `open_spec` checks the submitter's signature and the id, and raises SpecError. `admit` says why this node does not
    take a job now, None if it does (and reserves what it needs). `may_cancel` checks a sender against the spec.
    `is_mandated`: whether the job's user has signed just this group and term. `rendezvous`: where a gang led from here meets.
    """

    open_spec: Callable[[bytes, bytes], JobSpec]
    admit: Callable[[bytes, JobSpec, Start | Enlist], str | None]
    may_cancel: Callable[[bytes, str, JobSpec], bool]
    is_mandated: Callable[[Accept, JobSpec], bool] = lambda message, spec: False
    rendezvous: Callable[[], tuple[str, int]] = lambda: ("", 0)


class _Submission:
    def __init__(self, proposer: Proposer, give_up_at: float) -> None:
        self.proposer = proposer
        self.give_up_at = give_up_at
        self.tokens = TimerTokens()
        self.have_it: set[Seat] = set()  # with whatever terms: a witness that lives acts at once

    @property
    def known(self) -> bool:
        return self.proposer.config.quorum(self.have_it)


class Participant:
    """`disk` names the journal of this node; jobs in `forgotten` had a cell on it that cannot be read any more, those `away`
    have one that is not in memory: whoever has a message for them restores it first."""

    def __init__(self, me: bytes, disk: bytes, nick: str, rules: Rules, rng: Random) -> None:
        self.me = me
        self.disk = disk
        self.forgotten: set[bytes] = set()
        self.away: set[bytes] = set()
        self.nick = nick
        self.witnesses: dict[bytes, Witness] = {}
        self.stewards: dict[bytes, Steward] = {}
        self.runners: dict[bytes, Runner] = {}
        self.members: dict[bytes, Member] = {}
        self.refused = 0  # messages that no honest peer would send
        self._submissions: dict[bytes, _Submission] = {}
        self._rules = rules
        self._rng = rng
        self._view: View | None = None

    @property
    def hosted(self) -> list[bytes]:
        """The jobs that have a guest here, or a place for one."""
        return [*self.runners, *self.members]

    def replaceable(self, staying: Set[bytes]) -> bool:
        """Whether a group that this node is in could still replace it: somebody else stays who is not in it yet."""
        groups = [witness.cell.config.nodes for witness in self.witnesses.values() if not witness.finished]
        return any(self.me in group and staying - set(group) for group in groups)

    # --- what comes in

    def restore(self, cell_witness: Witness, at: Instant) -> list[Directed | Submitted]:
        """A cell read back from the journal after a restart. This node's own guest ended with the run before."""
        cell = cell_witness.cell
        self.away.discard(cell.job)
        self.witnesses[cell.job] = cell_witness
        self.stewards[cell.job] = Steward(cell_witness, cell_witness.spec, self._rng)
        sends: list[Effect] = []
        if cell.holder == self.me:
            released = Released(job=cell.job, term=cell.promised)
            sends = [Send(node, released) for node in cell.config.nodes]
        return self._from(cell.job, "witness", sends) + self._steward_looks(cell.job, at)

    def put_away(self, job: bytes) -> None:
        """A job that is over, and whose cell is on disk."""
        assert self.witnesses[job].finished
        del self.witnesses[job], self.stewards[job]
        self.away.add(job)

    def submit(self, job: bytes, spec_bytes: bytes, spec: JobSpec, at: Instant) -> list[Directed | Submitted]:
        config = Config(number=0, term=0, members=spec.witnesses)
        proposer = Proposer(job, spec_bytes, 0, config, Ledger(), None)
        self._submissions[job] = _Submission(proposer, at.now + SUBMIT_WITHIN_S)
        return self._resubmit(job, at)

    def recover(self, plan: Plan, mandate: bytes, at: Instant) -> list[Directed | Submitted]:
        """Carry the record that is left to the group that its user has named; answered like a submission."""
        job, config = plan.mandate.job, plan.mandate.config
        proposer = Proposer(job, plan.spec, plan.mandate.term, config, plan.ledger, None, mandate)
        self._submissions[job] = _Submission(proposer, at.now + SUBMIT_WITHIN_S)
        return self._resubmit(job, at)

    def observe(self, view: View, at: Instant) -> list[Directed | Submitted]:
        """The mesh changed."""
        self._view = view
        out: list[Directed | Submitted] = []
        heirs: list[tuple[bytes, Request]] = []  # no two jobs of this node count on the same place
        for job, runner in sorted(self.runners.items(), key=lambda item: (-item[1].spec.gpus, item[0])):
            out += self._from(job, "runner", runner.observe(view.serving(heirs), at))
            if runner.onward.heir is not None:
                heirs.append((runner.onward.heir, runner.onward.request(runner.ledger, at)))
        for job, steward in list(self.stewards.items()):
            if not steward.witness.finished:
                out += self._from(job, "steward", steward.observe(view, at))
        return out

    def receive(self, sender: bytes, message: AnyMessage, at: Instant) -> list[Directed | Submitted]:
        job = message.job
        match message:
            case Accept():
                return self._on_accept(sender, message, at)
            case Would() | Prepare():
                witness = self.witnesses.get(job)
                if witness is None:
                    return self._from(job, "witness", [Send(sender, unknown_job(message, self._disk_for(job)))])
                effects = witness.handle(sender, message, at.now)
                if any(isinstance(effect, SaveCell) for effect in effects):
                    self.stewards[job].rival_seen(sender, PREPARED_S, at)
                return self._from(job, "witness", effects) + self._steward_looks(job, at)
            case Released() | Closed():
                witness = self.witnesses.get(job)
                if witness is None:
                    return []
                return self._from(job, "witness", witness.handle(sender, message, at.now)) + self._steward_looks(
                    job, at
                )
            case Cancel():
                return self._on_cancel(sender, message, at)
            case Migrate():
                return self._on_migrate(sender, message, at)
            case Enlist():
                return self._on_enlist(sender, message, at)
            case Begin() | Run() | Dismiss():
                return self._to_member(sender, message, at)
            case Enlisted() | MayRun() | MateEnded() | Leaving():
                runner = self.runners.get(job)
                if runner is None:
                    over = Dismiss(job=job, term=message.term, grace_s=0.0, reason="its leader does not run it")
                    return self._from(job, "runner", [Send(sender, over)])
                return self._from(job, "runner", runner.on_gang(sender, message, at))
            case Told():
                return []  # its shell keeps them
            case MakeRoom():
                return self._on_make_room(message, at)
            case Start():
                return self._on_start(sender, message, at)
            case Willing() | Promised() | StartAnswer():
                steward = self.stewards.get(job)
                return self._from(job, "steward", steward.handle(sender, message, at)) if steward else []
            case Accepted() | Refused():
                return self._on_answer(sender, message, at)

    def on_timer(self, job: bytes, role: Role, timer: Timer, at: Instant) -> list[Directed | Submitted]:
        if role == "runner" and job in self.runners:
            return self._from(job, role, self.runners[job].on_timer(timer, at))
        if role == "member" and job in self.members:
            return self._from(job, role, self.members[job].on_timer(timer, at))
        if role == "steward" and job in self.stewards:
            return self._from(job, role, self.stewards[job].on_timer(timer, at))
        submission = self._submissions.get(job)
        if role == "submitter" and submission is not None and submission.tokens.is_current(timer):
            if at.now >= submission.give_up_at:
                del self._submissions[job]
                return [Submitted(job, "no majority of its witnesses answered")]
            return self._resubmit(job, at)
        return []

    def tell_runner(self, job: bytes, event: RunnerEvent, at: Instant) -> list[Directed | Submitted]:
        runner, member = self.runners.get(job), self.members.get(job)
        if member is not None:
            return self._from(job, "member", _tell_member(member, event, at))
        return self._from(job, "runner", runner.handle(event, at)) if runner is not None else []

    # --- the parts

    def _on_accept(self, sender: bytes, message: Accept, at: Instant) -> list[Directed | Submitted]:
        job = message.job
        witness = self.witnesses.get(job)
        effects: list[Effect] = []
        if witness is None:
            disk = self._disk_for(job)
            if message.spec is None:
                return self._from(job, "witness", [Send(sender, unknown_job(message, disk))])
            if Seat(self.me, disk) not in message.config.everyone:
                self.refused += 1  # or our former disk is meant, with promises that nobody remembers
                return []
            try:
                spec = self._rules.open_spec(job, message.spec)
            except SpecError:
                self.refused += 1
                return []
            witness = Witness.created(message, message.spec, spec, disk)
            self.witnesses[job] = witness
            self.stewards[job] = Steward(witness, spec, self._rng)
            self.stewards[job].view = self._view
            effects.append(SaveCell(witness.cell))
        held = witness.cell.holder
        if message.mandate is None:
            effects += witness.handle(sender, message, at.now)
        elif self._rules.is_mandated(message, witness.spec):
            effects += witness.take_mandate(sender, message, at.now)
        else:
            self.refused += 1
            return self._from(job, "witness", effects)
        accepted = any(isinstance(e, Send) and isinstance(e.message, Accepted) for e in effects)
        runs_on = message.ledger.outcome is None and message.term > 0
        if accepted and runs_on and message.holder is None and held is None:
            self.stewards[job].rival_seen(sender, PATIENCE_S, at)  # it keeps the job waiting
        return self._from(job, "witness", effects) + self._steward_looks(job, at)

    def _on_cancel(self, sender: bytes, message: Cancel, at: Instant) -> list[Directed | Submitted]:
        job = message.job
        out: list[Directed | Submitted] = []
        witness, runner = self.witnesses.get(job), self.runners.get(job)
        spec = witness.spec if witness is not None else runner.spec if runner is not None else None
        if spec is None or not self._rules.may_cancel(sender, message.user, spec):
            self.refused += 1
            return []
        if witness is not None:
            out += self._from(job, "witness", witness.handle(sender, message, at.now))
            out += self._from(job, "steward", self.stewards[job].cancelled(at)) + self._steward_looks(job, at)
        if runner is not None:
            out += self._from(job, "runner", runner.handle(CancelWanted(), at))
        return out

    def _on_migrate(self, sender: bytes, message: Migrate, at: Instant) -> list[Directed | Submitted]:
        runner = self.runners.get(message.job)
        if runner is None:
            return []
        if not self._rules.may_cancel(sender, message.user, runner.spec):
            self.refused += 1
            return []
        return self._from(message.job, "runner", runner.handle(MigrateWanted(message.to), at))

    def _on_make_room(self, message: MakeRoom, at: Instant) -> list[Directed | Submitted]:
        runner = self.runners.get(message.job)
        if runner is None:
            return []
        try:
            wanted = self._rules.open_spec(message.wanted_by, message.spec)
        except SpecError:
            self.refused += 1
            return []
        if not must_yield(wanted.priority, runner.stay, at.unix_ms / 1000):
            return []
        reason = (
            f"it makes room for {format_job(message.wanted_by)[:8]} of {wanted.user}, of priority {wanted.priority}"
        )
        return self._from(message.job, "runner", runner.handle(VacateWanted(runner.spec.grace_s, reason), at))

    def _on_start(self, sender: bytes, message: Start, at: Instant) -> list[Directed | Submitted]:
        job = message.job

        def answer(reason: str) -> list[Directed | Submitted]:
            reply = StartAnswer(job=job, term=message.term, taken=not reason, reason=reason)
            return self._from(job, "runner", [Send(sender, reply)])

        running = self.runners.get(job)
        if job in self.members:
            return answer("still ending an earlier attempt here")
        if running is not None:
            return answer("" if running.term == message.term else "still ending an earlier attempt here")
        try:
            spec = self._rules.open_spec(job, message.spec)
        except SpecError as error:
            self.refused += 1
            return answer(str(error))
        if sender not in message.config.nodes:
            self.refused += 1
            return answer("only a witness of the job may start it")
        refusal = self._rules.admit(job, spec, message)
        if refusal is not None:
            return answer(refusal)
        runner = Runner(self.me, self.nick, message, spec, at, self._view, self._rules.rendezvous)
        self.runners[job] = runner
        return answer("") + self._from(job, "runner", runner.begin(at))

    def _on_enlist(self, sender: bytes, message: Enlist, at: Instant) -> list[Directed | Submitted]:
        job = message.job

        def answer(reason: str) -> list[Directed | Submitted]:
            reply = Enlisted(job=job, term=message.term, taken=not reason, reason=reason)
            return self._from(job, "member", [Send(sender, reply)])

        member = self.members.get(job)
        if member is not None and (member.leader, member.term) == (sender, message.term):
            return answer("")
        if member is not None and message.term > member.term:
            over = Dismiss(job=job, term=member.term, grace_s=0.0, reason="a newer attempt calls it up")
            return self._from(job, "member", member.on_dismiss(over, at)) + answer(
                "still ending an earlier attempt here"
            )
        if member is not None or job in self.runners:
            return answer("still ending an earlier attempt here")
        try:
            spec = self._rules.open_spec(job, message.spec)
        except SpecError as error:
            self.refused += 1
            return answer(str(error))
        refusal = self._rules.admit(job, spec, message)
        if refusal is not None:
            return answer(refusal)
        member = self.members[job] = Member(sender, message, spec)
        return answer("") + self._from(job, "member", member.begin(at))

    def _to_member(self, sender: bytes, message: Begin | Run | Dismiss, at: Instant) -> list[Directed | Submitted]:
        member = self.members.get(message.job)
        if member is None or (member.leader, member.term) != (sender, message.term):
            return []
        match message:
            case Begin():
                effects = member.on_begin(message, at)
            case Run():
                effects = member.on_run(message, at)
            case Dismiss():
                effects = member.on_dismiss(message, at)
        return self._from(message.job, "member", effects)

    def _on_answer(self, sender: bytes, message: Accepted | Refused, at: Instant) -> list[Directed | Submitted]:
        job = message.job
        out: list[Directed | Submitted] = []
        witness = self.witnesses.get(job)
        if isinstance(message, Refused) and message.finished and message.ledger is not None and witness is not None:
            closed = Closed(job=job, term=message.accepted_term, ledger=message.ledger)
            out += self._from(job, "witness", witness.handle(sender, closed, at.now))
        submission = self._submissions.get(job)
        if submission is not None and message.term == submission.proposer.term:
            out += self._on_submission_answer(job, submission, sender, message)
        steward, runner = self.stewards.get(job), self.runners.get(job)
        if steward is not None:
            out += self._from(job, "steward", steward.handle(sender, message, at))
        if runner is not None:
            if isinstance(message, Accepted):
                out += self._from(job, "runner", runner.on_accepted(sender, message, at))
            else:
                out += self._from(job, "runner", runner.on_refused(sender, message, at))
        return out

    def _on_submission_answer(
        self, job: bytes, submission: _Submission, sender: bytes, message: Accepted | Refused
    ) -> list[Directed | Submitted]:
        if isinstance(message, Refused):
            answer = submission.proposer.on_refused(sender, message)
            if not isinstance(answer, Fenced) and message.promised <= submission.proposer.term:
                return self._from(job, "submitter", list(answer))
            if submission.proposer.mandate is not None:
                del self._submissions[job]
                return [Submitted(job, "a node has a newer record of it")]
            submission.have_it.add(Seat(sender, message.disk))
            # What was accepted under a term that was won, a majority knows of.
            if not (message.finished or message.accepted_term > 0 or submission.known):
                return []
        else:
            decided = submission.proposer.on_accepted(sender, message)
            submission.have_it.add(Seat(sender, message.disk))
            if decided is None and (submission.proposer.mandate is not None or not submission.known):
                return []
        del self._submissions[job]
        return [Submitted(job, None)]

    def _resubmit(self, job: bytes, at: Instant) -> list[Directed | Submitted]:
        submission = self._submissions[job]
        timer = SetTimer("resubmit", submission.tokens.fresh("resubmit"), at.now + RESUBMIT_S)
        return self._from(job, "submitter", [*submission.proposer.propose(at.now), timer])

    def _disk_for(self, job: bytes) -> bytes:
        return b"" if job in self.forgotten or job in self.away else self.disk

    def _steward_looks(self, job: bytes, at: Instant) -> list[Directed | Submitted]:
        return self._from(job, "steward", self.stewards[job].act(at))

    def _from(self, job: bytes, role: Role, effects: Sequence[Effect]) -> list[Directed | Submitted]:
        if any(isinstance(effect, Ended) for effect in effects):
            (self.members if role == "member" else self.runners).pop(job, None)
        return [Directed(job, role, effect) for effect in effects]


def _tell_member(member: Member, event: RunnerEvent, at: Instant) -> list[Effect]:
    """A mate neither saves nor decides: what its guest does is its leader's business."""
    match event:
        case GuestStarted():
            return member.started()
        case GuestFailed(reason=reason):
            return member.exited(1, f"could not start: {reason}", at)
        case GuestExited(code=code):
            return member.exited(code, "", at)
        case VacateWanted(grace_s=grace_s, reason=reason):
            return member.vacate(grace_s, reason, at)
        case KillWanted(reason=reason):
            return member.vacate(0.0, reason, at)
    return []
