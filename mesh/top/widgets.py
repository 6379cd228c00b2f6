"""Widgets for textual: a table that draws only visible lines that changed, and a few lines of text."""

from itertools import groupby
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from mesh.top.table import GAP, Cell, Row, Table, Tone, titles_of, widths_of
from mesh.util.sanitize import cut

# The terminal's own colors are readable on a dark and on a light background. No state is shown by color alone.
TONES: dict[Tone, Style] = {
    "": Style(),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "bold": Style(bold=True),
}
PLAIN = TONES[""]  # textual's filters need a style on every segment
HEAD = Style(bold=True, underline=True)
CURSOR = Style(reverse=True)


def line_of(cells: list[Cell], width: int) -> Strip:
    """Join cells to a line of exactly this width, and cut the rest."""
    segments, left = [], width
    for cell in cells:
        text = cut(cell.text, left) if len(cell.text) > left else cell.text
        segments.append(Segment(text, TONES[cell.tone]))
        left -= segments[-1].cell_length
        if left <= 0:
            break
    return Strip(segments).adjust_cell_length(width, PLAIN)


class TableWidget(ScrollView, can_focus=True):
    """A table below a fixed header. `chooses`: it has a cursor, and Enter on a row posts `Chosen`."""

    DEFAULT_CSS = """
    TableWidget { scrollbar-size: 0 0; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-1000000)", "first", show=False),
        Binding("end", "move(1000000)", "last", show=False),
        Binding("enter", "choose", "open", show=False),
    ]

    class Chosen(Message):
        def __init__(self, widget: "TableWidget", key: str) -> None:
            super().__init__()
            self.widget, self.key = widget, key

    def __init__(self, name: str, chooses: bool = True) -> None:
        super().__init__(name=name, id=name)
        self.chooses = chooses
        self.table: Table | None = None
        self.cursor: str | None = None  # the key of the row it is on
        self._widths: list[int] = []
        self._drawn: list[tuple[object, ...]] = []

    @property
    def rows(self) -> list[Row]:
        return self.table.rows if self.table is not None else []

    @property
    def place(self) -> int:
        """Return the index of the cursor's row; 0 if the row is gone."""
        return next((place for place, row in enumerate(self.rows) if row.key == self.cursor), 0)

    def show(self, table: Table) -> None:
        before, place = self.table, self.place
        changed = before is None or before.rows != table.rows or before.columns is not table.columns
        self.table = table
        if all(row.key != self.cursor for row in table.rows):  # the one that took its place
            self.cursor = table.rows[min(place, len(table.rows) - 1)].key if table.rows else None
        if changed:
            self._widths = widths_of(table, self.size.width)
            self.virtual_size = Size(self.size.width, len(table.rows) + 1)
        self._redraw()

    def on_resize(self) -> None:
        if self.table is not None:
            self._widths = widths_of(self.table, self.size.width)
            self.virtual_size = Size(self.size.width, len(self.table.rows) + 1)
        self.refresh()

    def on_focus(self) -> None:
        self._redraw()

    def on_blur(self) -> None:
        self._redraw()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._drawn = []
        self.refresh()

    def _redraw(self) -> None:
        """Refresh the lines whose content has changed."""
        if not self.size:
            return
        wanted = [self._content(y) for y in range(self.size.height)]
        drawn = [*self._drawn, *[None] * (len(wanted) - len(self._drawn))]
        changed = [y for y, content in enumerate(wanted) if drawn[y] != content]
        for _, run in groupby(enumerate(changed), lambda pair: pair[1] - pair[0]):  # adjacent lines at once
            lines = [y for _, y in run]
            self.refresh(Region(0, lines[0], self.size.width, len(lines)))
        self._drawn = wanted

    def _content(self, y: int) -> tuple[object, ...]:
        """Return everything that the look of a line depends on."""
        if y == 0:
            return (titles_of(self.table) if self.table else (), self.has_focus, self._below, *self._widths)
        place = self.scroll_offset.y + y - 1
        if place >= len(self.rows):
            return ()
        row = self.rows[place]
        return (row.cells, self._has_cursor(row), *self._widths)

    @property
    def _below(self) -> int:
        """Return the number of rows below the visible ones."""
        return len(self.rows) - (self.size.height - 1) - self.scroll_offset.y

    def _has_cursor(self, row: Row) -> bool:
        return self.chooses and self.has_focus and row.key == self.cursor

    def render_line(self, y: int) -> Strip:
        width, table = self.size.width, self.table
        if table is None:
            return Strip.blank(width, PLAIN)
        if y == 0:
            head = GAP.join(text for text, _ in self._cells([Cell(title) for title in titles_of(table)])).rstrip()
            more = f"{self._below} more" if self._below > 0 else ""
            if len(more) < width - len(head):
                head = cut(head, width - len(more)) + more
            style = HEAD + CURSOR if self.has_focus else HEAD
            return Strip([Segment(cut(head, width), style)])
        place = self.scroll_offset.y + y - 1
        if place >= len(table.rows):
            return Strip.blank(width, PLAIN)
        row = table.rows[place]
        cursor = self._has_cursor(row)
        segments: list[Segment] = []
        for text, tone in self._cells(list(row.cells)):
            segments += [Segment(GAP, CURSOR if cursor else PLAIN)] if segments else []
            segments.append(Segment(text, CURSOR if cursor else TONES[tone]))  # tones are unreadable in reverse
        return Strip(segments).adjust_cell_length(width, CURSOR if cursor else PLAIN)

    def _cells(self, cells: list[Cell]) -> list[tuple[str, Tone]]:
        assert self.table is not None
        columns = self.table.columns
        return [
            (cut(cell.text, width, columns[place].right), cell.tone)
            for place, (cell, width) in enumerate(zip(cells, self._widths, strict=False))
            if width
        ]

    def action_move(self, by: int) -> None:
        if not self.rows:
            return
        if not self.chooses:
            self.scroll_relative(y=by, animate=False)
            return
        place = min(max(self.place + by, 0), len(self.rows) - 1)
        self.cursor = self.rows[place].key
        first, fits = self.scroll_offset.y, self.size.height - 1
        if place < first:
            self.scroll_to(y=place, animate=False)
        elif place >= first + fits:
            self.scroll_to(y=place - fits + 1, animate=False)
        self._redraw()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        if self.chooses and self.cursor is not None:
            self.post_message(self.Chosen(self, self.cursor))


class Lines(Widget):
    DEFAULT_CSS = """
    Lines { height: auto; background: transparent; }
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, id=name)
        self.lines: list[list[Cell]] = []

    def show(self, lines: list[list[Cell]]) -> None:
        if lines == self.lines:
            return
        self.refresh(layout=len(lines) != len(self.lines))
        self.lines = lines

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self.lines)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        return line_of(self.lines[y], width) if y < len(self.lines) else Strip.blank(width, PLAIN)
