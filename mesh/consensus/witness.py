"""Witness: a Paxos acceptor for one job, with a lease clock.

Rules, in the order of the checks:

1. A term below the promised one is refused (Lamport 2001, "Paxos made simple", P1a).
2. Only a witness of the job asks for a term (`participant.py` asks who may propose a record or take a lease).
3. A term has one owner: once an attempt has taken the lease in it, no other attempt uses it.
4. While a lease runs, no other term is promised and no other holder is accepted (Gray and Cheriton 1989, "Leases").
5. Once a majority is known to hold an outcome, neither the record nor the group changes: every proposal is refused. Terms are
   promised still, so that a witness that missed the end reads it, proposes it, and learns from the refusal that it is known,
   when too few others are left to tell it. An outcome that is only accepted may still be replaced under a higher term, as any
   value of Paxos that is not chosen.

A lease runs `lease_s` from the *receipt* of the acceptance; its holder counts `lease_s * HELD_SHARE` from the *sending* of the
request. So at most one node believes that it holds the lease, as long as no clock runs faster than another by a factor of
`1 / HELD_SHARE` (docs/explanation/job-invariants.md, J1).
"""

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from mesh.consensus.effects import MOST_EARLIER, Effect, SaveWitnessRecord, Send, WitnessRecord
from mesh.consensus.messages import (
    MOST_WARRANTS,
    Accept,
    Accepted,
    Cancel,
    Closed,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promised,
    Refused,
    Released,
)
from mesh.model.record import Config, JobRecord
from mesh.model.spec import JobSpec

CLAIM_BYTES = 16  # of the hash of a record
HELD_SHARE = 0.9  # a hundred times the worst quartz drift with NTP slewing (500 ppm on either side)


