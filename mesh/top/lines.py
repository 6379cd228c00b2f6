"""A few lines of cells for textual: heads, hints, questions. Drawn again only when they have changed."""

from textual.strip import Strip
from textual.widget import Widget

from mesh.top.sheet import PLAIN, line_of
from mesh.top.table import Cell


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
