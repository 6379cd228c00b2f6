"""Scales from values to positions, tick values, and formatting of numbers."""

from collections.abc import Sequence
from math import ceil, floor, log10

import msgspec

Tick = tuple[float, str]  # a value and its label


class Scale(msgspec.Struct, frozen=True):
    """A linear or logarithmic map from `low`..`high` to `start`..`end`; values outside map to the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(self.high, max(self.low, value))
        if self.log:
            low, high, value = log10(low), log10(high), log10(value)
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values between `low` and `high` (steps of 1, 2 or 5 times a power of ten)."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    ten = 10.0 ** floor(log10(rough))
    step = next(ten * factor for factor in (1, 2, 5, 10) if ten * factor >= rough * (1 - 1e-9))
    if step > high - low:  # only for a count of 2: a range shorter than the step may contain no multiple of it
        step = 2 * ten
    return [step * place for place in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten between `low` and `high`."""
    return [10.0**power for power in range(ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9) + 1)]


def written(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without trailing zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}g}"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10**digits:
        return f"{rounded:,.0f}"
    places = max(0, digits - 1 - floor(log10(abs(rounded))))
    whole, point, part = f"{rounded:,.{places}f}".partition(".")
    part = part.rstrip("0")
    return f"{whole}{point}{part}" if part else whole


def percent(value: float) -> str:
    return f"{written(100 * value)} %"


def labelled(values: Sequence[float]) -> tuple[Tick, ...]:
    return tuple((value, written(value)) for value in values)


def shares(values: Sequence[float]) -> tuple[Tick, ...]:
    return tuple((value, percent(value)) for value in values)


SPANS: tuple[Tick, ...] = (
    (1.0, "1 s"),
    (10.0, "10 s"),
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (6 * 3600.0, "6 h"),
    (86_400.0, "1 d"),
    (7 * 86_400.0, "7 d"),
)


def spans(low: float, high: float) -> tuple[Tick, ...]:
    """Return the labelled durations between `low` and `high` seconds."""
    return tuple(tick for tick in SPANS if low * (1 - 1e-9) <= tick[0] <= high * (1 + 1e-9))
