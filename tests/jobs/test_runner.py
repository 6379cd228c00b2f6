"""One attempt, from the lease to its end, against three real witnesses."""

import math

import msgspec
import pytest

from mesh.jobs.effects import (
    Committed,
    Concluded,
    Effect,
    Ended,
    Kill,
    Launch,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    SetTimer,
    StateChanged,
)
from mesh.jobs.ledger import Attempt, Commit, Ledger, avoided, shunned
from mesh.jobs.messages import Cancel, Prepare, Refused
from mesh.jobs.reports import (
    CancelWanted,
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestFailed,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    Progressed,
    Recopied,
    ResultStored,
    RunnerEvent,
    VacateWanted,
)
from mesh.jobs.view import Timer
from tests.jobs.worlds import DISK, JOB, A, B, C, D, Desk, E, at, make_advert, make_spec, make_start, make_view, seats

STORED = CheckpointStored(manifest=b"m" * 32, holders=(A, B), step=10)
RESULT = ResultStored(manifest=b"r" * 32, holders=(A,))


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects if not isinstance(effect, StateChanged | RunUntil | SetTimer)]


def allowed(desk: Desk) -> list[float]:
    """Until when the guest was told to run, each time."""
    return [effect.boot_s for effect in desk.seen if isinstance(effect, RunUntil)]


def running(**spec: object) -> Desk:
    desk = Desk(make_spec(**spec))
    assert kinds(desk.begin()) == [Launch]
    desk.tell(GuestStarted(None))
    assert desk.runner.state == "running"
    return desk


def ledgers(desk: Desk) -> list[Ledger]:
    return [witness.cell.ledger for witness in desk.witnesses.values()]


def exited(code: int, **more: object) -> GuestExited:
    return GuestExited(**{"code": code, "oom": False, "forced_done": False, **more})  # type: ignore[arg-type]


def test_nothing_starts_before_a_majority_gave_the_lease() -> None:
    desk = Desk()
    desk.silent = {A, B}
    assert kinds(desk.begin()) == []
    desk.silent = {A}
    assert kinds(desk.timer("renew")) == [Launch]


def test_a_lease_that_cannot_be_taken_ends_the_attempt() -> None:
    desk = Desk()
    desk.silent = {A, B, C}
    desk.begin()
    assert kinds(desk.timer("acquire")) == [Ended] and desk.runner.state == "ended"


def test_a_checkpoint_is_committed_by_a_majority_then_told() -> None:
    desk = running()
    assert desk.tell(CheckpointFound()) == [SaveCheckpoint(seq=1, parent=None, final=False)]
    assert desk.tell(CheckpointFound()) == [], "one save at a time"
    effects = desk.tell(STORED)
    assert kinds(effects) == [SaveCheckpoint, Committed], "what was found meanwhile is saved next"
    commits = [ledger.commit for ledger in ledgers(desk)]
    assert all(commit is not None and commit.manifest == STORED.manifest and commit.term == 1 for commit in commits)
    assert [e for e in effects if isinstance(e, SaveCheckpoint)] == [
        SaveCheckpoint(seq=2, parent=b"m" * 32, final=False)
    ]


def test_a_job_that_is_done_ends_once_with_its_result() -> None:
    desk = running()
    assert kinds(desk.tell(exited(0))) == [SaveCheckpoint]
    assert kinds(desk.tell(CheckpointStored(None, (), None))) == [SaveResult]
    effects = desk.tell(RESULT)
    (end,) = [effect for effect in effects if isinstance(effect, Concluded)]
    assert kinds(effects).count(Ended) == 1 and end.outcome.kind == "done"
    assert {ledger.outcome for ledger in ledgers(desk)} == {end.outcome}
    assert desk.runner.attempt.reason == "done" and desk.runner.attempt.exit_code == 0
    assert all(witness.lease_left_s(desk.now) == 0 for witness in desk.witnesses.values())
    assert desk.tell(RESULT) == [] and desk.timer("renew") == []


