"""Forced reconfiguration: the chosen record and group, the required signature, and the fencing of returning nodes."""

from random import Random

import msgspec
import pytest

from mesh.consensus.effects import Ended, SaveWitnessRecord, Send, Submitted, WitnessRecord
from mesh.consensus.forced_reconfiguration import (
    LEAP,
    MOST_REACHED,
    RECORD_LOST,
    TIES,
    ForcedReconfiguration,
    Plan,
    RecoveryError,
    decode_reconfiguration,
    encode_reconfiguration,
    make_plan,
)
from mesh.consensus.messages import Accept, Accepted, Prepare, Refused
from mesh.consensus.participant import Directed, Participant, Rules
from mesh.consensus.proposer import Fenced, Proposer
from mesh.consensus.witness import Witness
from mesh.model.record import Attempt, Commit, Config, JobRecord, Outcome
from tests.consensus.worlds import (
    DISK,
    JOB,
    SPEC_BYTES,
    A,
    B,
    C,
    D,
    E,
    at,
    make_spec,
    make_start,
    make_view,
    make_witness,
    voters,
)

COMMIT = Commit(seq=4, term=2, manifest=b"m" * 32, parent=None, holders=(), step=20, created_unix_ms=5)
RUNNING = Attempt(number=1, node=E, nick="e", term=2, started_unix_ms=10, seen_unix_ms=900)
SEVEN = Config(number=2, term=2, members=voters(*(bytes([number]) * 32 for number in range(1, 8))))
RECORD = JobRecord(version=9, commit=COMMIT, attempts=(RUNNING,))


def witness_record(**changes: object) -> WitnessRecord:
    fields = {"promised": 3, "accepted_term": 2, "record": RECORD, "holder": E, **changes}
    return msgspec.structs.replace(make_witness().witness_record, **fields)


def plan_from(witness_records: dict[bytes, WitnessRecord], **view: object) -> Plan:
    return make_plan(JOB, witness_records, make_view(A, (A, D, E), **view), at(100))


def test_plan_continues_from_the_newest_remaining_record() -> None:
    older = witness_record(accepted_term=1, record=JobRecord(version=30))
    five = Config(number=2, term=2, members=voters(A, B, C, D, E))
    plan = plan_from({A: witness_record(config=five), D: msgspec.structs.replace(older, config=five)})
    assert plan.record.commit == COMMIT and plan.kept == (A, D) and plan.lost == (B, C, E)
    assert plan.record.attempts[-1].reason == RECORD_LOST and plan.record.attempts[-1].ended_unix_ms == 900
    term = plan.reconfiguration.term
    assert term >= LEAP and term % LEAP == 0 and plan.reconfiguration.config.number == term
    assert plan.reconfiguration.config.members == voters(A) and plan.spec == SPEC_BYTES


def test_plan_starts_from_the_newest_group_and_the_highest_number() -> None:
    newer = Config(number=1, term=0, members=voters(D, B, E))
    assert plan_from({A: witness_record(), D: witness_record(config=newer)}).lost == (B, E)
    high = 2 * TIES * LEAP
    promised = plan_from({A: witness_record(promised=high)}).reconfiguration
    grouped = plan_from({A: witness_record(config=Config(high, high, voters(A, B, C)))}).reconfiguration
    assert promised.term > high and grouped.term > high


def test_new_group_is_odd_and_of_staying_nodes_with_a_record() -> None:
    """Others may be unable to vote; the group asks them before it takes them in."""
    records = dict.fromkeys((A, D, E), witness_record(config=SEVEN))
    assert set(plan_from(records).reconfiguration.config.members) == set(voters(A, D, E))
    assert len(plan_from(records, leaving=frozenset({D})).reconfiguration.config.members) == 1
    (other,) = plan_from({A: witness_record()}, leaving=frozenset({A})).reconfiguration.config.nodes
    assert other in {D, E}, "nobody with a record stays"


@pytest.mark.parametrize(
    ("witness_records", "words"),
    [
        ({}, "submit it again"),
        ({A: witness_record(), B: witness_record()}, "needs no recovery"),
        ({A: witness_record(final=True)}, "over"),
    ],
)
def test_recovery_is_refused_without_need(witness_records: dict[bytes, WitnessRecord], words: str) -> None:
    with pytest.raises(RecoveryError, match=words):
        plan_from(witness_records)


def test_reconfiguration_survives_encoding_and_nonsense_decodes_to_none() -> None:
    reconfiguration = ForcedReconfiguration(JOB, 7, Config(number=1, term=7, members=voters(A)))
    assert decode_reconfiguration(encode_reconfiguration(reconfiguration)) == reconfiguration
    for nonsense in (b"", b"\xff", msgspec.msgpack.encode([1]), encode_reconfiguration(reconfiguration)[:-1]):
        assert decode_reconfiguration(nonsense) is None


