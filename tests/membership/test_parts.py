"""Small cores: clock skew, rate limits, bootstrap, and the unreachable state of a suspicion."""

import asyncio
import math
import socket
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.bootstrap import ATTEMPTS_AT_ONCE, BACKOFF_S, CONNECTED_INTERVAL_S, Bootstrap
from membership.clock_skew import ClockSkew
from membership.config import SwimConfig
from membership.framing import keep_alive, read_frame, write_frame
from membership.member import MemberTable
from membership.probe import RELAY_S, LocalHealth, Probe, ProbeOrder, Relays
from membership.ratelimit import BURST_S, MAX_ADDRESSES, MAX_SOURCES, MinimumInterval, TokenBuckets
from membership.reconcile import FRAME_LIMIT, FrameError
from membership.rumours import ITEM_OVERHEAD, RumourQueue
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


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [((2.0, 2.0, 2.0), False), ((-2.1, -2.1, -2.1), True), ((8.0, 10.0, 12.0), True), ((7.0, 10.0, 13.0), False)],
)
def test_clock_is_wrong_by_more_than_two_seconds_and_four_times_the_spread(
    offsets: tuple[float, ...], wrong: bool
) -> None:
    skew = ClockSkew()
    for number, offset in enumerate(offsets):
        skew.add_sample(b"%d" % number, offset)
    assert skew.local_clock_is_wrong is wrong


def test_node_that_may_be_slow_probes_more_slowly_within_a_bound() -> None:
    health = LocalHealth(4)
    for by, score in ((2, 2), (1, 3), (5, 3)):
        health.degrade(by)
        assert health.score == score and health.scaled(0.5) == 0.5 * (score + 1)
    for score in (2, 1, 0, 0):
        health.improve()
        assert health.score == score
    probe = Probe(b"target", 1)
    assert probe.missed_nacks == 1, "no relay was asked"
    probe.expected_nacks = 2
    for relay, missed in ((b"a", 1), (b"b", 0), (b"stranger", 0)):
        probe.nacks.add(relay)
        assert probe.missed_nacks == missed


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


def test_bucket_holds_its_capacity_and_gets_back_what_was_taken() -> None:
    buckets = TokenBuckets(10.0, 3.0)
    assert [buckets.allow("a", 0.0) for _ in range(4)] == [True, True, True, False]
    buckets.give_back("a", 2.0)
    assert [buckets.allow("a", 0.0, 2.0), buckets.allow("a", 0.0)] == [True, False]
    buckets.give_back("a", 99.0)
    buckets.give_back("unknown", 1.0)
    assert [buckets.allow("a", 0.0, needed) for needed in (4.0, 3.0)] == [False, True]
    assert not buckets.allow("a", 0.05) and buckets.allow("a", 0.1), "refused questions lose no time"


def test_last_4096_sources_and_addresses_are_remembered() -> None:
    buckets, limit = TokenBuckets(0.001, 1.0), MinimumInterval(60.0)
    for number in range(4096):
        assert buckets.allow(number, 0.0) and limit.allow(("host", number), 0.0)
    assert not buckets.allow(0, 0.0) and not limit.allow(("host", 0), 0.0)
    assert buckets.allow("new", 0.0) and limit.allow(("new", 1), 0.0)
    assert len(buckets) == len(limit) == 4096
    assert buckets.allow(0, 0.0) and limit.allow(("host", 0), 0.0), "the oldest are forgotten"
    assert not buckets.allow(2, 0.0) and not limit.allow(("host", 2), 0.0)


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


