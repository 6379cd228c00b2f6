"""`mesh lend`, `pause` and `reclaim`: the owner decides what this machine lends."""

from typing import Any

import click

from mesh.cli.output import print_json, say, table
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import DURATION, client, json_option
from mesh.util.errors import ExitCode
from mesh.util.text import COST, cost_cells, lend_lines, plural, when

LONGEST_PAUSE_S = 366 * 86_400  # as in mesh.api.requests
GPU_OPTION = click.option("--gpu", metavar="N", help="One GPU only: its number here, or the beginning of its UUID.")


@click.command()
@click.option(
    "--hours",
    multiple=True,
    metavar="HOURS",
    help='Lend only in these hours of local time: "Mon-Fri 20-08; Sat-Sun", always, never. Repeatable.',
)
@GPU_OPTION
@json_option
@click.pass_context
def lend(ctx: click.Context, hours: tuple[str, ...], gpu: str | None, as_json: bool) -> None:
    """Lend this machine, also after a pause or a reclaim; or one GPU that was taken back.

    policy.toml says what else takes the machine back (the owner's programs on a GPU, keyboard, load) and how fast. `mesh status`
    shows the present state.
    """
    daemon = client(ctx)
    if gpu is not None and hours:
        raise click.UsageError("--hours are those of the whole machine: leave out --gpu", ctx)
    if gpu is not None:
        daemon.post("/v1/pause", {"paused": False, "gpu": gpu})
        answer = daemon.get("/v1/lend")
    else:
        answer = daemon.post("/v1/lend", {"on": True, "hours": list(hours) or None})
    if as_json:
        print_json(answer)
        return
    for line in lend_lines(answer):
        say(line)
    for warning in [*filter(None, [answer["problem"]]), *answer["warnings"]]:
        say(f"mesh: {warning}", err=True)


@click.command()
@click.argument("duration", type=DURATION, required=False)
@json_option
@click.pass_context
def pause(ctx: click.Context, duration: float | None, as_json: bool) -> None:
    """Accept no new guests for DURATION (as 30m), or until `mesh lend`. Present guests stay. Restarts do not end a pause."""
    if duration is not None and not 0 < duration <= LONGEST_PAUSE_S:
        raise click.BadParameter("a pause lasts longer than 0s and at most 366d; without DURATION, until `mesh lend`")
    answer = client(ctx).post("/v1/pause", {"paused": True, "for_s": duration})
    if as_json:
        print_json(answer)
    else:
        _show_pause(answer)
    _end_if_not_stored(ctx, answer)


def _show_pause(answer: dict[str, Any]) -> None:
    guests, until = answer["guests"], f" until {when(answer['until_unix'])}" if answer["until_unix"] else ""
    here = f"{plural(guests, 'guest')} still run{'s' if guests == 1 else ''}"
    say(f"paused{until}" + (f"; {here} (`mesh reclaim` sends them away)" if guests else ""))


@click.command()
@click.option("--grace", type=DURATION, help="Time for guests to save (default: the policy's notice, or 30s).")
@click.option("--now", is_flag=True, help="Kill guests at once; they resume elsewhere from their last checkpoint.")
@GPU_OPTION
@click.option("--dry-run", is_flag=True, help="Show affected jobs and the work they would lose; change nothing.")
@json_option
@click.pass_context
def reclaim(ctx: click.Context, grace: float | None, now: bool, gpu: str | None, dry_run: bool, as_json: bool) -> None:
    """Take the machine, or one GPU, back: guests save within the grace and move on. `mesh lend` lends it again."""
    if now and grace is not None:
        raise click.UsageError("--grace gives guests time and --now gives them none: use one of them", ctx)
    if now and gpu is None and not dry_run:
        from mesh.cli.kill import reclaim_now

        reclaim_now(ctx, as_json)
        return
    order = {"grace_s": grace, "now": now, "gpu": gpu, "dry_run": dry_run}
    with waiting_for("waiting for guests to save and move on"):
        answer = client(ctx).post("/v1/reclaim", order, timeout_s=None)
    if as_json:
        print_json(answer)
    elif dry_run:
        _show_cost(answer["guests"])
    else:
        _show_departures(answer)
    if not dry_run:
        _end_if_not_stored(ctx, answer)


def _end_if_not_stored(ctx: click.Context, answer: dict[str, Any]) -> None:
    """End the command with an error if a restart of the daemon forgets the order."""
    if answer["problem"]:
        say(f"mesh: {answer['problem']}", err=True)
        ctx.exit(int(ExitCode.ERROR))


def _show_departures(answer: dict[str, Any]) -> None:
    count = len(answer["reclaimed"])
    say(
        f"yours again after {answer['seconds']:.1f} s; {plural(count, 'guest')} {'has' if count == 1 else 'have'} left"
        if count
        else "yours; there were no guests"
    )
    for guest in answer["guests"]:
        steps, seconds = guest["lost_steps"], guest["lost_s"]
        lost = plural(steps, "step") if steps is not None else f"{seconds:.1f} s of work"
        if steps or (steps is None and seconds >= 0.1):
            say(f"  {guest['name'] or guest['job'][:8]} of {guest['user']} lost {lost}")


def _show_cost(guests: list[dict[str, Any]]) -> None:
    if not guests:
        say("there are no guests: reclaiming costs nothing")
        return
    rows = [
        [row["name"] or row["job"][:8], row["user"], str(len(row["gpus"])) if row["gpus"] else "-", *cost_cells(row)]
        for row in guests
    ]
    table(["JOB", "USER", "GPUS", *(name.upper() for name in COST)], rows, spare=["GPUS", "SIZE", "SHIPPING", "SAVING"])
    for row in guests:
        if row["sent_to"] and row["sent_to"] != row["goes_to"]:
            say(f"{row['name'] or row['job'][:8]} {row['plan']}")
    say("nothing was changed", err=True)
