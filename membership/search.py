"""Whom to look for, when: addresses from mDNS, seeds and memory, tried a few at a time, for ever, with backoff."""

from collections.abc import Iterable, Sequence
from random import Random

Address = tuple[str, int]

BACKOFF_S = (0.3, 15.0)  # first and longest pause between tries of a node that is alone
COMPANY_S = 15.0  # a node that has company still looks for strangers, so that islands meet
AT_ONCE = 3  # a mesh of hundreds is remembered, and each answer tells of all of it
CANDIDATES_KEPT = 1024


class Search:
    """`seeds` are tried as they were written, so that a name is resolved anew each time."""

    def __init__(self, seeds: Sequence[Address], rng: Random) -> None:
        self._seeds = list(seeds)
        self._seen: dict[Address, None] = {}
        self._rng = rng
        self._pause_s = BACKOFF_S[0]
        self.remembered: list[Address] = []

    @property
    def seen(self) -> list[Address]:
        """Where mDNS has ever shown somebody."""
        return list(self._seen)

    def found(self, address: Address) -> None:
        """mDNS says that there is somebody."""
        self._seen[address] = None
        if len(self._seen) > CANDIDATES_KEPT:
            del self._seen[next(iter(self._seen))]

    def next(self, present: Iterable[Address]) -> tuple[list[Address], float]:
        """Where to knock now, and how long to wait then. `present`: where somebody is known to be, ourselves included."""
        known = set(present)
        told = [address for address in dict.fromkeys([*self._seeds, *self._seen]) if address not in known]
        remembered = [address for address in self.remembered if address not in known]
        chosen = self._rng.sample(told, min(AT_ONCE, len(told)))
        chosen += self._rng.sample(remembered, min(AT_ONCE, len(remembered)))
        if len(known) > 1:
            self._pause_s = BACKOFF_S[0]
            return list(dict.fromkeys(chosen)), COMPANY_S
        pause_s, self._pause_s = self._pause_s, min(BACKOFF_S[1], self._pause_s * 1.5)
        return list(dict.fromkeys(chosen)), pause_s * self._rng.uniform(0.8, 1.2)
