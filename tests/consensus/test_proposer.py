"""Proposer: which answers decide a round, which end the term, and how the group changes step by step."""

from mesh.consensus.effects import Send
from mesh.consensus.messages import Accept, Accepted, Introduce, Introduced, Refused
from mesh.consensus.proposer import (
    ANSWER_S,
    ASK_AGAIN_S,
    MAX_OPEN_ROUNDS,
    UNFIT_S,
    Decided,
    Fenced,
    Proposer,
    healthy_group,
)
from mesh.model.record import Config, JobRecord, Voter
from tests.consensus.worlds import DISK, JOB, SPEC_BYTES, A, B, C, D, E, make_view, voters

TERM = 2
GROUP = Config(number=0, term=1, members=voters(A, B, C))
FIRST, SECOND = JobRecord(version=1), JobRecord(version=2)


def make_proposer(config: Config = GROUP, record: JobRecord = FIRST) -> Proposer:
    return Proposer(JOB, SPEC_BYTES, TERM, config, record, D)


def accepted(round_number: int, term: int = TERM, disk: bytes = DISK, warrant: bytes = b"") -> Accepted:
    return Accepted(job=JOB, term=term, disk=disk, round=round_number, warrant=warrant)


def refused(term: int = TERM, promised: int = TERM, config: Config | None = GROUP, **changes: bool) -> Refused:
    facts = {"needs_spec": False, "finished": False, **changes}
    return Refused(job=JOB, term=term, disk=DISK, round=1, promised=promised, config=config, lease_left_s=0.0, **facts)


def accepts(sends: list[Send]) -> dict[bytes, Accept]:
    return {send.to: send.message for send in sends if isinstance(send.message, Accept)}


def introduced_to(sends: list[Send]) -> set[bytes]:
    return {send.to for send in sends if isinstance(send.message, Introduce)}


def make_joint(newcomer: bytes = D) -> Proposer:
    """Return a proposer whose group has just become joint, to replace C by `newcomer`; its round is number 2."""
    proposer = make_proposer()
    view = make_view(A, (A, B, newcomer))
    assert introduced_to(proposer.regroup(view, 0.0)) == {newcomer}
    proposer.on_introduced(newcomer, Introduced(JOB, DISK), 0.0)
    proposer.on_accepted(A, accepted(1))
    assert set(accepts(proposer.regroup(view, 0.0))) == {A, B, C, newcomer}
    return proposer


def test_answers_of_another_term_decide_nothing() -> None:
    """Each term counts its rounds from 1, so a late answer to the term before names a round of this one."""
    proposer = make_proposer()
    proposer.propose(0.0)
    assert [proposer.on_accepted(node, accepted(1, TERM - 1)) for node in (A, B, C)] == [None] * 3
    assert proposer.on_accepted(A, accepted(1)) is None
    assert isinstance(proposer.on_accepted(B, accepted(1)), Decided)


def test_decided_is_what_the_round_carried() -> None:
    proposer = make_proposer()
    proposer.propose(5.0)
    proposer.record = SECOND
    proposer.propose(6.0)
    proposer.on_accepted(A, accepted(1))
    assert proposer.on_accepted(B, accepted(1)) == Decided(5.0, FIRST, GROUP, renews=True)
    proposer.on_accepted(A, accepted(2))
    assert proposer.on_accepted(B, accepted(2)) == Decided(6.0, SECOND, GROUP, renews=True)


def renews(proposer: Proposer, now: float, renew: bool = False) -> bool:
    """Propose, and tell whether the round renews the lease."""
    (answer,) = {accept.renews for accept in accepts(proposer.propose(now, renew)).values()}
    return answer


def decide(proposer: Proposer, number: int) -> Decided:
    decided = [proposer.on_accepted(node, accepted(number)) for node in (A, B)][-1]
    assert decided is not None
    return decided


def test_round_renews_the_lease_until_one_has() -> None:
    proposer = make_proposer()
    assert renews(proposer, 0.0) and renews(proposer, 1.0), "none is decided"
    assert decide(proposer, 1).renews
    assert renews(proposer, 2.0), "the second one is undecided"
    assert decide(proposer, 3).renews
    assert not renews(proposer, 3.0)
    assert not decide(proposer, 4).renews
    assert renews(proposer, 4.0, renew=True)
    assert decide(proposer, 5).renews
    assert not renews(proposer, 5.0)


