"""Whether a container's GPUs are there, asked from inside, by a program that stands in for nvidia-smi."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.engine.docker import DockerEngine
from mesh.engine.engine import Guest
from placement.advert import Portion
from tests.engine.bench import LOOP, WAIT_S, Bench
from tests.images import busybox_image

pytestmark = pytest.mark.docker
GPUS = (Portion("GPU-aa", 100, 1024), Portion("GPU-bb", 100, 1024))


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """On an engine that drops a request for devices without a word."""
    monkeypatch.setattr("mesh.engine.hardening._devices", lambda uuids, cdi: [])
    monkeypatch.setattr("mesh.engine.gpusight.EVERY_S", 0.1)
    monkeypatch.setattr("mesh.engine.gpusight.PATH", "/mesh/work:/bin")
    engine = DockerEngine(f"gpu-{os.getpid()}")
    assert (await engine.availability()).ok
    bench = Bench(engine, tmp_path, busybox_image())
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await engine.close()


def stand_in(bench: Bench, script: str) -> None:
    fresh = bench.root / "fresh"
    fresh.write_text(f"#!/bin/sh\necho look >> $MESH_OUT_DIR/looks\n{script}\n")
    fresh.chmod(0o755)
    fresh.replace(bench.root / "work" / "nvidia-smi")


async def begin(bench: Bench) -> Guest:
    return await bench.shell(f"echo ready; {LOOP}", gpus=GPUS)


SEES = "echo 'GPU 0: Fake (UUID: GPU-aa)'; echo 'GPU 1: Fake (UUID: GPU-bb)'"


async def test_one_that_loses_its_gpus_while_it_runs_is_its_nodes_fault(bench: Bench) -> None:
    stand_in(bench, SEES)
    guest = await begin(bench)
    looks = bench.root / "out" / "looks"
    async with asyncio.timeout(WAIT_S):
        while not looks.exists() or looks.read_text().count("look") < 3:
            await asyncio.sleep(0.02)
    assert await guest.pids(), "what is there is left alone"
    stand_in(bench, "echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and end.fault == "its container lost its GPUs: Failed to initialize NVML: Unknown Error"


async def test_one_that_was_given_another_is_its_nodes_fault(bench: Bench) -> None:
    stand_in(bench, SEES.replace("GPU-bb", "GPU-cc"))
    guest = await begin(bench)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).fault == "its container does not see GPU-bb"


async def test_an_engine_that_passes_none_on_is_found_out(bench: Bench) -> None:
    guest = await begin(bench)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).fault == "its container has 0 of 2 GPUs: its engine does not pass GPUs on"