class Witness:
    """The witness's state of one job. `handle` takes messages; `now` is seconds of CLOCK_BOOTTIME."""

    def __init__(self, witness_record: WitnessRecord, spec: JobSpec, lease_until: float = 0.0) -> None:
        self.witness_record = witness_record
        self.spec = spec
        self.lease_until = lease_until
        self._claims: dict[bytes, bytes] = {}  # hashes of the outcomes that other witnesses say a majority holds

    @classmethod
    def created(cls, accept: Accept, spec_bytes: bytes, spec: JobSpec, disk: bytes) -> "Witness":
        """Create the record of a job that is first seen in `accept`, before that message is handled."""
        witness_record = WitnessRecord(
            job=accept.job,
            disk=disk,
            spec=spec_bytes,
            config=accept.config,
            promised=0,
            accepted_term=0,
            record=JobRecord(),
            holder=None,
            cancel_wanted=False,
        )
        return cls(witness_record, spec)

    @classmethod
    def restored(cls, witness_record: WitnessRecord, spec: JobSpec, now: float) -> "Witness":
        """Restore a record after a restart. The lease clock is not on disk, so a lease that may still run gets its full
        length again.
        """
        lease_until = now + spec.lease_s if witness_record.holder is not None else 0.0
        return cls(witness_record, spec, lease_until)

    @property
    def finished(self) -> bool:
        """Tell whether the outcome is known to be final."""
        return self.witness_record.final

    def lease_left_s(self, now: float) -> float:
        return max(0.0, self.lease_until - now) if self.witness_record.holder is not None else 0.0

    def handle(
        self, sender: bytes, message: PreVote | Prepare | Accept | Released | Closed | Cancel, now: float
    ) -> list[Effect]:
        match message:
            case PreVote():
                return self._would(sender, message, now)
            case Prepare():
                return self._prepare(sender, message, now)
            case Accept():
                return self._accept(sender, message, now)
            case Released():
                # A hint, accepted from the holder only: the durable release is the holder's own Accept.
                if sender == self.witness_record.holder and message.term >= self.witness_record.promised:
                    self.lease_until = 0.0
                return []
            case Closed():
                return self.close(message.term, message.record) if self._believes(sender, message) else []
            case Cancel():
                if self.witness_record.cancel_wanted or self.finished:
                    return []
                return [self._save(cancel_wanted=True)]

    def close(self, term: int, record: JobRecord) -> list[Effect]:
        """Record that a majority holds the job's outcome."""
        if self.finished or record.outcome is None:
            return []
        accepted = max(term, self.witness_record.accepted_term)
        promised = max(term, self.witness_record.promised)
        self._claims.clear()
        return [self._save(promised=promised, accepted_term=accepted, record=record, holder=None, final=True)]

    def _believes(self, sender: bytes, message: Closed) -> bool:
        """Tell whether a majority holds this record.

        The lease holder is believed, and for a record that it has accepted itself, this witness believes the last runner and any
        witness. One witness alone could lie about another one, so that takes the word of a majority.
        """
        known = self.witness_record
        accepted = message.record == known.record
        runners = {attempt.node for attempt in known.record.attempts[-1:]}
        if sender == known.holder or (accepted and sender in runners | set(known.config.nodes)):
            return True
        if self.finished or sender not in known.config.nodes:
            return False
        claim = blake2b(msgspec.msgpack.encode(message.record), digest_size=CLAIM_BYTES).digest()
        self._claims[sender] = claim
        alike = {node for node, claimed in self._claims.items() if claimed == claim}
        return known.config.quorum({voter for voter in known.config.everyone if voter.node in alike})

    def _would(self, sender: bytes, message: PreVote, now: float) -> list[Effect]:
        if not self._may_promise(sender, message.term, now):
            return [self._refusal(sender, message.term, 0, now)]
        return [
            Send(sender, PreVoteGranted(job=self.witness_record.job, term=message.term, disk=self.witness_record.disk))
        ]

    def _prepare(self, sender: bytes, message: Prepare, now: float) -> list[Effect]:
        witness_record = self.witness_record
        if not self._may_promise(sender, message.term, now):
            return [self._refusal(sender, message.term, 0, now)]
        saved = self._save(promised=message.term, holder=None)
        return [
            saved,
            Send(
                sender,
                Promised(
                    job=witness_record.job,
                    term=message.term,
                    disk=witness_record.disk,
                    config=self.witness_record.config,
                    accepted_term=self.witness_record.accepted_term,
                    record=self.witness_record.record,
                    cancel_wanted=self.witness_record.cancel_wanted,
                ),
            ),
        ]

    def accept_reconfiguration(self, sender: bytes, message: Accept, now: float) -> list[Effect]:
        """Accept the group that the job's user has named; it overrules a lease of the old group."""
        if message.config.order > self.witness_record.config.order:
            self.lease_until = 0.0
        effects, word = self._accept(sender, message, now), message.reconfiguration or b""
        if self.witness_record.config == message.config and self.witness_record.reconfiguration != word:
            effects.insert(-1, self._save(reconfiguration=word))  # before the answer
        return effects

    def learn_group(self, config: Config, warrants: Mapping[bytes, bytes]) -> list[Effect]:
        """Take up a group that a witness of the known one has accepted, and keep the warrants that name it."""
        kept = tuple(warrants.values())[:MOST_WARRANTS]
        if (config, kept) == (self.witness_record.config, self.witness_record.warrants):
            return []
        return [self._save(config=config, warrants=kept)]

    def overruled(self, config: Config, word: bytes) -> list[Effect]:
        """Give the job up, and what this witness believed to be its end, to the group of another recovery."""
        record = msgspec.structs.replace(self.witness_record.record, outcome=None)
        self.witness_record = msgspec.structs.replace(
            self.witness_record, config=config, reconfiguration=word, record=record, holder=None, final=False
        )
        return [SaveWitnessRecord(self.witness_record)]

    def _accept(self, sender: bytes, message: Accept, now: float) -> list[Effect]:
        witness_record = self.witness_record
        foreign_lease = (
            witness_record.holder is not None and witness_record.holder != sender and self.lease_left_s(now) > 0
        )
        stale_config = message.config.order < witness_record.config.order
        # A late copy of the order to start makes a second attempt in the same term.
        known_owner = witness_record.owner if message.term == witness_record.accepted_term else b""
        other_owner = known_owner not in {b"", message.owner}
        owner = known_owner if message.holder is None else message.owner  # only a lease has one
        if message.term < witness_record.promised or foreign_lease or stale_config or other_owner:
            return [self._refusal(sender, message.term, message.round, now)]
        if message.holder is not None and message.holder != sender:
            return [self._refusal(sender, message.term, message.round, now)]  # a node takes a lease for itself only
        if self.finished:  # who proposes the same end learns from this that it is known
            return [self._refusal(sender, message.term, message.round, now)]
        if (message.term, message.record.version) < (witness_record.accepted_term, witness_record.record.version):
            return []  # a late duplicate: the sender has a newer round
        saved = self._save(
            promised=message.term,
            accepted_term=message.term,
            record=message.record,
            config=message.config,
            holder=message.holder,
            owner=owner,
        )
        effects: list[Effect] = [saved] if saved.witness_record != witness_record else []
        if message.renews:
            self.lease_until = now + self.spec.lease_s
        answer = Accepted(
            job=witness_record.job,
            term=message.term,
            disk=witness_record.disk,
            round=message.round,
            cancel_wanted=self.witness_record.cancel_wanted,
        )
        return [*effects, Send(sender, answer)]

    def refuse(self, sender: bytes, message: Accept, now: float) -> list[Effect]:
        """Answer a node that may not propose this."""
        return [self._refusal(sender, message.term, message.round, now)]

    def _may_promise(self, sender: bytes, term: int, now: float) -> bool:
        """Tell whether the sender is a witness of the job, as far as this one knows the group, and may have this term."""
        asked = sender in self.witness_record.config.nodes
        return asked and term > self.witness_record.promised and self.lease_left_s(now) == 0

    def _refusal(self, sender: bytes, term: int, round_number: int, now: float) -> Send:
        witness_record = self.witness_record
        return Send(
            sender,
            Refused(
                job=witness_record.job,
                term=term,
                disk=witness_record.disk,
                round=round_number,
                promised=witness_record.promised,
                config=witness_record.config,
                lease_left_s=self.lease_left_s(now),
                needs_spec=False,
                finished=self.finished,
                accepted_term=witness_record.accepted_term,
                record=witness_record.record if self.finished else None,
            ),
        )

    def _save(self, **changes: object) -> SaveWitnessRecord:
        before = self.witness_record
        self.witness_record = msgspec.structs.replace(before, **changes)
        now, then = self.witness_record.config, before.config
        if before.warrants and (now.number, now.previous) != (then.number, then.previous):
            earlier = ((before.config, before.warrants), *before.earlier)[:MOST_EARLIER]
            self.witness_record = msgspec.structs.replace(self.witness_record, earlier=earlier)
        assert self.witness_record.promised >= before.promised, "a promise is never taken back"
        assert self.witness_record.accepted_term >= before.accepted_term
        assert not before.final or self.witness_record.record.outcome == before.record.outcome, "J5: one end"
        return SaveWitnessRecord(self.witness_record)


def unknown_job(message: Accept | Prepare | PreVote, disk: bytes) -> Refused:
    """Return the answer of a node without a record of the job: it asks for the spec if this disk is a voter."""
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
