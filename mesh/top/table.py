"""Tables of cells, and the widths of their columns. No I/O, no terminal."""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mesh.util.duration import lasting
from mesh.util.sanitize import sanitize, width_of

Tone = Literal["", "dim", "good", "warn", "bad", "bold"]
BAR_CELLS = 8
GAP = "  "  # between columns
SORTED = " ▾"
LEAST, LEAST_LAST = 6, 16  # least widths of a cut column, and of the last one (own choice)


class _Cell(NamedTuple):
    text: str
    tone: Tone


class Cell(_Cell):
    """A text on the screen, which is made harmless here: others choose names, reasons and commands."""

    __slots__ = ()

    def __new__(cls, text: str, tone: Tone = "") -> "Cell":
        return super().__new__(cls, sanitize(text), tone)


class Row(NamedTuple):
    """A row. `key` identifies its job or node in every refresh."""

    key: str
    cells: tuple[Cell, ...]


class Column(NamedTuple):
    """A column. `most`: largest width; `rank`: columns of a higher rank are dropped first on a narrow terminal, 0 never."""

    title: str
    most: int
    rank: int = 0
    right: bool = False


class Sorting(NamedTuple):
    """An order of the rows, and the column that is marked for it."""

    name: str
    column: int
    key: Callable[[Any], Any]


class Table(NamedTuple):
    """A table. `all`: number of rows without the filter."""

    name: str
    columns: tuple[Column, ...]
    rows: list[Row]
    sorting: Sorting | None
    all: int


def bar(part: float, cells: int = BAR_CELLS) -> str:
    """Draw a fraction as a bar. A fraction above 0 shows one cell, one below 1 leaves one empty."""
    part = min(1.0, max(0.0, part))
    full = round(part * cells)
    if 0 < part < 1:
        full = min(max(full, 1), cells - 1)
    return "█" * full + "░" * (cells - full)


def age(seconds: float) -> str:
    """Return a coarse age, so that a long table does not change every second."""
    if seconds < 60:
        return "<1m"
    return lasting(seconds) if seconds >= 3600 else f"{int(seconds // 60)}m"


def coming(seconds: float) -> str:
    return "now" if seconds <= 0 else lasting(seconds)


def clock(unix: float, form: str = "%H:%M:%S") -> str:
    try:
        return time.strftime(form, time.localtime(unix))
    except (OverflowError, ValueError, OSError):  # the clock of another node is far off
        return "?"


def titles_of(table: Table) -> list[str]:
    """Return the titles of its columns, with the number of rows and a mark on the sorted column."""
    titles = [column.title for column in table.columns]
    if table.sorting is not None:
        shown = str(len(table.rows)) if len(table.rows) == table.all else f"{len(table.rows)}/{table.all}"
        titles[0] = f"{shown} {titles[0]}"
        titles[table.sorting.column] += SORTED
    return titles


def widths_of(table: Table, room: int) -> list[int]:
    """Return the width of each column: that of its widest text, 0 if it is empty or dropped.

    Columns of the highest rank are dropped until the rest fits into `room`; before that, the last one is cut as far as it stays
    readable.
    """
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
    for place in range(last, -1, -1):  # the rest is taken from columns that must stay
        widths[place] -= min(excess(), max(0, widths[place] - LEAST))
    return widths
