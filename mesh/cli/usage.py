"""`mesh usage`: hours lent and borrowed, and what ran here."""

import time
from typing import Any

import click

from mesh.cli.telling import patience
from mesh.cli.terminal import DURATION, client, json_option, print_json, table
from mesh.duration import lasting
from mesh.words import hours

HEADS = {"user": "USER", "node": "NODE", "zone": "ZONE", "month": "MONTH"}


@click.command()
@click.option("--since", type=DURATION, default="30d", show_default=True, help="How far to look back.")
@click.option("--by", type=click.Choice(list(HEADS)), default="user", show_default=True)
@click.option("--here", is_flag=True, help="By this node's own receipts; ask nobody.")
@click.option("--runs", is_flag=True, help="What ran on this node instead, one attempt a line.")
@json_option
@click.pass_context
def usage(ctx: click.Context, since: float, by: str, here: bool, runs: bool, as_json: bool) -> None:
    """Hours lent and borrowed, by the receipts that lenders have signed.

    A row's LENT is what its machines did for others, BORROWED what others' machines did for it, OWN what it ran on its own. Hours
    are those of whole GPUs, and after the + those of slots, for jobs without one. Nodes that are away are not counted.
    """
    path = f"/v1/usage?since_s={since:.3f}&by={by}&here={'true' if here or runs else 'false'}"
    with patience("asking the other nodes what they have lent"):
        answer = client(ctx).get(path, timeout_s=120)
    if as_json:
        print_json(answer)
    elif runs:
        _show_runs(answer)
    else:
        _show(answer, by)


def _show(answer: dict[str, Any], by: str) -> None:
    header = [HEADS[by], "LENT", "BORROWED", "OWN", "MEASURED", "LOST", "RUNS"]
    rows = []
    for row in answer["rows"]:
        kinds = [hours(row[f"{kind}_gpu_h"], row[f"{kind}_slot_h"]) for kind in ("lent", "borrowed", "own")]
        rest = [f"{row['measured_gpu_h']:.3g}", f"{row['lost_h']:.3g}", str(row["attempts"])]
        if by == "user":
            known = "fair_points" in row
            rest.append(f"{row['decayed_gpu_h']:.3g} GPU h: {row['fair_points']} points ahead" if known else "-")
        rows.append([row["name"], *kinds, *rest])
    table([*header, "FAIR SHARE"] if by == "user" else header, rows, spare=["MEASURED", "LOST"])
    if not rows:
        click.echo("nothing has run yet in that time")
    if answer["silent"]:
        click.echo(f"not counted, as they did not answer: {', '.join(answer['silent'])}", err=True)
    if answer["cut"]:
        click.echo(f"only their newest receipts are counted: {', '.join(answer['cut'])}", err=True)


def _show_runs(answer: dict[str, Any]) -> None:
    rows = []
    for run in answer["runs"]:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["from_unix_ms"] / 1000))
        ran_s = (run["until_unix_ms"] - run["from_unix_ms"]) / 1000
        held = f"{run['gpu_percent'] / 100:g} GPU" if run["gpu_percent"] else "slot"
        lost = lasting(run["lost_s"]) if run["lost_s"] else "-"
        rows.append([began, run["job"][:8], run["user"], held, lasting(ran_s), lost, run["end"] or "runs"])
    table(["BEGAN", "JOB", "USER", "HELD", "RAN", "LOST", "END"], rows)
