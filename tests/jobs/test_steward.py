"""Who acts when nobody runs the job, in which order, and what it does with the term it wins."""

from itertools import pairwise

import msgspec
import pytest

from mesh.jobs.effects import Concluded, Decided, Effect, Send, SetTimer, StateChanged
from mesh.jobs.ledger import Attempt, Config, Ledger, Outcome
from mesh.jobs.messages import (
    Accept,
    Accepted,
    Closed,
    MakeRoom,
    Prepare,
    Promised,
    Refused,
    Start,
    StartAnswer,
    Willing,
    Would,
)
from mesh.jobs.spec import ArrayPlace, placement_request
from mesh.jobs.steward import ANSWER_S, ASK_EVERY_S, HEARTBEAT_S, PREPARED_S, STAGGER_S, Steward
from mesh.jobs.view import Timer
from placement.advert import Advert, Gpu
from placement.allotment import untouched
from placement.decision import replay
from placement.preemption import Stay
from placement.queue import Queue, Waiting
from placement.ranking import rank_nodes
from placement.request import Request
from placement.zones import Hierarchy, homes, zones
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


def elect(steward: Steward, effects: list[Effect], now: float) -> int:
    """Let a majority be willing: the term it then asks for."""
    term = sends(effects, Would)[0].message.term  # type: ignore[union-attr]
    assert steward.handle(A, Willing(job=JOB, term=term, disk=DISK), at(now)) == []
    prepares = sends(steward.handle(B, Willing(job=JOB, term=term, disk=DISK), at(now)), Prepare)
    assert [send.message.term for send in prepares] == [term] * 3  # type: ignore[union-attr]
    return int(term)


def won(
    steward: Steward, *, alive: tuple[bytes, ...] = (A, B, C, D, E), now: float = 0.0, **reply: object
) -> list[Effect]:
    """Let it take its turn and win a majority; what it does then."""
    effects = steward.observe(make_view(A, alive), at(now))
    term = elect(steward, effects, now)
    assert steward.handle(A, promise(term, **reply), at(now)) == []  # type: ignore[arg-type]
    return steward.handle(B, promise(term, **reply), at(now))  # type: ignore[arg-type]


def test_the_first_of_the_group_acts_and_the_others_wait_their_turn() -> None:
    assert len(sends(make_steward(A).observe(make_view(A, (A, B, C)), at(0)), Would)) == 3
    second = make_steward(B)
    effects = second.observe(make_view(B, (A, B, C)), at(0))
    assert sends(effects, Would) == [] and [e.at for e in effects if isinstance(e, SetTimer)] == [STAGGER_S]
    assert len(sends(fire(second, effects, "turn"), Would)) == 3
    leaving = make_steward(A)
    waits = leaving.observe(make_view(A, (A, B, C), leaving=frozenset({A})), at(0))
    assert sends(waits, Would) == [], "whoever leaves lets the others go first"


def test_while_somebody_holds_the_lease_it_only_watches() -> None:
    witness = make_witness()
    witness.handle(D, Accept(job=JOB, term=1, round=1, config=GROUP, ledger=Ledger(version=1), holder=D), 0.0)
    steward = make_steward(A, witness)
    effects = steward.observe(make_view(A, (A, B, C, D)), at(0))
    assert sends(effects, Would) == []
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [witness.lease_until + 0.01]
    assert len(sends(fire(steward, effects, "turn"), Would)) == 3


def test_a_majority_of_promises_starts_the_job_on_the_best_node() -> None:
    steward = make_steward()
    starts = sends(won(steward), Start)
    assert len(starts) == 1 and steward.state == "offered"
    answer = StartAnswer(job=JOB, term=1, taken=True, reason="")
    steward.handle(starts[0].to, answer, at(0))
    assert steward.state == "watching"


def queue_of(*others: Waiting, adverts: tuple[Advert, ...]) -> Queue:
    return Queue(others, {}, adverts, 1)