def test_a_checkpoint_that_arrives_after_the_end_does_not_end_it_twice() -> None:
    desk = running()
    desk.tell(CheckpointFound())
    desk.tell(CancelWanted())
    assert kinds(desk.tell(exited(137))) == [SaveResult]
    assert SaveResult not in kinds(desk.tell(STORED))


def test_a_notice_saves_releases_and_spends_nothing() -> None:
    desk = running()
    effects = desk.tell(VacateWanted(30.0, "the owner"))
    assert Notify("vacate", 30.0, "the owner") in effects
    assert desk.tell(VacateWanted(5.0, "again")) == []
    assert kinds(desk.tell(exited(85))) == [SaveCheckpoint]
    ended = [effect for effect in desk.tell(STORED) if isinstance(effect, Ended)]
    assert ended == [Ended("vacated: the owner")]
    ledger = ledgers(desk)[0]
    assert ledger.errors == 0 and ledger.outcome is None and ledger.commit is not None
    assert ledger.attempts[-1].reason == "vacated: the owner"


def test_a_job_that_has_run_for_its_time_gets_notice_saves_and_fails() -> None:
    before = Attempt(0, E, "e", 1, 0, running_unix_ms=1_000, ended_unix_ms=41_000, reason="vacated: the owner")
    desk = Desk(make_spec(max_time_s=100.0, error_budget=5), make_start(term=2, ledger=Ledger(attempts=(before,))))
    desk.begin()
    desk.tell(GuestStarted(None))
    assert Notify in kinds(desk.timer("max time")) and desk.now == pytest.approx(60.0), "40 s were before"
    assert kinds(desk.tell(exited(85))) == [SaveCheckpoint]
    assert SaveResult in kinds(desk.tell(STORED))
    (end,) = [effect for effect in desk.tell(RESULT) if isinstance(effect, Concluded)]
    assert end.outcome.kind == "failed" and "its 100 s" in end.outcome.detail


def test_its_user_may_have_it_elsewhere() -> None:
    desk = running()
    effects = desk.tell(MigrateWanted(E))
    assert Notify in kinds(effects) and desk.runner.state == "vacating"
    assert desk.tell(MigrateWanted(A)) == [], "one notice at a time"
    desk.tell(exited(85))
    desk.tell(STORED)
    ledger = ledgers(desk)[0]
    assert ledger.prefer == E and ledger.attempts[-1].reason == "vacated: its user moves it" and ledger.errors == 0
    again = Desk(start=make_start(term=2, ledger=ledger))
    assert again.runner.ledger.prefer is None, "the next attempt has it where it is wanted"


def test_a_guest_that_ignores_its_notice_is_killed_at_the_deadline() -> None:
    desk = running()
    desk.tell(VacateWanted(2.0, "the owner"))
    assert kinds(desk.timer("grace")) == [Kill]
    desk.tell(exited(137))
    desk.tell(CheckpointStored(None, (), None))
    assert desk.runner.attempt.reason == "vacated: the owner"


def test_a_notice_before_the_start_gives_the_lease_back_or_kills_what_just_started() -> None:
    desk = Desk()
    desk.silent = {A, B, C}
    desk.begin()
    desk.silent = set()
    assert kinds(desk.tell(VacateWanted(5.0, "the owner"))) == [Ended]
    late = Desk()
    late.begin()
    assert kinds(late.tell(VacateWanted(5.0, "the owner"))) == [Kill], "what is fetched for it may take long"
    assert kinds(late.tell(GuestStarted(None))) == [Kill], "it was too late to stop it"


@pytest.mark.parametrize(
    ("stopped", "reason"),
    [(VacateWanted(5.0, "the owner"), "vacated: the owner"), (KillWanted("the owner"), "vacated: the owner")],
)
def test_a_start_that_is_stopped_while_its_image_is_fetched_is_nobodys_fault(stopped: RunnerEvent, reason: str) -> None:
    desk = Desk()
    desk.begin()
    assert kinds(desk.tell(stopped)) == [Kill]
    assert Ended in kinds(desk.tell(GuestFailed("it was stopped before it began", elsewhere=True)))
    assert desk.runner.attempt.reason == reason and not desk.runner.attempt.fault


