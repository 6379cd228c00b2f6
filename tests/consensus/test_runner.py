"""Runner: one attempt from its lease to its end, with three real witnesses."""

import math

import msgspec
import pytest

from mesh.consensus.contract import VACATED
from mesh.consensus.effects import (
    Abandoned,
    Committed,
    Concluded,
    Effect,
    Ended,
    Kill,
    Launch,
    Left,
    Notify,
    RunUntil,
    SaveCheckpoint,
    SaveResult,
    Send,
    SetTimer,
    StateChanged,
)
from mesh.consensus.fallback import patience_s
from mesh.consensus.messages import Accept, Accepted, Cancel, Closed, Prepare, Refused, Released
from mesh.consensus.proposer import UNFIT_MAX_S
from mesh.consensus.reports import (
    CancelWanted,
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    ClockStood,
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
from mesh.consensus.runner import STRANDED_S, Runner
from mesh.consensus.view import Instant, Timer
from mesh.consensus.witness import HELD_SHARE
from mesh.model.record import Attempt, Commit, Config, JobRecord, avoided, shunned
from mesh.model.spec import HomePolicy
from placement.queue import Queue
from tests.consensus.worlds import (
    DISK,
    JOB,
    A,
    B,
    C,
    D,
    E,
    RunnerWorld,
    at,
    make_advert,
    make_spec,
    make_start,
    make_view,
    voters,
)

STORED = CheckpointStored(manifest=b"m" * 32, holders=(A, B), step=10)
RESULT = ResultStored(manifest=b"r" * 32, holders=(A,))


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects if not isinstance(effect, StateChanged | RunUntil | SetTimer)]


def allowed(world: RunnerWorld) -> list[float]:
    """Return the end of each permission to run that the guest received."""
    return [effect.boot_s for effect in world.seen if isinstance(effect, RunUntil)]


def running(**spec: object) -> RunnerWorld:
    world = RunnerWorld(make_spec(**spec))
    assert kinds(world.begin()) == [Launch]
    world.tell(GuestStarted(None))
    assert world.runner.state == "running"
    return world


def records(world: RunnerWorld) -> list[JobRecord]:
    return [witness.witness_record.record for witness in world.witnesses.values()]


def exited(code: int, **more: object) -> GuestExited:
    return GuestExited(**{"code": code, "oom": False, "forced_done": False, **more})  # type: ignore[arg-type]


def test_runner_launches_nothing_before_a_majority_grants_the_lease() -> None:
    world = RunnerWorld()
    world.silent = {A, B}
    assert kinds(world.begin()) == []
    world.silent = {A}
    assert kinds(world.timer("renew")) == [Launch]


def test_attempt_ends_when_the_lease_cannot_be_taken() -> None:
    world = RunnerWorld()
    world.silent = {A, B, C}
    world.begin()
    assert kinds(world.timer("acquire")) == [Ended] and world.runner.state == "ended"


def test_checkpoint_is_committed_by_a_majority_and_then_settled() -> None:
    world = running()
    assert world.tell(CheckpointFound()) == [SaveCheckpoint(seq=1, parent=None, final=False)]
    assert world.tell(CheckpointFound()) == [], "one save at a time"
    effects = world.tell(STORED)
    assert kinds(effects) == [SaveCheckpoint, Committed], "a checkpoint found during a save is saved next"
    commits = [record.commit for record in records(world)]
    assert all(commit is not None and commit.manifest == STORED.manifest and commit.term == 1 for commit in commits)
    assert [e for e in effects if isinstance(e, SaveCheckpoint)] == [
        SaveCheckpoint(seq=2, parent=b"m" * 32, final=False)
    ]


def test_commit_says_how_many_replicas_were_wanted_and_what_is_still_needed() -> None:
    world = running()
    for number, holders in enumerate([(A, B), (), (B,)], 1):
        world.tell(CheckpointFound())
        world.tell(CheckpointStored(b"%032d" % number, holders, None))
    world.timer("renew")
    record = records(world)[0]
    assert record.commit is not None and (record.commit.wanted, record.commit.at_risk) == (2, True)
    assert record.predecessor is not None and record.predecessor.holders == (A, B)
    assert record.named == record.needed == (1, 3), "stores prune what neither names"


def stored_twice() -> JobRecord:
    """Return the record of a job that ran for 200 s and saved after 0 s and 100 s."""
    world = RunnerWorld()
    world.now = 10.0
    world.begin()
    world.tell(GuestStarted(None))
    for number in (1, 2):
        world.tell(CheckpointFound())
        world.tell(CheckpointStored(b"%032d" % number, (A, B), number * 10))
        world.now += 100.0
        world.timer("renew")
    world.tell(KillWanted("gone"))
    world.tell(exited(137))
    world.tell(CheckpointStored(None, (), None))
    return records(world)[0]


def fails_to_fetch(record: JobRecord, now: float, how: str, here: bool = True) -> tuple[RunnerWorld, list[Effect]]:
    world = RunnerWorld(make_spec(), make_start(term=record.attempts[-1].term + 1, record=record))
    world.now = now
    world.begin()
    return world, world.tell(GuestFailed("gone", elsewhere=True, unfetched=how, predecessor_here=here))  # type: ignore[arg-type]


def test_lost_checkpoint_is_abandoned_for_its_predecessor_then_for_the_beginning() -> None:
    record = stored_twice()
    world, effects = fails_to_fetch(record, 300.0, "lost", here=False)
    after = records(world)[0]
    assert kinds(effects) == [Left, Abandoned, Ended] and after.commit == record.predecessor
    assert after.abandoned == record.commit and not after.attempts[-1].fault
    assert after.next_commit == (3, after.commit.manifest if after.commit is not None else None), "J3"
    (told,) = [effect for effect in effects if isinstance(effect, Abandoned)]
    assert told.commit == record.commit and told.instead == record.predecessor
    again, _ = fails_to_fetch(after, 310.0, "lost")
    last = records(again)[0]
    assert last.commit is None and last.abandoned == record.predecessor and last.next_commit == (3, None)
    assert last.needed == record.needed, "stores prune nothing before the next commit"


