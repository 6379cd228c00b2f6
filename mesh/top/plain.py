"""What `mesh top` shows, as lines of text: for a pipe, a log, a script."""

from mesh.harmless import cut, harmless
from mesh.top.table import GAP, Table, titles_of, widths_of
from mesh.top.view import View


def plain(view: View, room: int, events: int) -> list[str]:
    """All tables, at most so many events; empty ones are left out."""
    look = view.look
    assert look is not None
    status = look.status
    state = "paused" if status.paused else "lending" if status.lend.now else "not lending now"
    lines = [f"{harmless(status.nick)} of {harmless(status.user)}, mesh {harmless(status.mesh)}, {state}"]
    lines.append(view.totals().words)
    for table in view.tables().values():
        short = table._replace(rows=table.rows[:events]) if table.name == "events" else table
        if short.rows:
            lines += ["", *table_lines(short, room)]
    return lines


def table_lines(table: Table, room: int) -> list[str]:
    widths = widths_of(table, room)
    lines = []
    for texts in (
        titles_of(table),
        *([cell.text for cell in row.cells] for row in table.rows),
    ):
        cells = [
            cut(text, width, column.right)
            for text, width, column in zip(texts, widths, table.columns, strict=True)
            if width
        ]
        lines.append(GAP.join(cells).rstrip())
    return lines
