"""Member table: M2 (views only advance) and M3 (any order and repetition gives one result)."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from membership.member import MemberTable
from membership.wire import Alive, AnyEvidence, Dead, Left, Suspect

NODES = [bytes([n]) * 32 for n in range(3)]


def evidence() -> st.SearchStrategy[AnyEvidence]:
    node, epoch, incarnation = st.sampled_from(NODES), st.integers(0, 3), st.integers(0, 4)
    alive = st.builds(Alive, node, epoch, incarnation, st.just("10.0.0.1"), st.just(7373), st.booleans())
    others = [st.builds(kind, node, epoch, incarnation) for kind in (Left, Suspect, Dead)]
    return st.one_of(alive, *others)


def seal(item: AnyEvidence) -> bytes:
    return repr(item).encode()


def table_after(items: list[AnyEvidence]) -> dict[bytes, tuple[object, ...]]:
    table = MemberTable(100)
    for item in items:
        table.apply(item, seal(item), now=0.0)
    return {m.node: (m.order, m.host, m.port) for m in table.all()}


def first_words(items: list[AnyEvidence]) -> list[AnyEvidence]:
    """Return each node's first own statement, which a push-pull brings before evidence about it."""
    return [Alive(node, 0, 0, "10.0.0.1", 7373, False) for node in NODES]


@given(st.lists(evidence(), max_size=12), st.randoms(use_true_random=False))
def test_any_order_and_repetition_of_evidence_gives_one_table(items: list[AnyEvidence], rng: object) -> None:
    # Two conflicting statements of one node at the same age need a stolen key; everything else is order-free.
    unique = {(type(i), i.node, i.epoch, i.incarnation): i for i in items}
    items = list(unique.values())
    shuffled = [*items, *items]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    start = first_words(items)
    assert table_after(start + items) == table_after(start + shuffled)


@given(st.lists(evidence(), max_size=30))
def test_views_only_advance(items: list[AnyEvidence]) -> None:
    table = MemberTable(100)
    seen: dict[bytes, list[tuple[int, int, int]]] = {}
    for item in items:
        table.apply(item, seal(item), now=0.0)
        for member in table.all():
            seen.setdefault(member.node, []).append(member.order)
    assert all(a <= b for orders in seen.values() for a, b in pairwise(orders))


def test_late_alive_does_not_revive_a_dead_member() -> None:
    # al8n/memberlist PR 197: Alive@1, Dead@1, Dead@10, late Alive@2 must not resurrect.
    node = NODES[0]
    alive = [Alive(node, 1, n, "10.0.0.1", 1, False) for n in (1, 2)]
    table = MemberTable(10)
    for item in (alive[0], Dead(node, 1, 1), Dead(node, 1, 10), alive[1]):
        table.apply(item, seal(item), 0.0)
    member = table.get(node)
    assert member is not None and member.state == "dead"


def test_accusation_of_an_unknown_node_is_ignored() -> None:
    table = MemberTable(10)
    assert table.apply(Dead(NODES[0], 5, 5), b"", 0.0) is None
    assert len(table) == 0


def test_table_is_bounded() -> None:
    table = MemberTable(2)
    for node in NODES:
        table.apply(Alive(node, 1, 0, "10.0.0.1", 1, False), b"", 0.0)
    assert len(table) == 2


def test_skipped_accusation_still_prevents_a_revival() -> None:
    """al8n/memberlist PR 197: alive@1, dead@1, dead@10 and a late alive@2 must not revive the member."""
    table = MemberTable(10)
    for evidence in (
        Alive(NODES[0], 1, 1, "h", 1, False),
        Dead(NODES[0], 1, 1),
        Dead(NODES[0], 1, 10),
        Alive(NODES[0], 1, 2, "h", 1, False),
    ):
        table.apply(evidence, b"", 0.0)
    member = table.get(NODES[0])
    assert member is not None and (member.state, member.incarnation) == ("dead", 10)


def test_equal_tables_have_equal_roots_without_absent_members() -> None:
    one, other = MemberTable(10), MemberTable(10)
    words = [Alive(bytes([n]) * 32, 1, n, "h", 1, False) for n in range(1, 6)]
    for word in words:
        one.apply(word, b"", 0.0)
    for word in reversed(words):
        other.apply(word, b"", 5.0)
    assert one.root == other.root != 0
    one.apply(Dead(bytes([3]) * 32, 1, 3), b"", 6.0)
    assert one.root != other.root
    other.forget(bytes([3]) * 32)
    assert one.root == other.root
