"""The engine that a suite runs on: each of them, where a test file has none of its own; and somebody who is not meant."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.engine.descent import Process, process_of
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


@pytest.fixture
def bystander() -> Iterator[Process]:
    child = subprocess.Popen(["sleep", "600"])
    process = process_of(child.pid)
    assert process is not None
    yield process
    child.kill()
    child.wait()
