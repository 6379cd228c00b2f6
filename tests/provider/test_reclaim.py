"""Stages of a reclaim, one by one, for guests and a guard that record what is done to them."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.checkpoints.loss_estimate import Lost
from mesh.consensus.contract import VACATED
from mesh.model.spec import format_job
from mesh.provider import reclaim as module
from mesh.provider.presence import Stand
from mesh.provider.reclaim import AGAIN_S, DEPARTED_KEPT, NOT_BACK, Leave, Reclaimer
from tests.consensus.worlds import make_spec

JOB, OTHER = b"j" * 16, b"o" * 16
LEND, SUSPEND = Stand(), Stand("suspend", ("keyboard",), pressing=True)
SUSPEND_GPU = Stand("suspend", ("gpu",), pressing=True)
VACATE, AWAY = Stand("vacate", ("keyboard",), pressing=True), Stand("vacate", ("keyboard",))
SOON, LATER = Leave(0.0, 60.0, "the owner is back", "typing"), Leave(60.0, 60.0, "the owner is back", "typing")


class Attempt:
    """A guest that stands still, and is still, as soon as it is told."""

    number = 3

    def __init__(self) -> None:
        self.portions = [SimpleNamespace(uuid="GPU-1")]
        self.stages: dict[str, float] = {}
        self.held, self.holds = "", list[str]()
        self.reserve_s = 0.0
        self.spec, self.printed = make_spec(name="train"), list[str]()
        self.still_after = 0

    def hold(self, why: str) -> None:
        self.held = why
        self.holds.append(why)

    async def stands_still(self) -> bool:
        self.still_after -= 1
        return self.still_after < 0

    def mark(self, stage: str) -> None:
        self.stages.setdefault(stage, module.boot_s())

    def lost(self) -> Lost:
        return Lost(12.0)

    def log_line(self, text: str) -> None:
        self.printed.append(text)


class World:
    """The jobs of a node, their events, the orders that reached them, and the gates of its GPU guard."""

    def __init__(self, *jobs: bytes, guarded: bool = False) -> None:
        self.attempts = {job: Attempt() for job in jobs}
        self.events: list[tuple[bytes, str, str]] = []
        self.vacated: list[tuple[float, str, bytes]] = []
        self.killed: list[tuple[str, tuple[bytes, ...]]] = []
        self.settled: list[tuple[tuple[bytes, ...], float]] = []
        self.times: list[dict[str, float]] = []
        self.now = 1000.0
        self.tenants = {
            format_job(job): SimpleNamespace(closed_by=set(), set_gate=self._gate, job=job) for job in jobs if guarded
        }
        self.guarded, self.pause_problem, self.problem = list[str](), "", ""
        self.event_log = SimpleNamespace(
            add=lambda job, kind, text, **more: self.events.append((job, more["new"], text))
        )
        self.departure_planner = SimpleNamespace(settle=lambda jobs, s: self.settled.append((tuple(jobs), s)))
        whole: Any = self
        self.reclaimer = Reclaimer(whole, whole, "ada", "node1", self.times.append)

    # the job service

    async def vacate(self, seconds: float, reason: str, jobs: Sequence[bytes]) -> list[bytes]:
        self.vacated += [(seconds, reason, job) for job in jobs]
        for job in jobs:
            self.attempts[job].mark("notice")
        return list(jobs)

    async def kill(self, reason: str, jobs: Sequence[bytes] | None) -> list[bytes]:
        self.killed.append((reason, tuple(self.attempts if jobs is None else jobs)))
        return list(self.attempts if jobs is None else jobs)

    # the guard

    def tenant(self, name: str) -> Any:
        return self.tenants.get(name)

    def _gate(self, closed: bool, why: str, by: str) -> None:
        self.guarded.append("closed" if closed else "open")

    async def pause(self, tenant: Any, by: str) -> str:
        self.guarded.append("paused")
        tenant.closed_by.add(by)
        return self.problem

    async def resume(self, tenant: Any, by: str) -> str:
        self.guarded.append("resumed")
        if not self.problem:
            tenant.closed_by.discard(by)
        return self.problem

    # the test

    async def look(self, stand: Stand, leave: Leave = SOON) -> None:
        self.reclaimer.look(lambda uuids: stand, lambda stand: leave)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def ends(self, job: bytes, reason: str = VACATED + "the owner is back") -> None:
        attempt: Any = self.attempts.pop(job)
        self.reclaimer.on_attempt_ended(job, attempt, reason)

    def states(self, job: bytes = JOB) -> list[str]:
        return [new for of, new, _ in self.events if of == job]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_LOOK_S", 0.0)


def clock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "boot_s", lambda: world.now)


async def test_guest_is_stopped_once_and_goes_on_when_the_owner_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB)
    clock(world, monkeypatch)
    attempt = world.attempts[JOB]
    attempt.still_after = 3
    world.reclaimer.look(lambda uuids: SUSPEND, lambda stand: SOON)
    assert attempt.held == SUSPEND.why, "before this returns"
    for _ in range(3):
        await world.look(SUSPEND)
    assert attempt.held == SUSPEND.why and "suspended" in attempt.stages and attempt.still_after < 0
    assert world.events == [(JOB, "suspended", SUSPEND.why)], "told once, when it stood still"
    world.now += 7.5
    for _ in range(3):
        await world.look(LEND)
    assert attempt.held == "" and "suspended" not in attempt.stages
    assert world.events[1:] == [(JOB, "goes on", "it was stopped for 7.5 s")]
    await world.look(SUSPEND)
    assert world.states() == ["suspended", "goes on", "suspended"], "and stops again"


async def held_up() -> tuple[World, asyncio.Event]:
    """Return a world with a suspended guest, which resumes only once the event is set."""
    world, gate = World(JOB, guarded=True), asyncio.Event()

    async def slow(tenant: Any, by: str) -> str:
        await gate.wait()
        return ""

    await world.look(SUSPEND_GPU)
    world.resume = slow  # type: ignore[method-assign]
    return world, gate


async def test_guest_whose_owner_comes_back_while_it_resumes_is_stopped_once_it_has() -> None:
    world, gate = await held_up()
    await world.look(LEND)
    await world.look(LEND)
    await world.look(SUSPEND)
    assert not world.attempts[JOB].held, "the driver needs its processes to run while it brings the memory back"
    assert world.guarded == ["closed", "paused"], "its gate is still closed"
    gate.set()
    await world.settle()
    await world.look(SUSPEND)
    assert world.attempts[JOB].held and world.states() == ["suspended", "goes on", "suspended"]


async def test_guest_that_nobody_stopped_is_left_alone() -> None:
    world = World(JOB)
    await world.look(LEND)
    assert world.attempts[JOB].holds == [] and not world.events


async def test_guest_with_notice_from_elsewhere_is_suspended_once_it_had_the_owners_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a user who moved their job gave it up to a day in which no owner at the keyboard stopped it."""
    world = World(JOB)
    clock(world, monkeypatch)
    world.attempts[JOB].mark("notice")
    world.now += LATER.notice - 1
    await world.look(SUSPEND, LATER)
    assert world.attempts[JOB].held == "" and not world.events
    world.now += 1
    await world.look(SUSPEND, LATER)
    assert world.attempts[JOB].held == SUSPEND.why and world.states() == ["suspended"]


