"""Leader: which witness acts when no node runs the job, in which order, and its use of the term it wins."""

from itertools import pairwise

import msgspec
import pytest

from mesh.consensus.effects import Concluded, Decided, Effect, Send, SetTimer, StateChanged
from mesh.consensus.leader import (
    AHEAD,
    ANSWER_S,
    ASK_EVERY_S,
    HEARTBEAT_MAX_S,
    HEARTBEAT_S,
    LEAVES_S,
    PREPARED_S,
    STAGGER_S,
    Leader,
)
from mesh.consensus.messages import (
    Accept,
    Accepted,
    Closed,
    MakeRoom,
    Prepare,
    PreVote,
    PreVoteGranted,
    Promised,
    Refused,
    Start,
    StartAnswer,
)
from mesh.consensus.proposer import Proposer
from mesh.consensus.view import Timer
from mesh.model.record import Attempt, Config, JobRecord, Outcome
from mesh.model.spec import ArrayPlace, placement_request
from placement.advert import Advert, Gpu
from placement.allocation import all_free
from placement.decision import replay
from placement.preemption import RunningJob
from placement.queue import Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import Hierarchy, homes, zones
from tests.consensus.worlds import (
    DISK,
    JOB,
    A,
    B,
    C,
    D,
    E,
    at,
    make_advert,
    make_leader,
    make_spec,
    make_view,
    make_witness,
    voters,
)

GROUP = Config(number=0, term=0, members=voters(A, B, C))


def sends(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def fire(leader: Leader, effects: list[Effect], name: str) -> list[Effect]:
    timer = [effect for effect in effects if isinstance(effect, SetTimer) and effect.name == name][-1]
    return leader.on_timer(Timer(timer.name, timer.token), at(timer.at))


def promise(term: int, record: JobRecord | None = None, config: Config = GROUP, cancel: bool = False) -> Promised:
    return Promised(
        job=JOB,
        term=term,
        disk=DISK,
        config=config,
        accepted_term=0,
        record=record or JobRecord(),
        cancel_wanted=cancel,
    )


def elect(leader: Leader, effects: list[Effect], now: float) -> int:
    """Grant pre-votes from a majority and return the term that the leader then requests."""
    term = sends(effects, PreVote)[0].message.term  # type: ignore[union-attr]
    assert leader.handle(A, PreVoteGranted(job=JOB, term=term, disk=DISK), at(now)) == []
    prepares = sends(leader.handle(B, PreVoteGranted(job=JOB, term=term, disk=DISK), at(now)), Prepare)
    assert [send.message.term for send in prepares] == [term] * 3  # type: ignore[union-attr]
    return int(term)


def won(
    leader: Leader, *, alive: tuple[bytes, ...] = (A, B, C, D, E), now: float = 0.0, **reply: object
) -> list[Effect]:
    """Let the leader act and win a majority; return its next effects."""
    effects = leader.observe(make_view(A, alive), at(now))
    term = elect(leader, effects, now)
    assert leader.handle(A, promise(term, **reply), at(now)) == []  # type: ignore[arg-type]
    return leader.handle(B, promise(term, **reply), at(now))  # type: ignore[arg-type]


def test_first_leader_of_the_group_acts_and_others_wait() -> None:
    assert len(sends(make_leader(A).observe(make_view(A, (A, B, C)), at(0)), PreVote)) == 3
    second = make_leader(B)
    effects = second.observe(make_view(B, (A, B, C)), at(0))
    assert sends(effects, PreVote) == [] and [e.at for e in effects if isinstance(e, SetTimer)] == [STAGGER_S]
    assert len(sends(fire(second, effects, "turn"), PreVote)) == 3
    leaving = make_leader(A)
    waits = leaving.observe(make_view(A, (A, B, C), leaving=frozenset({A})), at(0))
    assert sends(waits, PreVote) == [], "a leaving node waits for the other leaders"


def test_leader_only_watches_while_a_lease_runs() -> None:
    witness = make_witness()
    witness.handle(D, Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(version=1), holder=D), 0.0)
    leader = make_leader(A, witness)
    effects = leader.observe(make_view(A, (A, B, C, D)), at(0))
    assert sends(effects, PreVote) == []
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [witness.lease_until + 0.01]
    assert len(sends(fire(leader, effects, "turn"), PreVote)) == 3


def test_leader_starts_the_job_on_the_best_node_after_a_majority_promised() -> None:
    leader = make_leader()
    starts = sends(won(leader), Start)
    assert len(starts) == 1 and leader.state == "offered"
    answer = StartAnswer(job=JOB, term=1, taken=True, reason="")
    leader.handle(starts[0].to, answer, at(0))
    assert leader.state == "watching"


def queue_of(*others: Waiting, adverts: tuple[Advert, ...]) -> Queue:
    return Queue(others, {}, adverts, 1)


