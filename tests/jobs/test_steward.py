"""Who acts when nobody runs the job, in which order, and what it does with the term it wins."""

import msgspec
import pytest

from mesh.jobs.effects import Effect, Send, SetTimer
from mesh.jobs.ledger import Attempt, Config, Ledger
from mesh.jobs.messages import Accept, Accepted, Prepare, Promised, Refused, Start, StartAnswer
from mesh.jobs.steward import ANSWER_S, HEARTBEAT_S, LET_PASS_S, STAGGER_S, Steward
from mesh.jobs.view import Timer
from placement.advert import Advert
from placement.queue import Queue, Waiting
from placement.request import Request
from tests.jobs.worlds import (
    DISK,
    JOB,
    A,
    B,
    C,
    D,
    E,
    at,
    make_advert,
    make_spec,
    make_steward,
    make_view,
    make_witness,
    seats,
)

GROUP = Config(number=0, term=0, members=seats(A, B, C))


def sends(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def fire(steward: Steward, effects: list[Effect], name: str) -> list[Effect]:
    timer = [effect for effect in effects if isinstance(effect, SetTimer) and effect.name == name][-1]
    return steward.on_timer(Timer(timer.name, timer.token), at(timer.at))


def promise(term: int, ledger: Ledger | None = None, config: Config = GROUP, cancel: bool = False) -> Promised:
    return Promised(
        job=JOB, term=term, disk=DISK, config=config, accepted_term=0, ledger=ledger or Ledger(), cancel_wanted=cancel
    )


def won(
    steward: Steward, *, alive: tuple[bytes, ...] = (A, B, C, D, E), now: float = 0.0, **reply: object
) -> list[Effect]:
    """Let it take its turn and win a majority; what it does then."""
    effects = steward.observe(make_view(A, alive), at(now))
    term = sends(effects, Prepare)[0].message.term  # type: ignore[union-attr]
    assert steward.handle(A, promise(term, **reply), at(now)) == []  # type: ignore[arg-type]
    return steward.handle(B, promise(term, **reply), at(now))  # type: ignore[arg-type]


def test_the_first_of_the_group_acts_and_the_others_wait_their_turn() -> None:
    assert len(sends(make_steward(A).observe(make_view(A, (A, B, C)), at(0)), Prepare)) == 3
    second = make_steward(B)
    effects = second.observe(make_view(B, (A, B, C)), at(0))
    assert sends(effects, Prepare) == [] and [e.at for e in effects if isinstance(e, SetTimer)] == [STAGGER_S]
    assert len(sends(fire(second, effects, "turn"), Prepare)) == 3
    leaving = make_steward(A)
    waits = leaving.observe(make_view(A, (A, B, C), leaving=frozenset({A})), at(0))
    assert sends(waits, Prepare) == [], "whoever leaves lets the others go first"


def test_while_somebody_holds_the_lease_it_only_watches() -> None:
    witness = make_witness()
    witness.handle(D, Accept(job=JOB, term=1, round=1, config=GROUP, ledger=Ledger(version=1), holder=D), 0.0)
    steward = make_steward(A, witness)
    effects = steward.observe(make_view(A, (A, B, C, D)), at(0))
    assert sends(effects, Prepare) == []
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [witness.lease_until + 0.01]
    assert len(sends(fire(steward, effects, "turn"), Prepare)) == 3


def test_a_majority_of_promises_starts_the_job_on_the_best_node() -> None:
    steward = make_steward()
    starts = sends(won(steward), Start)
    assert len(starts) == 1 and steward.state == "offered"
    answer = StartAnswer(job=JOB, term=1, taken=True, reason="")
    steward.handle(starts[0].to, answer, at(0))
    assert steward.state == "watching"


def queue_of(*others: Waiting, adverts: tuple[Advert, ...]) -> Queue:
    return Queue(others, {}, adverts, 1)


def test_it_lets_those_pass_who_go_first_but_not_for_ever() -> None:
    adverts = (make_advert(D),)
    first = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    steward = make_steward()
    view = make_view(A, (A, B, C, D), adverts=adverts, queue=queue_of(first, adverts=adverts))
    effects = steward.observe(view, at(0))
    term = sends(effects, Prepare)[0].message.term  # type: ignore[union-attr]
    steward.handle(A, promise(term), at(0))
    effects = steward.handle(B, promise(term), at(0))
    assert steward.state == "waiting" and steward.detail == "1 other job goes first"
    assert sends(steward.observe(view, at(LET_PASS_S)), Start) == []
    assert len(sends(steward.observe(view, at(LET_PASS_S + 1)), Start)) == 1, "who does not take his place loses it"


def test_it_does_not_wait_for_those_behind_it_nor_where_there_is_room_for_all() -> None:
    low = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 1, 1)
    high = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    for other, adverts in ((low, (make_advert(D),)), (high, (make_advert(D), make_advert(E)))):
        steward = make_steward()
        view = make_view(A, (A, B, C, D, E), adverts=adverts, queue=queue_of(other, adverts=adverts))
        term = sends(steward.observe(view, at(0)), Prepare)[0].message.term  # type: ignore[union-attr]
        steward.handle(A, promise(term), at(0))
        assert len(sends(steward.handle(B, promise(term), at(0)), Start)) == 1


