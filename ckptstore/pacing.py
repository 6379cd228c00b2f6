"""How fast a stream of chunks may send: in the background, or to be done by a deadline. No I/O.

The shell asks `tick` now and then with what the peer has acknowledged and how long the network takes, and gives the answer to
the kernel. None is: as fast as it goes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

TICK_S = 0.25  # between two looks at a stream; ours
TARGET_S = 0.020  # of waiting in queues, before a background stream gives way; RFC 6817 allows 100 ms at most; ours
DECREASE = 0.7  # of its rate is left when it gives way, as in CUBIC (RFC 9438)
RISE_S = 30.0  # from nothing back to the full rate, evenly; ours
FLOOR_BPS = float(1 << 20)  # a stream that stood still would be taken for broken; ours
MOST_SHARE = 4.0  # of the budget, by the mean of those in the background; none has less than its inverse; ours
AIM = 0.8  # of the time to its deadline in which a stream should be done: the rest is for fsync, commit and bad luck; ours


class Rtt(msgspec.Struct, frozen=True):
    """Round-trip times of a connection, in seconds: now (smoothed), and the least that was seen."""

    smoothed_s: float
    least_s: float


class Pace(Protocol):
    @property
    def urgent(self) -> bool:
        """Whether the others should give way."""

    @property
    def share(self) -> float:
        """How much of the budget it is to have beside others in the background; most have 1."""

    def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
        """The rate from `now` (seconds) on; `sent`: bytes acknowledged so far; `budget_bps`: its part of the node's budget."""


class Background:
    """Its part of the budget, while that does not make others wait: falls when the round-trip time rises, and comes back slowly.

    The idea is LEDBAT's (RFC 6817); the law is simpler: a share is lost at once, and the same amount comes back each second.
    """

    urgent = False

    def __init__(self, share: Callable[[], float] = lambda: 1.0) -> None:
        self._share = share
        self._limit = math.inf
        self._top = 0.0  # the fastest it has been
        self._speed = 0.0
        self._seen: tuple[float, int] | None = None
        self._fell_at = -math.inf
        self._base_s = math.inf

    @property
    def share(self) -> float:
        return self._share()

    def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
        cap = math.inf if budget_bps is None else budget_bps
        passed = self._look(now, sent)
        if rtt is not None:
            self._base_s = min(self._base_s, rtt.least_s)
            if rtt.smoothed_s - self._base_s > TARGET_S:
                self._fall(now, rtt.smoothed_s, cap)
            else:
                self._rise(passed, cap)
        rate = max(min(self._limit, cap), min(FLOOR_BPS, cap))
        return rate if math.isfinite(rate) else None

    def _look(self, now: float, sent: int) -> float:
        """How long ago the last look was."""
        if self._seen is None:
            self._seen = now, sent
            return 0.0
        passed, more = now - self._seen[0], sent - self._seen[1]
        if passed <= 0:
            return 0.0
        if passed >= TICK_S / 2:  # less says little of its speed
            self._speed = more / passed
            self._top = max(self._top, self._speed)
            self._seen = now, sent
            return passed
        return 0.0

    def _fall(self, now: float, smoothed_s: float, cap: float) -> None:
        """Once a round trip: what was done is not seen earlier."""
        if now - self._fell_at < max(TICK_S / 2, smoothed_s) or not self._top:
            return
        self._fell_at = now
        # The network may be slower than it is allowed: then its limit says nothing.
        self._limit = max(FLOOR_BPS, DECREASE * min(self._limit, cap, self._speed))

    def _rise(self, passed: float, cap: float) -> None:
        full = cap if math.isfinite(cap) else self._top
        self._limit += passed * max(full, FLOOR_BPS) / RISE_S
        if self._limit > (cap if math.isfinite(cap) else 2 * self._top):
            self._limit = math.inf


class Deadline:
    """What is left over the time that is left. `time_left` says how many seconds it may take from now on; none: it is late."""

    urgent, share = True, 1.0

    def __init__(self, total_bytes: int, time_left: Callable[[], float], sent: int = 0) -> None:
        self.remaining = max(0, total_bytes - sent)
        self._total = total_bytes
        self._time_left = time_left

    def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
        self.remaining = max(0, self._total - sent)
        left_s = self._time_left()
        if left_s <= 0:
            return None
        return max(self.remaining / left_s, budget_bps or FLOOR_BPS)


class Load(msgspec.Struct, frozen=True):
    """Bytes to be sent, and how many seconds from now they should have gone (`AIM`)."""

    bytes: int
    aim_s: float


def aim(now: float, deadline: float) -> float:
    """When a stream that begins now should be done."""
    return now + AIM * (deadline - now)


def time_for(own: Load, behind: Sequence[Load]) -> float:
    """In how many seconds the first must be done, so that those who wait behind it can be in time too.

    All together have to go as fast as the tightest of them needs, with all that goes before it.
    """
    best, total = own.aim_s, own.bytes
    for load in behind:
        total += load.bytes
        if total:
            best = min(best, load.aim_s * own.bytes / total)
    return best
