"""Where a job would go next, and when it goes home: the choice alone, and the runner that acts on it."""

import pytest

from mesh.jobs.effects import Effect, Notify, SetTimer
from mesh.jobs.ledger import Attempt, Ledger
from mesh.jobs.onward import GOES_HOME, HOME_MAX_S, MOVED, WENT_HOME, Onward, home_wait_s
from mesh.jobs.reports import (
    CheckpointFound,
    CheckpointStored,
    GuestExited,
    GuestStarted,
    KillWanted,
    MigrateWanted,
    VacateWanted,
)
from mesh.jobs.spec import Homing, JobSpec, SpecError, check_spec
from mesh.jobs.view import View
from placement.queue import Queue, Waiting
from placement.request import Request
from tests.jobs.worlds import JOB, A, B, C, D, Desk, E, at, make_advert, make_spec, make_start, make_view

STORED = CheckpointStored(manifest=b"m" * 32, holders=(A, B), step=10)
RECLAIMED = "vacated: its owner took the machine back"
FIRST = Homing("first", settle_s=60.0)


def view(*, free: tuple[bytes, ...] = (A, B, C, D, E), **weights: int) -> View:
    """Everybody lends; those who are not `free` have no place left. `a=64`: the weight of node A."""
    nodes = {"a": A, "b": B, "c": C, "d": D, "e": E}
    by_node = {nodes[name]: weight for name, weight in weights.items()}
    adverts = [make_advert(n, slots_free=int(n in free), weight=by_node.get(n, 8)) for n in nodes.values()]
    return make_view(D, tuple(nodes.values()), adverts=tuple(adverts))


def stay(number: int, node: bytes, reason: str = "", ran_s: float = 1000.0) -> Attempt:
    begun = 1_000_000 * number + 1
    return Attempt(number, node, "n", number + 1, begun, begun, begun + int(1000 * ran_s) if reason else 0, 0, reason)


def away(*before: Attempt, homing: Homing = FIRST, committed: bool = True, **spec: object) -> Desk:
    """The job runs on D, after these attempts elsewhere, and has committed a checkpoint there."""
    desk = Desk(make_spec(homing=homing, **spec), make_start(term=9, ledger=Ledger(attempts=before)))
    desk.begin()
    desk.tell(GuestStarted(None))
    if committed:
        desk.tell(CheckpointFound())
        desk.tell(STORED)
    return desk


def goes_home(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Notify) and effect.reason == GOES_HOME for effect in effects)


def waits(desk: Desk) -> bool:
    """Whether it has set a time to go."""
    return any(isinstance(effect, SetTimer) and effect.name == "home" for effect in desk.seen)


class TestHeir:
    def heir(self, desk: Desk, seen: View) -> bytes | None:
        desk.observe(seen)
        return desk.runner.onward.heir

    def test_it_is_the_first_in_rank_but_never_this_node(self) -> None:
        desk = away()
        assert self.heir(desk, view(free=(D,))) is None
        assert self.heir(desk, view(free=(D, E))) == E
        assert desk.runner.state == "running"

    def test_it_stays_until_it_cannot_take_the_job_or_another_is_much_better(self) -> None:
        desk = away()
        assert self.heir(desk, view(free=(B,))) == B
        assert {self.heir(desk, view(b=32, c=weight, e=weight)) for weight in range(8, 45)} == {B}
        assert self.heir(desk, view(free=(A, D))) == A, "B has no place left"
        assert self.heir(desk, view()) == A, "and A keeps it"
        assert self.heir(desk, view(a=1, b=1, c=1, e=64)) == E

    def test_one_where_the_job_failed_gives_way_to_any_other(self) -> None:
        failed = Attempt(0, B, "b", 1, 0, ended_unix_ms=-10_000_000, reason="failed (exit 1), retry 1 of 3", fault=True)
        desk = away(failed, homing=Homing("none"))
        assert self.heir(desk, view(free=(B,))) == B
        assert self.heir(desk, view(free=(B, C))) == C

    def test_a_gang_has_none(self) -> None:
        onward = Onward(D, JOB, make_spec(least_nodes=2, most_nodes=2))
        onward.look(view(), Ledger(attempts=(stay(0, A, RECLAIMED), stay(1, D))), at(0.0))
        assert onward.heir is None and onward.home is None and onward.due(Ledger()) is None

    def test_a_place_that_is_kept_for_another_job_is_not_free(self) -> None:
        seen = view(free=(B,))
        urgent = Waiting(Request(b"u" * 16, 0, "bob"), 100, 0)
        queue = Queue([urgent], {}, seen.adverts, 0)
        desk = away(stay(0, B, RECLAIMED))
        kept = View(D, seen.alive, adverts=seen.adverts, disks=seen.disks, queue=queue)
        assert self.heir(desk, kept) is None
        assert not waits(desk)

    @pytest.mark.parametrize("event", [VacateWanted(30.0, "the owner"), KillWanted("the owner"), MigrateWanted(None)])
    def test_at_a_notice_it_is_preferred(self, event: object) -> None:
        desk = away()
        desk.observe(view(free=(C, D)))
        desk.tell(event)
        desk.tell(GuestExited(85, False, False))
        desk.tell(CheckpointStored(None, (), None))
        assert desk.runner.state == "ended"
        assert {witness.cell.ledger.prefer for witness in desk.witnesses.values()} == {C}

    def test_where_its_user_wants_it_goes_before(self) -> None:
        desk = away()
        desk.observe(view(free=(C, D, E)))
        desk.tell(MigrateWanted(E))
        assert desk.runner.ledger.prefer == E