def test_a_job_that_is_cancelled_while_its_image_is_fetched_ends() -> None:
    desk = Desk()
    desk.begin()
    assert kinds(desk.tell(CancelWanted())) == [Kill]
    desk.tell(GuestFailed("it was stopped before it began", elsewhere=True))
    desk.tell(ResultStored(None, (), ""))
    outcome = ledgers(desk)[0].outcome
    assert outcome is not None and outcome.kind == "cancelled"


def test_a_guest_may_run_as_long_as_its_runners_lease() -> None:
    desk = running()
    assert allowed(desk) == [desk.runner.lease_until]
    desk.now += 1
    desk.timer("renew")
    assert allowed(desk)[-1] == desk.runner.lease_until > allowed(desk)[0]
    desk.silent = {A, B}
    before = len(allowed(desk))
    desk.timer("renew")
    assert len(allowed(desk)) == before, "two of three are silent"


def test_cut_off_from_its_witnesses_it_freezes_and_goes_on_when_they_answer() -> None:
    desk = running()
    desk.silent = {A, B}
    for _ in range(3):
        desk.timer("renew")
    desk.timer("lease")
    assert desk.runner.state == "frozen"
    assert desk.tell(CheckpointFound()) == [], "nothing is committed without a lease"
    desk.silent = set()
    effects = desk.timer("renew")
    assert desk.runner.state == "running" and SaveCheckpoint in kinds(effects), "what it had found is saved now"


def test_cut_off_it_goes_on_uncommitted_if_its_owner_said_so() -> None:
    desk = running(on_partition="compute_uncommitted")
    assert set(allowed(desk)) == {math.inf}
    desk.silent = {A, B}
    desk.timer("lease")
    assert desk.runner.state == "uncommitted" and not desk.runner.holds_lease(desk.now + 100)
    assert desk.tell(CheckpointFound()) == [], "nothing is committed without a lease"
    desk.silent = set()
    assert SaveCheckpoint in kinds(desk.timer("renew")) and desk.runner.state == "running"


def test_a_guest_whose_files_took_longer_than_the_lease_is_frozen_as_it_starts() -> None:
    desk = Desk()
    assert kinds(desk.begin()) == [Launch]
    desk.silent = {A, B, C}
    desk.timer("lease")
    desk.tell(GuestStarted(None))
    assert desk.runner.state == "frozen"
    desk.silent = set()
    desk.timer("renew")
    assert desk.runner.state == "running"


def test_a_notice_while_it_is_cut_off_reaches_the_guest_when_it_goes_on() -> None:
    desk = running()
    desk.silent = {A, B, C}
    desk.timer("lease")
    assert Notify in kinds(desk.tell(VacateWanted(30.0, "the owner"))) and desk.runner.state == "vacating"
    desk.silent = set()
    before = len(allowed(desk))
    desk.timer("renew")
    assert len(allowed(desk)) == before + 1 and desk.runner.state == "vacating"


def test_the_end_of_a_lease_that_comes_a_rounding_error_early_is_its_end() -> None:
    desk = running()
    desk.silent = {A, B}
    (timer,) = [effect for effect in desk.seen if isinstance(effect, SetTimer) and effect.name == "lease"][-1:]
    early = at(timer.at - 1e-9)
    assert desk.runner.holds_lease(early.now)
    desk.settle(desk.runner.on_timer(Timer(timer.name, timer.token), early))
    assert desk.runner.state == "frozen"
    assert not desk.runner.holds_lease(early.now)


def test_its_lease_ends_here_before_it_ends_there() -> None:
    desk = running()
    assert all(desk.runner.lease_until < witness.lease_until for witness in desk.witnesses.values())


