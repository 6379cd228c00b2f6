"""A gang's leader and its mates, message by message."""

import math

import pytest

from mesh.jobs.effects import Effect, Ended, Kill, Launch, Notify, RunUntil, Send, SetTimer
from mesh.jobs.gang import FORSAKEN_LEASES, GATHER_S, KEPT_S, Gang, Member
from mesh.jobs.ledger import Ledger
from mesh.jobs.messages import Begin, Dismiss, Enlist, Enlisted, GangMessage, Leaving, MateEnded, MayRun, Post, Run
from mesh.jobs.reports import CancelWanted, GuestExited, GuestStarted, ResultStored, VacateWanted
from mesh.jobs.runner import Runner
from mesh.jobs.view import Timer
from mesh.jobs.witness import RATE_BOUND
from tests.jobs.worlds import DISK, JOB, SPEC_BYTES, A, B, C, D, E, at, make_spec, make_start, make_view

LEASE_S = 15.0
GANG = {"least_nodes": 2, "most_nodes": 3, "checkpointing": None}


def says(effects: list[Effect], kind: type) -> list[tuple[bytes, GangMessage]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]  # type: ignore[misc]


def make_gang(**changes: object) -> Gang:
    return Gang(JOB, make_spec(**{**GANG, **changes}), SPEC_BYTES, 1)


def enlisted(taken: bool = True) -> Enlisted:
    return Enlisted(job=JOB, term=1, taken=taken, reason="" if taken else "full")


def under_way(**changes: object) -> Gang:
    """Two mates, B and C, that have begun at second 0."""
    gang = make_gang(**changes)
    gang.gather([(B, "b"), (C, "c")], Ledger(), at(0))
    for node in (B, C):
        gang.on_enlisted(node, enlisted(), at(0))
    gang.begin("host", 1, Ledger(), at(0))
    return gang


class TestLeader:
    def test_asks_no_more_than_it_may_have_and_others_when_some_decline(self) -> None:
        gang, places = make_gang(), [(B, "b"), (C, "c"), (D, "d")]
        assert [send.to for send in gang.gather(places, Ledger(), at(0))] == [B, C]
        gang.on_enlisted(B, enlisted(False), at(0))
        assert [send.to for send in gang.gather(places, Ledger(), at(1))] == [C, D], "and again those who are silent"
        assert gang.gathered(1.0) is None
        for node in (C, D):
            gang.on_enlisted(node, enlisted(), at(1))
        assert gang.gathered(1.0) is True

    @pytest.mark.parametrize(("joined", "enough"), [((), False), ((B,), True)])
    def test_takes_the_fewest_only_when_it_has_waited(self, joined: tuple[bytes, ...], enough: bool) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], Ledger(), at(0))
        for node in joined:
            gang.on_enlisted(node, enlisted(), at(0))
        assert gang.gathered(GATHER_S - 0.1) is None and gang.gathered(GATHER_S) is enough

    def test_sends_away_who_comes_too_late(self) -> None:
        gang = make_gang()
        gang.gather([(B, "b"), (C, "c")], Ledger(), at(0))
        gang.on_enlisted(B, enlisted(), at(0))
        post, sends = gang.begin("host", 7, Ledger(), at(GATHER_S))
        assert post == Post(0, 2, "host", 7) and [to for to, _ in says(list(sends), Dismiss)] == [C]
        assert [m.post for _, m in says(list(sends), Begin)] == [Post(1, 2, "host", 7)]  # type: ignore[union-attr]
        assert says(list(gang.on_enlisted(C, enlisted(), at(9))), Dismiss)

    def test_lets_nobody_run_longer_than_its_own_lease_and_is_quiet_when_all_have_stopped(self) -> None:
        gang = under_way()
        ((_, run),) = says(list(gang.on_may_run(B, MayRun(job=JOB, term=1, round=4), 9.0, at(1))), Run)
        assert run == Run(job=JOB, term=1, round=4, left_s=9.0)
        assert not gang.quiet(9.9) and gang.quiet(10.0)
        gang.disband()
        assert says(list(gang.on_may_run(B, MayRun(job=JOB, term=1, round=5), 9.0, at(2))), Dismiss)
        assert gang.quiet(10.0), "what is refused does not count"
        gang.on_ended(B, MateEnded(job=JOB, term=1, code=137), at(3))
        assert gang.quiet(3.0) and not gang.failed, "it was told to"

    def test_a_mate_that_fails_because_another_is_gone_has_not_failed(self) -> None:
        gang = under_way()
        gang.on_ended(B, MateEnded(job=JOB, term=1, code=1), at(5))
        assert gang.failed == [("b", 1)] and not gang.sure()
        gang.look(LEASE_S + 0.1)
        assert gang.sure() and gang.broken == "c: lost"
        gang = under_way()
        gang.on_ended(B, MateEnded(job=JOB, term=1, code=1), at(5))
        for number in (1, 2):
            assert not gang.sure(), "its first word may have been on the way"
            gang.on_may_run(C, MayRun(job=JOB, term=1, round=number), 9.0, at(6))
        assert gang.sure() and not gang.broken

    def test_the_one_that_failed_first_may_be_heard_of_last(self) -> None:
        for code, told in ((3, [("b", 1), ("c", 3)]), (0, [("b", 1)]), (85, [("b", 1)]), (143, [("b", 1)])):
            gang = under_way()
            gang.on_ended(B, MateEnded(job=JOB, term=1, code=1), at(5))
            gang.dismiss(9.0, "a mate failed")
            gang.on_ended(C, MateEnded(job=JOB, term=1, code=code), at(6))
            assert gang.failed == told and gang.sure() and not gang.broken
        gang = under_way()
        gang.dismiss(9.0, "its owner")
        gang.on_ended(C, MateEnded(job=JOB, term=1, code=1), at(6))
        assert gang.failed == [], "its peers have gone, as they were told to"

    def test_a_mate_that_leaves_or_never_started_is_no_failure(self) -> None:
        gang = under_way()
        gang.on_leaving(B, Leaving(job=JOB, term=1, grace_s=5.0, reason="its owner"))
        assert gang.broken == "b: its owner"
        gang = under_way()
        gang.on_ended(C, MateEnded(job=JOB, term=1, code=1, problem="could not start: no room"), at(1))
        assert gang.broken == "c: could not start: no room"


