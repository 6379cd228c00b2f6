"""One witness's view of one job: an acceptor of Paxos that also keeps a lease clock.

Rules, in the order in which they are checked: a lower term is refused; while somebody's lease runs, no other term is
promised and no other holder accepted; once a majority is known to hold an outcome, nothing changes any more. An outcome
that was merely accepted may yet be replaced under a higher term, as any value of Paxos.

A lease runs `lease_s * (1 + RATE_BOUND)` from the *receipt* of the acceptance, while its holder counts from the *sending*,
less a margin; so at most one holder believes in its lease, if clocks run at rates within RATE_BOUND of each other
(docs/jobs.md, invariant J1).
"""

import msgspec

from mesh.jobs.effects import Cell, Effect, SaveCell, Send
from mesh.jobs.ledger import Ledger
from mesh.jobs.messages import (
    Accept,
    Accepted,
    Cancel,
    Closed,
    Prepare,
    Promised,
    Refused,
    Released,
    Willing,
    Would,
)
from mesh.jobs.spec import JobSpec

RATE_BOUND = 0.05  # twenty times the worst quartz drift plus NTP slewing (500 ppm); ours


class Witness:
    """`handle(sender, message, now) -> effects`; `now` is seconds of CLOCK_BOOTTIME."""

    def __init__(self, cell: Cell, spec: JobSpec, lease_until: float = 0.0) -> None:
        self.cell = cell
        self.spec = spec
        self.lease_until = lease_until

    @classmethod
    def created(cls, accept: Accept, spec_bytes: bytes, spec: JobSpec, disk: bytes) -> "Witness":
        """A cell for a job first heard of through `accept`, before that message is handled."""
        cell = Cell(
            job=accept.job,
            disk=disk,
            spec=spec_bytes,
            config=accept.config,
            promised=0,
            accepted_term=0,
            ledger=Ledger(),
            holder=None,
            cancel_wanted=False,
        )
        return cls(cell, spec)

    @classmethod
    def restored(cls, cell: Cell, spec: JobSpec, now: float) -> "Witness":
        """A cell read back after a restart. A lease that may still run is given its full length again."""
        lease_until = now + spec.lease_s * (1 + RATE_BOUND) if cell.holder is not None else 0.0
        return cls(cell, spec, lease_until)

    @property
    def finished(self) -> bool:
        """Whether the job is known to be over, here and for ever."""
        return self.cell.final

    def lease_left_s(self, now: float) -> float:
        return max(0.0, self.lease_until - now) if self.cell.holder is not None else 0.0

    def handle(
        self, sender: bytes, message: Would | Prepare | Accept | Released | Closed | Cancel, now: float
    ) -> list[Effect]:
        match message:
            case Would():
                return self._would(sender, message, now)
            case Prepare():
                return self._prepare(sender, message, now)
            case Accept():
                return self._accept(sender, message, now)
            case Released():
                # Only a hint: the durable release is the holder's own Accept. Believe the holder alone.
                if sender == self.cell.holder and message.term >= self.cell.promised:
                    self.lease_until = 0.0
                return []
            case Closed():
                known = sender in {self.cell.holder, *self.cell.config.nodes} or self._proposed_here(sender, message)
                return self.close(message.term, message.ledger) if known else []
            case Cancel():
                if self.cell.cancel_wanted or self.finished:
                    return []
                return [self._save(cancel_wanted=True)]

    def close(self, term: int, ledger: Ledger) -> list[Effect]:
        """Take note that the job is over."""
        if self.finished or ledger.outcome is None:
            return []
        accepted = max(term, self.cell.accepted_term)
        promised = max(term, self.cell.promised)
        return [self._save(promised=promised, accepted_term=accepted, ledger=ledger, holder=None, final=True)]

    def _proposed_here(self, sender: bytes, message: Closed) -> bool:
        """Whether it is the end that the last runner, who has given its lease back with it, had this witness accept."""
        attempts = self.cell.ledger.attempts
        same = message.term == self.cell.accepted_term and message.ledger.outcome == self.cell.ledger.outcome
        return same and bool(attempts) and attempts[-1].node == sender

    def _would(self, sender: bytes, message: Would, now: float) -> list[Effect]:
        if self.finished or message.term <= self.cell.promised or self.lease_left_s(now) > 0:
            return [self._refusal(sender, message.term, 0, now)]
        return [Send(sender, Willing(job=self.cell.job, term=message.term, disk=self.cell.disk))]

    def _prepare(self, sender: bytes, message: Prepare, now: float) -> list[Effect]:
        cell = self.cell
        if self.finished or message.term <= cell.promised or self.lease_left_s(now) > 0:
            return [self._refusal(sender, message.term, 0, now)]
        saved = self._save(promised=message.term, holder=None)
        return [
            saved,
            Send(
                sender,
                Promised(
                    job=cell.job,
                    term=message.term,
                    disk=cell.disk,
                    config=self.cell.config,
                    accepted_term=self.cell.accepted_term,
                    ledger=self.cell.ledger,
                    cancel_wanted=self.cell.cancel_wanted,
                ),
            ),
        ]

    def take_mandate(self, sender: bytes, message: Accept, now: float) -> list[Effect]:
        """The job's user has named another group: whoever holds a lease of the old one is overruled."""
        if message.config.order > self.cell.config.order:
            self.lease_until = 0.0
        return self._accept(sender, message, now)

    def _accept(self, sender: bytes, message: Accept, now: float) -> list[Effect]:
        cell = self.cell
        foreign_lease = cell.holder is not None and cell.holder != sender and self.lease_left_s(now) > 0
        stale_config = message.config.order < cell.config.order
        if message.term < cell.promised or foreign_lease or stale_config:
            return [self._refusal(sender, message.term, message.round, now)]
        if message.holder is not None and message.holder != sender:
            return [self._refusal(sender, message.term, message.round, now)]  # a lease is taken, never given
        if self.finished and message.ledger.outcome != cell.ledger.outcome:
            return [self._refusal(sender, message.term, message.round, now)]
        if (message.term, message.ledger.version) < (cell.accepted_term, cell.ledger.version):
            return []  # a late duplicate: its sender has moved on
        ledger = message.ledger
        changed = (
            message.term != cell.promised
            or message.term != cell.accepted_term
            or ledger != cell.ledger
            or message.config != cell.config
            or message.holder != cell.holder
        )
        effects: list[Effect] = []
        if changed:
            effects.append(
                self._save(
                    promised=message.term,
                    accepted_term=message.term,
                    ledger=ledger,
                    config=message.config,
                    holder=None if ledger.outcome is not None else message.holder,
                )
            )
        running = message.holder is not None
        self.lease_until = now + self.spec.lease_s * (1 + RATE_BOUND) if running else 0.0
        answer = Accepted(
            job=cell.job, term=message.term, disk=cell.disk, round=message.round, cancel_wanted=self.cell.cancel_wanted
        )
        return [*effects, Send(sender, answer)]

    def _refusal(self, sender: bytes, term: int, round_number: int, now: float) -> Send:
        cell = self.cell
        return Send(
            sender,
            Refused(
                job=cell.job,
                term=term,
                disk=cell.disk,
                round=round_number,
                promised=cell.promised,
                config=cell.config,
                lease_left_s=self.lease_left_s(now),
                needs_spec=False,
                finished=self.finished,
                accepted_term=cell.accepted_term,
                ledger=cell.ledger if self.finished else None,
            ),
        )

    def _save(self, **changes: object) -> SaveCell:
        before = self.cell
        self.cell = msgspec.structs.replace(before, **changes)
        assert self.cell.promised >= before.promised, "a promise is never taken back"
        assert self.cell.accepted_term >= before.accepted_term
        assert not before.final or self.cell.ledger.outcome == before.ledger.outcome, "J5: one end"
        return SaveCell(self.cell)


def unknown_job(message: Accept | Prepare | Would, disk: bytes) -> Refused:
    """The answer of a node that holds no cell for the job: an Accept must come again with its spec, if this disk has a seat."""
    return Refused(
        job=message.job,
        term=message.term,
        disk=disk,
        round=message.round if isinstance(message, Accept) else 0,
        promised=0,
        config=None,
        lease_left_s=0.0,
        needs_spec=True,
        finished=False,
    )
