"""Gang: a job on several nodes at once. Its runner alone holds the lease; the other nodes are gang members.

A gang starts all or nothing: members reserve a place for a few seconds, and no guest starts before enough have one. A member
asks its runner three times per lease how long the lease still runs, and counts from its own question, so no member outlives
the runner's right to run. When a member is lost, fails or leaves, all members get notice, the runner saves, and the attempt
ends. The next attempt enlists the nodes available then, from the least to the most that the job may have. No I/O.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from membership.lengths import shortened
from mesh.consensus.contract import ExitFacts, judge
from mesh.consensus.effects import Effect, Ended, Kill, Launch, Notify, RunUntil, Send, SetTimer, StateChanged
from mesh.consensus.messages import (
    Begin,
    Dismiss,
    Enlist,
    Enlisted,
    ExtendRun,
    GangPlace,
    MemberEnded,
    MemberLeaving,
    RunGranted,
)
from mesh.consensus.view import Instant, Timer, TimerTokens
from mesh.consensus.witness import HELD_SHARE
from mesh.model.record import JobRecord
from mesh.model.spec import JobSpec, format_job

GATHER_S = 4.0  # for members to answer: a LAN round trip takes milliseconds
ASK_AGAIN_S = 1.0  # after a node declined: another gang may have given its place back
KEPT_S = 3 * GATHER_S  # that a place is reserved for a runner that does not begin
ASKS_PER_LEASE = 3  # as often as the runner renews
RANKS_TOLD, RANK_TOLD = 4, 150  # failed ranks in a reason, and characters of each (own choice)
FORSAKEN_LEASES = 3  # a member without an answer gives up


def gang_turn(job: bytes, spec: JobSpec) -> tuple[int, int, bytes]:
    """Return the key by which gangs that gather at once go first, lowest first: the same on every node, whatever its view."""
    return -spec.priority, spec.created_unix_ms, job


class MemberState(msgspec.Struct):
    """The runner's view of one member.

    Its guest freezes after `runs_until`, by the runner's clock. `asked` counts its questions, and `asked_before` those before
    the first trouble. `code` is its exit status once it has ended, and `how` says more. `trouble` tells why the gang cannot
    continue with it.
    """

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
    how: str = ""
    trouble: str = ""


class RankFailed(NamedTuple):
    """The failure of one rank's guest; `how` it ended, in words."""

    rank: int
    nick: str
    code: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.nick}: {self.how or f'exit {self.code}'}"


def of_ranks(failed: Sequence[RankFailed], job: bytes) -> str:
    """Say how the ranks failed, and which command shows the output of the first that is not rank 0."""
    words = [shortened(str(one), RANK_TOLD) for one in failed[:RANKS_TOLD]]
    words += [f"and {len(failed) - RANKS_TOLD} more"] if len(failed) > RANKS_TOLD else []
    other = next((one.rank for one in failed if one.rank), 0)
    words += [f"see `mesh logs --rank {other} {format_job(job)[:8]}`"] if other else []
    return "; ".join(words)