class Mate:
    """One mate, and what it does."""

    def __init__(self) -> None:
        self.member = Member(A, Enlist(job=JOB, term=1, number=0, spec=SPEC_BYTES), make_spec(**GANG))
        self.effects = self.member.begin(at(0))

    def begin(self, now: float = 1.0) -> list[Effect]:
        self.effects = self.member.on_begin(Begin(job=JOB, term=1, post=Post(1, 2, "h", 1), ledger=Ledger()), at(now))
        return self.effects

    def timer(self, name: str, effects: list[Effect] | None = None) -> list[Effect]:
        timer = [e for e in (effects or self.effects) if isinstance(e, SetTimer) and e.name == name][-1]
        return self.member.on_timer(Timer(timer.name, timer.token), at(timer.at))

    def run(self, number: int, left_s: float, now: float) -> list[Effect]:
        return self.member.on_run(Run(job=JOB, term=1, round=number, left_s=left_s), at(now))

    def dismiss(self, grace_s: float, now: float = 5.0) -> list[Effect]:
        return self.member.on_dismiss(Dismiss(job=JOB, term=1, grace_s=grace_s, reason="over"), at(now))


class TestMember:
    def test_keeps_its_place_for_a_while(self) -> None:
        mate = Mate()
        assert mate.timer("kept") == [Ended("its leader did not begin")] and KEPT_S > GATHER_S
        begun = Mate()
        assert any(isinstance(effect, Launch) and effect.post is not None for effect in begun.begin())

    def test_counts_its_time_from_its_own_asking(self) -> None:
        mate = Mate()
        ((_, asked),) = says(mate.begin(1.0), MayRun)
        (allowed,) = mate.run(asked.round, 10.0, now=8.0)  # type: ignore[union-attr]
        assert allowed == RunUntil(1.0 + 10.0 * (1 - RATE_BOUND))
        assert mate.run(asked.round, 99.0, now=8.0) == [], "one answer to one question"  # type: ignore[union-attr]

    @pytest.mark.parametrize("left_s", [0.0, -1.0, math.nan, math.inf, -math.inf])
    def test_takes_no_nonsense_for_time(self, left_s: float) -> None:
        mate = Mate()
        mate.begin()
        assert mate.run(1, left_s, 2.0) == [] and mate.member.until == 0.0
        mate.timer("ask")
        mate.run(2, 1e9, 7.0)
        assert mate.member.until <= 7.0 + LEASE_S, "no longer than a lease"

    def test_gives_up_on_a_leader_that_is_gone(self) -> None:
        mate = Mate()
        effects = mate.begin(0.0)
        mate.member.started()
        for _ in range(3 * FORSAKEN_LEASES):
            effects = mate.timer("ask", effects)
        assert [type(e) for e in mate.timer("ask", effects)] == [Kill, Ended]

    def test_tells_its_end_until_it_is_sent_away(self) -> None:
        mate = Mate()
        mate.begin()
        mate.member.started()
        effects = mate.member.exited(3, "", at(2))
        assert says(effects, MateEnded) == says(mate.timer("ask", effects), MateEnded) != []
        assert Ended("over") in mate.dismiss(0.0)

    def test_goes_when_it_is_told_to_at_any_time(self) -> None:
        assert Ended("over") in Mate().dismiss(9.0), "it has a place and no guest"
        starting = Mate()
        starting.begin()
        assert Ended("over") in starting.dismiss(0.0)
        running = Mate()
        running.begin()
        running.member.started()
        assert Notify("vacate", 9.0, "over") in running.dismiss(9.0)
        assert running.dismiss(0.0) == [Kill("over")]
        end = running.member.exited(137, "", at(6))
        assert says(end, MateEnded) and Ended("done") in end

    def test_its_owner_comes_first_and_the_gang_is_told(self) -> None:
        mate = Mate()
        mate.begin()
        mate.member.started()
        effects = mate.member.vacate(9.0, "the owner", at(2))
        assert says(effects, Leaving) and Notify("vacate", 9.0, "the owner") in effects
        assert mate.timer("grace", effects) == [Kill("grace of the notice is over")]
        ((_, ended),) = says(mate.member.exited(137, "", at(3)), MateEnded)
        assert ended.problem == "the owner", "though the word that it leaves was lost"  # type: ignore[union-attr]
        waiting = Mate().member.vacate(9.0, "the owner", at(2))
        assert says(waiting, Leaving) and Ended("the owner") in waiting


