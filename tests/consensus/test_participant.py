"""Participant: witness, leader and runner of a job on one node, and the permissions of other nodes."""

from random import Random
from typing import Any

import msgspec
import pytest

from membership.lengths import MOST_TEXT
from mesh.consensus import participant as module
from mesh.consensus.effects import (
    MOST_EARLIER,
    Ended,
    Launch,
    Notify,
    RunUntil,
    Send,
    SetTimer,
    Submitted,
    WitnessRecord,
)
from mesh.consensus.leader import ANSWER_S, PREPARED_S
from mesh.consensus.messages import (
    Accept,
    Accepted,
    AnyMessage,
    Begin,
    Cancel,
    Closed,
    Dismiss,
    Enlist,
    Enlisted,
    ExtendRun,
    GangPlace,
    Introduce,
    Introduced,
    MakeRoom,
    Migrate,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promised,
    Refused,
    Released,
    RunGranted,
    Start,
    StartAnswer,
    decode_message,
    encode_message,
)
from mesh.consensus.participant import FULL, SUBMIT_WITHIN_S, Directed, Participant, Rules
from mesh.consensus.reports import GuestStarted
from mesh.consensus.runner import Runner
from mesh.consensus.view import Instant, Timer
from mesh.consensus.witness import Witness
from mesh.model.record import AHEAD_MS, FIRST_TERM, Attempt, Config, JobRecord, Outcome, Voter
from mesh.model.spec import JobSpec, SpecError
from placement.preemption import YIELDS, YIELDS_S
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

AnyAnswer = {PreVote: PreVoteGranted, Prepare: Promised}
URGENT = b"another's sealed spec"
GROUP = Config(number=0, term=0, members=voters(A, B, C))


def open_spec(job: bytes, sealed: bytes) -> JobSpec:
    if sealed == URGENT:
        return make_spec(user="eve", priority=90)
    if sealed != SPEC_BYTES:
        raise SpecError("not signed")
    return make_spec()


def make_participant(me: bytes = A, admit: str | None = None, life: int = 1) -> Participant:
    rules = Rules(
        open_spec=open_spec, admit=lambda job, spec, start: admit, may_cancel=lambda s, user, spec: user == spec.user
    )
    return Participant(me, DISK, f"node-{me[0]}", rules, Random(life))


def messages(out: list[Directed], kind: type) -> list[tuple[bytes, AnyMessage]]:
    effects = [item.effect for item in out if isinstance(item, Directed)]
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def introduce(participant: Participant, holder: bytes | None = None, spec: bytes | None = SPEC_BYTES) -> list[Directed]:
    message = Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(), holder=holder, spec=spec)
    return participant.receive(holder or B, message, at(0))


def test_witness_asks_for_the_spec_of_an_unknown_job_and_refuses_a_forgery() -> None:
    participant = make_participant()
    assert messages(introduce(participant, spec=None), Refused) and not participant.witnesses
    assert introduce(participant, spec=b"forged") == [] and participant.refused == 1 and not participant.witnesses
    participant.forgotten.add(JOB)
    assert introduce(participant) == [] and not participant.witnesses, "the group names a disk that has promised"
    participant.forgotten.clear()
    introduce(participant)
    assert JOB in participant.witnesses and JOB in participant.leaders


def test_jobs_of_one_user_take_a_bounded_place_at_a_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may submit any number of jobs, and memory and journal are for those of all."""
    monkeypatch.setattr(module, "OF_A_USER_BYTES", 2 * module.LEAST_BYTES)
    node = make_participant()

    def taken(number: int, group: int = 0, spec: bytes = SPEC_BYTES) -> bool:
        config = msgspec.structs.replace(GROUP, number=group)
        accept = Accept(
            job=bytes([number]) * 16, term=1, round=1, config=config, record=JobRecord(), holder=None, spec=spec
        )
        return bool(messages(node.receive(B, accept, at(0)), Accepted))

    def problem(number: int) -> str:
        asked = Introduce(job=bytes([number]) * 16, spec=SPEC_BYTES)
        ((_, answer),) = messages(node.receive(A, asked, at(0)), Introduced)
        return answer.problem  # type: ignore[union-attr]

    assert problem(1) == "" and taken(1) and taken(2) and problem(2) == ""
    assert not taken(3) and node.refused == 1 and problem(3) == FULL
    assert taken(4, spec=URGENT), "another user's"
    assert taken(3, group=1) and taken(5, group=1), "who was introduced before gets in"
    assert not taken(6, group=1)
    for number in (1, 2, 3):
        witness = node.witnesses[bytes([number]) * 16]
        witness.witness_record = msgspec.structs.replace(witness.witness_record, final=True)
        node.archive(bytes([number]) * 16)
    assert taken(6) and not taken(7), "archived jobs make room"
    once = node.witnesses[bytes([6]) * 16]
    node.restore(once, at(0))
    assert node._of_users[once.spec.user_key] == 2 * module.LEAST_BYTES


def test_record_of_a_user_whose_jobs_take_too_much_grows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner writes what it likes into the record of its job, and a message holds a megabyte."""
    monkeypatch.setattr(module, "OF_A_USER_BYTES", 2 * module.LEAST_BYTES)
    node = make_participant()
    introduce(node)

    def says(version: int, reason: str, group: Config = GROUP) -> bool:
        record = JobRecord(version=version, attempts=(Attempt(0, D, "d", 1, 5, reason=reason),))
        accept = Accept(job=JOB, term=1, round=version, config=group, record=record, holder=None)
        return bool(messages(node.receive(B, accept, at(1)), Accepted))

    assert says(1, "x" * 30_000) and says(2, "x" * 60_000)
    user = make_spec().user_key
    assert node._of_users[user] > module.JOINED * module.OF_A_USER_BYTES
    assert not says(3, "x" * 60_001) and node.refused == 1
    assert not says(3, "", msgspec.structs.replace(GROUP, number=1)), "groups take room, too"
    assert says(4, "x" * 100) and node._of_users[user] == module.LEAST_BYTES and says(5, "x" * 30_000)


def test_witness_asks_who_may_propose() -> None:
    participant, allowed = make_participant(), [False]
    participant._rules = msgspec.structs.replace(participant._rules, may_propose=lambda *asked: allowed[0])
    assert introduce(participant) == [] and not participant.witnesses, "it creates no record"
    allowed[0] = True
    introduce(participant)
    allowed[0], before = False, participant.witnesses[JOB].witness_record
    later = Accept(job=JOB, term=2, round=1, config=GROUP, record=JobRecord(version=9), holder=E)
    assert messages(participant.receive(E, later, at(1)), Refused)
    assert participant.witnesses[JOB].witness_record == before and participant.refused == 2