@pytest.mark.parametrize("here", [True, False])
def test_job_waits_for_away_nodes_as_long_as_the_work_takes_again(here: bool) -> None:
    record = stored_twice()
    patience = patience_s(record, here, 15.0)
    assert patience == pytest.approx(100.0 if here else record.ran_s, abs=10.0)
    world, effects = fails_to_fetch(record, 300.0, "away", here)
    waiting = records(world)[0]
    assert kinds(effects) == [Left, Ended] and waiting.commit == record.commit and waiting.attempts[-1].fault
    world, effects = fails_to_fetch(waiting, 300.0 + patience - 1, "away", here)
    waiting = records(world)[0]
    assert waiting.commit == record.commit and waiting.unfetched_unix_ms == 300_000
    world, effects = fails_to_fetch(waiting, 300.0 + patience, "away", here)
    assert Abandoned in kinds(effects) and records(world)[0].commit == record.predecessor


def ran_for(seconds: float) -> JobRecord:
    """Return the record of a job that ran so long and saved once."""
    ended = round(seconds * 1000) + 1
    attempt = Attempt(0, A, "a", 1, 0, running_unix_ms=1, ended_unix_ms=ended, reason="node lost")
    return JobRecord(attempts=(attempt,), commit=stored_twice().commit)


def test_job_waits_long_enough_for_a_restart() -> None:
    assert patience_s(ran_for(1.0), False, 15.0) == 60.0


def test_job_waits_three_days_at_most() -> None:
    assert patience_s(ran_for(30 * 86_400.0), False, 15.0) == 3 * 86_400.0


def test_fallback_counts_only_once_a_majority_holds_it() -> None:
    record = stored_twice()
    world = RunnerWorld(make_spec(), make_start(term=2, record=record))
    world.begin()
    world.silent = {A, B}
    assert kinds(world.tell(GuestFailed("gone", elsewhere=True, unfetched="lost"))) == [Left]
    assert world.witnesses[A].witness_record.record.commit == record.commit
    world.silent = set()
    assert kinds(world.timer("renew")) == [Abandoned, Ended]


def test_start_forgets_that_the_checkpoint_was_away() -> None:
    world, _ = fails_to_fetch(stored_twice(), 300.0, "away")
    later = RunnerWorld(make_spec(), make_start(term=3, record=records(world)[0]))
    later.begin()
    later.tell(GuestStarted(20))
    assert later.runner.record.unfetched_unix_ms == 0 and later.runner.record.commit is not None


def test_finished_job_ends_once_with_its_result() -> None:
    world = running()
    assert kinds(world.tell(exited(0))) == [SaveCheckpoint]
    assert kinds(world.tell(CheckpointStored(None, (), None))) == [SaveResult]
    effects = world.tell(RESULT)
    (end,) = [effect for effect in effects if isinstance(effect, Concluded)]
    assert kinds(effects).count(Ended) == 1 and end.outcome.kind == "done"
    assert {record.outcome for record in records(world)} == {end.outcome}
    assert world.runner.attempt.reason == "done" and world.runner.attempt.exit_code == 0
    assert world.tell(RESULT) == [] and world.timer("renew") == []
    closed = next(one.message for one in world.seen if isinstance(one, Send) and isinstance(one.message, Closed))
    for witness in world.witnesses.values():
        assert witness.lease_left_s(world.now) > 0, "until it knows the end, no other node proposes another"
        witness.handle(D, closed, world.now)
        assert witness.finished and witness.lease_left_s(world.now) == 0


def test_late_checkpoint_does_not_end_the_job_twice() -> None:
    world = running()
    world.tell(CheckpointFound())
    world.tell(CancelWanted())
    ended = world.tell(exited(137))
    assert kinds(ended) == [SaveResult] and StateChanged("saving", "cancelled") in ended, "it was killed by order"
    assert SaveResult not in kinds(world.tell(STORED))


def test_notice_saves_releases_the_lease_and_spends_no_error() -> None:
    world = running()
    effects = world.tell(VacateWanted(30.0, "the owner"))
    assert Notify("vacate", 30.0, "the owner") in effects
    assert world.tell(VacateWanted(5.0, "again")) == []
    assert StateChanged("saving", "exit 85") in (last := world.tell(exited(85))) and kinds(last) == [SaveCheckpoint]
    ended = [effect for effect in world.tell(STORED) if isinstance(effect, Ended)]
    assert ended == [Ended("vacated: the owner")]
    record = records(world)[0]
    assert record.errors == 0 and record.outcome is None and record.commit is not None
    assert record.attempts[-1].reason == "vacated: the owner"


def test_job_past_its_max_time_gets_notice_saves_and_fails() -> None:
    before = Attempt(0, E, "e", 1, 0, running_unix_ms=1_000, ended_unix_ms=41_000, reason="vacated: the owner")
    world = RunnerWorld(
        make_spec(max_time_s=100.0, error_budget=5), make_start(term=2, record=JobRecord(attempts=(before,)))
    )
    world.begin()
    world.tell(GuestStarted(None))
    assert Notify in kinds(world.timer("max time")) and world.now == pytest.approx(60.0), (
        "the record already counts 40 s"
    )
    assert kinds(world.tell(exited(85))) == [SaveCheckpoint]
    assert SaveResult in kinds(world.tell(STORED))
    (end,) = [effect for effect in world.tell(RESULT) if isinstance(effect, Concluded)]
    assert end.outcome.kind == "failed" and "its 100 s" in end.outcome.detail
    assert end.outcome.exit_code is None, "the code is that of the notice's end: `mesh run` exits with 125"


