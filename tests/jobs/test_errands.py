"""Who goes on submitting a job that its witnesses do not take in: the submitter, and one coordinator in its stead at a time."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs.errands import (
    ASKED_IN_ZONE,
    BLIND_RETRY_S,
    KEPT_FOR_OTHERS,
    LIFE_S,
    RETRY_S,
    Around,
    Entrust,
    Errand,
    Errands,
    GiveUp,
    Try,
    errand_of,
    line,
)
from placement.zones import Zone
from tests.jobs.worlds import JOB, SPEC_BYTES, A, B, C, D, E, make_spec

F, G = b"f" * 32, b"g" * 32
EVERYBODY = frozenset({A, B, C, D, E, F, G})
NORTH = Zone("north", (A, B, D, E), 32, (A, D, B, E))
SOUTH = Zone("south", (C, F, G), 24, (F, C, G))
CREATED_MS = 1_000


def errand() -> Errand:
    return errand_of(JOB, SPEC_BYTES, make_spec())  # by A; its witnesses are A, B and C


def around(*away: bytes, leaving: tuple[bytes, ...] = ()) -> Around:
    reached = EVERYBODY - set(away)
    return Around(reached, reached - set(leaving), (NORTH, SOUTH))


def kept(me: bytes = A) -> Errands:
    errands = Errands(me)
    errands.keep(errand())
    return errands


def test_the_line_is_ones_own_zone_and_then_the_others_coordinators_but_no_witness() -> None:
    assert line(errand(), A, around()) == ((D, "north"), (E, "north"), (F, "south"))
    assert line(errand(), A, around(D, E)) == ((F, "south"),), "its own zone has none that can be reached"
    assert line(errand(), A, around(leaving=(D, F))) == ((E, "north"), (G, "south"))
    assert line(errand(), D, around(), but=(E,)) == ((F, "south"),), "a deputy that leaves asks neither itself nor A"
    many = Zone("north", NORTH.nodes, 9, tuple(bytes([n]) * 32 for n in range(100, 120)))
    crowd = Around(frozenset(many.line), frozenset(many.line), (msg(many, A),))
    assert len(line(errand(), A, crowd)) == ASKED_IN_ZONE


def msg(zone: Zone, *more: bytes) -> Zone:
    return Zone(zone.name, (*zone.nodes, *more), zone.weight, zone.line)


def test_a_submitter_tries_by_itself_and_has_one_deputy() -> None:
    errands = kept()
    actions = errands.due(around(B, C), 0.0, CREATED_MS)
    assert [type(action) for action in actions] == [Try, Entrust]
    errands.entrusted(JOB, D, "north")
    assert errands.due(around(B, C), RETRY_S, CREATED_MS) == [], "it has one, and sees no majority"
    (again,) = errands.due(around(B), RETRY_S + 1, CREATED_MS)
    assert isinstance(again, Try), "as soon as a majority can be seen"
    (blind,) = errands.due(around(B, C), RETRY_S + 1 + BLIND_RETRY_S, CREATED_MS)
    assert isinstance(blind, Try), "and now and then without: what is seen may be wrong"


def test_when_the_deputy_dies_or_leaves_the_next_in_line_is_asked() -> None:
    for lost in (around(B, C, D), around(B, C, leaving=(D,))):
        errands = kept()
        errands.due(around(B, C), 0.0, CREATED_MS)
        errands.entrusted(JOB, D, "north")
        (action,) = errands.due(lost, RETRY_S, CREATED_MS)
        assert isinstance(action, Entrust) and action.line[0] == (E, "north")
        assert errands.due(lost, RETRY_S + 1, CREATED_MS) == [], "not at once again"
        errands.entrusted(JOB, E, "north")
        assert errands.due(lost, 2 * RETRY_S + 1, CREATED_MS) == []


def test_a_deputy_only_tries() -> None:
    errands = kept(D)
    assert [type(action) for action in errands.due(around(A, B, C), 0.0, CREATED_MS)] == [Try]
    assert errands.told(8).jobs == (JOB,) and errands.told(0) == type(errands.told(0))(1, ())
    assert kept(A).told(8).count == 0, "what is one's own is for nobody else"


def test_it_ends_when_it_is_delivered_and_after_a_day() -> None:
    errands = kept(D)
    assert errands.due(around(), 0.0, CREATED_MS + LIFE_S * 1000) == [GiveUp(errand())]
    assert errands.drop(JOB) == errand() and not errands.any and errands.drop(JOB) is None
    assert errands.due(around(), 1.0, CREATED_MS) == []
    assert errands.entrusted(JOB, E, "north") is None, "an answer that comes late"


def test_a_node_keeps_so_many_for_others_and_each_once() -> None:
    errands = Errands(D)
    for number in range(KEPT_FOR_OTHERS):
        assert not errands.full
        errands.keep(errand_of(number.to_bytes(16, "big"), SPEC_BYTES, make_spec()))
    assert errands.full
    mine = kept(A)
    mine.entrusted(JOB, D, "north")
    assert mine.keep(errand()).deputy == D, "to keep it again forgets nothing"


@given(st.lists(st.tuples(st.sampled_from([A, B, C, D, E, F, G]), st.booleans()), max_size=30))
def test_whatever_comes_and_goes_a_submitter_asks_only_those_who_stay_and_never_forgets(
    changes: list[tuple[bytes, bool]],
) -> None:
    errands, away, now = kept(), {B, C}, 0.0
    for node, there in changes:
        away = away - {node} if there else away | ({node} - {A})
        now += RETRY_S
        here = around(*away)
        for action in errands.due(here, now, CREATED_MS):
            if isinstance(action, Entrust):
                assert all(one in here.staying and one not in {A, B, C} for one, _ in action.line)
                errands.entrusted(JOB, *action.line[0])
        own = errands.get(JOB)
        assert own is not None and own.submitter == A
        assert own.deputy in here.staying or not line(own, A, here)
