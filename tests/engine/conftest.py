"""The engine that a suite runs on: each of them, where a test file has none of its own."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.engine.docker import DockerEngine
from mesh.engine.engine import Engine
from mesh.engine.process import ProcessEngine
from tests.engine.bench import Bench
from tests.images import busybox_image


@pytest.fixture(params=["process", "session", pytest.param("docker", marks=pytest.mark.docker)])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """`session` is the process engine where namespaces are not to be had."""
    root = tmp_path / "attempt"
    root.mkdir()
    engine: Engine
    if request.param == "docker":
        engine, image = DockerEngine(f"test-{os.getpid()}"), busybox_image()
    else:
        engine, image = ProcessEngine(namespaces=request.param == "process"), None
    assert (await engine.availability()).ok
    bench = Bench(engine, root, image)
    yield bench
    for guest in bench.guests:
        await guest.kill()
    await engine.close()
