"""Figures that hold policies against each other: what departures cost, how long jobs were down, and what saving costs."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

from mesh.web.markup import Markup
from mesh.web.palette import LIGHT
from sim.campus.policies import PERIODIC
from sim.campus.statistics import Interval
from sim.campus.tally import percentile
from sim.report.figure import Figure, Value
from sim.report.plot import Axis, Entry, Point, box, frame, legend, line, mark, picture, steps, text
from sim.report.scale import Scale, decades, labelled, percent, shares, spans, ticks, written

POINTS = 100  # that a distribution is drawn by: its percentiles
COLOURS = len(LIGHT.series)


def work_loss(lost: Mapping[str, Sequence[float]], place: str) -> Figure:
    """`lost`: GPU-s of each departure, by policy."""
    minutes = {policy: sorted(one / 60 for one in values) for policy, values in lost.items() if values}
    most = max((values[-1] for values in minutes.values()), default=1.0)
    least = 0.1
    scale = (least, 10 ** ceil(log10(max(1.0, most))))
    told = [
        f"{policy}: {percent(sum(one <= least for one in values) / len(values))} lose next to nothing, "
        f"the worst tenth more than {written(percentile(values, 0.9))} min"
        for policy, values in minutes.items()
    ]
    says = f"The part of the departures under a running job that lose at most so much work. {'; '.join(told)}."
    title = "What a departure loses"
    x_title = "work lost, GPU-minutes (a departure that loses less than 0.1 counts at the left edge)"
    axis = (x_title, scale, labelled(decades(*scale)))
    return _distributions("work-loss", title, says, minutes, axis, "part of the departures", "min", place)


def downtime(down: Mapping[str, Sequence[float]], place: str) -> Figure:
    """`down`: seconds of each departure, by policy."""
    ordered = {policy: sorted(values) for policy, values in down.items() if values}
    most = max((values[-1] for values in ordered.values()), default=60.0)
    scale = (1.0, max(60.0, most))
    told = [f"{policy}: half within {written(percentile(values, 0.5))} s" for policy, values in ordered.items()]
    says = f"The part of the departures after which a job computes again within so long, waiting included. {'; '.join(told)}."
    title = "How long jobs are down"
    axis = ("from the last useful step to the next one", scale, spans(*scale))
    return _distributions("downtime", title, says, ordered, axis, "part of the departures", "s", place)


def _distributions(
    name: str,
    title: str,
    says: str,
    values: Mapping[str, Sequence[float]],
    axis: tuple[str, tuple[float, float], tuple[tuple[float, str], ...]],
    y_title: str,
    unit: str,
    place: str,
) -> Figure:
    x_title, (low, high), marks = axis
    entries = [Entry(policy, number % COLOURS, dash=number) for number, policy in enumerate(values)]
    top, space = legend(entries, 14)
    height = 330 + space
    inside = box(height, top=36 + space)
    x = Axis(x_title, Scale(low, high, inside.left, inside.right, log=True), marks)
    y = Axis(y_title, Scale(0, 1, inside.bottom, inside.top), shares(ticks(0, 1)))
    curves = []
    for entry, ordered in zip(entries, values.values(), strict=True):
        points: list[Point] = [(inside.left, y.scale(sum(one <= low for one in ordered) / len(ordered)))]
        points += [
            (x.scale(at), y.scale(step / POINTS))
            for step in range(1, POINTS + 1)
            if (at := percentile(ordered, step / POINTS)) > low
        ]
        points.append((inside.right, y.scale(1)))
        curves.append(steps(points, entry.series, entry.dash, entry.name))
    rows: list[tuple[Value, ...]] = [
        (step, *(round(percentile(ordered, step / POINTS), 3) for ordered in values.values()))
        for step in range(0, POINTS + 1, 2)
    ]
    columns = ("percentile", *(f"{policy}, {unit}" for policy in values))
    parts = (top, frame(inside, x, y), *curves)
    return Figure(name, title, says, picture(height, f"{place}-{name}", title, says, *parts), columns, rows)


def intervals(found: Mapping[str, tuple[Interval, Interval]], place: str) -> Figure:
    """`found`: the overhead and the loss of each policy, GPU-h per 100 delivered; those of fixed intervals are joined."""
    floor_at = 0.01
    values = [max(floor_at, one.value) for pair in found.values() for one in pair] or [1.0]
    low, high = 10 ** floor(log10(min(values))), 10 ** ceil(log10(max(values) * 1.05))
    height = 470.0
    others = [policy for policy in found if not PERIODIC.fullmatch(policy)]
    entries = [
        Entry("fixed interval, minutes", 0, "mark"),
        *(Entry(policy, 1 + number % (COLOURS - 1), "mark") for number, policy in enumerate(others)),
    ]
    top, space = legend(entries, 14)
    inside = box(height, top=36 + space)
    unit = "GPU-h per 100 delivered"
    x = Axis(
        f"overhead: stalls and restores, {unit}",
        Scale(low, high, inside.left, inside.right, log=True),
        labelled(decades(low, high)),
    )
    y = Axis(f"work lost, {unit}", Scale(low, high, inside.bottom, inside.top, log=True), labelled(decades(low, high)))
    parts: list[Markup] = [top, frame(inside, x, y, grid_x=True)]
    fixed = sorted((int(PERIODIC.fullmatch(policy)[1]), policy) for policy in found if PERIODIC.fullmatch(policy))  # type: ignore[index]
    way: list[Point] = []
    for minutes, policy in fixed:
        over, loss = found[policy]
        px, py = x.scale(over.value), y.scale(loss.value)
        way.append((px, py))
        parts.append(mark(px, py, 0, _told(policy, over, loss)))
        parts.append(text(px + 9, py - 6, str(minutes)))
    if len(way) > 1:
        parts.insert(2, line(way, 0))
    for entry, policy in zip(entries[1:], others, strict=True):
        over, loss = found[policy]
        parts.append(_cross(x, y, over, loss, entry.series))
        parts.append(mark(x.scale(over.value), y.scale(loss.value), entry.series, _told(policy, over, loss), 5.5))
    least = min(found, key=lambda policy: sum(one.value for one in found[policy])) if found else ""
    says = (
        "Down is less work lost, left is less paid for it; both axes are logarithmic, and less than 0.01 lies at the edge. "
        f"Fixed intervals and Daly's ignore notices; who uses them is below the line. Least of both together: {least}."
    )
    title = "What saving more often buys"
    rows: list[tuple[Value, ...]] = [
        (policy, *(round(value, 4) for one in pair for value in (one.value, one.low, one.high)), pair[0].n)
        for policy, pair in found.items()
    ]
    columns = ("policy", "overhead", "low", "high", "loss", "low", "high", "n")
    return Figure("intervals", title, says, picture(height, f"{place}-intervals", title, says, *parts), columns, rows)


def _cross(x: Axis, y: Axis, over: Interval, loss: Interval, series: int) -> Markup:
    middle = (x.scale(over.value), y.scale(loss.value))
    across = line([(x.scale(over.low), middle[1]), (x.scale(over.high), middle[1])], series)
    return Markup(across + line([(middle[0], y.scale(loss.low)), (middle[0], y.scale(loss.high))], series))


def _told(policy: str, over: Interval, loss: Interval) -> str:
    return f"{policy}: overhead {written(over.value)}, loss {written(loss.value)}"
