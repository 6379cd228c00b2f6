"""Suspicion timeouts: Lifeguard's dynamic suspicion (Dadgar et al. 2017, section IV-B), plus refused connections.

timeout = max - (max - min) * log(c + 1) / log(k + 1), for c of k expected confirmations; it is never earlier with fewer.

Deviation from Lifeguard: if two nodes had a TCP connection refused by the suspect's machine, its process is gone, and only the
time of a restart is waited (`refused_floor_s`). Like any suspicion it can be refuted until then.
"""

from collections import deque
from math import log

from membership.config import SwimConfig

MIN_REFUSALS = 2  # one refusal may be a firewall between two nodes


class Suspicion:
    """One suspicion of one member, from the first accusation to its deadline."""

    def __init__(self, config: SwimConfig, members: int, accuser: bytes, now: float, refused: bool = False) -> None:
        scale = max(1.0, log(max(members, 1), 10))
        self.started = now
        self._shortest = config.suspicion_multiplier * scale * config.probe_interval_s
        self._longest = self._shortest * config.suspicion_max_multiplier
        # A small mesh has too few members to confirm: expect fewer (memberlist).
        self._expected = max(0, min(int(config.suspicion_multiplier) - 2, members - 2))
        self._accusers = {accuser}
        self._confirmed_at: float | None = None
        self._floor_s = config.refused_floor_s
        # In a mesh of two, one refusal is all there can be.
        self._refusals_needed = min(MIN_REFUSALS, max(1, members - 1))
        self._refused_to: set[bytes] = set()
        self._refused_since: float | None = None
        if refused:
            self._add_refusal(accuser, now)

    @property
    def accusers(self) -> frozenset[bytes]:
        return frozenset(self._accusers | self._refused_to)

    def confirm(self, accuser: bytes, now: float = 0.0, refused: bool = False) -> bool:
        """Add a confirmation; True if it counts, and so should be gossiped."""
        new = refused and self._add_refusal(accuser, now)
        if accuser in self._accusers or len(self._accusers) > self._expected:
            return new
        self._accusers.add(accuser)
        self._confirmed_at = self._confirmed_at if self._confirmed_at is not None else now
        return True

    @property
    def unreachable_at(self) -> float:
        """Time from which the member counts as unreachable: the first confirmation, without one half-way to the deadline."""
        if self._confirmed_at is not None:
            return self._confirmed_at
        if self._refused_to:
            return self.started
        return self.started + (self.deadline - self.started) / 2

    @property
    def bounds(self) -> tuple[float, float]:
        """The earliest and the latest possible deadline (invariant M13)."""
        return min(self._shortest, self._floor_s) + self.started, self.started + self._longest

    @property
    def deadline(self) -> float:
        """Time at which the member is declared dead."""
        if self._refused_since is not None:
            return min(self._confirmed_deadline, self._refused_since + self._floor_s)
        return self._confirmed_deadline

    @property
    def _confirmed_deadline(self) -> float:
        if self._expected == 0:
            return self.started + self._shortest
        confirmed = len(self._accusers) - 1
        share = log(confirmed + 1) / log(self._expected + 1)
        return self.started + self._longest - (self._longest - self._shortest) * share

    def _add_refusal(self, accuser: bytes, now: float) -> bool:
        if accuser in self._refused_to or self._refused_since is not None:
            return False
        self._refused_to.add(accuser)
        if len(self._refused_to) >= self._refusals_needed:
            self._refused_since = now
        return True


class AccuserCredit:
    """Reputation of accusers: one whose accusations were often refuted lately is not believed."""

    def __init__(self, config: SwimConfig) -> None:
        self._limit, self._window_s = config.accuser_credit, config.accuser_window_s
        self._refuted: dict[bytes, deque[float]] = {}

    def refuted(self, accuser: bytes, now: float) -> None:
        times = self._refuted.setdefault(accuser, deque(maxlen=self._limit))
        times.append(now)

    def believed(self, accuser: bytes, now: float) -> bool:
        times = self._refuted.get(accuser)
        return times is None or len(times) < self._limit or now - times[0] > self._window_s
