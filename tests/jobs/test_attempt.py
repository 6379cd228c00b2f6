"""An attempt that is stopped before it runs: at whatever it is then, nothing of it runs afterwards. And one whose last checkpoint
cannot be stored."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.errors import DiskFull
from mesh.engine.engine import Availability, EngineError, Guest, Launch
from mesh.engine.process import ProcessEngine
from mesh.engine.wrapped import WrappedGuest
from mesh.jobs.attempt import Attempt
from mesh.jobs.custody import Custody
from mesh.jobs.effects import SaveCheckpoint
from mesh.jobs.ledger import Ledger
from mesh.jobs.reports import CheckpointFailed, GuestExited, GuestFailed, GuestStarted, RunnerEvent
from mesh.jobs.spec import Checkpointing
from tests.jobs.worlds import make_spec

WAIT_S = 30.0


class LateEngine:
    """Real processes, started `late`: for so long it is at its start. `waits`: for room, until it is told or not wanted."""

    name, own_root = "process", False

    def __init__(self, waits: bool) -> None:
        self.at_it, self.late, self.waits = asyncio.Event(), asyncio.Event(), waits
        self.guests: list[Guest] = []
        self._engine = ProcessEngine()

    async def availability(self) -> Availability:
        return await self._engine.availability()

    async def start(self, launch: Launch) -> Guest:
        self.at_it.set()
        while self.waits:
            if not launch.wanted():
                raise EngineError("it was stopped while it waited")
            await asyncio.sleep(0.01)
        self.guests.append(await self._engine.start(launch))
        await self.late.wait()
        return self.guests[-1]

    async def close(self) -> None:
        await self._engine.close()


class SavedGuest(WrappedGuest):
    """A real process, and a fake dump of it."""

    async def dump(self, directory: Path) -> str:
        assert await self.stands_still()
        directory.mkdir()
        return "alike"


class SavedEngine(LateEngine):
    async def start(self, launch: Launch) -> Guest:
        return SavedGuest(await super().start(launch))


class Place:
    """`save`: what its node's store does with a checkpoint."""

    def __init__(self, root: Path, engine: LateEngine, save: Any = None, **spec: object) -> None:
        self.engine, self.told = engine, asyncio.Queue[RunnerEvent]()
        self.said: list[tuple[str, str]] = []
        self.log = root / "log"
        store: Any = SimpleNamespace(save=save)
        courier: Any = SimpleNamespace(bandwidth=SimpleNamespace(mean_bps=lambda holders: None))

        async def vault() -> None:
            return None

        self.attempt = Attempt(
            b"j" * 16,
            make_spec(**{"argv": ("sleep", "600"), "checkpointing": None, **spec}),
            0,
            root / "attempt",
            self.log,
            engine,
            (),
            "desk",
            store,
            courier,
            lambda payload: payload,
            lambda: Custody(0, 0, ()),
            vault,
            self.told.put_nowait,
            lambda text, new="": self.said.append((text, new)),
        )

    async def begin(self) -> None:
        self.attempt.allow_until(math.inf)
        self.attempt.launch(Ledger(), None)
        async with asyncio.timeout(WAIT_S):
            await self.engine.at_it.wait()

    async def hears(self) -> RunnerEvent:
        async with asyncio.timeout(WAIT_S):
            return await self.told.get()


@pytest.fixture(params=[False, True])
async def place(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    place = Place(tmp_path, LateEngine(request.param))
    yield place
    await place.attempt.close()
    await place.engine.close()


@pytest.mark.parametrize("place", [False], indirect=True)
async def test_one_that_is_killed_while_its_guest_starts_does_not_run_on(place: Place) -> None:
    await place.begin()
    place.attempt.kill()
    await asyncio.sleep(0)
    place.engine.late.set()
    assert isinstance(await place.hears(), GuestStarted)
    end = await place.hears()
    assert isinstance(end, GuestExited) and end.code == 137 and not await place.engine.guests[0].pids()


@pytest.mark.parametrize("place", [True], indirect=True)
async def test_one_that_waits_for_room_is_stopped_at_once(place: Place) -> None:
    await place.begin()
    assert place.told.empty()
    place.attempt.kill()
    end = await place.hears()
    assert isinstance(end, GuestFailed) and "while it waited" in end.reason and not place.engine.guests


@pytest.mark.parametrize(
    ("error", "why"),
    [(DiskFull("the disk is full"), "the disk is full"), (KeyError("x"), "internal error: KeyError('x')")],
)
async def test_a_last_system_checkpoint_that_cannot_be_stored_is_told(
    tmp_path: Path, error: Exception, why: str
) -> None:
    def fails(*roots: object, **more: object) -> None:
        raise error

    engine = SavedEngine(waits=False)
    engine.late.set()
    place = Place(tmp_path, engine, fails, checkpointing=Checkpointing(mode="system"))
    await place.begin()
    assert isinstance(await place.hears(), GuestStarted)
    place.attempt.notify("vacate", 30.0, "its owner is back")
    assert isinstance(await place.hears(), GuestExited) and list((tmp_path / "attempt" / "dumps").iterdir())
    place.attempt.save(SaveCheckpoint(seq=2, parent=b"m" * 32, final=True))
    failed = await place.hears()
    assert isinstance(failed, CheckpointFailed) and failed.reason == why
    stands = "its last checkpoint could not be stored; the one before it stands"
    assert place.said[-1] == (f"{stands}: {why}", "not stored")
    assert f"its last checkpoint could not be stored: {why}; the one before it stands\n" in place.log.read_text()
    assert not list((tmp_path / "attempt" / "dumps").iterdir()), "it does not take the disk of what comes next"
    await place.attempt.close()
    await engine.close()
