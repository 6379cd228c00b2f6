"""A gang's runner and its members, message by message."""

import pytest

from membership.lengths import SAID
from mesh.consensus.contract import describe_exit
from mesh.consensus.effects import (
    Effect,
    Ended,
    Kill,
    Launch,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    StateChanged,
)
from mesh.consensus.gang import ASK_AGAIN_S, FORSAKEN_LEASES, GATHER_S, KEPT_S, Gang, GangMember, RankFailed, of_ranks
from mesh.consensus.messages import (
    Begin,
    Dismiss,
    Enlist,
    Enlisted,
    ExtendRun,
    GangMessage,
    GangPlace,
    MemberEnded,
    MemberLeaving,
    RunGranted,
)
from mesh.consensus.participant import on_member_report
from mesh.consensus.reports import (
    CancelWanted,
    CheckpointStored,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    ResultStored,
    RunnerEvent,
    VacateWanted,
)
from mesh.consensus.runner import Runner
from mesh.consensus.view import Timer
from mesh.consensus.witness import HELD_SHARE
from mesh.model.record import JobRecord
from mesh.model.spec import Checkpointing, format_job
from tests.consensus.worlds import DISK, JOB, SPEC_BYTES, A, B, C, D, E, at, make_spec, make_start, make_view

LEASE_S = 15.0
B_FAILED, C_FAILED = RankFailed(1, "b", 1, ""), RankFailed(2, "c", 3, "")
GANG = {"least_nodes": 2, "most_nodes": 3, "checkpointing": None}


def says(effects: list[Effect], kind: type) -> list[tuple[bytes, GangMessage]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]  # type: ignore[misc]


def make_gang(**changes: object) -> Gang:
    return Gang(JOB, make_spec(**{**GANG, **changes}), SPEC_BYTES, 1)


def enlisted(taken: bool = True) -> Enlisted:
    return Enlisted(job=JOB, term=1, taken=taken, reason="" if taken else "full")


def under_way(**changes: object) -> Gang:
    """Two members, B and C, that have begun at second 0."""
    gang = make_gang(**changes)
    gang.gather([(B, "b"), (C, "c")], JobRecord(), at(0))
    for node in (B, C):
        gang.on_enlisted(node, enlisted(), at(0))
    gang.begin("host", 1, JobRecord(), at(0))
    return gang