async def test_gate_closes_at_once_and_gpu_memory_is_freed_for_an_owner_on_the_gpu() -> None:
    world = World(JOB, guarded=True)
    attempt = world.attempts[JOB]
    world.reclaimer.look(lambda uuids: SUSPEND_GPU, lambda stand: SOON)
    assert world.guarded == ["closed"] and attempt.held == "", "the driver cannot suspend a stopped process"
    await world.settle()
    assert world.guarded == ["closed", "paused"] and attempt.holds == ["", SUSPEND_GPU.why]
    assert world.events[0][2].endswith("its GPU memory is free for the owner")
    await world.look(SUSPEND_GPU)
    assert world.guarded == ["closed", "paused"], "once"
    world.problem = "no room"
    await world.look(LEND)
    assert world.guarded[2:] == ["resumed"] and world.states() == ["suspended"]
    assert attempt.held == SUSPEND_GPU.why, "it does not run without its memory"
    await world.look(SUSPEND_GPU)
    assert attempt.held == SUSPEND_GPU.why, "nor when the owner is back"
    await world.look(LEND)
    assert world.guarded[3:] == [], f"tried again after {AGAIN_S} s"
    world.reclaimer._guests[JOB].again_at = 0.0
    world.problem = ""
    await world.look(LEND)
    assert world.guarded[3:] == ["resumed"] and world.states() == ["suspended", "goes on"]
    await world.look(SUSPEND_GPU)
    assert world.guarded[4:] == ["closed", "paused"], "its memory is freed each time"