def test_it_lets_those_pass_who_go_first_until_they_are_idle() -> None:
    adverts = (make_advert(D),)
    first = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    steward = make_steward()
    view = make_view(A, (A, B, C, D), adverts=adverts, queue=queue_of(first, adverts=adverts))
    effects = steward.observe(view, at(0))
    term = elect(steward, effects, 0)
    steward.handle(A, promise(term), at(0))
    effects = steward.handle(B, promise(term), at(0))
    assert steward.state == "waiting" and steward.detail == "other jobs go first"
    assert steward.observe(view, at(1)) == [StateChanged("pending", steward.detail)], "nobody is asked again for that"
    idle = make_view(A, (A, B, C, D), adverts=adverts, queue=Queue([first], {}, adverts, 1, idle={first.job}))
    assert len(sends(steward.observe(idle, at(2)), Start)) == 1, "who does not take his place loses it"


def test_it_does_not_wait_for_those_behind_it_nor_where_there_is_room_for_all() -> None:
    low = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 1, 1)
    high = Waiting(Request(job=b"first" * 3, attempt=0, user="bob"), 90, 1)
    for other, adverts in ((low, (make_advert(D),)), (high, (make_advert(D), make_advert(E)))):
        steward = make_steward()
        view = make_view(A, (A, B, C, D, E), adverts=adverts, queue=queue_of(other, adverts=adverts))
        term = elect(steward, steward.observe(view, at(0)), 0)
        steward.handle(A, promise(term), at(0))
        assert len(sends(steward.handle(B, promise(term), at(0)), Start)) == 1


def held_back(**view: object) -> tuple[Steward, list[Effect]]:
    steward = make_steward(witness=make_witness(spec=make_spec(after=(b"1" * 16, b"2" * 16))))
    shown = make_view(A, (A, B, C, D), **view)
    term = elect(steward, steward.observe(shown, at(0)), 0)
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


def place(at_place: int, limit: int) -> ArrayPlace:
    return ArrayPlace(b"a" * 16, index=10 * at_place, place=at_place, of=9, limit=limit)


@pytest.mark.parametrize(
    ("mine", "over", "goes"),
    [(0, (), True), (1, (), True), (2, (), False), (2, (3, 4, 5), False), (2, (1,), True), (5, (0, 1, 2), False)],
)
def test_no_more_of_an_array_are_under_way_than_its_limit(mine: int, over: tuple[int, ...], goes: bool) -> None:
    steward = make_steward(witness=make_witness(spec=make_spec(array=place(mine, 2))))
    view = make_view(A, (A, B, C, D), array_ends={b"a" * 16: set(over)})
    term = elect(steward, steward.observe(view, at(0)), 0)
    steward.handle(A, promise(term), at(0))
    starts = sends(steward.handle(B, promise(term), at(0)), Start)
    assert bool(starts) == goes and (goes or "2 of its array" in steward.detail)


def test_a_job_that_waits_past_its_deadline_fails() -> None:
    steward = make_steward(witness=make_witness(spec=make_spec(gpus=1, deadline_unix_ms=9_000)))
    effects = won(steward)
    assert steward.state == "waiting" and [
        e.at for e in effects if isinstance(e, SetTimer) and e.name == "deadline"
    ] == [9.0]
    ends = sends(fire(steward, effects, "deadline"), Accept)
    assert {send.message.ledger.outcome.detail for send in ends} == {"its deadline has passed"}  # type: ignore[union-attr]


def test_a_job_that_matters_much_more_asks_for_room_but_not_all_the_time() -> None:
    stay = Stay(b"other job 16 byt", D, priority=50, since_unix=-1000, saves=True)
    full = (make_advert(D, slots_free=0),)
    for priority, asks in ((69, False), (70, True)):
        steward = make_steward(witness=make_witness(spec=make_spec(priority=priority)))
        view = make_view(A, (A, B, C, D), adverts=full, stays=(stay,))
        term = elect(steward, steward.observe(view, at(0)), 0)
        steward.handle(A, promise(term), at(0))
        asked = sends(steward.handle(B, promise(term), at(0)), MakeRoom)
        assert [(send.to, send.message.job) for send in asked] == ([(D, stay.job)] if asks else [])
        assert sends(steward.observe(view, at(1)), MakeRoom) == []
        assert bool(sends(steward.observe(view, at(1 + ASK_EVERY_S)), MakeRoom)) == asks