class TestLeader:
    def test_gang_enlists_at_most_its_size_and_others_after_a_decline(self) -> None:
        gang, places = make_gang(), [(B, "b"), (C, "c"), (D, "d")]
        assert [send.to for send in gang.gather(places, JobRecord(), at(0))] == [B, C]
        gang.on_enlisted(B, enlisted(False), at(0))
        assert [send.to for send in gang.gather(places, JobRecord(), at(0.5))] == [C, D], "silent nodes are asked again"
        assert gang.gathered(1.0) is None
        for node in (C, D):
            gang.on_enlisted(node, enlisted(), at(1))
        assert gang.gathered(1.0) is True

    def test_gang_asks_a_node_that_declined_again_after_a_while(self) -> None:
        gang, places = make_gang(), [(B, "b"), (C, "c")]
        for now in (0.0, ASK_AGAIN_S, 2 * ASK_AGAIN_S):
            gang.gather(places, JobRecord(), at(now))
            gang.on_enlisted(B, enlisted(False), at(now))
            early = gang.gather(places, JobRecord(), at(now + 0.9 * ASK_AGAIN_S))
            assert [send.to for send in early] == [C], "its answer is not answered at once"
        assert [send.to for send in gang.gather(places, JobRecord(), at(3 * ASK_AGAIN_S))] == [C, B]

    @pytest.mark.parametrize(("joined", "enough"), [((), False), ((B,), True)])
    def test_gang_begins_with_the_fewest_only_after_waiting(self, joined: tuple[bytes, ...], enough: bool) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], JobRecord(), at(0))
        for node in joined:
            gang.on_enlisted(node, enlisted(), at(0))
        assert gang.gathered(GATHER_S - 0.1) is None and gang.gathered(GATHER_S) is enough

    def test_gang_dismisses_members_that_join_too_late(self) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], JobRecord(), at(0))
        gang.on_enlisted(B, enlisted(), at(0))
        place, sends = gang.begin("host", 7, JobRecord(), at(GATHER_S))
        assert place == GangPlace(0, 2, "host", 7) and [to for to, _ in says(list(sends), Dismiss)] == [C]
        assert [m.place for _, m in says(list(sends), Begin)] == [GangPlace(1, 2, "host", 7)]  # type: ignore[union-attr]
        assert says(list(gang.on_enlisted(C, enlisted(), at(9))), Dismiss)

    def test_answers_to_a_question_that_was_repeated_dismiss_nobody(self) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], JobRecord(), at(0))
        gang.on_enlisted(B, enlisted(), at(0))
        gang.begin("host", 7, JobRecord(), at(GATHER_S))
        assert gang.on_enlisted(B, enlisted(), at(9)) == [], "it has its place"
        assert gang.on_enlisted(C, enlisted(False), at(9)) == [], "it has reserved none"

    def test_ended_members_are_not_dismissed(self) -> None:
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=0), at(3))
        assert [send.to for send in gang.dismiss(9.0, "its owner", 3.0)] == [C]
        assert [send.to for send in gang.disband()] == [C]

    def test_gang_extends_no_member_beyond_the_lease(self) -> None:
        gang = under_way()
        ((_, run),) = says(list(gang.on_may_run(B, ExtendRun(job=JOB, term=1, round=4), 9.0, at(1))), RunGranted)
        assert run == RunGranted(job=JOB, term=1, round=4, left_s=9.0)
        assert not gang.quiet(9.9) and gang.quiet(10.0)
        gang.disband()
        assert says(list(gang.on_may_run(B, ExtendRun(job=JOB, term=1, round=5), 9.0, at(2))), Dismiss)
        assert gang.quiet(10.0), "a refused extension does not count"
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=137), at(3))
        assert gang.quiet(3.0) and not gang.failed, "a dismissed member does not fail"

    def test_member_that_has_ended_gets_no_more_time(self) -> None:
        """Regression: late copies of `Enlist` and `Begin` made a member begin again, and it ran after the end of its job."""
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=0), at(3))
        answers = [send.message for send in gang.on_may_run(B, ExtendRun(job=JOB, term=1, round=4), 9.0, at(4))]
        assert answers == [Dismiss(job=JOB, term=1, grace_s=0.0, reason="its attempt is over")]

    def test_member_that_fails_after_a_loss_is_not_blamed(self) -> None:
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=1), at(5))
        assert gang.failed == [B_FAILED] and not gang.sure()
        gang.look(LEASE_S + 0.1)
        assert gang.sure() and gang.broken == "rank 2 on c: lost"
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=1), at(5))
        for number in (1, 2):
            assert not gang.sure(), "the first message may have been sent before the loss"
            gang.on_may_run(C, ExtendRun(job=JOB, term=1, round=number), 9.0, at(6))
        assert gang.sure() and not gang.broken
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=1), at(5))
        for number in (1, 2):
            gang.on_may_run(C, ExtendRun(job=JOB, term=1, round=number), 9.0, at(6))
        assert gang.sure(), "they count from the failure"

    def test_questions_before_the_runners_guest_failed_do_not_count(self) -> None:
        gang = under_way()
        for number in (1, 2, 3, 4):
            assert number < 3 or not gang.sure()
            for node in (B, C):
                gang.on_may_run(node, ExtendRun(job=JOB, term=1, round=number), 9.0, at(number))
        assert gang.sure()

    def test_end_of_a_member_counts_once(self) -> None:
        gang = under_way()
        for code in (1, 0, 2):  # a member repeats its report until it is dismissed
            gang.on_ended(B, MemberEnded(job=JOB, term=1, code=code), at(5))
        assert gang.failed == [B_FAILED]

    def test_first_failure_may_be_reported_last(self) -> None:
        for code, told in ((3, [B_FAILED, C_FAILED]), (0, [B_FAILED]), (85, [B_FAILED]), (143, [B_FAILED])):
            gang = under_way()
            gang.on_ended(B, MemberEnded(job=JOB, term=1, code=1), at(5))
            gang.dismiss(9.0, "a member failed", 2.0)
            gang.on_ended(C, MemberEnded(job=JOB, term=1, code=code), at(6))
            assert gang.failed == told and gang.sure() and not gang.broken
        gang = under_way()
        gang.dismiss(9.0, "its owner", 2.0)
        gang.on_ended(C, MemberEnded(job=JOB, term=1, code=1), at(6))
        assert gang.failed == [], "the other members left because they were dismissed"

    def test_member_that_leaves_or_never_started_is_not_a_failure(self) -> None:
        gang = under_way()
        gang.on_leaving(B, MemberLeaving(job=JOB, term=1, grace_s=5.0, reason="its owner"))
        assert gang.broken == "rank 1 on b: its owner"
        gang = under_way()
        gang.on_ended(C, MemberEnded(job=JOB, term=1, code=1, problem="could not start: no room"), at(1))
        assert gang.broken == "rank 2 on c: could not start: no room"

    def test_only_a_member_that_has_begun_may_run(self) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], JobRecord(), at(0))
        gang.on_enlisted(B, enlisted(), at(0))
        ask = ExtendRun(job=JOB, term=1, round=1)
        assert says([*gang.on_may_run(B, ask, 9.0, at(1))], Dismiss), "the gang has not begun"
        assert says([*gang.on_may_run(E, ask, 9.0, at(1))], Dismiss)

    def test_member_hears_of_its_dismissal_again_when_it_asks_for_more_time(self) -> None:
        """Regression (simulator seed 1264016): the notice was lost, and the member ran until its runner had saved."""
        gang = under_way()
        gang.dismiss(9.0, "its time is over", 10.0)
        for now, left_s in ((12, 7.0), (19, 0.0), (30, 0.0)):
            told = gang.on_may_run(B, ExtendRun(job=JOB, term=1, round=1), 9.0, at(now))
            again = Dismiss(job=JOB, term=1, grace_s=left_s, reason="its time is over")
            assert says([*told], RunGranted) and says([*told], Dismiss) == [(B, again)]
        gang.dismiss(1.0, "its runner has ended", 11.0)
        told = gang.on_may_run(B, ExtendRun(job=JOB, term=1, round=1), 9.0, at(12))
        again = Dismiss(job=JOB, term=1, grace_s=7.0, reason="its time is over")
        assert says([*told], Dismiss) == [(B, again)], "nobody loses the notice that they have"

    def test_member_that_has_ended_is_not_lost(self) -> None:
        gang = under_way()
        gang.on_ended(B, MemberEnded(job=JOB, term=1, code=0), at(1))
        gang.on_may_run(C, ExtendRun(job=JOB, term=1, round=1), 9.0, at(2 * LEASE_S))
        gang.look(2 * LEASE_S)
        assert gang.broken == ""

    def test_gang_is_quiet_once_no_grant_can_run(self) -> None:
        gang = under_way()
        ask = ExtendRun(job=JOB, term=1, round=1)
        gang.on_may_run(B, ask, 10.0, at(1))
        gang.on_may_run(C, ask, 2.0, at(1))
        gang.on_may_run(B, ask, 1.0, at(2))
        assert not gang.quiet(5.0), "the first grant of B runs until second 11"
        assert not gang.quiet(10.9) and gang.quiet(11.0)


