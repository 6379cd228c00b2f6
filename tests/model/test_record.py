"""Records grow, groups need majorities of old and new, and a healthy group stays odd."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from membership.lengths import MOST_TEXT, SAID
from mesh.consensus.proposer import healthy_group
from mesh.model.bounds import MAX_NODES
from mesh.model.record import MAX_ATTEMPTS_BYTES, MAX_ATTEMPTS_KEPT, Attempt, Config, JobRecord, Voter, avoided
from tests.consensus.worlds import DISK, JOB, A, B, C, D, E, make_advert, make_view, voters

NODES = [bytes([number]) * 32 for number in range(1, 10)]
groups = st.lists(st.sampled_from(NODES), min_size=1, max_size=5, unique=True).map(tuple)


def attempt(number: int, reason: str = "") -> Attempt:
    return Attempt(number=number, node=A, nick="a", term=number + 1, started_unix_ms=number, reason=reason)


def test_attempts_are_appended_or_replaced_by_number() -> None:
    record = JobRecord().with_attempt(attempt(0)).with_attempt(attempt(0, "left")).with_attempt(attempt(1))
    assert [(a.number, a.reason) for a in record.attempts] == [(0, "left"), (1, "")]
    assert record.version == 3 and record.open_attempt == attempt(1) and record.next_attempt == 2


def test_a_record_keeps_the_newest_attempts_only() -> None:
    record = JobRecord()
    for number in range(MAX_ATTEMPTS_KEPT + 5):
        record = record.with_attempt(attempt(number, "left"))
    assert len(record.attempts) == MAX_ATTEMPTS_KEPT and record.next_attempt == MAX_ATTEMPTS_KEPT + 5


def test_record_with_long_attempts_fits_into_a_message() -> None:
    """A hostile runner fills a record; the next attempt has room for it beside the job's description."""
    gang = tuple((bytes([rank]) * 32, "é" * SAID) for rank in range(MAX_NODES))
    hostile = tuple(msgspec.structs.replace(attempt(number, "é" * 2000), gang=gang) for number in range(5))
    record = JobRecord(attempts=hostile).with_attempt(attempt(5, "é" * MOST_TEXT))
    assert [one.number for one in record.attempts] == [4, 5] or [one.number for one in record.attempts] == [3, 4, 5]
    assert len(msgspec.msgpack.encode(record)) < MAX_ATTEMPTS_BYTES + 4 * SAID
    honest = tuple((bytes([rank]) * 32, f"workstation-{rank}") for rank in range(MAX_NODES - 1))
    record = JobRecord()
    for number in range(MAX_ATTEMPTS_KEPT):
        record = record.with_attempt(msgspec.structs.replace(attempt(number, "its owner came back"), gang=honest))
    assert len(record.attempts) == MAX_ATTEMPTS_KEPT


def test_a_joint_group_needs_both_majorities() -> None:
    joint = Config(number=0, term=0, members=voters(A, B, C)).joint(voters(C, D, E), term=3)
    assert joint.order > Config(number=9, term=2, members=voters(A, B, C)).order, "a later term outranks any change"
    assert not joint.quorum(set(voters(C, D, E))) and not joint.quorum(set(voters(A, B, C)))
    assert joint.quorum(set(voters(B, C, D))) and joint.everyone == voters(C, D, E, A, B)
    assert joint.settled().quorum(set(voters(D, E))) and joint.settled().order > joint.order


def test_half_of_a_group_decides_nothing() -> None:
    pair = Config(number=0, term=0, members=voters(A, B))
    assert not pair.quorum(set(voters(A))) and pair.quorum(set(voters(A, B)))


def test_attempt_written_off_ended_when_it_was_last_seen() -> None:
    open_attempt = msgspec.structs.replace(attempt(0), seen_unix_ms=900)
    ended = [JobRecord().with_attempt(open_attempt).written_off("lost", now).attempts[-1] for now in (1000, 800)]
    assert [(one.reason, one.ended_unix_ms) for one in ended] == [("lost", 900), ("lost", 800)], "never in the future"


def test_running_time_is_by_the_clock_of_the_node_that_ran() -> None:
    lost = msgspec.structs.replace(attempt(0), running_unix_ms=20_000, seen_unix_ms=60_000)
    record = JobRecord().with_attempt(lost).written_off("lost", 25_000)  # by a leader whose clock is behind
    assert record.attempts[-1].ended_unix_ms == 25_000 and record.ran_s == 40.0


def test_open_attempt_is_not_counted_as_over() -> None:
    ran = msgspec.structs.replace(attempt(0, "left"), running_unix_ms=1000, ended_unix_ms=4000)
    runs = msgspec.structs.replace(attempt(1), running_unix_ms=5000, seen_unix_ms=9000)
    assert JobRecord(attempts=(ran, runs)).ran_s == 3.0
    assert msgspec.structs.replace(ran, running_unix_ms=4001).ran_s == 0.0, "by a clock that was set back"
    unseen = JobRecord().with_attempt(attempt(7)).written_off("lost", 1000).attempts[-1]
    assert unseen.ended_unix_ms == 7 and JobRecord().written_off("lost", 1000) == JobRecord()