def test_the_ledger_it_hands_on_is_the_newest_of_the_promises_with_the_lost_attempt_closed() -> None:
    steward = make_steward()
    old = Ledger(version=1)
    attempt = Attempt(number=0, node=E, nick="e", term=1, started_unix_ms=0, seen_unix_ms=0)
    new = Ledger(version=7, attempts=(attempt,))
    term = elect(steward, steward.observe(make_view(A, (A, B, C, D)), at(5)), 5)
    steward.handle(A, promise(term, old), at(5))
    start = sends(steward.handle(B, promise(term, new), at(5)), Start)[0].message
    assert isinstance(start, Start) and start.ledger.version > 7
    assert [a.reason for a in start.ledger.attempts] == ["node lost"]


def test_who_declines_is_passed_over_and_remembered_until_adverts_change() -> None:
    steward = make_steward()
    first = sends(won(steward), Start)[0].to
    effects = steward.handle(first, StartAnswer(job=JOB, term=1, taken=False, reason="its slots are taken"), at(0))
    term = elect(steward, effects, 0)
    assert term == 2, "a term is never offered twice"
    steward.handle(A, promise(2), at(0))
    second = sends(steward.handle(B, promise(2), at(0)), Start)[0].to
    assert second != first
    effects = fire(steward, [SetTimer("answer", steward._tokens._latest["answer"], ANSWER_S)], "answer")
    assert sends(effects, Would), "who does not answer is passed over too"


def test_with_nobody_to_take_it_the_job_waits_and_says_why() -> None:
    steward = make_steward()
    steward.spec = msgspec.structs.replace(steward.spec, gpus=1)
    effects = won(steward)
    assert sends(effects, Start) == [] and steward.state == "waiting" and "GPU" in steward.detail
    assert len(sends(effects, Accept)) == 3
    assert sends(fire(steward, effects, "heartbeat"), Accept), f"it shows after {HEARTBEAT_S} s that it is there"
    gpu = make_advert(D, version=2)
    gpu = msgspec.structs.replace(gpu, gpus=(_gpu(),), room=untouched((_gpu(),)))
    view = make_view(A, (A, B, C, D), adverts=(gpu,))
    assert [send.to for send in sends(steward.observe(view, at(1)), Start)] == [D]


def _gpu() -> Gpu:
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


def test_the_end_is_said_once_by_whoever_decided_it_and_then_nothing_is_asked_any_more() -> None:
    steward = make_steward()
    won(steward, cancel=True)
    accepted = Accepted(job=JOB, term=1, disk=DISK, round=1, cancel_wanted=True)
    assert steward.handle(A, accepted, at(0)) == []
    effects = steward.handle(B, accepted, at(0))
    (end,) = [effect for effect in effects if isinstance(effect, Concluded)]
    assert end.outcome.kind == "cancelled" and len(sends(effects, Closed)) == 3
    assert [e for e in steward.handle(C, accepted, at(0)) if isinstance(e, Concluded)] == []


def test_an_end_that_may_be_in_the_making_is_left_to_whoever_makes_it() -> None:
    attempt = Attempt(0, D, "d", 1, 0, ended_unix_ms=1, reason="done")
    ended = Ledger(version=2, attempts=(attempt,), outcome=Outcome("done", "done", 0, None, (), 1_000))
    witness = make_witness()
    witness.handle(D, Accept(job=JOB, term=1, round=1, config=GROUP, ledger=Ledger(version=1), holder=D), 0.0)
    steward = make_steward(A, witness)
    steward.observe(make_view(A, (A, B, C, D)), at(0))
    witness.handle(D, Accept(job=JOB, term=1, round=2, config=GROUP, ledger=ended, holder=None), 1.0)
    effects = steward.act(at(1))
    assert sends(effects, Would) == [] and [e.at for e in effects if isinstance(e, SetTimer)] == [1 + ANSWER_S]
    assert len(sends(fire(steward, effects, "turn"), Would)) == 3 and steward.state == "asking"
    witness.handle(E, Closed(job=JOB, term=1, ledger=ended), 5.0)
    assert not witness.finished, "what is that to a stranger?"
    witness.handle(D, Closed(job=JOB, term=1, ledger=ended), 5.0)
    assert steward.act(at(5)) == [] and steward.state == "watching", "it does not speak for a job that is over"


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
    again = sends(fire(steward, effects, "turn"), Would)
    assert [send.message.term for send in again] == [5, 5, 5]  # type: ignore[union-attr]


