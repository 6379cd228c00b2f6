"""Witness, steward and runner wired together, and who may do what to a job."""

from random import Random

import pytest

from mesh.jobs.effects import Cell, Launch, Notify, Send, SetTimer
from mesh.jobs.ledger import Attempt, Config, Ledger, Outcome
from mesh.jobs.messages import (
    Accept,
    Accepted,
    AnyMessage,
    Cancel,
    MakeRoom,
    Prepare,
    Refused,
    Released,
    Start,
    StartAnswer,
)
from mesh.jobs.participant import SUBMIT_WITHIN_S, Directed, Participant, Rules, Submitted
from mesh.jobs.reports import GuestStarted
from mesh.jobs.spec import JobSpec, SpecError
from mesh.jobs.steward import ANSWER_S
from mesh.jobs.view import Timer
from mesh.jobs.witness import Witness
from tests.jobs.worlds import (
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
    seats,
)

URGENT = b"another's sealed spec"
GROUP = Config(number=0, term=0, members=seats(A, B, C))


def open_spec(job: bytes, sealed: bytes) -> JobSpec:
    if sealed == URGENT:
        return make_spec(user="eve", priority=90)
    if sealed != SPEC_BYTES:
        raise SpecError("not signed")
    return make_spec()


def make_participant(me: bytes = A, admit: str | None = None) -> Participant:
    rules = Rules(
        open_spec=open_spec, admit=lambda job, spec, start: admit, may_cancel=lambda s, user, spec: user == spec.user
    )
    return Participant(me, DISK, f"node-{me[0]}", rules, Random(1))


def messages(out: list[Directed | Submitted], kind: type) -> list[tuple[bytes, AnyMessage]]:
    effects = [item.effect for item in out if isinstance(item, Directed)]
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def introduce(
    participant: Participant, holder: bytes | None = None, spec: bytes | None = SPEC_BYTES
) -> list[Directed | Submitted]:
    message = Accept(job=JOB, term=1 if holder else 0, round=1, config=GROUP, ledger=Ledger(), holder=holder, spec=spec)
    return participant.receive(holder or B, message, at(0))


def test_an_unknown_job_asks_for_the_spec_and_takes_no_forged_one() -> None:
    participant = make_participant()
    assert messages(introduce(participant, spec=None), Refused) and not participant.witnesses
    assert introduce(participant, spec=b"forged") == [] and participant.refused == 1 and not participant.witnesses
    introduce(participant)
    assert JOB in participant.witnesses and JOB in participant.stewards


def test_a_node_starts_what_a_witness_hands_it_once() -> None:
    participant = make_participant(D)
    out = participant.receive(A, make_start(), at(0))
    assert [m.taken for _, m in messages(out, StartAnswer)] == [True]  # type: ignore[union-attr]
    assert len(messages(out, Accept)) == 3 and JOB in participant.runners
    again = participant.receive(A, make_start(), at(0))
    assert [m.taken for _, m in messages(again, StartAnswer)] == [True] and not messages(again, Accept)  # type: ignore[union-attr]
    other = participant.receive(A, make_start(term=2), at(0))
    assert [m.taken for _, m in messages(other, StartAnswer)] == [False]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sender", "admit", "spec", "words", "refused"),
    [
        (E, None, SPEC_BYTES, "only a witness", 1),
        (A, "its slots are taken", SPEC_BYTES, "slots", 0),
        (A, None, b"forged", "not signed", 1),
    ],
)
def test_a_start_that_is_not_taken_says_why(
    sender: bytes, admit: str | None, spec: bytes, words: str, refused: int
) -> None:
    participant = make_participant(D, admit)
    start = Start(job=JOB, term=1, config=GROUP, ledger=Ledger(), spec=spec)
    (_, answer), *_ = messages(participant.receive(sender, start, at(0)), StartAnswer)
    assert isinstance(answer, StartAnswer) and not answer.taken and words in answer.reason
    assert participant.refused == refused and not participant.runners


def test_who_repeats_an_end_keeps_nobody_waiting() -> None:
    participant = make_participant()
    introduce(participant, D)
    participant.observe(make_view(A, (A, B, C, D)), at(0))
    attempt = Attempt(0, D, "d", 1, 0, ended_unix_ms=1, reason="done")
    ended = Ledger(version=2, attempts=(attempt,), outcome=Outcome("done", "done", 0, None, (), 1_000))
    for number in (2, 3):
        accept = Accept(job=JOB, term=1, round=number, config=GROUP, ledger=ended, holder=None)
        out = participant.receive(D, accept, at(1))
    turns = [item.effect.at for item in out if isinstance(item, Directed) and isinstance(item.effect, SetTimer)]
    assert turns == [1 + ANSWER_S]


def test_only_the_jobs_user_cancels_it() -> None:
    participant = make_participant()
    introduce(participant)
    participant.receive(E, Cancel(job=JOB, user="mallory"), at(0))
    assert participant.refused == 1 and not participant.witnesses[JOB].cell.cancel_wanted
    participant.receive(E, Cancel(job=b"?" * 16, user="ada"), at(0))
    assert participant.refused == 2
    participant.receive(E, Cancel(job=JOB, user="ada"), at(0))
    assert participant.witnesses[JOB].cell.cancel_wanted


