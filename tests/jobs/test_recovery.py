"""Going on from the record that is left: what is chosen, who may say so, and what becomes of those who come back."""

from random import Random

import msgspec
import pytest

from mesh.jobs.effects import Cell, Send
from mesh.jobs.ledger import Attempt, Commit, Config, Ledger, Outcome, Seat
from mesh.jobs.messages import Accept, Prepare, Refused
from mesh.jobs.participant import Directed, Participant, Rules, Submitted
from mesh.jobs.proposer import Fenced, Proposer
from mesh.jobs.recovery import (
    LEAP,
    RECORD_LOST,
    Mandate,
    Plan,
    RecoveryError,
    decode_mandate,
    encode_mandate,
    make_plan,
)
from mesh.jobs.witness import Witness
from tests.jobs.worlds import DISK, JOB, SPEC_BYTES, A, B, C, D, E, at, make_spec, make_view, make_witness, seats

COMMIT = Commit(seq=4, term=2, manifest=b"m" * 32, parent=None, holders=(), step=20, created_unix_ms=5)
RUNNING = Attempt(number=1, node=E, nick="e", term=2, started_unix_ms=10, seen_unix_ms=900)
LEDGER = Ledger(version=9, commit=COMMIT, attempts=(RUNNING,))
SEAL = b"sealed"


def cell(**changes: object) -> Cell:
    fields = {"promised": 3, "accepted_term": 2, "ledger": LEDGER, "holder": E, **changes}
    return msgspec.structs.replace(make_witness().cell, **fields)


def plan_from(cells: dict[bytes, Cell], **view: object) -> Plan:
    return make_plan(JOB, cells, make_view(A, (A, D, E), **view), at(100))


def test_it_goes_on_from_the_newest_record_that_is_left() -> None:
    older = cell(accepted_term=1, ledger=Ledger(version=30))
    five = Config(number=2, term=2, members=seats(A, B, C, D, E))
    plan = plan_from({A: cell(config=five), D: msgspec.structs.replace(older, config=five)})
    assert plan.ledger.commit == COMMIT and plan.kept == (A, D) and plan.lost == (B, C, E)
    assert plan.ledger.attempts[-1].reason == RECORD_LOST and plan.ledger.attempts[-1].ended_unix_ms == 900
    assert plan.mandate.term == 3 + LEAP and plan.mandate.config.number == 2 + LEAP
    assert plan.mandate.config.members == seats(A, D, E) and plan.spec == SPEC_BYTES


def test_its_group_is_odd_and_of_those_who_stay() -> None:
    assert plan_from({A: cell()}, leaving=frozenset({D})).mandate.config.members == seats(A)
    (best,) = plan_from({A: cell()}, leaving=frozenset({A})).mandate.config.nodes
    assert best in {D, E}
    lost_disk = plan_from({A: cell()}, disks={A: b"another!", D: b"another!", E: DISK}).mandate.config.members
    assert set(lost_disk) == {*seats(A), Seat(D, b"another!"), *seats(E)}


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({}, "submit it again"),
        ({A: cell(), B: cell()}, "goes on by itself"),
        ({A: cell(final=True)}, "over"),
    ],
)
def test_there_must_be_something_to_recover(cells: dict[bytes, Cell], words: str) -> None:
    with pytest.raises(RecoveryError, match=words):
        plan_from(cells)


def test_a_mandate_survives_the_wire_and_nonsense_is_none() -> None:
    mandate = Mandate(JOB, 7, Config(number=1, term=7, members=seats(A)))
    assert decode_mandate(encode_mandate(mandate)) == mandate
    for nonsense in (b"", b"\xff", msgspec.msgpack.encode([1]), encode_mandate(mandate)[:-1]):
        assert decode_mandate(nonsense) is None


