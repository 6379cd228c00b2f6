"""The figure of what an answer hangs on: a bar to each side of the base for each input, the widest first."""

from mesh.web.markup import Markup
from sim.campus.sensitivity import Tornado
from sim.report.figure import Figure, Value
from sim.report.plot import Axis, Entry, bar, box, frame, legend, line, picture, text
from sim.report.scale import Scale, labelled, ticks, written

ROW = 58.0


def sensitivity(found: Tornado, unit: str, place: str) -> Figure:
    names = list(dict.fromkeys(one.knob for one in found.bars))
    base = found.base.value
    reach = [base, *(base + edge for one in found.bars for edge in (one.more.low, one.more.high))]
    low, high = min(reach), max(reach)
    room = 0.06 * ((high - low) or 1.0)
    top, space = legend(
        [Entry("low end", 0, "area"), Entry("high end", 1, "area"), Entry("95 % interval, paired", 4)], 14
    )
    height = 16 + space + ROW * len(names) + 46
    inside = box(height, top=16 + space, left=300)
    scale = Scale(low - room, high + room, inside.left, inside.right)
    title = f"What {found.figure.replace('_', ' ')} hangs on"
    x = Axis(
        f"{found.figure.replace('_', ' ')} under {found.policy}, {unit}",
        scale,
        labelled(ticks(scale.low, scale.high, 6)),
    )
    parts: list[Markup] = [top, frame(inside, x, Axis("", Scale(0, 1, 0, 1), ()), grid_x=True)]
    for one in found.bars:
        row = inside.top + ROW * names.index(one.knob)
        lower = one.end == "high"
        y, series = row + (31 if lower else 7), 1 if lower else 0
        left, right = sorted((scale(base), scale(base + one.more.value)))
        told = f"{one.knob}, {one.says}: {written(one.value.value)} {unit}"
        parts.append(bar(left, y, max(1.0, right - left), 18, f"area f{series}", told))
        parts.append(line([(scale(base + one.more.low), y + 9), (scale(base + one.more.high), y + 9)], 4))
        if not lower:
            parts.append(text(4, row + 30, one.knob, "title"))
        parts.append(text(inside.left - 8, y + 13, one.says, "tick", "end"))
    parts.append(line([(scale(base), inside.top), (scale(base), inside.bottom)], 4, 4))
    swings = ", ".join(
        f"{one.knob} ({one.says}) {'+' if one.more.value >= 0 else '−'}{written(abs(one.more.value))}"
        for one in found.bars
    )
    says = (
        f"Each input moved down and up, all else as it was; base {written(base)} {unit} ({found.base.n} paired seeds). By how "
        f"much it changes: {swings}."
    )
    columns = ("input", "end", "value", "low", "high", "more than base", "low", "high", "n")
    rows: list[tuple[Value, ...]] = [
        (
            one.knob,
            one.says,
            *(round(value, 5) for value in (one.value.value, one.value.low, one.value.high)),
            *(round(value, 5) for value in (one.more.value, one.more.low, one.more.high)),
            one.more.n,
        )
        for one in found.bars
    ]
    return Figure(
        "sensitivity", title, says, picture(height, f"{place}-sensitivity", title, says, *parts), columns, rows
    )