class MemberState:
    """A gang member with its latest effects."""

    def __init__(self) -> None:
        self.member = GangMember(A, Enlist(job=JOB, term=1, number=0, spec=SPEC_BYTES), make_spec(**GANG))
        self.effects = self.member.begin(at(0))

    def begin(self, now: float = 1.0) -> list[Effect]:
        self.effects = self.member.on_begin(
            Begin(job=JOB, term=1, place=GangPlace(1, 2, "h", 1), record=JobRecord()), at(now)
        )
        return self.effects

    def timer(self, name: str, effects: list[Effect] | None = None) -> list[Effect]:
        timer = [e for e in (effects or self.effects) if isinstance(e, SetTimer) and e.name == name][-1]
        return self.member.on_timer(Timer(timer.name, timer.token), at(timer.at))

    def run(self, number: int, left_s: float, now: float) -> list[Effect]:
        return self.member.on_run(RunGranted(job=JOB, term=1, round=number, left_s=left_s), at(now))

    def dismiss(self, grace_s: float, now: float = 5.0) -> list[Effect]:
        return self.member.on_dismiss(Dismiss(job=JOB, term=1, grace_s=grace_s, reason="over"), at(now))


class TestMember:
    def test_member_keeps_its_place_for_a_while(self) -> None:
        member = MemberState()
        assert member.timer("kept") == [Ended("its runner did not begin")] and KEPT_S > GATHER_S
        begun = MemberState()
        kept = begun.effects
        assert any(isinstance(effect, Launch) and effect.place is not None for effect in begun.begin())
        assert begun.timer("kept", kept) == [], "it is in use"
        assert begun.begin() == [], "a late copy begins no second guest"

    def test_member_counts_its_time_from_its_question(self) -> None:
        member = MemberState()
        ((_, asked),) = says(member.begin(1.0), ExtendRun)
        (allowed,) = member.run(asked.round, 10.0, now=8.0)  # type: ignore[union-attr]
        assert allowed == RunUntil(1.0 + 10.0 * HELD_SHARE)
        assert member.run(asked.round, 99.0, now=8.0) == [], "one answer to one question"  # type: ignore[union-attr]

    def test_time_is_over_when_its_clock_has_stood_still(self) -> None:
        member = MemberState()
        member.begin(0.0)
        member.run(1, 15.0, 1.0)
        asked = says(member.timer("ask"), ExtendRun)
        stopped, *again = member.member.clock_stood(at(6.0))
        assert stopped == RunUntil(6.0) and member.member.until == 6.0
        ((_, late),) = asked
        assert member.run(late.round, 15.0, 6.0) == [], "it was asked before"  # type: ignore[union-attr]
        ((_, question),) = says(again, ExtendRun)
        assert member.run(question.round, 15.0, 6.5), "and now it is asked anew"  # type: ignore[union-attr]

    def test_questions_without_an_answer_are_bounded(self) -> None:
        member = MemberState()
        effects = member.begin(0.0)
        for number in range(2, 42):  # every second answer is lost
            timer = next(effect for effect in effects if isinstance(effect, SetTimer))
            effects = member.timer("ask", effects)
            if number % 2:
                member.run(number, 15.0, timer.at)
        assert len(member.member._asked) <= 8

    def test_late_grant_takes_no_time_away(self) -> None:
        member = MemberState()
        effects = member.begin(0.0)
        member.timer("ask", effects)
        member.run(2, 15.0, 5.1)
        until = member.member.until
        assert until > 15.0 and member.run(1, 15.0, 5.2) == [] and member.member.until == until

    def test_member_runs_no_longer_than_a_lease(self) -> None:
        member = MemberState()
        member.begin()
        assert member.run(1, 1.0, 2.0) == [] and member.member.until == 0.0, "the answer came too late"
        member.timer("ask")
        member.run(2, 1e9, 7.0)
        assert member.member.until <= 7.0 + LEASE_S

    def test_member_gives_up_on_a_lost_runner(self) -> None:
        member = MemberState()
        effects = member.begin(0.0)
        member.member.started()
        for _ in range(3 * FORSAKEN_LEASES):
            effects = member.timer("ask", effects)
        assert [type(e) for e in member.timer("ask", effects)] == [Kill, Ended]

    def test_member_repeats_its_end_until_dismissed(self) -> None:
        member = MemberState()
        member.begin()
        member.member.started()
        effects = member.member.exited(3, "", at(2))
        assert says(effects, MemberEnded) == says(member.timer("ask", effects), MemberEnded) != []
        assert Ended("over") in member.dismiss(0.0)

    def test_member_leaves_when_dismissed_in_any_state(self) -> None:
        assert Ended("over") in MemberState().dismiss(9.0), "the member has a slot and no guest"
        starting = MemberState()
        starting.begin()
        assert Ended("over") in starting.dismiss(0.0)
        running = MemberState()
        running.begin()
        running.member.started()
        assert Notify("vacate", 9.0, "over") in running.dismiss(9.0)
        assert running.dismiss(0.0) == [Kill("over")]
        end = running.member.exited(137, "", at(6))
        assert says(end, MemberEnded) and Ended("done") in end

    def test_member_that_is_dismissed_ends_through_no_fault_of_its_own(self) -> None:
        """A late copy of a dismissal of its term may reach it: then its runner did not mean this guest."""
        unstarted, starting, running, told = MemberState(), MemberState(), MemberState(), MemberState()
        for member in (starting, running, told):
            member.begin()
        for member in (running, told):
            member.member.started()
        running.dismiss(0.0)
        told.dismiss(9.0)
        ends = [unstarted.dismiss(0.0), starting.dismiss(0.0)]
        ends += [running.member.exited(137, "", at(6)), told.member.exited(143, "", at(6))]
        assert [(end.code, end.problem) for effects in ends for _, end in says(effects, MemberEnded)] == [  # type: ignore[union-attr]
            (0, "over"),
            (0, "over"),
            (137, "over"),
            (143, "over"),
        ]

    def test_member_that_is_dismissed_after_its_end_reports_that_end(self) -> None:
        member = MemberState()
        member.begin()
        member.member.started()
        member.member.exited(3, "", at(2))
        ((_, end),) = says(member.dismiss(0.0), MemberEnded)
        assert (end.code, end.problem) == (3, "")  # type: ignore[union-attr]

    def test_fault_of_a_members_node_is_no_failure_of_its_guest(self) -> None:
        member = MemberState()
        member.begin()
        ((_, ended),) = says(
            on_member_report(member.member, GuestExited(1, False, False, fault="its GPU is gone"), at(3)), MemberEnded
        )
        assert ended.problem == "its GPU is gone"  # type: ignore[union-attr]

    def test_end_of_a_guest_is_told_as_its_own_node_knows_it(self) -> None:
        for report, code, how in (
            (GuestExited(137, True, False), 137, describe_exit(137, oom=True)),
            (GuestFailed("command 'x' is not here", elsewhere=False, exit_code=127), 127, "command 'x' is not here"),
        ):
            member = MemberState()
            member.begin()
            ((_, ended),) = says(on_member_report(member.member, report, at(3)), MemberEnded)
            assert ended == MemberEnded(job=JOB, term=1, code=code, how=how), "no node would do better"

    def test_member_obeys_its_owner_and_tells_the_runner(self) -> None:
        member = MemberState()
        member.begin()
        member.member.started()
        effects = member.member.vacate(9.0, "the owner", at(2))
        assert says(effects, MemberLeaving) and Notify("vacate", 9.0, "the owner") in effects
        again = member.member.vacate(90.0, "the owner", at(2))
        assert says(again, MemberLeaving) and len(again) == 1, "one notice, whose grace is not prolonged"
        assert member.timer("grace", effects) == [Kill("grace of the notice is over")]
        ((_, ended),) = says(member.member.exited(137, "", at(3)), MemberEnded)
        assert ended.problem == "the owner", "the end repeats the reason, because the notice may be lost"  # type: ignore[union-attr]
        assert member.timer("grace", effects) == [], "it has ended"
        waiting = MemberState().member.vacate(9.0, "the owner", at(2))
        assert says(waiting, MemberLeaving) and Ended("the owner") in waiting


