"""`mesh lend`, `pause`, `resume`, `reclaim`: what this machine's owner lends, and how he takes it back."""

from typing import Any

import click

from mesh.cli.telling import patience
from mesh.cli.terminal import DURATION, client, json_option, print_json, table
from mesh.words import COST, cost_cells, lend_lines, when

GPU_OPTION = click.option("--gpu", metavar="N", help="One GPU only: its number here, or the beginning of its UUID.")


@click.command()
@click.argument("word", metavar="[on|off]", required=False, type=click.Choice(["on", "off"]))
@click.option(
    "--hours",
    multiple=True,
    metavar="HOURS",
    help='Lend in these hours only, local time: "Mon-Fri 20-08; Sat-Sun", always, never. Repeatable.',
)
@json_option
@click.pass_context
def lend(ctx: click.Context, word: str | None, hours: tuple[str, ...], as_json: bool) -> None:
    """Lend this machine, or not (as `resume` and `pause`), and when; without a word: how things stand.

    What takes it back besides (the owner's programs on a GPU, keyboard, load), with which clocks, is said in policy.toml.
    """
    daemon = client(ctx)
    if word is None and not hours:
        answer = daemon.get("/v1/lend")
    else:
        order = {"on": None if word is None else word == "on", "hours": list(hours) or None}
        answer = daemon.post("/v1/lend", order)
    if as_json:
        print_json(answer)
        return
    for line in lend_lines(answer):
        click.echo(line)
    for warning in [*filter(None, [answer["problem"]]), *answer["warnings"]]:
        click.echo(f"mesh: {warning}", err=True)


@click.command()
@click.argument("duration", type=DURATION, required=False)
@click.pass_context
def pause(ctx: click.Context, duration: float | None) -> None:
    """Take no new guests, for DURATION (as 30m) or until `mesh resume`; those that run stay. Remembered over restarts."""
    answer = client(ctx).post("/v1/pause", {"paused": True, "for_s": duration})
    guests, until = answer["guests"], f" until {when(answer['until_unix'])}" if answer["until_unix"] else ""
    here = "1 guest still runs" if guests == 1 else f"{guests} guests still run"
    click.echo(f"paused{until}" + (f"; {here} (`mesh reclaim` sends them away)" if guests else ""))


@click.command()
@GPU_OPTION
@click.pass_context
def resume(ctx: click.Context, gpu: str | None) -> None:
    """Lend (again): all of it, or one GPU that was taken back."""
    daemon = client(ctx)
    answer = daemon.post("/v1/pause", {"paused": False, "gpu": gpu})
    words = "lending" if answer["lending"] and not answer["paused"] else "that GPU is lent when the machine is"
    click.echo(words)
    state = daemon.get("/v1/lend")
    if state["lending"] and not state["paused"] and not state["now"]:
        click.echo(f"mesh: {lend_lines(state)[0]}", err=True)
    for warning in state["warnings"]:
        click.echo(f"mesh: {warning}", err=True)


@click.command()
@click.option("--grace", type=DURATION, help="How long guests may take to save (default: the policy's notice, or 30s).")
@click.option("--now", is_flag=True, help="Kill guests at once; they go on from their last checkpoint.")
@GPU_OPTION
@click.option("--dry-run", is_flag=True, help="Only say whose work it is and what it costs. Changes nothing.")
@json_option
@click.pass_context
def reclaim(ctx: click.Context, grace: float | None, now: bool, gpu: str | None, dry_run: bool, as_json: bool) -> None:
    """Take the machine back, or one GPU. Guests save within the grace, and move on; what was taken is not lent until
    `mesh resume`."""
    if now and grace is not None:
        raise click.UsageError("--grace gives guests time, --now gives them none: say one of them", ctx)
    if now and gpu is None and not dry_run:
        from mesh.cli.seize import take_back

        take_back(ctx, as_json)
        return
    daemon = client(ctx)
    order = {"grace_s": grace, "now": now, "gpu": gpu, "dry_run": dry_run}
    with patience("waiting for guests to save and move on"):
        answer = daemon.post("/v1/reclaim", order, timeout_s=None)
    if as_json:
        print_json(answer)
        return
    if dry_run:
        _show_cost(answer["guests"])
        return
    count = len(answer["reclaimed"])
    click.echo(
        f"yours again after {answer['seconds']:.1f} s; {count} guests have gone" if count else "yours; nobody was here"
    )
    for guest in answer["guests"]:
        steps, seconds = guest["lost_steps"], guest["lost_s"]
        lost = f"{steps} steps" if steps is not None else f"{seconds:.1f} s of work"
        if steps or (steps is None and seconds >= 0.1):
            click.echo(f"  {guest['name'] or guest['job'][:8]} of {guest['user']} lost {lost}")


def _show_cost(guests: list[dict[str, Any]]) -> None:
    if not guests:
        click.echo("nobody is here: it costs nothing")
        return
    rows = [
        [row["name"] or row["job"][:8], row["user"], str(len(row["gpus"])) if row["gpus"] else "-", *cost_cells(row)]
        for row in guests
    ]
    table(["JOB", "USER", "GPUS", *(name.upper() for name in COST)], rows, spare=["GPUS", "SIZE", "SHIPPING", "SAVING"])
    for row in guests:
        if row["sent_to"] and row["sent_to"] != row["goes_to"]:
            click.echo(f"{row['name'] or row['job'][:8]} {row['plan']}")
    click.echo("nothing was changed", err=True)