class TestHome:
    def test_it_goes_home_once_that_was_free_for_long_enough(self) -> None:
        desk = away(stay(0, B, RECLAIMED))
        desk.observe(view(free=(D, E)))
        assert not waits(desk)
        desk.now = 500.0
        desk.observe(view())
        assert goes_home(desk.timer("home")) and desk.now == 560.0
        assert desk.runner.state == "vacating" and desk.runner.ledger.prefer == B
        assert not goes_home(desk.observe(view())), "one notice at a time"

    def test_a_break_starts_the_wait_anew(self) -> None:
        desk = away(stay(0, B, RECLAIMED))
        desk.observe(view())
        desk.now = 50.0
        desk.observe(view(free=(D, E)))
        assert not goes_home(desk.timer("home")), "that timer means nothing any more"
        desk.now = 100.0
        desk.observe(view())
        assert goes_home(desk.timer("home")) and desk.now == 160.0

    def test_it_stays_for_a_while_where_it_has_just_come(self) -> None:
        desk = Desk(make_spec(homing=FIRST), make_start(term=9, ledger=Ledger(attempts=(stay(0, B, RECLAIMED),))))
        desk.begin()
        desk.observe(view())
        desk.now = 300.0
        desk.tell(GuestStarted(None))
        desk.tell(CheckpointFound())
        desk.tell(STORED)
        assert goes_home(desk.timer("home")) and desk.now == 360.0

    def test_it_does_not_go_before_it_has_saved_anything_nor_while_it_is_cut_off(self) -> None:
        desk = away(stay(0, B, RECLAIMED), committed=False)
        desk.observe(view())
        assert not goes_home(desk.timer("home"))
        desk.tell(CheckpointFound())
        desk.tell(STORED)
        desk.silent = {A, B, C}
        desk.timer("lease")
        assert desk.runner.state == "frozen" and not goes_home(desk.timer("home"))
        desk.silent = set()
        desk.timer("renew")
        assert desk.runner.state == "running" and goes_home(desk.timer("home"))

    @pytest.mark.parametrize(
        ("homing", "before", "owners", "expected"),
        [
            (Homing("first"), (stay(0, B, RECLAIMED), stay(1, C, "node lost")), {}, B),
            (Homing("first"), (stay(7, B, RECLAIMED),), {}, None),  # the first is forgotten
            (Homing("first"), (stay(0, B, MOVED),), {}, None),  # its user wants it here
            (Homing("first"), (stay(0, B, MOVED), stay(1, C, RECLAIMED)), {}, B),
            (Homing("first"), (stay(0, D, RECLAIMED), stay(1, C, RECLAIMED)), {}, None),  # it is there
            (Homing("node", C), (), {}, C),
            (Homing("none"), (stay(0, B, RECLAIMED),), {B: "ada"}, None),
            (Homing(), (stay(0, B, RECLAIMED),), {}, None),  # somebody else's
            (Homing(), (stay(0, A, RECLAIMED), stay(1, B, RECLAIMED)), {B: "ada"}, B),
            (Homing(), (stay(0, B, "checkpointed"), stay(1, C, WENT_HOME)), {B: "ada", C: "ada"}, None),
            (Homing(), (stay(0, B, "node lost"),), {B: "ada"}, None),
        ],
    )
    def test_what_is_home(
        self, homing: Homing, before: tuple[Attempt, ...], owners: dict[bytes, str], expected: bytes | None
    ) -> None:
        adverts = tuple(make_advert(node, user=owners.get(node, "owner")) for node in (A, B, C, D, E))
        onward = Onward(D, JOB, make_spec(homing=homing))
        seen = make_view(D, (A, B, C, D, E), adverts=adverts)
        onward.look(seen, Ledger(attempts=(*before, stay(9, D))), at(0.0))
        assert onward.home == expected
        bare = Onward(D, JOB, make_spec(homing=homing, checkpointing=None))
        bare.look(seen, Ledger(attempts=(*before, stay(9, D))), at(0.0))
        assert bare.home is None, "it would start over"

    def test_home_is_the_heir_as_soon_as_it_is_free(self) -> None:
        desk = away(stay(0, B, RECLAIMED))
        desk.observe(view(free=(D, E)))
        desk.observe(view(a=64, b=1))
        assert desk.runner.onward.heir == B

    def test_a_home_where_the_job_has_just_failed_cannot_take_it(self) -> None:
        failed = Attempt(0, B, "b", 1, 0, ended_unix_ms=0, reason="failed (exit 1), retry 1 of 3", fault=True)
        desk = away(failed)
        desk.observe(view())
        assert not waits(desk) and desk.runner.onward.heir != B


