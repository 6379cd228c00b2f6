"""Small cores: clock skew, rate limits, bootstrap, and the unreachable state of a suspicion."""

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.bootstrap import ATTEMPTS_AT_ONCE, BACKOFF_S, CONNECTED_INTERVAL_S, Bootstrap
from membership.clock_skew import ClockSkew
from membership.config import SwimConfig
from membership.framing import read_frame
from membership.member import MemberTable
from membership.probe import RELAY_S, ProbeOrder, Relays
from membership.ratelimit import BURST_S, MAX_ADDRESSES, MAX_SOURCES, MinimumInterval, TokenBuckets
from membership.reconcile import FRAME_LIMIT, FrameError
from membership.rumours import RumourQueue
from membership.suspicion import Suspicion
from membership.wire import Alive, Left


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=20), st.floats(10, 1e6))
def test_clock_is_wrong_if_all_peers_contradict_it_and_not_if_one_does(offsets: list[float], off: float) -> None:
    skew = ClockSkew()
    for number, offset in enumerate(offsets):
        skew.add_sample(b"%d" % number, offset)
    assert not skew.local_clock_is_wrong and skew.offset_s is not None and abs(skew.offset_s) <= 1
    skew.add_sample(b"0", off)
    assert not skew.local_clock_is_wrong
    wrong = ClockSkew()
    for number, offset in enumerate(offsets):
        wrong.add_sample(b"%d" % number, offset + off)
    assert wrong.local_clock_is_wrong and wrong.peers == len(offsets)


def test_clock_is_not_judged_by_two_peers() -> None:
    skew = ClockSkew()
    assert skew.offset_s is None and not skew.local_clock_is_wrong
    skew.add_sample(b"a", 500.0)
    skew.add_sample(b"b", 500.0)
    assert skew.offset_s == 500.0 and not skew.local_clock_is_wrong


def test_token_buckets_refuse_a_flood_and_no_other_source() -> None:
    buckets = TokenBuckets(100.0)
    allowed = sum(buckets.allow("flood", 0.0) for _ in range(10_000))
    assert allowed == 100 * BURST_S
    assert buckets.allow("other", 0.0)
    assert sum(buckets.allow("flood", 1.0) for _ in range(1000)) == 100, "its bucket refills at its rate"


@given(st.lists(st.integers(0, 3 * MAX_SOURCES), max_size=300))
def test_token_buckets_are_bounded(sources: list[int]) -> None:
    buckets = TokenBuckets(10.0)
    for source in [*range(MAX_SOURCES), *sources]:
        buckets.allow(source, 0.0)
    assert len(buckets) <= MAX_SOURCES


class CountedHost(str):
    """A host that counts how often a table hashes it."""

    looked_up = 0

    def __hash__(self) -> int:
        CountedHost.looked_up += 1
        return super().__hash__()


def test_minimum_interval_keeps_the_newest_addresses_at_a_cost_that_does_not_grow() -> None:
    """Packets that nobody signed name addresses: 50,000 of them within a minute made each further one cost 13 ms."""
    limit, costs = MinimumInterval(0.3), set[int]()
    for port in range(3 * MAX_ADDRESSES):
        before = CountedHost.looked_up
        assert limit.allow((CountedHost("10.0.0.66"), port), 1.0)
        costs.add(CountedHost.looked_up - before)
        assert len(limit) <= MAX_ADDRESSES
    assert max(costs) <= 4, "a look-up, an entry, its place, and the eviction of the oldest"
    assert not limit.allow(("10.0.0.66", 3 * MAX_ADDRESSES - 1), 1.2) and limit.allow(("10.0.0.66", 0), 1.2)


def test_bootstrap_backs_off_while_alone_and_never_stops_when_connected() -> None:
    bootstrap = Bootstrap([("seed", 1), ("other", 2)], Random(1))
    bootstrap.remembered = [("old", n) for n in range(50)]
    me = ("me", 9)
    intervals = []
    for _ in range(20):
        addresses, interval_s = bootstrap.next([me])
        assert len(addresses) <= 2 * ATTEMPTS_AT_ONCE and {("seed", 1), ("other", 2)} <= set(addresses)
        intervals.append(interval_s)
    assert intervals[0] <= BACKOFF_S[0] * 1.2 and BACKOFF_S[1] * 0.8 <= intervals[-1] <= BACKOFF_S[1] * 1.2
    addresses, interval_s = bootstrap.next([me, ("seed", 1)])
    assert interval_s == CONNECTED_INTERVAL_S and ("seed", 1) not in addresses and ("other", 2) in addresses
    bootstrap.add(("new", 3))
    assert ("new", 3) in bootstrap.next([me, ("seed", 1), ("other", 2)])[0]
    assert bootstrap.next([me])[1] <= BACKOFF_S[0] * 1.2, "the backoff restarts when the node is alone again"


@given(st.integers(2, 200), st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3), st.booleans()), max_size=12))
def test_unreachable_comes_before_dead_and_deadlines_stay_in_bounds(
    members: int, confirmations: list[tuple[int, float, bool]]
) -> None:
    suspicion = Suspicion(SwimConfig.lan(), members, b"first", 0.0)
    now = 0.0
    for number, later, refused in confirmations:
        now += later
        deadline = suspicion.deadline
        suspicion.confirm(b"%d" % number, now, refused)
        assert suspicion.deadline <= deadline
        earliest, latest = suspicion.bounds
        assert earliest <= suspicion.deadline <= latest
        assert suspicion.unreachable_at <= max(now, suspicion.deadline)


def test_probe_order_passes_over_a_member_that_has_left() -> None:
    table, order = MemberTable(8), ProbeOrder(Random(1))
    for node in (b"a" * 32, b"b" * 32):
        table.apply(Alive(node, 1, 0, "h", 7373, False, 1), b"", 0.0)
    order.insert(b"a" * 32)
    table.apply(Left(b"a" * 32, 1, 1), b"", 0.0)
    found = order.next(table, b"")
    assert found is not None
    assert found.node == b"b" * 32


def test_ack_is_passed_on_once_and_in_time() -> None:
    relays = Relays()
    for nonce in (1, 2):
        relays.add(nonce, b"target", b"requester", 7, 0.0)
    assert relays.take(1, RELAY_S / 2) == (b"requester", 7)
    assert relays.take(1, RELAY_S / 2) is None
    assert relays.take(2, RELAY_S) is None


async def test_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data((FRAME_LIMIT + 1).to_bytes(4, "big"))
    reader.feed_eof()
    with pytest.raises(FrameError, match="over the limit"):
        await read_frame(reader)


async def test_longest_frame_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(FRAME_LIMIT.to_bytes(4, "big") + bytes(FRAME_LIMIT))
    assert len(await read_frame(reader)) == FRAME_LIMIT


def test_record_rumour_is_sent_a_few_times_only() -> None:
    queue = RumourQueue(retransmit_multiplier=4)
    queue.add("record", b"name", b"sealed")
    sent = 0
    while queue.take(1200, 9) and sent < 50:
        sent += 1
    assert sent == 2