def test_user_moves_the_job_to_another_node() -> None:
    world = running()
    effects = world.tell(MigrateWanted(E))
    assert Notify in kinds(effects) and world.runner.state == "vacating"
    assert world.tell(MigrateWanted(A)) == [], "one notice at a time"
    over = running(checkpointing=None)
    over.tell(exited(0))
    assert over.tell(MigrateWanted(E)) == [], "it has ended"
    world.tell(exited(85))
    world.tell(STORED)
    record = records(world)[0]
    assert record.prefer == E and record.attempts[-1].reason == "vacated: moved by its user" and record.errors == 0
    again = RunnerWorld(start=make_start(term=2, record=record))
    assert again.runner.record.prefer is None, "the next attempt runs on the preferred node"


def test_guest_that_ignores_its_notice_is_killed_at_the_deadline() -> None:
    world = running()
    world.tell(VacateWanted(2.0, "the owner"))
    assert kinds(world.timer("grace")) == [Kill]
    world.tell(exited(137))
    world.tell(CheckpointStored(None, (), None))
    assert world.runner.attempt.reason == "vacated: the owner"


def test_only_a_running_job_that_saves_makes_room() -> None:
    world = RunnerWorld()
    world.begin()
    assert not world.runner.running_job.saves, "its guest is not running yet"
    world.tell(GuestStarted(None))
    assert world.runner.running_job.saves
    world.tell(VacateWanted(9.0, "the owner"))
    assert not world.runner.running_job.saves, "it leaves already"
    assert not running(checkpointing=None).runner.running_job.saves


def test_notice_before_the_start_releases_the_lease_or_kills_the_guest() -> None:
    world = RunnerWorld()
    world.silent = {A, B, C}
    world.begin()
    world.silent = set()
    assert kinds(world.tell(VacateWanted(5.0, "the owner"))) == [Left, Ended]
    late = RunnerWorld()
    late.begin()
    assert kinds(late.tell(VacateWanted(5.0, "the owner"))) == [Kill], (
        "the image fetch may take long, so the guest is killed"
    )
    assert kinds(late.tell(GuestStarted(None))) == [Kill], "a guest that started after the notice is killed"


@pytest.mark.parametrize(
    ("stopped", "reason"),
    [(VacateWanted(5.0, "the owner"), "vacated: the owner"), (KillWanted("the owner"), "vacated: the owner")],
)
def test_start_stopped_during_image_fetch_blames_no_node(stopped: RunnerEvent, reason: str) -> None:
    world = RunnerWorld()
    world.begin()
    assert kinds(world.tell(stopped)) == [Kill]
    assert Ended in kinds(world.tell(GuestFailed("it was stopped before it began", elsewhere=True)))
    assert world.runner.attempt.reason == reason and not world.runner.attempt.fault


def test_job_cancelled_during_image_fetch_ends() -> None:
    world = RunnerWorld()
    world.begin()
    assert kinds(world.tell(CancelWanted())) == [Kill]
    world.tell(GuestFailed("it was stopped before it began", elsewhere=True))
    world.tell(ResultStored(None, (), ""))
    outcome = records(world)[0].outcome
    assert outcome is not None and outcome.kind == "cancelled"


def test_guest_may_run_as_long_as_the_lease() -> None:
    world = running()
    assert allowed(world) == [world.runner.lease_until]
    world.now += 1
    world.timer("renew")
    assert allowed(world)[-1] == world.runner.lease_until > allowed(world)[0]
    world.silent = {A, B}
    before = len(allowed(world))
    world.timer("renew")
    assert len(allowed(world)) == before, "two of three witnesses are silent"


def test_partitioned_runner_freezes_and_continues_when_witnesses_answer() -> None:
    world = running()
    world.silent = {A, B}
    for _ in range(3):
        world.timer("renew")
    world.timer("lease")
    assert world.runner.state == "frozen"
    assert world.tell(CheckpointFound()) == [], "nothing is committed without a lease"
    world.silent = set()
    effects = world.timer("renew")
    assert world.runner.state == "running" and SaveCheckpoint in kinds(effects), (
        "the checkpoint found during the partition is saved now"
    )


def test_guest_cut_off_for_long_gives_its_place_to_jobs_that_wait() -> None:
    world = running()
    others_wait = make_view(D, (A, B, C, D), queue=Queue([], {}, (), 0))
    world.silent = {A, B, C}
    world.now = world.runner.lease_until + STRANDED_S
    assert world.observe(others_wait) == [], "it holds its lease, as far as it knows"
    world.timer("lease")
    assert world.runner.state == "frozen"
    since = world.runner.lease_until
    world.now = since + STRANDED_S - 1
    assert Kill not in kinds(world.observe(others_wait))
    world.now = since + STRANDED_S
    assert Kill not in kinds(world.observe(make_view(D, (A, B, C, D)))), "nobody needs its place"
    assert Kill in kinds(world.observe(others_wait)) and world.runner.has_place
    assert Kill not in kinds(world.observe(others_wait)), "once"
    world.tell(exited(137))
    world.tell(STORED)
    assert world.runner.state == "releasing" and not world.runner.has_place
    world.silent = set()
    world.timer("renew")
    last = records(world)[0].attempts[-1]
    assert last.reason.startswith("vacated: no majority of its witnesses has answered for 40 minutes")
    assert not last.fault, "it is not tried elsewhere at the expense of its error budget"


def test_guest_that_computes_uncommitted_keeps_its_place() -> None:
    world = running(on_partition="compute_uncommitted")
    world.silent = {A, B, C}
    world.timer("lease")
    world.now += 2 * STRANDED_S
    assert Kill not in kinds(world.observe(make_view(D, (A, B, C, D), queue=Queue([], {}, (), 0))))


