"""Choice of a job's next node and of the time to migrate back, and the runner that acts on it."""

import pytest

from mesh.consensus.effects import Effect, Notify, SetTimer
from mesh.consensus.next_placement import GOES_HOME, HOME_MAX_S, MOVED, WENT_HOME, NextPlacement, home_wait_s
from mesh.consensus.reports import (
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    VacateWanted,
)
from mesh.consensus.view import View
from mesh.model.record import Attempt, JobRecord
from mesh.model.spec import HomePolicy, JobSpec, SpecError, check_spec
from placement.queue import Queue, Waiting
from placement.request import Request
from tests.consensus.worlds import JOB, A, B, C, D, E, RunnerWorld, at, make_advert, make_spec, make_start, make_view

STORED = CheckpointStored(manifest=b"m" * 32, holders=(A, B), step=10)
RECLAIMED = "vacated: its owner took the machine back"
FIRST = HomePolicy("first", settle_s=60.0)


def view(*, free: tuple[bytes, ...] = (A, B, C, D, E), **weights: int) -> View:
    """Return a view in which all nodes lend and only the `free` ones have a slot left; `a=64` sets the weight of node A."""
    nodes = {"a": A, "b": B, "c": C, "d": D, "e": E}
    by_node = {nodes[name]: weight for name, weight in weights.items()}
    adverts = [make_advert(n, slots_free=int(n in free), weight=by_node.get(n, 8)) for n in nodes.values()]
    return make_view(D, tuple(nodes.values()), adverts=tuple(adverts))


def stay(number: int, node: bytes, reason: str = "", ran_s: float = 1000.0) -> Attempt:
    begun = 1_000_000 * number + 1
    return Attempt(number, node, "n", number + 1, begun, begun, begun + int(1000 * ran_s) if reason else 0, 0, reason)


def away(*before: Attempt, home: HomePolicy = FIRST, committed: bool = True, **spec: object) -> RunnerWorld:
    """Return a job that runs on D after the attempts `before` and, if `committed`, has a checkpoint from D."""
    world = RunnerWorld(make_spec(home=home, **spec), make_start(term=9, record=JobRecord(attempts=before)))
    world.begin()
    world.tell(GuestStarted(None))
    if committed:
        world.tell(CheckpointFound())
        world.tell(STORED)
    return world


def goes_home(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Notify) and effect.reason == GOES_HOME for effect in effects)


def waits(world: RunnerWorld) -> bool:
    """Return True if the runner has set a time to migrate."""
    return any(isinstance(effect, SetTimer) and effect.name == "home" for effect in world.seen)


class TestStandby:
    def standby(self, world: RunnerWorld, seen: View) -> bytes | None:
        world.observe(seen)
        return world.runner.next_placement.standby

    def test_standby_is_the_best_node_other_than_the_runners(self) -> None:
        world = away()
        assert self.standby(world, view(free=(D,))) is None
        assert self.standby(world, view(free=(D, E))) == E
        assert world.runner.state == "running"

    def test_standby_stays_until_full_or_much_worse_than_another_node(self) -> None:
        world = away()
        assert self.standby(world, view(free=(B,))) == B
        assert {self.standby(world, view(b=32, c=weight, e=weight)) for weight in range(8, 45)} == {B}
        assert self.standby(world, view(free=(A, D))) == A, "B has no slot left"
        assert self.standby(world, view()) == A, "A stays the standby"
        assert self.standby(world, view(a=1, b=1, c=1, e=64)) == E

    def test_node_where_the_job_failed_is_standby_only_as_a_last_resort(self) -> None:
        failed = Attempt(0, B, "b", 1, 0, ended_unix_ms=-10_000_000, reason="failed (exit 1), retry 1 of 3", fault=True)
        world = away(failed, home=HomePolicy("none"))
        assert self.standby(world, view(free=(B,))) == B
        assert self.standby(world, view(free=(B, C))) == C

    def test_gang_has_no_standby_and_no_home(self) -> None:
        next_placement = NextPlacement(D, JOB, make_spec(least_nodes=2, most_nodes=2))
        next_placement.look(view(), JobRecord(attempts=(stay(0, A, RECLAIMED), stay(1, D))), at(0.0))
        assert (
            next_placement.standby is None and next_placement.home is None and next_placement.due(JobRecord()) is None
        )

    def test_slot_reserved_for_another_job_is_not_free(self) -> None:
        seen = view(free=(B,))
        urgent = Waiting(Request(b"u" * 16, 0, "bob"), 100, 0)
        queue = Queue([urgent], {}, seen.adverts, 0)
        world = away(stay(0, B, RECLAIMED))
        kept = View(D, seen.alive, adverts=seen.adverts, disks=seen.disks, queue=queue)
        assert self.standby(world, kept) is None
        assert not waits(world)

    @pytest.mark.parametrize("event", [VacateWanted(30.0, "the owner"), KillWanted("the owner"), MigrateWanted(None)])
    def test_notice_makes_the_standby_the_preferred_next_node(self, event: object) -> None:
        world = away()
        world.observe(view(free=(C, D)))
        world.tell(event)
        world.tell(GuestExited(85, False, False))
        world.tell(CheckpointStored(None, (), None))
        assert world.runner.state == "ended"
        assert {witness.witness_record.record.prefer for witness in world.witnesses.values()} == {C}

    def test_node_named_by_the_user_has_precedence_over_the_standby(self) -> None:
        world = away()
        world.observe(view(free=(C, D, E)))
        world.tell(MigrateWanted(E))
        assert world.runner.record.prefer == E


