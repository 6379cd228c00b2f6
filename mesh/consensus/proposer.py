"""Proposer: carries a record, a group and a lease to the witnesses under one term, round by round (phase 2 of Paxos).

The leader uses it after it has prepared a term; the runner uses it under the term that the leader handed over. A round is one
`Accept` to every member of the group, and is decided when a quorum has accepted it. A change of the group takes a joint
round, which needs a majority of the old and of the new group, and then a round of the new group alone (Raft: Ongaro 2014,
section 4.3). So two groups never decide independently.

A group is named only once a majority of it has answered, and every newcomer has said that it can vote (a learner of Raft,
section 4.2.1): if the new group were lost, no later term could be won. If the joint round is not decided soon for want of the
new group's votes, the owner of the term goes back to the old group under a higher number. That is safe: the new group decides
alone only after this owner has seen the joint round decided, and whoever takes a higher term reads from a majority of the old
group.

A round renews the lease only when asked to, so that what a lost holder saved last does not delay its successor. The first
rounds of a group renew it in any case, until one is decided: who asks that group for a term may ask none of those that
granted the lease before.
"""

from collections.abc import Iterable, Set

import msgspec

from mesh.consensus.effects import Send
from mesh.consensus.messages import MOST_WARRANTS, Accept, Accepted, Introduce, Introduced, Refused
from mesh.consensus.view import View
from mesh.model.record import Config, JobRecord, Voter, majority


class Decided(msgspec.Struct, frozen=True):
    """A round that a quorum has accepted. If it `renews` the lease, that counts from `sent_at`."""

    sent_at: float
    record: JobRecord
    config: Config
    renews: bool


class Fenced(msgspec.Struct, frozen=True):
    """The term can decide nothing any more: too many voters have promised a higher one, or the job is over."""


WANT_WITNESSES = 3
ANSWER_S = 3.0  # for an answer: many LAN round trips, yet short for a user who waits
ASK_AGAIN_S = 1.0  # between questions to a newcomer, which carry the spec (own choice)
UNFIT_S, UNFIT_MAX_S = 15.0, 900.0  # that a node is not asked again to be a witness, doubled each time (own choice)
ROUND_BYTES = 4  # of the owner's name, for the number before the first round (own choice)
MAX_OPEN_ROUNDS = 8  # older rounds are dropped; a later round repeats their content