def test_group_that_has_not_granted_the_lease_renews_it() -> None:
    proposer = make_proposer()
    proposer.propose(0.0)
    decide(proposer, 1)
    view = make_view(A, (A, B, D))
    proposer.regroup(view, 1.0)
    proposer.on_introduced(D, Introduced(JOB, DISK), 1.0)
    decide(proposer, 2)
    joint = accepts(proposer.regroup(view, 1.0))
    assert all(accept.renews and accept.config.previous for accept in joint.values())
    decide(proposer, 3)
    assert not proposer.config.previous
    assert renews(proposer, 2.0), "the members of the new group alone"
    assert decide(proposer, 4).renews
    assert not renews(proposer, 3.0)


def test_round_renews_the_lease_after_the_clock_stood() -> None:
    proposer = make_proposer()
    proposer.propose(0.0)
    decide(proposer, 1)
    proposer.propose(1.0, renew=True)
    proposer.clock_stood()
    assert [proposer.on_accepted(node, accepted(2)) for node in (A, B)] == [None] * 2
    assert renews(proposer, 2.0)


def test_acceptance_of_another_disk_is_no_vote() -> None:
    proposer = make_proposer()
    proposer.propose(0.0)
    proposer.on_accepted(A, accepted(1))
    assert proposer.on_accepted(B, accepted(1, disk=b"another!")) is None


def test_refusals_of_another_term_end_nothing() -> None:
    proposer = make_proposer()
    proposer.propose(0.0)
    assert [proposer.on_refused(node, refused(TERM - 1, promised=9)) for node in (A, B, C)] == [[]] * 3


def test_term_ends_when_the_others_form_no_quorum() -> None:
    proposer = make_proposer()
    proposer.propose(0.0)
    assert proposer.on_refused(A, refused(promised=TERM)) == [], "for a lease that still runs"
    assert proposer.on_refused(B, refused(promised=TERM)) == []
    assert proposer.on_refused(A, refused(promised=TERM + 1)) == []
    assert proposer.on_refused(A, refused(promised=TERM + 1)) == [], "a voter counts once"
    assert proposer.on_refused(B, refused(finished=True)) == Fenced()


def test_term_ends_when_most_voters_know_a_later_group() -> None:
    proposer = make_proposer()
    later = Config(number=1, term=TERM + 1, members=voters(A, B, E))
    assert proposer.on_refused(A, refused(promised=TERM + 1, config=later)) == []
    assert proposer.on_refused(B, refused(promised=TERM + 1, config=later)) == Fenced()


def test_only_a_voter_gets_the_job() -> None:
    proposer = make_proposer()
    assert proposer.on_refused(E, refused(needs_spec=True)) == []
    (send,) = proposer.on_refused(A, refused(needs_spec=True))  # type: ignore[misc]
    assert isinstance(send.message, Accept) and send.message.spec == SPEC_BYTES


def test_round_is_decided_by_the_group_that_it_names() -> None:
    proposer = make_proposer()
    view = make_view(A, (A, D, E))
    proposer.regroup(view, 0.0)
    for newcomer in (D, E):
        proposer.on_introduced(newcomer, Introduced(JOB, DISK), 0.0)
    proposer.regroup(view, 0.0)
    joint = proposer.config
    assert joint.previous == GROUP.members and set(joint.members) == set(voters(A, D, E))
    proposer.on_accepted(A, accepted(1))
    assert proposer.on_accepted(B, accepted(1)) == Decided(0.0, FIRST, GROUP, renews=True)
    assert [proposer.on_accepted(node, accepted(2)) for node in (A, D, E)] == [None] * 3, (
        "one of three of the old group"
    )
    assert proposer.on_accepted(C, accepted(2)) == Decided(0.0, FIRST, joint, renews=True)
    assert proposer.config == joint.settled()


def test_replaced_witness_hears_the_rounds_of_the_new_group() -> None:
    proposer = make_joint()
    for node in (A, B, D):
        proposer.on_accepted(node, accepted(2))
    assert proposer.config.members == voters(A, B, D) and not proposer.config.previous
    assert accepts(proposer.propose(1.0))[C].config == proposer.config


