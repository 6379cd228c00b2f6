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
    """Turned from any thread, and perhaps by another process at any time: what it is turned to is known by the kernel alone."""

    def __init__(self, word: Map) -> None:
        self.map = word
        self._stores = [Store(word, 0, value) for value in range(ALL + 1)]
        self._turning = threading.Lock()

    @classmethod
    def make(cls) -> "Switch":
        return cls(Map.make(ARRAY, "mesh_cut", 1))

    @classmethod
    def pinned(cls, directory: Path) -> "Switch":
        """That of a node which runs or ran; FileNotFoundError if it has none."""
        return cls(Map.pinned(directory / PINNED))

    @property
    def value(self) -> int:
        return (self.map.get(0) or 0) & ALL

    def cut(self, what: int = ALL) -> None:
        """From when this returns no packet of these passes. Of all: one system call."""
        if what == ALL:
            self._stores[ALL]()
            return
        with self._turning:
            self._stores[self.value | what]()

    def restore(self, what: int = ALL) -> None:
        with self._turning:
            self._stores[self.value & ~what]()

    def close(self) -> None:
        self.map.close()
