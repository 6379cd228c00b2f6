"""Who moves a job on when nobody runs it: each witness carries one, and the first of the group that is alive acts.

A steward wins a term from a quorum (which also tells it the job's latest ledger), ranks the nodes by placement, and hands
the term to the best one with `Start`. From then on the runner owns the term; the steward only watches the lease in its
own witness cell. Two stewards acting at once cost a round trip, never a fork: terms decide (research: Paxos made live).
"""

from collections.abc import Sequence
from random import Random

from mesh.jobs.effects import Concluded, Decided, Effect, Send, SetTimer, StateChanged
from mesh.jobs.ledger import Ledger, Outcome, OutcomeKind, Seat
from mesh.jobs.messages import (
    Accepted,
    Closed,
    MakeRoom,
    Prepare,
    Promised,
    Refused,
    Start,
    StartAnswer,
    Willing,
    Would,
)
from mesh.jobs.proposer import Fenced, Proposer, healthy_group
from mesh.jobs.spec import JobSpec, attempt_request, format_job, waiting_place
from mesh.jobs.view import Instant, Timer, TimerTokens, View
from mesh.jobs.witness import Witness
from placement.advert import Advert
from placement.decision import decide, explain
from placement.preemption import victim
from placement.ranking import Ranking
from placement.request import Request

STAGGER_S = 1.5  # a steward's turn, times its place in the group; over a LAN round trip and a gossip spread
HEARTBEAT_S, HEARTBEAT_MAX_S = 2.0, 16.0  # a waiting steward shows that it is there, ever more seldom; ours
PREPARED_S = 6.0  # that a rival who asked for a term is left to use it: both phases, with their answers
PATIENCE_S = 3 * HEARTBEAT_MAX_S  # with a rival who keeps the job waiting; whoever dies is out of the view long before
RETRY_S = 0.2  # after a refusal for a lease that is over here; doubled each time; a LAN's slowest delivery; ours
ANSWER_S = 3.0  # to a Prepare or a Start: many LAN round trips, few for a user who waits
WANT_WITNESSES = 3
ASK_EVERY_S = 30.0  # that somebody make room: the usual grace
OTHERS_FIRST = "other jobs go first"


