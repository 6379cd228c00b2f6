"""Witness: its rules one by one, then three witnesses with adversarial proposers, networks and crashes."""

import itertools
from random import Random
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.consensus.effects import Effect, SaveWitnessRecord, Send, WitnessRecord
from mesh.consensus.messages import Accept, Accepted, Cancel, Closed, Prepare, PreVote, Promised, Refused, Released
from mesh.consensus.participant import Directed, Participant, Rules
from mesh.consensus.proposer import Decided, Fenced, Proposer
from mesh.consensus.witness import CLAIM_BYTES, HELD_SHARE, Witness, unknown_job
from mesh.model.record import Attempt, Config, JobRecord, Outcome, Voter
from tests.consensus.worlds import DISK, JOB, SPEC_BYTES, A, B, C, D, E, at, make_spec, make_witness, voters

GROUP = Config(number=0, term=0, members=voters(A, B, C))
DONE = Outcome(kind="done", detail="", exit_code=0, manifest=None, holders=(), ended_unix_ms=1)


def accept(term: int, holder: bytes | None, record: JobRecord | None = None, config: Config = GROUP) -> Accept:
    return Accept(job=JOB, term=term, round=1, config=config, record=record or JobRecord(version=1), holder=holder)


def answer(effects: list[Effect]) -> Any:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    assert len(sends) == 1
    return sends[0].message


def test_claims_of_an_end_are_kept_of_witnesses_only_and_take_little_memory() -> None:
    witness = make_witness()
    for sender in (B, D, E):
        ended = JobRecord(version=1, outcome=msgspec.structs.replace(DONE, detail="x" * 100_000))
        assert witness.handle(sender, Closed(job=JOB, term=1, record=ended), 0.0) == []
    assert [(node, len(claim)) for node, claim in witness._claims.items()] == [(B, CLAIM_BYTES)]
    assert witness.handle(C, Closed(job=JOB, term=1, record=ended), 0.0) and witness.finished and not witness._claims
    assert witness.handle(B, Closed(job=JOB, term=2, record=JobRecord(version=2)), 0.0) == [] and not witness._claims


def test_promise_is_saved_before_it_is_sent() -> None:
    effects = make_witness().handle(A, Prepare(job=JOB, term=1), 0.0)
    assert isinstance(effects[0], SaveWitnessRecord) and isinstance(answer(effects), Promised)
    effects = make_witness().handle(D, accept(1, D), 0.0)
    assert isinstance(effects[0], SaveWitnessRecord) and isinstance(answer(effects), Accepted)


def test_witness_promises_a_term_once() -> None:
    witness = make_witness()
    witness.handle(A, Prepare(job=JOB, term=2), 0.0)
    for term in (1, 2):
        refused = answer(witness.handle(B, Prepare(job=JOB, term=term), 0.0))
        assert isinstance(refused, Refused) and refused.promised == 2


def test_witness_promises_no_term_while_a_lease_runs() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D), 100.0)
    refused = answer(witness.handle(B, Prepare(job=JOB, term=2), 110.0))
    assert isinstance(refused, Refused) and 5.0 <= refused.lease_left_s <= 6.0
    assert isinstance(answer(witness.handle(E, accept(9, E), 110.0)), Refused)
    after = 100.0 + witness.spec.lease_s
    assert isinstance(answer(witness.handle(B, Prepare(job=JOB, term=2), after)), Promised)


def test_only_a_witness_of_the_job_gets_a_promise() -> None:
    witness = make_witness()
    for ask in (Prepare(job=JOB, term=1), PreVote(job=JOB, term=1)):
        assert isinstance(answer(witness.handle(D, ask, 0.0)), Refused)
    assert witness.witness_record == make_witness().witness_record


def test_unchanged_renewal_writes_nothing() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D), 0.0)
    effects = witness.handle(D, accept(1, D), 5.0)
    assert not any(isinstance(effect, SaveWitnessRecord) for effect in effects)
    assert witness.lease_until == 5.0 + witness.spec.lease_s


def test_round_that_does_not_renew_leaves_the_lease_as_it_is() -> None:
    witness, writes = make_witness(), msgspec.structs.replace(accept(1, D), renews=False)
    assert isinstance(answer(witness.handle(D, writes, 0.0)), Accepted)
    assert witness.lease_left_s(0.0) == 0.0, "it grants none"
    witness.handle(D, accept(1, D), 1.0)
    assert isinstance(answer(witness.handle(D, writes, 5.0)), Accepted)
    assert witness.lease_until == 1.0 + witness.spec.lease_s