def test_leader_waits_for_jobs_ahead_in_the_queue_until_they_are_idle() -> None:
    adverts = (make_advert(D),)
    first = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    leader = make_leader()
    view = make_view(A, (A, B, C, D), adverts=adverts, queue=queue_of(first, adverts=adverts))
    effects = leader.observe(view, at(0))
    term = elect(leader, effects, 0)
    leader.handle(A, promise(term), at(0))
    effects = leader.handle(B, promise(term), at(0))
    assert leader.state == "waiting" and leader.detail == "other jobs go first"
    assert leader.observe(view, at(1)) == [StateChanged("pending", leader.detail)], "waiting sends no further messages"
    idle = make_view(A, (A, B, C, D), adverts=adverts, queue=Queue([first], {}, adverts, 1, idle={first.job}))
    assert len(sends(leader.observe(idle, at(2)), Start)) == 1, "an idle job loses its reservation"


def test_leader_does_not_wait_for_later_jobs_or_when_all_fit() -> None:
    low = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 1, 1)
    high = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    for other, adverts in ((low, (make_advert(D),)), (high, (make_advert(D), make_advert(E)))):
        leader = make_leader()
        view = make_view(A, (A, B, C, D, E), adverts=adverts, queue=queue_of(other, adverts=adverts))
        term = elect(leader, leader.observe(view, at(0)), 0)
        leader.handle(A, promise(term), at(0))
        assert len(sends(leader.handle(B, promise(term), at(0)), Start)) == 1


def held_back(**view: object) -> tuple[Leader, list[Effect]]:
    leader = make_leader(witness=make_witness(spec=make_spec(after=(b"1" * 16, b"2" * 16))))
    shown = make_view(A, (A, B, C, D), **view)
    term = elect(leader, leader.observe(shown, at(0)), 0)
    leader.handle(A, promise(term), at(0))
    return leader, leader.handle(B, promise(term), at(0))


def test_job_waits_for_its_dependencies() -> None:
    leader, effects = held_back(ends={b"1" * 16: "done"})
    assert sends(effects, Start) == [] and leader.state == "waiting" and leader.detail.startswith("after ")
    done = make_view(A, (A, B, C, D), ends={b"1" * 16: "done", b"2" * 16: "done"})
    assert len(sends(leader.observe(done, at(1)), Start)) == 1


@pytest.mark.parametrize("kind", ["done", "failed", "cancelled"])
def test_job_starts_once_another_is_over_however_that_ended(kind: str) -> None:
    leader = make_leader(witness=make_witness(spec=make_spec(after_any=(b"1" * 16,))))
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D)), at(0)), 0)
    leader.handle(A, promise(term), at(0))
    assert sends(leader.handle(B, promise(term), at(0)), Start) == [] and leader.detail.startswith("after ")
    over = make_view(A, (A, B, C, D), ends={b"1" * 16: kind})
    assert len(sends(leader.observe(over, at(1)), Start)) == 1


@pytest.mark.parametrize(("kind", "words"), [("failed", ", failed"), ("cancelled", ", was cancelled")])
def test_job_fails_with_its_dependency(kind: str, words: str) -> None:
    leader, effects = held_back(ends={b"1" * 16: "done", b"2" * 16: kind})
    (outcome,) = {send.message.record.outcome for send in sends(effects, Accept)}  # type: ignore[union-attr]
    assert outcome is not None and outcome.kind == "failed" and words in outcome.detail
    assert leader.state == "finishing"


def place(at_place: int, limit: int) -> ArrayPlace:
    return ArrayPlace(b"a" * 16, index=10 * at_place, place=at_place, of=9, limit=limit)


@pytest.mark.parametrize(
    ("mine", "over", "goes"),
    [(0, (), True), (1, (), True), (2, (), False), (2, (3, 4, 5), False), (2, (1,), True), (5, (0, 1, 2), False)],
)
def test_array_never_runs_more_jobs_than_its_limit(mine: int, over: tuple[int, ...], goes: bool) -> None:
    leader = make_leader(witness=make_witness(spec=make_spec(array=place(mine, 2))))
    view = make_view(A, (A, B, C, D), array_ends={("ada", b"a" * 16): sum(1 << ended for ended in over)})
    term = elect(leader, leader.observe(view, at(0)), 0)
    leader.handle(A, promise(term), at(0))
    starts = sends(leader.handle(B, promise(term), at(0)), Start)
    assert bool(starts) == goes and (goes or "2 of its array" in leader.detail)


def test_job_that_waits_past_its_deadline_fails() -> None:
    leader = make_leader(witness=make_witness(spec=make_spec(gpus=1, deadline_unix_ms=9_000)))
    effects = won(leader)
    assert leader.state == "waiting" and [
        e.at for e in effects if isinstance(e, SetTimer) and e.name == "deadline"
    ] == [9.0]
    ends = sends(fire(leader, effects, "deadline"), Accept)
    assert {send.message.record.outcome.detail for send in ends} == {"its deadline has passed"}  # type: ignore[union-attr]


