"""Checkpoint schedules: rules for the time of the next checkpoint, behind one interface.

The simulator calls `next_checkpoint(now, since, outlook)` when a guest starts and after each checkpoint. `since` is the start of
the work that is not saved yet. The result is a time not before `now`; `inf` means never.
"""

from math import inf, sqrt
from typing import Protocol

import msgspec

from placement.schedule import LEAST_S, MOST_S, Cost, Rates, due_at


class Outlook(msgspec.Struct, frozen=True):
    """The inputs of a schedule.

    `stall_s` is the pause of the training at a checkpoint, `upload_s` the time until it is safe elsewhere, and `max_upload_s`
    the time for the whole state behind those of all guests of the machine. `lossy` is the share of departures that no notice
    covers. `rates(t)` yields (departures a second, end of that rate) from t on; `mean_rate` is the campus's mean. `departs_at`
    is the true departure, for the oracle only.
    """

    stall_s: float
    upload_s: float
    max_upload_s: float
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
    """Young's interval sqrt(2 C M) with the campus's mean rate (1974), or Daly's higher-order one (2006).

    Departures with a notice count like all others.
    """

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
    """The product's rule (`placement.schedule`)."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        cost = Cost(outlook.stall_s, outlook.upload_s)
        return due_at(now, since, cost, outlook.lossy, outlook.rates)[0]


class Oracle:
    """One checkpoint, timed to be safe just before the machine departs."""

    def next_checkpoint(self, now: float, since: float, outlook: Outlook) -> float:
        due = outlook.departs_at - 1.5 * (outlook.stall_s + outlook.max_upload_s) - 1.0
        return due if due >= now and since < due else inf
