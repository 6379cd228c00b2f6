"""The planners: replication (I6) and multi-source fetch."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.fetch import Cancel, Fetch, FetchEnded, Request
from ckptstore.messages import decode_chunk_request, encode_chunk_request
from ckptstore.replication import CopyTo, Replication, Settled, Substitute

A, B, C, D = b"a", b"b", b"c", b"d"


def test_chosen_peers_come_first_and_a_substitute_is_reported() -> None:
    plan = Replication([A, B], [C, D], want=2)
    assert plan.start() == [CopyTo(A), CopyTo(B)]
    assert plan.retry_elsewhere(A, "disk full") == [CopyTo(C)]
    assert plan.durable(B) == []
    assert plan.durable(C) == [Settled((B, C), "")]
    assert plan.substitutes == [Substitute(C, A, "disk full")] and plan.failures == {A: "disk full"}


def test_peer_that_is_named_twice_gets_one_copy() -> None:
    assert Replication([A, A], [B, A], want=2).start() == [CopyTo(A), CopyTo(B)]


def test_chosen_peer_known_to_be_gone_is_skipped() -> None:
    plan = Replication([A, B], [C, D], want=1, gone={A: "is gone", D: "not chosen"})
    assert plan.start() == [CopyTo(B), CopyTo(C)]
    plan.durable(B)
    assert plan.durable(C) == [Settled((B, C), "")] and plan.substitutes == [Substitute(C, A, "is gone")]


def test_slow_peer_gets_a_substitute_and_the_first_to_finish_counts() -> None:
    plan = Replication([A], [B], want=1)
    plan.start()
    assert plan.slow(A, "too slow") == [CopyTo(B)]
    assert plan.durable(B) == [Settled((B,), "")] and plan.substitutes == [Substitute(B, A, "too slow")]
    plan = Replication([A], [B], want=1)
    plan.start()
    plan.slow(A, "too slow")
    assert plan.durable(A) == [Settled((A,), "")] and plan.substitutes == []


def test_enough_ends_with_the_present_holders() -> None:
    plan = Replication([A, B], [C], want=3)
    plan.start()
    assert plan.enough("no time") == [], "replication continues without a holder"
    plan.durable(B)
    assert plan.enough("no time") == [Settled((B,), "on 1 of 3 peers: no time")]


def test_chunks_that_came_by_another_way_are_not_requested() -> None:
    plan = Fetch({bytes([number]): 4 << 20 for number in range(4)}, [A], awaited=True)
    assert plan.start(0.0) == [Request(A, (b"\0",))], "the first request is short, as somebody waits"
    plan.came([b"\1", b"\2"])
    assert plan.arrived(A, [b"\0"], 1.0) == [Request(A, (b"\3",))]
    plan.came([b"\3"])
    assert plan.arrived(A, [], 2.0) == [FetchEnded("")]


def test_slow_peer_is_awaited_if_there_is_no_other() -> None:
    plan = Replication([A], [], want=1)
    plan.start()
    assert plan.slow(A, "too slow") == [] and plan.slow(A, "too slow") == []
    assert plan.durable(A) == [Settled((A,), "")] and plan.substitutes == []


def test_too_few_copies_are_reported_with_the_reason() -> None:
    plan = Replication([], [A], want=2)
    assert plan.start() == [CopyTo(A)]
    (settled,) = plan.retry_elsewhere(A, "did not answer")
    assert isinstance(settled, Settled) and "0 of 2" in settled.short and "did not answer" in settled.short


def test_unexpected_answer_is_ignored() -> None:
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
        busy += [action.peer for action in pending if isinstance(action, CopyTo)]
        peer = busy.pop(data.draw(st.integers(0, len(busy) - 1)))
        if data.draw(st.booleans()):
            acked.add(peer)
            pending = plan.durable(peer)
        else:
            pending = plan.retry_elsewhere(peer, "no")
    raise AssertionError("never settled")


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_fetch_completes_with_one_honest_source(chunks: int, sources: int, data: st.DataObject) -> None:
    ids = {bytes([n]): 1 + 100_000 * (n % 7) for n in range(chunks)}
    names = [bytes([100 + n]) for n in range(sources)]
    fetch, got, now = Fetch(ids, names), set[bytes](), 0.0
    actions = fetch.start(now)
    running: dict[bytes, Request] = {}
    for _ in range(300):
        for action in actions:
            match action:
                case FetchEnded(problem=problem):
                    assert problem == "" and got == set(ids)
                    return
                case Request(source=source):
                    assert source not in running and source not in fetch.dropped, "one request per source"
                    running[source] = action
                case Cancel(source=source):
                    assert got >= set(running.pop(source).ids), "only an unneeded request is cancelled"
        request = running.pop(data.draw(st.sampled_from(sorted(running))))
        now += data.draw(st.floats(0, 3))
        honest = request.source == names[0] or data.draw(st.booleans())
        if honest:
            got.update(request.ids)
            actions = fetch.arrived(request.source, request.ids, now)
        else:
            actions = fetch.failed(request.source, "wrong bytes", now)
    raise AssertionError("never ended")


def test_fetch_without_sources_reports_the_problem() -> None:
    (ended,) = Fetch({b"x": 1}, []).start(0.0)
    assert isinstance(ended, FetchEnded) and "no holder" in ended.problem


def test_source_with_an_incomplete_answer_is_dropped() -> None:
    fetch = Fetch({b"1": 1, b"2": 1}, [A, B])
    first, _ = fetch.start(0.0)
    assert isinstance(first, Request)
    fetch.arrived(A, (), 1.0)
    assert A in fetch.dropped


def test_chunk_of_a_dropped_source_is_not_asked_of_a_third_while_another_sends_it() -> None:
    fetch = Fetch({b"1": 1, b"2": 1, b"3": 100, b"4": 100}, [A, B, C])
    assert fetch.start(0.0) == [Request(A, (b"1", b"2")), Request(B, (b"3",)), Request(C, (b"4",))]
    assert fetch.arrived(B, [b"3"], 1.0) == [Request(B, (b"2",))], "A is slow"
    assert fetch.arrived(C, [b"4"], 1.0) == [Request(C, (b"1",))]
    assert fetch.failed(A, "it is gone", 1.0) == []
    assert fetch.arrived(C, [b"1"], 1.01) == []
    assert fetch.arrived(B, [b"2"], 1.01) == [FetchEnded("")]


def play(sizes: dict[bytes, int], rates: dict[bytes, float]) -> tuple[float, int]:
    """Return the duration and the bytes sent with sources of these rates."""
    fetch, now, sent = Fetch(sizes, list(rates)), 0.0, 0
    actions = fetch.start(now)
    due: dict[bytes, tuple[float, Request]] = {}
    while True:
        for action in actions:
            match action:
                case FetchEnded(problem=problem):
                    assert problem == ""
                    return now, sent
                case Request(source=source, ids=ids):
                    due[source] = (now + sum(sizes[identity] for identity in ids) / rates[source], action)
                case Cancel(source=source):
                    due.pop(source)
        source = min(due, key=lambda source: due[source][0])
        now, request = due.pop(source)
        sent += sum(sizes[identity] for identity in request.ids)
        actions = fetch.arrived(source, request.ids, now)


@pytest.mark.parametrize("rates", [(234e6, 200e6, 114e6), (1e9, 1e8, 1e7), (1e8, 1e8, 1e8), (5e8,)])
def test_unequal_sources_finish_together(rates: tuple[float, ...]) -> None:
    sizes = {number.to_bytes(2, "big"): 4 << 20 for number in range(137)}
    took, sent = play(sizes, {bytes([number]): rate for number, rate in enumerate(rates)})
    total = sum(sizes.values())
    assert total / took >= 0.92 * sum(rates) and sent <= 1.03 * total


@given(
    st.lists(st.integers(1, 4 << 20), min_size=1, max_size=60), st.lists(st.floats(1e6, 1e9), min_size=1, max_size=5)
)
def test_fetch_is_nearly_as_fast_as_all_sources_together(lengths: list[int], rates: list[float]) -> None:
    sizes = {number.to_bytes(2, "big"): length for number, length in enumerate(lengths)}
    took, _ = play(sizes, {bytes([number]): rate for number, rate in enumerate(rates)})
    first = max(8 << 20, *lengths) / min(rates)  # the rate of a source is unknown before its first answer
    assert took <= sum(lengths) / sum(rates) * 1.5 + 2 * first


@given(st.binary(max_size=80))
def test_hostile_chunk_request_raises_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        order = decode_chunk_request(data)
        assert decode_chunk_request(encode_chunk_request(order)) == order