def test_overtaken_by_a_newer_attempt_it_is_killed_and_commits_nothing() -> None:
    desk = running()
    desk.silent = {A, B, C}
    desk.timer("lease")
    desk.now += 10
    for witness in desk.witnesses.values():
        witness.handle(E, Prepare(job=JOB, term=2), desk.now)
    desk.silent = set()
    effects = desk.timer("renew")
    assert kinds(effects) == [Kill, Ended] and desk.runner.state == "ended"
    assert desk.tell(STORED) == [] and all(ledger.commit is None for ledger in ledgers(desk))


def test_one_witness_that_was_cut_off_and_promised_itself_a_term_ends_nothing() -> None:
    desk = running()
    desk.witnesses[C].handle(C, Prepare(job=JOB, term=7), desk.witnesses[C].lease_until + 1)
    for _ in range(3):
        desk.timer("renew")
    assert desk.runner.state == "running" and desk.runner.holds_lease(desk.now)
    desk.witnesses[B].handle(C, Prepare(job=JOB, term=7), desk.witnesses[B].lease_until + 1)
    assert Kill in kinds(desk.timer("renew")), "two of three are another majority"


def test_cut_off_it_gives_up_for_one_who_may_have_been_promised_more() -> None:
    """Or its renewals would hold the lease at a witness without whom nobody else can have it (the simulator's seed 33)."""
    desk = running()
    desk.silent = {B, C}
    desk.timer("lease")
    assert desk.runner.state == "frozen"
    desk.witnesses[C].handle(C, Prepare(job=JOB, term=7), desk.witnesses[C].lease_until + 1)
    desk.silent = {B}
    assert Kill in kinds(desk.timer("renew")) and desk.runner.state == "ended"


def test_a_refusal_of_another_term_means_nothing() -> None:
    desk = running()
    stale = Refused(
        job=JOB, disk=DISK, term=9, round=0, promised=9, config=None, lease_left_s=0, needs_spec=False, finished=False
    )
    assert desk.runner.on_refused(A, stale, at(1)) == [] and desk.runner.state == "running"


@pytest.mark.parametrize(
    ("code", "budget", "reason", "errors", "fault"),
    [
        (75, 0, "asked for another node (exit 75)", 0, True),
        (85, 0, "checkpointed", 0, False),
        (3, 1, "failed (exit 3), retry 1 of 1", 1, True),
    ],
)
def test_ends_that_are_not_the_jobs_end(code: int, budget: int, reason: str, errors: int, fault: bool) -> None:
    desk = running(error_budget=budget)
    desk.tell(exited(code))
    ended = [effect for effect in desk.tell(CheckpointStored(None, (), None)) if isinstance(effect, Ended)]
    assert ended == [Ended(reason)]
    ledger = ledgers(desk)[0]
    last = ledger.attempts[-1]
    assert ledger.errors == errors and last.fault == fault and last.exit_code == code
    assert avoided(ledger.attempts) == ((D,) if fault else ())


def test_a_failure_that_is_the_nodes_costs_the_job_no_error() -> None:
    desk = running(checkpointing=None)
    effects = desk.tell(GuestExited(code=1, oom=False, forced_done=False, fault="its node's disk is full"))
    assert [e for e in effects if isinstance(e, Ended)] == [Ended("its node's disk is full (exit 1)")]
    assert ledgers(desk)[0].errors == 0 and ledgers(desk)[0].attempts[-1].fault


@pytest.mark.parametrize(("code", "budget"), [(3, 0), (127, 5), (126, 5)])
def test_failures_that_are(code: int, budget: int) -> None:
    desk = running(error_budget=budget, checkpointing=None)
    assert kinds(desk.tell(exited(code))) == [SaveResult]
    desk.tell(RESULT)
    outcome = ledgers(desk)[0].outcome
    assert outcome is not None and outcome.kind == "failed" and outcome.exit_code == code


