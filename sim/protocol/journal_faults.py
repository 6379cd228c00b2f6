"""Faults of the disk below a node's journal: saves that take long, fail once, or fail until there is space again.

A node whose save failed stops, as production does: its cores already go by what may not be on disk. What a failed save wrote
may be found after a restart, or not.
"""

from random import Random
from typing import Literal

import msgspec

INCIDENTS = ("slow disk", "disk error", "full disk", "old copy")
SLOW_S = (0.1, 20.0)
STARTS_AGAIN_S = 5.0  # after a failed save, as the service manager does

Result = Literal["saved", "failed", "failed and kept"]


class JournalFaults(msgspec.Struct):
    """The faults of one disk, in virtual time."""

    slow_until: float = 0.0
    full_until: float = 0.0
    next_fails: bool = False

    def strike(self, incident: str, now: float, rng: Random) -> None:
        match incident:
            case "slow disk":
                self.slow_until = now + rng.uniform(5.0, 60.0)
            case "full disk":
                self.full_until = now + rng.uniform(5.0, 60.0)
            case "disk error":
                self.next_fails = True

    def takes_s(self, now: float, rng: Random) -> float:
        return rng.uniform(*SLOW_S) if now < self.slow_until else 0.0

    def result(self, now: float, rng: Random) -> Result:
        """Return how the save that ends now went."""
        if now < self.full_until:
            return "failed"
        failed, self.next_fails = self.next_fails, False
        return rng.choice(("failed", "failed and kept")) if failed else "saved"