class TestRunner:
    """The leader's runner, between its witnesses (who agree to everything) and its mates."""

    def lead(self, **changes: object) -> tuple[Runner, list[Effect]]:
        view = make_view(D, (A, B, C, D, E))
        runner = Runner(D, "d", make_start(), make_spec(**{**GANG, **changes}), at(0), view, lambda: ("here", 7))
        runner.begin(at(0))
        return runner, self.agree(runner, 0.0)

    def agree(self, runner: Runner, now: float) -> list[Effect]:
        from mesh.jobs.messages import Accepted

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
        assert any(isinstance(effect, Launch) and effect.post == Post(0, 3, "here", 7) for effect in effects)
        runner.handle(GuestStarted(None), at(1))
        self.agree(runner, 1.0)
        return runner, asked

    def test_with_too_few_it_lets_all_go_and_gives_the_term_back(self) -> None:
        runner, effects = self.lead(least_nodes=3)
        asked = [to for to, _ in says(effects, Enlist)]
        runner.on_gang(asked[0], enlisted(), at(1))
        timer = SetTimer("crew", runner._tokens._latest["crew"], GATHER_S + 1)
        effects = runner.on_timer(Timer(timer.name, timer.token), at(timer.at))
        assert {to for to, _ in says(effects, Dismiss)} == set(asked) and runner.state == "releasing"
        assert runner.attempt.reason == "only 2 of 3 nodes had a place for it at once" and not runner.attempt.fault

    def test_the_lease_is_not_given_back_while_a_mate_may_still_run(self) -> None:
        runner, (first, second) = self.begun()
        for node in (first, second):
            runner.on_gang(node, MayRun(job=JOB, term=1, round=1), at(2))
        runner.handle(GuestExited(0, False, False), at(3))
        effects = runner.handle(ResultStored(None, ()), at(3))
        assert runner.state == "disbanding" and len(says(effects, Dismiss)) == 2 and runner.ledger.outcome is None
        runner.on_gang(first, MateEnded(job=JOB, term=1, code=0), at(4))
        assert runner.state == "disbanding"
        runner.on_gang(second, MateEnded(job=JOB, term=1, code=0), at(4))
        assert runner.state == "releasing" and runner.ledger.outcome is not None

    def test_its_own_guests_failure_waits_for_word_of_the_others(self) -> None:
        runner, (first, second) = self.begun()
        runner.on_gang(first, MayRun(job=JOB, term=1, round=1), at(2))
        assert runner.handle(GuestExited(1, False, False), at(3))[1:] == [] and runner.state == "asking"
        for number in (2, 3):
            runner.on_gang(first, MayRun(job=JOB, term=1, round=number), at(4))
        runner.on_gang(second, Leaving(job=JOB, term=1, grace_s=1.0, reason="its owner"), at(4))
        assert "its owner" in runner._ending and runner._ending.startswith("vacated")
        runner, mates = self.begun()
        runner.handle(GuestExited(1, False, False), at(3))
        for node in (*mates, *mates):
            assert runner.state == "asking"
            runner.on_gang(node, MayRun(job=JOB, term=1, round=2), at(4))
        assert runner._ending == "failed (exit 1)"

    def test_a_notice_reaches_them_all(self) -> None:
        runner, mates = self.begun()
        effects = runner.handle(VacateWanted(9.0, "the owner"), at(3))
        assert {to for to, _ in says(effects, Dismiss)} == set(mates)

    def test_a_cancel_before_they_have_gathered_ends_it(self) -> None:
        runner, _ = self.lead()
        runner.handle(CancelWanted(), at(1))
        runner.handle(ResultStored(None, ()), at(1))
        assert runner.ledger.outcome is not None and runner.ledger.outcome.kind == "cancelled"
