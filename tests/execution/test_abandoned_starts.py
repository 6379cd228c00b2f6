"""Starts cancelled at any point leave nothing behind."""

import asyncio
import threading
from pathlib import Path

import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.guest_registry import GuestEntry
from tests.execution.bench import LOOP, WAIT_S, containers, processes_with
from tests.execution.place import Place, fresh_mark


@pytest.mark.parametrize("kind", ["process", "session"])
async def test_cancelled_process_start_is_undone(tmp_path: Path, kind: str) -> None:
    """Cancel the start before the guest is registered, and after."""
    place = Place(tmp_path, kind)
    mark = fresh_mark()
    for entered in (False, True):
        starting = asyncio.create_task(place.bench.shell(f"sleep 8{mark} & {LOOP}"))
        while not starting.done():
            await asyncio.sleep(0)
            if not entered or place.register.entries()[0]:
                break
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await place.bench.engine.close()
        assert not processes_with(mark) and place.register.entries() == ({}, [])
    place.switch.close()


@pytest.mark.docker
async def test_cancelled_container_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel the start before the container exists, and after it was created but not started."""
    place = Place(tmp_path, "docker")
    assert (await place.bench.engine.availability()).ok
    mark, made, given_up = fresh_mark(), threading.Event(), threading.Event()
    enter = place.switch.add

    def late(entry: GuestEntry) -> str:
        made.set()
        assert given_up.wait(WAIT_S)
        return enter(entry)

    monkeypatch.setattr(place.switch, "add", late)
    for there in (False, True):
        made.clear()
        given_up.clear()
        starting = asyncio.create_task(place.bench.shell(f"sleep 8{mark} & {LOOP}"))
        await asyncio.sleep(0)
        if there:
            assert await asyncio.to_thread(made.wait, WAIT_S) and containers(place.label)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        given_up.set()
        await place.bench.engine.close()
        assert not containers(place.label) and not processes_with(mark) and place.register.entries() == ({}, [])
        place.bench.engine = DockerEngine(place.label, place.switch)
    await place.bench.engine.close()
    place.switch.close()
