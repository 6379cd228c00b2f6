"""Each tutorial as its reader follows it: every command and file of the page, on three machines, with a departure."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import read
from tests.e2e.pages import Command, File, Reader, steps
from tests.integrations.test_trackers import OF_WANDB, program
from tests.tiers import FRAMEWORKS_PYTHON
from tests.wheels import index

pytestmark = pytest.mark.e2e
KEY = "canary-of-the-tutorial"
SITE = (
    FRAMEWORKS_PYTHON.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
)  # made by this Python


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # packages take gigabytes, which pytest would keep


def followed(reading: Reader, page: str, look: Callable[[str], object] = lambda job: None) -> dict[str, Any]:
    """Follow a page to its end, and return the state of its job, whose host leaves while `mesh run` follows it.

    `look` is called with the job's id while it computes.
    """
    running, order, job = None, None, ""
    for step in steps(page):
        if isinstance(step, File):
            (reading.cwd / step.name).write_text(step.text)
        elif step.text.startswith("mesh run"):
            order, running = step, reading.start(step)
        elif step.machine == "host":
            assert running is not None and order is not None
            there = reading.computing(order, running)
            job = str(there["job"])
            look(job)
            reading.run(Command(there["node"], step.text))
            assert "continued at step" in reading.ended(order, running)
        else:
            reading.run(step)
    assert order is not None and job, f"{page} has no `mesh run` with a departure"
    (state,) = read(reading.state(order.machine), "ps", "-a")["jobs"]
    first, last = state["attempts"]
    assert state["state"] == "done" and first["node"] != last["node"]
    assert "its owner" in first["reason"] and first["last_step"] == last["resumed_step"] > 0, state["attempts"]
    return dict(state)


def guests_with(variable: str, job: str) -> int:
    """Return how many processes of the job have this in their environment."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            given = path.read_bytes().split(b"\0")
            found += f"MESH_JOB_ID={job}".encode() in given and variable.encode() in given
    return found


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.trackers
def test_research(place: Path) -> None:
    """Two machines that have just joined train with an environment, a data set and a secret; W&B has one run without a gap."""
    secrets = []
    with index(place / "index") as served:
        served.offer_installed(SITE, "torch", "numpy", "wandb")
        where = {"UV_DEFAULT_INDEX": served.address, "HOME": str(place)}
        reading = Reader(place, env=where, given={"https://pypi.org/simple": served.address}, typed=KEY)
        with closing(reading):
            page = "docs/tutorials/research.md"
            state = followed(reading, page, lambda job: secrets.append(guests_with(f"WANDB_API_KEY={KEY}", job)))
    assert {attempt["node"] for attempt in state["attempts"]} == {"desk", "lab"} and secrets[0] > 0
    runs, logged = program(OF_WANDB, str(reading.cwd / "results" / "runs"))
    assert runs == [state["job"]] and sorted(logged) == list(range(1, state["of"] + 1))


@pytest.mark.slow
@pytest.mark.jax
def test_jax(make_stack: Callable[..., Stack], place: Path) -> None:
    with index(place / "index") as served:
        served.offer_installed(SITE, "jax")
        stack = make_stack(3, uv_index=served.address)
        where = {"UV_DEFAULT_INDEX": served.address, "HOME": str(place)}
        followed(Reader(place, machines_of(stack), where), "docs/tutorials/jax.md")


@pytest.mark.slow
@pytest.mark.frameworks
def test_pictures(make_stack: Callable[..., Stack], place: Path) -> None:
    """Three hundred megabytes stand for twenty gigabytes: also more than the 64 MiB from which a data set is streamed."""
    with index(place / "index") as served:
        served.offer_installed(SITE, "torch", "numpy")
        stack = make_stack(3, uv_index=served.address)
        where = {"UV_DEFAULT_INDEX": served.address, "HOME": str(place)}
        given = {"pictures 20": "pictures 0.3"}
        followed(Reader(place, machines_of(stack), where, given), "docs/tutorials/pictures.md")


@pytest.mark.long
@pytest.mark.cc
def test_cpp(make_stack: Callable[..., Stack], place: Path) -> None:
    followed(Reader(place, machines_of(make_stack(3))), "docs/tutorials/cpp.md")


def machines_of(stack: Stack) -> dict[str, Path]:
    return {"you": stack.nodes[0].where.root, **{node.nick: node.where.root for node in stack.nodes}}