def test_lease_is_granted_only_to_its_sender() -> None:
    assert isinstance(answer(make_witness().handle(D, accept(1, E), 0.0)), Refused)


def test_only_the_holder_releases_its_lease() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D), 0.0)
    witness.handle(E, Released(job=JOB, term=1), 1.0)
    assert witness.lease_left_s(1.0) > 0
    witness.handle(D, Released(job=JOB, term=1), 1.0)
    assert witness.lease_left_s(1.0) == 0


def test_witness_refuses_an_older_group() -> None:
    witness = make_witness()
    witness.handle(D, accept(2, D, config=GROUP.joint(voters(A, B, E), 2)), 0.0)
    witness.handle(D, Released(job=JOB, term=2), 0.0)
    assert isinstance(answer(witness.handle(E, accept(3, E), 1.0)), Refused)


def test_final_outcome_never_changes() -> None:
    witness = make_witness()
    ended = JobRecord(version=2, outcome=DONE)
    witness.handle(D, accept(1, None, ended), 0.0)
    assert not witness.finished, "a single acceptance is not a decision"
    assert witness.handle(E, Closed(job=JOB, term=1, record=ended), 0.0) == [], "E is not a witness"
    assert [type(effect) for effect in witness.handle(B, Closed(job=JOB, term=1, record=ended), 0.0)] == [
        SaveWitnessRecord
    ]
    assert witness.finished and witness.lease_left_s(0.0) == 0
    promised = answer(witness.handle(B, Prepare(job=JOB, term=9), 1.0))
    assert isinstance(promised, Promised) and promised.record == ended, "who asks for a term learns the end"
    refused = answer(witness.handle(B, accept(9, None, JobRecord(version=9)), 1.0))
    assert isinstance(refused, Refused) and refused.finished and refused.record == witness.witness_record.record
    assert witness.handle(E, Cancel(job=JOB, user="ada"), 2.0) == []
    failed = JobRecord(version=3, outcome=msgspec.structs.replace(DONE, kind="failed"))
    assert [witness.handle(node, Closed(job=JOB, term=1, record=failed), 3.0) for node in (B, C)] == [[], []]


def test_record_and_group_of_an_ended_job_never_change() -> None:
    """One hostile witness could replace all but the outcome in the records of the others, or the group that tells the end."""
    witness, other = make_witness(), make_witness()
    ended = JobRecord(version=2, outcome=DONE, errors=1)
    without = msgspec.structs.replace(ended, version=3, errors=0)
    witness.handle(D, accept(1, None, ended), 0.0)
    assert witness.handle(B, Closed(job=JOB, term=1, record=without), 0.0) == [], "it is not what this witness accepted"
    assert witness.handle(C, Closed(job=JOB, term=1, record=ended), 0.0) and witness.finished
    assert witness.handle(C, Closed(job=JOB, term=1, record=ended), 0.0) == [], "nothing is saved again"
    known = witness.witness_record.config
    for record, config in ((without, known), (ended, Config(known.number + 1, 9, voters(B)))):
        refused = answer(witness.handle(B, accept(9, None, record, config), 1.0))
        assert isinstance(refused, Refused) and refused.record == ended and witness.witness_record.config == known
    refused = answer(witness.handle(B, accept(9, None, ended, known), 1.0))
    assert isinstance(refused, Refused) and refused.finished and refused.record == ended, "who missed the end learns it"
    assert [
        other.handle(node, Closed(job=JOB, term=1, record=one), 0.0) for node, one in ((B, without), (C, ended))
    ] == [[], []]
    assert other.handle(B, Closed(job=JOB, term=1, record=ended), 0.0) and other.witness_record.record == ended


def test_only_an_end_closes_a_job_and_its_lease() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D), 0.0)
    assert witness.handle(D, Closed(job=JOB, term=1, record=JobRecord(version=2)), 1.0) == []
    assert not witness.finished
    assert witness.handle(D, Closed(job=JOB, term=1, record=JobRecord(version=2, outcome=DONE)), 1.0)
    assert witness.finished and witness.witness_record.holder is None