def test_one_who_has_not_heard_of_the_end_of_a_lease_holds_nobody_up() -> None:
    """The release reaches the witnesses one after the other; the first acts before the last has heard of it."""

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

    steward = make_steward()
    steward.observe(make_view(A, (A, B, C)), at(0))
    assert steward.handle(C, refused(1), at(0)) == [] and steward.state == "asking", "two of three suffice"
    effects = steward.handle(B, refused(1), at(0))
    pauses = []
    for term in range(2, 8):
        timer = [effect for effect in effects if isinstance(effect, SetTimer) and effect.name == "turn"][-1]
        pauses.append(timer.at)
        fire(steward, effects, "turn")
        steward.handle(C, refused(term), at(timer.at))
        effects = steward.handle(B, refused(term), at(timer.at))
    gaps = [later - earlier for earlier, later in pairwise(pauses)]
    assert pauses[0] <= 0.5 and gaps == sorted(gaps) and gaps[-1] == pytest.approx(4.2), "soon, then ever less soon"


def test_nobody_promises_what_could_not_be_had() -> None:
    """Cut off, it asks and asks; its own witness promises nothing that would shut out the runner when it is back."""
    steward = make_steward()
    effects = steward.observe(make_view(A, (A,)), at(0))
    for _ in range(5):
        (own,) = [send for send in sends(effects, Would) if send.to == A]
        (answer,) = steward.witness.handle(A, own.message, 1.0)  # type: ignore[arg-type]
        assert isinstance(answer, Send) and isinstance(answer.message, Willing)
        assert steward.handle(A, answer.message, at(1)) == []
        effects = fire(steward, fire(steward, effects, "answer"), "turn")
    assert steward.witness.cell.promised == 0


def test_a_rival_gets_its_time() -> None:
    steward = make_steward()
    won(steward)
    steward.rival_seen(B, PREPARED_S, at(2))
    assert steward.state == "watching"
    assert sends(steward.act(at(2)), Would) == []
    gone = make_view(A, (A, C, D))
    assert sends(steward.observe(gone, at(2.1)), Would), "unless it is gone"


def test_a_rival_who_has_used_his_term_is_none_any_more() -> None:
    """B was first once; when the job that it placed is free again, it is A's turn, at once."""
    steward = make_steward()
    steward.rival_seen(B, PREPARED_S, at(0))
    steward.observe(make_view(A, (A, B, C, D)), at(0))
    run = Accept(job=JOB, term=1, round=1, config=GROUP, ledger=Ledger(version=1), holder=D)
    steward.witness.handle(D, run, 1.0)
    assert sends(steward.act(at(1)), Would) == []
    steward.witness.handle(D, msgspec.structs.replace(run, round=2, ledger=Ledger(version=2), holder=None), 2.0)
    assert sends(steward.act(at(2)), Would)


def test_replaced_in_the_group_it_stands_down() -> None:
    steward = make_steward()
    newer = Config(number=3, term=2, members=seats(B, C, D))
    elect(steward, steward.observe(make_view(A, (A, B, C, D)), at(0)), 0)
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


def test_past_200_nodes_a_steward_asks_the_best_of_the_best_zone() -> None:
    nodes = [A, B, C, *(bytes([9]) + number.to_bytes(31, "big") for number in range(198))]
    adverts = tuple(
        make_advert(node, zone="abcdef"[place % 6], nick=str(place), weight=1 + place % 64)
        for place, node in enumerate(nodes)
    )
    request = placement_request(JOB, make_spec(), 0)
    for hierarchy in (Hierarchy(0, adverts), Hierarchy(201, adverts)):
        steward = make_steward()
        view = make_view(A, tuple(nodes), adverts=adverts, hierarchy=hierarchy)
        term = elect(steward, steward.observe(view, at(0)), 0)
        steward.handle(A, promise(term), at(0))
        effects = steward.handle(B, promise(term), at(0))
        (start,) = sends(effects, Start)
        (decided,) = [effect.decision for effect in effects if isinstance(effect, Decided)]
        ranking = hierarchy.rank(steward.request(Ledger(), at(0)), adverts[::-1])
        assert decided.chosen == start.to and replay(decided, steward.request(Ledger(), at(0)), ranking)
        flat, zoned = rank_nodes(request, adverts), rank_nodes(request, adverts, homes(zones(adverts, {})))
        assert start.to == (zoned if hierarchy.since else flat).candidates[0].node
        assert flat.candidates[0] != zoned.candidates[0], "or this would show nothing"