def order_of(plan: Plan) -> bytes:
    return encode_reconfiguration(plan.reconfiguration)


def make_participant(node: bytes, held: WitnessRecord | None, mandated: bool = True) -> Participant:
    rules = Rules(
        lambda job, spec: make_spec(),
        lambda job, spec, start: None,
        lambda *asked: True,
        lambda order, job, spec: decode_reconfiguration(order) if mandated else None,
    )
    participant = Participant(node, DISK, "", rules, Random(1))
    if held is not None:
        participant.restore(Witness.restored(held, make_spec(), 100.0), at(100))
    return participant


def play(participants: dict[bytes, Participant], out: list[Directed], sender: bytes) -> list[Directed]:
    """Deliver all messages and return the submitter's results."""
    wire = [(sender, output) for output in out]
    told: list[Directed] = []
    while wire:
        source, output = wire.pop(0)
        if isinstance(output.effect, Submitted):
            told.append(output)
        elif isinstance(output.effect, Send) and output.effect.to in participants:
            to = output.effect.to
            wire += [(to, more) for more in participants[to].receive(source, output.effect.message, at(100))]
    return told


def test_new_group_takes_over_although_an_old_lease_still_runs() -> None:
    records = dict.fromkeys((A, D, E), witness_record(config=SEVEN))
    participants = {node: make_participant(node, record) for node, record in records.items()}
    plan = plan_from(records)
    assert participants[A].witnesses[JOB].lease_left_s(100.0) > 0
    assert play(participants, participants[A].recover(plan, order_of(plan), at(100)), A) == [
        Directed(JOB, "submitter", Submitted(None))
    ]
    held = [participant.witnesses[JOB].witness_record for participant in participants.values()]
    assert {kept.config for kept in held} == {plan.reconfiguration.config} and {kept.record for kept in held} == {
        plan.record
    }
    assert all(kept.holder is None for kept in held)


def test_node_without_a_record_takes_over_if_nobody_with_one_stays() -> None:
    participants = {
        A: make_participant(A, witness_record()),
        D: make_participant(D, None),
        E: make_participant(E, None),
    }
    plan = plan_from({A: witness_record()}, leaving=frozenset({A}))
    (told,) = play(participants, participants[A].recover(plan, order_of(plan), at(100)), A)
    assert told.effect == Submitted(None)
    (new,) = plan.reconfiguration.config.nodes
    assert participants[new].witnesses[JOB].witness_record.record == plan.record


def test_reconfiguration_without_the_users_signature_is_refused() -> None:
    stranger = make_participant(A, witness_record(), mandated=False)
    before = stranger.witnesses[JOB].witness_record
    plan = plan_from({A: witness_record()})
    stated = plan.reconfiguration
    proposer = Proposer(JOB, SPEC_BYTES, stated.term, stated.config, plan.record, None, order_of(plan))
    (accept,) = [send.message for send in proposer.propose(100.0) if send.to == A]
    assert stranger.receive(D, accept, at(100)) == []
    assert stranger.witnesses[JOB].witness_record == before and stranger.refused == 1


def test_order_to_recover_is_good_for_its_own_group_only() -> None:
    plan = plan_from({A: witness_record()})
    stated = plan.reconfiguration
    for term, members in ((stated.term, voters(A, B)), (stated.term + LEAP, stated.config.members)):
        node = make_participant(A, witness_record())
        before = node.witnesses[JOB].witness_record
        group = Config(number=stated.config.number, term=stated.config.term, members=members)
        proposer = Proposer(JOB, SPEC_BYTES, term, group, plan.record, None, order_of(plan))
        (accept,) = [send.message for send in proposer.propose(100.0) if send.to == A]
        assert node.receive(D, accept, at(100)) == [] and node.witnesses[JOB].witness_record == before


def test_order_to_recover_is_good_for_its_own_record_only() -> None:
    """Regression: any member, which the order reaches by gossip, could bring a record of its own under it."""
    plan = plan_from({A: witness_record()})
    stated, failed = plan.reconfiguration, Outcome("failed", "so says a stranger", 1, None, (), 1)
    node = make_participant(A, witness_record())
    for record in (plan.record.amended(outcome=failed), JobRecord(version=99), plan.record):
        before = node.witnesses[JOB].witness_record
        proposer = Proposer(JOB, SPEC_BYTES, stated.term, stated.config, record, None, order_of(plan))
        (accept,) = [send.message for send in proposer.propose(100.0) if send.to == A]
        node.receive(D, accept, at(100))
        assert (node.witnesses[JOB].witness_record == before) == (record != plan.record)
    assert node.witnesses[JOB].witness_record.record == plan.record
    proposer = Proposer(
        JOB, SPEC_BYTES, stated.term, stated.config, plan.record.amended(outcome=failed), None, order_of(plan)
    )
    (accept,) = [send.message for send in proposer.propose(100.0) if send.to == A]
    assert node.receive(D, accept, at(101)) == [] and node.witnesses[JOB].witness_record.record == plan.record, (
        "after it"
    )


