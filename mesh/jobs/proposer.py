"""The owner of a term: carries a ledger, a config and a lease to the witness group, round by round.

Used by the steward (which prepares a term and may end a job with it) and by the runner (which holds the lease under the
term it was handed). A round is one `Accept` to everyone in the config; it is decided when a quorum answered it. A config
change goes through a joint round first, then a settled one.
"""

import msgspec

from mesh.jobs.effects import Send
from mesh.jobs.ledger import Config, Ledger
from mesh.jobs.messages import Accept, Accepted, Refused


class Decided(msgspec.Struct, frozen=True):
    """A quorum holds this ledger and config; a lease taken with it counts from `sent_at`."""

    sent_at: float
    ledger: Ledger
    config: Config


class Fenced(msgspec.Struct, frozen=True):
    """Somebody was promised a higher term (or the job is over): this term is finished."""

    promised: int
    finished: Ledger | None


MAX_OPEN_ROUNDS = 8  # older ones are forgotten; a later round says all that they said


class Proposer:
    def __init__(self, job: bytes, spec: bytes, term: int, config: Config, ledger: Ledger, holder: bytes | None):
        self.job = job
        self.spec = spec
        self.term = term
        self.config = config
        self.ledger = ledger
        self.holder = holder
        self._removed: tuple[bytes, ...] = ()
        self._round = 0
        self._open: dict[int, tuple[float, Ledger, Config, set[bytes]]] = {}

    def propose(self, now: float) -> list[Send]:
        """Begin a round with the present ledger, config and holder."""
        self._round += 1
        self._open[self._round] = (now, self.ledger, self.config, set())
        while len(self._open) > MAX_OPEN_ROUNDS:
            del self._open[min(self._open)]
        audience = self.config.everyone + tuple(node for node in self._removed if node not in self.config.everyone)
        return [Send(node, self._accept(with_spec=False)) for node in audience]

    def introduction(self) -> Accept:
        """What makes a node that has never heard of the job a witness of it."""
        return self._accept(with_spec=True)

    def change_group(self, members: tuple[bytes, ...]) -> None:
        """Move to another witness group with the next round; one change at a time."""
        if not self.config.previous and set(members) != set(self.config.members):
            self.config = self.config.joint(members, self.term)

    def on_accepted(self, sender: bytes, message: Accepted) -> Decided | None:
        entry = self._open.get(message.round) if message.term == self.term else None
        if entry is None:
            return None
        sent_at, ledger, config, acks = entry
        acks.add(sender)
        if not config.quorum(acks):
            return None
        for number in [number for number in self._open if number <= message.round]:
            del self._open[number]
        if config.previous and self.config == config:
            # Those who were replaced are told with the rounds to come, so that they stop minding the job.
            self._removed = tuple(node for node in config.previous if node not in config.members)
            self.config = config.settled()
        return Decided(sent_at, ledger, config)

    def on_refused(self, sender: bytes, message: Refused) -> list[Send] | Fenced:
        if message.term != self.term:
            return []
        if message.needs_spec:
            return [Send(sender, self._accept(with_spec=True))] if sender in self.config.everyone else []
        if message.finished:
            return Fenced(message.promised, message.ledger)
        if message.promised > self.term:
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
        )


def healthy_group(
    config: Config, alive: frozenset[bytes], staying: frozenset[bytes], ranked: tuple[bytes, ...], want: int
) -> tuple[bytes, ...]:
    """The members this config should have: those that stay, filled up from `ranked` (all nodes, best first).

    `staying` are alive nodes that are not about to leave. The size is odd and at most `want`; a group grows when nodes
    appear and shrinks only when there is nobody left to replace a member that leaves.
    """
    kept = [node for node in config.members if node in staying]
    fresh = [node for node in ranked if node in staying and node not in kept]
    group = (kept + fresh)[:want]
    if len(group) % 2 == 0:
        # An even group tolerates no more than the odd one below it: keep an old member, or take one fewer.
        old = [node for node in config.members if node not in group]
        old.sort(key=lambda node: node not in alive)
        group = group + old[:1] if old else group[:-1]
    return tuple(group) or config.members
