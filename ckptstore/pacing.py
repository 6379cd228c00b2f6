"""Pacing: the rate at which a stream of chunks may send, in the background or towards a deadline. No I/O.

The shell regularly calls `tick` with the acknowledged bytes and the round-trip time, and passes the rate to the kernel. None
means no limit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

TICK_S = 0.25  # interval of `tick` (own choice)
TARGET_S = 0.020  # queueing delay at which a background stream slows down (own choice; RFC 6817 allows at most 100 ms)
DECREASE = 0.7  # factor applied to its rate then, as in CUBIC (RFC 9438)
RISE_S = 30.0  # time of a linear rise from zero to the full rate (own choice)
FLOOR_BPS = float(1 << 20)  # a stream that stands still would look broken (own choice)
MOST_SHARE = 4.0  # largest share of the budget relative to the mean; the smallest is its inverse (own choice)
AIM = 0.8  # share of the time to its deadline in which a stream should finish; the rest is reserve (own choice)


class Rtt(msgspec.Struct, frozen=True):
    """Round-trip times of a connection in seconds: smoothed, and the minimum."""

    smoothed_s: float
    least_s: float


class Pace(Protocol):
    @property
    def urgent(self) -> bool:
        """True if background streams should slow down for it."""

    @property
    def share(self) -> float:
        """Weight of its share of the budget among the background streams; 1 for most."""

    def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
        """Return the rate in bytes per second from `now` on, None for no limit.

        `sent`: bytes acknowledged so far; `budget_bps`: its share of the node's budget.
        """


class Background:
    """Uses its share of the budget, slows down when the round-trip time rises, and recovers slowly.

    The idea is LEDBAT's (RFC 6817) with a simpler rule: multiplicative decrease, linear increase.
    """

    urgent = False

    def __init__(self, share: Callable[[], float] = lambda: 1.0) -> None:
        self._share = share
        self._limit = math.inf
        self._top = 0.0  # highest rate so far
        self._speed = 0.0
        self._seen: tuple[float, int] | None = None
        self._fell_at = -math.inf
        self._base_s = math.inf

    @property
    def share(self) -> float:
        return self._share()

    def tick(self, now: float, sent: int, rtt: Rtt | None, budget_bps: float | None) -> float | None:
        cap = math.inf if budget_bps is None else budget_bps
        passed = self._measure(now, sent)
        if rtt is not None:
            self._base_s = min(self._base_s, rtt.least_s)
            if rtt.smoothed_s - self._base_s > TARGET_S:
                self._fall(now, rtt.smoothed_s, cap)
            else:
                self._rise(passed, cap)
        rate = max(min(self._limit, cap), min(FLOOR_BPS, cap))
        return rate if math.isfinite(rate) else None

    def _measure(self, now: float, sent: int) -> float:
        """Update the measured rate; return the seconds since the last update, 0 if it is too early for another."""
        if self._seen is None:
            self._seen = now, sent
            return 0.0
        passed, more = now - self._seen[0], sent - self._seen[1]
        if passed <= 0:
            return 0.0
        if passed >= TICK_S / 2:  # a shorter time measures the rate badly
            self._speed = more / passed
            self._top = max(self._top, self._speed)
            self._seen = now, sent
            return passed
        return 0.0

    def _fall(self, now: float, smoothed_s: float, cap: float) -> None:
        """Reduce the limit, at most once per round trip: an earlier reduction has no visible effect yet."""
        if now - self._fell_at < max(TICK_S / 2, smoothed_s) or not self._top:
            return
        self._fell_at = now
        # If the network is slower than the limit, the limit means nothing.
        self._limit = max(FLOOR_BPS, DECREASE * min(self._limit, cap, self._speed))

    def _rise(self, passed: float, cap: float) -> None:
        full = cap if math.isfinite(cap) else self._top
        self._limit += passed * max(full, FLOOR_BPS) / RISE_S
        if self._limit > (cap if math.isfinite(cap) else 2 * self._top):
            self._limit = math.inf


class Deadline:
    """Sends the remaining bytes in the remaining time; without a limit when it is late. `time_left` returns seconds."""

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
    """Bytes to send, and the seconds from now in which they should be sent."""

    bytes: int
    aim_s: float


def aim(now: float, deadline: float) -> float:
    """Return the time at which a stream that begins now should finish."""
    return now + AIM * (deadline - now)


def time_for(own: Load, behind: Sequence[Load]) -> float:
    """Return the seconds in which the first load must be sent so that those queued behind it can be on time too.

    The common rate is the highest that any of them needs, including all loads before it.
    """
    best, total = own.aim_s, own.bytes
    for load in behind:
        total += load.bytes
        if total:
            best = min(best, load.aim_s * own.bytes / total)
    return best
