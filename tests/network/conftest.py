"""Fixtures: a machine with a network edge in namespaces."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mesh.network.edge import Edge
from tests.cleanup import cleanup
from tests.network.wires import Wires, inside


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[Wires]:
    """Two guests; the test itself is on the machine. Edges have their places below `run`."""
    cleanup().undo("sh", "-c", f"umount -l {tmp_path}/run/*")
    with Wires(2) as made, inside(made.machine):
        yield made


@pytest.fixture
def edges(wires: Wires, tmp_path: Path) -> Iterator[Callable[..., Edge]]:
    """Makes open edges, by name."""
    with ExitStack() as stack:

        def make(name: str = "node", **settings: Any) -> Edge:
            edge = Edge(tmp_path / "run" / name, **settings)
            stack.callback(edge.close)
            edge.open()
            return edge

        yield make