def held_back(**view: object) -> tuple[Steward, list[Effect]]:
    steward = make_steward(witness=make_witness(spec=make_spec(after=(b"1" * 16, b"2" * 16))))
    shown = make_view(A, (A, B, C, D), **view)
    term = sends(steward.observe(shown, at(0)), Prepare)[0].message.term  # type: ignore[union-attr]
    steward.handle(A, promise(term), at(0))
    return steward, steward.handle(B, promise(term), at(0))


def test_a_job_waits_for_those_it_comes_after() -> None:
    steward, effects = held_back(ends={b"1" * 16: "done"})
    assert sends(effects, Start) == [] and steward.state == "waiting" and steward.detail.startswith("after ")
    done = make_view(A, (A, B, C, D), ends={b"1" * 16: "done", b"2" * 16: "done"})
    assert len(sends(steward.observe(done, at(1)), Start)) == 1


@pytest.mark.parametrize(("kind", "words"), [("failed", "has failed"), ("cancelled", "has been cancelled")])
def test_a_job_fails_with_one_that_it_comes_after(kind: str, words: str) -> None:
    steward, effects = held_back(ends={b"1" * 16: "done", b"2" * 16: kind})
    (outcome,) = {send.message.ledger.outcome for send in sends(effects, Accept)}  # type: ignore[union-attr]
    assert outcome is not None and outcome.kind == "failed" and words in outcome.detail
    assert steward.state == "finishing"


def test_the_ledger_it_hands_on_is_the_newest_of_the_promises_with_the_lost_attempt_closed() -> None:
    steward = make_steward()
    old = Ledger(version=1)
    attempt = Attempt(number=0, node=E, nick="e", term=1, started_unix_ms=0, seen_unix_ms=0)
    new = Ledger(version=7, attempts=(attempt,))
    term = sends(steward.observe(make_view(A, (A, B, C, D)), at(5)), Prepare)[0].message.term  # type: ignore[union-attr]
    steward.handle(A, promise(term, old), at(5))
    start = sends(steward.handle(B, promise(term, new), at(5)), Start)[0].message
    assert isinstance(start, Start) and start.ledger.version > 7
    assert [a.reason for a in start.ledger.attempts] == ["node lost"]