async def test_owner_at_the_keyboard_gets_no_gpu_memory_until_they_use_the_gpu() -> None:
    world = World(JOB, guarded=True)
    await world.look(SUSPEND)
    assert world.guarded == ["closed"] and world.attempts[JOB].held == SUSPEND.why
    world.problem = "the driver cannot"
    await world.look(SUSPEND_GPU)
    assert world.guarded == ["closed", "closed", "paused"]
    assert world.events[-1][2].endswith("its GPU memory stays: the driver cannot") and world.attempts[JOB].held
    world.pause_problem = "no driver that can"
    other = World(JOB, guarded=True)
    other.pause_problem = "no driver that can"
    await other.look(SUSPEND_GPU)
    assert other.guarded == ["closed"] and other.attempts[JOB].held == SUSPEND_GPU.why


async def test_all_guests_leave_by_one_plan_with_notice_and_pause() -> None:
    world = World(JOB, OTHER)
    await world.look(VACATE, Leave(20.0, 40.0, "the owner is back", "typing"))
    assert world.settled == [((JOB, OTHER), 60.0)]
    assert world.vacated == [(60.0, "the owner is back", JOB), (60.0, "the owner is back", OTHER)]
    assert all(attempt.reserve_s == 40.0 and not attempt.held for attempt in world.attempts.values())
    await world.look(VACATE)
    assert len(world.vacated) == 2, "asked once"
    await world.reclaimer.leave([JOB], LATER)
    assert world.vacated[2:] == [(120.0, "the owner is back", JOB)]
    assert world.attempts[JOB].reserve_s == 40.0, "it is leaving already, in the time that it was given"


async def test_stopped_guest_runs_again_for_its_notice() -> None:
    world = World(JOB, guarded=True)
    await world.look(SUSPEND_GPU)
    await world.look(VACATE, LATER)
    assert world.guarded[2:] == ["resumed"] and world.attempts[JOB].held == "" and len(world.vacated) == 1
    world = World(JOB, guarded=True)
    await world.look(SUSPEND_GPU)
    world.problem = "no room"
    await world.look(VACATE, LATER)
    assert not world.vacated and world.killed == [(f"the owner is back; {NOT_BACK}", (JOB,))]


@pytest.mark.parametrize("later", [VACATE, SUSPEND_GPU])
async def test_guest_leaves_although_the_caller_stops_waiting(later: Stand) -> None:
    """Ctrl-C of `mesh reclaim` while the driver brings its memory back: an order by hand holds, whatever the owner does then."""
    world, gate = await held_up()
    for _ in range(2):  # and asks again
        order = asyncio.create_task(
            world.reclaimer.leave([JOB], Leave(30.0, 0.0, "the owner says so", "by hand", True))
        )
        await world.settle()
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
    gate.set()
    await world.settle()
    assert {job for *_, job in world.vacated} == {JOB} and not world.killed
    assert world.states() == ["suspended", "goes on"], "it is resumed once"
    asked = len(world.vacated)
    await world.look(later)
    assert len(world.vacated) == asked


async def test_order_to_leave_that_failed_is_carried_out_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB)
    clock(world, monkeypatch)

    def fails(jobs: Sequence[bytes], seconds: float) -> None:
        raise RuntimeError("no plan")

    settle, world.departure_planner.settle = world.departure_planner.settle, fails
    await world.look(VACATE, LATER)
    await world.look(VACATE, LATER)
    assert not world.vacated and not world.attempts[JOB].held, "it has had no notice"
    world.departure_planner.settle = settle
    await world.look(LEND, LATER)
    await world.look(LEND, LATER)
    assert world.vacated == [(LATER.notice + LATER.pause, LATER.reason, JOB)], "asked once"