def test_node_that_the_job_has_just_left_ranks_last_with_those_where_it_failed() -> None:
    failed = msgspec.structs.replace(attempt(0, "failed"), node=B, fault=True)
    assert avoided(()) == ()
    assert avoided((failed, attempt(1))) == (B,), "it runs there"
    assert avoided((failed, attempt(1, "checkpointed"))) == (B,), "it may go on where it saved"
    assert avoided((failed, attempt(1, "its owner came back"))) == (B, A)
    assert avoided((attempt(0, "its owner came back"), attempt(1))) == ()


def test_node_with_a_new_disk_is_a_new_witness() -> None:
    group = Config(number=0, term=0, members=voters(A, B, C))
    reborn = Voter(A, b"another!")
    assert not group.quorum({reborn, *voters(B)})
    joint = group.joint((reborn, *voters(B, C)), term=1)
    assert joint.nodes == (A, B, C) and joint.quorum({reborn, *voters(B, C)})
    assert not joint.quorum({reborn, *voters(B)}), "B alone is no majority of the old group"


def test_voter_with_a_lost_disk_is_replaced() -> None:
    group = Config(number=0, term=0, members=voters(A, B, C))
    disks = {A: b"another!", B: DISK, C: DISK, D: DISK}
    view = make_view(B, (A, B, C), disks=disks)
    assert set(healthy_group(JOB, group, view, 3)) == {Voter(A, b"another!"), *voters(B, C)}
    view = make_view(B, (D, A, B, C), disks=disks, adverts=(make_advert(D, weight=64),))
    assert set(healthy_group(JOB, group, view, 3)) == set(voters(D, B, C))
    unheard = make_view(B, (A, B, C), disks={})
    assert healthy_group(JOB, group, unheard, 3) == group.members, "a voter with an unknown disk is kept"


@given(groups, groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)))
def test_quorums_of_consecutive_groups_intersect(
    old: tuple[bytes, ...], new: tuple[bytes, ...], first: set[bytes], second: set[bytes]
) -> None:
    before = Config(number=0, term=0, members=voters(*old))
    joint = before.joint(voters(*new), term=1)
    for one, other in ((before, joint), (joint, joint), (joint, joint.settled())):
        if one.quorum(set(voters(*first))) and other.quorum(set(voters(*second))):
            assert first & second


@given(groups, st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)))
@example(tuple(NODES[:5]), set(NODES), set())
def test_healthy_group_is_odd_and_keeps_live_members(
    members: tuple[bytes, ...], alive: set[bytes], leaving: set[bytes]
) -> None:
    staying = frozenset(alive - leaving)
    view = make_view(A, tuple(alive), leaving=frozenset(leaving), disks=dict.fromkeys(NODES, DISK))
    group = tuple(
        voter.node for voter in healthy_group(JOB, Config(number=0, term=0, members=voters(*members)), view, 3)
    )
    assert group and len(set(group)) == len(group) and len(group) <= max(3, len(members))
    assert len(group) % 2 == 1 or group == members
    kept = [node for node in members if node in staying]
    if len(kept) >= 3:
        assert set(group) == set(kept[:3])
    if len(staying) >= 3:
        assert set(group) <= staying and len(group) == 3
    again = healthy_group(JOB, Config(number=1, term=0, members=voters(*group)), view, 3)
    assert set(again) == set(voters(*group)), "a healthy group does not change"


def committed(record: JobRecord, holders: int, wanted: int = 2) -> JobRecord:
    name = b"%032d" % record.next_commit[0]
    return record.with_commit(1, name, tuple(bytes([n]) * 32 for n in range(holders)), None, 0, wanted=wanted)


@pytest.mark.parametrize(
    ("holders", "named"),
    [
        ([2, 2, 2], (2, 3)),
        ([2, 1, 1], (1, 3)),  # the second is at risk
        ([2, 1, 0, 1], (1, 4)),
        ([2, 1, 2, 2], (3, 4)),  # the third is as well kept as the first
        ([0, 1, 0, 0], (2, 4)),
        ([0, 0, 0], (2, 3)),  # no other node ever took one
    ],
)
def test_record_keeps_a_better_kept_predecessor(holders: list[int], named: tuple[int, ...]) -> None:
    record = JobRecord()
    for count in holders:
        record = committed(record, count)
    assert record.named == named


def test_job_without_replicas_is_never_at_risk() -> None:
    record = committed(committed(committed(JobRecord(), 1, 0), 0, 0), 0, 0)
    assert record.commit is not None and not record.commit.at_risk and record.named == (2, 3)


def test_numbers_never_fall_when_checkpoints_are_abandoned() -> None:
    record = committed(committed(JobRecord(), 2), 2).amended(settled=2, unfetched_unix_ms=5)
    newest = record.commit
    record = record.without_commit()
    assert record.commit is not None and record.commit.seq == 1 and record.abandoned == newest
    assert record.next_commit == (3, record.commit.manifest) and record.unfetched_unix_ms == 0
    assert record.without_commit().next_commit == (3, None)
    assert committed(record, 2).named == (1, 3)


@pytest.mark.parametrize(
    "field", [{"needed": [1, 2, 3]}, {"needed": [-1]}, {"unfetched_unix_ms": -1}, {"unfetched_unix_ms": 1 << 53}]
)
def test_record_with_values_out_of_bounds_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(field), type=JobRecord)
