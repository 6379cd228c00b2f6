"""Retries of a submission that its witnesses have not accepted: by the submitter, else by one coordinator at a time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mesh.consensus.submission_retry import (
    ASKED_IN_ZONE,
    BLIND_RETRY_S,
    BYTES_FOR_ONE,
    KEPT_FOR_ONE,
    KEPT_FOR_OTHERS,
    LIFE_S,
    RETRY_S,
    Around,
    Entrust,
    GiveUp,
    PendingSubmission,
    PendingSubmissions,
    Try,
    line,
    pending_submission,
)
from mesh.model.spec import MAX_ARRAY
from placement.zones import Zone
from tests.consensus.worlds import JOB, SPEC_BYTES, A, B, C, D, E, make_spec, voters

F, G = b"f" * 32, b"g" * 32
EVERYBODY = frozenset({A, B, C, D, E, F, G})
NORTH = Zone("north", (A, B, D, E), 32, (A, D, B, E))
SOUTH = Zone("south", (C, F, G), 24, (F, C, G))
CREATED_MS = 1_000


def submission() -> PendingSubmission:
    return pending_submission(JOB, SPEC_BYTES, make_spec())  # by A; its witnesses are A, B and C


def around(*away: bytes, leaving: tuple[bytes, ...] = ()) -> Around:
    reached = EVERYBODY - set(away)
    return Around(reached, reached - set(leaving), (NORTH, SOUTH))


def kept(me: bytes = A) -> PendingSubmissions:
    pending = PendingSubmissions(me)
    pending.keep(submission())
    return pending


def test_line_has_the_own_zone_then_other_coordinators_and_no_witness() -> None:
    assert line(submission(), A, around()) == ((D, "north"), (E, "north"), (F, "south"))
    assert line(submission(), A, around(D, E)) == ((F, "south"),), "no node of its own zone can be reached"
    assert line(submission(), A, around(leaving=(D, F))) == ((E, "north"), (G, "south"))
    assert line(submission(), D, around(), but=(E,)) == ((F, "south"),), (
        "a keeper that leaves asks neither itself nor A"
    )
    many = Zone("north", NORTH.nodes, 9, tuple(bytes([n]) * 32 for n in range(100, 120)))
    crowd = Around(frozenset(many.line), frozenset(many.line), (msg(many, A),))
    assert len(line(submission(), A, crowd)) == ASKED_IN_ZONE


def msg(zone: Zone, *more: bytes) -> Zone:
    return Zone(zone.name, (*zone.nodes, *more), zone.weight, zone.line)


def test_submitter_retries_itself_and_has_one_keeper() -> None:
    pending = kept()
    actions = pending.due(around(B, C), 0.0, CREATED_MS)
    assert [type(action) for action in actions] == [Try, Entrust]
    pending.entrusted(JOB, D, "north")
    assert pending.due(around(B, C), RETRY_S, CREATED_MS) == [], "the submission has a keeper and no visible majority"
    (again,) = pending.due(around(B), RETRY_S + 1, CREATED_MS)
    assert isinstance(again, Try), "the submission is retried as soon as a majority is visible"
    (blind,) = pending.due(around(B, C), RETRY_S + 1 + BLIND_RETRY_S, CREATED_MS)
    assert isinstance(blind, Try), "it is also retried periodically, because the view may be wrong"


def test_submission_that_is_kept_again_starts_anew() -> None:
    pending = kept()
    assert len(pending.due(around(B, C), 0.0, CREATED_MS)) == 2
    pending.drop(JOB)
    pending.keep(submission())
    assert len(pending.due(around(B, C), 1.0, CREATED_MS)) == 2


def test_node_that_sees_nobody_to_entrust_asks_nobody() -> None:
    (only,) = kept().due(around(B, C, D, E, F, G), 0.0, CREATED_MS)
    assert isinstance(only, Try)


def test_half_of_the_witnesses_is_no_majority() -> None:
    spec = make_spec(witnesses=voters(A, B, C, D))
    pending = PendingSubmissions(E)
    pending.keep(pending_submission(JOB, SPEC_BYTES, spec))
    assert pending.due(around(C, D), 0.0, CREATED_MS)
    assert pending.due(around(C, D), RETRY_S, CREATED_MS) == []
    assert pending.due(around(D), RETRY_S, CREATED_MS)


def test_next_node_is_asked_when_the_keeper_leaves_or_dies() -> None:
    for lost in (around(B, C, D), around(B, C, leaving=(D,))):
        pending = kept()
        pending.due(around(B, C), 0.0, CREATED_MS)
        pending.entrusted(JOB, D, "north")
        (action,) = pending.due(lost, RETRY_S, CREATED_MS)
        assert isinstance(action, Entrust) and action.line[0] == (E, "north")
        assert pending.due(lost, RETRY_S + 1, CREATED_MS) == [], "the action is not repeated at once"
        pending.entrusted(JOB, E, "north")
        assert pending.due(lost, 2 * RETRY_S + 1, CREATED_MS) == []


def test_nodes_that_refuse_a_submission_are_asked_ever_more_rarely() -> None:
    pending, asked = kept(), []
    for now in range(2000):
        actions = pending.due(around(B, C), float(now), CREATED_MS)
        asked += [now] * any(isinstance(action, Entrust) for action in actions)
    assert [later - before for before, later in pairwise(asked)] == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]
    pending.entrusted(JOB, D, "north")
    assert any(isinstance(action, Entrust) for action in pending.due(around(B, C, D), 2000.0, CREATED_MS)), (
        "it has left"
    )


def test_array_finds_one_keeper() -> None:
    assert KEPT_FOR_ONE >= MAX_ARRAY


def test_keeper_only_retries() -> None:
    pending = kept(D)
    assert [type(action) for action in pending.due(around(A, B, C), 0.0, CREATED_MS)] == [Try]
    assert pending.for_gossip(8).jobs == (JOB,) and pending.for_gossip(0) == type(pending.for_gossip(0))(1, ())
    assert kept(A).for_gossip(8).count == 0, "a node does not gossip its own submissions"


def test_retry_ends_on_delivery_or_after_a_day() -> None:
    pending = kept(D)
    assert pending.due(around(), 0.0, CREATED_MS + LIFE_S * 1000) == [GiveUp(submission())]
    assert pending.drop(JOB) == submission() and not pending.any and pending.drop(JOB) is None
    assert pending.due(around(), 1.0, CREATED_MS) == []
    assert pending.entrusted(JOB, E, "north") is None, "a late answer has no effect"


def test_node_keeps_a_bounded_number_of_submissions_each_once() -> None:
    pending = PendingSubmissions(D)
    for number in range(KEPT_FOR_OTHERS):
        user = f"user {number // KEPT_FOR_ONE}"
        assert not pending.is_full_for(user) and pending.is_full_for("user 0") == (number >= KEPT_FOR_ONE)
        pending.keep(pending_submission(number.to_bytes(16, "big"), SPEC_BYTES, make_spec(user=user)))
    assert pending.is_full_for("somebody else")
    large = PendingSubmissions(D)
    for number in range(BYTES_FOR_ONE >> 20):
        assert not large.is_full_for("ada")
        large.keep(pending_submission(number.to_bytes(16, "big"), bytes(1 << 20), make_spec(user="ada")))
    assert large.is_full_for("ada") and not large.is_full_for("bob")
    mine = kept(A)
    mine.entrusted(JOB, D, "north")
    assert mine.keep(submission()).keeper == D, "keeping a submission twice preserves its state"


@given(st.lists(st.tuples(st.sampled_from([A, B, C, D, E, F, G]), st.booleans()), max_size=30))
def test_submitter_asks_only_staying_nodes_and_keeps_its_submissions(
    changes: list[tuple[bytes, bool]],
) -> None:
    pending, away, now = kept(), {B, C}, 0.0
    for node, there in changes:
        away = away - {node} if there else away | ({node} - {A})
        now += RETRY_S
        here = around(*away)
        for action in pending.due(here, now, CREATED_MS):
            if isinstance(action, Entrust):
                assert all(one in here.staying and one not in {A, B, C} for one, _ in action.line)
                pending.entrusted(JOB, *action.line[0])
        own = pending.get(JOB)
        assert own is not None and own.submitter == A
        assert own.keeper in here.staying or not line(own, A, here)
