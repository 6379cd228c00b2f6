"""Eviction: whatever nodes do at the same time, one holder keeps each data set."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.data.eviction import LACKS, PINNED, WHOLE, Kept, keepers, may_rely, order

NODES = [bytes([number]) * 32 for number in range(1, 8)]


@given(st.binary(min_size=32, max_size=32), st.sets(st.sampled_from(NODES), min_size=1), st.data())
def test_last_copy_stays_in_every_interleaving(data: bytes, first: set[bytes], drawn: st.DataObject) -> None:
    """Nodes act on any earlier view of the holders; only the answer of a holder is current. A pin stays in this time."""
    holders, views = set(first), [set(first)]
    pinned = drawn.draw(st.sets(st.sampled_from(NODES)))
    for _ in range(drawn.draw(st.integers(0, 20))):
        node = drawn.draw(st.sampled_from(NODES))
        if node not in holders:
            holders.add(node)  # it fetched the data set
        else:
            believed = drawn.draw(st.sampled_from(views))
            answers = {one: LACKS if one not in holders else PINNED if one in pinned else WHOLE for one in NODES}
            if node not in pinned and any(may_rely(data, node, one, answers[one]) for one in believed - {node}):
                holders.discard(node)
        views.append(set(holders))
        assert holders


def test_node_relies_on_a_pin_and_on_a_whole_copy_that_comes_before_its_own() -> None:
    data = b"d" * 32
    first, second = sorted(NODES[:2], key=lambda node: len(keepers(data, node, NODES[:2])))
    assert may_rely(data, second, first, WHOLE) and not may_rely(data, first, second, WHOLE), "one of the two stays"
    for me, other in ((first, second), (second, first)):
        assert may_rely(data, me, other, PINNED) and not may_rely(data, me, other, LACKS)


def test_first_holder_has_no_keeper_and_every_other_has_one() -> None:
    found = [keepers(b"d" * 32, node, NODES) for node in NODES]
    assert sorted(map(len, found)) == list(range(len(NODES)))
    assert all(node not in one for node, one in zip(NODES, found, strict=True))


def test_order_of_eviction() -> None:
    old, used, recent = (Kept(bytes([n]) * 32, 1, float(n)) for n in range(3))
    pinned, in_use = Kept(b"p" * 32, 1, 0.0, pinned=True), Kept(b"u" * 32, 1, 0.0, in_use=True)
    superseded = Kept(b"s" * 32, 1, 9.0, superseded=True)
    assert order([recent, pinned, superseded, used, in_use, old]) == [superseded, old, used, recent]