@pytest.mark.parametrize(("code", "forgiven"), [(3, False), (9, True), (127, True)])
def test_only_the_exit_codes_that_were_named_are_forgiven(code: int, forgiven: bool) -> None:
    desk = running(error_budget=1, retry_codes=(9, 127), checkpointing=None)
    effects = desk.tell(exited(code))
    assert kinds(effects) == ([Ended] if forgiven else [SaveResult])


def test_a_node_where_it_failed_is_left_alone_for_ever_longer() -> None:
    def failed(node: bytes, ended_s: int) -> Attempt:
        return Attempt(0, node, "", 1, 0, ended_unix_ms=ended_s * 1000, reason="failed (exit 3)", fault=True)

    assert shunned((failed(D, 100),), 159_000) == (D,) and shunned((failed(D, 100),), 160_000) == ()
    twice = (failed(D, 100), failed(E, 150), failed(D, 200))
    assert shunned(twice, 209_000) == (D, E) and shunned(twice, 319_000) == (D,) and shunned(twice, 320_000) == ()
    often = tuple(failed(D, 0) for _ in range(60))
    assert shunned(often, 3_599_000) == (D,) and shunned(often, 3_600_000) == (), "an hour at most"
    assert avoided(twice) == (D, E), "and tried last ever after"


def test_at_its_deadline_it_gets_notice_saves_and_fails() -> None:
    desk = Desk(make_spec(deadline_unix_ms=70_000, error_budget=5))
    desk.begin()
    desk.tell(GuestStarted(None))
    assert Notify in kinds(desk.timer("deadline")) and desk.now == pytest.approx(70.0)
    desk.tell(exited(85))
    desk.tell(STORED)
    (end,) = [effect for effect in desk.tell(RESULT) if isinstance(effect, Concluded)]
    assert end.outcome.kind == "failed" and "deadline" in end.outcome.detail


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_guest_that_cannot_start(elsewhere: bool) -> None:
    desk = Desk()
    desk.begin()
    effects = desk.tell(GuestFailed("no such image", elsewhere=elsewhere))
    if elsewhere:
        assert kinds(effects) == [Ended] and ledgers(desk)[0].attempts[-1].fault
    else:
        assert kinds(effects) == [SaveResult]
        desk.tell(RESULT)
        outcome = ledgers(desk)[0].outcome
        assert outcome is not None and outcome.kind == "failed" and "no such image" in outcome.detail


def test_cancel_kills_and_ends_the_job() -> None:
    desk = running()
    assert kinds(desk.tell(CancelWanted())) == [Kill] and desk.tell(CancelWanted()) == []
    assert kinds(desk.tell(exited(137))) == [SaveResult]
    desk.tell(RESULT)
    outcome = ledgers(desk)[0].outcome
    assert outcome is not None and outcome.kind == "cancelled"


@pytest.mark.parametrize("late", ["before the result", "after the result"])
def test_a_checkpoint_under_way_does_not_change_the_end_of_a_cancelled_job(late: str) -> None:
    desk = running()
    desk.tell(CheckpointFound())
    desk.tell(CancelWanted())
    desk.tell(exited(137))
    if late == "before the result":
        assert desk.tell(STORED) == []
    else:
        desk.silent = {A, B, C}
    desk.tell(RESULT)
    rounds = desk.runner.ledger
    assert rounds.outcome is not None and rounds.commit is None
    if late == "after the result":
        assert desk.tell(STORED) == [] and desk.runner.ledger == rounds, "who has accepted it knows the last word"


def test_new_holders_of_the_last_checkpoint_are_written_down() -> None:
    desk = running()
    desk.tell(CheckpointFound())
    desk.tell(STORED)
    assert desk.tell(Recopied(b"another" * 4 + b"....", (C,))) == []
    assert [commit.holders for commit in commits(desk)] == [(A, B)] * 3
    assert kinds(desk.tell(Recopied(STORED.manifest or b"", (A, E)))) == [], "it is no new checkpoint"
    assert [(commit.holders, commit.seq) for commit in commits(desk)] == [((A, E), 1)] * 3