def test_node_starts_a_job_once_when_its_witness_asks() -> None:
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
def test_declined_start_names_the_reason(
    sender: bytes, admit: str | None, spec: bytes, words: str, refused: int
) -> None:
    participant = make_participant(D, admit)
    start = Start(job=JOB, term=1, config=GROUP, record=JobRecord(), spec=spec)
    (_, answer), *_ = messages(participant.receive(sender, start, at(0)), StartAnswer)
    assert isinstance(answer, StartAnswer) and not answer.taken and words in answer.reason
    assert participant.refused == refused and not participant.runners


def test_forged_description_of_a_known_job_is_refused() -> None:
    participant = make_participant(A)
    introduce(participant)
    start = msgspec.structs.replace(make_start(term=2), spec=b"forged")
    ((_, answer),) = messages(participant.receive(B, start, at(0)), StartAnswer)
    assert isinstance(answer, StartAnswer) and answer.reason == "not signed" and participant.refused == 1


def test_repeated_outcome_does_not_delay_the_leader() -> None:
    participant = make_participant()
    introduce(participant, D)
    participant.observe(make_view(A, (A, B, C, D)), at(0))
    attempt = Attempt(0, D, "d", 1, 0, ended_unix_ms=1, reason="done")
    ended = JobRecord(version=2, attempts=(attempt,), outcome=Outcome("done", "done", 0, None, (), 1_000))
    for number in (2, 3):
        accept = Accept(job=JOB, term=1, round=number, config=GROUP, record=ended, holder=None)
        out = participant.receive(D, accept, at(1))
    turns = [item.effect.at for item in out if isinstance(item, Directed) and isinstance(item.effect, SetTimer)]
    assert turns == [1 + ANSWER_S]


def test_only_the_user_of_a_job_cancels_it() -> None:
    participant = make_participant()
    introduce(participant)
    participant.receive(E, Cancel(job=JOB, user="mallory"), at(0))
    assert participant.refused == 1 and not participant.witnesses[JOB].witness_record.cancel_wanted
    participant.receive(E, Cancel(job=b"?" * 16, user="ada"), at(0))
    assert participant.refused == 2
    participant.receive(E, Cancel(job=JOB, user="ada"), at(0))
    assert participant.witnesses[JOB].witness_record.cancel_wanted


@pytest.mark.parametrize(
    ("spec", "after_s", "fits", "leaves", "refused"),
    [
        (URGENT, 1000, True, True, 0),
        (URGENT, 10, True, False, 0),
        (URGENT, 1000, False, False, 0),
        (SPEC_BYTES, 1000, True, False, 0),
        (b"forged", 1000, True, False, 1),
    ],
)
def test_runner_yields_only_to_a_signed_job_of_higher_priority_that_would_fit(
    spec: bytes, after_s: float, fits: bool, leaves: bool, refused: int
) -> None:
    participant, asked = make_participant(D), list[tuple[bytes, bytes]]()

    def fits_without(guest: bytes, job: bytes, spec: JobSpec) -> bool:
        asked.append((guest, job))
        return fits

    participant._rules = msgspec.structs.replace(participant._rules, fits_without=fits_without)
    ((_, accept), *_) = messages(participant.receive(A, make_start(), at(0)), Accept)
    assert isinstance(accept, Accept)
    for witness in (A, B):
        participant.receive(witness, Accepted(job=JOB, term=1, disk=DISK, round=accept.round), at(0))
    participant.report(JOB, GuestStarted(None), at(0))
    out = participant.receive(E, MakeRoom(job=JOB, wanted_by=b"urgent" + bytes(10), spec=spec), at(after_s))
    notices = [item.effect for item in out if isinstance(item, Directed) and isinstance(item.effect, Notify)]
    assert bool(notices) == leaves and participant.refused == refused
    assert not leaves or "of eve, of priority 90" in notices[0].reason
    assert not leaves or asked == [(JOB, b"urgent" + bytes(10))]


def test_guests_leave_for_few_jobs_of_a_user_that_do_not_come() -> None:
    """A user whose jobs of priority 100 never took their places sent guests away every two minutes."""
    participant = make_participant(D)
    participant._rules = msgspec.structs.replace(participant._rules, fits_without=lambda guest, job, spec: True)

    def leaves(when: float) -> bool:
        """Tell whether a guest that has come 200 s before leaves for an urgent job."""
        participant.runners.clear()
        ((_, accept), *_) = messages(participant.receive(A, make_start(), at(when - 200)), Accept)
        assert isinstance(accept, Accept)
        for witness in (A, B):
            accepted = Accepted(job=JOB, term=1, disk=DISK, round=accept.round)
            participant.receive(witness, accepted, at(when - 200))
        participant.report(JOB, GuestStarted(None), at(when - 200))
        urgent = MakeRoom(job=JOB, wanted_by=b"urgent" + bytes(10), spec=URGENT)
        out = participant.receive(E, urgent, at(when))
        return any(isinstance(item.effect, Notify) for item in out if isinstance(item, Directed))

    assert [leaves(1000.0 + 500 * turn) for turn in range(YIELDS + 1)] == [True] * YIELDS + [False]
    assert leaves(1000.0 + YIELDS_S), "the first time is forgotten"
    assert not leaves(1250.0 + YIELDS_S)
    participant._came(participant._rules.open_spec(b"urgent" + bytes(10), URGENT))
    assert leaves(1450.0 + YIELDS_S), "a job of the user has come"


def test_submission_succeeds_when_a_majority_accepts() -> None:
    submitter = make_participant(A)
    out = submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert sorted(to for to, _ in messages(out, Accept)) == [A, B, C]
    others = {node: make_participant(node) for node in (B, C)}
    done: list[Directed] = []
    for node, participant in others.items():
        queue = [m for to, m in messages(out, Accept) if to == node]
        while queue:
            for to, answer in messages(participant.receive(A, queue.pop(), at(0)), object):
                assert to == A
                reply = submitter.receive(node, answer, at(0))
                done += [item for item in reply if isinstance(item.effect, Submitted)]
                queue += [m for target, m in messages(reply, Accept) if target == node]
    assert done == [Directed(JOB, "submitter", Submitted(None))]
    assert all(JOB in participant.witnesses for participant in others.values())