async def test_guest_whose_memory_comes_back_with_an_error_is_killed() -> None:
    world = World(JOB, guarded=True)
    await world.look(SUSPEND_GPU)

    async def broken(tenant: Any, by: str) -> str:
        raise RuntimeError("driver")

    world.resume = broken  # type: ignore[method-assign]
    await world.look(LEND)
    assert world.attempts[JOB].held == SUSPEND_GPU.why, "it does not run without its memory"
    await world.look(VACATE, LATER)
    assert not world.vacated and world.killed == [(f"the owner is back; {NOT_BACK}", (JOB,))]


async def test_guest_that_is_still_there_after_its_notice_is_stopped_while_the_owner_is_present(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(JOB)
    clock(world, monkeypatch)
    leave = Leave(30.0, 60.0, "the owner is back", "typing")
    await world.look(VACATE, leave)
    world.now += 29.9
    await world.look(VACATE, leave)
    assert not world.attempts[JOB].held, "its notice is not over"
    world.now += 0.2
    await world.look(VACATE, leave)
    assert world.attempts[JOB].held == "the owner is back" and world.states() == ["paused"]
    await world.look(AWAY, leave)
    assert not world.attempts[JOB].held and world.states() == ["paused", "goes on"]
    by_hand = Leave(30.0, 60.0, "the owner says so", "by hand", by_hand=True)
    for asked, stopped in ((by_hand, True), (Leave(30.0, 0.0, "no pause", "typing"), False)):
        other = World(JOB)
        clock(other, monkeypatch)
        await other.look(AWAY, asked)
        other.now += 30.1
        await other.look(AWAY, asked)
        assert bool(other.attempts[JOB].held) is stopped, "an order by hand holds when the owner goes"


async def test_guest_that_has_exited_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB)
    clock(world, monkeypatch)
    await world.look(VACATE, LATER)
    world.now += LATER.notice + 1
    world.attempts[JOB].mark("exited")
    await world.look(VACATE, LATER)
    assert not world.attempts[JOB].held and not world.states()


async def test_guest_is_stopped_and_killed_on_time_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.0)
    world = World(JOB, OTHER)
    await world.look(VACATE, Leave(0.0, 0.2, "the owner is back", "typing"))
    world.attempts[OTHER].mark("exited")
    async with asyncio.timeout(20):
        while not world.attempts[JOB].held or not world.killed:
            await asyncio.sleep(0.01)
    assert world.killed == [("the owner is back; it had notice, and its time is over", (JOB,))]


async def test_kill_is_by_hand_and_spares_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB, OTHER)
    clock(world, monkeypatch)
    await world.reclaimer.kill([JOB], "the owner killed it", "by hand")
    assert world.killed == [("the owner killed it", (JOB,))]
    world.now += 2
    world.ends(JOB)
    assert world.reclaimer.departed[JOB].stages_ms == {"gone": 2000.0} and "by hand" in world.events[0][2]
    world.ends(OTHER)
    assert list(world.reclaimer.departed) == [JOB], "nobody sent the other one away"
    world = World(JOB, OTHER)
    await world.reclaimer.kill(None, "all", "by hand")
    for job in (JOB, OTHER):
        world.ends(job)
    assert set(world.reclaimer.departed) == {JOB, OTHER}


async def test_departure_is_reported_with_its_times_and_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB)
    clock(world, monkeypatch)
    attempt = world.attempts[JOB]
    attempt.stages["started"] = world.now - 100
    world.now += 1
    await world.look(VACATE, LATER)
    world.now += 2
    attempt.mark("exited")
    world.now += 0.5
    world.ends(JOB)
    words = "by ada, the owner of node1: typing; lost: 12.0 s of work since its last checkpoint"
    assert world.events == [(JOB, "taken back", words)] and attempt.printed == [f"taken back {words}"]
    gone = world.reclaimer.departed[JOB]
    assert gone.stages_ms == {"notice": 0.0, "exited": 2000.0, "gone": 2500.0} and gone.lost == Lost(12.0)
    assert (gone.user, gone.name) == (attempt.spec.user, "train")
    assert world.times == [{"notice": 0.0, "exited": 2.0, "gone": 2.5}]