def commits(desk: Desk) -> list[Commit]:
    return [ledger.commit for ledger in ledgers(desk) if ledger.commit is not None]


def test_a_cancel_that_only_a_witness_heard_of_reaches_the_runner() -> None:
    desk = running()
    desk.witnesses[B].handle(A, Cancel(job=JOB, user="ada"), desk.now)
    assert Kill in kinds(desk.timer("renew"))


def test_kill_wanted_is_a_departure_and_not_an_error() -> None:
    desk = running()
    assert kinds(desk.tell(KillWanted("reclaimed"))) == [Kill]
    desk.tell(exited(137))
    desk.tell(CheckpointStored(None, (), None))
    assert desk.runner.attempt.reason == "vacated: reclaimed" and ledgers(desk)[0].errors == 0


def test_a_checkpoint_that_cannot_be_stored_is_told_and_the_job_goes_on() -> None:
    desk = running()
    desk.tell(CheckpointFound())
    effects = desk.tell(CheckpointFailed("disk full"))
    assert StateChanged("running", "checkpoint not stored: disk full") in effects
    assert kinds(desk.tell(CheckpointFound())) == [SaveCheckpoint]


def test_an_exit_in_the_middle_of_a_save_waits_for_it_and_saves_once_more() -> None:
    desk = running()
    desk.tell(CheckpointFound())
    assert kinds(desk.tell(exited(0))) == []
    effects = desk.tell(STORED)
    assert [e.final for e in effects if isinstance(e, SaveCheckpoint)] == [True]
    assert SaveResult in kinds(desk.tell(msgspec.structs.replace(STORED, manifest=b"n" * 32)))


def test_progress_is_written_down_with_the_next_round() -> None:
    desk = running()
    desk.tell(Progressed(41))
    desk.timer("renew")
    assert ledgers(desk)[0].attempts[-1].last_step == 41


def test_a_witness_that_left_is_replaced_by_a_joint_vote() -> None:
    desk = running()
    desk.witnesses[E] = msgspec_copy(desk)
    desk.silent = {C}
    view = make_view(D, (A, B, D, E), adverts=(make_advert(E, weight=64),))
    desk.settle(desk.runner.observe(view, at(desk.now)))
    assert set(desk.runner.config.nodes) == {A, B, E} and desk.runner.config.number == 1
    assert {frozenset(desk.witnesses[node].cell.config.members) for node in (A, B, E)} == {frozenset(seats(A, B, E))}
    assert desk.settle(desk.runner.observe(view, at(desk.now))) == []


def msgspec_copy(desk: Desk) -> object:
    """A witness as it is right after its introduction."""
    from mesh.jobs.witness import Witness

    witness = desk.witnesses[A]
    return Witness(msgspec.structs.replace(witness.cell, promised=0, accepted_term=0, holder=None), desk.spec)


def test_numbers_go_on_from_the_ledger_it_was_handed() -> None:
    first = running()
    first.tell(CheckpointFound())
    first.tell(STORED)
    ledger = first.runner.ledger
    second = Desk(first.spec, make_start(term=5, ledger=ledger))
    second.begin()
    second.tell(GuestStarted(10))
    assert second.runner.attempt.number == 1 and second.runner.attempt.resumed_step == 10
    assert second.tell(CheckpointFound()) == [SaveCheckpoint(seq=2, parent=b"m" * 32, final=False)]


@pytest.mark.parametrize("event", [GuestStarted(None), exited(0), CheckpointFound(), STORED, RESULT, CancelWanted()])
def test_after_its_end_it_does_nothing(event: RunnerEvent) -> None:
    desk = running(checkpointing=None)
    desk.tell(exited(0))
    desk.tell(RESULT)
    assert desk.runner.state == "ended" and desk.tell(event) == []