def test_answers_to_one_submission_count_for_no_other_proposer_of_its_term() -> None:
    """Regression (seed 771019 with 4 nodes): a witness accepted a second submission, and its answer made the group of the leader
    on the same node decide alone, which had used the same numbers of rounds for a change of the group."""
    submitter = make_participant(A)
    first = messages(submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0)), Accept)
    again = messages(submitter.submit(JOB, SPEC_BYTES, make_spec(), at(1)), Accept)
    rounds = [{accept.round for _, accept in sent} for sent in (first, again)]
    assert all(len(one) == 1 for one in rounds) and not rounds[0] & rounds[1]


def refused(promised: int, accepted_term: int = 0, finished: bool = False) -> Refused:
    return Refused(
        job=JOB,
        term=1,
        disk=DISK,
        round=1,
        promised=promised,
        config=GROUP,
        lease_left_s=0.0,
        needs_spec=False,
        finished=finished,
        accepted_term=accepted_term,
    )


def test_submission_does_not_succeed_by_the_submitters_own_witness() -> None:
    """The leader on the submitter asks for a term once the local witness record exists, so that witness refuses the retry."""
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert submitter.receive(A, refused(2), at(1)) == [] and submitter.receive(A, refused(3), at(2)) == []
    assert submitter.receive(B, refused(2), at(3)) == [Directed(JOB, "submitter", Submitted(None))], (
        "two of three witnesses have the job"
    )


@pytest.mark.parametrize("known", [refused(3, accepted_term=2), refused(3, finished=True)])
def test_submission_succeeds_when_a_witness_reports_a_won_term_or_an_end(known: Refused) -> None:
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert submitter.receive(B, known, at(1)) == [Directed(JOB, "submitter", Submitted(None))]


@pytest.mark.parametrize(
    ("answering", "why"),
    [(None, "no majority of its witnesses answered"), (E, "no majority of its witnesses answered"), (B, FULL)],
    ids=["nobody", "stranger", "witness"],
)
def test_unanswered_submission_fails_with_a_reason(answering: bytes | None, why: str) -> None:
    submitter = make_participant(A)
    out = submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    timer = next(item.effect for item in out if isinstance(item, Directed) and not isinstance(item.effect, Send))
    again = submitter.on_timer(JOB, "submitter", Timer(timer.name, timer.token), at(1))  # type: ignore[union-attr]
    assert len(messages(again, Accept)) == 3, "the submission is sent again"
    assert submitter.on_timer(JOB, "submitter", Timer(timer.name, timer.token), at(1)) == [], "an old timer"  # type: ignore[union-attr]
    timer = next(item.effect for item in again if isinstance(item, Directed) and not isinstance(item.effect, Send))
    if answering is not None:
        full = msgspec.structs.replace(refused(0), problem=FULL)
        assert submitter.receive(answering, full, at(2)) == [] and not submitter._submissions[JOB].have_it
    last = submitter.on_timer(JOB, "submitter", Timer(timer.name, timer.token), at(SUBMIT_WITHIN_S))  # type: ignore[union-attr]
    reason = f"a witness does not take it: {why}" if answering == B else why
    assert last == [Directed(JOB, "submitter", Submitted(reason))]


def test_leases_held_here_end_when_the_clock_has_stood_still() -> None:
    node = make_participant(D)
    node.receive(A, make_start(), at(1))
    assert node.look_at_clocks(at(2)) == []
    later = Instant(3.0, 60_000)
    assert [e.effect for e in node.look_at_clocks(later) if isinstance(e.effect, RunUntil)] == [RunUntil(0.0)]


def test_restored_record_votes_for_the_disk_that_it_is_on_now() -> None:
    """An old copy of a journal gets another name, and its promises no longer count."""
    held, node = make_witness(), make_participant(A)
    assert held.witness_record.disk == DISK
    node.disk = b"another"
    node.restore(Witness.restored(held.witness_record, make_spec(), 10.0), at(10))
    (_, answer), *_ = messages(node.receive(B, Prepare(job=JOB, term=9), at(100)), Promised)
    assert isinstance(answer, Promised) and answer.disk == b"another"


def test_restarted_node_releases_the_lease_of_its_lost_guest() -> None:
    held = make_witness()
    held.handle(A, Accept(job=JOB, term=3, round=1, config=GROUP, record=JobRecord(version=1), holder=A), 0.0)
    witness_record: WitnessRecord = held.witness_record
    participant = make_participant(A)
    participant.restore(Witness.restored(witness_record, make_spec(), 10.0), at(10))
    assert participant.witnesses[JOB].lease_left_s(10.0) == 0.0
    first = participant.observe(make_view(A, (A, B)), at(10))
    later = participant.observe(make_view(A, (A, B, C)), at(11))
    assert [[to for to, _ in messages(out, Released)] for out in (first, later)] == [[B], [C]], "each once it is known"
    foreign = make_witness()
    foreign.handle(D, Accept(job=JOB, term=3, round=1, config=GROUP, record=JobRecord(version=1), holder=D), 0.0)
    out = make_participant(A).restore(Witness.restored(foreign.witness_record, make_spec(), 10.0), at(10))
    assert messages(out, Released) == []


def test_restarted_node_keeps_the_lease_that_its_gang_members_use() -> None:
    held = make_witness()
    held.handle(A, Accept(job=JOB, term=3, round=1, config=GROUP, record=JobRecord(version=1), holder=A), 0.0)
    participant, gang = make_participant(A), make_spec(least_nodes=2, most_nodes=3)
    participant.restore(Witness.restored(held.witness_record, gang, 10.0), at(10))
    assert participant.witnesses[JOB].lease_left_s(10.0) == gang.lease_s
    assert messages(participant.observe(make_view(A, (A, B, C)), at(10)), Released) == []


