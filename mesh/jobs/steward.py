"""Who moves a job on when nobody runs it: each witness carries one, and the first of the group that is alive acts.

A steward wins a term from a quorum (which also tells it the job's latest ledger), ranks the nodes by placement, and hands
the term to the best one with `Start`. From then on the runner owns the term; the steward only watches the lease in its
own witness cell. Two stewards acting at once cost a round trip, never a fork: terms decide (research: Paxos made live).
"""

from collections.abc import Sequence
from random import Random

from mesh.jobs.effects import Effect, Send, SetTimer, StateChanged
from mesh.jobs.ledger import Ledger, Outcome, OutcomeKind, Seat
from mesh.jobs.messages import Accepted, Closed, Prepare, Promised, Refused, Start, StartAnswer
from mesh.jobs.proposer import Fenced, Proposer, healthy_group
from mesh.jobs.spec import JobSpec, format_job, placement_request, waiting_place
from mesh.jobs.view import Instant, Timer, TimerTokens, View
from mesh.jobs.witness import Witness
from placement.advert import Advert
from placement.decision import explain, rank_nodes
from placement.request import Request

STAGGER_S = 1.5  # a steward's turn, times its place in the group; over a LAN round trip and a gossip spread
HEARTBEAT_S = 2.0  # a waiting steward shows that it is there; ours
PATIENCE_S = 3 * HEARTBEAT_S  # three missed, as GPUnion's heartbeats
LET_PASS_S = 20.0  # that a place is kept for those who go first; several turns of a steward
ANSWER_S = 3.0  # to a Prepare or a Start: many LAN round trips, few for a user who waits
WANT_WITNESSES = 3


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
        self._promises: dict[bytes, Promised] = {}
        self._proposer: Proposer | None = None
        self._candidate: bytes | None = None
        self._declined: dict[bytes, str] = {}
        self._idle_since: float | None = None
        self._rival: tuple[bytes, float] | None = None
        self._passing_since: float | None = None
        self.detail = ""

    def observe(self, view: View, at: Instant) -> list[Effect]:
        """The mesh changed: who is alive, who offers what."""
        adverts_changed = self.view is None or view.adverts != self.view.adverts
        self.view = view
        if adverts_changed:
            self._declined.clear()
        if self.state == "waiting":
            return self._place(at)
        return self.act(at)

    def rival_seen(self, sender: bytes, at: Instant) -> None:
        """Another steward prepared or keeps the job waiting: it is its turn for a while."""
        if self.view is None or sender != self.view.me:
            self._rival = (sender, at.now)
            if self.state in {"preparing", "waiting", "offered"}:
                self._to_watching()

    def act(self, at: Instant) -> list[Effect]:
        """Look at the cell and do what is due; called whenever the cell or the view changed."""
        if self.view is None or self.state != "watching":
            return []
        if self.witness.finished or self.view.me not in self.witness.cell.config.nodes:
            self._tokens.cancel("turn")
            return []
        left = self.witness.lease_left_s(at.now)
        if left > 0:
            self._idle_since = None
            self._declined.clear()
            return [self._timer("turn", at.now + left + 0.01)]
        if self._idle_since is None:
            self._idle_since = at.now
        due = self._idle_since + self._place_in_line() * STAGGER_S
        if self._rival is not None and self._rival[0] in self.view.alive:
            due = max(due, self._rival[1] + PATIENCE_S + self._place_in_line() * STAGGER_S)
        if at.now < due:
            return [self._timer("turn", due)]
        return self._prepare(at)

    def handle(self, sender: bytes, message: Promised | Refused | Accepted | StartAnswer, at: Instant) -> list[Effect]:
        match message:
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
                closed = Closed(job=self.job, term=self._term, ledger=decided.ledger)
                self._to_watching()
                return [Send(node, closed) for node in decided.config.nodes]
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
                return self._prepare(at)
            case "answer", "preparing" | "finishing":
                self._to_watching()
                self._idle_since = at.now
                return [self._timer("turn", at.now + self._rng.uniform(0.2, 1.0))]
            case "heartbeat", "waiting":
                return self._place(at)
        return []

    # --- winning a term

    def _place_in_line(self) -> int:
        assert self.view is not None
        # Whoever is about to leave lets the others go first.
        line = [node for node in self.witness.cell.config.nodes if node in self.view.alive]
        leaving = self.view.leaving
        line.sort(key=lambda node: node in leaving)
        return line.index(self.view.me) if self.view.me in line else len(line)

    def _prepare(self, at: Instant) -> list[Effect]:
        self.state = "preparing"
        self._proposer = None
        self._promises = {}
        self._term = max(self.witness.cell.promised, self._seen_term, self._term) + 1
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
        if self.state == "preparing" and message.needs_spec:
            return self._install(Seat(sender, message.disk))
        if self.state == "preparing":
            self._to_watching()
            pause = max(message.lease_left_s, self._rng.uniform(0.1, 0.5) * (1 + self._place_in_line()))
            # It is still our turn, once the lease that we had not heard of is over.
            self._idle_since = at.now + pause - self._place_in_line() * STAGGER_S
            return [self._timer("turn", at.now + pause)]
        return []

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
        return [Send(seat.node, blank.introduction()), Send(seat.node, Prepare(job=self.job, term=self._term))]

    # --- using it

    def request(self, ledger: Ledger) -> Request:
        return placement_request(
            self.job, self.spec, ledger.next_attempt, ledger.excluded, ledger.avoided, ledger.prefer
        )

    def _place(self, at: Instant) -> list[Effect]:
        assert self.view is not None and self._proposer is not None
        proposer = self._proposer
        if self.held_back_by:
            return self._hold_back(at)
        request = self.request(proposer.ledger)
        adverts = [advert for advert in self.view.adverts if advert.node in self.view.staying]
        ranking = rank_nodes(request, adverts)
        open_to = [candidate for candidate in ranking.candidates if candidate.node not in self._declined]
        if not open_to:
            why = (
                "; ".join(sorted(set(self._declined.values()))) if ranking.candidates else explain(request, ranking)[0]
            )
            self._passing_since = None
            return self._wait(why, at)
        others_first = self._let_pass(request, adverts, at)
        if others_first is not None:
            ahead, fits = others_first
            open_to = [candidate for candidate in open_to if candidate.node in fits]
            if not open_to:
                return self._wait("1 other job goes first" if ahead == 1 else f"{ahead} other jobs go first", at)
        self._passing_since = None
        chosen = open_to[0]
        config = proposer.config
        if not config.previous:
            group = healthy_group(config, self.view, WANT_WITNESSES)
            if set(group) != set(config.members):
                config = config.joint(group, self._term)
        self.state = "offered"
        self._candidate = chosen.node
        start = Start(job=self.job, term=self._term, config=config, ledger=proposer.ledger, spec=self.witness.cell.spec)
        self._proposer = None
        return [
            Send(chosen.node, start),
            self._timer("answer", at.now + ANSWER_S),
            self._changed("starting", f"on {chosen.nick}"),
        ]

    @property
    def held_back_by(self) -> list[bytes]:
        """The jobs that it comes after, as far as they are not known to be done."""
        ends = self.view.ends if self.view is not None else {}
        return [job for job in self.spec.after if ends.get(job) != "done"]

    def _hold_back(self, at: Instant) -> list[Effect]:
        assert self.view is not None and self._proposer is not None
        for job in self.held_back_by:
            kind = self.view.ends.get(job)
            if kind is not None:
                words = f"{format_job(job)[:8]}, which it comes after, has {'failed' if kind == 'failed' else 'been cancelled'}"
                return self._finish(self._ended(self._proposer.ledger, "failed", words, at), at)
        return self._wait("after " + ", ".join(format_job(job)[:8] for job in self.held_back_by), at)

    def _let_pass(
        self, request: Request, adverts: Sequence[Advert], at: Instant
    ) -> tuple[int, frozenset[bytes]] | None:
        """How many jobs go first, and who can still take this one when they have gone. None if nobody is waited for: those
        who do not take what is kept for them lose it after a while, since they may be unable to act."""
        assert self.view is not None
        if self.view.queue is None:
            return None
        left, ahead = self.view.queue.left_for(waiting_place(self.spec, request), adverts)
        if not ahead:
            return None
        if self._passing_since is None:
            self._passing_since = at.now
        if at.now - self._passing_since > LET_PASS_S:
            return None
        return ahead, frozenset(candidate.node for candidate in rank_nodes(request, left).candidates)

    def _wait(self, why: str, at: Instant) -> list[Effect]:
        assert self._proposer is not None and self.view is not None
        self.state = "waiting"
        config = self._proposer.config
        group = healthy_group(config, self.view, WANT_WITNESSES)
        self._proposer.change_group(group)
        return [
            *self._proposer.propose(at.now),
            self._timer("heartbeat", at.now + HEARTBEAT_S),
            self._changed("pending", why),
        ]

    def _on_answer(self, sender: bytes, message: StartAnswer, at: Instant) -> list[Effect]:
        if sender != self._candidate:
            return []
        if message.taken:
            # The runner's first Accept now decides; if none comes, it is our turn again after a full lease.
            self._to_watching()
            self._idle_since = at.now + self.spec.lease_s
            return [self._timer("turn", at.now + self.spec.lease_s)]
        self._decline(sender, message.reason)
        return self._prepare(at)

    def _decline(self, node: bytes | None, reason: str) -> None:
        if node is not None:
            nick = next((ad.nick for ad in self.view.adverts if ad.node == node), "a node") if self.view else ""
            self._declined[node] = f"{nick}: {reason}"

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
        for name in ("answer", "heartbeat"):
            self._tokens.cancel(name)

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)

    def _changed(self, state: str, detail: str) -> StateChanged:
        self.detail = detail
        return StateChanged(state, detail)