def test_who_declines_is_passed_over_and_remembered_until_adverts_change() -> None:
    steward = make_steward()
    first = sends(won(steward), Start)[0].to
    effects = steward.handle(first, StartAnswer(job=JOB, term=1, taken=False, reason="its slots are taken"), at(0))
    term = sends(effects, Prepare)[0].message.term  # type: ignore[union-attr]
    assert term == 2, "a term is never offered twice"
    steward.handle(A, promise(2), at(0))
    second = sends(steward.handle(B, promise(2), at(0)), Start)[0].to
    assert second != first
    effects = fire(steward, [SetTimer("answer", steward._tokens._latest["answer"], ANSWER_S)], "answer")
    assert sends(effects, Prepare), "who does not answer is passed over too"


def test_with_nobody_to_take_it_the_job_waits_and_says_why() -> None:
    steward = make_steward()
    steward.spec = msgspec.structs.replace(steward.spec, gpus=1)
    effects = won(steward)
    assert sends(effects, Start) == [] and steward.state == "waiting" and "GPU" in steward.detail
    assert len(sends(effects, Accept)) == 3
    assert sends(fire(steward, effects, "heartbeat"), Accept), f"it shows every {HEARTBEAT_S} s that it is there"
    gpu = make_advert(D, version=2)
    gpu = msgspec.structs.replace(gpu, gpus=(_gpu(),), gpus_free=("GPU-1",))
    view = make_view(A, (A, B, C, D), adverts=(gpu,))
    assert [send.to for send in sends(steward.observe(view, at(1)), Start)] == [D]


def _gpu() -> object:
    from placement.advert import Gpu

    return Gpu(uuid="GPU-1", model="A", vram_mib=1000, capability=(8, 0))


def test_a_wish_to_cancel_ends_the_job_without_a_runner() -> None:
    steward = make_steward()
    effects = won(steward, cancel=True)
    accepts = [send.message for send in sends(effects, Accept)]
    assert len(accepts) == 3 and steward.state == "finishing"
    assert all(
        isinstance(m, Accept) and m.ledger.outcome is not None and m.ledger.outcome.kind == "cancelled" for m in accepts
    )
    waiting = make_steward()
    waiting.spec = msgspec.structs.replace(waiting.spec, gpus=1)
    won(waiting)
    effects = waiting.handle(B, Accepted(job=JOB, term=1, disk=DISK, round=1, cancel_wanted=True), at(1))
    assert sends(effects, Accept) and waiting.state == "finishing"


def test_a_refusal_for_a_running_lease_is_waited_out() -> None:
    steward = make_steward()
    steward.observe(make_view(A, (A, B, C)), at(0))
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
    effects = steward.handle(B, refused, at(1))
    assert steward.state == "watching"
    again = sends(fire(steward, effects, "turn"), Prepare)
    assert [send.message.term for send in again] == [5, 5, 5]  # type: ignore[union-attr]


def test_a_rival_gets_its_time() -> None:
    steward = make_steward()
    won(steward)
    steward.rival_seen(B, at(2))
    assert steward.state == "watching"
    assert sends(steward.act(at(2)), Prepare) == []
    gone = make_view(A, (A, C, D))
    assert sends(steward.observe(gone, at(2.1)), Prepare), "unless it is gone"


def test_replaced_in_the_group_it_stands_down() -> None:
    steward = make_steward()
    newer = Config(number=3, term=2, members=seats(B, C, D))
    steward.observe(make_view(A, (A, B, C, D)), at(0))
    steward.handle(B, promise(1, config=newer), at(0))
    assert steward.state == "retired" and steward.act(at(9)) == []


def test_a_witness_the_submission_missed_is_given_the_job() -> None:
    steward = make_steward()
    steward.observe(make_view(A, (A, B, C)), at(0))
    missing = Refused(
        job=JOB, disk=DISK, term=1, round=0, promised=0, config=None, lease_left_s=0, needs_spec=True, finished=False
    )
    effects = steward.handle(C, missing, at(0))
    introduction = sends(effects, Accept)[0].message
    assert isinstance(introduction, Accept) and introduction.spec is not None and introduction.term == 0
