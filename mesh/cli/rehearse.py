"""`mesh job rehearse`: test on this machine whether a job survives departures, and what they cost."""

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from mesh.cli.job_options import job_options, make_order
from mesh.cli.output import print_json, say, table
from mesh.cli.progress import waiting_for
from mesh.cli.signals import cleaned_up
from mesh.cli.terminal import DURATION, json_option
from mesh.util.byte_text import amount
from mesh.util.text import plural

if TYPE_CHECKING:
    from mesh.rehearsal.evaluation import Compared, Cost, Evaluation, Finding

GRACE_S = 30.0  # what a node gives by default (mesh/daemon/config.py)
# The options of `mesh submit` that define the job; the others are about placement and time.
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
    "inconclusive": "INCONCLUSIVE",
}
NAMES_TOLD = 5
LATER = "between several machines, whose leases are longer, a sudden death is detected about 15 s later"


def _submit_options() -> tuple[list[click.Parameter], dict[str, Any]]:
    """Return the options that are kept, and the defaults of the others."""
    every: list[click.Parameter] = click.command()(job_options(lambda **_: None)).params
    options = [parameter for parameter in every if parameter.name != "command"]
    others = click.Command("submit", params=[option for option in options if option.name not in KEPT])
    return [option for option in options if option.name in KEPT], others.make_context("submit", []).params


@click.command(
    epilog="Exit codes: 0 resumes, 10 does not resume, 11 never checkpoints, 12 fails by itself, 13 inconclusive, "
    "14 resumes inexactly; 1 and 2 as for every command. See docs/how-to/rehearse.md."
)
@click.option("--after", "after_s", type=DURATION, default=0.0, help="Least running time before each departure.")
@click.option(
    "--checkpoints",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Number of checkpoints before each departure.",
)
@click.option(
    "--limit", "limit_s", type=DURATION, default=600.0, help="Longest duration of the rehearsal (default 10m)."
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def rehearse(
    command: tuple[str, ...], after_s: float, checkpoints: int, limit_s: float, as_json: bool, **options: Any
) -> None:
    """Run COMMAND on a private mesh of this machine, take its host away twice, and report whether it resumes and at what cost.

    Needs no mesh and no daemon: three private nodes run on this machine until the rehearsal ends.
    """
    if options["ckpt_mode"] == "system":
        raise click.UsageError("system checkpoints need nothing from the program, so there is nothing to rehearse")
    if options["ckpt"] is None:
        raise click.UsageError(
            "a job without checkpoints starts over at each departure: name their directory with --ckpt DIR"
        )
    if limit_s <= 0:
        raise click.BadParameter("must be longer than 0 s", param_hint="--limit")
    order = make_order(command, {**_submit_options()[1], **options})
    begun = time.monotonic()

    def report(text: str) -> None:
        say(f"{time.monotonic() - begun:6.1f} s  {text}", err=True)

    from mesh.rehearsal.evaluation import evaluate
    from mesh.rehearsal.private_mesh import PrivateMesh
    from mesh.rehearsal.rehearsal import Plan, Rehearsal

    grace_s = GRACE_S if options["grace"] is None else options["grace"]
    order["grace_s"] = grace_s
    engine = options["engine"] or ("docker" if options["image"] else "process")
    with cleaned_up() as cleanup:
        mesh = cleanup.enter_context(closing(PrivateMesh(engine)))
        report("starting a mesh of three nodes on this machine")
        with waiting_for("waiting for the nodes to find each other"):
            mesh.open()
        plan = Plan(after_s, checkpoints, limit_s, grace_s)
        evaluation = evaluate(Rehearsal(mesh, order, plan, report, waiting_for).run())
        report("stopping the nodes")
    if as_json:
        import msgspec

        found = msgspec.to_builtins(evaluation)
        seconds = round(time.monotonic() - begun, 1)
        print_json({"exit_code": evaluation.exit_code, **found, "seconds": seconds})
    else:
        _show(evaluation)
    sys.exit(evaluation.exit_code)


rehearse.params[:0] = _submit_options()[0]


# --- printing


def _show(evaluation: "Evaluation") -> None:
    spent = "; ".join(_spent(cost) for cost in evaluation.costs)
    say(HEADLINES[evaluation.result] + (f": {spent}" if spent and evaluation.exit_code == 0 else ""))
    for finding in evaluation.findings:
        _show_finding(finding)
    if evaluation.costs:
        say()
        _show_costs(evaluation)
    if evaluation.compared:
        say()
        say("compared with an undisturbed run:")
        for compared in evaluation.compared:
            _show_compared(compared)
    if evaluation.unchecked:
        say()
        say("not checked:")
        for text in evaluation.unchecked:
            say(f"  {text}")


def _show_finding(finding: "Finding") -> None:
    label = "" if finding.level == "fault" else f"{finding.level}: "
    say(f"{label}{finding.text}")
    for line in finding.said:
        say(f"  | {line}")
    if finding.next:
        say(f"  next: {finding.next}")


def _show_costs(evaluation: "Evaluation") -> None:
    rows = []
    restarts = {restart.attempt: restart for restart in evaluation.restarts}
    for cost in evaluation.costs:
        restart = restarts[cost.attempt + 1]
        steps = "" if cost.lost_steps is None else f", {plural(cost.lost_steps, 'step')}"
        resumed = {"resumed": "from its checkpoint", "started over": "from its beginning", "unknown": "-"}[restart.kind]
        if restart.step is not None:
            resumed = f"at step {restart.step}"
        rows.append(
            [
                cost.kind,
                "-" if cost.left_s is None else _seconds(cost.left_s),
                f"{_seconds(cost.lost_s)}{steps}",
                _seconds(cost.back_s),
                _seconds(cost.total_s),
                resumed,
            ]
        )
    table(["DEPARTURE", "LEFT AFTER", "WORK LOST", "RAN AGAIN AFTER", "TOTAL COST", "RESUMED"], rows)
    kept = evaluation.checkpoints
    if kept is not None:
        every = f", one every {_seconds(kept.interval_s)}" if kept.interval_s is not None else ""
        say(f"a checkpoint has {amount(kept.bytes)}{every}")
    if any(cost.kind == "sudden" for cost in evaluation.costs):
        say(LATER)


def _show_compared(compared: "Compared") -> None:
    what = f"{compared.what}{f' ({compared.name})' if compared.name else ''}"
    if compared.what == "last line of output":
        say(f"  {what}: {'equal' if compared.equal else 'differs'}")
        for label, line in zip(("disturbed", "undisturbed"), compared.differs, strict=False):
            say(f"    {label:<11}  {line}")
        return
    count = plural(compared.count, "file")
    if compared.equal:
        say(f"  {what}: equal ({count})")
        return
    more = f" and {len(compared.differs) - NAMES_TOLD} more" if len(compared.differs) > NAMES_TOLD else ""
    say(f"  {what}: {len(compared.differs)} of {count} differ: {', '.join(compared.differs[:NAMES_TOLD])}{more}")


def _spent(cost: "Cost") -> str:
    steps = "" if cost.lost_steps is None else f" and {plural(cost.lost_steps, 'step')}"
    return f"a {cost.kind} departure cost {_seconds(cost.total_s)}{steps}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