class TestHome:
    def test_job_migrates_back_after_home_was_free_for_the_settle_time(self) -> None:
        world = away(stay(0, B, RECLAIMED))
        world.observe(view(free=(D, E)))
        assert not waits(world)
        world.now = 500.0
        world.observe(view())
        assert goes_home(world.timer("home")) and world.now == 560.0
        assert world.runner.state == "vacating" and world.runner.record.prefer == B
        assert not goes_home(world.observe(view())), "one notice at a time"

    def test_interruption_restarts_the_settle_time(self) -> None:
        world = away(stay(0, B, RECLAIMED))
        world.observe(view())
        world.now = 50.0
        world.observe(view(free=(D, E)))
        assert not goes_home(world.timer("home")), "the earlier timer is obsolete"
        world.now = 100.0
        world.observe(view())
        assert goes_home(world.timer("home")) and world.now == 160.0

    def test_settle_time_starts_with_the_guest(self) -> None:
        world = RunnerWorld(
            make_spec(home=FIRST), make_start(term=9, record=JobRecord(attempts=(stay(0, B, RECLAIMED),)))
        )
        world.begin()
        world.observe(view())
        world.now = 300.0
        world.timer("renew")
        world.tell(GuestStarted(None))
        world.tell(CheckpointFound())
        world.tell(STORED)
        assert goes_home(world.timer("home")) and world.now == 360.0

    def test_job_without_checkpoint_or_lease_does_not_migrate_back(self) -> None:
        world = away(stay(0, B, RECLAIMED), committed=False)
        world.observe(view())
        assert not goes_home(world.timer("home"))
        world.tell(CheckpointFound())
        world.tell(STORED)
        world.silent = {A, B, C}
        world.timer("lease")
        assert world.runner.state == "frozen" and not goes_home(world.timer("home"))
        world.silent = set()
        world.timer("renew")
        assert world.runner.state == "running" and goes_home(world.timer("home"))

    @pytest.mark.parametrize(
        ("home", "before", "owners", "expected"),
        [
            (HomePolicy("first"), (stay(0, B, RECLAIMED), stay(1, C, "node lost")), {}, B),
            (HomePolicy("first"), (stay(7, B, RECLAIMED),), {}, None),  # the record no longer has the first attempt
            (HomePolicy("first"), (stay(0, B, MOVED),), {}, None),  # the user moved the job here
            (HomePolicy("first"), (stay(0, B, MOVED), stay(1, C, RECLAIMED)), {}, B),
            (
                HomePolicy("first"),
                (stay(0, D, RECLAIMED), stay(1, C, RECLAIMED)),
                {},
                None,
            ),  # the job already runs at home
            (HomePolicy("node", C), (), {}, C),
            (HomePolicy("none"), (stay(0, B, RECLAIMED),), {B: "ada"}, None),
            (HomePolicy(), (stay(0, B, RECLAIMED),), {}, None),  # B belongs to another user
            (HomePolicy(), (stay(0, A, RECLAIMED), stay(1, B, RECLAIMED)), {B: "ada"}, B),
            (HomePolicy(), (stay(0, B, "checkpointed"), stay(1, C, WENT_HOME)), {B: "ada", C: "ada"}, None),
            (HomePolicy(), (stay(0, B, "node lost"),), {B: "ada"}, None),
        ],
    )
    def test_home_follows_the_policy_and_earlier_attempts(
        self, home: HomePolicy, before: tuple[Attempt, ...], owners: dict[bytes, str], expected: bytes | None
    ) -> None:
        adverts = tuple(make_advert(node, user=owners.get(node, "owner")) for node in (A, B, C, D, E))
        next_placement = NextPlacement(D, JOB, make_spec(home=home))
        seen = make_view(D, (A, B, C, D, E), adverts=adverts)
        next_placement.look(seen, JobRecord(attempts=(*before, stay(9, D))), at(0.0))
        assert next_placement.home == expected
        bare = NextPlacement(D, JOB, make_spec(home=home, checkpointing=None))
        bare.look(seen, JobRecord(attempts=(*before, stay(9, D))), at(0.0))
        assert bare.home is None, "a job without checkpoints would restart from the beginning"

    def test_home_belongs_to_the_same_user_key(self) -> None:
        namesake = make_advert(B, user="ada", user_key=b"another key".ljust(32, b"\0"))
        next_placement = NextPlacement(D, JOB, make_spec())
        record = JobRecord(attempts=(stay(0, B, RECLAIMED), stay(9, D)))
        next_placement.look(make_view(D, (B, D), adverts=(namesake,)), record, at(0.0))
        assert next_placement.home is None

    def test_home_becomes_the_standby_as_soon_as_it_is_free(self) -> None:
        world = away(stay(0, B, RECLAIMED))
        world.observe(view(free=(D, E)))
        world.observe(view(a=64, b=1))
        assert world.runner.next_placement.standby == B

    def test_home_where_the_job_just_failed_is_skipped(self) -> None:
        failed = Attempt(0, B, "b", 1, 0, ended_unix_ms=0, reason="failed (exit 1), retry 1 of 3", fault=True)
        world = away(failed)
        world.observe(view())
        assert not waits(world) and world.runner.next_placement.standby != B


