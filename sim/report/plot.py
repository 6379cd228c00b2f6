"""SVG parts of figures: frame and axes, lines, areas, bars, marks, legend. All functions are pure and return markup."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mesh.web.markup import Markup, element, join, number
from sim.report.scale import Scale, Tick

WIDTH = 720.0
LETTER = 6.6  # approximate width of a letter at 12 px
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "3 3 1 3", "6 2 1 2 1 2", "10 2")
Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


class Axis(msgspec.Struct, frozen=True):
    title: str
    scale: Scale
    ticks: tuple[Tick, ...]


class Box(msgspec.Struct, frozen=True):
    """The plotting area inside the axes, px."""

    left: float
    top: float
    right: float
    bottom: float


def box(height: float, left: float = 62, top: float = 34, right: float = 16, bottom: float = 46) -> Box:
    return Box(left, top, WIDTH - right, height - bottom)


def text(x: float, y: float, label: str, kind: str = "label", anchor: Anchor = "start", **more: float | str) -> Markup:
    return element("text", label, x=x, y=y, class_=kind, text_anchor=None if anchor == "start" else anchor, **more)


def frame(inside: Box, x: Axis, y: Axis, grid_x: bool = False) -> Markup:
    """Draw both axes, the grid and the titles."""
    parts: list[str] = []
    for value, label in y.ticks:
        place = y.scale(value)
        parts.append(_rule(inside.left, place, inside.right, place))
        parts.append(text(inside.left - 7, place + 4, label, "tick", "end"))
    for value, label in x.ticks:
        place = x.scale(value)
        if grid_x:
            parts.append(_rule(place, inside.top, place, inside.bottom))
        parts.append(element("path", d=f"M{number(place)} {number(inside.bottom)}v5", class_="axis"))
        half = len(label) * LETTER / 2
        parts.append(text(min(place, WIDTH - 2 - half), inside.bottom + 18, label, "tick", "middle"))
    parts.append(
        element("path", d=f"M{number(inside.left)} {number(inside.bottom)}H{number(inside.right)}", class_="axis")
    )
    if x.title:
        parts.append(text((inside.left + inside.right) / 2, inside.bottom + 38, x.title, "title", "middle"))
    if y.title:
        parts.append(text(4, inside.top - 12, y.title, "title"))
    return join(*parts)


def _rule(x: float, y: float, to_x: float, to_y: float) -> Markup:
    return element("path", d=f"M{number(x)} {number(y)}L{number(to_x)} {number(to_y)}", class_="grid")


def line(points: Sequence[Point], series: int, dash: int = 0, tooltip: str = "") -> Markup:
    """Draw a line through these points; `tooltip` appears when the pointer is on it."""
    title = [element("title", tooltip)] if tooltip else []
    return element("path", *title, d=path(points), class_=f"line s{series}", stroke_dasharray=DASHES[dash] or None)


def steps(points: Sequence[Point], series: int, dash: int = 0, tooltip: str = "") -> Markup:
    """Draw a step function: level until the next point."""
    found: list[Point] = []
    for point in points:
        if found:
            found.append((point[0], found[-1][1]))
        found.append(point)
    return line(found, series, dash, tooltip)


def path(points: Sequence[Point], close: bool = False) -> str:
    written = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{written}{'Z' if close else ''}"


def area(upper: Sequence[Point], lower: Sequence[Point], kind: str) -> Markup:
    return element("path", d=path([*upper, *reversed(lower)], close=True), class_=kind)


def bar(x: float, y: float, width: float, height: float, kind: str, tooltip: str = "") -> Markup:
    title = [element("title", tooltip)] if tooltip else []
    return element("rect", *title, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=kind)


def mark(x: float, y: float, series: int, tooltip: str = "", size: float = 4.5) -> Markup:
    """Draw a mark. Each series has its own shape, so that colour is not needed to tell them apart."""
    a, b = number(size), number(2 * size)
    shapes = (
        f"M{number(x - size)} {number(y)}a{a} {a} 0 1 0 {b} 0a{a} {a} 0 1 0 -{b} 0",
        path([(x - size, y - size), (x + size, y - size), (x + size, y + size), (x - size, y + size)], True),
        path([(x, y - size * 1.25), (x + size * 1.2, y + size), (x - size * 1.2, y + size)], True),
        path([(x, y - size * 1.4), (x + size * 1.4, y), (x, y + size * 1.4), (x - size * 1.4, y)], True),
        path([(x - size * 1.2, y - size), (x + size * 1.2, y - size), (x, y + size * 1.25)], True),
    )
    title = [element("title", tooltip)] if tooltip else []
    return element("path", *title, d=shapes[series % len(shapes)], class_=f"mark f{series}")


class Entry(msgspec.Struct, frozen=True):
    """One entry of a legend."""

    name: str
    series: int
    kind: Literal["line", "area", "mark"] = "line"
    dash: int = 0
    style: str = ""


def legend(entries: Sequence[Entry], y: float, left: float = 62.0) -> tuple[Markup, float]:
    """Draw the entries in as many lines as needed; return the markup and its height."""
    parts: list[str] = []
    x, top = left, y
    for entry in entries:
        width = 34 + len(entry.name) * LETTER + 12
        if x + width > WIDTH and x > left:
            x, y = left, y + 20
        if entry.kind == "line":
            parts.append(line([(x, y), (x + 26, y)], entry.series, entry.dash))
        elif entry.kind == "mark":
            parts.append(mark(x + 13, y, entry.series))
        else:
            parts.append(bar(x + 4, y - 6, 20, 12, entry.style or f"area f{entry.series}"))
        parts.append(text(x + 32, y + 4, entry.name))
        x += width
    return join(*parts), y - top + 20


def picture(height: float, name: str, title: str, summary: str, *inside: str) -> Markup:
    """Draw a whole picture. Screen readers read the title and the summary, not each label."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", summary, id=f"{name}-summary"),
        *inside,
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-summary",
    )
