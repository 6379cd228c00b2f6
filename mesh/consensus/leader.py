"""Leader: moves a job on when no runner holds its lease. Every witness carries one; the first live member of the group acts.

A leader wins a term from a quorum and so learns the job's latest record (phase 1 of Paxos). It ranks the nodes and hands the
term to the best one with `Start`. From then on the runner owns the term, and the leader only watches the lease in its own
witness record. Two leaders that act at once cost a round trip and never fork the record: terms decide (Chandra et al. 2007,
"Paxos made live").
"""

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from membership.lengths import shortened
from mesh.consensus.effects import Concluded, Decided, Effect, Send, SetTimer, StateChanged
from mesh.consensus.messages import (
    Accepted,
    Closed,
    Introduced,
    MakeRoom,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promised,
    Refused,
    Start,
    StartAnswer,
)
from mesh.consensus.proposer import ANSWER_S, Fenced, Proposer
from mesh.consensus.view import Instant, Timer, TimerTokens, View
from mesh.consensus.witness import Witness
from mesh.model.record import FIRST_TERM, Config, JobRecord, Outcome, OutcomeKind, Voter
from mesh.model.spec import JobSpec, attempt_request, format_job, waiting_place
from placement.advert import Advert
from placement.decision import decide, explain
from placement.preemption import victim
from placement.ranking import Ranking
from placement.request import Request

STAGGER_S = 1.5  # between the turns of leaders; more than a LAN round trip and a gossip spread
HEARTBEAT_S, HEARTBEAT_MAX_S = 2.0, 16.0  # of a waiting leader, with exponential backoff (own choice)
PREPARED_S = 6.0  # that a rival with a new term may use it: both phases with their answers
PATIENCE_S = 3 * HEARTBEAT_MAX_S  # with a rival that keeps the job waiting; a dead one leaves the view long before
RETRY_S = 0.2  # after a refusal for a lease that is over here, doubled each time: a slow LAN delivery (own choice)
ASK_EVERY_S = 30.0  # between requests to make room: the usual grace
LEAVES_S = (
    300.0  # that a job which was asked may take to leave before another is asked: a grace and an upload (own choice)
)
# That a refusal may name above the term promised here (own choice). Honest witnesses differ by a few, and one that is further
# ahead leads the job itself. Beyond it, a lie would use up the terms.
AHEAD = 16
OTHERS_FIRST = "other jobs go first"