def test_job_of_much_higher_priority_requests_preemption_periodically() -> None:
    running = RunningJob(b"other job 16 byt", D, priority=50, since_unix=-1000, saves=True)
    full = (make_advert(D, slots_free=0),)
    for priority, asks in ((69, False), (70, True)):
        leader = make_leader(witness=make_witness(spec=make_spec(priority=priority)))
        view = make_view(A, (A, B, C, D), adverts=full, running=(running,))
        term = elect(leader, leader.observe(view, at(0)), 0)
        leader.handle(A, promise(term), at(0))
        asked = sends(leader.handle(B, promise(term), at(0)), MakeRoom)
        assert [(send.to, send.message.job) for send in asked] == ([(D, running.job)] if asks else [])
        assert sends(leader.observe(view, at(1)), MakeRoom) == []
        assert bool(sends(leader.observe(view, at(1 + ASK_EVERY_S)), MakeRoom)) == asks


def test_leader_asks_one_job_at_a_time_for_room_and_then_another() -> None:
    """Regression: a lender kept every job from its place with a job of lowest priority that never left."""
    low = RunningJob(b"other job 16 byt", D, priority=0, since_unix=-1000, saves=True)
    other = RunningJob(b"a third job 16 b", E, priority=40, since_unix=-1000, saves=True)
    full = (make_advert(D, slots_free=0), make_advert(E, slots_free=0))
    leader = make_leader(witness=make_witness(spec=make_spec(priority=90)))

    def asked(now: float, *running: RunningJob) -> list[bytes]:
        view = make_view(A, (A, B, C, D, E), adverts=full, running=running)
        return [send.message.job for send in sends(leader.observe(view, at(now)), MakeRoom)]  # type: ignore[union-attr]

    term = elect(leader, leader.observe(make_view(A, (A, B, C, D, E), adverts=full), at(0)), 0)
    for node in (A, B):
        leader.handle(node, promise(term), at(0))
    assert asked(1, low, other) == [low.job]
    assert asked(2 * ASK_EVERY_S, low, other) == [other.job], "the first stays"
    leaving = msgspec.structs.replace(other, leaves=True)
    assert asked(4 * ASK_EVERY_S, low, leaving) == [], "that is enough"
    assert asked(2 * ASK_EVERY_S + LEAVES_S, low, leaving) == [low.job], "it does not end"


def test_leader_proposes_the_newest_promised_record_and_closes_lost_attempts() -> None:
    leader = make_leader()
    old = JobRecord(version=1)
    attempt = Attempt(number=0, node=E, nick="e", term=1, started_unix_ms=0, seen_unix_ms=0)
    new = JobRecord(version=7, attempts=(attempt,))
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D)), at(5)), 5)
    leader.handle(A, promise(term, old), at(5))
    start = sends(leader.handle(B, promise(term, new), at(5)), Start)[0].message
    assert isinstance(start, Start) and start.record.version > 7
    assert [a.reason for a in start.record.attempts] == ["node lost"]


def test_node_that_declines_is_skipped_until_adverts_change() -> None:
    leader = make_leader()
    first = sends(won(leader), Start)[0].to
    effects = leader.handle(first, StartAnswer(job=JOB, term=1, taken=False, reason="its slots are taken"), at(0))
    term = elect(leader, effects, 0)
    assert term == 2, "a term is never offered twice"
    leader.handle(A, promise(2), at(0))
    second = sends(leader.handle(B, promise(2), at(0)), Start)[0].to
    assert second != first
    effects = fire(leader, [SetTimer("answer", leader._tokens._latest["answer"], ANSWER_S)], "answer")
    assert sends(effects, PreVote), "a node that does not answer is skipped too"


def test_declines_are_forgotten_when_adverts_change_or_the_job_has_run() -> None:
    leader = make_leader()
    view = make_view(A, (A, B, C, D))
    leader.observe(view, at(0))
    leader._decline(D, "its slots are taken", at(0))
    leader.observe(msgspec.structs.replace(view, alive=frozenset({A, B, D})), at(1))
    assert D in leader.declined, "the adverts are the same"
    leader.observe(msgspec.structs.replace(view, adverts=(*view.adverts, make_advert(E))), at(2))
    assert not leader.declined
    leader._decline(D, "its slots are taken", at(2))
    leader._to_watching()
    run = Accept(job=JOB, term=9, round=1, config=GROUP, record=JobRecord(version=1), holder=E)
    leader.witness.handle(E, run, 3.0)
    leader.act(at(3))
    assert not leader.declined


def test_late_promise_is_no_vote_for_a_job_that_waits() -> None:
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    won(leader)
    assert leader.state == "waiting"
    assert leader.handle(C, promise(leader._term), at(1)) == [] and leader.state == "waiting"