async def test_job_that_ended_by_itself_was_not_taken_back() -> None:
    world = World(JOB)
    await world.look(SUSPEND)
    world.ends(JOB, "done")
    assert not world.reclaimer.departed and "taken back" not in world.states()
    world = World(JOB)
    await world.look(VACATE)
    old: Any = world.attempts[JOB]
    world.attempts[JOB] = Attempt()
    await world.look(LEND)
    world.reclaimer.on_attempt_ended(JOB, old, VACATED)
    assert not world.reclaimer.departed, "another attempt of the job runs here now"
    world = World(JOB)
    await world.look(VACATE)
    world.ends(JOB, "failed: it crashed")
    assert "taken back" not in world.states() and JOB in world.reclaimer.departed


async def test_reports_of_departures_are_bounded() -> None:
    world = World(*(number.to_bytes(16) for number in range(DEPARTED_KEPT + 3)))
    jobs = list(world.attempts)
    await world.look(VACATE)
    for job in jobs:
        world.ends(job)
    assert list(world.reclaimer.departed) == jobs[3:] and not world.reclaimer._guests


async def test_report_ends_when_the_job_is_sent_away_again() -> None:
    world = World(JOB)
    for send in (lambda: world.look(VACATE), lambda: world.reclaimer.kill([JOB], "killed", "by hand")):
        world.attempts[JOB] = Attempt()
        await world.look(VACATE)
        world.ends(JOB)
        assert JOB in world.reclaimer.departed
        world.attempts[JOB] = Attempt()
        await send()
        assert JOB not in world.reclaimer.departed
        world.ends(JOB)


async def test_departure_that_loses_nothing_says_so() -> None:
    world = World(JOB)
    world.attempts[JOB].lost = lambda: Lost(0.0)  # type: ignore[method-assign]
    await world.look(VACATE)
    world.ends(JOB)
    assert world.events[-1][2].endswith("typing; nothing is lost")


async def test_guest_is_stopped_for_the_owner_of_its_own_gpus() -> None:
    world = World(JOB, OTHER)
    world.attempts[OTHER].portions = [SimpleNamespace(uuid="GPU-2"), SimpleNamespace(uuid="GPU-3")]
    world.reclaimer.look(lambda uuids: SUSPEND if "GPU-3" in uuids else LEND, lambda stand: SOON)
    await world.settle()
    assert world.attempts[OTHER].held and not world.attempts[JOB].held


async def test_guest_is_asked_once_by_looks_that_follow_at_once() -> None:
    world = World(JOB)
    for _ in range(2):
        world.reclaimer.look(lambda uuids: VACATE, lambda stand: LATER)
    await world.settle()
    assert len(world.vacated) == 1


async def test_order_by_hand_that_is_being_carried_out_is_not_given_again() -> None:
    world, gate = await held_up()
    order = asyncio.create_task(world.reclaimer.leave([JOB], LATER))
    await world.settle()
    await world.look(SUSPEND_GPU, LATER)
    gate.set()
    assert await order == [JOB] and len(world.vacated) == 1


