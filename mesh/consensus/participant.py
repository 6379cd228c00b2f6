"""Participant: one node's part in every job it knows, as witness, leader, runner and gang member, without I/O.

The daemon and the simulator drive this same object. Messages, timers and reports go in; effects come out, each with the job
and the role it belongs to.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from math import inf
from random import Random
from typing import Literal

import msgspec

from membership.lengths import shortened
from mesh.consensus.contract import describe_exit
from mesh.consensus.effects import Effect, Ended, SaveWitnessRecord, Send, SetTimer, Submitted, WitnessRecord
from mesh.consensus.forced_reconfiguration import ForcedReconfiguration, Plan, record_hash
from mesh.consensus.gang import GangMember, gang_turn
from mesh.consensus.leader import PATIENCE_S, PREPARED_S, Leader
from mesh.consensus.messages import (
    Accept,
    Accepted,
    AnyMessage,
    Begin,
    Cancel,
    Closed,
    Dismiss,
    Enlist,
    Enlisted,
    EventReport,
    ExtendRun,
    Introduce,
    Introduced,
    MakeRoom,
    MemberEnded,
    MemberLeaving,
    Migrate,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promised,
    Refused,
    Released,
    RunGranted,
    Start,
    StartAnswer,
)
from mesh.consensus.proposer import ANSWER_S, ROUND_BYTES, Fenced, Proposer
from mesh.consensus.reports import (
    CancelWanted,
    ClockStood,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    RunnerEvent,
    VacateWanted,
)
from mesh.consensus.runner import Runner
from mesh.consensus.view import ClockWatch, Instant, Timer, TimerTokens, View
from mesh.consensus.witness import Witness, unknown_job
from mesh.model.record import FIRST_TERM, Config, JobRecord, Voter
from mesh.model.spec import JobSpec, SpecError, format_job
from placement.preemption import YIELDS, YIELDS_S, must_yield
from placement.request import Request

Role = Literal["witness", "leader", "runner", "member", "submitter"]

RESUBMIT_S = 1.0  # until an unanswered round is sent again (own choice)
JUDGED_S, JUDGED_KEPT = (
    30.0,
    4096,
)  # between judgements of one order to recover a job, which take a signature (own choice)
UNANSWERED = "no majority of its witnesses answered"
STILL_ENDING = "an earlier attempt is still ending here"
OWNER_BYTES = 8  # attempts of one term on one node differ
SUBMIT_WITHIN_S = 10.0  # until the submission counts as unanswered


class Directed(msgspec.Struct, frozen=True):
    """An effect, with its job and role."""

    job: bytes
    role: Role
    effect: Effect


class Rules(msgspec.Struct, frozen=True):
    """Decisions that need keys or the machine; the simulator replaces them by pure functions.

    `open_spec` checks the submitter's signature and the id, and raises SpecError. `admit` returns why this node does not take
    a job now; if it returns None, it has reserved what the job needs. `fits_without` tells whether it would take a job if the
    first one, which runs here, left. `may_cancel` checks a sender against the spec.
    `read_recovery` returns what the job's user has ordered with these bytes, None if they have not. `may_propose` tells a
    witness whether a sender may have it accept this. `warrant` seals that a node gets a term of a job with a group, and
    `warrants_group` returns the member that has sealed so of this group, or None. `rendezvous` gives the address at which the
    processes of a gang with its runner here find each other.
    """

    open_spec: Callable[[bytes, bytes], JobSpec]
    admit: Callable[[bytes, JobSpec, Start | Enlist], str | None]
    may_cancel: Callable[[bytes, str, JobSpec], bool]
    read_recovery: Callable[[bytes, bytes, JobSpec], ForcedReconfiguration | None] = lambda order, job, spec: None
    may_propose: Callable[[bytes, Accept, WitnessRecord, JobSpec, bool], bool] = lambda *asked: True
    warrant: Callable[[bytes, int, bytes, Config], bytes] = lambda *given: b""
    warrants_group: Callable[[bytes, bytes, Config], bytes | None] = lambda *asked: None
    rendezvous: Callable[[], tuple[str, int]] = lambda: ("", 0)
    fits_without: Callable[[bytes, bytes, JobSpec], bool] = lambda *asked: True


# What this node keeps in memory of the jobs of one user that it witnesses, by their records with the descriptions as signed; the
# least that one counts as; and the share that is left to groups which this node was asked to join, and to records that grow (own
# choice).
OF_A_USER_BYTES, LEAST_BYTES, JOINED = 256 * 2**20, 8 * 1024, 2
FULL = "it keeps as many records of jobs of this user as it can, until some have been over for a day; `mesh cancel` ends jobs"
GONE = "it has deleted later jobs of this user, which were over, for want of room: submit the job again"


class _Submission:
    def __init__(self, proposer: Proposer, give_up_at: float) -> None:
        self.proposer = proposer
        self.give_up_at = give_up_at
        self.tokens = TimerTokens()
        self.problem = ""  # why a witness does not take the job
        self.have_it: set[Voter] = set()  # under any term: a witness acts at once

    @property
    def known(self) -> bool:
        return self.proposer.config.quorum(self.have_it)


class Participant:
    """`disk` names this node's journal.

    Jobs in `forgotten` have a witness record that cannot be read; those in `archived` have one that is not in memory, and the
    shell restores it before it passes on a message for them. `dropped`: until which time of creation (Unix milliseconds) jobs
    of a user, by their key, may be over and deleted; none of them is taken on again.
    """

    def __init__(self, me: bytes, disk: bytes, nick: str, rules: Rules, rng: Random) -> None:
        self.me = me
        self.disk = disk
        self.forgotten: set[bytes] = set()
        self.archived: set[bytes] = set()
        self.dropped: dict[bytes, int] = {}
        self.nick = nick
        self.witnesses: dict[bytes, Witness] = {}
        self.leaders: dict[bytes, Leader] = {}
        self.runners: dict[bytes, Runner] = {}
        self.members: dict[bytes, GangMember] = {}
        self.refused = 0  # messages that no correct peer sends
        self._of_users = Counter[bytes]()  # bytes of the jobs that this node witnesses, by the key of their user
        self._sizes: dict[bytes, int] = {}  # bytes of each
        self._submissions: dict[bytes, _Submission] = {}
        self._yielded: dict[str, list[float]] = {}  # when guests left for jobs of a user that have not come yet
        self._first_terms: set[bytes] = set()  # jobs submitted in this run that nobody has been asked to start
        self._judge_again: dict[tuple[bytes, bytes], float] = {}  # when an order to recover a job is judged once more
        self._to_release: dict[bytes, set[bytes]] = {}  # witnesses to tell that the run before is over here
        self._vouchers: dict[
            bytes, tuple[tuple[bytes, int, bytes, Config], bytes]
        ] = {}  # the last warrant for each job
        self._checked: dict[bytes, tuple[Config, tuple[bytes, ...]]] = {}  # the last group and warrants, for each job
        self._led: dict[bytes, dict[bytes, float]] = {}  # when a witness of a job was led to a later group
        self._rules = rules
        self._rng = rng
        self._view: View | None = None
        self._clocks = ClockWatch()

    @property
    def hosted(self) -> list[bytes]:
        """Return the jobs that have a guest here, or a place for one."""
        return [*(job for job, runner in self.runners.items() if runner.has_place), *self.members]

    def replaceable(self, staying: Set[bytes]) -> bool:
        """Tell whether a group of this node can still replace it: another node stays that is not in the group."""
        groups = [witness.witness_record.config.nodes for witness in self.witnesses.values() if not witness.finished]
        return any(self.me in group and staying - set(group) for group in groups)

    # --- what comes in

    def restore(self, witness: Witness, at: Instant) -> list[Directed]:
        """Restore a witness record from the journal, as a promise of the disk that this is now. A guest of this node ended
        with the run before, so its lease is released; members of a gang may still use theirs, until it ends.
        """
        witness_record = witness.witness_record = msgspec.structs.replace(witness.witness_record, disk=self.disk)
        job = witness_record.job
        self.archived.discard(job)
        self._keep(witness)
        self.leaders[job] = Leader(witness, witness.spec, self._rng, self._rules.warrant)
        if witness_record.holder == self.me and witness.spec.most_nodes == 1:
            witness.lease_until = at.now
            self._to_release[job] = set(witness_record.config.nodes) - {self.me}
        return self._leader_looks(job, at)

    def archive(self, job: bytes) -> None:
        """Remove a finished job, whose witness record is on disk, from memory."""
        assert self.witnesses[job].finished
        self._forget(job)
        del self.leaders[job]
        self._vouchers.pop(job, None)
        self._checked.pop(job, None)
        self._led.pop(job, None)
        self.archived.add(job)

    def drop(self, user_key: bytes, until_ms: int, jobs: Sequence[bytes]) -> None:
        """Forget archived jobs of a user, created until then, which are not on disk any more."""
        if jobs:
            self.archived.difference_update(jobs)
            self.dropped[user_key] = max(until_ms, self.dropped.get(user_key, 0))

    def _keep(self, witness: Witness) -> None:
        self.witnesses[witness.witness_record.job] = witness
        self._count(witness)

    def _count(self, witness: Witness) -> None:
        record, user = witness.witness_record, witness.spec.user_key
        size = max(LEAST_BYTES, len(msgspec.msgpack.encode(record)))
        self._of_users[user] += size - self._sizes.get(record.job, 0)
        self._sizes[record.job] = size

    def _forget(self, job: bytes) -> None:
        witness = self.witnesses.pop(job, None)
        if witness is not None:
            self._of_users[witness.spec.user_key] -= self._sizes.pop(job)

    def _no_room(self, spec: JobSpec, sealed: bytes, share: int = 1) -> str:
        """Return why this node may not witness one more job of a user: memory and journal are for all users."""
        if spec.created_unix_ms <= self.dropped.get(spec.user_key, -1):
            return GONE
        return FULL if self._of_users[spec.user_key] + max(LEAST_BYTES, len(sealed)) > share * OF_A_USER_BYTES else ""

    def _may_grow(self, message: AnyMessage) -> bool:
        """Tell whether a record may change as a message says: not to more, once those of its user take too much."""
        witness = self.witnesses.get(message.job)
        if witness is None or self._of_users[witness.spec.user_key] < JOINED * OF_A_USER_BYTES:
            return True
        known = witness.witness_record
        record, config = getattr(message, "record", None), getattr(message, "config", None)
        larger = record is not None and len(msgspec.msgpack.encode(record)) > len(msgspec.msgpack.encode(known.record))
        return not larger and config in {None, known.config} and not getattr(message, "reconfiguration", None)

    def submit(self, job: bytes, spec_bytes: bytes, spec: JobSpec, at: Instant) -> list[Directed]:
        """Propose the job's empty record to its witnesses; `Submitted` answers."""
        first_round = self._rng.getrandbits(8 * ROUND_BYTES)
        proposer = Proposer(job, spec_bytes, FIRST_TERM, spec.first_group, JobRecord(), None, first_round=first_round)
        self._submissions[job] = _Submission(proposer, at.now + SUBMIT_WITHIN_S)
        if spec.submitter == self.me and job not in self.witnesses:
            self._first_terms.add(job)
        return self._resubmit(job, at)

    def recover(self, plan: Plan, reconfiguration: bytes, at: Instant) -> list[Directed]:
        """Propose the remaining record to the group that the job's user has named; `Submitted` answers."""
        job, config = plan.reconfiguration.job, plan.reconfiguration.config
        proposer = Proposer(job, plan.spec, plan.reconfiguration.term, config, plan.record, None, reconfiguration)
        self._submissions[job] = _Submission(proposer, at.now + SUBMIT_WITHIN_S)
        return self._resubmit(job, at)

    def observe(self, view: View, at: Instant) -> list[Directed]:
        """Take a new view of the mesh."""
        self._view = view
        out = [output for job in list(self._to_release) for output in self._release(job, view)]
        for job, orders in view.recoveries.items():
            out += [output for order in orders for output in self._overruled(job, order, at)]
        standbys: list[tuple[bytes, Request]] = []  # two jobs of this node do not count on the same place
        for job, runner in sorted(self.runners.items(), key=lambda item: (-item[1].spec.gpus, item[0])):
            out += self._from(job, "runner", runner.observe(view.serving(standbys), at))
            if runner.next_placement.standby is not None:
                standbys.append((runner.next_placement.standby, runner.next_placement.request(runner.record, at)))
        for job, leader in list(self.leaders.items()):
            if not leader.witness.finished:
                out += self._from(job, "leader", leader.observe(view, at))
        return out

    def _overruled(self, job: bytes, order: bytes, at: Instant) -> list[Directed]:
        """Give a job up to a later recovery than the one that this node knows of it."""
        if at.now < self._judge_again.get((job, order), 0.0):
            return []
        witness, runner = self.witnesses.get(job), self.runners.get(job)
        held_by = witness or runner
        followed = runner is None and witness is not None and witness.witness_record.reconfiguration == order
        if held_by is None or followed:
            return []
        self._judge_again[job, order] = at.now + JUDGED_S
        while len(self._judge_again) > JUDGED_KEPT:
            del self._judge_again[next(iter(self._judge_again))]
        stated = self._rules.read_recovery(order, job, held_by.spec)
        if stated is None:
            return []
        out: list[Directed] = []
        group = stated.config
        if witness is not None and group.order > witness.witness_record.config.order and self.me not in group.nodes:
            out += self._from(job, "witness", witness.overruled(group, order))
            out += self._from(job, "leader", self.leaders[job].stand_down())
        if runner is not None and stated.term > runner.term:
            out += self._from(job, "runner", runner.fenced())
        return out

    def _release(self, job: bytes, view: View) -> list[Directed]:
        """Tell the witnesses that are alive that this node, restarted, no longer uses its lease."""
        record = self.witnesses[job].witness_record if job in self.witnesses else None
        if record is None or record.holder != self.me or job in self.runners:
            del self._to_release[job]
            return []
        told = self._to_release[job] & view.alive
        self._to_release[job] -= told
        released = Released(job=job, term=record.promised)
        return self._from(job, "witness", [Send(node, released) for node in sorted(told)])

    def receive(self, sender: bytes, message: AnyMessage, at: Instant) -> list[Directed]:
        job = message.job
        record: JobRecord | None = getattr(message, "record", None)
        ahead = record is not None and record.outcome is not None and record.outcome.is_ahead(at.unix_ms)
        if ahead or not self._may_grow(message):
            self.refused += 1
            return []
        match message:
            case Accept():
                return self._on_accept(sender, message, at)
            case PreVote() | Prepare():
                witness = self.witnesses.get(job)
                if witness is None:
                    return self._from(job, "witness", [Send(sender, unknown_job(message, self._disk_for(job)))])
                learnt = self._learn_group(sender, message, witness)
                effects = witness.handle(sender, message, at.now)
                if any(isinstance(effect, SaveWitnessRecord) for effect in effects):
                    self.leaders[job].rival_seen(sender, PREPARED_S, at)
                return self._from(job, "witness", [*learnt, *effects]) + self._leader_looks(job, at)
            case Released() | Closed():
                witness = self.witnesses.get(job)
                if witness is None:
                    return []
                return self._from(job, "witness", witness.handle(sender, message, at.now)) + self._leader_looks(job, at)
            case Cancel():
                return self._on_cancel(sender, message, at)
            case Migrate():
                return self._on_migrate(sender, message, at)
            case Enlist():
                return self._on_enlist(sender, message, at)
            case Begin() | RunGranted() | Dismiss():
                return self._to_member(sender, message, at)
            case Enlisted() | ExtendRun() | MemberEnded() | MemberLeaving():
                runner = self.runners.get(job)
                if runner is None:
                    over = Dismiss(job=job, term=message.term, grace_s=0.0, reason="its runner does not run it")
                    return self._from(job, "runner", [Send(sender, over)])
                return self._from(job, "runner", runner.on_gang(sender, message, at))
            case EventReport():
                return []  # the shell keeps these
            case MakeRoom():
                return self._on_make_room(message, at)
            case Start():
                return self._on_start(sender, message, at)
            case PreVoteGranted() | Promised() | StartAnswer():
                leader = self.leaders.get(job)
                return self._from(job, "leader", leader.handle(sender, message, at)) if leader else []
            case Accepted() | Refused():
                return self._on_answer(sender, message, at)
            case Introduce():
                return self._from(job, "witness", [Send(sender, self._introduced(message))])
            case Introduced():
                leader, runner = self.leaders.get(job), self.runners.get(job)
                out = self._from(job, "leader", leader.handle(sender, message, at)) if leader else []
                return out + (self._from(job, "runner", runner.on_introduced(sender, message, at)) if runner else [])

    def on_timer(self, job: bytes, role: Role, timer: Timer, at: Instant) -> list[Directed]:
        if role == "runner" and job in self.runners:
            return self._from(job, role, self.runners[job].on_timer(timer, at))
        if role == "member" and job in self.members:
            return self._from(job, role, self.members[job].on_timer(timer, at))
        if role == "leader" and job in self.leaders:
            return self._from(job, role, self.leaders[job].on_timer(timer, at))
        submission = self._submissions.get(job)
        if role == "submitter" and submission is not None and submission.tokens.is_current(timer):
            if at.now >= submission.give_up_at:
                del self._submissions[job]
                return self._from(job, "submitter", [Submitted(submission.problem or UNANSWERED)])
            return self._resubmit(job, at)
        return []

    def look_at_clocks(self, at: Instant) -> list[Directed]:
        """Take the leases held here as over if the clock that counts them has stood still. Call it before other inputs."""
        if not self._clocks.stood(at):
            return []
        return [output for job in self.hosted for output in self.report(job, ClockStood(), at)]

    def report(self, job: bytes, event: RunnerEvent, at: Instant) -> list[Directed]:
        """Pass an event of this node to the job's runner or gang member here."""
        runner, member = self.runners.get(job), self.members.get(job)
        if member is not None:
            return self._from(job, "member", on_member_report(member, event, at))
        return self._from(job, "runner", runner.handle(event, at)) if runner is not None else []

    # --- the parts

    def _on_accept(self, sender: bytes, message: Accept, at: Instant) -> list[Directed]:
        job = message.job
        witness = self.witnesses.get(job)
        effects: list[Effect] = []
        if witness is None:
            disk = self._disk_for(job)
            if message.spec is None:
                return self._from(job, "witness", [Send(sender, unknown_job(message, disk))])
            if Voter(self.me, disk) not in message.config.everyone:
                self.refused += 1  # or this node's former disk is meant, whose promises are lost
                return []
            try:
                spec = self._rules.open_spec(job, message.spec)
            except SpecError:
                self.refused += 1
                return []
            problem = self._no_room(spec, message.spec, JOINED if message.config.number else 1)
            if problem:
                self.refused += 1
                refusal = msgspec.structs.replace(unknown_job(message, disk), needs_spec=False, problem=problem)
                return self._from(job, "witness", [Send(sender, refusal)])
            witness = Witness.created(message, message.spec, spec, disk)
            if not self._may_propose(sender, message, witness, created=True):
                return []
            self._keep(witness)
            self.leaders[job] = Leader(witness, spec, self._rng, self._rules.warrant)
            self.leaders[job].view = self._view
            effects.append(SaveWitnessRecord(witness.witness_record))
        elif message.spec is None and self._joins(witness, message):
            return self._from(job, "witness", [Send(sender, unknown_job(message, witness.witness_record.disk))])
        held = witness.witness_record.holder
        if message.reconfiguration is None:
            if not effects and not self._may_propose(sender, message, witness):
                return self._from(job, "witness", witness.refuse(sender, message, at.now))
            effects += self._keep_warrants(message, witness)  # a joint group's reach a newcomer with the group after it
            effects += witness.handle(sender, message, at.now)
        elif self._rules.read_recovery(message.reconfiguration, job, witness.spec) == ForcedReconfiguration(
            job, message.term, message.config, record_hash(message.record)
        ):
            effects += witness.accept_reconfiguration(sender, message, at.now)
        else:
            self.refused += 1
            return self._from(job, "witness", effects)
        effects = [self._vouched(effect, sender, message) for effect in effects]
        accepted = any(isinstance(e, Send) and isinstance(e.message, Accepted) for e in effects)
        if accepted:
            effects += self._keep_warrants(message, witness)
        runs_on = message.record.outcome is None and sender in message.config.nodes
        # Any node may bring a submission again.
        own_term = message.term > FIRST_TERM or sender == witness.spec.submitter
        if accepted and runs_on and own_term and message.holder is None and held is None:
            self.leaders[job].rival_seen(sender, PATIENCE_S, at)  # that leader keeps the job waiting
        if sender == self.me and job in self._first_terms:
            self.leaders[job].await_first_term(at)
        return self._from(job, "witness", effects) + self._leader_looks(job, at)

    def _vouched(self, effect: Effect, sender: bytes, message: Accept) -> Effect:
        """Add this witness's warrant to the acceptance of a lease, or of a changed group."""
        plain = message.holder is None and message.config.number == 0
        if plain or not (isinstance(effect, Send) and isinstance(effect.message, Accepted)):
            return effect
        key = (message.job, message.term, sender, message.config)
        known = self._vouchers.get(key[0])
        if known is None or known[0] != key:
            known = self._vouchers[key[0]] = (key, self._rules.warrant(*key))
        return Send(effect.to, msgspec.structs.replace(effect.message, warrant=known[1]))

    def _keep_warrants(self, message: Accept, witness: Witness) -> list[Effect]:
        """Keep the warrants that name the known group, once it has changed, for witnesses that missed the change."""
        job, known = message.job, witness.witness_record
        checked = (known.config, message.warrants)
        if known.config.number == 0 or self._checked.get(job) == checked:
            return []
        self._checked[job] = checked
        naming = self._naming(job, known.config, (*known.warrants, *message.warrants))
        return witness.learn_group(known.config, naming)

    def _learn_group(self, sender: bytes, message: PreVote | Prepare, witness: Witness) -> list[Effect]:
        """Take up the sender's group, if it is later than the known one and a member of that one has accepted it."""
        known, config = witness.witness_record, message.config
        if config is None or witness.finished or sender in known.config.nodes or config.order <= known.config.order:
            return []
        if sender not in config.nodes or Voter(self.me, known.disk) not in config.everyone:
            return []
        naming = self._naming(message.job, config, message.warrants)
        return witness.learn_group(config, naming) if naming.keys() & set(known.config.nodes) else []

    def _naming(self, job: bytes, config: Config, warrants: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the warrants that name this group, by the member that gave them."""
        givers = {self._rules.warrants_group(warrant, job, config): warrant for warrant in warrants}
        return {giver: warrant for giver, warrant in givers.items() if giver is not None}

    def _may_propose(self, sender: bytes, message: Accept, witness: Witness, created: bool = False) -> bool:
        """Tell whether the witness considers this; one that is too old is refused by its term, whoever sent it."""
        known = witness.witness_record
        if message.reconfiguration is not None or message.term < known.promised:
            return True
        if self._joins(witness, message):
            known, created = msgspec.structs.replace(known, config=message.config), True
        may = self._rules.may_propose(sender, message, known, witness.spec, created)
        self.refused += not may
        return may

    def votes(self, job: bytes) -> bool:
        """Tell whether this node has a vote on the job, in the group that it knows."""
        known = self.witnesses[job].witness_record if job in self.witnesses else None
        return known is not None and Voter(self.me, known.disk) in known.config.everyone

    def _joins(self, witness: Witness, message: Accept) -> bool:
        """Tell whether a later group takes in this node, which has no vote in the one it knows: it, or its disk, was replaced."""
        known, config = witness.witness_record, message.config
        named = config.number > 0 and Voter(self.me, known.disk) in config.everyone and message.reconfiguration is None
        return named and config.order > known.config.order and not self.votes(known.job)

    def _introduced(self, message: Introduce) -> Introduced:
        disk = self._disk_for(message.job)
        if not disk:
            return Introduced(message.job, disk, "its record of the job cannot be read")
        try:
            spec = self._spec(message.job, message.spec)
        except SpecError as error:
            self.refused += 1
            return Introduced(message.job, disk, shortened(str(error)))
        known = message.job in self.witnesses
        return Introduced(message.job, disk, "" if known else self._no_room(spec, message.spec))

    def _on_cancel(self, sender: bytes, message: Cancel, at: Instant) -> list[Directed]:
        job = message.job
        out: list[Directed] = []
        witness, runner = self.witnesses.get(job), self.runners.get(job)
        spec = witness.spec if witness is not None else runner.spec if runner is not None else None
        if spec is None or not self._rules.may_cancel(sender, message.user, spec):
            self.refused += 1
            return []
        if witness is not None:
            out += self._from(job, "witness", witness.handle(sender, message, at.now))
            out += self._from(job, "leader", self.leaders[job].cancelled(at)) + self._leader_looks(job, at)
        if runner is not None:
            out += self._from(job, "runner", runner.handle(CancelWanted(), at))
        return out

    def _on_migrate(self, sender: bytes, message: Migrate, at: Instant) -> list[Directed]:
        runner = self.runners.get(message.job)
        if runner is None:
            return []
        if not self._rules.may_cancel(sender, message.user, runner.spec):
            self.refused += 1
            return []
        return self._from(message.job, "runner", runner.handle(MigrateWanted(message.to), at))

    def _spec(self, job: bytes, sealed: bytes) -> JobSpec:
        """Return a job's spec: as this node took it on, else judged now. SpecError if it may not take it on."""
        witness = self.witnesses.get(job)
        taken = witness is not None and witness.witness_record.spec == sealed
        return witness.spec if taken and witness is not None else self._rules.open_spec(job, sealed)

    def _is_over(self, job: bytes) -> bool:
        return job in self.witnesses and self.witnesses[job].finished

    def _on_make_room(self, message: MakeRoom, at: Instant) -> list[Directed]:
        runner = self.runners.get(message.job)
        if runner is None:
            return []
        try:
            wanted = self._rules.open_spec(message.wanted_by, message.spec)
        except SpecError:
            self.refused += 1
            return []
        if not must_yield(wanted.priority, runner.running_job, at.unix_ms / 1000):
            return []
        if not self._rules.fits_without(message.job, message.wanted_by, wanted):
            return []
        recent = {
            user: [since for since in times if at.now - since < YIELDS_S] for user, times in self._yielded.items()
        }
        self._yielded = {user: times for user, times in recent.items() if times}
        if len(self._yielded.get(wanted.user, ())) >= YIELDS:
            return []
        self._yielded.setdefault(wanted.user, []).append(at.now)
        reason = (
            f"it makes room for {format_job(message.wanted_by)[:8]} of {wanted.user}, of priority {wanted.priority}"
        )
        return self._from(message.job, "runner", runner.handle(VacateWanted(runner.spec.grace_s, reason), at))

    def _on_start(self, sender: bytes, message: Start, at: Instant) -> list[Directed]:
        job = message.job

        def answer(reason: str) -> list[Directed]:
            reply = StartAnswer(job=job, term=message.term, taken=not reason, reason=shortened(reason))
            return self._from(job, "runner", [Send(sender, reply)])

        running = self.runners.get(job)
        if job in self.members:
            return answer(STILL_ENDING)
        if running is not None:
            return answer("" if running.term == message.term else STILL_ENDING)
        if self._is_over(job):
            return answer("the job is over")
        try:
            spec = self._spec(job, message.spec)
        except SpecError as error:
            self.refused += 1
            return answer(str(error))
        if sender not in message.config.nodes:
            self.refused += 1
            return answer("only a witness of the job may start it")
        refusal = self._rules.admit(job, spec, message)
        if refusal is not None:
            return answer(refusal)
        owner = self._rng.randbytes(OWNER_BYTES)
        runner = Runner(self.me, self.nick, message, spec, at, self._view, self._rules.rendezvous, owner)
        self.runners[job] = runner
        self._came(spec)
        return answer("") + self._from(job, "runner", runner.begin(at))

    def _on_enlist(self, sender: bytes, message: Enlist, at: Instant) -> list[Directed]:
        job = message.job

        def answer(reason: str) -> list[Directed]:
            reply = Enlisted(job=job, term=message.term, taken=not reason, reason=shortened(reason))
            return self._from(job, "member", [Send(sender, reply)])

        member = self.members.get(job)
        if member is not None and (member.runner, member.term) == (sender, message.term):
            return answer("")
        if member is not None and message.term > member.term:
            over = Dismiss(job=job, term=member.term, grace_s=0.0, reason="a newer attempt enlists this node")
            return self._from(job, "member", member.on_dismiss(over, at)) + answer(STILL_ENDING)
        if member is not None or job in self.runners:
            return answer(STILL_ENDING)
        if self._is_over(job):
            return answer("the job is over")
        try:
            spec = self._spec(job, message.spec)
        except SpecError as error:
            self.refused += 1
            return answer(str(error))
        refusal = self._rules.admit(job, spec, message)
        if refusal is not None:
            return self._give_way(job, spec, at) or answer(refusal)
        member = self.members[job] = GangMember(sender, message, spec, self._rng.getrandbits(32))
        self._came(spec)
        return answer("") + self._from(job, "member", member.begin(at))

    def _came(self, spec: JobSpec) -> None:
        """Note that a job of this user has taken a place here, which a guest may have left for it."""
        if times := self._yielded.get(spec.user):
            times.pop()

    def _give_way(self, job: bytes, spec: JobSpec, at: Instant) -> list[Directed]:
        """End the attempt of a gang that still gathers here, if it comes after this one, which will ask again.

        Otherwise two gangs that each hold a node that the other needs would both give up and try again for ever.
        """
        gathering = [runner for runner in self.runners.values() if runner.gathers]
        last = max(gathering, key=lambda runner: gang_turn(runner.job, runner.spec), default=None)
        if last is None or gang_turn(last.job, last.spec) < gang_turn(job, spec):
            return []
        reason = f"it gives way to {format_job(job)[:8]} of {spec.user}, which gathers its nodes first"
        return self._from(last.job, "runner", last.handle(VacateWanted(0.0, reason), at))

    def _to_member(self, sender: bytes, message: Begin | RunGranted | Dismiss, at: Instant) -> list[Directed]:
        member = self.members.get(message.job)
        if member is None or (member.runner, member.term) != (sender, message.term):
            return []
        match message:
            case Begin():
                effects = member.on_begin(message, at)
            case RunGranted():
                effects = member.on_run(message, at)
            case Dismiss():
                effects = member.on_dismiss(message, at)
        return self._from(message.job, "member", effects)

    def _on_answer(self, sender: bytes, message: Accepted | Refused, at: Instant) -> list[Directed]:
        job = message.job
        out: list[Directed] = []
        submission = self._submissions.get(job)
        asked = submission is not None and submission.proposer.asks(sender)
        if isinstance(message, Refused) and message.problem:
            if submission is not None and asked:
                submission.problem = f"a witness does not take it: {shortened(message.problem)}"
            return []
        witness = self.witnesses.get(job)
        if isinstance(message, Refused) and message.finished and message.record is not None and witness is not None:
            closed = Closed(job=job, term=message.accepted_term, record=message.record)
            out += self._from(job, "witness", witness.handle(sender, closed, at.now))
        if isinstance(message, Refused) and message.config is not None and witness is not None:
            out += self._from(job, "witness", self._lead(sender, message.config, witness, at))
        if submission is not None and asked and message.term == submission.proposer.term:
            out += self._on_submission_answer(job, submission, sender, message, at)
        leader, runner = self.leaders.get(job), self.runners.get(job)
        if leader is not None:
            out += self._from(job, "leader", leader.handle(sender, message, at))
        if runner is not None:
            if isinstance(message, Accepted):
                out += self._from(job, "runner", runner.on_accepted(sender, message, at))
            else:
                out += self._from(job, "runner", runner.on_refused(sender, message, at))
        return out

    def _lead(self, sender: bytes, known_there: Config, witness: Witness, at: Instant) -> list[Effect]:
        """Lead a witness that missed more than one change to a group that has this node, now and then.

        It takes up a group by the word of a member of the one that it knows (`_learn_group`). Once it knows a group with this
        node, this node's word counts.
        """
        known = witness.witness_record
        missed = [
            (group, warrants)
            for group, warrants in reversed(known.earlier)
            if group.order > known_there.order and self.me in group.nodes
        ]
        led = self._led.setdefault(known.job, {}) if missed and sender in known.config.nodes else None
        if led is None or at.now < led.get(sender, -inf) + ANSWER_S:
            return []
        led[sender] = at.now
        return [Send(sender, PreVote(known.job, known.promised + 1, group, warrants)) for group, warrants in missed]

    def _on_submission_answer(
        self, job: bytes, submission: _Submission, sender: bytes, message: Accepted | Refused, at: Instant
    ) -> list[Directed]:
        decided = None
        if isinstance(message, Refused):
            answer = submission.proposer.on_refused(sender, message)
            recovers = submission.proposer.reconfiguration is not None
            older = recovers and message.promised <= submission.proposer.term
            if not isinstance(answer, Fenced) and (message.needs_spec or older):
                return self._from(job, "submitter", list(answer))
            if recovers:
                del self._submissions[job]
                return self._from(job, "submitter", [Submitted("a node has a newer record of it")])
            submission.proposer.config.count(submission.have_it, Voter(sender, message.disk))
            # A record accepted under a term that was won is known to a majority.
            if not (message.finished or message.accepted_term > FIRST_TERM or submission.known):
                return []
        else:
            decided = submission.proposer.on_accepted(sender, message)
            submission.proposer.config.count(submission.have_it, Voter(sender, message.disk))
            if decided is None and (submission.proposer.reconfiguration is not None or not submission.known):
                return []
        del self._submissions[job]
        out = self._from(job, "submitter", [Submitted(None)])
        if decided is not None and job in self._first_terms and job in self.leaders:
            out += self._from(job, "leader", self.leaders[job].use_first_term(submission.proposer, at))
        self._first_terms.discard(job)
        return out

    def _resubmit(self, job: bytes, at: Instant) -> list[Directed]:
        submission = self._submissions[job]
        timer = SetTimer("resubmit", submission.tokens.fresh("resubmit"), at.now + RESUBMIT_S)
        return self._from(job, "submitter", [*submission.proposer.propose(at.now), timer])

    def _disk_for(self, job: bytes) -> bytes:
        return b"" if job in self.forgotten or job in self.archived else self.disk

    def _leader_looks(self, job: bytes, at: Instant) -> list[Directed]:
        return self._from(job, "leader", self.leaders[job].act(at))

    def _from(self, job: bytes, role: Role, effects: Sequence[Effect]) -> list[Directed]:
        if any(isinstance(effect, Ended) for effect in effects):
            (self.members if role == "member" else self.runners).pop(job, None)
        if job in self.witnesses and any(isinstance(effect, SaveWitnessRecord) for effect in effects):
            self._count(self.witnesses[job])
        return [Directed(job, role, effect) for effect in effects]


def on_member_report(member: GangMember, event: RunnerEvent, at: Instant) -> list[Effect]:
    """A gang member neither saves nor decides: its runner judges the guest's end."""
    match event:
        case GuestStarted():
            return member.started()
        case GuestFailed(reason=reason, elsewhere=True):
            return member.exited(1, f"could not start: {reason}", at)
        case GuestFailed(reason=reason, exit_code=code):  # no node would do better
            return member.exited(code, "", at, reason)
        case GuestExited(code=code, oom=oom, fault=fault):
            return member.exited(code, fault, at, describe_exit(code, oom))
        case VacateWanted(grace_s=grace_s, reason=reason):
            return member.vacate(grace_s, reason, at)
        case KillWanted(reason=reason):
            return member.vacate(0.0, reason, at)
        case ClockStood():
            return member.clock_stood(at)
    return []