def test_group_that_the_leader_knows_does_not_retire_it() -> None:
    leader = make_leader()
    leader.observe(make_view(A, (A, B, C)), at(0.0))
    leader.act(at(60.0))
    without = Config(0, 0, voters(B, C, D))  # of the same order as the group that the leader knows
    answer = Refused(JOB, leader._term, DISK, 0, 1 << 40, without, 0.0, needs_spec=False, finished=False)
    leader.handle(B, answer, at(60.0))
    assert leader.state != "retired"
    leader._ask(at(70.0))
    within = Config(3, 3, voters(A, B, D))
    leader.handle(B, msgspec.structs.replace(answer, term=leader._term, config=within), at(70.0))
    assert leader.state != "retired", "the newer group has this node"


def test_job_without_a_node_waits_and_reports_the_reason() -> None:
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    effects = won(leader)
    assert sends(effects, Start) == [] and leader.state == "waiting" and "GPU" in leader.detail
    assert len(sends(effects, Accept)) == 3
    assert sends(fire(leader, effects, "heartbeat"), Accept), f"the leader sends a sign of life after {HEARTBEAT_S} s"
    gpu = make_advert(D, version=2)
    gpu = msgspec.structs.replace(gpu, gpus=(_gpu(),), free_portions=all_free((_gpu(),)))
    view = make_view(A, (A, B, C, D), adverts=(gpu,))
    assert [send.to for send in sends(leader.observe(view, at(1)), Start)] == [D]


def test_signs_of_life_of_a_waiting_leader_become_rarer() -> None:
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    effects, times = won(leader), list[float]()
    for _ in range(8):
        times += [effect.at for effect in effects if isinstance(effect, SetTimer) and effect.name == "heartbeat"]
        effects = fire(leader, effects, "heartbeat")
    waits = [later - before for before, later in pairwise(times)]
    assert waits[0] < waits[1] < waits[2] and max(waits) <= HEARTBEAT_MAX_S


def _gpu() -> Gpu:
    return Gpu(uuid="GPU-1", model="A", vram_mib=1000, capability=(8, 0))


def test_cancel_ends_a_job_without_a_runner() -> None:
    leader = make_leader()
    effects = won(leader, cancel=True)
    accepts = [send.message for send in sends(effects, Accept)]
    assert len(accepts) == 3 and leader.state == "finishing"
    assert all(
        isinstance(m, Accept) and m.record.outcome is not None and m.record.outcome.kind == "cancelled" for m in accepts
    )
    waiting = make_leader()
    waiting.spec = msgspec.structs.replace(waiting.spec, gpus=1)
    won(waiting)
    effects = waiting.handle(B, Accepted(job=JOB, term=1, disk=DISK, round=1, cancel_wanted=True), at(1))
    assert sends(effects, Accept) and waiting.state == "finishing"
    saved = JobRecord(version=1).with_commit(1, b"m" * 32, (D,), 7, 1)
    (ended, *_) = [send.message.record for send in sends(won(make_leader(), cancel=True, record=saved), Accept)]  # type: ignore[union-attr]
    assert (ended.outcome.manifest, ended.outcome.holders) == (b"m" * 32, (D,)), "its last checkpoint is its result"


def test_round_of_before_does_not_close_the_term_of_a_cancelled_job() -> None:
    """The answers that carry the wish to cancel also decide the round that they answer: it is not the end."""
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    won(leader)
    (heartbeat, *_) = [send.message.round for send in sends(leader.cancelled(at(1)), Accept)]  # type: ignore[union-attr]
    answer = Accepted(job=JOB, term=1, disk=DISK, round=heartbeat, cancel_wanted=True)
    (end, *_) = [send.message.round for send in sends(leader.handle(A, answer, at(1)), Accept)]  # type: ignore[union-attr]
    for node in (B, C):
        assert leader.handle(node, answer, at(1)) == [] and leader.state == "finishing"
    leader.handle(A, msgspec.structs.replace(answer, round=end), at(1))
    effects = leader.handle(B, msgspec.structs.replace(answer, round=end), at(1))
    assert any(isinstance(effect, Concluded) for effect in effects)


def test_cancel_that_one_witness_of_the_majority_knows_ends_the_job() -> None:
    leader = make_leader()
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D, E)), at(0)), 0)
    leader.handle(A, promise(term), at(0))
    effects = leader.handle(B, promise(term, cancel=True), at(0))
    assert sends(effects, Accept) and leader.state == "finishing"


def test_deciding_leader_reports_the_end_once_and_then_stays_silent() -> None:
    leader = make_leader()
    won(leader, cancel=True)
    accepted = Accepted(job=JOB, term=1, disk=DISK, round=1, cancel_wanted=True)
    assert leader.handle(A, accepted, at(0)) == []
    effects = leader.handle(B, accepted, at(0))
    (end,) = [effect for effect in effects if isinstance(effect, Concluded)]
    assert end.outcome.kind == "cancelled" and len(sends(effects, Closed)) == 3
    assert [e for e in leader.handle(C, accepted, at(0)) if isinstance(e, Concluded)] == []