def test_lease_of_another_attempt_is_not_released() -> None:
    """A node that lost its guest in a restart releases that lease only: neither a new one of its own, nor another's."""
    held = make_witness()
    held.handle(A, Accept(job=JOB, term=3, round=1, config=GROUP, record=JobRecord(version=1), holder=A), 0.0)
    everyone = make_view(A, (A, B, C, D))
    again = make_participant(A)
    again.restore(Witness.restored(held.witness_record, make_spec(), 10.0), at(10))
    again.receive(B, make_start(term=4), at(10))
    assert JOB in again.runners and messages(again.observe(everyone, at(10)), Released) == []
    overtaken = make_participant(A)
    overtaken.restore(Witness.restored(held.witness_record, make_spec(), 10.0), at(10))
    taken = Accept(job=JOB, term=4, round=1, config=GROUP, record=JobRecord(version=2), holder=D)
    overtaken.receive(D, taken, at(10))
    assert messages(overtaken.observe(everyone, at(10)), Released) == []
    foreign = make_witness()
    foreign.handle(D, Accept(job=JOB, term=3, round=1, config=GROUP, record=JobRecord(version=1), holder=D), 0.0)
    watcher = make_participant(A)
    watcher.restore(Witness.restored(foreign.witness_record, make_spec(), 10.0), at(10))
    assert watcher.witnesses[JOB].lease_left_s(10.0) == make_spec().lease_s


def test_only_the_user_of_a_job_moves_it() -> None:
    node = make_participant(D)
    node.receive(A, make_start(), at(0))
    node.runners[JOB].state = "running"
    assert node.receive(E, Migrate(job=JOB, user="mallory", to=E), at(1)) == [] and node.refused == 1
    assert any(isinstance(item.effect, Notify) for item in node.receive(E, Migrate(job=JOB, user="ada", to=E), at(1)))


def taken(out: list[Directed]) -> list[bool]:
    return [m.taken for _, m in messages(out, Enlisted | StartAnswer)]  # type: ignore[union-attr]


def test_node_has_one_attempt_of_a_job_at_a_time() -> None:
    member = make_participant(D)
    assert taken(member.receive(A, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))) == [True]
    assert taken(member.receive(A, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))) == [True], "a repeated question"
    assert taken(member.receive(A, make_start(term=3), at(0))) == [False]
    assert taken(member.receive(B, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))) == [False], "another runner asks"
    assert taken(member.receive(B, Enlist(JOB, 1, 1, SPEC_BYTES), at(0))) == [False], "an older attempt asks"
    assert member.members[JOB].runner == A
    out = member.receive(B, Enlist(JOB, 3, 1, SPEC_BYTES), at(0))
    assert taken(out) == [False] and JOB not in member.members, "the older place is given up first"
    assert taken(member.receive(B, Enlist(JOB, 3, 1, SPEC_BYTES), at(0))) == [True]
    runner = make_participant(D)
    runner.receive(A, make_start(), at(0))
    assert taken(runner.receive(B, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))) == [False]
    busy = make_participant(D, "its slots are taken")
    assert taken(busy.receive(A, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))) == [False] and not busy.members


def gathering(me: bytes, full: bool = True, **changes: object) -> Participant:
    """Return a node that gathers a gang for the job and has no place besides; `changes` are made to the other job's spec."""
    gang = {"least_nodes": 2, "most_nodes": 2, "checkpointing": None}
    specs = {SPEC_BYTES: make_spec(**gang), URGENT: make_spec(**gang, user="eve", **changes)}
    places = [None, "its slots are taken" if full else None]
    rules = Rules(
        open_spec=lambda job, sealed: specs[sealed],
        admit=lambda job, spec, order: places.pop(0),
        may_cancel=lambda s, user, spec: False,
    )
    node = Participant(me, DISK, "d", rules, Random(1))
    node.receive(A, make_start(), at(0))
    return node


LATER, SOONER = b"z" * 16, b"a" * 16


@pytest.mark.parametrize(
    ("job", "changes", "gives_way"),
    [
        (LATER, {"priority": 51}, True),
        (LATER, {"created_unix_ms": 999}, True),
        (SOONER, {}, True),
        (LATER, {}, False),
        (SOONER, {"created_unix_ms": 1001}, False),
        (SOONER, {"priority": 49, "created_unix_ms": 999}, False),
    ],
)
def test_gang_that_gathers_gives_way_to_one_before_it(job: bytes, changes: dict[str, object], gives_way: bool) -> None:
    node = gathering(D, **changes)
    out = node.receive(B, Enlist(job, 1, 1, URGENT), at(1))
    assert taken(out) == ([] if gives_way else [False]), "no answer: the other asks again"
    runner = node.runners[JOB]
    assert (runner.state == "releasing") is gives_way and not runner.attempt.fault
    assert ("gives way" in runner.attempt.reason) is gives_way


def test_no_gang_gives_way_in_vain() -> None:
    free = gathering(D, full=False, priority=99)
    assert taken(free.receive(B, Enlist(LATER, 1, 1, URGENT), at(1))) == [True], "both have a place"
    assert free.runners[JOB].state == "acquiring"
    begun = gathering(D, priority=99)
    begun.runners[JOB].state = "running"
    assert taken(begun.receive(B, Enlist(LATER, 1, 1, URGENT), at(1))) == [False]
    single = make_participant(D)
    single.receive(A, make_start(), at(0))
    single._rules = msgspec.structs.replace(single._rules, admit=lambda *asked: "its slots are taken")
    assert taken(single.receive(B, Enlist(SOONER, 1, 1, URGENT), at(1))) == [False], "it holds no other node"
    assert single.runners[JOB].state == "acquiring"


def test_gang_member_obeys_its_own_runner_only() -> None:
    member = make_participant(D)
    member.receive(A, Enlist(JOB, 2, 1, SPEC_BYTES), at(0))
    begin = Begin(job=JOB, term=2, place=GangPlace(1, 2, "h", 1), record=JobRecord())
    assert member.receive(B, begin, at(0)) == []
    assert member.receive(A, msgspec.structs.replace(begin, term=1), at(0)) == []
    out = member.receive(A, begin, at(0))
    assert any(isinstance(item.effect, Launch) for item in out)


def test_gang_member_without_a_runner_is_dismissed() -> None:
    out = make_participant(A).receive(D, ExtendRun(job=JOB, term=2, round=1), at(0))
    assert [(to, m.term, m.grace_s) for to, m in messages(out, Dismiss)] == [(D, 2, 0.0)]  # type: ignore[union-attr]


def test_only_witnesses_answer_a_submission_and_only_under_its_term() -> None:
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    accepted = Accepted(job=JOB, term=FIRST_TERM, disk=DISK, round=1)
    for node in (B, C):
        assert submitter.receive(node, msgspec.structs.replace(accepted, term=2), at(1)) == []
    assert submitter.receive(E, refused(3, finished=True), at(1)) == []
    assert submitter.receive(B, accepted, at(1)) == []
    assert submitter.receive(C, accepted, at(1)) == [Directed(JOB, "submitter", Submitted(None))]