def test_deadline_falls_from_the_longest_to_the_shortest_with_confirmations() -> None:
    config = SwimConfig.lan()
    shortest = config.suspicion_multiplier * 3 * config.probe_interval_s  # of a thousand members
    suspicion = Suspicion(config, 1000, b"a", 10.0)
    assert suspicion.deadline == pytest.approx(10.0 + shortest * config.suspicion_max_multiplier)
    assert suspicion.unreachable_at == pytest.approx(10.0 + (suspicion.deadline - 10.0) / 2)
    expected = int(config.suspicion_multiplier) - 2
    assert expected == 2
    share = math.log(2) / math.log(3)
    longest = shortest * config.suspicion_max_multiplier
    for accuser, left in ((b"b", share), (b"c", 1.0)):
        assert suspicion.confirm(accuser, 11.0) and not suspicion.confirm(accuser, 11.0)
        assert suspicion.deadline == pytest.approx(10.0 + longest - (longest - shortest) * left)
    assert not suspicion.confirm(b"d", 11.0) and suspicion.unreachable_at == 11.0
    few = Suspicion(config, 3, b"a", 10.0)
    assert few.confirm(b"b", 11.0) and few.deadline == pytest.approx(10.0 + config.suspicion_multiplier), (
        "nobody is left"
    )
    assert Suspicion(config, 3, b"a", 10.0).deadline == pytest.approx(10.0 + 6 * config.suspicion_multiplier)
    alone = Suspicion(config, 1, b"a", 10.0)
    assert alone.deadline == pytest.approx(10.0 + config.suspicion_multiplier * config.probe_interval_s)


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 1), (3, 2), (1000, 2)])
def test_refused_connections_of_two_members_leave_the_time_of_a_restart(members: int, needed: int) -> None:
    config = SwimConfig.lan()
    suspicion = Suspicion(config, members, b"0", 0.0, refused=True)
    for number in range(1, needed):
        assert not suspicion.confirm(b"0", 0.0, refused=True), "it has told so already"
        assert suspicion.deadline > config.refused_floor_s
        assert suspicion.confirm(b"%d" % number, 0.0, refused=True)
    assert suspicion.deadline == pytest.approx(min(config.refused_floor_s, suspicion._confirmed_deadline))


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


async def test_frame_that_is_written_can_be_read() -> None:
    reader, written = asyncio.StreamReader(), list[bytes]()

    async def drain() -> None:
        reader.feed_data(b"".join(written))

    writer: Any = SimpleNamespace(write=written.append, drain=drain)
    await write_frame(writer, b"frame")
    assert written == [b"\0\0\0\5frame"] and await asyncio.wait_for(read_frame(reader), 5) == b"frame"


def test_machine_that_is_gone_is_noticed_after_25_seconds() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        keep_alive(sock)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 3, 1]


def test_record_rumour_is_sent_a_few_times_only() -> None:
    queue = RumourQueue(retransmit_multiplier=4)
    queue.add("record", b"name", b"sealed")
    sent = 0
    while queue.take(1200, 9) and sent < 50:
        sent += 1
    assert sent == 2


def test_urgent_rumour_is_sent_twice_before_others() -> None:
    queue = RumourQueue(retransmit_multiplier=4)
    for name, urgent in ((b"usual", False), (b"first", True)):
        queue.add("record", name, name, urgent)
    assert [queue.take(5 + ITEM_OVERHEAD, 1000)[0][1] for _ in range(3)] == [b"first", b"first", b"usual"]


def test_rumours_fill_a_packet_and_no_more() -> None:
    queue = RumourQueue(retransmit_multiplier=1)
    for name in (b"a", b"b"):
        queue.add("record", name, name * 100)
    size = 100 + ITEM_OVERHEAD
    assert queue.waiting_bytes == 2 * size
    assert [len(queue.take(space, 1)) for space in (size - 1, 2 * size - 1)] == [0, 1]
    queue = RumourQueue(retransmit_multiplier=1)
    for name in (b"a", b"b"):
        queue.add("member", name, name * 100)
    assert len(queue.take(2 * size, 1)) == 2 and len(queue) == queue.waiting_bytes == 0
    assert [queue.rounds(members) for members in (0, 1, 9, 10, 99, 100)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(("large", "sent"), [(3, 1), (4, 0)])
def test_packet_counts_as_full_after_four_rumours_that_did_not_fit(large: int, sent: int) -> None:
    queue = RumourQueue(retransmit_multiplier=1)
    for number in range(large):
        queue.add("record", b"%d" % number, bytes(500))
    queue.add("record", b"small", b"small")
    assert len(queue.take(100, 1)) == sent
