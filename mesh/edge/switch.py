"""The switch of the edge: one word in a map that the kernel's programs read with every packet. Turning it is one system call, by
whoever holds the map: the daemon, or, where that is stuck, any process of root's by the name it is pinned under.

Standard library only.
"""

import threading
from pathlib import Path

from mesh.edge.bpf import ARRAY, Map, Store

GUESTS, MIGRATION = 1, 2  # what is cut; both are given to the programs when they are compiled
ALL = GUESTS | MIGRATION
PINNED = "cut"


class Switch:
    """Turned from any thread. What it was turned to last is known without asking the kernel."""

    def __init__(self, word: Map) -> None:
        self.map = word
        self._stores = [Store(word, 0, value) for value in range(ALL + 1)]
        self._turning = threading.Lock()
        self.value = word.get(0) or 0

    @classmethod
    def make(cls) -> "Switch":
        return cls(Map.make(ARRAY, "mesh_cut", 1))

    @classmethod
    def pinned(cls, directory: Path) -> "Switch":
        """That of a node which runs or ran; FileNotFoundError if it has none."""
        return cls(Map.pinned(directory / PINNED))

    def cut(self, what: int = ALL) -> None:
        """From when this returns no packet of these passes."""
        with self._turning:
            self.value |= what
            self._stores[self.value]()

    def restore(self, what: int = ALL) -> None:
        with self._turning:
            self.value &= ~what
            self._stores[self.value]()

    def close(self) -> None:
        self.map.close()