def test_witness_accepts_closed_from_the_last_runner_after_its_release() -> None:
    witness = make_witness()
    attempts = (Attempt(0, D, "d", 1, 0, ended_unix_ms=1, reason="done"),)
    ended = JobRecord(version=2, attempts=attempts, outcome=DONE)
    witness.handle(D, accept(1, None, ended), 0.0)
    assert witness.handle(D, Closed(job=JOB, term=1, record=ended), 0.0) and witness.finished


def test_one_witness_cannot_end_a_job() -> None:
    witness = make_witness()
    done, failed = (
        JobRecord(version=2, outcome=msgspec.structs.replace(DONE, kind=kind)) for kind in ("done", "failed")
    )

    def told(sender: bytes, record: JobRecord) -> bool:
        return bool(witness.handle(sender, Closed(job=JOB, term=1, record=record), 0.0))

    assert not told(B, done) and not told(B, done), "its word counts once"
    assert not told(E, done), "E is no witness"
    assert not told(C, failed), "two witnesses that disagree are no majority"
    assert told(C, done) and witness.witness_record.record == done


def test_late_copy_of_a_round_takes_nothing_back() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D, JobRecord(version=2)), 0.0)
    assert witness.handle(D, accept(1, D, JobRecord(version=1)), 1.0) == []
    assert witness.witness_record.record.version == 2


def test_promise_brings_what_was_accepted() -> None:
    witness, record, group = make_witness(), JobRecord(version=3, settled=1), Config(1, 1, voters(A, B, D))
    witness.handle(D, accept(1, D, record, group), 0.0)
    promised = answer(witness.handle(B, Prepare(job=JOB, term=2), 100.0))
    assert (promised.accepted_term, promised.record, promised.config) == (1, record, group)


def test_late_release_ends_no_later_lease() -> None:
    witness = make_witness()
    witness.handle(D, accept(3, D), 0.0)
    witness.handle(D, Released(job=JOB, term=1), 1.0)
    assert witness.lease_left_s(1.0) > 0, "D released its lease of the first term, and has that of the third"


def test_outcome_without_majority_yields_to_a_higher_term() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, None, JobRecord(version=2, outcome=DONE)), 0.0)
    assert isinstance(answer(witness.handle(B, Prepare(job=JOB, term=2), 1.0)), Promised)
    assert isinstance(answer(witness.handle(E, accept(2, E, JobRecord(version=5)), 1.0)), Accepted)
    assert witness.witness_record.record.outcome is None and witness.witness_record.holder == E


def test_cancel_is_saved_and_reported() -> None:
    witness = make_witness()
    saved = witness.handle(A, Cancel(job=JOB, user="ada"), 0.0)
    assert [type(effect) for effect in saved] == [SaveWitnessRecord]
    assert witness.handle(A, Cancel(job=JOB, user="ada"), 0.0) == []
    assert answer(witness.handle(A, Prepare(job=JOB, term=1), 0.0)).cancel_wanted
    assert answer(witness.handle(D, accept(1, D), 0.0)).cancel_wanted


def test_restored_lease_gets_its_full_length_again() -> None:
    witness = make_witness()
    witness.handle(D, accept(1, D), 0.0)
    again = Witness.restored(witness.witness_record, witness.spec, 500.0)
    assert again.lease_left_s(500.0) == witness.spec.lease_s


def test_unknown_job_asks_for_its_spec() -> None:
    refused = unknown_job(accept(1, D), DISK)
    assert refused.needs_spec and refused.round == 1


LEADERS = {D: A, E: B}


