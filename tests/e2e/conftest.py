"""Real daemons on loopback: one stack that is only read and used, others for tests that take nodes away."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.stack import Stack
from tests.e2e.commands import mesh

LOG_SHOWN = 4000  # characters of each daemon's log; ours


@pytest.fixture(scope="session")
def shared() -> Iterator[Stack]:
    """Four nodes for tests that leave them as they are."""
    with Stack(4, overrides={"slots": 4, "grace_s": 10.0}) as stack:
        stack.start_all()
        yield stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what its daemons saw."""
    report = yield
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        stacks = [*item.funcargs.get("make_stack", Opener()).stacks]
        stacks += [value for value in item.funcargs.values() if isinstance(value, Stack)]
        for node in (node for stack in stacks for node in stack.nodes if node.where.log.exists()):
            report.sections.append((f"log of {node.nick}", node.where.log.read_text()[-LOG_SHOWN:]))
    return report


class Opener:
    """Called as `make_stack(count, **overrides)`: a started stack of its own for a test that takes nodes away."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = []

    def __call__(self, count: int, **overrides: Any) -> Stack:
        stack = Stack(count, overrides={"slots": 1, "grace_s": 10.0, **overrides})
        self.stacks.append(stack)
        stack.found()
        stack.start_all()
        return stack


@pytest.fixture
def make_stack() -> Iterator[Callable[..., Stack]]:
    opener = Opener()
    yield opener
    for stack in opener.stacks:
        stack.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory for state directories; every daemon below it is ended by its pid."""
    yield tmp_path
    # Not `rglob`, which ends with an error where a daemon removes a directory meanwhile.
    for directory in [directory for directory, _, names in os.walk(tmp_path) if "mesh.sock" in names]:
        mesh(Path(directory), "down", "--now")
