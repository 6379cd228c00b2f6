"""Figures of one run over time: GPU use, attempts, and uplink traffic."""

from collections.abc import Sequence

from mesh.web.markup import Markup, cut
from sim.campus.churn import DAY_S
from sim.campus.observation import HOUR_S, AttemptSpan, End, Observation
from sim.campus.world import DAYS
from sim.report.figure import Figure
from sim.report.plot import Axis, Box, Entry, Point, area, bar, box, frame, legend, line, picture, steps, text
from sim.report.scale import Scale, decades, percent, shares, ticks, written

MAX_BINS = 168  # of the utilisation figure: the hours of a week
MAX_LANES, MAX_ATTEMPTS = 56, 300  # that fit into the figure of attempts
LINE = 12.0  # height of a machine's name, px
LENGTHS_S = tuple(DAY_S * days for days in (7, 4, 2, 1, 0.5, 0.25))
ENDS: dict[End, tuple[str, str]] = {
    "finished": ("finished", "e0"),
    "moved": ("moved under notice, nothing lost", "e1"),
    "lost": ("machine lost, work lost", "e2"),
    "went home": ("migrated back", "e3"),
    "running": ("still running", "e4"),
}


def utilisation(seen: Observation, place: str) -> Figure:
    """Draw who used the GPUs over the run: guests, owners, or nobody."""
    total = sum(seen.gpus.values())
    every = -(-len(seen.hours) // MAX_BINS)
    bins = [seen.hours[start : start + every] for start in range(0, len(seen.hours), every)]
    rows = []
    for hours in bins:
        guests = sum(hour.guests for hour in hours) / len(hours) / total
        owners = sum(hour.owners for hour in hours) / len(hours) / total
        idle = sum(hour.idle for hour in hours) / len(hours) / total
        rows.append((hours[0].at_s / DAY_S, guests, owners, idle))
    top, space = legend(
        [Entry("guests", 0, "area"), Entry("owners", 1, "area"), Entry("lent and idle", 2, "area", style="idle")], 14
    )
    inside = box(320, top=36 + space)
    days = seen.end_s / DAY_S
    x = Axis("day", Scale(0, days, inside.left, inside.right), tuple((at, written(at)) for at in ticks(0, days, 8)))
    y = Axis("share of all GPUs", Scale(0, 1, inside.bottom, inside.top), shares(ticks(0, 1)))
    parts: list[Markup] = [top, frame(inside, x, y)]
    lower = [0.0] * len(rows)
    for series in range(3):
        upper = [below + row[1 + series] for below, row in zip(lower, rows, strict=True)]
        kind = "idle" if series == 2 else f"area f{series}"
        parts.append(area(_stairs(x, y, rows, upper, days), _stairs(x, y, rows, lower, days), kind))
        lower = upper
    counted = seen.counts_from_s / DAY_S
    if counted:
        at = x.scale(counted)
        parts.append(line([(at, inside.top - 8), (at, inside.bottom)], 4, 4))
        parts.append(text(at + 5, inside.top - 4, "end of warm-up"))
    after = [hour for hour in seen.hours if hour.at_s >= seen.counts_from_s]
    mean_guests, mean_owners, mean_idle = (
        sum(getattr(hour, name) for hour in after) / len(after) / total for name in ("guests", "owners", "idle")
    )
    summary = (
        f"{seen.result.policy}, seed {seen.result.seed}: guests hold {percent(mean_guests)} of the GPUs, owners use "
        f"{percent(mean_owners)}, {percent(mean_idle)} are lent and idle. Owners hold the rest without using it."
    )
    title = "GPU use over time"
    columns = ("day", "guests", "owners", "lent and idle")
    data = [tuple(round(value, 4) for value in row) for row in rows]
    return Figure(
        "utilisation", title, summary, picture(320, f"{place}-utilisation", title, summary, *parts), columns, list(data)
    )


def _stairs(x: Axis, y: Axis, rows: Sequence[tuple[float, ...]], heights: Sequence[float], end: float) -> list[Point]:
    ends = [row[0] for row in rows[1:]] + [end]
    return [
        (x.scale(at), y.scale(height))
        for row, until, height in zip(rows, ends, heights, strict=True)
        for at in (row[0], until)
    ]


def attempts(seen: Observation, place: str) -> Figure:
    """Draw some days after the warm-up: a lane for each GPU, a bar for each attempt and absence, as many machines as fit."""
    chosen = _machines(seen)
    start, length, runs = _window(seen, chosen)
    end = start + length
    lanes: dict[str, int] = {}
    for machine in chosen:
        lanes[machine] = sum(seen.gpus[name] for name in lanes)
    total = sum(seen.gpus[name] for name in chosen)
    lane = min(14.0, max(8.0, 420 / total))
    used = [how for how in ENDS if any(run.end == how for run in runs)]
    top, space = legend(
        [
            *(Entry(ENDS[how][0], 0, "area", style=f"run {ENDS[how][1]}") for how in used),
            Entry("machine away", 0, "area", style="away"),
        ],
        14,
        left=8,
    )
    height = 16 + space + lane * total + 30
    inside = Box(118, 16 + space, 688, height - 30)
    first = DAYS.index(seen.first_weekday)
    step_s = next(step for step in (HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S) if length / step <= 9)
    moments = [start + step_s * number for number in range(int(length / step_s) + 1)]
    marks = tuple((at, f"{DAYS[(first + int(at // DAY_S)) % 7]} {int(at % DAY_S // HOUR_S)}:00") for at in moments)
    x = Axis("", Scale(start, end, inside.left, inside.right), marks)
    parts: list[Markup] = [top, frame(inside, x, Axis("", Scale(0, 1, 0, 1), ()), grid_x=True)]
    named = -LINE  # y of the last name
    for number, machine in enumerate(chosen):
        y = inside.top + lane * lanes[machine]
        depth = lane * seen.gpus[machine]
        if number % 2 == 0:
            parts.insert(1, bar(inside.left, y, inside.right - inside.left, depth, "stripe"))
        if (middle := y + depth / 2 + 4) - named >= LINE:
            parts.append(text(inside.left - 6, middle, cut(machine, 16), "tick", "end"))
            named = middle
    for away in seen.away:
        if away.machine in lanes and away.start_s < end and away.end_s > start:
            left, right = x.scale(away.start_s), x.scale(away.end_s)
            y = inside.top + lane * lanes[away.machine]
            told = f"{away.machine}: {away.kind}, away for {(away.end_s - away.start_s) / HOUR_S:.1f} h"
            parts.append(bar(left, y + 0.5, right - left, lane * seen.gpus[away.machine] - 1, "away", told))
    for run, first_lane, count in _packed(runs, seen, lanes):
        left, right = x.scale(run.start_s), x.scale(run.end_s)
        told = f"job {run.job}, attempt {run.attempt}, {run.gpus} GPU on {run.machine}: {ENDS[run.end][0]}"
        y = inside.top + lane * first_lane + 1
        parts.append(bar(left, y, max(1.0, right - left - 0.6), lane * count - 2, f"run {ENDS[run.end][1]}", told))
    summary = (
        f"{seen.result.policy}, seed {seen.result.seed}: {len(runs)} attempts on {len(chosen)} of {len(seen.gpus)} machines, "
        f"a lane for each GPU, over {length / DAY_S:g} days. "
        + ", ".join(f"{sum(run.end == how for run in runs)} {ENDS[how][0]}" for how in used)
        + "."
    )
    title = "Attempts and how they ended"
    columns = ("job", "attempt", "machine", "GPUs", "from, h", "to, h", "end")
    rows = [
        (
            run.job,
            run.attempt,
            run.machine,
            run.gpus,
            round(run.start_s / HOUR_S, 3),
            round(run.end_s / HOUR_S, 3),
            run.end,
        )
        for run in runs
    ]
    return Figure(
        "attempts", title, summary, picture(height, f"{place}-attempts", title, summary, *parts), columns, list(rows)
    )


def _machines(seen: Observation) -> list[str]:
    """Return all machines, or an even selection that fits into the lanes."""
    names = list(seen.gpus)
    every = 1
    while sum(seen.gpus[name] for name in names[::every]) > MAX_LANES and every < len(names):
        every += 1
    chosen = names[::every]
    return chosen if sum(seen.gpus[name] for name in chosen) <= 2 * MAX_LANES else chosen[:1]


def _window(seen: Observation, chosen: Sequence[str]) -> tuple[float, float, list[AttemptSpan]]:
    """Return start, length and attempts of the longest window that holds at most MAX_ATTEMPTS."""
    start = -(-seen.counts_from_s // DAY_S) * DAY_S
    if start >= seen.end_s:
        start = 0.0
    there = set(chosen)
    runs = [run for run in seen.runs if run.machine in there and run.end_s > start]
    for most_s in LENGTHS_S:
        length = min(most_s, seen.end_s - start)
        inside = [run for run in runs if run.start_s < start + length]
        if len(inside) <= MAX_ATTEMPTS:
            break
    return start, length, sorted(inside[:MAX_ATTEMPTS], key=lambda run: (run.start_s, run.job))


def _packed(
    runs: Sequence[AttemptSpan], seen: Observation, lanes: dict[str, int]
) -> list[tuple[AttemptSpan, int, int]]:
    """Assign lanes: (attempt, first lane, number of lanes). An attempt on separate lanes gives several entries."""
    busy: dict[str, list[float]] = {machine: [0.0] * seen.gpus[machine] for machine in lanes}
    found: list[tuple[AttemptSpan, int, int]] = []
    for run in runs:
        until = busy[run.machine]
        # A machine never runs more than its GPUs; lanes of an attempt that has just ended are free.
        free = sorted(range(len(until)), key=lambda place: (until[place] > run.start_s, place))[: run.gpus]
        for place in sorted(free):
            until[place] = run.end_s
            if found and found[-1][0] is run and found[-1][1] + found[-1][2] == lanes[run.machine] + place:
                found[-1] = (run, found[-1][1], found[-1][2] + 1)
            else:
                found.append((run, lanes[run.machine] + place, 1))
    return found


def uplinks(seen: Observation, place: str) -> Figure:
    """Draw the load of all uplinks together, in both directions, by hour of the day."""
    after = [hour for hour in seen.hours if hour.at_s >= seen.counts_from_s]
    rows = []
    for of_day in range(24):
        hours = [hour for hour in after if int(hour.at_s % DAY_S // HOUR_S) == of_day]
        if hours:
            own = sum(hour.own_load for hour in hours) / len(hours)
            checkpoints = [hour.checkpoint_load for hour in hours]
            rows.append((of_day, own, sum(checkpoints) / len(checkpoints), max(checkpoints)))
    least = 1e-4
    top, space = legend(
        [
            Entry("other campus traffic", 1, dash=1),
            Entry("checkpoints, mean", 0),
            Entry("checkpoints, busiest hour", 0, dash=2),
        ],
        14,
    )
    inside = box(330, top=36 + space)
    x = Axis(
        "hour of the day", Scale(0, 24, inside.left, inside.right), tuple((at, f"{at:.0f}") for at in range(0, 25, 3))
    )
    y = Axis(
        "share of the uplinks' capacity, logarithmic",
        Scale(least, 1, inside.bottom, inside.top, log=True),
        shares(decades(least, 1)),
    )
    parts: list[Markup] = [top, frame(inside, x, y)]
    for column, series, dash in ((1, 1, 1), (2, 0, 0), (3, 0, 2)):
        points = [(x.scale(row[0]), y.scale(max(least, row[column]))) for row in rows]
        points.append((x.scale(rows[-1][0] + 1), points[-1][1]))
        parts.append(steps(points, series, dash))
    busiest = max(rows, key=lambda row: row[3])
    summary = (
        f"{seen.result.policy}, seed {seen.result.seed}: checkpoints take {percent(sum(row[2] for row in rows) / len(rows))} of "
        f"the uplinks on average and {percent(busiest[3])} in the busiest hour (from {busiest[0]}:00). Other campus traffic "
        f"takes {percent(min(row[1] for row in rows))} to {percent(max(row[1] for row in rows))}. Bytes count in the hour in "
        "which their transfer ends."
    )
    title = "Uplink traffic"
    columns = ("hour", "other traffic", "checkpoints, mean", "checkpoints, busiest")
    data = [(row[0], *(round(value, 7) for value in row[1:])) for row in rows]
    return Figure(
        "uplinks", title, summary, picture(330, f"{place}-uplinks", title, summary, *parts), columns, list(data)
    )
