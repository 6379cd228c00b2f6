"""The planners: replication (I6) and multi-source fetch."""

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.fetch import Fetch, Fetched, Request
from ckptstore.replication import Ask, Replication, Settled

A, B, C, D = b"a", b"b", b"c", b"d"


def test_chosen_peers_come_first_and_a_stand_in_is_told() -> None:
    plan = Replication([A, B], [C, D], want=2)
    assert plan.start() == [Ask(A), Ask(B)]
    assert plan.failed(A, "disk full") == [Ask(C)]
    assert plan.durable(B) == []
    assert plan.durable(C) == [Settled((B, C), "")]
    assert plan.stand_ins == [C] and plan.failures == {A: "disk full"}


def test_too_few_peers_is_said_with_the_reason() -> None:
    plan = Replication([], [A], want=2)
    assert plan.start() == [Ask(A)]
    (settled,) = plan.failed(A, "did not answer")
    assert isinstance(settled, Settled) and "0 of 2" in settled.short and "did not answer" in settled.short


def test_an_answer_nobody_asked_for_does_not_count() -> None:
    plan = Replication([], [A, B], want=1)
    plan.start()
    assert plan.durable(B) == [] and plan.holders == []


@given(st.lists(st.sampled_from([A, B, C, D]), max_size=4), st.integers(0, 4), st.data())
def test_replication_always_settles_and_counts_only_acks(chosen: list[bytes], want: int, data: st.DataObject) -> None:
    plan = Replication(chosen, [A, B, C, D], want)
    pending, acked = plan.start(), set()
    busy: list[bytes] = []
    for _ in range(50):
        settled = [action for action in pending if isinstance(action, Settled)]
        if settled:
            assert set(settled[0].holders) == acked
            assert len(acked) >= max(want, len(set(chosen))) or settled[0].short
            return
        busy += [action.peer for action in pending if isinstance(action, Ask)]
        peer = busy.pop(data.draw(st.integers(0, len(busy) - 1)))
        if data.draw(st.booleans()):
            acked.add(peer)
            pending = plan.durable(peer)
        else:
            pending = plan.failed(peer, "no")
    raise AssertionError("never settled")


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_a_fetch_gets_everything_while_one_honest_source_lasts(chunks: int, sources: int, data: st.DataObject) -> None:
    ids = [bytes([n]) for n in range(chunks)]
    names = [bytes([100 + n]) for n in range(sources)]
    fetch, got = Fetch(ids, names), set()
    actions = fetch.start()
    running: list[Request] = []
    for _ in range(300):
        ended = [action for action in actions if isinstance(action, Fetched)]
        if ended:
            assert ended[0].problem == "" and got == set(ids)
            return
        running += [action for action in actions if isinstance(action, Request)]
        request = running.pop(data.draw(st.integers(0, len(running) - 1)))
        honest = request.source == names[0] or data.draw(st.booleans())
        if honest:
            got.update(request.ids)
            actions = fetch.arrived(request.source, request.ids)
        else:
            actions = fetch.failed(request.source, "wrong bytes")
    raise AssertionError("never ended")


def test_a_fetch_without_sources_says_so() -> None:
    (ended,) = Fetch([b"x"], []).start()
    assert isinstance(ended, Fetched) and "nobody" in ended.problem


def test_a_source_that_gives_less_than_asked_is_dropped() -> None:
    fetch = Fetch([b"1", b"2"], [A, B])
    first, _ = fetch.start()
    assert isinstance(first, Request)
    fetch.arrived(A, ())
    assert A in fetch.dropped