def test_partitioned_runner_continues_uncommitted_if_its_spec_allows() -> None:
    world = running(on_partition="compute_uncommitted")
    assert set(allowed(world)) == {math.inf}
    world.silent = {A, B}
    world.timer("lease")
    assert world.runner.state == "uncommitted" and not world.runner.holds_lease(world.now + 100)
    assert world.tell(CheckpointFound()) == [], "nothing is committed without a lease"
    world.silent = set()
    assert SaveCheckpoint in kinds(world.timer("renew")) and world.runner.state == "running"


def test_lease_is_over_when_its_clock_has_stood_still() -> None:
    """A paused virtual machine: what was asked before the pause grants nothing after it."""
    world = running()
    world.now += 1.0
    asked = world.runner.on_timer(renewal(world), at(world.now))  # the answers come after the pause
    world.silent, world.now = {A, B, C}, world.now + 1.0
    world.tell(ClockStood())
    assert allowed(world)[-1] == world.now and not world.runner.holds_lease(world.now)
    assert world.runner.state == "frozen"
    world.silent = set()
    world.settle([effect for effect in asked if isinstance(effect, Send)])
    assert world.runner.lease_until == world.now, "they were counted by the clock that stood"
    world.timer("renew")
    assert world.runner.holds_lease(world.now) and world.runner.state == "running"


def test_deadline_is_set_again_by_the_wall_clock_after_a_pause() -> None:
    world = running(deadline_unix_ms=500_000)
    world.now = 100.0
    timers = world.settle(world.runner.handle(ClockStood(), Instant(100.0, 400_000)))
    assert [effect.at for effect in timers if isinstance(effect, SetTimer) and effect.name == "deadline"] == [200.0]


def renewal(world: RunnerWorld) -> Timer:
    latest = [effect for effect in world.seen if isinstance(effect, SetTimer) and effect.name == "renew"][-1]
    return Timer(latest.name, latest.token)


def test_guest_whose_files_outlasted_the_lease_starts_frozen() -> None:
    world = RunnerWorld()
    assert kinds(world.begin()) == [Launch]
    world.silent = {A, B, C}
    world.timer("lease")
    world.tell(GuestStarted(None))
    assert world.runner.state == "frozen"
    world.silent = set()
    world.timer("renew")
    assert world.runner.state == "running"


def test_notice_during_a_partition_reaches_the_guest() -> None:
    world = running()
    world.silent = {A, B, C}
    world.timer("lease")
    assert Notify in kinds(world.tell(VacateWanted(30.0, "the owner"))) and world.runner.state == "vacating"
    world.silent = set()
    before = len(allowed(world))
    world.timer("renew")
    assert len(allowed(world)) == before + 1 and world.runner.state == "vacating"


def test_lease_timer_that_fires_a_rounding_error_early_ends_the_lease() -> None:
    world = running()
    world.silent = {A, B}
    (timer,) = [effect for effect in world.seen if isinstance(effect, SetTimer) and effect.name == "lease"][-1:]
    early = at(timer.at - 1e-9)
    assert world.runner.holds_lease(early.now)
    world.settle(world.runner.on_timer(Timer(timer.name, timer.token), early))
    assert world.runner.state == "frozen"
    assert not world.runner.holds_lease(early.now)


def test_lease_ends_at_the_runner_before_it_ends_at_the_witness() -> None:
    world = running()
    assert all(world.runner.lease_until < witness.lease_until for witness in world.witnesses.values())


def test_lease_counts_from_the_question_less_a_margin() -> None:
    spec = make_spec()
    runner = Runner(D, "d", make_start(), spec, at(0))
    runner.begin(at(1.0))
    accepted = Accepted(job=JOB, term=1, disk=DISK, round=1)
    runner.on_accepted(A, accepted, at(9.0))
    effects = runner.on_accepted(B, accepted, at(9.0))
    until = 1.0 + spec.lease_s * HELD_SHARE
    assert runner.lease_until == until and RunUntil(until) in effects


def test_commit_neither_renews_the_lease_nor_puts_its_renewal_off() -> None:
    world = running()
    due, until = renewal(world), world.runner.lease_until
    ends = {node: witness.lease_until for node, witness in world.witnesses.items()}
    world.now += 1.0
    world.tell(CheckpointFound())
    assert Committed in kinds(world.tell(STORED))
    assert world.runner.lease_until == until and renewal(world) == due
    assert {node: witness.lease_until for node, witness in world.witnesses.items()} == ends
    world.timer("renew")
    assert world.runner.lease_until == world.now + world.spec.lease_s * HELD_SHARE


def test_lost_renewal_costs_no_lease() -> None:
    world = running()
    world.silent = {A, B, C}
    world.timer("renew")
    world.silent = set()
    until = world.runner.lease_until
    world.timer("renew")
    assert world.now < until < world.runner.lease_until


def accepts_round(world: RunnerWorld, number: int) -> list[Effect]:
    """Let a majority accept one round."""
    answer = Accepted(job=JOB, term=1, disk=DISK, round=number)
    return [effect for node in (A, B) for effect in world.runner.on_accepted(node, answer, at(world.now))]


def test_only_what_a_majority_holds_is_settled() -> None:
    """The next checkpoint is stored before the round with the first one is answered."""
    world = running()
    world.silent = {A, B, C}
    first, second = (msgspec.structs.replace(STORED, manifest=name * 32) for name in (b"1", b"2"))
    world.tell(CheckpointFound())
    world.tell(first)
    number = world.runner._proposer._round
    world.tell(CheckpointFound())
    world.tell(second)
    settled = [effect.commit.manifest for effect in accepts_round(world, number) if isinstance(effect, Committed)]
    assert settled == [first.manifest]
    assert (world.runner.record.settled, world.runner.record.needed) == (1, (1,))
    settled = [effect.commit.manifest for effect in accepts_round(world, number + 1) if isinstance(effect, Committed)]
    assert settled == [second.manifest] and world.runner.record.needed == (1, 2)


