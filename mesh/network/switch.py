"""The switch of the edge: one word in a map that the kernel's programs read for every packet.

Turning it is one system call: by the daemon, or, if that hangs, by any process of root through the pinned map. Standard library
only.
"""

import threading
from pathlib import Path

from mesh.network.bpf import ARRAY, Map, Store

GUESTS, MIGRATION = 1, 2  # bits of what is cut; compiled into the programs
ALL = GUESTS | MIGRATION
PINNED = "cut"


class Switch:
    """The switch, turned from any thread or process: only the kernel knows its value."""

    def __init__(self, word: Map) -> None:
        self.map = word
        self._stores = [Store(word, 0, value) for value in range(ALL + 1)]
        self._turning = threading.Lock()

    @classmethod
    def make(cls) -> "Switch":
        return cls(Map.make(ARRAY, "mesh_cut", 1))

    @classmethod
    def pinned(cls, directory: Path) -> "Switch":
        """Open the switch of a node that runs or ran; FileNotFoundError if it has none."""
        return cls(Map.pinned(directory / PINNED))

    @property
    def value(self) -> int:
        return (self.map.get(0) or 0) & ALL

    def cut(self, what: int = ALL) -> None:
        """Cut these off: once this returns, no packet of theirs passes. One system call for ALL."""
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
