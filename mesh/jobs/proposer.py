"""The owner of a term: carries a ledger, a config and a lease to the witness group, round by round.

Used by the steward (which prepares a term and may end a job with it) and by the runner (which holds the lease under the
term it was handed). A round is one `Accept` to everyone in the config; it is decided when a quorum answered it. A config
change goes through a joint round first, then a settled one.
"""

import msgspec

from mesh.jobs.effects import Send
from mesh.jobs.ledger import Config, Ledger, Seat
from mesh.jobs.messages import Accept, Accepted, Refused
from mesh.jobs.view import View


class Decided(msgspec.Struct, frozen=True):
    """A quorum holds this ledger and config; a lease taken with it counts from `sent_at`."""

    sent_at: float
    ledger: Ledger
    config: Config


class Fenced(msgspec.Struct, frozen=True):
    """A higher term was promised by so many that this one decides nothing any more, or the job is over."""

    promised: int
    finished: Ledger | None


MAX_OPEN_ROUNDS = 8  # older ones are forgotten; a later round says all that they said


class Proposer:
    def __init__(
        self,
        job: bytes,
        spec: bytes,
        term: int,
        config: Config,
        ledger: Ledger,
        holder: bytes | None,
        mandate: bytes | None = None,
    ):
        self.mandate = mandate
        self.job = job
        self.spec = spec
        self.term = term
        self.config = config
        self.ledger = ledger
        self.holder = holder
        self._removed: tuple[Seat, ...] = ()
        self._promised_higher: dict[Seat, int] = {}
        self._round = 0
        self._open: dict[int, tuple[float, Ledger, Config, set[Seat]]] = {}

    def propose(self, now: float) -> list[Send]:
        """Begin a round with the present ledger, config and holder."""
        self._round += 1
        self._open[self._round] = (now, self.ledger, self.config, set())
        while len(self._open) > MAX_OPEN_ROUNDS:
            del self._open[min(self._open)]
        audience = dict.fromkeys([*self.config.nodes, *(seat.node for seat in self._removed)])
        return [Send(node, self._accept(with_spec=False)) for node in audience]

    def introduction(self) -> Accept:
        """What makes a node that has never heard of the job a witness of it."""
        return self._accept(with_spec=True)

    def change_group(self, members: tuple[Seat, ...]) -> None:
        """Move to another witness group with the next round; one change at a time."""
        if not self.config.previous and set(members) != set(self.config.members):
            self.config = self.config.joint(members, self.term)

    def on_accepted(self, sender: bytes, message: Accepted) -> Decided | None:
        entry = self._open.get(message.round) if message.term == self.term else None
        if entry is None:
            return None
        sent_at, ledger, config, acks = entry
        acks.add(Seat(sender, message.disk))
        if not config.quorum(acks):
            return None
        for number in [number for number in self._open if number <= message.round]:
            del self._open[number]
        if config.previous and self.config == config:
            # Those who were replaced are told with the rounds to come, so that they stop minding the job.
            self._removed = tuple(seat for seat in config.previous if seat not in config.members)
            self.config = config.settled()
        return Decided(sent_at, ledger, config)

    def on_refused(self, sender: bytes, message: Refused) -> list[Send] | Fenced:
        if message.term != self.term:
            return []
        if message.needs_spec:
            seated = Seat(sender, message.disk) in self.config.everyone
            return [Send(sender, self._accept(with_spec=True))] if seated else []
        if message.finished:
            return Fenced(message.promised, message.ledger)
        if message.promised > self.term:
            # A minority that was cut off may have promised itself anything: only those without whom nothing is decided count.
            self._promised_higher[Seat(sender, message.disk)] = message.promised
            others = {seat for seat in self.config.everyone if seat not in self._promised_higher}
            replaced = message.config is not None and message.config.order > self.config.order
            if replaced or not self.config.quorum(others):
                return Fenced(message.promised, None)
        return []

    def _accept(self, with_spec: bool) -> Accept:
        return Accept(
            job=self.job,
            term=self.term,
            round=self._round,
            config=self.config,
            ledger=self.ledger,
            holder=self.holder,
            spec=self.spec if with_spec else None,
            mandate=self.mandate,
        )


def healthy_group(job: bytes, config: Config, view: View, want: int) -> tuple[Seat, ...]:
    """The seats this config should have: those of nodes that stay with their disks, filled up with the best others.

    The size is odd and at most `want`; a group grows when nodes appear and shrinks only when there is nobody left to
    replace a member that leaves.
    """

    def keeps_promises(seat: Seat) -> bool:
        return view.disks.get(seat.node, seat.disk) == seat.disk

    kept = [seat for seat in config.members if seat.node in view.staying and keeps_promises(seat)]
    group = kept[:want]
    if len(group) < want:
        taken = {seat.node for seat in kept}
        fresh = [node for node in view.witnesses(job) if node in view.disks and node not in taken]
        group += [Seat(node, view.disks[node]) for node in fresh[: want - len(group)]]
    if len(group) % 2 == 0:
        # An even group tolerates no more than the odd one below it: keep an old member, or take one fewer.
        taken = {seat.node for seat in group}
        old = [seat for seat in config.members if seat.node not in taken]
        old.sort(key=lambda seat: (not keeps_promises(seat), seat.node not in view.alive))
        group = group + old[:1] if old else group[:-1]
    return tuple(group) or config.members
