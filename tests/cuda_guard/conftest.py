"""Fixtures: the guard's libraries and fakes of NVIDIA's, compiled once for all workers and runs, and machines that use them."""

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from cuda_guard.build import Libraries
from cuda_guard.host import Host
from cuda_guard.page import Pages, Quota
from tests import guards
from tests.cuda_guard.guests import Bench, bench
from tests.fake.build import Fakes, build
from tests.fake.world import World

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
NOWHERE = Path("/nowhere/libcuda.so.1")


def device_uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number + 1:012x}"


@pytest.fixture(scope="session")
def built() -> Libraries:
    return guards.built()


@pytest.fixture(scope="session")
def fakes() -> Fakes:
    return build()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a directory in shared memory, since a world's file is large and sparse."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def make_world(fakes: Fakes, folder: Path) -> Iterator[Callable[..., World]]:
    """`make_world(devices=2, ...)` makes a machine with fake GPUs and no guard."""
    with ExitStack() as stack:

        def make(**settings: Any) -> World:
            return stack.enter_context(closing(World(folder / uuid.uuid4().hex, fakes, **settings)))

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def make_bench(folder: Path, built: Libraries, fakes: Fakes) -> Iterator[Callable[..., Bench]]:
    """`make_bench(...)` makes a machine with fake GPUs and a guard."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Bench:
            return stack.enter_context(bench(folder, built, fakes, **settings))

        yield make


@pytest.fixture
def host(built: Libraries) -> Iterator[Host]:
    made = Host(built.host)
    yield made
    made.close()


@pytest.fixture
def make_pages(tmp_path: Path) -> Iterator[Callable[..., Pages]]:
    """Make the pages of a job for devices with these quotas."""
    made: list[Pages] = []

    def make(*quotas: Quota, driver: Path = NOWHERE, nvml: Path = NOWHERE) -> Pages:
        some = quotas or (Quota(device_uuid(0), memory=1 << 30),)
        pages = Pages.create(tmp_path / f"job{len(made)}", some, driver, nvml, time.monotonic_ns())
        made.append(pages)
        return pages

    yield make
    for pages in made:
        pages.close()