@pytest.mark.parametrize(
    ("spec", "after_s", "leaves", "refused"),
    [(URGENT, 1000, True, 0), (URGENT, 10, False, 0), (SPEC_BYTES, 1000, False, 0), (b"forged", 1000, False, 1)],
)
def test_a_runner_makes_room_for_what_matters_more_by_that_jobs_own_word(
    spec: bytes, after_s: float, leaves: bool, refused: int
) -> None:
    participant = make_participant(D)
    participant.receive(A, make_start(), at(0))
    participant.receive(A, Accepted(job=JOB, term=1, disk=DISK, round=1), at(0))
    participant.receive(B, Accepted(job=JOB, term=1, disk=DISK, round=1), at(0))
    participant.tell_runner(JOB, GuestStarted(None), at(0))
    out = participant.receive(E, MakeRoom(job=JOB, wanted_by=b"urgent" + bytes(10), spec=spec), at(after_s))
    notices = [item.effect for item in out if isinstance(item, Directed) and isinstance(item.effect, Notify)]
    assert bool(notices) == leaves and participant.refused == refused
    assert not leaves or "of eve, of priority 90" in notices[0].reason


def test_a_submission_is_answered_by_a_majority() -> None:
    submitter = make_participant(A)
    out = submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert sorted(to for to, _ in messages(out, Accept)) == [A, B, C]
    others = {node: make_participant(node) for node in (B, C)}
    done: list[Submitted] = []
    for node, participant in others.items():
        queue = [m for to, m in messages(out, Accept) if to == node]
        while queue:
            for to, answer in messages(participant.receive(A, queue.pop(), at(0)), object):
                assert to == A
                reply = submitter.receive(node, answer, at(0))
                done += [item for item in reply if isinstance(item, Submitted)]
                queue += [m for target, m in messages(reply, Accept) if target == node]
    assert done == [Submitted(JOB, None)]
    assert all(JOB in participant.witnesses for participant in others.values())


def refused(promised: int, accepted_term: int = 0, finished: bool = False) -> Refused:
    return Refused(
        job=JOB,
        term=0,
        disk=DISK,
        round=1,
        promised=promised,
        config=GROUP,
        lease_left_s=0.0,
        needs_spec=False,
        finished=finished,
        accepted_term=accepted_term,
    )


def test_a_witness_that_has_begun_alone_is_no_majority() -> None:
    """The submitter's own steward wants a term as soon as its own cell is there, and refuses the next round."""
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert submitter.receive(A, refused(1), at(1)) == [] and submitter.receive(A, refused(2), at(2)) == []
    assert submitter.receive(B, refused(2), at(3)) == [Submitted(JOB, None)], "two of three have it"


@pytest.mark.parametrize("known", [refused(3, accepted_term=2), refused(3, finished=True)])
def test_a_witness_under_a_term_that_was_won_speaks_for_a_majority(known: Refused) -> None:
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert submitter.receive(B, known, at(1)) == [Submitted(JOB, None)]


def test_a_submission_that_nobody_answers_is_given_up_in_words() -> None:
    submitter = make_participant(A)
    out = submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    timer = next(item.effect for item in out if isinstance(item, Directed) and not isinstance(item.effect, Send))
    again = submitter.on_timer(JOB, "submitter", Timer(timer.name, timer.token), at(1))  # type: ignore[union-attr]
    assert len(messages(again, Accept)) == 3, "it is sent again"
    timer = next(item.effect for item in again if isinstance(item, Directed) and not isinstance(item.effect, Send))
    last = submitter.on_timer(JOB, "submitter", Timer(timer.name, timer.token), at(SUBMIT_WITHIN_S))  # type: ignore[union-attr]
    assert last == [Submitted(JOB, "no majority of its witnesses answered")]


def test_after_a_restart_its_own_lease_is_given_back_since_its_guest_is_gone() -> None:
    held = make_witness()
    held.handle(A, Accept(job=JOB, term=3, round=1, config=GROUP, ledger=Ledger(version=1), holder=A), 0.0)
    cell: Cell = held.cell
    participant = make_participant(A)
    out = participant.restore(Witness.restored(cell, make_spec(), 10.0), at(10))
    assert sorted(to for to, _ in messages(out, Released)) == [A, B, C]
    foreign = make_witness()
    foreign.handle(D, Accept(job=JOB, term=3, round=1, config=GROUP, ledger=Ledger(version=1), holder=D), 0.0)
    out = make_participant(A).restore(Witness.restored(foreign.cell, make_spec(), 10.0), at(10))
    assert messages(out, Released) == []


def test_the_whole_of_it_with_three_nodes_and_a_runner() -> None:
    """Messages are carried in order; the job is launched on the one node that lends."""
    nodes = {node: make_participant(node) for node in (A, B, C, D)}
    queue: list[tuple[bytes, bytes, AnyMessage]] = []
    launched: list[bytes] = []

    def take(me: bytes, out: list[Directed | Submitted]) -> None:
        for item in out:
            if isinstance(item, Directed) and isinstance(item.effect, Send):
                queue.append((me, item.effect.to, item.effect.message))
            elif isinstance(item, Directed) and isinstance(item.effect, Launch):
                launched.append(me)

    for node, participant in nodes.items():
        adverts = tuple(ad for ad in make_view(node, (A, B, C, D)).adverts if ad.node == D)
        view = make_view(node, (A, B, C, D), adverts=adverts)
        take(node, participant.observe(view, at(0)))
    take(A, nodes[A].submit(JOB, SPEC_BYTES, make_spec(), at(0)))
    for _ in range(200):
        if not queue:
            break
        source, target, message = queue.pop(0)
        take(target, nodes[target].receive(source, message, at(0)))
    assert launched == [D] and not queue
    holders = {nodes[node].witnesses[JOB].cell.holder for node in (A, B, C)}
    assert holders == {D}


def test_a_prepare_for_an_unknown_job_is_answered() -> None:
    assert messages(make_participant().receive(B, Prepare(job=JOB, term=1), at(0)), Refused)