def test_repeated_start_never_gives_one_term_two_attempts() -> None:
    """Regression: a second attempt of the term, from a late copy of its start, took the checkpoint of the first one away."""
    node = make_participant(D)
    node.receive(A, make_start(), at(0))
    first = node.runners[JOB]
    witness = make_witness()

    def ask(runner: Runner, now: float) -> AnyMessage:
        accept = next(e.message for e in runner.begin(at(now)) if isinstance(e, Send) and e.to == A)
        return next(e.message for e in witness.handle(D, accept, now) if isinstance(e, Send))  # type: ignore[arg-type]

    assert isinstance(ask(first, 0.0), Accepted)
    del node.runners[JOB]  # it is over
    node.receive(A, make_start(), at(100))
    assert isinstance(ask(node.runners[JOB], 100.0), Refused)


def test_late_answers_to_an_earlier_attempt_of_the_term_grant_no_lease() -> None:
    """Regression: the node crashed, got a late copy of the start, and then late copies of the answers to its earlier life."""
    lives = [make_participant(D, life=1), make_participant(D, life=2)]
    asked = [messages(node.receive(A, make_start(), at(0)), Accept)[0][1] for node in lives]
    earlier, later = (accept.round for accept in asked if isinstance(accept, Accept))
    late = Accepted(job=JOB, term=1, disk=DISK, round=earlier)
    lives[1].receive(A, late, at(1))
    lives[1].receive(B, late, at(1))
    assert not lives[1].runners[JOB].holds_lease(1.0)
    answer = msgspec.structs.replace(late, round=later)
    lives[1].receive(A, answer, at(1))
    lives[1].receive(B, answer, at(1))
    assert lives[1].runners[JOB].holds_lease(1.0)


def test_late_grants_to_an_earlier_life_of_a_gang_member_allow_nothing() -> None:
    lives = [make_participant(D, life=1), make_participant(D, life=2)]
    questions = []
    for node in lives:
        node.receive(A, Enlist(JOB, 1, 1, SPEC_BYTES), at(0))
        begun = node.receive(A, Begin(JOB, 1, GangPlace(1, 2, "h", 1), JobRecord()), at(0))
        questions += [question for _, question in messages(begun, ExtendRun)]
    earlier, later = (question.round for question in questions)  # type: ignore[union-attr]
    lives[1].receive(A, RunGranted(JOB, 1, earlier, 9.0), at(1))
    assert lives[1].members[JOB].until == 0.0
    lives[1].receive(A, RunGranted(JOB, 1, later, 9.0), at(1))
    assert lives[1].members[JOB].until > 1.0


def test_finished_job_neither_starts_nor_is_joined() -> None:
    node = make_participant(D)
    over = make_witness()
    over.close(3, JobRecord(outcome=Outcome("done", "done", 0, None, (), 1)))
    node.restore(over, at(0))
    (_, answer), *_ = messages(node.receive(A, make_start(term=4), at(1)), StartAnswer)
    assert isinstance(answer, StartAnswer) and answer.reason == "the job is over"
    (_, answer), *_ = messages(node.receive(B, Enlist(JOB, 4, 1, SPEC_BYTES), at(1)), Enlisted)
    assert isinstance(answer, Enlisted) and not answer.taken


def test_submitted_job_is_launched_on_the_only_lending_node() -> None:
    """Four nodes exchange messages in order; three are witnesses and only D lends. Nobody has to win the first term."""
    nodes = {node: make_participant(node) for node in (A, B, C, D)}
    queue: list[tuple[bytes, bytes, AnyMessage]] = []
    launched: list[bytes] = []
    seen: list[AnyMessage] = []

    def take(me: bytes, out: list[Directed]) -> None:
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
        seen.append(message)
        take(target, nodes[target].receive(source, message, at(0)))
    assert launched == [D] and not queue
    assert not any(isinstance(message, PreVote | Prepare) for message in seen)
    assert {message.term for message in seen if isinstance(message, Accept | Start)} == {FIRST_TERM}
    holders = {nodes[node].witnesses[JOB].witness_record.holder for node in (A, B, C)}
    assert holders == {D}


def accept_alone(node: Participant, out: list[Directed]) -> list[Directed]:
    """Let a sole witness take the submission of its own node, and return what that leads to."""
    while accepts := messages(out, Accept):
        out = [more for _, message in accepts for more in node.receive(A, message, at(1))]
        for _, answer in messages(out, Accepted | Refused):
            out += node.receive(A, answer, at(1))
    return out


def sole(restored: WitnessRecord | None = None) -> Participant:
    spec = make_spec(witnesses=voters(A))
    rules = Rules(lambda job, sealed: spec, lambda job, spec, start: None, lambda *asked: True)
    node = Participant(A, DISK, "node-1", rules, Random(1))
    node.observe(make_view(A, (A, D)), at(0))
    if restored is not None:
        node.restore(Witness.restored(restored, spec, 0.0), at(0))
        node.observe(make_view(A, (A, D)), at(0))
    return node


def test_first_term_is_used_once_and_not_after_a_restart() -> None:
    spec = make_spec(witnesses=voters(A))
    first = sole()
    out = accept_alone(first, first.submit(JOB, SPEC_BYTES, spec, at(0)))
    assert [message.term for _, message in messages(out, Start)] == [FIRST_TERM]  # type: ignore[union-attr]
    assert messages(accept_alone(first, first.submit(JOB, SPEC_BYTES, spec, at(1))), Start) == []
    again = sole(first.witnesses[JOB].witness_record)
    assert messages(accept_alone(again, again.submit(JOB, SPEC_BYTES, spec, at(1))), Start) == []
    keeper = sole()
    out = accept_alone(keeper, keeper.submit(JOB, SPEC_BYTES, make_spec(submitter=B, witnesses=voters(A)), at(0)))
    assert messages(out, Start) == [], "the first term is the submitter's"


def accepts_first_round(node: Participant) -> list[Directed]:
    number = node._submissions[JOB].proposer._round
    accepted = Accepted(job=JOB, term=FIRST_TERM, disk=DISK, round=number)
    return [output for witness in (B, C) for output in node.receive(witness, accepted, at(1))]


