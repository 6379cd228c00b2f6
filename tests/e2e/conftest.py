"""Real daemons on loopback: one stack that is only read and used, others for tests that take nodes away."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.stack import Stack
from tests.e2e.commands import mesh


@pytest.fixture(scope="session")
def shared() -> Iterator[Stack]:
    """Four nodes for tests that leave them as they are."""
    with Stack(4, overrides={"slots": 4, "grace_s": 10.0}) as stack:
        stack.start_all()
        yield stack


@pytest.fixture
def make_stack() -> Iterator[Callable[..., Stack]]:
    """A started stack of its own for a test that takes nodes away."""
    open_stacks: list[Stack] = []

    def make(count: int, **overrides: Any) -> Stack:
        stack = Stack(count, overrides={"slots": 1, "grace_s": 10.0, **overrides})
        open_stacks.append(stack)
        stack.found()
        stack.start_all()
        return stack

    yield make
    for stack in open_stacks:
        stack.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory for state directories; every daemon below it is ended by its pid."""
    yield tmp_path
    for socket_path in tmp_path.rglob("mesh.sock"):
        mesh(socket_path.parent, "down", "--now")
