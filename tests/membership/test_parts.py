"""The small cores: clock skew, token buckets, the search for others, the unreachable."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from membership.buckets import BURST, SOURCES_KEPT, Buckets
from membership.config import SwimConfig
from membership.search import AT_ONCE, BACKOFF_S, COMPANY_S, Search
from membership.skew import Skew
from membership.suspicion import Suspicion


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=20), st.floats(10, 1e6))
def test_a_clock_that_all_others_contradict_is_wrong_and_one_liar_proves_nothing(
    offsets: list[float], off: float
) -> None:
    ours = Skew()
    for number, offset in enumerate(offsets):
        ours.heard(b"%d" % number, offset)
    assert not ours.ours_is_wrong and ours.offset_s is not None and abs(ours.offset_s) <= 1
    ours.heard(b"0", off)
    assert not ours.ours_is_wrong
    wrong = Skew()
    for number, offset in enumerate(offsets):
        wrong.heard(b"%d" % number, offset + off)
    assert wrong.ours_is_wrong and wrong.peers == len(offsets)


def test_of_two_clocks_none_is_judged() -> None:
    skew = Skew()
    assert skew.offset_s is None and not skew.ours_is_wrong
    skew.heard(b"a", 500.0)
    skew.heard(b"b", 500.0)
    assert skew.offset_s == 500.0 and not skew.ours_is_wrong


def test_a_flood_is_refused_and_nobody_else() -> None:
    buckets = Buckets(100.0)
    admitted = sum(buckets.admit("flood", 0.0) for _ in range(10_000))
    assert admitted == 100 * BURST
    assert buckets.admit("other", 0.0)
    assert sum(buckets.admit("flood", 1.0) for _ in range(1000)) == 100, "and it is heard again, at its rate"


@given(st.lists(st.integers(0, 3 * SOURCES_KEPT), max_size=300))
def test_sources_are_bounded(sources: list[int]) -> None:
    buckets = Buckets(10.0)
    for source in [*range(SOURCES_KEPT), *sources]:
        buckets.admit(source, 0.0)
    assert len(buckets) <= SOURCES_KEPT


def test_a_lonely_node_searches_with_backoff_and_one_with_company_slowly_for_ever() -> None:
    search = Search([("seed", 1), ("other", 2)], Random(1))
    search.remembered = [("old", n) for n in range(50)]
    me = ("me", 9)
    pauses = []
    for _ in range(20):
        addresses, pause_s = search.next([me])
        assert len(addresses) <= 2 * AT_ONCE and {("seed", 1), ("other", 2)} <= set(addresses)
        pauses.append(pause_s)
    assert pauses[0] <= BACKOFF_S[0] * 1.2 and BACKOFF_S[1] * 0.8 <= pauses[-1] <= BACKOFF_S[1] * 1.2
    addresses, pause_s = search.next([me, ("seed", 1)])
    assert pause_s == COMPANY_S and ("seed", 1) not in addresses and ("other", 2) in addresses
    search.found(("new", 3))
    assert ("new", 3) in search.next([me, ("seed", 1), ("other", 2)])[0]
    assert search.next([me])[1] <= BACKOFF_S[0] * 1.2, "alone again, it hurries again"


@given(st.integers(2, 200), st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3), st.booleans()), max_size=12))
def test_unreachable_comes_before_dead_and_within_bounds(members: int, words: list[tuple[int, float, bool]]) -> None:
    suspicion = Suspicion(SwimConfig.lan(), members, b"first", 0.0)
    now = 0.0
    for number, later, refused in words:
        now += later
        deadline = suspicion.deadline
        suspicion.confirm(b"%d" % number, now, refused)
        assert suspicion.deadline <= deadline
        earliest, latest = suspicion.bounds
        assert earliest <= suspicion.deadline <= latest
        assert suspicion.unreachable_at <= max(now, suspicion.deadline)