def test_record_that_counts_too_far_is_left_out_of_a_plan() -> None:
    """One node could otherwise leave no number for the group that the user names."""
    far = (1 << 53) - 1
    seven = witness_record(config=SEVEN)
    for wild in (
        msgspec.structs.replace(seven, promised=far),
        msgspec.structs.replace(seven, config=msgspec.structs.replace(SEVEN, number=far)),
    ):
        plan = plan_from({A: seven, D: wild})
        assert plan.kept == (A,) and plan.reconfiguration.term < far
        assert decode_reconfiguration(order_of(plan)) == plan.reconfiguration
        with pytest.raises(RecoveryError, match="no node that can be reached has a record"):
            plan_from({D: wild})
    most = plan_from({A: msgspec.structs.replace(seven, promised=MOST_REACHED - 1)})
    assert decode_reconfiguration(order_of(most)) == most.reconfiguration


def test_older_reconfiguration_is_refused() -> None:
    witness = make_witness()
    plan = plan_from({A: witness_record()})
    stated = plan.reconfiguration
    newer = Config(number=9, term=stated.term + LEAP, members=voters(A))
    witness.witness_record = witness_record(config=newer, promised=stated.term + LEAP)
    witness.lease_until = 200.0
    old = Accept(JOB, stated.term, 1, stated.config, RECORD, None, reconfiguration=order_of(plan))
    (answer,) = witness.accept_reconfiguration(D, old, 100.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert witness.lease_until == 200.0 and witness.witness_record.config == newer


def test_recovery_succeeds_only_when_its_group_has_accepted() -> None:
    node, plan = make_participant(A, None), plan_from(dict.fromkeys((A, D, E), witness_record(config=SEVEN)))
    node.recover(plan, order_of(plan), at(100))
    term, nodes = plan.reconfiguration.term, plan.reconfiguration.config.nodes
    stale = Accepted(job=JOB, term=term, disk=DISK, round=99)
    assert [node.receive(one, stale, at(101)) for one in nodes] == [[]] * 3, "of a round that nobody has sent"
    answers = [node.receive(one, msgspec.structs.replace(stale, round=1), at(101)) for one in nodes[:2]]
    assert answers == [[], [Directed(JOB, "submitter", Submitted(None))]]


def test_old_runner_and_returning_witnesses_are_fenced() -> None:
    survivor = make_participant(A, witness_record())
    play({A: survivor}, survivor.recover(again := plan_from({A: witness_record()}), order_of(again), at(100)), A)
    witness = survivor.witnesses[JOB]
    old = Proposer(JOB, SPEC_BYTES, 2, Config(number=0, term=0, members=voters(A, B, C)), RECORD, E)
    (renewal,) = [send.message for send in old.propose(101.0) if send.to == A]
    (answer,) = witness.handle(E, renewal, 101.0)  # type: ignore[arg-type]
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert isinstance(old.on_refused(A, answer.message), list), (
        "the lost witnesses gave it the lease, which ends by itself"
    )
    assert isinstance(old.on_refused(B, answer.message), Fenced), "one that is back knows the new group too"
    (answer,) = witness.handle(B, Prepare(job=JOB, term=4), 101.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert answer.message.config is not None and B not in answer.message.config.nodes, (
        "B learns the new group, so its leader stops"
    )


def test_plan_keeps_an_outcome_accepted_without_a_majority() -> None:
    done = Outcome(kind="done", detail="done", exit_code=0, manifest=None, holders=(), ended_unix_ms=1)
    ended = RECORD.amended(attempts=(), outcome=done)
    assert plan_from({A: witness_record(record=ended)}).record.outcome == done


def test_record_keeps_the_users_word_before_it_is_accepted() -> None:
    witness = make_witness()
    config = Config(1 << 20, 1 << 20, voters(A))
    word = Accept(JOB, 1 << 20, 1, config, JobRecord(1), None, reconfiguration=b"the user's word")
    effects = witness.accept_reconfiguration(D, word, 0.0)
    saved = [effect.witness_record for effect in effects if isinstance(effect, SaveWitnessRecord)]
    assert saved[-1] == witness.witness_record and saved[-1].reconfiguration == b"the user's word"
    assert isinstance(effects[-1], Send), "on disk before the answer"
    stale = msgspec.structs.replace(word, term=3, config=Config(2, 3, voters(B)), reconfiguration=b"another word")
    witness.accept_reconfiguration(D, stale, 0.0)
    assert witness.witness_record == saved[-1]


def test_of_two_recoveries_on_two_sides_of_a_cut_one_has_the_job() -> None:
    """Regression: both groups had equal numbers, never spoke to each other, and each brought the job to an end of its own."""
    sides = {A: (A, D), B: (B, E)}
    plans = {node: make_plan(JOB, {node: witness_record()}, make_view(node, sides[node]), at(100)) for node in sides}
    nodes = {A: make_participant(A, witness_record()), B: make_participant(B, witness_record())}
    for node, plan in plans.items():
        play({node: nodes[node]}, nodes[node].recover(plan, order_of(plan), at(100)), node)
    first, second = sorted(sides, key=lambda node: plans[node].reconfiguration.term)
    assert plans[second].reconfiguration.term >= plans[first].reconfiguration.term + LEAP
    ended = JobRecord(version=20, outcome=Outcome("done", "done", 0, None, (), 1))
    nodes[first].witnesses[JOB].close(plans[first].reconfiguration.term, ended)
    orders = {JOB: [order_of(plan) for plan in plans.values()]}
    for node in sides:
        nodes[node].observe(make_view(node, (A, B, D, E), recoveries=orders), at(200))
    left, kept = (nodes[node].witnesses[JOB] for node in (first, second))
    assert left.witness_record.config == kept.witness_record.config == plans[second].reconfiguration.config
    assert not left.finished and left.witness_record.record.outcome is None, "its end gives way too"
    assert left.witness_record.holder is None
    assert nodes[first].leaders[JOB].state == "retired"


def test_running_job_of_an_overruled_recovery_is_given_up() -> None:
    node = make_participant(A, witness_record())
    assert node.witnesses[JOB].witness_record.holder is not None
    order = ForcedReconfiguration(JOB, LEAP, Config(LEAP, LEAP, voters(D, E)))
    node.observe(make_view(A, (A, D, E), recoveries={JOB: [encode_reconfiguration(order)]}), at(101))
    kept = node.witnesses[JOB].witness_record
    assert (kept.config, kept.holder) == (order.config, None)
    member, held = make_participant(A, witness_record()), witness_record()
    order = ForcedReconfiguration(JOB, LEAP, Config(LEAP, LEAP, voters(A, D, E)))
    member.observe(make_view(A, (A, D, E), recoveries={JOB: [encode_reconfiguration(order)]}), at(101))
    assert member.witnesses[JOB].witness_record == held, "a member waits for the record that the recovery brings"


def test_runner_of_an_overruled_recovery_ends() -> None:
    plan = plan_from({A: witness_record()})
    node = make_participant(E, None)
    node.receive(A, make_start(term=plan.reconfiguration.term - LEAP), at(100))
    assert JOB in node.runners
    out = node.observe(make_view(E, (A, D, E), recoveries={JOB: [b"nonsense", order_of(plan)]}), at(101))
    assert JOB not in node.runners and any(isinstance(item.effect, Ended) for item in out)
    own = make_participant(A, witness_record())
    own.receive(A, make_start(term=plan.reconfiguration.term - LEAP), at(100))
    play({A: own}, own.recover(plan, order_of(plan), at(100)), A)
    assert JOB in own.runners and own.witnesses[JOB].witness_record.reconfiguration == order_of(plan)
    own.observe(make_view(A, (A, D, E), recoveries={JOB: [order_of(plan)]}), at(101))
    assert JOB not in own.runners, "also where the new group is kept, which has the order already"
    node.receive(A, make_start(term=plan.reconfiguration.term + 1), at(200))
    node.observe(make_view(E, (A, D, E), recoveries={JOB: [order_of(plan)]}), at(200))
    assert JOB in node.runners, "an attempt of the recovered group goes on"


def test_node_that_is_a_witness_again_leads_again() -> None:
    participant = make_participant(A, witness_record(holder=None))
    participant.leaders[JOB].stand_down()
    participant.observe(make_view(A, (A, B, C)), at(101))
    assert participant.leaders[JOB].state == "retired"
    held = participant.witnesses[JOB]
    held.witness_record = msgspec.structs.replace(held.witness_record, config=Config(7, 7, voters(A, B, C)))
    participant.observe(make_view(A, (A, B, C)), at(102))
    assert participant.leaders[JOB].state == "asking"