def test_round_that_ends_a_partition_settles_the_checkpoint() -> None:
    world = running()
    world.silent = {A, B, C}
    world.tell(CheckpointFound())
    world.tell(STORED)
    world.timer("lease")
    assert world.runner.state == "frozen"
    world.silent = set()
    effects = world.timer("renew")
    assert [effect.commit.manifest for effect in effects if isinstance(effect, Committed)] == [STORED.manifest]
    assert world.runner.state == "running"


def test_attempt_ends_only_once_its_release_is_decided() -> None:
    world = running(checkpointing=None)
    world.silent = {A, B, C}
    world.timer("renew")
    number = world.runner._proposer._round
    world.tell(VacateWanted(9.0, "the owner"))
    assert world.runner.has_place
    assert [effect for effect in world.tell(exited(143)) if isinstance(effect, Left | Ended)] == [
        Left(VACATED + "the owner")
    ], "its node has its place back, whoever answers"
    assert world.runner.state == "releasing" and not world.runner.has_place
    assert Ended not in kinds(accepts_round(world, number)), "an earlier round"
    assert not world.runner.holds_lease(world.now), "which gives no lease back"
    assert Ended in kinds(accepts_round(world, number + 1))


def test_record_stays_as_it_is_once_it_has_the_end() -> None:
    """Answers to earlier rounds and a notice come late; witnesses believe one record of an end only."""
    world = running()
    world.silent = {A, B, C}
    world.tell(CheckpointFound())
    world.tell(STORED)
    number = world.runner._proposer._round
    world.tell(CancelWanted())
    world.tell(exited(137))
    world.tell(RESULT)
    ended = world.runner.record
    assert ended.outcome is not None and ended.commit is not None
    world.tell(VacateWanted(9.0, "the owner"))
    assert Committed not in kinds(accepts_round(world, number)) and world.runner.record == ended
    last = accepts_round(world, world.runner._proposer._round)
    assert [effect for effect in last if isinstance(effect, Committed)] == [Committed(ended.commit)]
    told = [effect.message for effect in last if isinstance(effect, Send)]
    assert told == [Closed(job=JOB, term=1, record=ended)] * 3


def test_nothing_is_saved_beside_the_result() -> None:
    world = running()
    world.tell(exited(0))
    assert SaveResult in kinds(world.tell(CheckpointStored(None, (), None)))
    assert world.tell(CheckpointFound()) == []


def test_holder_stops_before_its_witnesses_when_its_clock_is_a_tenth_slower() -> None:
    world = running(checkpointing=None)
    asked_at = 0.0
    for witness in world.witnesses.values():
        assert asked_at < world.runner.lease_until / 0.95 <= witness.lease_until / 1.05


def test_lease_is_over_from_its_release_on() -> None:
    world = running(checkpointing=None)
    world.silent = {A, B, C}
    world.tell(VacateWanted(9.0, "the owner"))
    world.tell(exited(143))
    assert world.runner.state == "releasing" and not world.runner.holds_lease(world.now)
    world.silent = set()
    world.timer("renew")
    assert world.runner.state == "ended" and not world.runner.holds_lease(world.now)


def test_fenced_start_is_killed_and_has_no_lease() -> None:
    world = RunnerWorld()
    world.begin()
    assert world.runner.state == "restoring" and world.runner.holds_lease(world.now)
    assert Kill in kinds(world.runner.fenced()) and not world.runner.holds_lease(world.now)


def test_fenced_runner_kills_its_guest_and_commits_nothing() -> None:
    world = running()
    world.silent = {A, B, C}
    world.timer("lease")
    world.now += 10
    for witness in world.witnesses.values():
        witness.handle(B, Prepare(job=JOB, term=2), world.now)
    world.silent = set()
    effects = world.timer("renew")
    assert kinds(effects) == [Kill, Ended] and world.runner.state == "ended"
    assert world.tell(STORED) == [] and all(record.commit is None for record in records(world))


def refusal(term: int, promised: int, config: Config | None) -> Refused:
    return Refused(JOB, term, DISK, 1, promised, config, 0.0, needs_spec=False, finished=True, accepted_term=promised)


def test_only_the_witnesses_call_a_runner_over() -> None:
    world = running()
    forged = refusal(world.runner.term, 1 << 40, Config(9, 9, voters(E)))
    assert world.runner.on_refused(E, forged, at(world.now)) == [] and world.runner.state == "running"
    granted = Accepted(JOB, world.runner.term, DISK, 99, cancel_wanted=True)
    assert world.runner.on_accepted(E, granted, at(world.now)) == [], "nor do others say that its user has cancelled it"
    assert world.runner.on_refused(B, forged, at(world.now)) == [], "one witness may lie about a later group"
    assert kinds(world.runner.on_refused(C, forged, at(world.now))) == [Kill, Ended]


def test_stranger_does_not_end_an_attempt_without_a_lease() -> None:
    world = running()
    world.silent = {A, B, C}
    world.timer("lease")
    assert world.runner.state == "frozen"
    assert world.runner.on_refused(E, refusal(world.runner.term, 7, None), at(world.now)) == []
    assert Kill in kinds(world.runner.on_refused(C, refusal(world.runner.term, 7, None), at(world.now)))


def test_users_node_without_a_vote_does_not_answer_for_a_witness() -> None:
    world = running(submitter=E)
    granted = Accepted(JOB, world.runner.term, DISK, 99, cancel_wanted=True)
    assert world.runner.on_accepted(E, granted, at(world.now)) == []


def test_one_witness_that_is_not_the_users_cancels_no_running_job() -> None:
    def says(node: bytes) -> list[Effect]:
        disk = next(voter.disk for voter in world.runner.config.members if voter.node == node)
        answer = Accepted(JOB, world.runner.term, disk, 99, cancel_wanted=True)
        return world.runner.on_accepted(node, answer, at(world.now))

    world = running()
    assert world.runner.spec.submitter not in {B, C}
    assert not says(B) and not says(B)
    assert says(C), "two of three say so"
    world = running()
    assert says(world.runner.spec.submitter), "the word of the user's own node"