def test_newcomer_votes_only_once_it_can() -> None:
    proposer = make_proposer()
    view = make_view(A, (A, B, D))
    assert introduced_to(proposer.regroup(view, 0.0)) == {D}
    assert proposer.regroup(view, 0.1) == [], "it is asked now and then"
    proposer.on_introduced(D, Introduced(JOB, b"another!"), 0.2)
    assert not accepts(proposer.regroup(make_view(A, (A, B, D)), 0.3)), "it answers for another disk"
    assert not accepts(proposer.regroup(view, ASK_AGAIN_S)) and proposer.config == GROUP


def test_newcomer_that_cannot_vote_is_passed_over() -> None:
    proposer = make_proposer()
    view = make_view(A, (A, B, D, E))
    (first,) = introduced_to(proposer.regroup(view, 0.0))
    (other,) = {D, E} - {first}
    proposer.on_introduced(first, Introduced(JOB, DISK, "it cannot read the job"), 0.0)
    assert introduced_to(proposer.regroup(view, 0.0)) == {other}
    assert introduced_to(proposer.regroup(view, ANSWER_S)) == set(), "both are unfit now: the old group stays"
    assert proposer.config == GROUP


def test_group_with_a_silent_newcomer_is_given_up() -> None:
    proposer = make_joint()
    joint = proposer.config
    proposer.on_accepted(A, accepted(2))
    assert proposer.regroup(make_view(A, (A, B, D)), ANSWER_S - 0.1) == []
    old = accepts(proposer.regroup(make_view(A, (A, B, D)), ANSWER_S))
    assert set(old) == {A, B, C, D}, "the newcomer is told too"
    assert proposer.config == Config(joint.number + 1, TERM, GROUP.members)
    assert proposer.on_accepted(B, accepted(2)) == Decided(0.0, FIRST, joint, renews=True), (
        "a late answer decides the joint round"
    )
    assert proposer.config.members == GROUP.members and proposer.config.order > joint.order, "and changes no group"
    soon, later = ANSWER_S + 1.0, ANSWER_S + UNFIT_S
    assert proposer.regroup(make_view(A, (A, B, D)), soon) == [], "it is left alone for a while"
    assert introduced_to(proposer.regroup(make_view(A, (A, B, D)), later)) == {D}, "and has to answer again"
    assert introduced_to(proposer.regroup(make_view(A, (A, B, D)), later + ANSWER_S)) == set()
    assert proposer.regroup(make_view(A, (A, B, D)), later + ANSWER_S + UNFIT_S) == [], "longer each time"


def test_group_that_answers_waits_for_the_old_one() -> None:
    proposer = make_joint()
    for node in (A, D):
        proposer.on_accepted(node, accepted(1))
    assert proposer.regroup(make_view(A, (A, B, D)), 10 * ANSWER_S) == [], "what it lacks is votes of the old group"
    assert proposer.config.previous


def test_group_is_named_only_once_most_of_it_has_answered() -> None:
    """This node's view may be out of date: A may have lost its disk."""
    proposer, view = make_proposer(), make_view(A, (A,))
    proposer.propose(0.0)
    proposer.on_accepted(A, accepted(1))
    assert set(accepts(proposer.regroup(view, 1.0))) == {A, B, C} and proposer.config == GROUP, "that was before"
    for node in (B, C):
        proposer.on_accepted(node, accepted(2))
    assert proposer.regroup(view, 1.0 + ASK_AGAIN_S / 2) == []
    assert accepts(proposer.regroup(view, 10 * ANSWER_S)) and proposer.config == GROUP, "it is asked again"
    proposer.on_accepted(A, accepted(3))
    assert accepts(proposer.regroup(view, 10 * ANSWER_S)) and proposer.config == GROUP.joint(voters(A), TERM)


def test_group_that_no_longer_answers_is_given_up() -> None:
    proposer, view = make_proposer(), make_view(A, (A,))
    proposer.regroup(view, 0.0)
    proposer.on_accepted(A, accepted(1))
    assert accepts(proposer.regroup(view, 0.0)) and proposer.config.members == voters(A)
    for node in (B, C):
        proposer.on_accepted(node, accepted(2))
    assert accepts(proposer.regroup(view, ANSWER_S)) and proposer.config.members == GROUP.members
    assert not proposer.config.previous
    assert accepts(proposer.regroup(view, ANSWER_S)) and proposer.config.members == GROUP.members, "all answer again"