class Gang:
    """The members of a gang, as seen by their runner."""

    def __init__(self, job: bytes, spec: JobSpec, spec_bytes: bytes, term: int) -> None:
        self.job, self.spec, self.term = job, spec, term
        self._spec_bytes = spec_bytes
        self._members: dict[bytes, MemberState] = {}
        self._declined: dict[bytes, float] = {}  # when
        self._until: float | None = None
        self._dismissed: tuple[float, str] | None = None  # until when members may save, and why
        self._disbanded = False
        self._troubled = False
        self._begun = False

    @property
    def members(self) -> list[MemberState]:
        """Return the members that have a place, by rank once they have begun."""
        return sorted((member for member in self._members.values() if member.joined), key=lambda member: member.rank)

    # --- gathering

    def gather(self, candidates: Iterable[tuple[bytes, str]], record: JobRecord, at: Instant) -> list[Send]:
        """Enlist the best candidates that are still wanted, and ask those again that have not answered."""
        if self._until is None:
            self._until = at.now + GATHER_S
        wanted = self.spec.most_nodes - 1 - len(self._members)
        asked = {*self._members, *(node for node, since in self._declined.items() if at.now < since + ASK_AGAIN_S)}
        fresh = [(node, nick) for node, nick in candidates if node not in asked]
        enlist = Enlist(job=self.job, term=self.term, number=record.next_attempt - 1, spec=self._spec_bytes)
        for node, nick in fresh[: max(0, wanted)]:
            self._members[node] = MemberState(node, nick)
        return [Send(member.node, enlist) for member in self._members.values() if not member.joined]

    def on_enlisted(self, sender: bytes, message: Enlisted, at: Instant) -> list[Send]:
        member = self._members.get(sender)
        if member is None or self._begun:
            # Too late: it reserves a place in vain.
            known = member is not None and member.joined
            return [] if known or not message.taken else [Send(sender, self._dismissal(0.0, "it came too late"))]
        if message.taken:
            member.joined, member.heard_at = True, at.now
        else:
            del self._members[sender]
            self._declined[sender] = at.now
        return []

    def gathered(self, now: float) -> bool | None:
        """Tell whether enough members have a place; None while more may come."""
        joined = 1 + len(self.members)
        if self._until is None:
            return None
        if joined >= self.spec.most_nodes:
            return True
        return None if now < self._until else joined >= self.spec.least_nodes

    def begin(self, host: str, port: int, record: JobRecord, at: Instant) -> tuple[GangPlace, list[Send]]:
        """Return the runner's own place, which is the first, and the messages that give the others theirs."""
        self._begun = True
        late = [member for member in self._members.values() if not member.joined]
        size = 1 + len(self.members)
        sends = [Send(member.node, self._dismissal(0.0, "others were quicker")) for member in late]
        for rank, member in enumerate(sorted(self.members, key=lambda member: member.node), 1):
            member.rank, member.heard_at = rank, at.now
            begin = Begin(job=self.job, term=self.term, place=GangPlace(rank, size, host, port), record=record)
            sends.append(Send(member.node, begin))
        self._members = {member.node: member for member in self._members.values() if member.joined}
        return GangPlace(0, size, host, port), sends

    # --- under way

    def on_may_run(self, sender: bytes, message: ExtendRun, left_s: float, at: Instant) -> list[Send]:
        member = self._members.get(sender)
        if member is None or not self._begun:
            return [Send(sender, self._dismissal(0.0, "it is not called up"))]
        member.heard_at = at.now
        member.asked += 1
        if self._disbanded or member.ended:  # late copies of its orders can make it begin again
            return [Send(sender, self._dismissal(0.0, "its attempt is over"))]
        member.runs_until = max(member.runs_until, at.now + left_s)
        granted = Send(sender, RunGranted(job=self.job, term=self.term, round=message.round, left_s=max(0.0, left_s)))
        if self._dismissed is None:
            return [granted]
        until, reason = self._dismissed
        return [granted, Send(sender, self._dismissal(max(0.0, until - at.now), reason))]  # the first may be lost

    def on_ended(self, sender: bytes, message: MemberEnded, at: Instant) -> None:
        member = self._members.get(sender)
        if member is None or member.ended:
            return
        member.ended, member.heard_at = True, at.now
        if self._dismissed:
            # As ordered. But if a member has failed, this one may have failed first and be reported last.
            if self.failed and not message.problem and judge(_at_notice(message.code)) == "failed":
                member.code, member.how = message.code, message.how
            return
        member.code, member.how = message.code, message.how
        member.trouble = member.trouble or message.problem
        if message.code:
            self._trouble()

    def on_leaving(self, sender: bytes, message: MemberLeaving) -> None:
        member = self._members.get(sender)
        if member is not None:
            member.trouble = member.trouble or message.reason

    def look(self, now: float) -> None:
        """Mark members that have been silent for a lease as lost."""
        for member in self._members.values():
            if not member.ended and not member.trouble and now - member.heard_at > self.spec.lease_s:
                member.trouble = "lost"

    @property
    def broken(self) -> str:
        """Return why the gang cannot continue, through no fault of the job; empty if it can."""
        troubled = (member for member in self.members if member.trouble)
        return next((f"{_where(member.rank, member.nick)}: {member.trouble}" for member in troubled), "")

    @property
    def failed(self) -> list[RankFailed]:
        """Return the members whose guests failed. Another member may have been lost before: see `sure`."""
        failed = (member for member in self.members if member.ended and member.code)
        return [RankFailed(member.rank, member.nick, member.code, member.how) for member in failed]

    @property
    def running(self) -> list[str]:
        """Return the nicks of the members whose guests are not known to have ended."""
        return [member.nick for member in self.members if not member.ended]

    def sure(self) -> bool:
        """Tell whether each member is known to run since the first trouble, to have ended, or to be lost.

        A guest whose peers are lost fails too, and is not to blame. The first question after the trouble may have been sent
        before it; the second was not.
        """
        self._trouble()
        return all(
            member.ended or member.trouble or member.asked >= member.asked_before + 2
            for member in self._members.values()
        )

    def _trouble(self) -> None:
        if not self._troubled:
            self._troubled = True
            for member in self._members.values():
                member.asked_before = member.asked

    def dismiss(self, grace_s: float, reason: str, now: float) -> list[Send]:
        """Dismiss every member that has not ended, with notice."""
        before = self._dismissed or (0.0, reason)
        self._dismissed = max(before[0], now + grace_s), before[1]
        return self._to_all(self._dismissal(grace_s, reason))

    def disband(self) -> list[Send]:
        """The attempt is over: dismiss all members at once and extend nobody's time."""
        over = "its attempt is over"
        self._disbanded, self._dismissed = True, self._dismissed or (0.0, over)
        return self._to_all(self._dismissal(0.0, over))

    def _to_all(self, dismissal: Dismiss) -> list[Send]:
        return [Send(member.node, dismissal) for member in self._members.values() if not member.ended]

    def quiet(self, now: float) -> bool:
        """Tell whether no member computes any more: only then may the lease be released and another attempt begin."""
        return all(member.ended or now >= member.runs_until for member in self._members.values())

    def _dismissal(self, grace_s: float, reason: str) -> Dismiss:
        return Dismiss(job=self.job, term=self.term, grace_s=grace_s, reason=shortened(reason))


