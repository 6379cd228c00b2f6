"""Ledgers grow, groups need majorities of old and new, and a healthy group stays odd."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.jobs.ledger import MAX_ATTEMPTS_KEPT, Attempt, Config, Ledger, Seat
from mesh.jobs.proposer import healthy_group
from tests.jobs.worlds import DISK, JOB, A, B, C, D, E, make_advert, make_view, seats

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
    joint = Config(number=0, term=0, members=seats(A, B, C)).joint(seats(C, D, E), term=3)
    assert joint.order > Config(number=0, term=9, members=seats(A, B, C)).order
    assert not joint.quorum(set(seats(C, D, E))) and not joint.quorum(set(seats(A, B, C)))
    assert joint.quorum(set(seats(B, C, D))) and joint.everyone == seats(C, D, E, A, B)
    assert joint.settled().quorum(set(seats(D, E))) and joint.settled().order > joint.order


def test_a_node_with_another_disk_is_another_witness() -> None:
    group = Config(number=0, term=0, members=seats(A, B, C))
    reborn = Seat(A, b"another!")
    assert not group.quorum({reborn, *seats(B)})
    joint = group.joint((reborn, *seats(B, C)), term=1)
    assert joint.nodes == (A, B, C) and joint.quorum({reborn, *seats(B, C)})
    assert not joint.quorum({reborn, *seats(B)}), "of the old group only B speaks"


def test_a_node_that_lost_its_disk_is_replaced_even_by_itself() -> None:
    group = Config(number=0, term=0, members=seats(A, B, C))
    disks = {A: b"another!", B: DISK, C: DISK, D: DISK}
    view = make_view(B, (A, B, C), disks=disks)
    assert set(healthy_group(JOB, group, view, 3)) == {Seat(A, b"another!"), *seats(B, C)}
    view = make_view(B, (D, A, B, C), disks=disks, adverts=(make_advert(D, weight=64),))
    assert set(healthy_group(JOB, group, view, 3)) == set(seats(D, B, C))
    unheard = make_view(B, (A, B, C), disks={})
    assert healthy_group(JOB, group, unheard, 3) == group.members, (
        "of whose disk nothing is known, nothing is held against"
    )


@given(groups, groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)))
def test_two_quorums_of_neighbouring_groups_always_meet(
    old: tuple[bytes, ...], new: tuple[bytes, ...], first: set[bytes], second: set[bytes]
) -> None:
    before = Config(number=0, term=0, members=seats(*old))
    joint = before.joint(seats(*new), term=1)
    for one, other in ((before, joint), (joint, joint), (joint, joint.settled())):
        if one.quorum(set(seats(*first))) and other.quorum(set(seats(*second))):
            assert first & second


@given(groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)))
def test_a_healthy_group_is_odd_and_keeps_whom_it_can(
    members: tuple[bytes, ...], alive: set[bytes], leaving: set[bytes]
) -> None:
    staying = frozenset(alive - leaving)
    view = make_view(A, tuple(alive), leaving=frozenset(leaving), disks=dict.fromkeys(NODES, DISK))
    group = tuple(seat.node for seat in healthy_group(JOB, Config(number=0, term=0, members=seats(*members)), view, 3))
    assert group and len(set(group)) == len(group) and len(group) <= max(3, len(members))
    assert len(group) % 2 == 1 or group == members
    kept = [node for node in members if node in staying]
    if len(kept) >= 3:
        assert set(group) == set(kept[:3])
    if len(staying) >= 3:
        assert set(group) <= staying and len(group) == 3
    again = healthy_group(JOB, Config(number=1, term=0, members=seats(*group)), view, 3)
    assert set(again) == set(seats(*group)), "a group that was made healthy stays as it is"
