"""Who may pause and resume a tenant, in which order its gate and its memory move, and what a refusing driver changes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_guard.pause import CHECKPOINTED, RUNNING, PauseError
from mesh.gpus.pausing import Pausing


class FakeDriver:
    """The driver's pausing: it frees and restores the memory of processes, or refuses."""

    def __init__(self) -> None:
        self.refuses = False
        self.states: dict[int, int] | None = {7: CHECKPOINTED, 8: CHECKPOINTED}
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def suspend(self, pids: tuple[int, ...]) -> list[dict[str, Any]]:
        return self._asked("suspend", pids)

    def resume(self, pids: tuple[int, ...]) -> list[dict[str, Any]]:
        return self._asked("resume", pids)

    def _asked(self, what: str, pids: tuple[int, ...]) -> list[dict[str, Any]]:
        self.asked.append((what, pids))
        if self.refuses:
            raise PauseError("the driver is busy", self.states)
        return [{"step": what, "pid": pid, "ms": 1.0} for pid in pids]


class FakeTenant:
    """A tenant's gate, and the memory that it has beyond its guarantee."""

    def __init__(self) -> None:
        self.job, self.suspended, self.released = "j" * 26, (), False
        self.closed_by: set[str] = set()
        self.gate_since, self.turn, self.room = 0.0, asyncio.Lock(), True
        self.reserved = True
        self.guarded = SimpleNamespace(release_memory=self._release, reserve_memory=self._reserve)
        self.thawed: list[str] = []
        self.keeper = SimpleNamespace(thaw=self.thawed.append)

    def set_gate(self, closed: bool, why: str, by: str) -> None:
        (self.closed_by.add if closed else self.closed_by.discard)(by)

    def _release(self) -> None:
        self.reserved = False

    def _reserve(self) -> bool:
        self.reserved = self.room
        return self.room


class World:
    def __init__(self) -> None:
        self.tenant: Any = FakeTenant()
        self.driver = FakeDriver()
        self.pids: tuple[int, ...] = (7, 8)

        async def holders(tenant: object) -> tuple[int, ...]:
            return self.pids

        self.pausing = Pausing(Path("/no/driver"), holders)
        self.pausing.problem = ""
        self.pausing._pause = self.driver  # type: ignore[assignment]


@pytest.fixture
def world() -> World:
    return World()


async def test_memory_goes_and_comes_back_with_the_gate(world: World) -> None:
    assert await world.pausing.pause(world.tenant, "owner") == ""
    assert world.tenant.closed_by == {"owner"} and world.tenant.suspended == (7, 8) and not world.tenant.reserved
    assert await world.pausing.pause(world.tenant, "presence") == ""
    assert world.driver.asked == [("suspend", (7, 8))], "it is suspended already"
    world.tenant.closed_by.discard("presence")
    assert await world.pausing.resume(world.tenant, "owner") == ""
    assert not world.tenant.closed_by and world.tenant.suspended == () and world.tenant.reserved
    assert world.driver.asked[1:] == [("resume", (7, 8))]


@pytest.mark.parametrize("by", ["audit", "lease"])
async def test_stopped_tenant_keeps_its_memory(world: World, by: str) -> None:
    world.tenant.closed_by.add(by)
    assert "stopped already" in await world.pausing.pause(world.tenant, "owner")
    assert not world.driver.asked and world.tenant.reserved and "owner" in world.tenant.closed_by


async def test_pause_that_the_driver_refuses_keeps_the_gate_closed(world: World) -> None:
    world.driver.refuses = True
    assert await world.pausing.pause(world.tenant, "owner") == "the driver is busy"
    assert world.tenant.closed_by == {"owner"} and world.tenant.suspended == () and world.tenant.reserved
    world.pausing.problem = "the driver is too old"
    assert await world.pausing.pause(world.tenant, "owner") == "the driver is too old"
    assert world.driver.asked == [("suspend", (7, 8))]


async def test_tenant_that_has_ended_is_not_paused(world: World) -> None:
    world.tenant.released = True
    assert await world.pausing.pause(world.tenant, "owner") == "" and not world.driver.asked


@pytest.mark.parametrize(("by", "above"), [("presence", "owner"), ("lender", "owner"), ("lender", "presence")])
async def test_weaker_hand_opens_nothing_that_a_stronger_one_holds(world: World, by: Any, above: Any) -> None:
    await world.pausing.pause(world.tenant, above)
    world.tenant.closed_by.add(by)
    assert await world.pausing.resume(world.tenant, by) == ""
    assert world.tenant.closed_by == {above} and world.tenant.suspended == (7, 8)
    assert world.driver.asked == [("suspend", (7, 8))]


async def test_owner_does_not_resume_while_they_are_present(world: World) -> None:
    await world.pausing.pause(world.tenant, "presence")
    world.tenant.closed_by.add("owner")
    assert "its owner is there" in await world.pausing.resume(world.tenant, "owner")
    assert world.tenant.closed_by == {"presence"} and world.tenant.suspended == (7, 8)
    assert world.tenant.thawed == ["its owner lets it go on"]


@pytest.mark.parametrize("reason", ["lease", "room", "driver"])
async def test_tenant_that_cannot_come_back_stays_paused_and_holds_no_memory(world: World, reason: str) -> None:
    await world.pausing.pause(world.tenant, "presence")
    if reason == "lease":
        world.tenant.closed_by.add("lease")
    world.tenant.room = reason != "room"
    world.driver.refuses = reason == "driver"
    words = {"lease": "its lease is over", "room": "there is no room", "driver": "the driver is busy"}
    assert words[reason] in await world.pausing.resume(world.tenant, "presence")
    assert "presence" in world.tenant.closed_by and world.tenant.suspended == (7, 8) and not world.tenant.reserved
    asked = [("suspend", (7, 8)), *([("resume", (7, 8))] if reason == "driver" else [])]
    assert world.driver.asked == asked


@pytest.mark.parametrize(
    ("states", "suspended"),
    [({7: RUNNING, 8: RUNNING}, ()), ({7: RUNNING, 8: CHECKPOINTED}, (8,)), (None, (7, 8))],
)
async def test_memory_that_came_back_in_part_stays_reserved(world: World, states: Any, suspended: Any) -> None:
    """A resume that took too long, after which the driver let go of what it could."""
    await world.pausing.pause(world.tenant, "owner")
    world.driver.refuses, world.driver.states = True, states
    assert await world.pausing.resume(world.tenant, "owner") == "the driver is busy"
    assert world.tenant.reserved and world.tenant.suspended == suspended and "owner" in world.tenant.closed_by
    world.driver.refuses = False
    assert await world.pausing.resume(world.tenant, "owner") == "" and not world.tenant.closed_by
    assert world.driver.asked[2:] == ([("resume", suspended)] if suspended else [])


async def test_tenant_without_a_process_on_a_gpu_is_paused_by_its_gate_alone(world: World) -> None:
    world.pids = ()
    assert await world.pausing.pause(world.tenant, "owner") == ""
    assert world.tenant.closed_by == {"owner"} and world.tenant.reserved and not world.driver.asked
    assert await world.pausing.resume(world.tenant, "owner") == "" and not world.tenant.closed_by