def test_leader_leaves_a_proposed_outcome_to_its_proposer() -> None:
    attempt = Attempt(0, D, "d", 1, 0, ended_unix_ms=1, reason="done")
    ended = JobRecord(version=2, attempts=(attempt,), outcome=Outcome("done", "done", 0, None, (), 1_000))
    witness = make_witness()
    witness.handle(D, Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(version=1), holder=D), 0.0)
    leader = make_leader(A, witness)
    leader.observe(make_view(A, (A, B, C, D)), at(0))
    witness.handle(D, Accept(job=JOB, term=1, round=2, config=GROUP, record=ended, holder=None), 1.0)
    effects = leader.act(at(1))
    assert sends(effects, PreVote) == [] and [e.at for e in effects if isinstance(e, SetTimer)] == [1 + ANSWER_S]
    assert len(sends(fire(leader, effects, "turn"), PreVote)) == 3 and leader.state == "asking"
    witness.handle(E, Closed(job=JOB, term=1, record=ended), 5.0)
    assert not witness.finished, "only the last runner or a witness may report the end"
    witness.handle(D, Closed(job=JOB, term=1, record=ended), 5.0)
    assert leader.act(at(5)) == [] and leader.state == "watching", "the leader of an ended job stays silent"


def test_leader_waits_out_a_running_lease() -> None:
    leader = make_leader()
    leader.observe(make_view(A, (A, B, C)), at(0))
    refused = Refused(
        job=JOB,
        disk=DISK,
        term=1,
        round=0,
        promised=4,
        config=GROUP,
        lease_left_s=3.0,
        needs_spec=False,
        finished=False,
    )
    effects = leader.handle(B, refused, at(1))
    assert leader.state == "watching"
    again = sends(fire(leader, effects, "turn"), PreVote)
    assert [send.message.term for send in again] == [5, 5, 5]  # type: ignore[union-attr]


def test_lying_witness_neither_stops_a_leader_nor_uses_up_the_terms() -> None:
    leader, last = make_leader(), (1 << 53) - 1
    effects = leader.observe(make_view(A, (A, B, C)), at(0))
    lie = Refused(JOB, 1, DISK, 0, last, GROUP, 0.0, needs_spec=False, finished=False)
    assert leader.handle(C, lie, at(0)) == [] and leader.state == "asking", "two of three witnesses suffice"
    effects = leader.handle(B, msgspec.structs.replace(lie, promised=AHEAD + 1), at(0))
    again = sends(fire(leader, effects, "turn"), PreVote)
    assert [send.message.term for send in again] == [2, 2, 2], "one that is so far ahead leads the job itself"  # type: ignore[union-attr]
    effects = leader.handle(B, msgspec.structs.replace(lie, term=2, promised=AHEAD), at(1))
    again = sends(fire(leader, effects, "turn"), PreVote)
    assert [send.message.term for send in again] == [AHEAD + 1] * 3  # type: ignore[union-attr]


def test_witness_that_missed_a_release_delays_no_leader() -> None:
    """The first witness to receive the release acts before the last one receives it."""

    def refused(term: int) -> Refused:
        return Refused(
            job=JOB,
            disk=DISK,
            term=term,
            round=0,
            promised=0,
            config=GROUP,
            lease_left_s=4.2,
            needs_spec=False,
            finished=False,
        )

    leader = make_leader()
    leader.observe(make_view(A, (A, B, C)), at(0))
    assert leader.handle(C, refused(1), at(0)) == [] and leader.state == "asking", "two of three witnesses suffice"
    effects = leader.handle(B, refused(1), at(0))
    pauses = []
    for term in range(2, 8):
        timer = [effect for effect in effects if isinstance(effect, SetTimer) and effect.name == "turn"][-1]
        pauses.append(timer.at)
        fire(leader, effects, "turn")
        leader.handle(C, refused(term), at(timer.at))
        effects = leader.handle(B, refused(term), at(timer.at))
    gaps = [later - earlier for earlier, later in pairwise(pauses)]
    assert pauses[0] <= 0.5 and gaps == sorted(gaps) and gaps[-1] == pytest.approx(4.2), (
        "the pauses start short and grow"
    )


def test_leader_prepares_only_after_a_quorum_of_pre_votes() -> None:
    """A partitioned leader keeps asking, but its own witness promises no term that would fence the runner later."""
    leader = make_leader()
    effects = leader.observe(make_view(A, (A,)), at(0))
    for _ in range(5):
        (own,) = [send for send in sends(effects, PreVote) if send.to == A]
        (answer,) = leader.witness.handle(A, own.message, 1.0)  # type: ignore[arg-type]
        assert isinstance(answer, Send) and isinstance(answer.message, PreVoteGranted)
        assert leader.handle(A, answer.message, at(1)) == []
        effects = fire(leader, fire(leader, effects, "answer"), "turn")
    assert leader.witness.witness_record.promised == 0