def submitter_second_in_line(restored: WitnessRecord | None = None) -> Participant:
    """Return a submitter whose leader does not act before that of B."""
    node = make_participant(A)
    node.observe(make_view(A, (A, B, C, D)), at(0))
    if restored is not None:
        node.restore(Witness.restored(restored, make_spec(), 0.0), at(0))
        node.observe(make_view(A, (A, B, C, D)), at(0))
    return node


def test_first_term_starts_one_attempt() -> None:
    """The witnesses accept each repeated submission in the first term, as long as no attempt has taken its lease."""
    spec = make_spec(witnesses=voters(B, A, C))
    node = submitter_second_in_line()
    (own,) = [message for to, message in messages(node.submit(JOB, SPEC_BYTES, spec, at(0)), Accept) if to == A]
    with_spec = msgspec.structs.replace(own, spec=SPEC_BYTES)  # type: ignore[type-var]
    node.receive(A, with_spec, at(0))
    (start,) = messages(accepts_first_round(node), Start)
    node.receive(start[0], StartAnswer(job=JOB, term=FIRST_TERM, taken=True, reason=""), at(1))
    node.submit(JOB, SPEC_BYTES, spec, at(2))
    assert messages(accepts_first_round(node), Start) == []
    again = submitter_second_in_line(node.witnesses[JOB].witness_record)
    again.submit(JOB, SPEC_BYTES, spec, at(2))
    assert messages(accepts_first_round(again), Start) == [], "the run before may have used it"


def test_lease_is_vouched_for_in_its_own_term() -> None:
    node = make_participant(A)
    node._rules = msgspec.structs.replace(node._rules, warrant=lambda job, term, node, config: bytes([term]) + node)
    introduce(node)
    vouched = []
    for term, holder in ((1, None), (2, D), (3, E)):
        accept = Accept(job=JOB, term=term, round=1, config=GROUP, record=JobRecord(version=term), holder=holder)
        node.witnesses[JOB].lease_until = 0.0
        ((_, answer),) = messages(node.receive(holder or B, accept, at(0)), Accepted)
        vouched.append(answer.warrant)  # type: ignore[union-attr]
    assert vouched == [b"", bytes([2]) + D, bytes([3]) + E]


def test_newcomer_says_whether_it_can_vote() -> None:
    node = make_participant(D)

    def problem(spec: bytes) -> str:
        ((_, answer),) = messages(node.receive(A, Introduce(job=JOB, spec=spec), at(0)), Introduced)
        return answer.problem  # type: ignore[union-attr]

    assert problem(SPEC_BYTES) == "" and problem(b"forged") == "not signed" and node.refused == 1
    node.forgotten.add(JOB)
    assert "cannot be read" in problem(SPEC_BYTES)


def test_answers_are_short_enough_to_be_read() -> None:
    node = make_participant(D, admit="no: \ud800 " * MOST_TEXT)
    out = node.receive(A, make_start(), at(0)) + node.receive(A, Enlist(JOB, 1, 0, SPEC_BYTES), at(0))
    answers = [message for _, message in messages(out, StartAnswer | Enlisted)]  # type: ignore[arg-type]
    assert len(answers) == 2 and [decode_message(encode_message(answer)) for answer in answers] == answers


def test_end_that_others_report_is_believed_by_a_majority() -> None:
    node = make_participant(A)
    introduce(node)
    ended = JobRecord(version=5, outcome=Outcome("done", "done", 0, None, (), 1))
    report = msgspec.structs.replace(refused(3, accepted_term=2, finished=True), record=ended)
    node.receive(B, report, at(1))
    assert not node.witnesses[JOB].finished
    node.receive(C, report, at(1))
    assert node.witnesses[JOB].finished and node.witnesses[JOB].witness_record.record == ended


def test_end_that_is_not_yet_is_refused() -> None:
    """It would be told, and stay in memory, until then."""
    node = make_participant()
    introduce(node)
    for unix_ms, refusals in ((1_000 + AHEAD_MS + 1, 1), (1_000 + AHEAD_MS, 0)):
        ended = JobRecord(version=2, outcome=Outcome("done", "done", 0, None, (), unix_ms))
        before = node.refused
        node.receive(B, Accept(job=JOB, term=1, round=2, config=GROUP, record=ended, holder=None), at(1))
        assert node.refused - before == refusals
        assert (node.witnesses[JOB].witness_record.record == ended) != refusals


def test_witness_that_missed_the_end_learns_it_from_one_other() -> None:
    """Regression: the third witness had lost its disk, and this one asked for a term for ever."""
    nodes = {node: make_participant(node) for node in (A, B)}
    for participant in nodes.values():
        introduce(participant)
    ended = JobRecord(version=2, outcome=Outcome("done", "done", 0, None, (), 1_000))
    accept = Accept(job=JOB, term=1, round=2, config=GROUP, record=ended, holder=None)
    for sender, message in ((C, accept), (C, Closed(job=JOB, term=1, record=ended))):
        nodes[B].receive(sender, message, at(1))
    queue = [(A, item) for item in nodes[A].observe(make_view(A, (A, B)), at(100))]
    while queue:
        sender, item = queue.pop(0)
        if isinstance(item.effect, Send) and item.effect.to in nodes:
            to = item.effect.to
            queue += [(to, answer) for answer in nodes[to].receive(sender, item.effect.message, at(100))]
    for participant in nodes.values():
        known = participant.witnesses[JOB]
        assert known.finished and known.witness_record.record.outcome == ended.outcome


def test_node_can_be_replaced_while_a_node_outside_the_group_stays() -> None:
    node = make_participant(A)
    introduce(node)
    assert not node.replaceable({B, C}) and node.replaceable({B, C, D})


def test_prepare_for_an_unknown_job_is_refused() -> None:
    assert messages(make_participant().receive(B, Prepare(job=JOB, term=1), at(0)), Refused)


LATER = Config(number=1, term=3, members=voters(A, B, D))


def names_group(giver: bytes, config: Config) -> bytes:
    return giver + repr(config).encode()


def reader() -> Participant:
    """Return A, which can read the warrants of these tests, with the job of the first group."""
    participant = make_participant()
    rules = msgspec.structs.replace(
        participant._rules,
        warrants_group=lambda warrant, job, config: warrant[:32] if warrant[32:] == repr(config).encode() else None,
    )
    participant._rules = rules
    introduce(participant)
    return participant