def make_participant(node: bytes, held: Cell | None, mandated: bool = True) -> Participant:
    rules = Rules(
        lambda job, spec: make_spec(),
        lambda job, spec, start: None,
        lambda *asked: True,
        lambda message, spec: mandated and message.mandate == SEAL,
    )
    participant = Participant(node, DISK, "", rules, Random(1))
    if held is not None:
        participant.restore(Witness.restored(held, make_spec(), 100.0), at(100))
    return participant


def play(participants: dict[bytes, Participant], out: list[Directed | Submitted], sender: bytes) -> list[Submitted]:
    """Carry everything to and fro; what the submitter is told."""
    wire = [(sender, output) for output in out]
    told: list[Submitted] = []
    while wire:
        source, output = wire.pop(0)
        if isinstance(output, Submitted):
            told.append(output)
        elif isinstance(output.effect, Send) and output.effect.to in participants:
            to = output.effect.to
            wire += [(to, more) for more in participants[to].receive(source, output.effect.message, at(100))]
    return told


def test_the_group_that_the_user_names_takes_over_from_a_lease_that_still_runs() -> None:
    participants = {A: make_participant(A, cell()), D: make_participant(D, None), E: make_participant(E, None)}
    plan = plan_from({A: cell()})
    assert participants[A].witnesses[JOB].lease_left_s(100.0) > 0
    assert play(participants, participants[A].recover(plan, SEAL, at(100)), A) == [Submitted(JOB, None)]
    held = [participant.witnesses[JOB].cell for participant in participants.values()]
    assert {kept.config for kept in held} == {plan.mandate.config} and {kept.ledger for kept in held} == {plan.ledger}
    assert all(kept.holder is None for kept in held)


def test_without_the_users_signature_nothing_changes() -> None:
    stranger = make_participant(A, cell(), mandated=False)
    before = stranger.witnesses[JOB].cell
    proposer = Proposer(JOB, SPEC_BYTES, 3 + LEAP, plan_from({A: cell()}).mandate.config, LEDGER, None, SEAL)
    (accept,) = [send.message for send in proposer.propose(100.0) if send.to == A]
    assert stranger.receive(D, accept, at(100)) == []
    assert stranger.witnesses[JOB].cell == before and stranger.refused == 1


def test_an_old_mandate_moves_nothing_back() -> None:
    witness = make_witness()
    newer = Config(number=5 * LEAP, term=9, members=seats(A))
    witness.cell = cell(config=newer, promised=5 * LEAP)
    witness.lease_until = 200.0
    old = Accept(JOB, 3 + LEAP, 1, plan_from({A: cell()}).mandate.config, LEDGER, None, mandate=SEAL)
    (answer,) = witness.take_mandate(D, old, 100.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert witness.lease_until == 200.0 and witness.cell.config == newer


def test_the_old_runner_and_those_who_come_back_are_fenced() -> None:
    survivor = make_participant(A, cell())
    play({A: survivor}, survivor.recover(plan_from({A: cell()}), SEAL, at(100)), A)
    witness = survivor.witnesses[JOB]
    old = Proposer(JOB, SPEC_BYTES, 2, Config(number=0, term=0, members=seats(A, B, C)), LEDGER, E)
    (renewal,) = [send.message for send in old.propose(101.0) if send.to == A]
    (answer,) = witness.handle(E, renewal, 101.0)  # type: ignore[arg-type]
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert isinstance(old.on_refused(A, answer.message), Fenced)
    (answer,) = witness.handle(B, Prepare(job=JOB, term=4), 101.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Refused)
    assert answer.message.config is not None and B not in answer.message.config.nodes, "so that B's steward stands down"


def test_an_end_that_was_merely_accepted_is_carried_on() -> None:
    done = Outcome(kind="done", detail="done", exit_code=0, manifest=None, holders=(), ended_unix_ms=1)
    ended = LEDGER.amended(attempts=(), outcome=done)
    assert plan_from({A: cell(ledger=ended)}).ledger.outcome == done