class Proposer:
    def __init__(
        self,
        job: bytes,
        spec: bytes,
        term: int,
        config: Config,
        record: JobRecord,
        holder: bytes | None,
        reconfiguration: bytes | None = None,
        warrant: bytes = b"",
        owner: bytes = b"",
        first_round: int = 0,
    ):
        self.reconfiguration = reconfiguration
        self._warrants = {b"": warrant} if warrant else {}  # by witness; the leader's first
        self.job = job
        self.owner = owner
        self.spec = spec
        self.term = term
        self.config = config
        self.record = record
        self.holder = holder
        self._removed: tuple[Voter, ...] = ()
        self._sought: tuple[Voter, ...] = ()  # the group that this one should become
        self._sought_at = self._ask_at = 0.0
        self._answered: set[Voter] = set()  # since that group was sought or named; of newcomers: that they can vote
        self._unfit: dict[bytes, tuple[float, float]] = {}  # until when a node is not asked, and for how long that was
        self._refusing: set[Voter] = set()  # for good: their promises and ends are never taken back
        # Answers to an earlier attempt or submission of this term, which come late, name none of its rounds.
        self._round = first_round or int.from_bytes(owner[:ROUND_BYTES])
        self._open: dict[int, tuple[Decided, set[Voter]]] = {}  # what each round decides, and who has accepted it
        self._granted_by: Config | None = None  # the group of the last decided round that renewed the lease
        self.renews = True  # the last round

    def propose(self, now: float, renew: bool = False) -> list[Send]:
        """Start a round with the present record, group and holder. It renews the lease if asked to, or if the group has not
        granted it yet, or if a round that renews it is undecided.
        """
        self._round += 1
        undecided = any(decided.renews for decided, _ in self._open.values())
        self.renews = renew or undecided or self._granted_by != self.config
        if self.config.previous and not self._sought_at:
            self._sought_at = now  # a joint group of an earlier term
        self._open[self._round] = (Decided(now, self.record, self.config, self.renews), set())
        while len(self._open) > MAX_OPEN_ROUNDS:
            del self._open[min(self._open)]
        audience = dict.fromkeys([*self.config.nodes, *(voter.node for voter in self._removed)])
        new = {voter.node for voter in self._newcomers if voter not in self._answered}
        return [Send(node, self._accept(with_spec=node in new)) for node in audience]

    def clock_stood(self) -> None:
        """Count no answers to earlier rounds: the lease that they grant may be over."""
        self._open.clear()
        self._granted_by = None

    def asks(self, node: bytes) -> bool:
        """Tell whether this node is asked to accept rounds: answers of others count for nothing."""
        return node in self.config.nodes or any(voter.node == node for voter in self._removed)

    def introduction(self) -> Accept:
        """Return the message that makes a node without a record of the job a witness."""
        return self._accept(with_spec=True)

    # --- the group

    @property
    def _newcomers(self) -> list[Voter]:
        return [voter for voter in self.config.members if voter not in self.config.previous and self.config.previous]

    def regroup(self, view: View, now: float, patience_s: float = ANSWER_S) -> list[Send]:
        """Bring the group towards its healthy members, step by step; call it when something may have changed, and regularly."""
        if self.config.previous:
            return self._go_back(now) if now - self._sought_at >= patience_s else []
        unfit = {node for node, (until, _) in self._unfit.items() if now < until}
        members = healthy_group(self.job, self.config, view, WANT_WITNESSES, unfit)
        if set(members) == set(self.config.members):
            self._sought = ()
            return []
        if members != self._sought:
            self._sought, self._sought_at, self._ask_at, self._answered = members, now, now, set()
        missing = [voter for voter in members if voter not in self.config.members and voter not in self._answered]
        if missing and now - self._sought_at >= ANSWER_S:
            self._pass_over(missing, now)
            return self.regroup(view, now, patience_s)
        if not missing and majority(members, self._answered):
            self.config, self._sought_at, self._answered = self.config.joint(members, self.term), now, set()
            return self.propose(now)
        if now < self._ask_at:
            return []
        self._ask_at = now + ASK_AGAIN_S
        introduce = Introduce(job=self.job, spec=self.spec)
        return [*self.propose(now), *(Send(voter.node, introduce) for voter in missing)]

    def on_introduced(self, sender: bytes, message: Introduced, now: float) -> None:
        """Count a newcomer's answer; `regroup` continues."""
        voter = Voter(sender, message.disk)
        if voter in self._sought and not message.problem:
            self._answered.add(voter)
        elif any(sought.node == sender for sought in self._sought):
            self._pass_over([voter], now)

    def _go_back(self, now: float) -> list[Send]:
        """Give up a joint group whose new members do not vote, unless the old group is what lacks votes."""
        if majority(self.config.members, self._answered):
            return []
        self._removed = tuple(self._newcomers)
        self._pass_over([voter for voter in self._newcomers if voter not in self._answered], now)
        self.config = Config(self.config.number + 1, self.term, self.config.previous)
        return self.propose(now)

    def _pass_over(self, voters: Iterable[Voter], now: float) -> None:
        for voter in voters:
            pause_s = min(UNFIT_MAX_S, 2 * self._unfit[voter.node][1]) if voter.node in self._unfit else UNFIT_S
            self._unfit[voter.node] = (now + pause_s, pause_s)

    # --- answers

    def on_accepted(self, sender: bytes, message: Accepted) -> Decided | None:
        if message.term == self.term:
            self.config.count(self._answered, Voter(sender, message.disk))
        entry = self._open.get(message.round) if message.term == self.term else None
        if entry is None:
            return None
        decided, acks = entry
        config = decided.config
        if message.warrant and sender in self.config.nodes:
            self._warrants = {node: kept for node, kept in self._warrants.items() if self.asks(node) or not node}
            self._warrants[sender] = message.warrant
        config.count(acks, Voter(sender, message.disk))
        if not config.quorum(acks):
            return None
        for number in [number for number in self._open if number <= message.round]:
            del self._open[number]
        if decided.renews:
            self._granted_by = config
        if config.previous and self.config == config:
            # Voters that were replaced learn it from the next rounds, and stop leading the job.
            self._removed = tuple(voter for voter in config.previous if voter not in config.members)
            self.config = config.settled()
        return decided

    def on_refused(self, sender: bytes, message: Refused) -> list[Send] | Fenced:
        if message.term != self.term:
            return []
        if message.needs_spec:
            seated = Voter(sender, message.disk) in self.config.everyone
            return [Send(sender, self._accept(with_spec=True))] if seated else []
        if message.finished or message.promised > self.term:
            # A partitioned minority may have promised any term, and one witness may lie about an end or a later group: they
            # count only when the others form no quorum.
            self.config.count(self._refusing, Voter(sender, message.disk))
            if not self.config.quorum(set(self.config.everyone) - self._refusing):
                return Fenced()
        return []

    def _accept(self, with_spec: bool) -> Accept:
        return Accept(
            job=self.job,
            term=self.term,
            round=self._round,
            config=self.config,
            record=self.record,
            holder=self.holder,
            owner=self.owner,
            spec=self.spec if with_spec else None,
            reconfiguration=self.reconfiguration,
            warrants=tuple(self._warrants.values())[:MOST_WARRANTS],
            renews=self.renews,
        )


def healthy_group(
    job: bytes, config: Config, view: View, want: int, unfit: Set[bytes] = frozenset()
) -> tuple[Voter, ...]:
    """Return the voters that this group should have: members that stay and kept their disks, then the best other nodes that
    are not `unfit`.

    The size is odd and at most `want`. A group grows when nodes appear, and shrinks only when nobody can replace a member
    that leaves.
    """

    def keeps_promises(voter: Voter) -> bool:
        return view.disks.get(voter.node, voter.disk) == voter.disk

    kept = [voter for voter in config.members if voter.node in view.staying and keeps_promises(voter)]
    group = kept[:want]
    if len(group) < want:
        taken = {voter.node for voter in kept}
        fresh = [node for node in view.witnesses(job) if node in view.disks and node not in taken | unfit]
        group += [Voter(node, view.disks[node]) for node in fresh[: want - len(group)]]
    if len(group) % 2 == 0:
        # An even group tolerates no more failures than the odd one below it: keep an old member, or drop one.
        taken = {voter.node for voter in group}
        old = [voter for voter in config.members if voter.node not in taken]
        old.sort(key=lambda voter: (not keeps_promises(voter), voter.node not in view.alive))
        group = group + old[:1] if old else group[:-1]
    return tuple(group)