def test_runner_keeps_its_term_when_one_partitioned_witness_promised_another() -> None:
    world = running()
    world.witnesses[C].handle(C, Prepare(job=JOB, term=7), world.witnesses[C].lease_until + 1)
    for _ in range(3):
        world.timer("renew")
    assert world.runner.state == "running" and world.runner.holds_lease(world.now)
    world.witnesses[B].handle(C, Prepare(job=JOB, term=7), world.witnesses[B].lease_until + 1)
    assert Kill in kinds(world.timer("renew")), "two of three witnesses form another majority"


def test_partitioned_runner_yields_to_a_higher_promise() -> None:
    """Otherwise its renewals hold the lease at a witness that every other majority needs (the simulator's seed 33)."""
    world = running()
    world.silent = {B, C}
    world.timer("lease")
    assert world.runner.state == "frozen"
    world.witnesses[C].handle(C, Prepare(job=JOB, term=7), world.witnesses[C].lease_until + 1)
    world.silent = {B}
    assert Kill in kinds(world.timer("renew")) and world.runner.state == "ended"


def test_end_that_is_cut_off_yields_to_a_higher_promise() -> None:
    """Otherwise the runner proposes it for ever, and with it holds the lease (found by the simulator)."""
    world = running(checkpointing=None)
    world.silent = {B, C}
    world.tell(exited(0))
    world.tell(RESULT)
    world.witnesses[C].handle(C, Prepare(job=JOB, term=7), world.witnesses[C].lease_until + 1)
    world.silent = {B}
    world.timer("renew")
    assert world.runner.state == "releasing", "one witness alone does not overrule an end whose lease runs"
    world.timer("lease")
    assert Concluded not in kinds(world.timer("renew")) and world.runner.state == "ended"


def test_runner_without_a_lease_yields_while_it_still_fetches() -> None:
    """A fetch may take long. Until it ends, the renewals would hold the lease at the other witnesses."""
    world = RunnerWorld()
    world.begin()
    assert world.runner.state == "restoring"
    world.silent = {B, C}
    world.timer("lease")
    world.witnesses[C].handle(C, Prepare(job=JOB, term=7), world.witnesses[C].lease_until + 1)
    world.silent = {B}
    world.timer("renew")
    assert world.runner.state == "ended"


def test_runner_ignores_a_refusal_of_another_term() -> None:
    world = running()
    stale = Refused(
        job=JOB, disk=DISK, term=9, round=0, promised=9, config=None, lease_left_s=0, needs_spec=False, finished=False
    )
    assert world.runner.on_refused(A, stale, at(1)) == [] and world.runner.state == "running"


@pytest.mark.parametrize(
    ("code", "budget", "reason", "errors", "fault"),
    [
        (75, 0, "asked for another node (exit 75)", 0, True),
        (85, 0, "asked to run again without a new checkpoint", 0, True),
        (3, 1, "failed (exit 3), retry 1 of 1", 1, True),
    ],
)
def test_exit_within_the_error_budget_does_not_end_the_job(
    code: int, budget: int, reason: str, errors: int, fault: bool
) -> None:
    world = running(error_budget=budget)
    world.tell(exited(code))
    ended = [effect for effect in world.tell(CheckpointStored(None, (), None)) if isinstance(effect, Ended)]
    assert ended == [Ended(reason)]
    record = records(world)[0]
    last = record.attempts[-1]
    assert record.errors == errors and last.fault == fault and last.exit_code == code
    assert avoided(record.attempts) == ((D,) if fault else ())


def test_guest_that_saved_a_checkpoint_may_ask_to_run_again_at_once() -> None:
    world = running()
    world.tell(exited(85))
    ended = [e for e in world.tell(CheckpointStored(b"m" * 32, (A,), 5)) if isinstance(e, Ended)]
    assert ended == [Ended("checkpointed")] and not records(world)[0].attempts[-1].fault


@pytest.mark.parametrize("budget", [0, 1])
def test_asking_to_run_again_is_a_failure_of_a_job_that_saves_nothing(budget: int) -> None:
    world = running(checkpointing=None, error_budget=budget)
    world.tell(exited(85))
    assert world.runner._ending.startswith("failed (exit 85: it asks to run again, but the job saves no checkpoints")
    assert world.runner._ending.endswith(", retry 1 of 1" if budget else ")")


def test_failure_of_the_node_spends_no_error() -> None:
    world = running(checkpointing=None)
    effects = world.tell(GuestExited(code=1, oom=False, forced_done=False, fault="its node's disk is full"))
    assert [e for e in effects if isinstance(e, Ended)] == [Ended("its node's disk is full (exit 1)")]
    assert records(world)[0].errors == 0 and records(world)[0].attempts[-1].fault


@pytest.mark.parametrize(("code", "budget"), [(3, 0), (127, 5), (126, 5)])
def test_failure_without_a_retry_left_ends_the_job(code: int, budget: int) -> None:
    world = running(error_budget=budget, checkpointing=None)
    assert kinds(world.tell(exited(code))) == [SaveResult]
    world.tell(RESULT)
    outcome = records(world)[0].outcome
    assert outcome is not None and outcome.kind == "failed" and outcome.exit_code == code


@pytest.mark.parametrize(("code", "forgiven"), [(3, False), (9, True), (127, True)])
def test_only_named_exit_codes_are_retried(code: int, forgiven: bool) -> None:
    world = running(error_budget=1, retry_codes=(9, 127), checkpointing=None)
    effects = world.tell(exited(code))
    assert kinds(effects) == ([Left, Ended] if forgiven else [SaveResult])