def test_joint_group_of_an_earlier_term_is_given_up_too() -> None:
    joint = GROUP.joint(voters(A, B, D), TERM)
    proposer = make_proposer(joint)
    proposer.propose(100.0)
    view = make_view(A, (A, B, C, D))
    assert proposer.regroup(view, 100.0 + ANSWER_S - 0.1) == []
    assert proposer.regroup(view, 100.0 + ANSWER_S) and proposer.config.members == GROUP.members


def test_rounds_carry_the_description_to_newcomers_that_have_not_answered() -> None:
    proposer = make_joint()

    def described(now: float) -> set[bytes]:
        return {node for node, accept in accepts(proposer.propose(now)).items() if accept.spec is not None}

    assert described(1.0) == {D}
    proposer.on_accepted(D, accepted(2, TERM - 1))
    assert described(2.0) == {D}, "that was to an earlier term"
    proposer.on_accepted(D, accepted(3))
    assert described(3.0) == set()


def test_warrants_are_those_of_the_group() -> None:
    without = make_proposer()
    without.propose(0.0)
    without.on_accepted(A, accepted(1))
    assert without.introduction().warrants == (), "nobody gave one"
    proposer = Proposer(JOB, SPEC_BYTES, TERM, GROUP, FIRST, D, warrant=b"leader's")
    proposer.propose(0.0)
    for node, warrant in ((A, b"a's"), (E, b"stranger's")):
        proposer.on_accepted(node, accepted(1, warrant=warrant))
    assert set(proposer.introduction().warrants) == {b"leader's", b"a's"}
    proposer.config = Config(number=1, term=TERM, members=voters(B, C, D))
    proposer.propose(1.0)
    proposer.on_accepted(B, accepted(2, warrant=b"b's"))
    assert set(proposer.introduction().warrants) == {b"leader's", b"b's"}


def test_open_rounds_are_bounded() -> None:
    proposer = make_proposer()
    for number in range(MAX_OPEN_ROUNDS + 1):
        proposer.propose(float(number))
    assert [proposer.on_accepted(node, accepted(1)) for node in (A, B, C)] == [None] * 3, "the oldest is dropped"
    proposer.on_accepted(A, accepted(2))
    assert isinstance(proposer.on_accepted(B, accepted(2)), Decided)


def test_group_is_odd_and_never_empty() -> None:
    assert healthy_group(JOB, GROUP, make_view(A, ()), 3) == voters(A)
    assert healthy_group(JOB, GROUP, make_view(A, (A, B)), 3) == GROUP.members, "an old member is better than two"
    four = Config(number=0, term=1, members=voters(A, B, C, D))
    assert len(healthy_group(JOB, four, make_view(A, (A, B, C, D)), 3)) == 3
    two = Config(number=0, term=1, members=voters(A, B))
    assert healthy_group(JOB, two, make_view(A, (A, B)), 3) == voters(A)


def test_member_that_lost_its_disk_or_leaves_is_replaced() -> None:
    disks = {**dict.fromkeys((A, B, D), DISK), C: b"another!"}
    assert set(healthy_group(JOB, GROUP, make_view(A, (A, B, C, D), disks=disks), 3)) - set(voters(A, B)) <= {
        Voter(C, b"another!"),
        Voter(D, DISK),
    }
    leaving = make_view(A, (A, B, C, D), leaving=frozenset({C}))
    assert set(healthy_group(JOB, GROUP, leaving, 3)) == set(voters(A, B, D))
    assert set(healthy_group(JOB, GROUP, leaving, 3, unfit={D})) == set(voters(A, B, C))


def test_even_group_keeps_the_old_member_that_may_return() -> None:
    """B is dead and kept its disk; C is alive and lost its own, with its promises."""
    disks = {A: DISK, B: DISK, C: b"another!"}
    five = Config(number=0, term=1, members=voters(A, C, B))
    group = healthy_group(JOB, five, make_view(A, (A, E), disks={**disks, E: DISK}), 3)
    assert set(group) == {Voter(A, DISK), Voter(E, DISK), Voter(B, DISK)}
