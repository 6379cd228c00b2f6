"""Fixtures: a bench for each engine, and a bystander process that no test may affect except on purpose."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.execution.docker.engine import DockerEngine
from mesh.execution.engine import Engine
from mesh.execution.process import subtree
from mesh.execution.process.engine import ProcessEngine
from mesh.util.processes import Process, process_of
from tests.apptainer import apptainer_engine, unpacked
from tests.container_images import busybox_image
from tests.execution.bench import Bench


@pytest.fixture(scope="session", autouse=True)
def subtree_of_groups() -> None:
    """Take over control groups as the daemon does, so that guests get limits on machines with version 2."""
    subtree.claim(1.0)


ENGINES = [
    "process",
    "session",
    *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("docker", "apptainer")),
]


@pytest.fixture(params=ENGINES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench for each engine. `session` is the process engine without namespaces."""
    root = tmp_path / "attempt"
    root.mkdir()
    engine: Engine
    image_id: str | None = None
    if request.param == "docker":
        engine, image = DockerEngine(f"test-{os.getpid()}"), busybox_image()
    elif request.param == "apptainer":
        engine, image = apptainer_engine(tmp_path), "busybox"
        image_id = unpacked(tmp_path / "images")
    else:
        engine, image = ProcessEngine(namespaces=request.param == "process"), None
    assert (await engine.availability()).ok
    bench = Bench(engine, root, image, image_id)
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
