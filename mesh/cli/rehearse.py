"""`mesh rehearse`: does this job survive departures, and what does one cost? Found out here, before it is submitted."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from mesh.amount import amount
from mesh.cli.order import job_options, make_order
from mesh.cli.telling import patience
from mesh.cli.terminal import DURATION, json_option, print_json, table

if TYPE_CHECKING:
    from mesh.rehearsal.comparison import Compared
    from mesh.rehearsal.cost import Cost
    from mesh.rehearsal.stage import Stage
    from mesh.rehearsal.verdict import Finding, Judgement

GRACE_S = 30.0  # what a node gives by default (mesh/config.py)
# Of the options of `mesh submit`, those that make the job what it is; the others say where it goes, and when.
KEPT = (
    "gpus",
    "gpu_share",
    "gpu_share_limit",
    "vram",
    "vram_limit",
    "gpu_model",
    "compute_capability",
    "driver",
    "memory",
    "cpus",
    "image",
    "engine",
    "env",
    "ckpt",
    "ckpt_mode",
    "ckpt_every",
    "grace",
    "workdir",
    "no_workdir",
)
HEADLINES = {
    "resumes": "RESUMES",
    "resumes inexactly": "RESUMES, BUT NOT EXACTLY",
    "does not resume": "DOES NOT RESUME",
    "never checkpoints": "NEVER CHECKPOINTS",
    "fails by itself": "FAILS BY ITSELF",
    "cannot tell": "CANNOT TELL",
}
NAMES_TOLD = 5
LATER = "on a mesh of several machines, whose leases are longer, a sudden death is found out some 15 s later than here"


def _submit_options() -> tuple[list[click.Parameter], dict[str, Any]]:
    """Those that are kept, and the defaults of the others."""
    every: list[click.Parameter] = click.command()(job_options(lambda **_: None)).params
    options = [parameter for parameter in every if parameter.name != "command"]
    others = click.Command("submit", params=[option for option in options if option.name not in KEPT])
    return [option for option in options if option.name in KEPT], others.make_context("submit", []).params


@click.command(
    epilog="Exit codes: 0 it resumes, 10 it does not, 11 it never checkpoints, 12 it fails by itself, 13 cannot tell, "
    "14 it resumes, but not exactly; 1 and 2 as everywhere. docs/rehearse.md says more."
)
@click.option(
    "--after", "after_s", type=DURATION, default=0.0, help="Let it run this long before each departure, at least."
)
@click.option(
    "--checkpoints",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Let it commit so many checkpoints before each departure.",
)
@click.option("--limit", "limit_s", type=DURATION, default=600.0, help="How long all may take (default 10m).")
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def rehearse(
    command: tuple[str, ...], after_s: float, checkpoints: int, limit_s: float, as_json: bool, **options: Any
) -> None:
    """Run COMMAND here, take its host away twice, and say whether it resumes and what a departure costs.

    Needs no mesh and no daemon: three nodes of a mesh of their own run on this machine until it is over.
    """
    if options["ckpt_mode"] == "system":
        raise click.UsageError("a system checkpoint asks nothing of a program, so there is nothing to rehearse")
    if options["ckpt"] is None:
        raise click.UsageError(
            "a job without checkpoints starts over at each departure: name the directory that holds them, --ckpt DIR"
        )
    if limit_s <= 0:
        raise click.BadParameter("it must be longer than nothing", param_hint="--limit")
    order = make_order(command, {**_submit_options()[1], **options})
    begun = time.monotonic()

    def tell(text: str) -> None:
        click.echo(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    from mesh.rehearsal.director import Director, Plan
    from mesh.rehearsal.verdict import judge

    grace_s = GRACE_S if options["grace"] is None else options["grace"]
    order["grace_s"] = grace_s
    engine = options["engine"] or ("docker" if options["image"] else "process")
    with _stage(engine) as stage:
        tell("starting a mesh of three nodes on this machine")
        with patience("waiting for the nodes to find each other"):
            stage.open()
        plan = Plan(after_s, checkpoints, limit_s, grace_s)
        judgement = judge(Director(stage, order, plan, tell, patience).direct())
        tell("ending the nodes")
    if as_json:
        import msgspec

        found = msgspec.to_builtins(judgement)
        seconds = round(time.monotonic() - begun, 1)
        print_json({"schema": 1, "exit_code": judgement.exit_code, **found, "seconds": seconds})
    else:
        _show(judgement)
    sys.exit(judgement.exit_code)


rehearse.params[:0] = _submit_options()[0]


@contextmanager
def _stage(engine: str) -> "Iterator[Stage]":
    """However this ends, but by SIGKILL, no daemon and no directory is left."""
    from mesh.rehearsal.stage import Stage

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    stage = Stage(engine)
    try:
        yield stage
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        stage.close()


# --- telling


def _show(judgement: "Judgement") -> None:
    spent = "; ".join(_spent(cost) for cost in judgement.costs)
    click.echo(HEADLINES[judgement.verdict] + (f": {spent}" if spent and judgement.exit_code == 0 else ""))
    for finding in judgement.findings:
        _show_finding(finding)
    if judgement.costs:
        click.echo("")
        _show_costs(judgement)
    if judgement.compared:
        click.echo("\ncompared with an undisturbed run:")
        for compared in judgement.compared:
            _show_compared(compared)
    if judgement.unchecked:
        click.echo("\nnot checked:")
        for text in judgement.unchecked:
            click.echo(f"  {text}")


def _show_finding(finding: "Finding") -> None:
    label = "" if finding.level == "fault" else f"{finding.level}: "
    click.echo(f"{label}{finding.text}")
    for line in finding.said:
        click.echo(f"  | {line}")
    if finding.next:
        click.echo(f"  next: {finding.next}")


def _show_costs(judgement: "Judgement") -> None:
    rows = []
    restarts = {restart.attempt: restart for restart in judgement.restarts}
    for cost in judgement.costs:
        restart = restarts[cost.attempt + 1]
        steps = "" if cost.lost_steps is None else f", {_steps(cost.lost_steps)}"
        went_on = {"resumed": "from its checkpoint", "anew": "from its beginning", "unknown": "-"}[restart.kind]
        if restart.step is not None:
            went_on = f"with step {restart.step}"
        rows.append(
            [
                cost.kind,
                "-" if cost.left_s is None else _seconds(cost.left_s),
                f"{_seconds(cost.lost_s)}{steps}",
                _seconds(cost.back_s),
                _seconds(cost.total_s),
                went_on,
            ]
        )
    table(["DEPARTURE", "LEFT AFTER", "WORK LOST", "RAN AGAIN AFTER", "COST IN ALL", "WENT ON"], rows)
    kept = judgement.checkpoints
    if kept is not None:
        every = f", one every {_seconds(kept.interval_s)}" if kept.interval_s is not None else ""
        click.echo(f"a checkpoint has {amount(kept.bytes)}{every}")
    if any(cost.kind == "sudden" for cost in judgement.costs):
        click.echo(LATER)


def _show_compared(compared: "Compared") -> None:
    what = f"{compared.what}{f' ({compared.name})' if compared.name else ''}"
    if compared.what == "last line of output":
        click.echo(f"  {what}: {'equal' if compared.equal else 'differs'}")
        for label, line in zip(("disturbed", "undisturbed"), compared.differs, strict=False):
            click.echo(f"    {label:<11}  {line}")
        return
    count = f"{compared.count} file{'' if compared.count == 1 else 's'}"
    if compared.equal:
        click.echo(f"  {what}: equal ({count})")
        return
    more = f" and {len(compared.differs) - NAMES_TOLD} more" if len(compared.differs) > NAMES_TOLD else ""
    click.echo(f"  {what}: {len(compared.differs)} of {count} differ: {', '.join(compared.differs[:NAMES_TOLD])}{more}")


def _spent(cost: "Cost") -> str:
    steps = "" if cost.lost_steps is None else f" and {_steps(cost.lost_steps)}"
    return f"a {cost.kind} departure cost {_seconds(cost.total_s)}{steps}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