class Steward:
    """`act` and `handle` return effects. The colocated witness is read, never written."""

    def __init__(self, witness: Witness, spec: JobSpec, rng: Random) -> None:
        self.witness = witness
        self.spec = spec
        self.job = witness.cell.job
        self.view: View | None = None
        self.state = "watching"
        self._rng = rng
        self._tokens = TimerTokens()
        self._term = 0
        self._seen_term = 0
        self._willing: set[Seat] = set()
        self._leased: set[Seat] = set()  # of this round those who refuse it for a lease
        self._retry_s = RETRY_S
        self._promises: dict[bytes, Promised] = {}
        self._proposer: Proposer | None = None
        self._candidate: bytes | None = None
        self.declined: dict[bytes, str] = {}
        self._idle_since: float | None = None
        self._rival: tuple[bytes, float] | None = None
        self._patience_s = 0.0
        self._beat_s = HEARTBEAT_S
        self._ask_again_at = 0.0
        self.detail = ""

    def observe(self, view: View, at: Instant) -> list[Effect]:
        """The mesh changed: who is alive, who offers what."""
        adverts_changed = self.view is None or view.adverts != self.view.adverts
        self.view = view
        if adverts_changed:
            self.declined.clear()
        if self.state == "waiting":
            return self._place(at)
        return self.act(at)

    def rival_seen(self, sender: bytes, patience_s: float, at: Instant) -> None:
        """Another steward prepared or keeps the job waiting: it is its turn for a while."""
        if self.view is None or sender != self.view.me:
            self._rival, self._patience_s = (sender, at.now), patience_s
            if self.state in {"asking", "preparing", "waiting", "offered"}:
                self._to_watching()

    def act(self, at: Instant) -> list[Effect]:
        """Look at the cell and do what is due; called whenever the cell or the view changed."""
        if self.witness.finished and self.state != "finishing":
            self._to_watching()
        if self.view is None or self.state != "watching":
            return []
        if self.witness.finished or self.view.me not in self.witness.cell.config.nodes:
            self._tokens.cancel("turn")
            return []
        left = self.witness.lease_left_s(at.now)
        if left > 0:
            self._idle_since = self._rival = None  # whoever asked for a term has used it
            self._retry_s = RETRY_S
            self.declined.clear()
            return [self._timer("turn", at.now + left + 0.01)]
        if self._idle_since is None:
            self._idle_since = at.now
        due = self._idle_since + self._place_in_line() * STAGGER_S
        if self.witness.cell.ledger.outcome is not None:
            due += ANSWER_S  # whoever proposed this end is about to close it
        if self._rival is not None and self._rival[0] in self.view.alive:
            due = max(due, self._rival[1] + self._patience_s + self._place_in_line() * STAGGER_S)
        if at.now < due:
            return [self._timer("turn", due)]
        return self._ask(at)

    def handle(
        self, sender: bytes, message: Willing | Promised | Refused | Accepted | StartAnswer, at: Instant
    ) -> list[Effect]:
        match message:
            case Willing() if self.state == "asking" and message.term == self._term:
                self._willing.add(Seat(sender, message.disk))
                return self._prepare(at) if self.witness.cell.config.quorum(self._willing) else []
            case Promised() if self.state == "preparing" and message.term == self._term:
                self._promises[sender] = message
                return self._count_promises(at)
            case Refused():
                return self._on_refused(sender, message, at)
            case Accepted() if self._proposer is not None:
                if message.cancel_wanted and self.state == "waiting":
                    self._proposer.on_accepted(sender, message)
                    return self._finish(self._ended(self._proposer.ledger, "cancelled", "cancelled", at), at)
                decided = self._proposer.on_accepted(sender, message)
                if decided is None or self.state != "finishing":
                    return []
                self._to_watching()
                closed = Closed(job=self.job, term=self._term, ledger=decided.ledger)
                sends: list[Effect] = [Send(node, closed) for node in decided.config.nodes]
                return sends if decided.ledger.outcome is None else [*sends, Concluded(decided.ledger.outcome)]
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
                self._decline(self._candidate, "did not answer")
                return self._ask(at)
            case "answer", "asking" | "preparing" | "finishing":
                self._to_watching()
                self._idle_since = at.now
                return [self._timer("turn", at.now + self._rng.uniform(0.2, 1.0))]
            case "deadline", "waiting":
                return self._place(at)
            case "heartbeat", "waiting":
                assert self._proposer is not None
                effects = self._place(at)
                if self.state != "waiting":
                    return effects
                self._beat_s = min(HEARTBEAT_MAX_S, 2 * self._beat_s)
                return [*effects, *self._beat(at)]
        return []

    def cancelled(self, at: Instant) -> list[Effect]:
        """Its owner wants it ended: if it is this steward who keeps it waiting, the group is asked at once."""
        return self._beat(at) if self.state == "waiting" else []

    # --- winning a term

    def _place_in_line(self) -> int:
        assert self.view is not None
        # Whoever is about to leave lets the others go first.
        line = [node for node in self.witness.cell.config.nodes if node in self.view.alive]
        leaving = self.view.leaving
        line.sort(key=lambda node: node in leaving)
        return line.index(self.view.me) if self.view.me in line else len(line)

    def _ask(self, at: Instant) -> list[Effect]:
        """Find out whether a term could be had, before anybody promises one."""
        self.state = "asking"
        self._proposer = None
        self._willing, self._leased = set(), set()
        self._term = max(self.witness.cell.promised, self._seen_term, self._term) + 1
        would = Would(job=self.job, term=self._term)
        sends = [Send(node, would) for node in self.witness.cell.config.nodes]
        return [*sends, self._timer("answer", at.now + ANSWER_S)]

    def _prepare(self, at: Instant) -> list[Effect]:
        self.state = "preparing"
        self._promises, self._leased = {}, set()
        prepare = Prepare(job=self.job, term=self._term)
        sends = [Send(node, prepare) for node in self.witness.cell.config.nodes]
        return [*sends, self._timer("answer", at.now + ANSWER_S)]

    def _count_promises(self, at: Instant) -> list[Effect]:
        assert self.view is not None
        config = max((promise.config for promise in self._promises.values()), key=lambda config: config.order)
        if self.view.me not in config.nodes:
            return self._stand_down()
        asked = set(self.witness.cell.config.nodes)
        late = [node for node in config.nodes if node not in asked and node not in self._promises]
        if not config.quorum({Seat(node, promise.disk) for node, promise in self._promises.items()}):
            return [Send(node, Prepare(job=self.job, term=self._term)) for node in late]
        best = max(self._promises.values(), key=lambda promise: (promise.accepted_term, promise.ledger.version))
        ledger = self._closed(best.ledger, at)
        self._proposer = Proposer(self.job, self.witness.cell.spec, self._term, config, ledger, None)
        if ledger.outcome is not None:
            return self._finish(ledger, at)
        if any(promise.cancel_wanted for promise in self._promises.values()):
            return self._finish(self._ended(ledger, "cancelled", "cancelled", at), at)
        return self._place(at)

    def _closed(self, ledger: Ledger, at: Instant) -> Ledger:
        """The ledger with an attempt that never said goodbye written off."""
        assert self.view is not None
        attempt = ledger.open_attempt
        return ledger if attempt is None else ledger.written_off(self.view.absence(attempt.node), at.unix_ms)

    def _on_refused(self, sender: bytes, message: Refused, at: Instant) -> list[Effect]:
        self._seen_term = max(self._seen_term, message.promised)
        if message.term != self._term or self.state == "retired":
            return []
        newer = message.config is not None and message.config.order > self.witness.cell.config.order
        if newer and self.view is not None and self.view.me not in message.config.nodes:  # type: ignore[union-attr]
            return self._stand_down()
        if self._proposer is not None and self.state in {"waiting", "finishing"}:
            answer = self._proposer.on_refused(sender, message)
            if isinstance(answer, Fenced):
                self._to_watching()
                self._idle_since = at.now
                return [self._timer("turn", at.now + STAGGER_S)]
            return list(answer)
        if self.state in {"asking", "preparing"} and message.needs_spec:
            return self._install(Seat(sender, message.disk))
        if self.state in {"asking", "preparing"}:
            self._leased.add(Seat(sender, message.disk))
            if message.promised < self._term and self._others_suffice():
                return []
            self._to_watching()
            pause = self._rng.uniform(0.1, 0.5) * (1 + self._place_in_line())
            if message.lease_left_s > 0:
                # Here it is over: its end may be on its way there, or there is one that we have not heard of.
                pause = min(message.lease_left_s, max(pause, self._retry_s))
                self._retry_s *= 2
            # It is still our turn.
            self._idle_since = at.now + pause - self._place_in_line() * STAGGER_S
            return [self._timer("turn", at.now + pause)]
        return []

    def _others_suffice(self) -> bool:
        """Whether a term can be had without those for whom a lease still runs."""
        config = self.witness.cell.config
        return config.quorum({seat for seat in config.everyone if seat not in self._leased})

    def _stand_down(self) -> list[Effect]:
        """The group has replaced this node: the job is others' now."""
        self._to_watching()
        self.state = "retired"
        return []

    def _install(self, seat: Seat) -> list[Effect]:
        """A member that neither the submission nor a change of the group has reached is given the job. It starts from
        nothing: on this disk it has never promised anything, or it would know the job."""
        known = [self.witness.cell.config, *(promise.config for promise in self._promises.values())]
        config = max(known, key=lambda config: config.order)
        if seat not in config.everyone:
            return []
        blank = Proposer(self.job, self.witness.cell.spec, 0, config, Ledger(), None)
        kind = Would if self.state == "asking" else Prepare
        return [Send(seat.node, blank.introduction()), Send(seat.node, kind(job=self.job, term=self._term))]

    # --- using it

    def request(self, ledger: Ledger, at: Instant) -> Request:
        number, attempts = ledger.next_attempt, ledger.attempts
        return attempt_request(self.job, self.spec, number, attempts, at.unix_ms, ledger.prefer, ledger.commit)

    def _place(self, at: Instant) -> list[Effect]:
        assert self.view is not None and self._proposer is not None
        proposer = self._proposer
        hopeless = self._hopeless(at)
        if hopeless:
            return self._finish(self._ended(proposer.ledger, "failed", hopeless, at), at)
        if self.held_back:
            return self._wait(self.held_back, at)
        request = self.request(proposer.ledger, at)
        offers: Sequence[Advert] = self.view.offers
        if self.view.queue is not None:
            offers = self.view.queue.left_for(waiting_place(self.spec, request), offers)
        ranking = self.view.hierarchy.rank(request, offers)
        open_to = ranking.first(request.nodes, self.declined)
        if len(open_to) < request.nodes:
            return [*self._wait(self._why_not(request, ranking), at), *self._ask_for_room(request, at)]
        chosen = open_to[0]
        config = proposer.config
        if not config.previous:
            group = healthy_group(self.job, config, self.view, WANT_WITNESSES)
            if set(group) != set(config.members):
                config = config.joint(group, self._term)
        self.state = "offered"
        self._candidate = chosen.node
        start = Start(job=self.job, term=self._term, config=config, ledger=proposer.ledger, spec=self.witness.cell.spec)
        self._proposer = None
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
        """Why it may not start yet, whoever could take it; it takes no part in the queue meanwhile."""
        ends = self.view.ends if self.view is not None else {}
        first = [format_job(job)[:8] for job in self.spec.after if ends.get(job) != "done"]
        if first:
            return "after " + ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")
        array = self.spec.array
        if array is None or not array.limit or self.view is None:
            return ""
        # Whoever has not heard of an end only counts too many as under way, so together they never are too many.
        over = sum(place < array.place for place in self.view.array_ends.get(array.array, ()))
        return f"{array.limit} of its array at a time" if array.place - over >= array.limit else ""

    def _hopeless(self, at: Instant) -> str:
        """Why it can never start, if it cannot."""
        assert self.view is not None
        if self.spec.deadline_unix_ms is not None and at.unix_ms >= self.spec.deadline_unix_ms:
            return "its deadline has passed"
        for job in self.spec.after:
            kind = self.view.ends.get(job, "done")
            if kind != "done":
                how = "failed" if kind == "failed" else "been cancelled"
                return f"{format_job(job)[:8]}, which it comes after, has {how}"
        return ""

    def _ask_for_room(self, request: Request, at: Instant) -> list[Effect]:
        """Ask one that matters much less to save and go, if that would help; its runner judges for itself."""
        assert self.view is not None
        if at.now < self._ask_again_at:
            return []
        now_unix = at.unix_ms / 1000
        stay = victim(request, self.spec.priority, self.view.offers, self.view.stays, now_unix)
        if stay is None:
            return []
        self._ask_again_at = at.now + ASK_EVERY_S
        return [Send(stay.node, MakeRoom(job=stay.job, wanted_by=self.job, spec=self.witness.cell.spec))]

    def _why_not(self, request: Request, left: Ranking) -> str:
        """Why no node takes it now: each that could has declined, others go first there, or there is none."""
        assert self.view is not None
        if len(left) >= request.nodes:
            return "; ".join(sorted(set(self.declined.values())))
        everywhere = self.view.hierarchy.rank(request, self.view.offers) if self.view.queue is not None else left
        return OTHERS_FIRST if len(everywhere) >= request.nodes else explain(request, everywhere)[0]

    def _wait(self, why: str, at: Instant) -> list[Effect]:
        """Keep the job waiting. The group hears of it now and then, and at once when it changes."""
        assert self._proposer is not None and self.view is not None
        fresh = self.state != "waiting"
        self.state = "waiting"
        before = self._proposer.config
        self._proposer.change_group(healthy_group(self.job, before, self.view, WANT_WITNESSES))
        changed = self._changed("pending", why)
        if fresh:
            self._beat_s = HEARTBEAT_S
        if not fresh and self._proposer.config == before:
            return [changed]
        effects = [*self._beat(at), changed]
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
            # The runner's first Accept now decides; if none comes, it is our turn again after a full lease.
            self._to_watching()
            self._idle_since = at.now + self.spec.lease_s
            return [self._timer("turn", at.now + self.spec.lease_s)]
        self._decline(sender, message.reason)
        return self._ask(at)

    def _decline(self, node: bytes | None, reason: str) -> None:
        if node is not None:
            nick = next((ad.nick for ad in self.view.adverts if ad.node == node), "a node") if self.view else ""
            self.declined[node] = f"{nick}: {reason}"

    def _finish(self, ledger: Ledger, at: Instant) -> list[Effect]:
        assert self._proposer is not None
        self.state = "finishing"
        self._proposer.ledger = ledger
        return [*self._proposer.propose(at.now), self._timer("answer", at.now + ANSWER_S)]

    @staticmethod
    def _ended(ledger: Ledger, kind: OutcomeKind, detail: str, at: Instant) -> Ledger:
        commit = ledger.commit
        outcome = Outcome(
            kind=kind,
            detail=detail,
            exit_code=None,
            manifest=commit.manifest if commit else None,
            holders=commit.holders if commit else (),
            ended_unix_ms=at.unix_ms,
        )
        return ledger.amended(outcome=outcome)

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
