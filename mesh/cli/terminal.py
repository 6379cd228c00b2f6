"""Shared by all commands: the daemon's client, and types of options."""

import os
import re
import time
from contextlib import nullcontext, suppress
from typing import Any

import click

from mesh.api.client import Client
from mesh.api.schema_version import SCHEMA
from mesh.daemon.layout import Layout, node_layout
from mesh.util.duration import lasting, parse_duration
from mesh.util.errors import ExitCode, MeshError
from mesh.util.size import SizeError, parse_size

ENGINES = ("process", "docker", "apptainer")


def layout(ctx: click.Context) -> Layout:
    return node_layout(ctx.obj)


class _ReportingClient(Client):
    """Reports that a command waits for the daemon, unless the command reports something more precise."""

    def _asked(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        from mesh.cli import progress

        with nullcontext() if progress.active else progress.waiting_for("waiting for the daemon"):
            return super()._asked(method, path, body, timeout_s)


def client(ctx: click.Context) -> Client:
    return _ReportingClient(layout(ctx).socket)


def job_path(job: str) -> str:
    """Return the path of a job in the daemon's API; MeshError for a blank name."""
    if not job.strip():
        raise MeshError("the name of the job is empty: `mesh ps -a` lists all jobs", ExitCode.NOT_FOUND)
    return f"/v1/jobs/{quote(job)}"


def quote(text: str) -> str:
    from urllib.parse import quote as percent

    return percent(text, safe="", errors="surrogateescape")


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")(function)


def engines_option(function: Any) -> Any:
    return click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), help="Engines to offer.")(
        function
    )


def input_waits() -> bool:
    """Tell whether standard input is a pipe or a file with data left, without reading it."""
    from fcntl import ioctl
    from stat import S_ISFIFO, S_ISREG, S_ISSOCK
    from termios import FIONREAD

    try:
        mode = os.fstat(0).st_mode
        return (S_ISFIFO(mode) or S_ISREG(mode) or S_ISSOCK(mode)) and any(ioctl(0, FIONREAD, bytes(4)))
    except OSError:
        return False


def ago(unix_ms: float) -> str:
    """Return the time since then in one or two units, as 2h5m."""
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
    """A version of up to four numbers: `8.0`, `550.54.14`."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(".")
        if len(parts) > 4 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            self.fail(f"{value!r} is not a version: write 8.0 or 550.54", param, ctx)
        return tuple(int(part) for part in parts)


class Mebibytes(click.ParamType[int]):
    """A size: `6g`, `512m` or a plain number of MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except SizeError as error:
            self.fail(str(error), param, ctx)


class Deadline(click.ParamType[float]):
    """A deadline: `6h` from now, a local date and time, or the end of a date; converted to Unix seconds."""

    name = "deadline"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        with suppress(ValueError):
            return time.time() + parse_duration(value)
        text = value.replace(" ", "T") if ":" in value else f"{value}T24:00"  # the end of the day
        try:
            day, _, hours = text.partition("T")
            hour, minute = (0, 0) if hours == "24:00" else time.strptime(hours, "%H:%M")[3:5]
            date = time.strptime(day, "%Y-%m-%d")
            return time.mktime((*date[:2], date.tm_mday + (hours == "24:00"), hour, minute, 0, 0, 0, -1))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a duration (6h) nor a time (2026-12-01T08:00) nor a date", param, ctx)


class Array(click.ParamType[tuple[tuple[int, ...], int]]):
    """Indices as Slurm writes them (`1-100`, `0-30:10`, `1,3,7`) and `%10` for ten at a time; converted to both."""

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
                f"{value!r} is not an array: write 1-100, 0-30:10 or 1,3,7; add %10 for ten at a time", param, ctx
            )
        indices: dict[int, None] = {}
        for part in found[1].split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            if step and int(step) == 0:
                self.fail(f"{part!r} has a step of 0", param, ctx)
            chosen = range(int(first), int(last or first) + 1, int(step or 1))
            if not chosen or len(chosen) + len(indices) > ARRAY_LIMIT:
                self.fail(
                    f"{value!r} has {'no' if not chosen else 'too many'} indices: use 1 to {ARRAY_LIMIT}",
                    param,
                    ctx,
                )
            indices.update(dict.fromkeys(chosen))
        return tuple(indices), int(found[2] or 0)


class Nodes(click.ParamType[tuple[int, int]]):
    """A number of nodes: `4`, or `2..4` for at least two and at most four."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", value)
        if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            self.fail(
                f"{value!r} is not a number of nodes: write 4, or 2..4 for at least two and at most four", param, ctx
            )
        return int(found[1]), int(found[2] or found[1])


MOST_IN_BATCH = 100
ARRAY_LIMIT = 1000 * MOST_IN_BATCH  # for 1000 jobs
VERSION = Version()
DURATION, SIZE, DEADLINE, ARRAY, NODES, EVERY = Duration(), Mebibytes(), Deadline(), Array(), Nodes(), Every()
