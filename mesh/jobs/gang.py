"""A job on several nodes at once: its leader, who is the runner and alone holds the lease, and the mates it has called up.

All or nothing: mates keep a place for a few seconds, and nobody starts before enough have one. A mate asks its leader, three
times a lease, how long the lease still runs, and counts from its own asking; so no mate outlives the leader's right to run.
When one is lost, fails or leaves, all get notice, the leader saves, and the attempt ends; the next one calls up whoever is
there then, from the least to the most nodes the job may have. No I/O.
"""

import math
from collections.abc import Iterable

import msgspec

from mesh.jobs.contract import ExitFacts, judge
from mesh.jobs.effects import Effect, Ended, Kill, Launch, Notify, RunUntil, Send, SetTimer, StateChanged
from mesh.jobs.ledger import Ledger
from mesh.jobs.messages import Begin, Dismiss, Enlist, Enlisted, Leaving, MateEnded, MayRun, Post, Run
from mesh.jobs.spec import JobSpec
from mesh.jobs.view import Instant, Timer, TimerTokens
from mesh.jobs.witness import RATE_BOUND

GATHER_S = (
    4.0  # for mates to answer; then whoever has a place is enough, or all let go. A LAN round trip takes milliseconds
)
KEPT_S = 3 * GATHER_S  # a place for a leader that does not begin
LATE_S = 5.0  # mates may end later than the leader's guest without being sent away
ASKS_PER_LEASE = 3  # as the leader's own renewals
FORSAKEN_LEASES = 3  # without a word of its leader a mate gives up


class Mate(msgspec.Struct):
    """`runs_until`: its guest stands still after that, by the leader's clock. `asked`: how often it has asked for more time, and
    `asked_before` how often when there was the first trouble. `code` is its exit status once it has ended; `trouble` says why
    the gang cannot go on with it."""

    node: bytes
    nick: str
    joined: bool = False
    rank: int = 0
    heard_at: float = 0.0
    runs_until: float = 0.0
    asked: int = 0
    asked_before: int = 0
    ended: bool = False
    code: int = 0
    trouble: str = ""