def _where(rank: int, nick: str) -> str:
    return f"rank {rank} on {nick}" if rank else nick  # members have no rank before they begin


def _at_notice(code: int) -> ExitFacts:
    return ExitFacts(code, oom=False, vacating=True, has_checkpoints=True, forced_done=False, on_exit_0="done")


class GangMember:
    """One member's own part: its place, its guest, and what its runner allows.

    Its rounds count from `first_round`, a random number: so a late answer to an earlier life of the member allows nothing.
    """

    def __init__(self, runner: bytes, enlist: Enlist, spec: JobSpec, first_round: int = 0) -> None:
        self.runner = runner
        self.job, self.term, self.spec = enlist.job, enlist.term, spec
        self.spec_bytes = enlist.spec
        self.state = "enlisted"
        self.until = 0.0
        self._tokens = TimerTokens(enlist.term)
        self._asked: dict[int, float] = {}
        self._round = first_round
        self._heard_at = 0.0
        self._end: MemberEnded | None = None
        self._leaving = ""  # why the owner or the runner wants the guest to leave: its end is not its fault then

    def begin(self, at: Instant) -> list[Effect]:
        """Keep the place for a while."""
        return [self._timer("kept", at.now + KEPT_S)]

    def on_begin(self, message: Begin, at: Instant) -> list[Effect]:
        if self.state != "enlisted":
            return []
        self.state = "restoring"
        self._tokens.cancel("kept")
        self._heard_at = at.now
        return [*self._ask(at), Launch(message.record, message.place), StateChanged("starting", "in a gang")]

    def on_run(self, message: RunGranted, at: Instant) -> list[Effect]:
        asked_at = self._asked.pop(message.round, None)
        if asked_at is None or self._end is not None:
            return []
        self._heard_at = at.now
        until = asked_at + min(message.left_s, self.spec.lease_s) * HELD_SHARE
        if until <= max(self.until, at.now):
            return []  # the answer came too late
        self.until = until
        return [RunUntil(until if self.spec.on_partition == "freeze" else math.inf)]

    def clock_stood(self, at: Instant) -> list[Effect]:
        """Ask again, since what the runner allowed may be over."""
        self._asked.clear()
        self.until = min(self.until, at.now)
        if self.state in {"enlisted", "ended"} or self._end is not None:
            return []
        return [RunUntil(at.now if self.spec.on_partition == "freeze" else math.inf), *self._ask(at)]

    def on_dismiss(self, message: Dismiss, at: Instant) -> list[Effect]:
        self._leaving = self._leaving or message.reason  # may be a late copy: then the runner knows nothing of it
        if message.grace_s > 0 and self.state != "enlisted":
            return self._notice(message.grace_s, message.reason, at)
        if self._end is None and self._guest_may_run:
            self.state = "ending"
            return [Kill(message.reason)]
        ended = self._end or MemberEnded(job=self.job, term=self.term, code=0, problem=self._leaving)
        return [Send(self.runner, ended), *self._over(message.reason)]

    def on_timer(self, timer: Timer, at: Instant) -> list[Effect]:
        if not self._tokens.is_current(timer) or self.state == "ended":
            return []
        match timer.name:
            case "kept":
                return self._over("its runner did not begin")
            case "grace":
                return [Kill("grace of the notice is over")]
            case "ask" if at.now - self._heard_at > FORSAKEN_LEASES * self.spec.lease_s:
                return [Kill("its runner is gone"), *self._over("its runner is gone")]
            case "ask" if self._end is not None:
                return [Send(self.runner, self._end), self._timer("ask", at.now + self._pause_s)]
            case "ask":
                return self._ask(at)
        return []

    def started(self) -> list[Effect]:
        self._guest_may_run = True
        self.state = "running"
        return [StateChanged("running", "in a gang")]

    def exited(self, code: int, problem: str, at: Instant, how: str = "") -> list[Effect]:
        """The guest has ended, or could not start here (`problem`); the runner decides what that means."""
        problem = shortened(problem or self._leaving)
        self._end = MemberEnded(job=self.job, term=self.term, code=code, problem=problem, how=shortened(how))
        self._tokens.cancel("grace")
        report = Send(self.runner, self._end)
        return (
            [report, *self._over("done")]
            if self.state == "ending"
            else [report, self._timer("ask", at.now + self._pause_s)]
        )

    def vacate(self, grace_s: float, reason: str, at: Instant) -> list[Effect]:
        """The machine's owner wants it back: the runner must tell the whole gang."""
        self._leaving = self._leaving or reason
        message = MemberLeaving(job=self.job, term=self.term, grace_s=grace_s, reason=shortened(reason))
        leaving = Send(self.runner, message)
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
        may_run = ExtendRun(job=self.job, term=self.term, round=self._round)
        return [Send(self.runner, may_run), self._timer("ask", at.now + self._pause_s)]

    def _over(self, reason: str) -> list[Effect]:
        self.state = "ended"
        return [Ended(reason)]

    def _timer(self, name: str, at: float) -> SetTimer:
        return SetTimer(name, self._tokens.fresh(name), at)
