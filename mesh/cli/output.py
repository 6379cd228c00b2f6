"""Output of all commands.

Commands print with these functions only (ruff refuses click's own): most lines hold a name or a text of somebody else, who must
not be able to move the cursor, reorder text or fake lines.
"""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from mesh.api.schema_version import SCHEMA

LEAST = 24  # columns for text that wraps: on a narrower terminal its own line breaks serve (own choice)
LINE = 65_536  # characters of a line; an invite has about 2,000 (own choice)
CELL = 200  # characters of a cell, but the last of a row (own choice)
_QUOTED = re.compile(r"`[^`\n]*`( there| on another machine)?")
_COMMAND = re.compile(r"(?:(?<=`)|(?<=&& ))mesh (?!--state )")
LAST_CUT = 40  # columns of the last column for which others are cut (own choice)
LAST = 12  # columns that the last column keeps before others are left out for it (own choice)
STOP_S = 2.0  # for a second Ctrl-C (own choice)


_state = ""  # of `mesh --state`, quoted for a shell; empty without it


def use_state(state: str | None) -> None:
    """Say from now on which node suggested commands are about: the one that the user has named, if any."""
    global _state  # noqa: PLW0603 - it holds for all that one command prints, from all its threads
    _state = shlex.quote(state) if state else ""


def suggested(text: str) -> str:
    """Return a message with the user's --state in the commands that it suggests, such as `mesh ps`.

    Those for another machine, as `mesh up` there, stay as they are.
    """

    def completed(quoted: re.Match[str]) -> str:
        return quoted[0] if quoted[1] else _COMMAND.sub(lambda found: f"{found[0]}--state {_state} ", quoted[0])

    return _QUOTED.sub(completed, text) if _state else text


def to_copy(command: str) -> str:
    """Return a suggested command as a line to copy into a shell, which would run what stands in backticks."""
    return suggested(f"`{command}`").strip("`")


def say(text: str = "", err: bool = False, bold: bool = False) -> None:
    """Print one line. Whatever the text holds, it is one line of visible characters."""
    _print(suggested(text), err, bold)


def leave_or_stop(goes_on: str, stop: Callable[[], object], stopped: str) -> None:
    """After a Ctrl-C, say what goes on; after another one within `STOP_S`, stop it and say so."""
    try:
        say(err=True)
        say(goes_on, err=True)
        time.sleep(STOP_S)
    except KeyboardInterrupt:
        stop()
        say(stopped, err=True)


def quote_line(text: str) -> None:
    """Print one line that holds a command or a name of somebody, as it is but for characters that are not visible."""
    _print(text)


def _print(text: str, err: bool = False, bold: bool = False) -> None:
    line = _sanitized(text, LINE)
    click.echo(click.style(line, bold=True) if bold and _coloured() else line, err=err)


def confirm(question: str, err: bool = False) -> None:
    """Ask, and end the command unless the answer is yes."""
    if not _prompted(lambda: click.confirm(_sanitized(suggested(question), LINE), err=err)):
        raise click.Abort


def ask_secret(question: str) -> str:
    """Ask for a line that is not shown."""
    return str(_prompted(lambda: click.prompt(_sanitized(question, LINE), hide_input=True)))


def _prompted(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except click.Abort as error:  # click's word for Ctrl-C, and for an input that has ended
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def print_json(value: dict[str, Any]) -> None:
    """Print an answer with the number of its schema. All but ASCII is escaped."""
    click.echo(json.dumps({"schema": SCHEMA, **value}, indent=2))


def print_text(text: str) -> None:
    """Print the content of a file that the command makes, with its line ends, but no character that moves the cursor."""
    from mesh.util.sanitize import fit

    click.echo(fit(text), nl=False)


class Output:
    """Writes the output of a job. A pipe or file gets its bytes; a terminal gets text, with its colours, unless `raw`."""

    def __init__(self, raw: bool = False, err: bool = False) -> None:
        from mesh.util.log_text import LogText

        stream = sys.stderr if err else sys.stdout
        self._file = stream.buffer
        self._text = LogText(colours=True) if stream.isatty() and not raw else None

    def write(self, data: bytes) -> None:
        self._file.write(data if self._text is None else self._text.feed(data).encode())
        self._file.flush()

    def close(self) -> None:
        """Write what was held back, and end the colours that the job began."""
        if self._text is not None:
            self._file.write(self._text.finish().encode())
            self._file.flush()


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    whole: bool = False,
    spare: Sequence[str] = (),
    cut: Mapping[str, int] | None = None,
) -> None:
    """Print rows in columns as wide as they need to be.

    On a terminal that is too narrow for all, the columns in `cut` are cut first, in their middle, to no fewer characters than
    these, unless they are the last; then it loses the columns named in `spare`, in that order; the last column is cut, or wraps
    if `whole`.
    Control characters are removed: other users choose some of the names.
    """
    told = (lambda text: text) if header[-1] == "COMMAND" else suggested  # a message, unless it is a job's own command
    rows = [[*(_sanitized(cell, CELL) for cell in row[:-1]), _sanitized(told(row[-1]), LINE)] for row in rows]
    room, kept = _room(), list(range(len(header)))
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    if room is not None:
        for name, least in (cut or {}).items():
            column, wanted = header.index(name), sum(widths[:-1]) + 2 * (len(widths) - 1) + min(LAST_CUT, widths[-1])
            if column < len(header) - 1:
                widths[column] = min(widths[column], max(least, widths[column] - max(0, wanted - room)))
    rows = [[*map(_cut_inside, row[:-1], widths), row[-1]] for row in rows]
    for name in spare:
        if room is None or sum(widths[c] + 2 for c in kept[:-1]) + min(LAST, widths[kept[-1]]) <= room:
            break
        kept.remove(header.index(name))
    widths = [widths[column] for column in kept]
    last = widths[-1] if room is None else max(8, room - sum(widths[:-1]) - 2 * (len(widths) - 1))
    for number, all_cells in enumerate([header, *rows]):
        row = [all_cells[column] for column in kept]
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        ends = [_cut(row[-1], last)]
        if whole and room is not None:
            import textwrap

            ends = textwrap.wrap(row[-1], max(last, LEAST)) or [""]
        for end in ends:
            _print("  ".join([*cells, end]).rstrip(), bold=number == 0)
            cells = [" " * width for width in widths[:-1]]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _cut_inside(text: str, most: int) -> str:
    """Cut a name or a command in its middle: those of one sweep differ at their ends."""
    begin = (most - 1) // 2
    return text if len(text) <= most else f"{text[:begin]}…{text[len(text) - (most - 1 - begin) :]}"


def _room() -> int | None:
    """Return the terminal's columns; None for output to a file or a program, which gets all columns."""
    import shutil

    return shutil.get_terminal_size((0, 0)).columns or None


def _sanitized(text: str, most: int) -> str:
    if len(text) <= most and text.isascii() and text.isprintable():
        return text  # without the import
    from mesh.util.sanitize import sanitize

    return sanitize(text, most)


def _coloured() -> bool:
    return "NO_COLOR" not in os.environ