class TestRunner:
    """The runner of a gang, with its members and with witnesses that accept everything."""

    def lead(self, **changes: object) -> tuple[Runner, list[Effect]]:
        view = make_view(D, (A, B, C, D, E))
        runner = Runner(D, "d", make_start(), make_spec(**{**GANG, **changes}), at(0), view, lambda: ("here", 7))
        runner.begin(at(0))
        return runner, self.agree(runner, 0.0)

    def agree(self, runner: Runner, now: float) -> list[Effect]:
        from mesh.consensus.messages import Accepted

        rounds = list(runner._proposer._open)
        out: list[Effect] = []
        for number in rounds:
            for node in (A, B):
                out += runner.on_accepted(node, Accepted(job=JOB, term=1, disk=DISK, round=number), at(now))
        return out

    def begun(self, **changes: object) -> tuple[Runner, list[bytes]]:
        runner, effects = self.lead(**changes)
        asked = [to for to, _ in says(effects, Enlist)]
        for node in asked:
            effects = runner.on_gang(node, enlisted(), at(1))
        assert any(isinstance(effect, Launch) and effect.place == GangPlace(0, 3, "here", 7) for effect in effects)
        runner.handle(GuestStarted(None), at(1))
        self.agree(runner, 1.0)
        return runner, asked

    def test_runner_with_too_few_members_dismisses_all_and_releases(self) -> None:
        runner, effects = self.lead(least_nodes=3)
        asked = [to for to, _ in says(effects, Enlist)]
        runner.on_gang(asked[0], enlisted(), at(1))
        timer = SetTimer("gang", runner._tokens._latest["gang"], GATHER_S + 1)
        effects = runner.on_timer(Timer(timer.name, timer.token), at(timer.at))
        assert {to for to, _ in says(effects, Dismiss)} == set(asked) and runner.state == "releasing"
        assert runner.attempt.reason == "only 2 of 3 nodes had a place at the same time" and not runner.attempt.fault

    def test_lease_is_kept_while_a_member_may_run(self) -> None:
        runner, (first, second) = self.begun()
        for node in (first, second):
            runner.on_gang(node, ExtendRun(job=JOB, term=1, round=1), at(2))
        runner.handle(GuestExited(0, False, forced_done=True), at(3))
        effects = runner.handle(ResultStored(None, ()), at(3))
        assert runner.state == "disbanding" and len(says(effects, Dismiss)) == 2 and runner.record.outcome is None
        (timer,) = [effect for effect in effects if isinstance(effect, SetTimer)]
        again = runner.on_timer(Timer(timer.name, timer.token), at(timer.at))
        assert timer.at < 4 and len(says(again, Dismiss)) == 2, "the first ones may be lost"
        assert {message.grace_s for _, message in says(effects, Dismiss)} == {0.0}  # type: ignore[union-attr]
        runner.on_gang(first, MemberEnded(job=JOB, term=1, code=0), at(4))
        assert runner.state == "disbanding"
        runner.on_gang(second, MemberEnded(job=JOB, term=1, code=0), at(4))
        assert runner.state == "releasing" and runner.record.outcome is not None

    def test_failure_of_the_runners_guest_waits_for_reports_of_members(self) -> None:
        runner, (first, second) = self.begun()
        runner.on_gang(first, ExtendRun(job=JOB, term=1, round=1), at(2))
        assert runner.handle(GuestExited(1, False, False), at(3))[1:] == [] and runner.state == "asking"
        for number in (2, 3):
            runner.on_gang(first, ExtendRun(job=JOB, term=1, round=number), at(4))
        runner.on_gang(second, MemberLeaving(job=JOB, term=1, grace_s=1.0, reason="its owner"), at(4))
        assert "its owner" in runner._ending and runner._ending.startswith("vacated")
        runner, members = self.begun()
        runner.handle(GuestExited(1, False, False), at(3))
        for node in (*members, *members):
            assert runner.state == "asking"
            runner.on_gang(node, ExtendRun(job=JOB, term=1, round=2), at(4))
        assert runner._ending == "failed (exit 1)"

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (85, "asked to run again"),
            (75, "asked for other nodes (rank 1 on node-1: exit 75; see "),
        ],
    )
    def test_members_that_ask_to_run_again_are_no_failure(self, code: int, reason: str) -> None:
        runner, (first, second) = self.begun(error_budget=0, checkpointing=Checkpointing())
        for node in (first, second):
            runner.on_gang(node, MemberEnded(job=JOB, term=1, code=code), at(2))
        runner.handle(GuestExited(143, False, False), at(3))
        runner.handle(CheckpointStored(None, (), None), at(3))
        assert runner._ending.startswith(reason) and runner.record.errors == 0 and runner.record.outcome is None

    def test_fault_of_the_runners_node_is_no_failure_of_the_gang(self) -> None:
        runner, (first, second) = self.begun(error_budget=0)
        runner.handle(GuestExited(1, False, False, fault="its GPU is gone"), at(3))
        for node in (first, second):
            runner.on_gang(node, MemberEnded(job=JOB, term=1, code=1), at(4))
        assert runner._ending == "its GPU is gone (exit 1)" and runner.record.errors == 0

    def test_notice_reaches_every_member(self) -> None:
        runner, members = self.begun()
        effects = runner.handle(VacateWanted(9.0, "the owner"), at(3))
        assert {to for to, _ in says(effects, Dismiss)} == set(members)

    def test_member_that_leaves_means_notice_for_all(self) -> None:
        runner, (first, second) = self.begun()
        leaving = MemberLeaving(job=JOB, term=1, grace_s=1.0, reason="its owner")
        late = runner.on_gang(first, MemberLeaving(job=JOB, term=0, grace_s=1.0, reason="its owner"), at(2))
        assert [(to, message.term) for to, message in says(late, Dismiss)] == [(first, 0)], "of an earlier attempt"
        assert runner.state == "running"
        effects = runner.on_gang(first, leaving, at(2))
        assert {to for to, _ in says(effects, Dismiss)} == {first, second} and runner.state == "vacating"

    def awaiting(self, **changes: object) -> tuple[Runner, list[bytes]]:
        """Return a runner whose own guest has ended well while those of its members run on."""
        runner, members = self.begun(**changes)
        for node in members:
            runner.on_gang(node, ExtendRun(job=JOB, term=1, round=1), at(2))
        effects = runner.handle(GuestExited(0, False, False), at(3))
        if any(isinstance(effect, SaveCheckpoint) for effect in effects):
            assert runner.state == "saving"
            effects = runner.handle(CheckpointStored(None, (), None), at(3))
        assert runner.state == "awaiting" and says(effects, Dismiss) == []
        assert effects[-1] == StateChanged("running", "rank 0 has ended, waiting for node-1, node-5")
        return runner, members

    def test_gang_is_done_once_the_guests_of_all_are(self) -> None:
        runner, (first, second) = self.awaiting()
        runner.on_gang(first, MemberEnded(job=JOB, term=1, code=0), at(4))
        assert runner.state == "awaiting"
        effects = runner.on_gang(second, MemberEnded(job=JOB, term=1, code=0), at(5))
        assert any(isinstance(effect, SaveResult) for effect in effects) and runner._ending == "done"

    def test_guest_may_end_its_gang_at_once(self) -> None:
        runner, _ = self.begun()
        runner.handle(GuestExited(0, False, forced_done=True), at(3))
        assert runner._ending == "done"

    def test_member_that_fails_after_the_runners_guest_fails_the_attempt(self) -> None:
        runner, (first, second) = self.awaiting(error_budget=0)
        runner.on_gang(first, MemberEnded(job=JOB, term=1, code=3), at(4))
        assert runner.state == "asking"
        runner.on_gang(second, MemberEnded(job=JOB, term=1, code=0), at(4))
        runner.handle(ResultStored(None, ()), at(5))
        outcome = runner.record.outcome
        assert outcome is not None and (outcome.kind, outcome.exit_code) == ("failed", 3)
        assert outcome.detail == f"failed (rank 1 on node-1: exit 3; see `mesh logs --rank 1 {format_job(JOB)[:8]}`)"

    def test_many_failed_ranks_leave_room_for_the_command_that_shows_more(self) -> None:
        ranks = [RankFailed(number, f"node-{number}", 1, "x" * 999) for number in range(1, 40)]
        words = of_ranks(ranks, JOB)
        assert len(words) < SAID - 100 and "rank 4 on node-4: x" in words and "rank 5" not in words
        assert words.endswith(f"and 35 more; see `mesh logs --rank 1 {format_job(JOB)[:8]}`")

    @pytest.mark.parametrize("checkpointing", [None, Checkpointing()])
    @pytest.mark.parametrize(
        ("happens", "why"),
        [
            (VacateWanted(9.0, "the owner"), "vacated: the owner"),
            (KillWanted("the switch"), "vacated: the switch"),
            (CancelWanted(), "cancelled"),
        ],
    )
    def test_gang_that_waits_for_a_member_ends_at_once_when_it_must(
        self, happens: RunnerEvent, why: str, checkpointing: Checkpointing | None
    ) -> None:
        runner, members = self.awaiting(checkpointing=checkpointing)
        effects = runner.handle(happens, at(4))
        effects += runner.handle(ResultStored(None, ()), at(4)) if why == "cancelled" else []
        assert runner._ending == why and {to for to, _ in says(effects, Dismiss)} == set(members)

    def test_gang_whose_time_is_up_while_it_waits_fails(self) -> None:
        runner, _ = self.awaiting(max_time_s=60.0)
        timer = Timer("max time", runner._tokens._latest["max time"])
        runner.on_timer(timer, at(61))
        assert runner._ending == "failed (it has run for its 60 s)"

    def test_gang_that_loses_a_member_after_the_runners_guest_runs_again(self) -> None:
        runner, (first, _) = self.awaiting()
        runner.on_gang(first, MemberLeaving(job=JOB, term=1, grace_s=1.0, reason="its owner"), at(4))
        assert runner._ending.startswith("vacated: ") and "its owner" in runner._ending

    def test_gang_that_must_leave_is_not_done_because_its_first_guest_is(self) -> None:
        runner, members = self.begun()
        runner.handle(VacateWanted(9.0, "the owner"), at(3))
        for node in members:
            runner.on_gang(node, MemberEnded(job=JOB, term=1, code=0), at(4))
        runner.handle(GuestExited(0, False, False), at(5))
        assert runner._ending == "vacated: the owner", "the members ended because they had to"

    def test_fenced_runner_dismisses_its_gang(self) -> None:
        runner, members = self.begun()
        effects = runner.fenced()
        assert {to for to, _ in says(effects, Dismiss)} == set(members)
        assert says(runner.on_gang(members[0], ExtendRun(job=JOB, term=1, round=1), at(2)), Dismiss)

    def test_cancel_while_gathering_ends_the_job(self) -> None:
        runner, _ = self.lead()
        runner.handle(CancelWanted(), at(1))
        late = at(GATHER_S + 2)  # while the result is being stored
        runner.on_timer(Timer("gang", runner._tokens._latest["gang"]), late)
        runner.handle(ResultStored(None, ()), late)
        outcome = runner.record.outcome
        assert outcome is not None and (outcome.kind, outcome.detail) == ("cancelled", "cancelled")