def test_answers_of_an_earlier_term_win_nothing() -> None:
    leader = make_leader()
    effects = leader.observe(make_view(A, (A, B, C, D, E)), at(0))
    effects = fire(leader, fire(leader, effects, "answer"), "turn")
    assert {send.message.term for send in sends(effects, PreVote)} == {2}  # type: ignore[union-attr]
    for node in (A, B, C):
        assert leader.handle(node, PreVoteGranted(job=JOB, term=1, disk=DISK), at(5)) == []
    assert elect(leader, effects, 5) == 2
    for node in (A, B, C):
        assert leader.handle(node, promise(1), at(5)) == []
    assert leader.state == "preparing"


def test_promise_of_another_disk_is_no_vote() -> None:
    leader = make_leader()
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D, E)), at(0)), 0)
    leader.handle(A, promise(term), at(0))
    assert not sends(leader.handle(B, msgspec.structs.replace(promise(term), disk=b"another!"), at(0)), Start)
    assert sends(leader.handle(C, promise(term), at(0)), Start)


def test_record_of_the_highest_term_is_continued() -> None:
    longer, later = JobRecord(version=9, errors=1), JobRecord(version=3, errors=2)
    leader = make_leader()
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D, E)), at(0)), 0)
    leader.handle(A, msgspec.structs.replace(promise(term, longer), accepted_term=1), at(0))
    effects = leader.handle(B, msgspec.structs.replace(promise(term, later), accepted_term=2), at(0))
    start = sends(effects, Start)[0].message
    assert isinstance(start, Start) and start.record.errors == 2


def test_end_that_a_witness_accepted_is_finished() -> None:
    ended = JobRecord(version=3, outcome=Outcome("done", "done", 0, None, (), 1))
    leader = make_leader()
    effects = won(leader, record=ended)
    assert not sends(effects, Start) and leader.state == "finishing"
    assert [send.message.record for send in sends(effects, Accept)] == [ended] * 3  # type: ignore[union-attr]


def test_first_term_is_used_only_while_nobody_else_can_have_one() -> None:
    first = Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(), holder=None)
    leased = msgspec.structs.replace(first, record=JobRecord(version=1), holder=D)

    def uses(*seen: tuple[bytes, Prepare | Accept], line: tuple[bytes, ...] = (B, A, C)) -> bool:
        leader = make_leader(A, make_witness(line))
        group = leader.witness.witness_record.config
        for sender, asked in seen:
            mine = msgspec.structs.replace(asked, config=group) if isinstance(asked, Accept) else asked
            leader.witness.handle(sender, mine, 0.0)
        leader.observe(make_view(A, (A, B, C, D)), at(0))
        return bool(sends(leader.use_first_term(Proposer(JOB, b"", 1, GROUP, JobRecord(), None), at(0)), Start))

    assert uses((B, first))
    assert not uses((B, first), (B, Prepare(job=JOB, term=2))), "B has a term"
    assert not uses((B, first), (D, leased)), "D runs the job"
    assert not uses((B, first), line=(A, B, C)), "this leader asks for a term already"


def test_node_outside_the_group_does_not_lead() -> None:
    leader = make_leader(A, make_witness((B, C, D)))
    assert sends(leader.observe(make_view(A, (A, B, C, D)), at(60)), PreVote) == []
    assert sends(leader.act(at(600)), PreVote) == []


def waiting_leader() -> tuple[Leader, list[Effect]]:
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    return leader, won(leader)


def test_waiting_leader_waits_on_once_its_round_is_decided() -> None:
    leader, effects = waiting_leader()
    for node in (A, B):
        assert leader.handle(node, Accepted(job=JOB, term=1, disk=DISK, round=1), at(1)) == []
    assert leader.state == "waiting" and sends(fire(leader, effects, "heartbeat"), Accept)


def test_waiting_leader_changes_its_group_as_soon_as_the_new_one_answers() -> None:
    leader, _ = waiting_leader()
    asked = sends(leader.observe(make_view(A, (A,)), at(1)), Accept)
    assert {send.to for send in asked} == {A, B, C}
    answer = Accepted(job=JOB, term=leader._term, disk=DISK, round=asked[0].message.round)  # type: ignore[union-attr]
    assert leader.handle(B, answer, at(1)) == []
    named = sends(leader.handle(A, answer, at(1)), Accept)
    assert {send.message.config.members for send in named} == {voters(A)}  # type: ignore[union-attr]


def test_waiting_leader_yields_to_a_majority_that_has_promised_a_higher_term() -> None:
    leader, effects = waiting_leader()
    higher = Refused(JOB, 1, DISK, 1, 5, GROUP, 0.0, needs_spec=False, finished=False)
    assert leader.handle(B, higher, at(1)) == [] and leader.state == "waiting"
    leader.handle(C, higher, at(1))
    assert leader.state == "watching" and fire(leader, effects, "heartbeat") == [], "its timers are void"


def test_timer_of_an_earlier_question_is_void() -> None:
    leader = make_leader()
    first = leader.observe(make_view(A, (A, B, C)), at(0))
    fire(leader, fire(leader, first, "answer"), "turn")
    assert leader.state == "asking" and fire(leader, first, "answer") == [] and leader.state == "asking"


