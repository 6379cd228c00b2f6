"""Real daemons on loopback: one shared stack that keeps its nodes, and separate stacks for tests that remove nodes."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.daemon.stack import Stack
from tests.e2e.commands import mesh

LOG_SHOWN = 4000  # characters of each daemon's log (own choice)


@pytest.fixture(scope="package")  # its daemons would idle during the tests of other packages
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four nodes for tests that do not change them."""
    with Stack(4, overrides={"slots": 4, "grace_s": 10.0, **seen(tmp_path_factory)}) as stack:
        stack.start_all()
        yield stack


def seen(directories: pytest.TempPathFactory) -> dict[str, Any]:
    """Let guests see the directories of the tests, by which tests tell jobs to end.

    An emulated GPU is a file there that jobs also write, so a machine with one hides nothing.
    """
    if "FAKE_GPU_WORLD" in os.environ:
        return {"process_home": "shared"}
    return {"process_sees": [str(directories.getbasetemp())]}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the daemon logs to the report of a failed test."""
    report = yield
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        stacks = [*item.funcargs["make_stack"].stacks] if "make_stack" in item.funcargs else []
        stacks += [value for value in item.funcargs.values() if isinstance(value, Stack)]
        for node in (node for stack in stacks for node in stack.nodes if node.where.log.exists()):
            report.sections.append((f"log of {node.nick}", node.where.log.read_text()[-LOG_SHOWN:]))
    return report


class Opener:
    """Factory `make_stack(count, **overrides)` of started stacks for tests that remove nodes."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self.stacks: list[Stack] = []

    def __call__(self, count: int, **overrides: Any) -> Stack:
        stack = Stack(count, overrides={"slots": 1, "grace_s": 10.0, **seen(self._directories), **overrides})
        self.stacks.append(stack)
        stack.found()
        stack.start_all()
        return stack


@pytest.fixture
def make_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    opener = Opener(tmp_path_factory)
    yield opener
    for stack in opener.stacks:
        stack.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory for state directories. Teardown ends every daemon below it by pid."""
    yield tmp_path
    # `rglob` would fail if a daemon removed a directory during the walk.
    for directory in [directory for directory, _, names in os.walk(tmp_path) if "mesh.sock" in names]:
        mesh(Path(directory), "down", "--now")