class Gang:
    """The mates, as their leader sees them."""

    def __init__(self, job: bytes, spec: JobSpec, spec_bytes: bytes, term: int) -> None:
        self.job, self.spec, self.term = job, spec, term
        self._spec_bytes = spec_bytes
        self._mates: dict[bytes, Mate] = {}
        self._declined: set[bytes] = set()
        self._until: float | None = None
        self._dismissed = self._disbanded = False
        self._troubled = False
        self._begun = False

    @property
    def mates(self) -> list[Mate]:
        """Those who have a place, by rank once they have begun."""
        return sorted((mate for mate in self._mates.values() if mate.joined), key=lambda mate: mate.rank)

    # --- gathering

    def gather(self, candidates: Iterable[tuple[bytes, str]], ledger: Ledger, at: Instant) -> list[Send]:
        """Ask the best of these, as many as are still wanted; and again those who have not answered."""
        if self._until is None:
            self._until = at.now + GATHER_S
        wanted = self.spec.most_nodes - 1 - len(self._mates)
        fresh = [(node, nick) for node, nick in candidates if node not in self._mates and node not in self._declined]
        enlist = Enlist(job=self.job, term=self.term, number=ledger.next_attempt - 1, spec=self._spec_bytes)
        for node, nick in fresh[: max(0, wanted)]:
            self._mates[node] = Mate(node, nick)
        return [Send(mate.node, enlist) for mate in self._mates.values() if not mate.joined]

    def on_enlisted(self, sender: bytes, message: Enlisted, at: Instant) -> list[Send]:
        mate = self._mates.get(sender)
        if mate is None or self._begun:
            # Too late: it keeps a place for nothing.
            known = mate is not None and mate.joined
            return [] if known or not message.taken else [Send(sender, self._dismissal(0.0, "it came too late"))]
        if message.taken:
            mate.joined, mate.heard_at = True, at.now
        else:
            del self._mates[sender]
            self._declined.add(sender)
        return []

    def gathered(self, now: float) -> bool | None:
        """Whether there are enough; None while it may still get better."""
        joined = 1 + len(self.mates)
        if self._until is None:
            return None
        if joined >= self.spec.most_nodes:
            return True
        return None if now < self._until else joined >= self.spec.least_nodes

    def begin(self, host: str, port: int, ledger: Ledger, at: Instant) -> tuple[Post, list[Send]]:
        """Everybody's place; the leader's own is the first."""
        self._begun = True
        late = [mate for mate in self._mates.values() if not mate.joined]
        size = 1 + len(self.mates)
        sends = [Send(mate.node, self._dismissal(0.0, "others were quicker")) for mate in late]
        for rank, mate in enumerate(sorted(self.mates, key=lambda mate: mate.node), 1):
            mate.rank, mate.heard_at = rank, at.now
            begin = Begin(job=self.job, term=self.term, post=Post(rank, size, host, port), ledger=ledger)
            sends.append(Send(mate.node, begin))
        self._mates = {mate.node: mate for mate in self._mates.values() if mate.joined}
        return Post(0, size, host, port), sends

    # --- under way

    def on_may_run(self, sender: bytes, message: MayRun, left_s: float, at: Instant) -> list[Send]:
        mate = self._mates.get(sender)
        if mate is None or not self._begun:
            return [Send(sender, self._dismissal(0.0, "it is not called up"))]
        mate.heard_at = at.now
        mate.asked += 1
        if self._disbanded:
            return [Send(sender, self._dismissal(0.0, "its attempt is over"))]
        mate.runs_until = max(mate.runs_until, at.now + left_s)
        return [Send(sender, Run(job=self.job, term=self.term, round=message.round, left_s=max(0.0, left_s)))]

    def on_ended(self, sender: bytes, message: MateEnded, at: Instant) -> None:
        mate = self._mates.get(sender)
        if mate is None or mate.ended:
            return
        mate.ended, mate.heard_at = True, at.now
        if self._dismissed:
            # As it was told to. But if one has failed, it may be the one that failed first, and is heard of last.
            if self.failed and not message.problem and judge(_at_notice(message.code)) == "failed":
                mate.code = message.code
            return
        mate.code, mate.trouble = message.code, mate.trouble or message.problem
        if message.code:
            self._trouble()

    def on_leaving(self, sender: bytes, message: Leaving) -> None:
        mate = self._mates.get(sender)
        if mate is not None:
            mate.trouble = mate.trouble or message.reason

    def look(self, now: float) -> None:
        """Notice who has fallen silent."""
        for mate in self._mates.values():
            if not mate.ended and not mate.trouble and now - mate.heard_at > self.spec.lease_s:
                mate.trouble = "lost"

    @property
    def broken(self) -> str:
        """Why the gang cannot go on, through no fault of the job's own; empty if it can."""
        return next((f"{mate.nick}: {mate.trouble}" for mate in self.mates if mate.trouble), "")

    @property
    def failed(self) -> list[tuple[str, int]]:
        """The mates whose guests failed, and how. They may have failed since another was lost: see `sure`."""
        return [(mate.nick, mate.code) for mate in self.mates if mate.ended and mate.code]

    def sure(self) -> bool:
        """Whether every mate is known to run since the first sign of trouble, to have ended, or to be lost: a guest whose peers
        have gone fails too, and that is not its fault. The first word after that may have been sent before, the second not."""
        self._trouble()
        return all(mate.ended or mate.trouble or mate.asked >= mate.asked_before + 2 for mate in self._mates.values())

    def _trouble(self) -> None:
        if not self._troubled:
            self._troubled = True
            for mate in self._mates.values():
                mate.asked_before = mate.asked

    def dismiss(self, grace_s: float, reason: str) -> list[Send]:
        """Send everybody away who has not ended: with notice, if there is grace."""
        self._dismissed = True
        return [Send(mate.node, self._dismissal(grace_s, reason)) for mate in self._mates.values() if not mate.ended]

    def disband(self) -> list[Send]:
        """The attempt is over: send everybody away at once, and let nobody run any longer than he has been told he may."""
        self._disbanded = True
        return self.dismiss(0.0, "its attempt is over")

    def quiet(self, now: float) -> bool:
        """Whether no mate computes any more: only then may another attempt begin, and the lease be given back."""
        return all(mate.ended or now >= mate.runs_until for mate in self._mates.values())

    def _dismissal(self, grace_s: float, reason: str) -> Dismiss:
        return Dismiss(job=self.job, term=self.term, grace_s=grace_s, reason=reason)


def _at_notice(code: int) -> ExitFacts:
    return ExitFacts(code, oom=False, vacating=True, has_checkpoints=True, forced_done=False, on_exit_0="done")


