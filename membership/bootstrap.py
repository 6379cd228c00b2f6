"""Bootstrap: choose which addresses to contact and when, for as long as the node runs.

Candidates come from seeds, mDNS and the peers of earlier runs. A few at a time are tried, with backoff while the node is alone.
"""

from collections.abc import Iterable, Sequence
from random import Random

Address = tuple[str, int]

BACKOFF_S = (0.3, 15.0)  # first and longest interval between attempts while the node is alone
CONNECTED_INTERVAL_S = 15.0  # a connected node keeps trying unknown addresses, so that separate islands merge
ATTEMPTS_AT_ONCE = 3  # of each kind; one answer brings the whole member list, so more attempts teach nothing
MAX_CANDIDATES = 1024


class Bootstrap:
    """Seeds are kept as the user wrote them, so that each attempt resolves a host name again."""

    def __init__(self, seeds: Sequence[Address], rng: Random) -> None:
        self._seeds = list(seeds)
        self._discovered: dict[Address, None] = {}
        self._rng = rng
        self._interval_s = BACKOFF_S[0]
        self.remembered: list[Address] = []

    @property
    def discovered(self) -> list[Address]:
        """Addresses that mDNS has shown since the start."""
        return list(self._discovered)

    def add(self, address: Address) -> None:
        """Add an address found by mDNS; the oldest one makes room."""
        self._discovered[address] = None
        if len(self._discovered) > MAX_CANDIDATES:
            del self._discovered[next(iter(self._discovered))]

    def next(self, present: Iterable[Address]) -> tuple[list[Address], float]:
        """Return the addresses to contact now and the seconds to wait afterwards.

        `present` holds the addresses of the members already known, this node included.
        """
        known = set(present)
        fresh = [address for address in dict.fromkeys([*self._seeds, *self._discovered]) if address not in known]
        remembered = [address for address in self.remembered if address not in known]
        chosen = self._rng.sample(fresh, min(ATTEMPTS_AT_ONCE, len(fresh)))
        chosen += self._rng.sample(remembered, min(ATTEMPTS_AT_ONCE, len(remembered)))
        if len(known) > 1:
            self._interval_s = BACKOFF_S[0]
            return list(dict.fromkeys(chosen)), CONNECTED_INTERVAL_S
        interval_s, self._interval_s = self._interval_s, min(BACKOFF_S[1], self._interval_s * 1.5)
        return list(dict.fromkeys(chosen)), interval_s * self._rng.uniform(0.8, 1.2)