class TestWait:
    """Attempts that leave home soon after a return."""

    @pytest.mark.parametrize(
        ("stays", "expected"),
        [
            ((), 60.0),
            ((WENT_HOME, 30.0), 120.0),
            ((WENT_HOME, 30.0, WENT_HOME, 100.0), 240.0),  # 100 s are less than the 120 it had waited
            ((WENT_HOME, 30.0, WENT_HOME, 130.0), 60.0),  # that one lasted
            ((WENT_HOME, 1.0) * 9, HOME_MAX_S),
            (("node lost", 30.0), 60.0),  # not a return
        ],
    )
    def test_each_return_that_does_not_last_doubles_it(self, stays: tuple[object, ...], expected: float) -> None:
        attempts = [stay(0, B, RECLAIMED)]
        for left, ran_s in zip(stays[::2], stays[1::2], strict=True):
            attempts.append(stay(len(attempts), D, str(left)))
            attempts.append(stay(len(attempts), B, RECLAIMED, float(ran_s)))  # type: ignore[arg-type]
        attempts.append(stay(len(attempts), D))
        assert home_wait_s(60.0, B, attempts) == expected

    def test_a_home_that_did_not_take_it_after_all_counts_as_one(self) -> None:
        attempts = (stay(0, B, RECLAIMED), stay(1, C, WENT_HOME), stay(2, D))
        assert home_wait_s(60.0, B, attempts) == 120.0
        desk = away(*attempts[:2])
        desk.observe(view())
        assert goes_home(desk.timer("home")) and desk.now == 120.0

    def test_one_that_lasts_or_ends_of_its_own_counts_as_none(self) -> None:
        assert home_wait_s(60.0, B, (stay(0, C, WENT_HOME), stay(1, B))) == 60.0
        assert home_wait_s(60.0, B, (stay(0, C, WENT_HOME), stay(1, B, "checkpointed", 1.0))) == 60.0


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (make_spec(homing=Homing("node")), "one node"),
        (make_spec(homing=Homing("node", b"short")), "one node"),
        (make_spec(homing=Homing("first", A)), "one node"),
        (make_spec(homing=Homing("first", settle_s=0.5)), "3600"),
        (make_spec(homing=Homing("first", settle_s=float("nan"))), "3600"),
        (make_spec(homing=Homing("first"), checkpointing=None), "leave out --home"),
        (make_spec(homing=Homing("node", A), least_nodes=2, most_nodes=2), "several nodes"),
    ],
)
def test_a_home_that_no_job_can_have(spec: JobSpec, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        check_spec(spec)
