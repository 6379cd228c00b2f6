"""Figures that compare policies: loss and downtime of departures, checkpoint intervals, and sensitivity to inputs."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

from mesh.web.markup import Markup
from mesh.web.palette import LIGHT
from sim.campus.metrics import percentile
from sim.campus.policies import PERIODIC
from sim.campus.sensitivity import Tornado
from sim.campus.statistics import Interval
from sim.report.figure import Figure, Value
from sim.report.plot import Axis, Entry, Point, bar, box, frame, legend, line, mark, picture, steps, text
from sim.report.scale import Scale, decades, labelled, percent, shares, spans, ticks, written

POINTS = 100  # of a distribution: its percentiles
COLOURS = len(LIGHT.series)
ROW = 58.0  # height of an input in the sensitivity figure, px


def work_loss(lost: Mapping[str, Sequence[float]], place: str) -> Figure:
    """Draw the distribution of work lost at a departure; `lost` has GPU-s of each departure, by policy."""
    minutes = {policy: sorted(one / 60 for one in values) for policy, values in lost.items() if values}
    most = max((values[-1] for values in minutes.values()), default=1.0)
    least = 0.1
    scale = (least, 10 ** ceil(log10(max(1.0, most))))
    told = [
        f"{policy}: {percent(sum(one <= least for one in values) / len(values))} lose at most 0.1 GPU-minutes, "
        f"the worst tenth more than {written(percentile(values, 0.9))}"
        for policy, values in minutes.items()
    ]
    summary = f"Distribution of the work lost when a machine departs under a running job. {'; '.join(told)}."
    title = "Work lost at a departure"
    x_title = "work lost, GPU-minutes (losses below 0.1 count at the left edge)"
    axis = (x_title, scale, labelled(decades(*scale)))
    return _distributions("work-loss", title, summary, minutes, axis, "share of the departures", "min", place)


def downtime(down: Mapping[str, Sequence[float]], place: str) -> Figure:
    """Draw the distribution of downtime; `down` has the seconds of each departure, by policy."""
    ordered = {policy: sorted(values) for policy, values in down.items() if values}
    most = max((values[-1] for values in ordered.values()), default=60.0)
    scale = (1.0, max(60.0, most))
    told = [f"{policy}: median {written(percentile(values, 0.5))} s" for policy, values in ordered.items()]
    summary = f"Distribution of the time until the job computes again, waiting included. {'; '.join(told)}."
    title = "Downtime of jobs"
    axis = ("from the last useful step to the next one", scale, spans(*scale))
    return _distributions("downtime", title, summary, ordered, axis, "share of the departures", "s", place)


def _distributions(
    name: str,
    title: str,
    summary: str,
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
    return Figure(name, title, summary, picture(height, f"{place}-{name}", title, summary, *parts), columns, rows)


def intervals(found: Mapping[str, tuple[Interval, Interval]], place: str) -> Figure:
    """Draw loss against overhead (`found`, in GPU-h per 100 delivered, by policy); a line joins the fixed intervals."""
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
    curve: list[Point] = []
    for minutes, policy in fixed:
        over, loss = found[policy]
        px, py = x.scale(over.value), y.scale(loss.value)
        curve.append((px, py))
        parts.append(mark(px, py, 0, _told(policy, over, loss)))
        parts.append(text(px + 9, py - 6, str(minutes)))
    if len(curve) > 1:
        parts.insert(2, line(curve, 0))
    for entry, policy in zip(entries[1:], others, strict=True):
        over, loss = found[policy]
        parts.append(_cross(x, y, over, loss, entry.series))
        parts.append(mark(x.scale(over.value), y.scale(loss.value), entry.series, _told(policy, over, loss), 5.5))
    best = min(found, key=lambda policy: sum(one.value for one in found[policy])) if found else ""
    summary = (
        "Lower is less work lost, further left is less overhead. Both axes are logarithmic; values below 0.01 lie at the edge. "
        f"Fixed intervals and Daly's ignore notices; policies that use notices lie below the line. Smallest sum: {best}."
    )
    title = "Checkpoint interval: loss against overhead"
    rows: list[tuple[Value, ...]] = [
        (policy, *(round(value, 4) for one in pair for value in (one.value, one.low, one.high)), pair[0].n)
        for policy, pair in found.items()
    ]
    columns = ("policy", "overhead", "low", "high", "loss", "low", "high", "n")
    return Figure(
        "intervals", title, summary, picture(height, f"{place}-intervals", title, summary, *parts), columns, rows
    )


def _cross(x: Axis, y: Axis, over: Interval, loss: Interval, series: int) -> Markup:
    middle = (x.scale(over.value), y.scale(loss.value))
    across = line([(x.scale(over.low), middle[1]), (x.scale(over.high), middle[1])], series)
    return Markup(across + line([(middle[0], y.scale(loss.low)), (middle[0], y.scale(loss.high))], series))


def _told(policy: str, over: Interval, loss: Interval) -> str:
    return f"{policy}: overhead {written(over.value)}, loss {written(loss.value)}"


def sensitivity(found: Tornado, unit: str, place: str) -> Figure:
    """Draw a tornado plot: a bar to each side of the base for each input, the widest first."""
    names = list(dict.fromkeys(one.name for one in found.bars))
    base = found.base.value
    reach = [base, *(base + edge for one in found.bars for edge in (one.change.low, one.change.high))]
    low, high = min(reach), max(reach)
    room = 0.06 * ((high - low) or 1.0)
    top, space = legend(
        [Entry("low end", 0, "area"), Entry("high end", 1, "area"), Entry("95 % interval, paired", 4)], 14
    )
    height = 16 + space + ROW * len(names) + 46
    inside = box(height, top=16 + space, left=300)
    scale = Scale(low - room, high + room, inside.left, inside.right)
    title = f"Sensitivity of {found.metric.replace('_', ' ')}"
    x = Axis(
        f"{found.metric.replace('_', ' ')} under {found.policy}, {unit}",
        scale,
        labelled(ticks(scale.low, scale.high, 6)),
    )
    parts: list[Markup] = [top, frame(inside, x, Axis("", Scale(0, 1, 0, 1), ()), grid_x=True)]
    for one in found.bars:
        row = inside.top + ROW * names.index(one.name)
        lower = one.end == "high"
        y, series = row + (31 if lower else 7), 1 if lower else 0
        left, right = sorted((scale(base), scale(base + one.change.value)))
        told = f"{one.name}, {one.label}: {written(one.value.value)} {unit}"
        parts.append(bar(left, y, max(1.0, right - left), 18, f"area f{series}", told))
        parts.append(line([(scale(base + one.change.low), y + 9), (scale(base + one.change.high), y + 9)], 4))
        if not lower:
            parts.append(text(4, row + 30, one.name, "title"))
        parts.append(text(inside.left - 8, y + 13, one.label, "tick", "end"))
    parts.append(line([(scale(base), inside.top), (scale(base), inside.bottom)], 4, 4))
    swings = ", ".join(
        f"{one.name} ({one.label}) {'+' if one.change.value >= 0 else '−'}{written(abs(one.change.value))}"
        for one in found.bars
    )
    summary = (
        f"Each input changed down and up, one at a time; base {written(base)} {unit} ({found.base.n} paired seeds). "
        f"Changes: {swings}."
    )
    columns = ("input", "changed to", "value", "low", "high", "change", "low", "high", "n")
    rows: list[tuple[Value, ...]] = [
        (
            one.name,
            one.label,
            *(round(value, 5) for value in (one.value.value, one.value.low, one.value.high)),
            *(round(value, 5) for value in (one.change.value, one.change.low, one.change.high)),
            one.change.n,
        )
        for one in found.bars
    ]
    return Figure(
        "sensitivity", title, summary, picture(height, f"{place}-sensitivity", title, summary, *parts), columns, rows
    )