class Client:
    """A leader and runner in one: it wins a term, takes the lease and then appends to the record."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.term = 0
        self.promises: dict[bytes, Promised] = {}
        self.proposer: Proposer | None = None
        self.lease_until = -1.0


class Adversary(RuleBasedStateMachine):
    """Messages are lost, duplicated and reordered without bound, witnesses crash and restart, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.spec = make_spec()
        self.disk: dict[bytes, WitnessRecord | None] = {}
        self.witnesses: dict[bytes, Participant] = {}
        for node in GROUP.nodes:
            self.disk[node] = make_witness().witness_record
            self._start(node, DISK)
        self.lost: set[bytes] = set()
        self.clients = {name: Client(name) for name in (D, E)}
        self.wire: list[tuple[bytes, bytes, Any]] = []
        self.decided: list[tuple[int, JobRecord]] = []

    @rule(name=st.sampled_from([D, E]))
    def wants_a_term(self, name: bytes) -> None:
        client = self.clients[name]
        if client.proposer is not None and self.now < client.lease_until:
            return
        client.term = (
            max(
                [
                    client.term,
                    *(witness_record.promised for witness_record in self.disk.values() if witness_record is not None),
                ]
            )
            + 1
        )
        client.promises, client.proposer, client.lease_until = {}, None, -1.0
        self.wire += [(name, node, Prepare(job=JOB, term=client.term)) for node in GROUP.nodes]

    @rule(name=st.sampled_from([D, E]))
    def appends(self, name: bytes) -> None:
        client = self.clients[name]
        if client.proposer is None or client.proposer.record.outcome is not None:
            return
        number = client.proposer.record.next_attempt
        attempt = Attempt(
            number=number, node=name, nick="", term=client.term, started_unix_ms=int(self.now), reason="x"
        )
        client.proposer.record = client.proposer.record.with_attempt(attempt)
        self._propose(client)

    @rule(name=st.sampled_from([D, E]))
    def renews(self, name: bytes) -> None:
        if self.clients[name].proposer is not None:
            self._propose(self.clients[name], renew=True)

    def _propose(self, client: Client, renew: bool = False) -> None:
        assert client.proposer is not None
        self.wire += [(client.name, send.to, send.message) for send in client.proposer.propose(self.now, renew)]

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), keep=st.booleans())
    def delivers(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.wire) - 1))
        source, target, message = self.wire[index] if keep else self.wire.pop(index)
        if target in self.witnesses:
            leads = isinstance(message, Prepare)  # only a witness asks for a term: that of the client
            for output in self.witnesses[target].receive(LEADERS[source] if leads else source, message, at(self.now)):
                assert isinstance(output, Directed)
                effect = output.effect
                if isinstance(effect, SaveWitnessRecord):
                    self.disk[target] = effect.witness_record
                elif isinstance(effect, Send):
                    self.wire.append((target, source if leads else effect.to, effect.message))
            return
        client = self.clients[target]
        if isinstance(message, Promised) and message.term == client.term and client.proposer is None:
            client.promises[source] = message
            if GROUP.quorum({Voter(node, promise.disk) for node, promise in client.promises.items()}):
                best = max(client.promises.values(), key=lambda p: (p.accepted_term, p.record.version))
                client.proposer = Proposer(JOB, SPEC_BYTES, client.term, GROUP, best.record, client.name)
                self._propose(client)
        elif isinstance(message, Accepted) and client.proposer is not None:
            decided = client.proposer.on_accepted(source, message)
            if isinstance(decided, Decided):
                self.decided.append((client.term, decided.record))
                if decided.renews:
                    client.lease_until = max(client.lease_until, decided.sent_at + self.spec.lease_s * HELD_SHARE)
        elif isinstance(message, Refused) and message.needs_spec and client.proposer is None:
            if (
                Voter(source, message.disk) in GROUP.everyone
            ):  # as a leader does for a witness that missed the submission
                blank = Proposer(JOB, SPEC_BYTES, 0, GROUP, JobRecord(), None)
                self.wire.append((client.name, source, blank.introduction()))
                self.wire.append((client.name, source, Prepare(job=JOB, term=client.term)))
        elif isinstance(message, Refused) and client.proposer is not None:
            answer = client.proposer.on_refused(source, message)
            if isinstance(answer, Fenced):
                assert self.now >= client.lease_until, "the client was fenced while its lease was valid"
                client.proposer = None
            else:
                self.wire += [(client.name, send.to, send.message) for send in answer]

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    @rule(seconds=st.sampled_from([0.1, 4.0, 14.3, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=st.sampled_from(GROUP.nodes))
    def crashes(self, node: bytes) -> None:
        self._start(node, self.witnesses[node].disk)

    @precondition(lambda self: not self.lost)
    @rule(node=st.sampled_from(GROUP.nodes))
    def loses_its_disk(self, node: bytes) -> None:
        """Erase a minority of disks for good: the node returns with its key and an empty journal."""
        self.lost.add(node)
        self.disk[node] = None
        self._start(node, self.name_of_a_new_disk)

    name_of_a_new_disk = b"another!"

    def _start(self, node: bytes, disk: bytes) -> None:
        rules = Rules(lambda job, spec: self.spec, lambda job, spec, start: None, lambda *asked: True)
        self.witnesses[node] = Participant(node, disk, "", rules, Random(1))
        witness_record = self.disk[node]
        if witness_record is not None:
            self.witnesses[node].restore(Witness.restored(witness_record, self.spec, self.now), at(self.now))

    @invariant()
    def at_most_one_valid_lease(self) -> None:
        holders = [client.name for client in self.clients.values() if self.now < client.lease_until]
        assert len(holders) <= 1

    @invariant()
    def decisions_form_one_history(self) -> None:
        ordered = sorted(self.decided, key=lambda entry: (entry[0], entry[1].version))
        for (_, earlier), (_, later) in itertools.pairwise(ordered):
            assert later.version >= earlier.version
            assert set(earlier.attempts) <= set(later.attempts), "a decided attempt was forgotten"

    @invariant()
    def the_disk_is_what_witnesses_believe(self) -> None:
        for node, participant in self.witnesses.items():
            held = participant.witnesses.get(JOB)
            assert self.disk[node] == (held.witness_record if held is not None else None)


TestAdversary = Adversary.TestCase
TestAdversary.settings = settings(max_examples=150, stateful_step_count=60)


class Forgetful(Adversary):
    """Negative control: witnesses that ignore running leases."""

    def __init__(self) -> None:
        super().__init__()
        for participant in self.witnesses.values():
            participant.witnesses[JOB].lease_left_s = lambda now: 0.0  # type: ignore[method-assign]

    @rule(node=st.sampled_from(GROUP.nodes))
    def crashes(self, node: bytes) -> None:
        return


def test_invariant_breaks_without_the_lease_rule() -> None:
    """Play one fixed schedule: D holds a lease, and E requests the next term at once and gets it."""
    machine = Forgetful()
    for name in (D, E):
        machine.wants_a_term(name)
        while machine.wire:
            source, target, message = machine.wire.pop(0)
            machine.wire.append((source, target, message))
            machine.delivers(_First(len(machine.wire) - 1), keep=False)
    holders = [client.name for client in machine.clients.values() if machine.now < client.lease_until]
    assert len(holders) == 2


def test_invariant_breaks_when_a_lost_disk_goes_unnoticed() -> None:
    """Negative control of voters: A and B grant D a lease; A loses its disk and, with C, grants E another."""

    def played(machine: Adversary) -> int:
        deaf = {D: C, E: B}
        for name in (D, E):
            machine.wants_a_term(name)
            while machine.wire:
                source, target, message = machine.wire.pop(0)
                if deaf[name] not in (source, target):
                    machine.wire.append((source, target, message))
                    machine.delivers(_First(len(machine.wire) - 1), keep=False)
            if name == D:
                machine.loses_its_disk(A)
        return sum(machine.now < client.lease_until for client in machine.clients.values())

    unnoticed = Adversary()
    unnoticed.name_of_a_new_disk = DISK
    assert played(unnoticed) == 2 and played(Adversary()) == 1


class _First:
    """Stand-in for `st.data()` that always draws the given index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def draw(self, strategy: object) -> int:
        return self._index


def test_witness_records_survive_the_disk() -> None:
    witness_record = make_witness().witness_record
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(witness_record), type=WitnessRecord) == witness_record


def test_only_a_lease_gives_a_term_its_owner() -> None:
    """A member that brings the submission once more must not keep the first attempt from its term."""
    witness = make_witness()
    blank = Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(), holder=None, owner=b"thief")
    witness.handle(E, blank, 0.0)
    assert witness.witness_record.owner == b""
    lease = msgspec.structs.replace(blank, holder=D, owner=b"first", record=JobRecord(version=1))
    assert isinstance(witness.handle(D, lease, 0.0)[-1].message, Accepted)  # type: ignore[union-attr]
    released = msgspec.structs.replace(lease, holder=None, record=JobRecord(version=2))
    assert isinstance(witness.handle(D, released, 0.0)[-1].message, Accepted)  # type: ignore[union-attr]
    assert witness.witness_record.owner == b"first", "also once the lease is given back"
    second = msgspec.structs.replace(lease, owner=b"second", record=JobRecord(version=9))
    assert isinstance(witness.handle(D, second, 0.0)[-1].message, Refused)  # type: ignore[union-attr]