@pytest.mark.parametrize(("takes_s", "left_s"), [(20.0, 40.0), (70.0, 0.0)])
async def test_time_in_which_its_memory_comes_back_is_part_of_the_notice(
    takes_s: float, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, gate = await held_up()
    clock(world, monkeypatch)
    first = asyncio.create_task(world.reclaimer.leave([JOB], LATER))
    await world.settle()
    world.now += takes_s
    second = asyncio.create_task(world.reclaimer.leave([JOB], LATER))
    await world.settle()
    gate.set()
    await asyncio.gather(first, second)
    told = [seconds for seconds, *_ in world.vacated]
    assert told == [left_s + LATER.pause] * (2 if left_s else 1), "from the first order on"


async def test_guest_without_notice_is_killed_if_its_memory_is_slow_to_come_back() -> None:
    world, gate = await held_up()
    await world.look(VACATE, SOON)
    assert world.killed == [(f"the owner is back; {NOT_BACK}", (JOB,))] and not world.vacated
    gate.set()


async def test_kill_tells_of_the_order_that_came_first_and_goes_on_without_its_caller() -> None:
    world, gate = World(JOB), asyncio.Event()
    kill = world.kill

    async def slow(reason: str, jobs: Sequence[bytes] | None) -> list[bytes]:
        await gate.wait()
        return await kill(reason, jobs)

    world.kill = slow  # type: ignore[method-assign]
    killing = asyncio.create_task(world.reclaimer.kill([JOB], "killed", "by hand"))
    await world.settle()
    await world.look(VACATE, LATER)
    assert not world.vacated, "it is not asked to leave as well"
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    gate.set()
    await world.settle()
    assert world.killed == [("killed", (JOB,))]
    world.ends(JOB)
    assert "node1: by hand" in world.events[-1][2]
    world = World(JOB)
    await world.look(VACATE, LATER)
    await world.reclaimer.kill([JOB], "killed", "by hand")
    world.ends(JOB)
    assert "node1: typing" in world.events[-1][2]


async def test_order_to_leave_ends_with_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB, guarded=True)
    clock(world, monkeypatch)
    await world.look(VACATE, LATER)
    old = world.reclaimer._guests[JOB]
    world.ends(JOB)
    world.attempts[JOB] = Attempt()
    await world.look(LEND)
    world.now += LATER.notice + LATER.pause + 1
    world.reclaimer._see_to_leaving(JOB, old, LATER)
    world.reclaimer._see_that_it_left(JOB, old, LATER)
    await world.settle()
    assert not world.guarded and not world.killed and not world.attempts[JOB].held


async def test_end_of_an_earlier_attempt_leaves_the_one_that_runs_alone() -> None:
    world = World(JOB)
    await world.look(VACATE, LATER)
    old: Any = world.attempts[JOB]
    world.attempts[JOB] = Attempt()
    await world.look(SUSPEND)
    world.reclaimer.on_attempt_ended(JOB, old, VACATED)
    await world.look(LEND)
    assert not world.attempts[JOB].held, "it is known that it was stopped"
    await world.look(VACATE, LATER)
    world.reclaimer.on_attempt_ended(JOB, old, VACATED)
    assert not world.reclaimer.departed and not world.times


async def test_memory_is_freed_in_the_pause_after_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB, guarded=True)
    clock(world, monkeypatch)
    await world.look(VACATE, LATER)
    world.now += LATER.notice + 1
    await world.look(VACATE, LATER)
    assert world.guarded == ["closed", "paused"] and world.attempts[JOB].held


async def test_memory_is_not_freed_while_it_comes_back() -> None:
    world, gate = World(JOB, guarded=True), asyncio.Event()

    async def slow(tenant: Any, by: str) -> str:
        await gate.wait()
        return ""

    await world.look(SUSPEND)
    world.tenants[format_job(JOB)].closed_by.add("presence")
    world.resume = slow  # type: ignore[method-assign]
    await world.look(LEND)
    await world.look(SUSPEND_GPU)
    assert world.guarded == ["closed"] and not world.attempts[JOB].held
    gate.set()


async def test_gate_that_the_owner_does_not_hold_is_not_opened_for_them() -> None:
    world = World(JOB, guarded=True)
    await world.look(SUSPEND)
    world.tenants[format_job(JOB)].closed_by.add("recall")
    await world.look(LEND)
    assert world.guarded == ["closed"] and world.states() == ["suspended", "goes on"]


async def test_guest_that_is_let_go_meanwhile_is_waited_for_no_longer() -> None:
    world = World(JOB)
    attempt = world.attempts[JOB]
    attempt.still_after = module.STILL_LOOKS
    await world.look(SUSPEND)
    work = world.reclaimer._guests[JOB].work
    assert work is not None and not work.done(), "it still moves"
    attempt.hold("")
    await world.settle()
    assert work.done()


async def test_time_that_a_guest_stood_is_counted_from_its_last_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(JOB)
    clock(world, monkeypatch)
    await world.look(SUSPEND)
    stages = world.attempts[JOB].stages
    stages["paused"] = world.now + 5
    world.now += 8
    await world.look(LEND)
    assert stages == {} and world.events[-1][2] == "it was stopped for 3.0 s"
