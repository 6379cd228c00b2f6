"""When the next checkpoint is due: the port, and the rules that are held against each other on it.

`next_checkpoint(now, since, outlook)` is asked when a guest begins and after each checkpoint. `since` is when the work began
that is not saved yet. It gives a time, not before `now`; `inf` is never. The product's own rule
plugs in here.
"""

from collections.abc import Callable, Iterator
from math import inf, sqrt
from typing import Protocol

import msgspec

LEAST_S, MOST_S = 60.0, 6 * 3600.0  # between two checkpoints; ours


class Outlook(msgspec.Struct, frozen=True):
    """What a rule may look at. `stall_s`: what a checkpoint costs the training; `upload_s`: until it is safe elsewhere;
    `lossy`: the part of the departures that a notice does not cover; `rates(t)`: departures a second from t on, each with until
    when it holds; `mean_rate`: over the campus; `departs_at`: when this machine will really go, for the oracle alone."""

    stall_s: float
    upload_s: float
    lossy: float
    rates: Callable[[float], Iterator[tuple[float, float]]]
    mean_rate: float
    departs_at: float


class Schedule(Protocol):
    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float: ...


class Never:
    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        return inf


class Periodic(msgspec.Struct, frozen=True):
    every_s: float

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        return max(now, since + self.every_s)


class Young(msgspec.Struct, frozen=True):
    """sqrt(2 C M) with the campus's mean rate (Young 1974), or Daly's higher order (2006). Departures with a notice count as any
    other: the rule knows of none."""

    daly: bool = False

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        return max(now, since + min(MOST_S, max(LEAST_S, self.interval_s(outlook.stall_s, 1 / outlook.mean_rate))))

    def interval_s(self, stall_s: float, mean_s: float) -> float:
        young = sqrt(2 * stall_s * mean_s)
        if not self.daly:
            return young
        if stall_s >= 2 * mean_s:
            return mean_s
        ratio = stall_s / (2 * mean_s)
        return young * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s


class HazardIntegral(msgspec.Struct, frozen=True):
    """Due when the integral of sqrt(lossy x rate / 2C) since the last one reaches 1 (the fluid limit of Hiroyama, Dohi and
    Okamura 2013). Where the rate is constant it is Young's."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        total, begun = 0.0, since
        for until, rate in outlook.rates(since):
            density = sqrt(max(rate * outlook.lossy, 1e-12) / (2 * max(outlook.stall_s, 0.01)))
            if total + density * (until - begun) >= 1:
                due = begun + (1 - total) / density
                return max(now, min(since + MOST_S, max(since + LEAST_S, due)))
            total += density * (until - begun)
            begun = until
            if begun >= since + MOST_S:
                break
        return max(now, since + MOST_S)


class Oracle:
    """One, so that it is safe just before the machine goes."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        due = outlook.departs_at - 1.5 * (outlook.stall_s + outlook.upload_s) - 1.0
        return due if due >= now and since < due else inf