class Member:
    """One mate's own part: its place, its guest, its leader's word."""

    def __init__(self, leader: bytes, enlist: Enlist, spec: JobSpec) -> None:
        self.leader = leader
        self.job, self.term, self.spec = enlist.job, enlist.term, spec
        self.spec_bytes = enlist.spec
        self.state = "enlisted"
        self.until = 0.0
        self._tokens = TimerTokens(enlist.term)
        self._asked: dict[int, float] = {}
        self._round = 0
        self._heard_at = 0.0
        self._end: MateEnded | None = None
        self._leaving = ""  # why, if its owner wants it gone

    def begin(self, at: Instant) -> list[Effect]:
        """Keep the place, for a while."""
        return [self._timer("kept", at.now + KEPT_S)]

    def on_begin(self, message: Begin, at: Instant) -> list[Effect]:
        if self.state != "enlisted":
            return []
        self.state = "restoring"
        self._tokens.cancel("kept")
        self._heard_at = at.now
        return [*self._ask(at), Launch(message.ledger, message.post), StateChanged("starting", "in a gang")]

    def on_run(self, message: Run, at: Instant) -> list[Effect]:
        asked_at = self._asked.pop(message.round, None)
        if asked_at is None or self._end is not None:
            return []
        self._heard_at = at.now
        left_s = message.left_s if math.isfinite(message.left_s) else 0.0
        until = asked_at + min(left_s, self.spec.lease_s) * (1 - RATE_BOUND)
        if until <= max(self.until, at.now):
            return []  # it came too late to mean anything
        self.until = until
        return [RunUntil(until if self.spec.on_partition == "freeze" else math.inf)]

    def on_dismiss(self, message: Dismiss, at: Instant) -> list[Effect]:
        if message.grace_s > 0 and self.state != "enlisted":
            return self._notice(message.grace_s, message.reason, at)
        if self._end is None and self._guest_may_run:
            self.state = "ending"
            return [Kill(message.reason)]
        ended = MateEnded(job=self.job, term=self.term, code=0)
        return [Send(self.leader, ended), *self._over(message.reason)]

    def on_timer(self, timer: Timer, at: Instant) -> list[Effect]:
        if not self._tokens.is_current(timer) or self.state == "ended":
            return []
        match timer.name:
            case "kept":
                return self._over("its leader did not begin")
            case "grace":
                return [Kill("grace of the notice is over")]
            case "ask" if at.now - self._heard_at > FORSAKEN_LEASES * self.spec.lease_s:
                return [Kill("its leader is gone"), *self._over("its leader is gone")]
            case "ask" if self._end is not None:
                return [Send(self.leader, self._end), self._timer("ask", at.now + self._pause_s)]
            case "ask":
                return self._ask(at)
        return []

    def started(self) -> list[Effect]:
        self._guest_may_run = True
        if self.state == "ending":
            return [Kill("its gang has ended")]
        self.state = "running"
        return [StateChanged("running", "in a gang")]

    def exited(self, code: int, problem: str, at: Instant) -> list[Effect]:
        """Its guest has ended, or could not start (`problem`): the leader decides what that means."""
        self._end = MateEnded(job=self.job, term=self.term, code=code, problem=problem or self._leaving)
        self._tokens.cancel("grace")
        told = Send(self.leader, self._end)
        return (
            [told, *self._over("done")]
            if self.state == "ending"
            else [told, self._timer("ask", at.now + self._pause_s)]
        )

    def vacate(self, grace_s: float, reason: str, at: Instant) -> list[Effect]:
        """Its owner wants the machine back: the whole gang has to know."""
        self._leaving = self._leaving or reason
        leaving = Send(self.leader, Leaving(job=self.job, term=self.term, grace_s=grace_s, reason=reason))
        if self.state == "enlisted":
            return [leaving, *self._over(reason)]
        return [leaving, *self._notice(grace_s, reason, at)] if grace_s > 0 else [leaving, Kill(reason)]

    _guest_may_run = False

    @property
    def _pause_s(self) -> float:
        return self.spec.lease_s / ASKS_PER_LEASE

    def _notice(self, grace_s: float, reason: str, at: Instant) -> list[Effect]:
        if self.state != "running":
            return []
        self.state = "vacating"
        return [Notify("vacate", grace_s, reason), self._timer("grace", at.now + grace_s)]

    def _ask(self, at: Instant) -> list[Effect]:
        self._round += 1
        self._asked[self._round] = at.now
        self._asked.pop(self._round - 8, None)
        may_run = MayRun(job=self.job, term=self.term, round=self._round)
        return [Send(self.leader, may_run), self._timer("ask", at.now + self._pause_s)]

    def _over(self, reason: str) -> list[Effect]:
        self.state = "ended"
        return [Ended(reason)]

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)
