"""Figures of availability and of its forecasts. They depend on the world, not on the policy."""

from collections.abc import Sequence
from math import log10
from typing import TypeVar

from mesh.forecast.scores import brier, ece, reliability
from mesh.web.markup import Markup
from mesh.web.palette import LEVELS
from placement.availability import greenwood, kaplan_meier
from sim.campus.observation import AGES_S, HOUR_S, WINDOWS_S, Observation
from sim.campus.world import DAYS
from sim.report.figure import Figure
from sim.report.plot import Axis, Entry, Point, area, bar, box, frame, legend, line, mark, picture, steps, text
from sim.report.scale import Scale, percent, shares, spans, ticks

T = TypeVar("T")
MIN_FORECASTS = 30  # in a bin, for the line to pass through it (own choice)
CURVE = 60  # points of the curve of stays
CELL, ROW = 27.0, 26.0  # size of a cell of the heat map, px


def availability(by_hour: Sequence[Sequence[float]], place: str) -> Figure:
    """Draw `by_hour`, the share of GPUs lent by weekday and hour (below 0: no such hour), as a heat map."""
    left, top = 46.0, 40.0
    parts: list[Markup] = [text(left, 16, "share of all GPUs that is lent, %; columns are hours of the day", "title")]
    for hour in range(24):
        parts.append(text(left + CELL * (hour + 0.5), top - 6, str(hour), "tick", "middle"))
    for day, row in enumerate(by_hour):
        parts.append(text(left - 8, top + ROW * (day + 0.5) + 4, DAYS[day], "label", "end"))
        for hour, part in enumerate(row):
            x, y = left + CELL * hour, top + ROW * day
            if part < 0:
                continue
            level = min(LEVELS - 1, int(part * LEVELS))
            told = f"{DAYS[day]} {hour}:00 to {hour + 1}:00: {percent(part)} lent"
            parts.append(bar(x + 0.5, y + 0.5, CELL - 1, ROW - 1, f"h{level}", told))
            parts.append(text(x + CELL / 2, y + ROW / 2 + 4, f"{100 * part:.0f}", f"replication t{level}", "middle"))
    known = [(part, day, hour) for day, row in enumerate(by_hour) for hour, part in enumerate(row) if part >= 0]
    mean = sum(part for part, _, _ in known) / len(known)
    (low, low_day, low_hour), (high, high_day, high_hour) = min(known), max(known)
    summary = (
        f"On average {percent(mean)} of the GPUs are lent. Minimum: {percent(low)}, {DAYS[low_day]} from {low_hour}:00; "
        f"maximum: {percent(high)}, {DAYS[high_day]} from {high_hour}:00."
    )
    title = "Lent GPUs by weekday and hour"
    return Figure(
        "availability",
        title,
        summary,
        picture(top + ROW * 7 + 8, f"{place}-availability", title, summary, *parts),
        ("hour", *DAYS),
        [(hour, *(round(row[hour], 4) for row in by_hour)) for hour in range(24)],
    )


def survival(seen: Observation, place: str) -> Figure:
    """Draw the Kaplan-Meier curve of stays beside the estimator's forecast at their start."""
    curve, band = kaplan_meier(seen.stays), greenwood(seen.stays)
    low, high = AGES_S[0], AGES_S[-1]
    ages = [10 ** (log10(low) + step * (log10(high) - log10(low)) / (CURVE - 1)) for step in range(CURVE)]
    found, bounds = _at(curve, ages), _at([(at, (lower, upper)) for at, lower, upper in band], ages)
    top, space = legend(
        [
            Entry("stays (Kaplan-Meier)", 0),
            Entry("their 95 % interval", 0, "area", style="band f0"),
            Entry("forecast at their start", 1, dash=1),
        ],
        14,
    )
    inside = box(340, top=36 + space)
    x = Axis("age of the stay", Scale(low, high, inside.left, inside.right, log=True), spans(low, high))
    y = Axis("share that still lasts", Scale(0, 1, inside.bottom, inside.top), shares(ticks(0, 1)))
    upper = [(x.scale(age), y.scale(one[1])) for age, one in zip(ages, bounds, strict=True)]
    lower = [(x.scale(age), y.scale(one[0])) for age, one in zip(ages, bounds, strict=True)]
    predicted = list(zip(AGES_S, seen.predicted, strict=True)) if seen.stays else []
    summary = _of_stays(seen, curve, predicted)
    title = "Length of stays"
    parts = (
        top,
        frame(inside, x, y),
        area(upper, lower, "band f0"),
        steps([(x.scale(age), y.scale(part)) for age, part in zip(ages, found, strict=True)], 0),
        *([line([(x.scale(age), y.scale(chance)) for age, chance in predicted], 1, 1)] if predicted else []),
        *(
            mark(x.scale(age), y.scale(chance), 1, f"{_duration(age)}: {percent(chance)}", 3.5)
            for age, chance in predicted
        ),
    )
    rows = [
        (int(age), round(_at(curve, [age])[0], 4), *(round(one, 4) for one in _at_band(band, age)), round(chance, 4))
        for age, chance in predicted
    ]
    columns = ("age, s", "still lasts", "low", "high", "forecast")
    return Figure(
        "survival", title, summary, picture(340, f"{place}-survival", title, summary, *parts), columns, list(rows)
    )


