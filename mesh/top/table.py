"""Tables of cells, and how wide their columns are. No I/O, no terminal."""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mesh.duration import lasting
from mesh.harmless import width_of

Tone = Literal["", "dim", "good", "warn", "bad", "bold"]
BAR_CELLS = 8
GAP = "  "  # between columns
SORTED = " ▾"
LEAST, LEAST_LAST = 6, 16  # cells of a column that is cut, and of the last one; ours


class Cell(NamedTuple):
    text: str
    tone: Tone = ""


class Row(NamedTuple):
    """`key` is what it is about (a job's id, a node's), the same in every look."""

    key: str
    cells: tuple[Cell, ...]


class Column(NamedTuple):
    """`most`: cells wide, at most; `rank`: those of a high rank go first where there is no room; 0 stays."""

    title: str
    most: int
    rank: int = 0
    right: bool = False


class Sorting(NamedTuple):
    """By what, and the column that is marked for it."""

    name: str
    column: int
    key: Callable[[Any], Any]


class Table(NamedTuple):
    """`all`: how many there would be without the filter."""

    name: str
    columns: tuple[Column, ...]
    rows: list[Row]
    sorting: Sorting | None
    all: int


def bar(part: float, cells: int = BAR_CELLS) -> str:
    """A part of 1 as a bar; anything used shows, and only what is full is full."""
    part = min(1.0, max(0.0, part))
    full = round(part * cells)
    if 0 < part < 1:
        full = min(max(full, 1), cells - 1)
    return "█" * full + "░" * (cells - full)


def age(seconds: float) -> str:
    """Coarse, so that a table of hundreds does not change all of it every second."""
    if seconds < 60:
        return "<1m"
    return lasting(seconds) if seconds >= 3600 else f"{int(seconds // 60)}m"


def coming(seconds: float) -> str:
    return "now" if seconds <= 0 else lasting(seconds)


def clock(unix: float, form: str = "%H:%M:%S") -> str:
    try:
        return time.strftime(form, time.localtime(unix))
    except (OverflowError, ValueError, OSError):  # of a clock that is far off
        return "?"


def many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def titles_of(table: Table) -> list[str]:
    """Of its columns; the first says how many rows there are, if they are counted, and one by which they are sorted."""
    titles = [column.title for column in table.columns]
    if table.sorting is not None:
        shown = str(len(table.rows)) if len(table.rows) == table.all else f"{len(table.rows)}/{table.all}"
        titles[0] = f"{shown} {titles[0]}"
        titles[table.sorting.column] += SORTED
    return titles


def widths_of(table: Table, room: int) -> list[int]:
    """Cells for each column, in order: as wide as its widest text; 0 for one that is empty. Those of the highest rank are left
    out until all fit into `room`; the last one is cut before that, while something of it can be read."""
    columns, titles, widths = table.columns, titles_of(table), []
    for place, column in enumerate(columns):
        texts = {row.cells[place].text for row in table.rows}
        widest = max(map(width_of, texts), default=0)
        empty = not widest and column.rank and table.rows
        widths.append(0 if empty else min(column.most, max(len(titles[place]), widest)))

    def excess() -> int:
        shown = [width + len(GAP) for width in widths if width]
        return max(0, sum(shown) - len(GAP) - room)

    last = len(columns) - 1
    wanted, widths[last] = widths[last], min(widths[last], LEAST_LAST)
    for place in sorted(range(len(columns)), key=lambda place: -columns[place].rank):
        if columns[place].rank and excess():
            widths[place] = 0
    if widths[last]:
        widths[last] = wanted
        widths[last] = max(min(wanted, LEAST_LAST), wanted - excess())
    for place in range(last, -1, -1):  # what is still too much is taken from what must stay
        widths[place] -= min(excess(), max(0, widths[place] - LEAST))
    return widths
