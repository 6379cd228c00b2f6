"""`mesh debug survive`: estimate how long a node stays; evaluate that estimate on a trace."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mesh.cli.names import NODE
from mesh.cli.output import print_json, say, table
from mesh.cli.progress import AGAIN_S, progress
from mesh.cli.terminal import client, json_option, quote
from mesh.util.duration import lasting
from mesh.util.errors import ExitCode, MeshError

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
SHADES = " ░▒▓█"  # part of an hour that it was lent: none, up to a quarter, ...
NOTHING_KNOWN = "·"
FORMATS = ("swf-nodes", "spot-json", "fta", "last", "wtmp", "journal")  # mesh/forecast/tracefiles.py


class NodeOrEval(click.Group):
    """A group that passes the name of a node to `show`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            return "show", self.commands["show"], args
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--help" not in args[:1] and "-h" not in args[:1] and (not args or args[0] not in self.commands):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=NodeOrEval, options_metavar="", subcommand_metavar="NODE | eval [OPTIONS]")
def survive() -> None:
    """Estimate how long NODE stays, and show its week hour by hour: `mesh debug survive NODE [--json]`.

    `mesh debug survive eval` evaluates the estimate on a trace. A node called eval or show is named by its id.
    """


@survive.command(hidden=True)
@click.argument("node", type=NODE)
@json_option
@click.pass_context
def show(ctx: click.Context, node: str, as_json: bool) -> None:
    """Estimate how long NODE stays."""
    answer = client(ctx).get(f"/v1/survival/{quote(node)}")
    if as_json:
        print_json(answer)
        return
    nick = answer["nick"]
    if answer["lent"]:
        say(f"{nick} has been lent for {lasting(time.time() - answer['lent_since_unix'])}; weight {answer['weight']}")
    else:
        say(f"{nick} is not lent now")
    if answer["until_unix"]:
        say(f"its owner's hours end at {time.strftime('%a %H:%M', time.localtime(answer['until_unix']))}")
    if answer["lent"]:
        rows = [
            [_minutes(row["horizon_min"]), f"{row['probability']:.0%}", f"{row['low']:.0%} to {row['high']:.0%}"]
            for row in answer["survival"]
        ]
        table(["STAYS FOR", "CHANCE", "BETWEEN (90 %)"], rows)
    say(
        f"departures seen: {answer['departures']:g} (older ones count less); its zone now: "
        f"{answer['rate_of_zone']:.1f} times the usual rate"
    )
    for row in answer["stays"]:
        if row["part"] == 0.5:
            say(f"half of its stays last longer than {lasting(row['after_s'])}")
    say()
    for line in heatmap(answer["week"]):
        say(line)


@survive.command("eval")
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Trace file or directory. Repeatable: all are nodes of one campus.",
)
@click.option(
    "--format",
    "kind",
    required=True,
    type=click.Choice(FORMATS),
    help="What the file is (docs/reference/trace-formats.md).",
)
@click.option("--horizon", default="60,240", show_default=True, metavar="MIN,MIN", help="Minutes ahead.")
@click.option(
    "--train-until",
    default=0.7,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="UNIX|FRACTION",
    help="Fit on the trace until this time, or on this fraction of it.",
)
@click.option(
    "--utc-offset", default=0.0, type=click.FloatRange(-14, 14), metavar="HOURS", help="Local time's offset from UTC."
)
@click.option("--no-boosting", is_flag=True, help="Leave out gradient boosting, which takes most of the time.")
@json_option
def evaluate_(
    traces: tuple[Path, ...],
    kind: str,
    horizon: str,
    train_until: float,
    utc_offset: float,
    no_boosting: bool,
    as_json: bool,
) -> None:
    """Compare the survival estimate with other models on a trace.

    Every 15 minutes after the cut, each model predicts for every lent node whether it stays for the horizon. A prediction uses
    only earlier data; models are fitted to data before the cut.
    """
    import msgspec

    from mesh.forecast.evaluation import evaluate
    from placement.availability import TraceError

    horizons = _horizons(horizon)
    doing = ["reading the trace"]
    with progress(lambda: f"{doing[-1]} ...", AGAIN_S):
        trace = _trace(traces, kind, utc_offset * 3600)
        try:
            outcome = evaluate(trace, horizons, train_until, utc_offset * 3600, not no_boosting, doing.append)
        except TraceError as error:
            raise MeshError(f"{', '.join(map(str, traces))}: {error}", ExitCode.USAGE) from error
    rows = outcome.rows()
    if as_json:
        print_json({"rows": [msgspec.to_builtins(row) for row in rows], "notes": list(outcome.notes)})
        return
    table(
        ["MODEL", "MINUTES", "N", "LOG-LOSS", "BRIER", "AUC", "ECE"],
        [
            [
                row.model,
                str(row.horizon_min),
                str(row.n),
                f"{row.log_loss:.4f}",
                f"{row.brier:.4f}",
                "-" if row.auc is None else f"{row.auc:.3f}",
                f"{row.ece:.3f}",
            ]
            for row in rows
        ],
    )
    for note in outcome.notes:
        say(f"mesh: {note}", err=True)


def _trace(paths: Sequence[Path], form: Any, utc_offset_s: float) -> Any:
    """Return one trace of all these files; MeshError for a file that cannot be read or is no trace."""
    from mesh.forecast.tracefiles import files_of, read_traces
    from placement.availability import TraceError

    try:
        return read_traces(files_of(paths), form, utc_offset_s)
    except TraceError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        words = f"{error.filename}: {error.strerror}. Name the trace with --trace"
        raise MeshError(words, ExitCode.NOT_FOUND) from error


def _horizons(text: str) -> tuple[int, ...]:
    horizons: list[int] = []
    for part in text.split(","):
        minutes = 0
        with suppress(ValueError):
            minutes = int(part)
        if not 1 <= minutes <= 10_080 or minutes in horizons:
            raise click.UsageError(f"--horizon {text!r}: write minutes from 1 to 10080, each once, as 60,240")
        horizons.append(minutes)
    return tuple(horizons)


def heatmap(week: Sequence[int | None]) -> list[str]:
    """Return a line per day with two columns per hour: the part of each hour that the node was lent."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") not in {"utf8", "utf16"}
    shades, unknown = (" .:+#", "?") if plain else (SHADES, NOTHING_KNOWN)
    lines = ["lent  " + "".join(f"{hour:02}      " for hour in range(0, 24, 4)).rstrip()]
    for number, day in enumerate(DAYS):
        hours = week[24 * number : 24 * number + 24]
        cells = (unknown if share is None else shades[-(-share * (len(shades) - 1) // 100)] for share in hours)
        lines.append(f"{day}   " + "".join(2 * cell for cell in cells).rstrip())
    lines.append(f"      {shades[-1]} most of the hour, {shades[1]} a quarter or less, blank never, {unknown} unknown")
    return lines


def _minutes(minutes: int) -> str:
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"
