"""Lifeguard's dynamic suspicion (Dadgar et al. 2017, section IV-B): start long, shorten with each independent confirmation.

timeout = max - (max - min) * log(c + 1) / log(k + 1), for c of k expected confirmations; never earlier with fewer.
"""

from math import log

from membership.config import SwimConfig


class Suspicion:
    def __init__(self, config: SwimConfig, members: int, accuser: bytes, now: float) -> None:
        scale = max(1.0, log(max(members, 1), 10))
        self.started = now
        self._shortest = config.suspicion_multiplier * scale * config.probe_interval_s
        self._longest = self._shortest * config.suspicion_max_multiplier
        # With few members there are not enough others to confirm: expect fewer (memberlist).
        self._expected = max(0, min(int(config.suspicion_multiplier) - 2, members - 2))
        self._accusers = {accuser}

    def confirm(self, accuser: bytes) -> bool:
        """Whether this accuser is a new, counted one (and so worth telling on)."""
        if accuser in self._accusers or len(self._accusers) > self._expected:
            return False
        self._accusers.add(accuser)
        return True

    @property
    def deadline(self) -> float:
        if self._expected == 0:
            return self.started + self._shortest
        confirmed = len(self._accusers) - 1
        share = log(confirmed + 1) / log(self._expected + 1)
        return self.started + self._longest - (self._longest - self._shortest) * share