def test_node_where_the_job_failed_is_avoided_for_ever_longer() -> None:
    def failed(node: bytes, ended_s: int) -> Attempt:
        return Attempt(0, node, "", 1, 0, ended_unix_ms=ended_s * 1000, reason="failed (exit 3)", fault=True)

    assert shunned((failed(D, 100),), 159_000) == (D,) and shunned((failed(D, 100),), 160_000) == ()
    twice = (failed(D, 100), failed(E, 150), failed(D, 200))
    assert shunned(twice, 209_000) == (D, E) and shunned(twice, 319_000) == (D,) and shunned(twice, 320_000) == ()
    often = tuple(failed(D, 0) for _ in range(60))
    assert shunned(often, 3_599_000) == (D,) and shunned(often, 3_600_000) == (), "the pause is at most an hour"
    assert avoided(twice) == (D, E), "the nodes rank last from then on"


def test_job_at_its_deadline_gets_notice_saves_and_fails() -> None:
    world = RunnerWorld(make_spec(deadline_unix_ms=70_000, error_budget=5))
    world.begin()
    world.tell(GuestStarted(None))
    assert Notify in kinds(world.timer("deadline")) and world.now == pytest.approx(70.0)
    world.tell(exited(85))
    world.tell(STORED)
    (end,) = [effect for effect in world.tell(RESULT) if isinstance(effect, Concluded)]
    assert end.outcome.kind == "failed" and "deadline" in end.outcome.detail


@pytest.mark.parametrize("elsewhere", [True, False])
def test_guest_start_failure_ends_the_attempt(elsewhere: bool) -> None:
    world = RunnerWorld()
    world.begin()
    effects = world.tell(GuestFailed("no such image", elsewhere=elsewhere))
    if elsewhere:
        assert kinds(effects) == [Left, Ended] and records(world)[0].attempts[-1].fault
    else:
        assert kinds(effects) == [SaveResult]
        world.tell(RESULT)
        outcome = records(world)[0].outcome
        assert outcome is not None and outcome.kind == "failed" and "no such image" in outcome.detail


def test_cancel_kills_and_ends_the_job() -> None:
    world = running()
    assert kinds(world.tell(CancelWanted())) == [Kill] and world.tell(CancelWanted()) == []
    assert kinds(world.tell(exited(137))) == [SaveResult]
    world.tell(RESULT)
    outcome = records(world)[0].outcome
    assert outcome is not None and outcome.kind == "cancelled"


@pytest.mark.parametrize("late", ["before the result", "after the result"])
def test_running_save_does_not_change_the_end_of_a_cancelled_job(late: str) -> None:
    world = running()
    world.tell(CheckpointFound())
    world.tell(CancelWanted())
    world.tell(exited(137))
    if late == "before the result":
        assert world.tell(STORED) == []
    else:
        world.silent = {A, B, C}
    world.tell(RESULT)
    rounds = world.runner.record
    assert rounds.outcome is not None and rounds.commit is None
    if late == "after the result":
        assert world.tell(STORED) == [] and world.runner.record == rounds, (
            "the witnesses keep the outcome that they accepted"
        )


def test_last_save_that_fails_ends_the_attempt() -> None:
    world = running()
    assert kinds(world.tell(exited(0))) == [SaveCheckpoint]
    assert SaveResult in kinds(world.tell(CheckpointFailed("the disk is full")))


@pytest.mark.parametrize(("code", "told"), [(0, Closed), (75, Released)])
def test_witnesses_hear_of_an_end_or_of_a_release(code: int, told: type) -> None:
    world = running(checkpointing=None)
    world.tell(exited(code))
    if told is Closed:
        world.tell(RESULT)
    said = [effect.message for effect in world.seen if isinstance(effect, Send)]
    assert [type(message) for message in said if isinstance(message, Closed | Released)] == [told] * 3


def test_timer_of_a_notice_ends_with_the_guest() -> None:
    world = running()
    world.tell(VacateWanted(9.0, "the owner"))
    world.tell(exited(143))
    assert world.timer("grace") == []


def test_checkpoint_is_kept_when_the_owner_interrupts_its_fetch() -> None:
    record = stored_twice()
    world = RunnerWorld(make_spec(), make_start(term=record.attempts[-1].term + 1, record=record))
    world.begin()
    world.tell(VacateWanted(9.0, "the owner"))
    world.tell(GuestFailed("stopped", elsewhere=True, unfetched="lost"))
    assert world.runner.record.commit == record.commit and world.runner.record.abandoned is None


def test_job_without_a_checkpoint_does_not_go_home() -> None:
    world = running(home=HomePolicy("node", E, settle_s=10.0))
    world.observe(make_view(D, (A, B, C, D, E)))
    assert Notify not in kinds(world.timer("home"))
    world.tell(CheckpointFound())
    world.tell(STORED)
    assert Notify in kinds(world.timer("home"))


def test_failed_save_does_not_end_a_cancelled_job_twice() -> None:
    world = running()
    world.tell(CheckpointFound())
    world.tell(CancelWanted())
    assert SaveResult in kinds(world.tell(exited(137)))
    assert SaveResult not in kinds(world.tell(CheckpointFailed("the disk is full")))


def test_record_names_new_holders_of_the_last_checkpoint() -> None:
    world = running()
    world.tell(CheckpointFound())
    world.tell(STORED)
    assert world.tell(Recopied(b"another" * 4 + b"....", (C,))) == []
    assert [commit.holders for commit in commits(world)] == [(A, B)] * 3
    assert kinds(world.tell(Recopied(STORED.manifest or b"", (A, E)))) == [], "new holders are not a new checkpoint"
    assert [(commit.holders, commit.seq) for commit in commits(world)] == [((A, E), 1)] * 3


def commits(world: RunnerWorld) -> list[Commit]:
    return [record.commit for record in records(world) if record.commit is not None]


