"""When the next checkpoint is due: the port, and the rules that are held against each other on it.

`next_checkpoint(now, since, outlook)` is asked when a guest begins and after each checkpoint. `since` is when the work began
that is not saved yet. It gives a time, not before `now`; `inf` is never.
"""

from math import inf, sqrt
from typing import Protocol

import msgspec

from placement.schedule import LEAST_S, MOST_S, Cost, Rates, due_at


class Outlook(msgspec.Struct, frozen=True):
    """What a rule may look at. `stall_s`: what a checkpoint costs the training; `upload_s`: until it is safe elsewhere;
    `most_upload_s`: that of the whole state, with those of all guests of the machine before it; `lossy`: the part of the
    departures that a notice does not cover; `rates(t)`: departures a second from t on, each with until when it holds;
    `mean_rate`: over the campus; `departs_at`: when this machine will really go, for the oracle alone."""

    stall_s: float
    upload_s: float
    most_upload_s: float
    lossy: float
    rates: Rates
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


class Product:
    """The rule of `placement/schedule.py`."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        cost = Cost(outlook.stall_s, outlook.upload_s)
        return due_at(now, since, cost, outlook.lossy, outlook.rates)[0]


class Oracle:
    """One, so that it is safe just before the machine goes."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        due = outlook.departs_at - 1.5 * (outlook.stall_s + outlook.most_upload_s) - 1.0
        return due if due >= now and since < due else inf
