"""Ledgers grow, groups need majorities of old and new, and a healthy group stays odd."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs.ledger import MAX_ATTEMPTS_KEPT, Attempt, Config, Ledger
from mesh.jobs.proposer import healthy_group
from tests.jobs.worlds import A, B, C, D, E

NODES = [bytes([number]) * 32 for number in range(1, 10)]
groups = st.lists(st.sampled_from(NODES), min_size=1, max_size=5, unique=True).map(tuple)


def attempt(number: int, reason: str = "") -> Attempt:
    return Attempt(number=number, node=A, nick="a", term=number + 1, started_unix_ms=number, reason=reason)


def test_attempts_are_appended_or_replaced_by_number() -> None:
    ledger = Ledger().with_attempt(attempt(0)).with_attempt(attempt(0, "left")).with_attempt(attempt(1))
    assert [(a.number, a.reason) for a in ledger.attempts] == [(0, "left"), (1, "")]
    assert ledger.version == 3 and ledger.open_attempt == attempt(1) and ledger.next_attempt == 2


def test_a_ledger_keeps_the_newest_attempts_only() -> None:
    ledger = Ledger()
    for number in range(MAX_ATTEMPTS_KEPT + 5):
        ledger = ledger.with_attempt(attempt(number, "left"))
    assert len(ledger.attempts) == MAX_ATTEMPTS_KEPT and ledger.next_attempt == MAX_ATTEMPTS_KEPT + 5


def test_a_joint_group_needs_both_majorities() -> None:
    joint = Config(number=0, term=0, members=(A, B, C)).joint((C, D, E), term=3)
    assert joint.order > Config(number=0, term=9, members=(A, B, C)).order
    assert not joint.quorum({C, D, E}) and not joint.quorum({A, B, C})
    assert joint.quorum({B, C, D}) and joint.everyone == (C, D, E, A, B)
    assert joint.settled().quorum({D, E}) and joint.settled().order > joint.order


@given(groups, groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)))
def test_two_quorums_of_neighbouring_groups_always_meet(
    old: tuple[bytes, ...], new: tuple[bytes, ...], first: set[bytes], second: set[bytes]
) -> None:
    before = Config(number=0, term=0, members=old)
    joint = before.joint(new, term=1)
    for one, other in ((before, joint), (joint, joint), (joint, joint.settled())):
        if one.quorum(first) and other.quorum(second):
            assert first & second


@given(groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)), st.permutations(NODES))
def test_a_healthy_group_is_odd_and_keeps_whom_it_can(
    members: tuple[bytes, ...], alive: set[bytes], leaving: set[bytes], ranked: list[bytes]
) -> None:
    staying = frozenset(alive - leaving)
    group = healthy_group(Config(number=0, term=0, members=members), frozenset(alive), staying, tuple(ranked), 3)
    assert group and len(set(group)) == len(group) and len(group) <= max(3, len(members))
    assert len(group) % 2 == 1 or group == members
    kept = [node for node in members if node in staying]
    if len(kept) >= 3:
        assert set(group) == set(kept[:3])
    if len(staying) >= 3:
        assert set(group) <= staying and len(group) == 3
    again = healthy_group(Config(number=1, term=0, members=group), frozenset(alive), staying, tuple(ranked), 3)
    assert set(again) == set(group), "a group that was made healthy stays as it is"