def test_cancel_known_to_the_witnesses_reaches_the_runner() -> None:
    world = running()
    for node in (B, C):
        world.witnesses[node].handle(A, Cancel(job=JOB, user="ada"), world.now)
    assert Kill in kinds(world.timer("renew"))


def test_kill_wanted_is_a_departure_and_not_an_error() -> None:
    world = running()
    assert kinds(world.tell(KillWanted("reclaimed"))) == [Kill]
    world.tell(exited(137))
    world.tell(CheckpointStored(None, (), None))
    assert world.runner.attempt.reason == "vacated: reclaimed" and records(world)[0].errors == 0


def test_failed_checkpoint_is_reported_and_the_job_continues() -> None:
    world = running()
    world.tell(CheckpointFound())
    effects = world.tell(CheckpointFailed("disk full"))
    assert StateChanged("running", "checkpoint not stored: disk full") in effects
    assert kinds(world.tell(CheckpointFound())) == [SaveCheckpoint]


def test_exit_during_a_save_waits_and_saves_once_more() -> None:
    world = running()
    world.tell(CheckpointFound())
    assert kinds(world.tell(exited(0))) == []
    effects = world.tell(STORED)
    assert [e.final for e in effects if isinstance(e, SaveCheckpoint)] == [True]
    assert SaveResult in kinds(world.tell(msgspec.structs.replace(STORED, manifest=b"n" * 32)))


def test_progress_is_recorded_with_the_next_round() -> None:
    world = running()
    world.tell(Progressed(41))
    world.timer("renew")
    assert records(world)[0].attempts[-1].last_step == 41


def test_witness_that_left_is_replaced_by_a_joint_round() -> None:
    world = running()
    world.witnesses[E] = msgspec_copy(world)
    world.silent = {C}
    view = make_view(D, (A, B, D, E), adverts=(make_advert(E, weight=64),))
    world.settle(world.runner.observe(view, at(world.now)))
    assert set(world.runner.config.nodes) == {A, B, E} and world.runner.config.number == 1
    assert {frozenset(world.witnesses[node].witness_record.config.members) for node in (A, B, E)} == {
        frozenset(voters(A, B, E))
    }
    assert world.settle(world.runner.observe(view, at(world.now))) == []
    last = [effect.message for effect in world.seen if isinstance(effect, Send) and effect.to == E][-1]
    assert isinstance(last, Accept) and not last.config.previous, "the new group knows that it decides alone"


def test_newcomer_that_cannot_vote_is_never_a_voter() -> None:
    """Regression: a group waited for ever for newcomers that could not read the job, and nothing else could change."""
    world = running()
    view = make_view(D, (A, B, D, E), adverts=(make_advert(E, weight=64),))
    world.witnesses[E] = msgspec_copy(world)
    world.silent = {C}
    world.unable = {E: "unknown field"}
    world.settle(world.runner.observe(view, at(world.now)))
    for _ in range(5):
        world.timer("renew")
    assert E not in world.runner.config.nodes and world.runner.holds_lease(world.now)
    world.unable = {}
    for _ in range(int(UNFIT_MAX_S)):
        world.timer("renew")
        if E in world.runner.config.nodes:
            break
    assert set(world.runner.config.nodes) == {A, B, E}, "it is asked again later"


def test_joint_group_whose_newcomers_fall_silent_is_given_up() -> None:
    world = RunnerWorld(start=make_start(members=(A,)))
    world.begin()
    world.tell(GuestStarted(None))
    for node in (B, C):
        world.witnesses[node] = msgspec_copy(world)
    accepts = [accept_of for accept_of in world.witnesses if accept_of != A]
    for node in accepts:  # they can be asked, and then vanish
        world.witnesses[node].handle = lambda *asked: []  # type: ignore[method-assign]
    view = make_view(D, (A, B, C, D), adverts=tuple(make_advert(node) for node in (A, B, C)))
    world.observe(view)
    assert set(world.runner.config.nodes) == {A, B, C} and world.runner.config.previous == voters(A)
    world.timer("renew")
    assert world.runner.config.members == voters(A) and not world.runner.config.previous
    assert world.runner.config.number == 2 and world.runner.holds_lease(world.now), "the old group decides again"
    for _ in range(10):
        world.timer("renew")
        assert world.runner.holds_lease(world.now)


def msgspec_copy(world: RunnerWorld) -> object:
    """Return a witness in its state right after it learned of the job."""
    from mesh.consensus.witness import Witness

    witness = world.witnesses[A]
    return Witness(
        msgspec.structs.replace(witness.witness_record, promised=0, accepted_term=0, holder=None), world.spec
    )


def test_numbers_continue_from_the_record_in_start() -> None:
    first = running()
    first.tell(CheckpointFound())
    first.tell(STORED)
    record = first.runner.record
    second = RunnerWorld(first.spec, make_start(term=5, record=record))
    second.begin()
    second.tell(GuestStarted(10))
    assert second.runner.attempt.number == 1 and second.runner.attempt.resumed_step == 10
    assert second.tell(CheckpointFound()) == [SaveCheckpoint(seq=2, parent=b"m" * 32, final=False)]


@pytest.mark.parametrize("event", [GuestStarted(None), exited(0), CheckpointFound(), STORED, RESULT, CancelWanted()])
def test_ended_runner_does_nothing(event: RunnerEvent) -> None:
    world = running(checkpointing=None)
    world.tell(exited(0))
    world.tell(RESULT)
    assert world.runner.state == "ended" and world.tell(event) == []


def test_new_attempt_replaces_a_dead_witness_without_another_change_of_the_view() -> None:
    """Regression: commits that follow each other quickly put off the renewal, and the group kept a dead witness for good."""
    world = RunnerWorld()
    world.silent = {C}
    world.witnesses[E] = msgspec_copy(world)
    world.observe(make_view(D, (A, B, D, E), adverts=(make_advert(E, weight=64),)))
    world.begin()
    assert set(world.runner.config.nodes) == {A, B, E}