class Leader:
    """`act` and `handle` return effects. The witness on the same node is read, never written. `warrant` seals that a node gets
    a term of the job.
    """

    def __init__(
        self,
        witness: Witness,
        spec: JobSpec,
        rng: Random,
        warrant: Callable[[bytes, int, bytes, Config], bytes] = lambda *given: b"",
    ) -> None:
        self.witness = witness
        self.spec = spec
        self.job = witness.witness_record.job
        self.view: View | None = None
        self.state = "watching"
        self._rng, self._warrant = rng, warrant
        self._tokens = TimerTokens()
        self._term = 0
        self._seen_term = 0
        self._pre_votes: set[Voter] = set()
        self._replaced: set[Voter] = set()  # voters that know a later group without this node
        self._leased: set[Voter] = set()  # voters that refused this round because of a lease
        self._introduced: set[Voter] = set()  # voters that got the job in this round; some cannot read it
        self._retry_s = RETRY_S
        self._promises: dict[bytes, Promised] = {}
        self._proposer: Proposer | None = None
        self._candidate: bytes | None = None
        self._replaced_in: Config | None = None  # the last group that this node knew when it was replaced
        self.declined: dict[bytes, str] = {}
        self._ask_declined_at = 0.0
        self._idle_since: float | None = None
        self._rival: tuple[bytes, float] | None = None
        self._patience_s = 0.0
        self._beat_s = HEARTBEAT_S
        self._ask_again_at = 0.0
        self._asked_for_room: dict[bytes, float] = {}  # running jobs, and when
        self.detail = ""

    def observe(self, view: View, at: Instant) -> list[Effect]:
        """Take a new view of the mesh."""
        adverts_changed = self.view is None or view.adverts != self.view.adverts
        self.view = view
        if adverts_changed:
            self.declined.clear()
        if self.state == "waiting":
            return self._place(at)
        return self.act(at)

    def rival_seen(self, sender: bytes, patience_s: float, at: Instant) -> None:
        """Let another leader, which has prepared a term or keeps the job waiting, go first for `patience_s`."""
        if self.view is None or sender != self.view.me:
            self._rival, self._patience_s = (sender, at.now), patience_s
            if self.state in {"asking", "preparing", "waiting", "offered"}:
                self._to_watching()

    def act(self, at: Instant) -> list[Effect]:
        """Do what is due; called when the witness record or the view has changed."""
        if self.witness.finished and self.state != "finishing":
            self._to_watching()
        if self.state == "retired" and self.witness.witness_record.config != self._replaced_in:
            self._to_watching()  # it is a witness again
        if self.view is None or self.state != "watching":
            return []
        if self.witness.finished or self.view.me not in self.witness.witness_record.config.nodes:
            self._tokens.cancel("turn")
            return []
        left = self.witness.lease_left_s(at.now)
        if left > 0:
            self._idle_since = self._rival = None  # the rival has used its term
            self._retry_s = RETRY_S
            self.declined.clear()
            return [self._timer("turn", at.now + left + 0.01)]
        if self._idle_since is None:
            self._idle_since = at.now
        due = self._idle_since + self._place_in_line() * STAGGER_S
        if self.witness.witness_record.record.outcome is not None:
            due += ANSWER_S  # the node that proposed this end is about to close the job
        if self._rival is not None and self._rival[0] in self.view.alive:
            due = max(due, self._rival[1] + self._patience_s + self._place_in_line() * STAGGER_S)
        if at.now < due:
            return [self._timer("turn", due)]
        return self._ask(at)

    def handle(
        self,
        sender: bytes,
        message: PreVoteGranted | Promised | Refused | Accepted | Introduced | StartAnswer,
        at: Instant,
    ) -> list[Effect]:
        if not isinstance(message, Introduced | StartAnswer) and not self._asks(sender):
            return []
        match message:
            case Introduced() if self.state == "waiting":
                assert self._proposer is not None and self.view is not None
                self._proposer.on_introduced(sender, message, at.now)
                return [*self._proposer.regroup(self.view, at.now)]
            case PreVoteGranted() if self.state == "asking" and message.term == self._term:
                self.witness.witness_record.config.count(self._pre_votes, Voter(sender, message.disk))
                return self._prepare(at) if self.witness.witness_record.config.quorum(self._pre_votes) else []
            case Promised() if self.state == "preparing" and message.term == self._term:
                self._promises[sender] = message
                return self._count_promises(at)
            case Refused():
                return self._on_refused(sender, message, at)
            case Accepted() if self._proposer is not None:
                decided = self._proposer.on_accepted(sender, message)
                if self.state == "waiting":
                    if message.cancel_wanted:
                        return self._finish(self._ended(self._proposer.record, "cancelled", "cancelled", at), at)
                    assert self.view is not None
                    return [*self._proposer.regroup(self.view, at.now)]
                if decided is None or decided.record.outcome is None:
                    return []  # a round of before the end: closing the term by it would leave the job open
                self._to_watching()
                closed = Closed(job=self.job, term=self._term, record=decided.record)
                sends: list[Effect] = [Send(node, closed) for node in decided.config.nodes]
                return [*sends, Concluded(decided.record.outcome)]
            case StartAnswer() if self.state == "offered" and message.term == self._term:
                return self._on_answer(sender, message, at)
        return []

    def on_timer(self, timer: Timer, at: Instant) -> list[Effect]:
        if not self._tokens.is_current(timer):
            return []
        match timer.name, self.state:
            case "turn", "watching":
                return self.act(at)
            case "answer", "offered":
                self._decline(self._candidate, "did not answer", at)
                return self._ask(at)
            case "answer", "asking" | "preparing" | "finishing":
                self._to_watching()
                self._idle_since = at.now
                return [self._timer("turn", at.now + self._rng.uniform(0.2, 1.0))]
            case "deadline", "waiting":
                return self._place(at)
            case "heartbeat", "waiting":
                assert self._proposer is not None
                if at.now >= self._ask_declined_at:
                    self.declined.clear()
                effects = self._place(at)
                if self.state != "waiting":
                    return effects
                self._beat_s = min(HEARTBEAT_MAX_S, 2 * self._beat_s)
                return [*effects, *self._beat(at)]
        return []

    def cancelled(self, at: Instant) -> list[Effect]:
        """Propose a round at once if this leader keeps the job waiting: the answers carry the wish to cancel."""
        return self._beat(at) if self.state == "waiting" else []

    def _asks(self, node: bytes) -> bool:
        """Tell whether this node may answer: it is in the group, as far as this leader knows it."""
        known = [self.witness.witness_record.config, *(promise.config for promise in self._promises.values())]
        return any(node in config.nodes for config in known) or (
            self._proposer is not None and self._proposer.asks(node)
        )

    # --- winning a term

    def await_first_term(self, at: Instant) -> None:
        """Leave the job alone until its submission here is decided, or could have been."""
        self._idle_since = at.now + ANSWER_S

    def use_first_term(self, submission: Proposer, at: Instant) -> list[Effect]:
        """Place the job in the term of its submission, which a majority has accepted and nobody else may use."""
        free = self.witness.witness_record.promised == submission.term and self.witness.lease_left_s(at.now) == 0
        if self.view is None or self.state != "watching" or not free:
            return []
        self._proposer, self._term = submission, submission.term
        return self._place(at)

    def _place_in_line(self) -> int:
        assert self.view is not None
        # Nodes that are about to leave go last.
        line = [node for node in self.witness.witness_record.config.nodes if node in self.view.alive]
        leaving = self.view.leaving
        line.sort(key=lambda node: node in leaving)
        return line.index(self.view.me) if self.view.me in line else len(line)

    def _ask(self, at: Instant) -> list[Effect]:
        """Ask whether a term could be won, before any witness promises one (Raft's pre-vote, Ongaro 2014, section 9.6)."""
        self.state = "asking"
        self._proposer = None
        self._pre_votes, self._replaced, self._leased, self._introduced = set(), set(), set(), set()
        self._term = max(self.witness.witness_record.promised, self._seen_term, self._term) + 1
        sends = [Send(node, self._asking(PreVote)) for node in self.witness.witness_record.config.nodes]
        return [*sends, self._timer("answer", at.now + ANSWER_S)]

    def _asking(self, kind: type[PreVote] | type[Prepare]) -> PreVote | Prepare:
        known = self.witness.witness_record
        group = known.config if known.warrants else None
        return kind(job=self.job, term=self._term, config=group, warrants=known.warrants)

    def _prepare(self, at: Instant) -> list[Effect]:
        self.state = "preparing"
        self._promises, self._leased, self._introduced = {}, set(), set()
        sends = [Send(node, self._asking(Prepare)) for node in self.witness.witness_record.config.nodes]
        return [*sends, self._timer("answer", at.now + ANSWER_S)]

    def _count_promises(self, at: Instant) -> list[Effect]:
        assert self.view is not None
        config = max((promise.config for promise in self._promises.values()), key=lambda config: config.order)
        if self.view.me not in config.nodes:
            return self.stand_down()
        asked = set(self.witness.witness_record.config.nodes)
        late = [node for node in config.nodes if node not in asked and node not in self._promises]
        if not config.quorum({Voter(node, promise.disk) for node, promise in self._promises.items()}):
            return [Send(node, self._asking(Prepare)) for node in late]
        best = max(self._promises.values(), key=lambda promise: (promise.accepted_term, promise.record.version))
        record = self._closed(best.record, at)
        config = msgspec.structs.replace(config, term=self._term)
        self._proposer = Proposer(self.job, self.witness.witness_record.spec, self._term, config, record, None)
        if record.outcome is not None:
            return self._finish(record, at)
        if any(promise.cancel_wanted for promise in self._promises.values()):
            return self._finish(self._ended(record, "cancelled", "cancelled", at), at)
        return self._place(at)

    def _closed(self, record: JobRecord, at: Instant) -> JobRecord:
        """Return the record with an attempt that never reported its end written off."""
        assert self.view is not None
        attempt = record.open_attempt
        return record if attempt is None else record.written_off(self.view.absence(attempt.node), at.unix_ms)

    def _on_refused(self, sender: bytes, message: Refused, at: Instant) -> list[Effect]:
        # A witness that has been replaced is asked too, and may lie about a newer group.
        replaced = self._proposer is not None and sender not in self._proposer.config.nodes
        believed = not replaced and message.promised <= self.witness.witness_record.promised + AHEAD
        self._seen_term = max(self._seen_term, message.promised if believed else 0)
        if message.term != self._term or self.state == "retired":
            return []
        known = self.witness.witness_record.config
        newer = not replaced and message.config is not None and message.config.order > known.order
        if newer and self.view is not None and self.view.me not in message.config.nodes:  # type: ignore[union-attr]
            known.count(self._replaced, Voter(sender, message.disk))
            if not known.quorum(set(known.everyone) - self._replaced):  # one witness may lie about it
                return self.stand_down()
        if self._proposer is not None and self.state in {"waiting", "finishing"}:
            answer = self._proposer.on_refused(sender, message)
            if isinstance(answer, Fenced):
                self._to_watching()
                self._idle_since = at.now
                return [self._timer("turn", at.now + STAGGER_S)]
            return list(answer)
        if self.state in {"asking", "preparing"} and message.needs_spec:
            return self._install(Voter(sender, message.disk))
        if self.state in {"asking", "preparing"}:
            known.count(self._leased, Voter(sender, message.disk))
            if not (believed and message.promised >= self._term) and self._others_suffice():
                return []
            self._to_watching()
            pause = self._rng.uniform(0.1, 0.5) * (1 + self._place_in_line())
            if message.lease_left_s > 0:
                # The lease is over here: its release may be on the way there, or this node missed a grant.
                pause = min(message.lease_left_s, max(pause, self._retry_s))
                self._retry_s *= 2
            # This leader keeps its turn.
            self._idle_since = at.now + pause - self._place_in_line() * STAGGER_S
            return [self._timer("turn", at.now + pause)]
        return []

    def _others_suffice(self) -> bool:
        """Tell whether the voters without a running lease form a quorum."""
        config = self.witness.witness_record.config
        return config.quorum({voter for voter in config.everyone if voter not in self._leased})

    def stand_down(self) -> list[Effect]:
        """Retire: the group has replaced this node."""
        self._to_watching()
        self.state, self._replaced_in = "retired", self.witness.witness_record.config
        return []

    def _install(self, voter: Voter) -> list[Effect]:
        """Give the job to a member that neither the submission nor a change of the group has reached.

        It starts with an empty record: its disk has never promised anything for this job, or it would know the job.
        """
        known = [self.witness.witness_record.config, *(promise.config for promise in self._promises.values())]
        config = max(known, key=lambda config: config.order)
        if voter not in config.everyone or voter in self._introduced:
            return []
        self._introduced.add(voter)
        blank = Proposer(self.job, self.witness.witness_record.spec, FIRST_TERM, config, JobRecord(), None)
        kind = PreVote if self.state == "asking" else Prepare
        return [Send(voter.node, blank.introduction()), Send(voter.node, self._asking(kind))]

    # --- using it

    def request(self, record: JobRecord, at: Instant) -> Request:
        number, attempts = record.next_attempt, record.attempts
        return attempt_request(self.job, self.spec, number, attempts, at.unix_ms, record.prefer, record.commit)

    def _place(self, at: Instant) -> list[Effect]:
        assert self.view is not None and self._proposer is not None
        proposer = self._proposer
        hopeless = self._hopeless(at)
        if hopeless:
            return self._finish(self._ended(proposer.record, "failed", hopeless, at), at)
        if self.held_back:
            return self._wait(self.held_back, at)
        request = self.request(proposer.record, at)
        offers: Sequence[Advert] = self.view.offers
        if self.view.queue is not None:
            offers = self.view.queue.left_for(waiting_place(self.spec, request), offers)
        ranking = self.view.hierarchy.rank(request, offers)
        open_to = ranking.first(request.nodes, self.declined)
        if len(open_to) < request.nodes:
            return [*self._wait(self._why_not(request, ranking), at), *self._ask_for_room(request, at)]
        chosen = open_to[0]
        self.state = "offered"
        self._candidate = chosen.node
        start = Start(
            job=self.job,
            term=self._term,
            config=proposer.config,
            record=proposer.record,
            spec=self.witness.witness_record.spec,
            warrant=self._warrant(self.job, self._term, chosen.node, proposer.config),
        )
        kept = {before.node for before, left in zip(self.view.offers, offers, strict=True) if before is not left}
        decision = decide(request, ranking, self.declined, kept)
        assert decision is not None and decision.chosen == chosen.node
        return [
            Send(chosen.node, start),
            Decided(decision),
            self._timer("answer", at.now + ANSWER_S),
            self._changed("starting", f"on {chosen.nick}"),
        ]

    @property
    def held_back(self) -> str:
        """Return why the job may not start yet, whatever nodes offer; it is not in the queue meanwhile."""
        ends = self.view.ends if self.view is not None else {}
        first = [job for job in self.spec.after if ends.get(job) != "done"]
        first += [job for job in self.spec.after_any if job not in ends]
        if first:
            names = ", ".join(format_job(job)[:8] for job in first[:3])
            return f"after {names}" + (f" and {len(first) - 3} more" if len(first) > 3 else "")
        array = self.spec.array
        if array is None or not array.limit or self.view is None:
            return ""
        # A node that missed an end counts too many as running, so the limit is never exceeded.
        over = (self.view.array_ends.get((self.spec.user, array.array), 0) & ((1 << array.place) - 1)).bit_count()
        return f"{array.limit} of its array at a time" if array.place - over >= array.limit else ""

    def _hopeless(self, at: Instant) -> str:
        """Return why the job can never start; empty if it can."""
        assert self.view is not None
        if self.spec.deadline_unix_ms is not None and at.unix_ms >= self.spec.deadline_unix_ms:
            return "its deadline has passed"
        for job in self.spec.after:
            kind = self.view.ends.get(job, "done")
            if kind != "done":
                how = "failed" if kind == "failed" else "was cancelled"
                return f"{format_job(job)[:8]}, which it comes after, {how}"
        return ""

    def _ask_for_room(self, request: Request, at: Instant) -> list[Effect]:
        """Ask the runner of a much less important job to save and leave, if that would help. That node judges for itself.

        One job is asked at a time, and another one while it neither leaves nor makes way: what its node says of it may be false.
        """
        assert self.view is not None
        running, asked = self.view.running, self._asked_for_room
        leaving = any(one.leaves and at.now < asked.get(one.job, -LEAVES_S) + LEAVES_S for one in running)
        if leaving or at.now < self._ask_again_at:
            return []
        fresh = [one for one in running if one.job not in asked]
        offers, now_unix = self.view.offers, at.unix_ms / 1000
        found = victim(request, self.spec.priority, offers, fresh, now_unix)
        if found is None:
            asked.clear()
            found = victim(request, self.spec.priority, offers, running, now_unix)
        if found is None:
            return []
        asked[found.job], self._ask_again_at = at.now, at.now + ASK_EVERY_S
        return [Send(found.node, MakeRoom(job=found.job, wanted_by=self.job, spec=self.witness.witness_record.spec))]

    def _why_not(self, request: Request, left: Ranking) -> str:
        """Return why no node takes the job now: all candidates declined, others go first there, or no node fits."""
        assert self.view is not None
        if len(left) >= request.nodes:
            return "; ".join(sorted(set(self.declined.values())))
        everywhere = self.view.hierarchy.rank(request, self.view.offers) if self.view.queue is not None else left
        return OTHERS_FIRST if len(everywhere) >= request.nodes else explain(request, everywhere)[0]

    def _wait(self, why: str, at: Instant) -> list[Effect]:
        """Keep the job waiting. The group gets a heartbeat now and then."""
        assert self._proposer is not None and self.view is not None
        fresh = self.state != "waiting"
        self.state = "waiting"
        regroup = self._proposer.regroup(self.view, at.now)
        changed = self._changed("pending", why)
        if not fresh:
            return [*regroup, changed]
        self._beat_s = HEARTBEAT_S
        effects = [*self._beat(at), *regroup, changed]
        if self.spec.deadline_unix_ms is not None:
            effects.append(self._timer("deadline", at.now + max(0.0, (self.spec.deadline_unix_ms - at.unix_ms) / 1000)))
        return effects

    def _beat(self, at: Instant) -> list[Effect]:
        assert self._proposer is not None
        return [*self._proposer.propose(at.now), self._timer("heartbeat", at.now + self._beat_s)]

    def _on_answer(self, sender: bytes, message: StartAnswer, at: Instant) -> list[Effect]:
        if sender != self._candidate:
            return []
        if message.taken:
            # The runner's first Accept decides now; if none comes, this leader acts again after a full lease.
            self._to_watching()
            self._idle_since = at.now + self.spec.lease_s
            return [self._timer("turn", at.now + self.spec.lease_s)]
        self._decline(sender, message.reason, at)
        return self._ask(at)

    def _decline(self, node: bytes | None, reason: str, at: Instant) -> None:
        """Pass over this node until adverts change, or for a while: not everything that keeps a node busy shows there."""
        if node is not None:
            nick = next((ad.nick for ad in self.view.adverts if ad.node == node), "a node") if self.view else ""
            self._ask_declined_at = self._ask_declined_at if self.declined else at.now + HEARTBEAT_MAX_S
            self.declined[node] = f"{nick}: {reason}"

    def _finish(self, record: JobRecord, at: Instant) -> list[Effect]:
        assert self._proposer is not None
        self.state = "finishing"
        self._proposer.record = record
        return [*self._proposer.propose(at.now), self._timer("answer", at.now + ANSWER_S)]

    @staticmethod
    def _ended(record: JobRecord, kind: OutcomeKind, detail: str, at: Instant) -> JobRecord:
        commit = record.commit
        outcome = Outcome(
            kind=kind,
            detail=shortened(detail),
            exit_code=None,
            manifest=commit.manifest if commit else None,
            holders=commit.holders if commit else (),
            ended_unix_ms=at.unix_ms,
        )
        return record.amended(outcome=outcome)

    def _to_watching(self) -> None:
        self.state = "watching"
        self._proposer = None
        self._candidate = None
        for name in ("answer", "heartbeat", "deadline"):
            self._tokens.cancel(name)

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)

    def _changed(self, state: str, detail: str) -> StateChanged:
        self.detail = detail
        return StateChanged(state, detail)
