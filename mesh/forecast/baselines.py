"""Baselines for the survival estimate: three simple models, fitted on the data before the cut."""

from collections.abc import Sequence
from math import exp

from mesh.forecast.questions import BIN_S, Bins, Questions, walk

WEEK_HOURS = 168
PRIOR_EVENTS = 1.0  # prior departures for each hour of the week, at the mean hazard (own choice)

BIN_H = BIN_S / 3600


class Counts:
    """Departures and hours at risk before the cut, by hour of the week."""

    def __init__(self, trace: Bins, cut: float, utc_offset_s: float) -> None:
        self.utc_offset_s = utc_offset_s
        self.events, self.hours = [0.0] * WEEK_HOURS, [0.0] * WEEK_HOURS
        for number, lent, left in walk(trace):
            end = trace.first + BIN_S * (number + 1)
            if end > cut:
                break
            slot = self.slot(end - BIN_S)
            self.events[slot] += len(left)
            self.hours[slot] += BIN_H * (len(lent) + len(left))

    def slot(self, unix: float) -> int:
        hours = int((unix + self.utc_offset_s) // 3600)
        return (hours + 72) % WEEK_HOURS  # the epoch began on a Thursday

    @property
    def hazard(self) -> float:
        """The mean hazard, per hour, with half a departure added so that it is never 0."""
        return (sum(self.events) + 0.5) / max(sum(self.hours), 1.0)


def climatology(stayed: Sequence[int]) -> float:
    """Return the part of the questions before the cut whose node stayed."""
    return (sum(stayed) + 0.5) / (len(stayed) + 1)


def constant(counts: Counts, horizon_min: int) -> float:
    """Return the survival under a constant hazard."""
    return exp(-counts.hazard * horizon_min / 60)


def hour_of_week(counts: Counts, questions: Questions, which: Sequence[int], horizon_min: int) -> list[float]:
    """Return the survivals under a Gamma-Poisson hazard for each hour of the week."""
    mean = counts.hazard
    rates = [
        (events + PRIOR_EVENTS) / (hours + PRIOR_EVENTS / mean)
        for events, hours in zip(counts.events, counts.hours, strict=True)
    ]
    window = -(-horizon_min * 60 // BIN_S)
    by_bin: dict[int, float] = {}
    for number in {questions.bin[place] for place in which}:
        begin = questions.time(number)
        by_bin[number] = exp(-sum(rates[counts.slot(begin + BIN_S * later)] * BIN_H for later in range(window)))
    return [by_bin[questions.bin[place]] for place in which]