def test_runner_has_a_lease_to_report() -> None:
    leader = make_leader()
    (start,) = sends(won(leader), Start)
    leader.handle(start.to, StartAnswer(job=JOB, term=1, taken=True, reason=""), at(0))
    view = make_view(A, (A, B, C, D, E))
    assert not sends(leader.observe(view, at(leader.spec.lease_s - 0.1)), PreVote)
    assert sends(leader.observe(view, at(leader.spec.lease_s)), PreVote)


def test_only_the_chosen_node_answers_a_start() -> None:
    leader = make_leader()
    (start,) = sends(won(leader), Start)
    other = next(node for node in (A, B, C, D, E) if node != start.to)
    term = start.message.term  # type: ignore[union-attr]
    assert leader.handle(other, StartAnswer(job=JOB, term=term, taken=True, reason=""), at(0)) == []
    assert leader.handle(start.to, StartAnswer(job=JOB, term=term - 1, taken=True, reason=""), at(0)) == []
    assert leader.state == "offered"


def test_leader_lets_a_rival_use_its_term() -> None:
    leader = make_leader()
    won(leader)
    leader.rival_seen(B, PREPARED_S, at(2))
    assert leader.state == "watching"
    assert sends(leader.act(at(2)), PreVote) == []
    gone = make_view(A, (A, C, D))
    assert sends(leader.observe(gone, at(2.1)), PreVote), "a rival that has left is not waited for"


def test_leader_forgets_a_rival_that_has_used_its_term() -> None:
    """B led the job once; when the job needs a leader again, A acts at once."""
    leader = make_leader()
    leader.rival_seen(B, PREPARED_S, at(0))
    leader.observe(make_view(A, (A, B, C, D)), at(0))
    run = Accept(job=JOB, term=1, round=1, config=GROUP, record=JobRecord(version=1), holder=D)
    leader.witness.handle(D, run, 1.0)
    assert sends(leader.act(at(1)), PreVote) == []
    leader.witness.handle(D, msgspec.structs.replace(run, round=2, record=JobRecord(version=2), holder=None), 2.0)
    assert sends(leader.act(at(2)), PreVote)


def test_replaced_leader_retires() -> None:
    leader = make_leader()
    newer = Config(number=3, term=2, members=voters(B, C, D))
    elect(leader, leader.observe(make_view(A, (A, B, C, D)), at(0)), 0)
    leader.handle(B, promise(1, config=newer), at(0))
    assert leader.state == "retired" and leader.act(at(9)) == []


def test_leader_installs_a_witness_that_the_submission_missed() -> None:
    leader = make_leader()
    leader.observe(make_view(A, (A, B, C)), at(0))
    missing = Refused(
        job=JOB, disk=DISK, term=1, round=0, promised=0, config=None, lease_left_s=0, needs_spec=True, finished=False
    )
    effects = leader.handle(C, missing, at(0))
    introduction = sends(effects, Accept)[0].message
    assert isinstance(introduction, Accept) and introduction.spec is not None and introduction.term == 1
    assert leader.handle(C, missing, at(0.1)) == [], "a member that cannot read the job is not asked without a pause"
    lost = msgspec.structs.replace(missing, disk=b"another!")
    assert not sends(leader.handle(B, lost, at(0.1)), Accept), "a new disk is another voter"


def test_leader_installs_a_witness_with_the_newest_group_that_was_promised() -> None:
    leader = make_leader()
    term = elect(leader, leader.observe(make_view(A, (A, B, C, D)), at(0)), 0)
    newer = Config(number=1, term=1, members=voters(A, B, D), previous=voters(A, B, C))
    leader.handle(A, promise(term, config=newer), at(0))
    missing = Refused(
        job=JOB, disk=DISK, term=term, round=0, promised=0, config=None, lease_left_s=0, needs_spec=True, finished=False
    )
    (introduction,) = [send.message for send in sends(leader.handle(D, missing, at(0)), Accept)]
    assert isinstance(introduction, Accept) and introduction.config == newer


