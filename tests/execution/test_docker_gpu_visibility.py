"""The check for a container's GPUs from inside, with a fake nvidia-smi."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import Guest
from placement.advert import Portion
from tests.container_images import busybox_image
from tests.execution.bench import LOOP, WAIT_S, Bench

pytestmark = pytest.mark.docker
GPUS = (Portion("GPU-aa", 100, 1024), Portion("GPU-bb", 100, 1024))


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """Yield a bench on an engine that silently ignores device requests."""
    monkeypatch.setattr("mesh.execution.docker.hardening._devices", lambda uuids, cdi: [])
    monkeypatch.setattr("mesh.execution.docker.gpu_visibility.EVERY_S", 0.1)
    monkeypatch.setattr("mesh.execution.docker.gpu_visibility.PATH", "/mesh/work:/bin")
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


async def test_lost_gpu_is_node_fault(bench: Bench) -> None:
    stand_in(bench, SEES)
    guest = await begin(bench)
    looks = bench.root / "out" / "looks"
    async with asyncio.timeout(WAIT_S):
        while not looks.exists() or looks.read_text().count("look") < 3:
            await asyncio.sleep(0.02)
    assert await guest.pids(), "a guest with visible GPUs keeps running"
    stand_in(bench, "echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and end.fault == "its container lost its GPUs: Failed to initialize NVML: Unknown Error"


@pytest.mark.parametrize(
    "probe",
    [
        "kill -9 $$",
        "echo 'Failed to initialize NVML: Unknown Error'; kill -9 $$",
        "echo 'cannot allocate memory'; exit 1",
        f"if mkdir $MESH_OUT_DIR/once; then echo 'Failed to initialize NVML: Unknown Error'; exit 255; fi; {SEES}",
    ],
    ids=["killed", "killed after words", "other words", "said once"],
)
async def test_probe_that_proves_nothing_blames_nobody(bench: Bench, probe: str) -> None:
    """A guest can kill the probe, which runs as its user and in its control group."""
    stand_in(bench, probe)
    guest = await begin(bench)
    looks = bench.root / "out" / "looks"
    async with asyncio.timeout(WAIT_S):
        while not looks.exists() or looks.read_text().count("look") < 4:
            await asyncio.sleep(0.02)
    assert await guest.pids()


async def test_wrong_gpu_is_node_fault(bench: Bench) -> None:
    stand_in(bench, SEES.replace("GPU-bb", "GPU-cc"))
    guest = await begin(bench)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).fault == "its container does not see GPU-bb"


async def test_engine_dropping_gpu_requests_is_detected(bench: Bench) -> None:
    guest = await begin(bench)
    async with asyncio.timeout(WAIT_S):
        assert (await guest.wait()).fault == "its container has 0 of 2 GPUs: its engine does not pass GPUs on"


async def test_image_gets_no_gpus_from_nvidia_runtime(tmp_path: Path) -> None:
    """Run an image that asks for all GPUs, as those of CUDA do."""
    client = docker.from_env()
    plain = client.containers.create(busybox_image(), "true")
    changes = "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all"
    image = plain.commit("campus-mesh/test-cuda", f"{os.getpid()}", changes=changes)
    engine = DockerEngine(f"gpu-{os.getpid()}")
    try:
        assert (await engine.availability()).ok
        said = (await Bench(engine, tmp_path, image.tags[0]).output("env")).splitlines()
        assert {"NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(said)
    finally:
        await engine.close()
        plain.remove()
        client.images.remove(image.id, force=True)
        client.close()
