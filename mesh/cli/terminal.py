"""What commands share when they print: the client for `--state`, JSON, tables, durations."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.client import Client
from mesh.config import Layout, state_directory


def layout(ctx: click.Context) -> Layout:
    return Layout(state_directory(ctx.obj))


def client(ctx: click.Context) -> Client:
    return Client(layout(ctx).socket)


def job_path(job: str) -> str:
    """Where the daemon answers about a job; MeshError for what cannot name one."""
    if not job.strip():
        raise MeshError("no job is named: `mesh ps -a` lists them", ExitCode.NOT_FOUND)
    return f"/v1/jobs/{quote(job)}"


def quote(text: str) -> str:
    from urllib.parse import quote as percent

    return percent(text, safe="", errors="surrogateescape")


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON (schema 1) instead of a table.")(function)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say what is being waited for, to standard error, once that takes more than two seconds, and every five from then on."""
    done = Event()

    def tell() -> None:
        begun = time.monotonic()
        pause = 2.0
        while not done.wait(pause):
            click.echo(f"mesh: {what} ... {time.monotonic() - begun:.0f} s", err=True)
            pause = 5.0

    teller = Thread(target=tell, name="patience", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one is cut to the terminal's width."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    room = shutil.get_terminal_size((100, 24)).columns
    last = max(8, room - sum(widths[:-1]) - 2 * (len(widths) - 1))
    for number, row in enumerate([header, *rows]):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        end = row[-1] if len(row[-1]) <= last else row[-1][: last - 1] + "…"
        line = "  ".join([*cells, end]).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 and _coloured() else line)


def ago(unix_ms: float) -> str:
    """How long since, in one short unit pair."""
    seconds = max(0, int(time.time() - unix_ms / 1000))
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // below}{smaller}"
    return f"{seconds}s"


def parse_duration(text: str) -> float:
    """`30`, `30s`, `2m`, `1h` or `1d` in seconds; ValueError in words."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{text!r} is not a duration: write 30s, 2m, 1h or 1d")
    return seconds


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float | int):
            return float(value)
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Mebibytes(click.ParamType[int]):
    """`6g`, `512m` or a plain number of MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        units = {"m": 1, "g": 1024, "t": 1024 * 1024}
        text = str(value).lower().removesuffix("ib").removesuffix("b")
        number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
        try:
            mebibytes = int(float(number) * unit)
        except (ValueError, OverflowError):
            mebibytes = -1
        if not 0 <= mebibytes < 2**31:
            self.fail(f"{value!r} is not a size: write 6g, 512m or a number of MiB", param, ctx)
        return mebibytes


DURATION, SIZE = Duration(), Mebibytes()


def _coloured() -> bool:
    return "NO_COLOR" not in os.environ