def _of_stays(seen: Observation, curve: Sequence[tuple[float, float]], predicted: Sequence[tuple[float, float]]) -> str:
    if not seen.stays:
        return "No stay began after the warm-up."
    gaps = [abs(chance - _at(curve, [age])[0]) for age, chance in predicted]
    half = next((f"half end within {_duration(age)}" for age, part in curve if part <= 0.5), "fewer than half end")
    return (
        f"Of {len(seen.stays)} stays, {half}. The estimator's forecast at their start is off by at most "
        f"{100 * max(gaps):.1f} percentage points (at {_duration(predicted[gaps.index(max(gaps))][0])})."
    )


def calibration(seen: Observation, place: str) -> Figure:
    """Draw forecasts, in bins of a tenth, against the observed outcomes, for each window."""
    names = [f"another {_duration(window_s)}" for window_s in WINDOWS_S]
    top, space = legend(
        [*(Entry(name, number, "mark") for number, name in enumerate(names)), Entry("perfect calibration", 4, dash=4)],
        14,
    )
    height = 440.0
    inside = box(height, top=36 + space, left=190, right=190)
    x = Axis("forecast: probability to stay", Scale(0, 1, inside.left, inside.right), shares(ticks(0, 1)))
    y = Axis("share that stayed", Scale(0, 1, inside.bottom, inside.top), shares(ticks(0, 1)))
    parts: list[str] = [top, frame(inside, x, y, grid_x=True)]
    parts.append(line([(x.scale(0), y.scale(0)), (x.scale(1), y.scale(1))], 4, 4))
    rows: list[tuple[str | int | float, ...]] = []
    told = []
    for number, (name, pairs) in enumerate(zip(names, seen.forecasts, strict=True)):
        if not pairs:
            continue
        chances, stayed = [chance for chance, _ in pairs], [there for _, there in pairs]
        bins = reliability(chances, stayed)
        points: list[Point] = [(x.scale(said), y.scale(came)) for _, said, came in bins]
        parts.append(
            line([at for at, (count, _, _) in zip(points, bins, strict=True) if count >= MIN_FORECASTS], number)
        )
        for (count, said, came), (px, py) in zip(bins, points, strict=True):
            size = 3 + 5 * (count / len(pairs)) ** 0.5
            parts.append(mark(px, py, number, f"{count} forecasts of {percent(said)}: {percent(came)} stayed", size))
            rows.append((name, count, round(said, 4), round(came, 4)))
        told.append(
            f"over {name}: ECE {ece(chances, stayed):.3f}, Brier score {brier(chances, stayed):.3f}, {len(pairs)} forecasts"
        )
    summary = (
        f"Forecasts in bins of a tenth against the outcomes ({'; '.join(told)}). One forecast an hour for each machine that is "
        "lent and has given no notice. Larger marks stand for more forecasts; lines skip bins with fewer than 30."
    )
    title = "Calibration of forecasts"
    return Figure(
        "calibration",
        title,
        summary,
        picture(height, f"{place}-calibration", title, summary, *parts),
        ("window", "forecasts", "mean forecast", "stayed"),
        rows,
    )


def _at(curve: Sequence[tuple[float, T]], ages: Sequence[float]) -> list[T]:
    """Return the value of a step curve at each of these ages, which are in order."""
    found, place = [], 0
    for age in ages:
        while place + 1 < len(curve) and curve[place + 1][0] <= age:
            place += 1
        found.append(curve[place][1])
    return found


def _at_band(band: Sequence[tuple[float, float, float]], age: float) -> tuple[float, float]:
    return _at([(at, (low, high)) for at, low, high in band], [age])[0]


def _duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.3g} h"