class TestWait:
    """Attempts that leave home soon after a return."""

    @pytest.mark.parametrize(
        ("stays", "expected"),
        [
            ((), 60.0),
            ((WENT_HOME, 30.0), 120.0),
            ((WENT_HOME, 30.0, WENT_HOME, 100.0), 240.0),  # 100 s are less than the wait of 120 s
            ((WENT_HOME, 30.0, WENT_HOME, 130.0), 60.0),  # the second return lasted
            ((WENT_HOME, 60.0), 60.0),  # as long as the wait
            ((WENT_HOME, 1.0) * 9, HOME_MAX_S),
            (("node lost", 30.0), 60.0),  # not a return
        ],
    )
    def test_each_short_return_doubles_the_wait(self, stays: tuple[object, ...], expected: float) -> None:
        attempts = [stay(0, B, RECLAIMED)]
        for left, ran_s in zip(stays[::2], stays[1::2], strict=True):
            attempts.append(stay(len(attempts), D, str(left)))
            attempts.append(stay(len(attempts), B, RECLAIMED, float(ran_s)))  # type: ignore[arg-type]
        attempts.append(stay(len(attempts), D))
        assert home_wait_s(60.0, B, attempts) == expected

    def test_failed_return_doubles_the_wait(self) -> None:
        attempts = (stay(0, B, RECLAIMED), stay(1, C, WENT_HOME), stay(2, D))
        assert home_wait_s(60.0, B, attempts) == 120.0
        world = away(*attempts[:2])
        world.observe(view())
        assert goes_home(world.timer("home")) and world.now == 120.0
        elsewhere = (stay(0, B, RECLAIMED), stay(1, C, WENT_HOME), stay(2, D, RECLAIMED, 999.0))
        assert home_wait_s(60.0, B, elsewhere) == 120.0, "a long stay that was not at home"

    def test_lasting_or_self_ended_return_keeps_the_wait(self) -> None:
        assert home_wait_s(60.0, B, (stay(0, C, WENT_HOME), stay(1, B))) == 60.0
        assert home_wait_s(60.0, B, (stay(0, C, WENT_HOME), stay(1, B, "checkpointed", 1.0))) == 60.0


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (make_spec(home=HomePolicy("node")), "one node"),
        (make_spec(home=HomePolicy("node", b"short")), "one node"),
        (make_spec(home=HomePolicy("first", A)), "one node"),
        (make_spec(home=HomePolicy("first", settle_s=0.5)), "3600"),
        (make_spec(home=HomePolicy("first", settle_s=float("nan"))), "3600"),
        (make_spec(home=HomePolicy("first"), checkpointing=None), "leave out --home"),
        (make_spec(home=HomePolicy("node", A), least_nodes=2, most_nodes=2), "several nodes"),
    ],
)
def test_invalid_home_is_refused(spec: JobSpec, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        check_spec(spec)