@pytest.mark.parametrize("kind", [PreVote, Prepare])
def test_witness_that_missed_a_change_learns_it_from_a_warrant(kind: type[PreVote] | type[Prepare]) -> None:
    participant = reader()
    ask = kind(JOB, 5, LATER, (names_group(E, LATER), names_group(B, LATER)))
    answer = messages(participant.receive(D, ask, at(1)), AnyAnswer[kind])
    assert answer and participant.witnesses[JOB].witness_record.config == LATER
    assert participant.witnesses[JOB].witness_record.warrants == ask.warrants


@pytest.mark.parametrize(
    ("sender", "config", "givers"),
    [
        (D, LATER, ()),
        (D, LATER, (D, E)),  # none of the group that A knows
        (E, LATER, (B,)),  # E is not in it
        (D, Config(1, 3, voters(B, C, D)), (B,)),  # nor is A
        (D, Config(1, 3, (Voter(A, b"former disk"), *voters(B, D))), (B,)),
        (D, Config(0, 0, voters(A, B, D)), (B,)),  # not later
    ],
)
def test_witness_takes_up_no_other_group(sender: bytes, config: Config, givers: tuple[bytes, ...]) -> None:
    participant = reader()
    warrants = tuple(names_group(giver, config) for giver in givers)
    out = participant.receive(sender, Prepare(JOB, 5, config, warrants), at(1))
    assert messages(out, Refused) and participant.witnesses[JOB].witness_record.config == GROUP
    misnamed = (names_group(B, GROUP),)
    participant.receive(D, Prepare(JOB, 5, LATER, misnamed), at(1))
    assert participant.witnesses[JOB].witness_record.config == GROUP


def test_witness_keeps_the_warrants_that_name_its_group() -> None:
    participant = reader()
    warrants = (names_group(B, GROUP), names_group(C, LATER), names_group(B, LATER), names_group(B, LATER))
    accept = Accept(JOB, 3, 1, LATER, JobRecord(version=1), None, warrants=warrants)
    participant.receive(B, accept, at(1))
    kept = (names_group(C, LATER), names_group(B, LATER))
    assert participant.witnesses[JOB].witness_record.warrants == kept
    leader = participant.leaders[JOB]
    assert leader._asking(Prepare) == Prepare(JOB, leader._term, LATER, kept)
    again = Config(2, 3, voters(A, B, E))
    participant.receive(B, msgspec.structs.replace(accept, round=2, config=again), at(2))
    assert participant.witnesses[JOB].witness_record.warrants == (), "they name the group before"


THIRD = Config(number=2, term=4, members=voters(A, D, E))


def teacher(*earlier: tuple[Config, tuple[bytes, ...]]) -> Participant:
    """Return D, which has gone through the second and third group."""
    made = make_participant(D)
    record = WitnessRecord(
        JOB, DISK, SPEC_BYTES, THIRD, 4, 4, JobRecord(version=2), None, False,
        warrants=(names_group(D, THIRD),), earlier=earlier,
    )  # fmt: skip
    made.restore(Witness.restored(record, make_spec(), 0.0), at(0))
    leader = made.leaders[JOB]
    leader.view = make_view(D, (A, D))
    leader._ask(at(0))
    assert leader.state == "asking"
    return made


def passed(sent: list[tuple[bytes, AnyMessage]], to: Participant, sender: Participant, kind: type) -> list[AnyMessage]:
    answers = [messages(to.receive(sender.me, message, at(1)), kind) for node, message in sent if node == to.me]
    return [message for found in answers for _, message in found]


def test_witness_that_missed_two_changes_is_led_to_a_group_with_the_leader() -> None:
    """Regression (simulator seed 160): of its group it was alone, and the later one needed its vote."""
    there, asking = reader(), teacher((LATER, (names_group(B, LATER),)))
    ask = asking.leaders[JOB]._asking(PreVote)
    (refused,) = passed([(A, ask)], there, asking, Refused)
    (step,) = messages(asking.receive(A, refused, at(1)), PreVote)
    assert not messages(asking.receive(A, refused, at(2)), PreVote), "now and then"
    assert not messages(asking.receive(B, refused, at(1)), PreVote), "B is not in the group"
    assert passed([step], there, asking, PreVoteGranted) and there.witnesses[JOB].witness_record.config == LATER
    assert passed([(A, ask)], there, asking, PreVoteGranted), "D is a member of the group that it knows now"
    assert messages(asking.receive(A, refused, at(1 + ANSWER_S)), PreVote)


@pytest.mark.parametrize(
    "earlier",
    [
        (),
        ((LATER, (names_group(E, LATER),)),),  # nobody whom A knows
        ((LATER, (names_group(B, THIRD),)),),  # of another group
        ((Config(1, 3, voters(A, B, C)), (names_group(B, Config(1, 3, voters(A, B, C))),)),),  # D is not in it
    ],
)
def test_witness_is_led_by_those_it_knows_alone(earlier: tuple[Any, ...]) -> None:
    there, asking = reader(), teacher(*earlier)
    (refused,) = passed([(A, asking.leaders[JOB]._asking(PreVote))], there, asking, Refused)
    passed(messages(asking.receive(A, refused, at(1)), PreVote), there, asking, Refused)
    assert there.witnesses[JOB].witness_record.config == GROUP


def test_earlier_groups_are_kept_with_their_warrants_and_bounded() -> None:
    participant = reader()
    groups = [Config(number, 3, voters(A, B, node)) for number, node in enumerate((D, E, C, D, E, C, D, E, C, D), 1)]
    for number, group in enumerate(groups, 1):
        accept = Accept(JOB, 3, number, group, JobRecord(version=1), None, warrants=(names_group(B, group),))
        participant.receive(B, accept, at(number))
    known = participant.witnesses[JOB].witness_record
    assert known.config == groups[-1] and MOST_EARLIER == 8
    assert known.earlier == tuple((group, (names_group(B, group),)) for group in reversed(groups[1:9]))


def test_newcomer_keeps_the_joint_group_that_the_leaving_have_accepted() -> None:
    """Those that leave accept the joint group as the last one, and may be all that a witness which missed changes knows."""
    participant = reader()
    joint = GROUP.joint(voters(A, B, D), 3)
    participant.receive(B, Accept(JOB, 3, 1, joint, JobRecord(version=1), None), at(1))
    given = (names_group(C, joint), names_group(B, joint.settled()), names_group(C, GROUP))
    participant.receive(B, Accept(JOB, 3, 2, joint.settled(), JobRecord(version=1), None, warrants=given), at(2))
    known = participant.witnesses[JOB].witness_record
    assert (known.config, known.warrants) == (joint.settled(), given[1:2])
    assert known.earlier == ((joint, given[:1]),)


