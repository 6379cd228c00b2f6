"""What commands share when they print: the client for `--state`, JSON, tables, durations."""

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.api.schema import SCHEMA
from mesh.client import Client
from mesh.duration import lasting, parse_duration
from mesh.layout import Layout, state_directory
from mesh.size import SizeError, parse_size

LEAST = 24  # columns for words that go on below: on a narrower terminal its own line breaks serve; ours
LAST = 12  # of a last column, before others are left out for it; ours


def layout(ctx: click.Context) -> Layout:
    return Layout(state_directory(ctx.obj))


class _Patient(Client):
    """Says that the daemon is waited for, where nobody else says what for."""

    def _asked(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        from mesh.cli import telling

        with nullcontext() if telling.under_way else telling.patience("waiting for the daemon"):
            return super()._asked(method, path, body, timeout_s)


def client(ctx: click.Context) -> Client:
    return _Patient(layout(ctx).socket)


def job_path(job: str) -> str:
    """Where the daemon answers about a job; MeshError for what cannot name one."""
    if not job.strip():
        raise MeshError("no job is named: `mesh ps -a` lists them", ExitCode.NOT_FOUND)
    return f"/v1/jobs/{quote(job)}"


def quote(text: str) -> str:
    from urllib.parse import quote as percent

    return percent(text, safe="", errors="surrogateescape")


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}) instead of words.")(
        function
    )


def print_json(value: dict[str, Any]) -> None:
    """With the schema's number, whoever made it."""
    click.echo(json.dumps({"schema": SCHEMA, **value}, indent=2))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], whole: bool = False, spare: Sequence[str] = ()) -> None:
    """Columns as wide as they need to be. On a terminal that is too narrow those named in `spare` are left out, the first first,
    and the last one is cut, or goes on below if `whole`. What others chose to be called cannot do anything to the terminal."""
    rows = [[cell if cell.isascii() and cell.isprintable() else _harmless(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    room, kept = _room(), list(range(len(header)))
    for name in spare:
        if room is None or sum(widths[c] + 2 for c in kept[:-1]) + min(LAST, widths[kept[-1]]) <= room:
            break
        kept.remove(header.index(name))
    widths = [widths[column] for column in kept]
    last = widths[-1] if room is None else max(8, room - sum(widths[:-1]) - 2 * (len(widths) - 1))
    for number, all_cells in enumerate([header, *rows]):
        row = [all_cells[column] for column in kept]
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        ends = [row[-1] if len(row[-1]) <= last else row[-1][: last - 1] + "…"]
        if whole and room is not None:
            import textwrap

            ends = textwrap.wrap(row[-1], max(last, LEAST)) or [""]
        for end in ends:
            line = "  ".join([*cells, end]).rstrip()
            click.echo(click.style(line, bold=True) if number == 0 and _coloured() else line)
            cells = [" " * width for width in widths[:-1]]


def _room() -> int | None:
    """Columns of the terminal; None where words go to a file or a program, and none need be left out."""
    import shutil

    return shutil.get_terminal_size((0, 0)).columns or None


def _harmless(text: str) -> str:
    from mesh.harmless import harmless

    return harmless(text)


def ago(unix_ms: float) -> str:
    """How long since, in one short unit pair."""
    return lasting(time.time() - unix_ms / 1000)


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float | int):
            return float(value)
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Every(click.ParamType[float | str]):
    """`auto`, or a duration."""

    name = "every"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        return "auto" if value == "auto" else DURATION.convert(value, param, ctx)


class Version(click.ParamType[tuple[int, ...]]):
    """`8.0`, `550.54.14`: up to four numbers."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(".")
        if len(parts) > 4 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            self.fail(f"{value!r} is not a version: write 8.0, or 550.54", param, ctx)
        return tuple(int(part) for part in parts)


class Mebibytes(click.ParamType[int]):
    """`6g`, `512m` or a plain number of MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except SizeError as error:
            self.fail(str(error), param, ctx)


class Deadline(click.ParamType[float]):
    """`6h` from now, or a local date and time; gives Unix seconds."""

    name = "deadline"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        with suppress(ValueError):
            return time.time() + parse_duration(value)
        try:
            return time.mktime(time.strptime(value.replace(" ", "T"), "%Y-%m-%dT%H:%M"))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a duration (6h) nor a time (2026-12-01T08:00)", param, ctx)


class Array(click.ParamType[tuple[tuple[int, ...], int]]):
    """Slurm's way of writing many indices: `1-100`, `0-30:10`, `1,3,7`, and `%10` for ten at a time; gives both."""

    name = "array"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, ...], int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(
            r"(\d{1,9}(?:-\d{1,9}(?::\d{1,9})?)?(?:,\d{1,9}(?:-\d{1,9}(?::\d{1,9})?)?)*)(?:%(\d{1,4}))?", value
        )
        if found is None or (found[2] is not None and int(found[2]) == 0):
            self.fail(
                f"{value!r} is no array: write 1-100, 0-30:10, 1,3,7, and %10 after it for ten at a time", param, ctx
            )
        indices: dict[int, None] = {}
        for part in found[1].split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            if step and int(step) == 0:
                self.fail(f"{part!r} goes nowhere: its step is 0", param, ctx)
            chosen = range(int(first), int(last or first) + 1, int(step or 1))
            if not chosen or len(chosen) + len(indices) > ARRAY_LIMIT:
                self.fail(f"{value!r} has {'no' if not chosen else 'too many'} indices: 1 to {ARRAY_LIMIT}", param, ctx)
            indices.update(dict.fromkeys(chosen))
        return tuple(indices), int(found[2] or 0)


class Nodes(click.ParamType[tuple[int, int]]):
    """`4`, or `2..4` for at least two and at most four."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", value)
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            self.fail(
                f"{value!r} is no number of nodes: write 4, or 2..4 for at least two and at most four", param, ctx
            )
        return int(found[1]), int(found[2] or found[1])


ARRAY_LIMIT = 1000
VERSION = Version()
DURATION, SIZE, DEADLINE, ARRAY, NODES, EVERY = Duration(), Mebibytes(), Deadline(), Array(), Nodes(), Every()


def _coloured() -> bool:
    return "NO_COLOR" not in os.environ


def system_words(system: dict[str, str]) -> str:
    """What a node says of its system checkpoints, for its owner."""
    if not system["like"]:
        return f"none: {system['problem']}"
    gpus = f"none of GPU jobs: {system['gpu_problem']}" if system["gpu_problem"] else "of GPU jobs too"
    return f"on and from nodes that are {system['like']}; {gpus}"
