"""Figures: a picture, a summary in words, and the data as a table, as CSV and as JSON."""

import csv
import io
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from mesh.util.sanitize import fit
from mesh.web.markup import Markup, element, join
from sim.report.scale import written

Value = str | int | float
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of cells that a spreadsheet would compute


class Figure(msgspec.Struct, frozen=True):
    """One figure. `name` is used in file names and links; `summary` is the text alternative; rows follow `columns`."""

    name: str
    title: str
    summary: str
    picture: Markup
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]


def as_csv(figure: Figure) -> str:
    """Return the data as CSV (RFC 4180). Text that a spreadsheet would take for a formula gets a leading apostrophe."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\r\n")
    lines.writerow(figure.columns)
    lines.writerows([_cell(value) for value in row] for row in figure.rows)
    return out.getvalue()


def _cell(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    text = fit(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def as_json(figure: Figure, **more: Any) -> str:
    head = {"schema": 1, **more, "figure": figure.name, "title": figure.title, "summary": figure.summary}
    return json.dumps({**head, "columns": figure.columns, "rows": figure.rows}, indent=1) + "\n"


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str | float]], caption: str = "") -> Markup:
    head = element("tr", *(element("th", name, scope="col") for name in columns))
    body = [element("tr", _first(row[0]), *(_data(value) for value in row[1:])) for row in rows]
    title = [element("caption", caption)] if caption else []
    return element("table", *title, element("thead", head), element("tbody", *body))


def _first(value: str | float) -> Markup:
    return element("th", value if isinstance(value, str) else written(value), scope="row")


def _data(value: str | float) -> Markup:
    return element("td", value) if isinstance(value, str) else element("td", written(value), class_="number")


def block(figure: Figure, place: str) -> Markup:
    """Return the figure as HTML; `place` is its id, unique on the page."""
    data = b64encode(as_csv(figure).encode("utf-8", "replace")).decode()
    return element(
        "figure",
        element("figcaption", element("h3", figure.title), element("p", figure.summary)),
        element("div", figure.picture, class_="scroll", tabindex="0", role="region", aria_label=figure.title),
        element(
            "details",
            element("summary", "Data"),
            element(
                "p",
                element("a", "Save as CSV", href=f"data:text/csv;charset=utf-8;base64,{data}", download=f"{place}.csv"),
            ),
            element(
                "div",
                as_table(figure.columns, figure.rows, figure.title),
                class_="scroll",
                tabindex="0",
                role="region",
                aria_label=f"Data: {figure.title}",
            ),
        ),
        id=place,
    )


def joined(figures: Sequence[Figure], place: str) -> Markup:
    return join(*(block(figure, f"{place}-{figure.name}") for figure in figures))