def test_leader_past_200_nodes_asks_the_best_node_of_the_best_zone() -> None:
    nodes = [A, B, C, *(bytes([9]) + number.to_bytes(31, "big") for number in range(198))]
    adverts = tuple(
        make_advert(node, zone="abcdef"[place % 6], nick=str(place), weight=1 + place % 64)
        for place, node in enumerate(nodes)
    )
    request = placement_request(JOB, make_spec(), 0)
    for hierarchy in (Hierarchy(0, adverts), Hierarchy(201, adverts)):
        leader = make_leader()
        view = make_view(A, tuple(nodes), adverts=adverts, hierarchy=hierarchy)
        term = elect(leader, leader.observe(view, at(0)), 0)
        leader.handle(A, promise(term), at(0))
        effects = leader.handle(B, promise(term), at(0))
        (start,) = sends(effects, Start)
        (decided,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
        ranking = hierarchy.rank(leader.request(JobRecord(), at(0)), adverts[::-1])
        assert decided.chosen == start.to and replay(decided, leader.request(JobRecord(), at(0)), ranking)
        flat, zoned = rank_nodes(request, adverts), rank_nodes(request, adverts, homes(zones(adverts, {})))
        assert start.to == (zoned if hierarchy.since else flat).candidates[0].node
        assert flat.candidates[0] != zoned.candidates[0], "the rankings differ, so the test is meaningful"


def test_only_most_of_the_witnesses_retire_a_leader() -> None:
    leader = make_leader()
    leader.observe(make_view(A, (A, B, C, D, E)), at(0.0))
    leader.act(at(60.0))
    assert leader.state == "asking"
    term = leader._term
    forged = Refused(JOB, term, DISK, 0, 1 << 40, Config(9, 9, voters(E)), 0.0, needs_spec=False, finished=False)
    for promised in (term + 1, 1 << 40):
        stranger = msgspec.structs.replace(forged, promised=promised)
        assert leader.handle(E, stranger, at(60.0)) == [] and leader.state == "asking" and leader._seen_term < term
    leader.handle(B, msgspec.structs.replace(forged, promised=0), at(60.0))
    leader.handle(B, msgspec.structs.replace(forged, promised=0, disk=b"another!"), at(60.0))
    assert leader.state == "asking", "one witness may lie"
    leader.handle(C, msgspec.structs.replace(forged, promised=0), at(60.0))
    assert leader.state == "retired", "most witnesses know a newer group"


def test_refusal_of_an_earlier_term_changes_nothing() -> None:
    leader = make_leader()
    leader.observe(make_view(A, (A, B, C)), at(0.0))
    leader.act(at(60.0))
    assert leader.state == "asking"
    late = Refused(JOB, leader._term - 1, DISK, 0, 0, None, 5.0, needs_spec=False, finished=False)
    for witness in (B, C):
        assert leader.handle(witness, late, at(60.0)) == [] and leader.state == "asking"
    asked = msgspec.structs.replace(late, term=leader._term)
    leader.handle(B, asked, at(60.0))
    leader.handle(C, asked, at(60.0))
    assert leader.state == "watching", "two of three say that a lease runs"


def test_replaced_witness_does_not_retire_a_leader() -> None:
    """Regression: a witness that had been replaced ended the only leader of a waiting job by naming a newer group."""
    leader = make_leader()
    leader.spec = msgspec.structs.replace(leader.spec, gpus=1)
    won(leader)
    assert leader.state == "waiting" and leader._proposer is not None
    leader._proposer.config = Config(1, 1, voters(A, B))
    leader._proposer._removed = voters(C)
    for promised in (leader._term + 1, 1 << 40):
        forged = Refused(
            JOB, leader._term, DISK, 0, promised, Config(9, 9, voters(E)), 0.0, needs_spec=False, finished=False
        )
        leader.handle(C, forged, at(1.0))
        assert leader.state != "retired" and leader._seen_term <= leader._term


def test_node_that_declined_is_asked_again_though_its_advert_stays() -> None:
    """Regression: a job waited for ever when nodes declined for a reason that no advert shows."""
    leader = make_leader()
    effects, now = won(leader, alive=(A, B, C)), 0.0
    for _ in range(3):
        start = sends(effects, Start)[0]
        effects = leader.handle(start.to, StartAnswer(JOB, start.message.term, False, "busy"), at(now))  # type: ignore[union-attr]
        term = elect(leader, effects, now)
        leader.handle(A, promise(term), at(now))
        effects = leader.handle(B, promise(term), at(now))
    assert leader.state == "waiting" and set(leader.declined) == {A, B, C}
    while leader.state == "waiting":
        beat = [effect for effect in effects if isinstance(effect, SetTimer) and effect.name == "heartbeat"][-1]
        now, effects = beat.at, leader.on_timer(Timer(beat.name, beat.token), at(beat.at))
    assert len(sends(effects, Start)) == 1 and HEARTBEAT_MAX_S <= now <= 2 * HEARTBEAT_MAX_S


def test_group_of_a_later_term_outranks_changes_under_an_earlier_one() -> None:
    """Regression: an owner that was overtaken had changed the group more often, and a leader believed its group."""
    stale = Config(number=84, term=1, members=voters(A, B, C))
    decided = Config(number=1, term=2, members=voters(A, B, D))
    leader = make_leader()
    effects = leader.observe(make_view(A, (A, B, C, D, E)), at(0))
    term = elect(leader, effects, 0)
    leader.handle(C, msgspec.structs.replace(promise(term, config=stale), accepted_term=1), at(0))
    leader.handle(A, msgspec.structs.replace(promise(term, config=decided), accepted_term=2), at(0))
    effects = leader.handle(B, msgspec.structs.replace(promise(term, config=decided), accepted_term=2), at(0))
    start = sends(effects, Start)[0].message
    assert isinstance(start, Start) and start.config.members == decided.members and start.config.term == term