def test_node_without_a_vote_joins_a_later_group_as_a_newcomer() -> None:
    participant = make_participant()
    introduce(participant)
    participant._rules = msgspec.structs.replace(
        participant._rules, may_propose=lambda sender, message, known, spec, created: sender in known.config.nodes
    )
    later = Accept(JOB, 5, 1, Config(2, 5, voters(A, D, E)), JobRecord(version=3), None, spec=SPEC_BYTES)
    ((_, refused),) = messages(participant.receive(E, later, at(1)), Refused)
    assert participant.votes(JOB) and not refused.needs_spec, "A has a vote: those that it knows must take E in"
    participant.receive(B, Accept(JOB, 3, 1, Config(1, 3, voters(B, C, D)), JobRecord(version=2), None), at(2))
    assert not participant.votes(JOB), "it was replaced"
    ((_, refused),) = messages(participant.receive(E, msgspec.structs.replace(later, spec=None), at(3)), Refused)
    assert refused.needs_spec, "so that the shell asks its witnesses"
    for other in (Config(2, 5, voters(D, E)), Config(0, 3, voters(A, D, E))):
        assert not messages(participant.receive(E, msgspec.structs.replace(later, config=other), at(4)), Accepted)
    assert messages(participant.receive(E, later, at(5)), Accepted) and participant.votes(JOB)


def test_archived_job_is_not_one_that_this_node_never_knew() -> None:
    node = make_participant()
    over = make_witness()
    over.close(3, JobRecord(outcome=Outcome("done", "done", 0, None, (), 1)))
    node.restore(over, at(0))
    node.archive(JOB)
    ((_, answer),) = messages(node.receive(B, Prepare(job=JOB, term=4), at(1)), Refused)
    assert answer.disk == b"", "an empty record of this disk would be a promise that it cannot keep"  # type: ignore[union-attr]


def test_gang_member_gives_its_place_up_if_its_runner_does_not_begin() -> None:
    node = make_participant(D)
    out = node.receive(A, Enlist(JOB, 1, 1, SPEC_BYTES), at(0))
    (kept,) = [item.effect for item in out if isinstance(item.effect, SetTimer)]
    for role in ("runner", "leader", "submitter"):
        assert node.on_timer(JOB, role, Timer(kept.name, kept.token), at(kept.at)) == []  # type: ignore[arg-type]
    out = node.on_timer(JOB, "member", Timer(kept.name, kept.token), at(kept.at))
    assert any(isinstance(item.effect, Ended) for item in out) and JOB not in node.members


def test_leader_pauses_while_a_rival_prepares() -> None:
    node = make_participant(A)
    introduce(node, spec=SPEC_BYTES)
    out = node.observe(make_view(A, (A, B, C, D)), at(60))
    assert messages(out, PreVote)
    out = node.receive(B, PreVote(job=JOB, term=9), at(60))
    assert node.leaders[JOB].state == "asking", "a question alone prepares nothing"
    out = node.receive(B, Prepare(job=JOB, term=9), at(60))
    assert node.leaders[JOB].state == "watching"
    (turn,) = [item.effect for item in out if isinstance(item.effect, SetTimer)]
    assert (turn.name, turn.at) == ("turn", 60 + PREPARED_S)


def test_leader_goes_on_when_another_node_brings_its_submission_again() -> None:
    """Its pause is that of a leader which keeps the job waiting; nobody would lead the job, and no user could end it."""
    node, spec = submitter_second_in_line(), make_spec(witnesses=voters(B, A, C), after=(b"k" * 16,))
    first = [message for to, message in messages(node.submit(JOB, SPEC_BYTES, spec, at(0)), Accept) if to == A]
    own = msgspec.structs.replace(first[0], spec=SPEC_BYTES)  # type: ignore[type-var]
    node._rules = msgspec.structs.replace(node._rules, open_spec=lambda job, sealed: spec)
    node.receive(A, own, at(0))
    accepts_first_round(node)
    assert node.leaders[JOB].state == "waiting"
    again = make_participant(B).submit(JOB, SPEC_BYTES, spec, at(2))
    (brought,) = [message for to, message in messages(again, Accept) if to == A]
    assert messages(node.receive(B, brought, at(2)), Accepted)
    assert node.leaders[JOB].state == "waiting"


def test_no_first_group_takes_a_replaced_node_in() -> None:
    node = make_participant()
    introduce(node)
    node.receive(B, Accept(JOB, 3, 1, Config(1, 3, voters(B, C, D)), JobRecord(version=2), None), at(1))
    first = Accept(JOB, 9, 1, Config(0, 9, GROUP.members), JobRecord(version=2), None)
    assert not messages(node.receive(B, first, at(2)), Refused), "it asks for no description"


def test_replaced_node_ignores_groups_before_its_replacement() -> None:
    node = make_participant()
    introduce(node)
    node.receive(B, Accept(JOB, 3, 1, Config(1, 3, voters(B, C, D)), JobRecord(version=2), None), at(1))
    late = Accept(JOB, 3, 1, GROUP, JobRecord(version=2), None)
    ((_, answer),) = messages(node.receive(B, late, at(2)), Refused)
    assert not answer.needs_spec and not node.votes(JOB)  # type: ignore[union-attr]


def test_submission_is_answered_once() -> None:
    submitter = make_participant(A)
    submitter.submit(JOB, SPEC_BYTES, make_spec(), at(0))
    assert submitter.receive(B, refused(3, finished=True), at(1))
    assert submitter.receive(B, refused(3, finished=True), at(1)) == []
    accepted = Accepted(job=JOB, term=FIRST_TERM, disk=DISK, round=1)
    assert submitter.receive(C, accepted, at(1)) == []


def test_newer_term_that_a_witness_reports_ends_an_attempt_without_a_lease() -> None:
    node = make_participant(D)
    out = node.receive(A, make_start(term=2), at(0))
    assert len(messages(out, Accept)) == 3
    newer = msgspec.structs.replace(refused(9), term=2)
    assert JOB in node.runners
    for witness in (A, B):
        node.receive(witness, newer, at(1))
    assert JOB not in node.runners, "a majority has promised another leader its term"
