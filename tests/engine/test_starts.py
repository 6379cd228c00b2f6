"""Starts that are given up, whatever they are at: nothing is left of them."""

import asyncio
import threading
from pathlib import Path

import pytest

from mesh.engine.docker import DockerEngine
from mesh.engine.register import Entry
from tests.engine.bench import LOOP, WAIT_S, containers, processes_with
from tests.engine.place import Place, fresh_mark


@pytest.mark.parametrize("kind", ["process", "session"])
async def test_a_process_whose_start_is_given_up_ends(tmp_path: Path, kind: str) -> None:
    """Before it is in the register, and once it is."""
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
async def test_a_start_that_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine is at: before there is a container, and once there is one that does not run yet."""
    place = Place(tmp_path, "docker")
    assert (await place.bench.engine.availability()).ok
    mark, made, given_up = fresh_mark(), threading.Event(), threading.Event()
    enter = place.switch.enter

    def late(entry: Entry) -> str:
        made.set()
        assert given_up.wait(WAIT_S)
        return enter(entry)

    monkeypatch.setattr(place.switch, "enter", late)
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
