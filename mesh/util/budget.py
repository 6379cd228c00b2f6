"""A bound on what it takes to look at a guest: the guest chooses how much there is to see. Standard library only."""

import math
import time


class OverBudget(Exception):  # no OSError, which those who look suppress
    """There is more to look at than this look may take."""


class Budget:
    """The entries that one look may read, and the time that it may take."""

    def __init__(self, seconds: float, entries: float = math.inf) -> None:
        self._until, self._left = time.monotonic() + seconds, entries

    def spend(self) -> None:
        """Count one entry, before it is read. OverBudget if it is one too many."""
        self._left -= 1
        if self._left < 0 or time.monotonic() > self._until:
            raise OverBudget("it has too many processes, files or mappings to look at")
