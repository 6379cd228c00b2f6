"""`mesh why`: where a job runs or why it waits, as everybody can recompute it, and what would let it start."""

from typing import Any

import click

from mesh.cli.names import JOB
from mesh.cli.terminal import client, job_path, json_option, print_json, table


@click.command()
@click.argument("job", type=JOB)
@click.option(
    "--would", is_flag=True, help="Say what would let it start: the nearest changes, of it and of the campus."
)
@json_option
@click.pass_context
def why(ctx: click.Context, job: str, would: bool, as_json: bool) -> None:
    """Explain where a job runs or why it waits: the ranking of all nodes, with reasons."""
    answer = client(ctx).get(f"{job_path(job)}/why" + ("?would=1" if would else ""))
    if as_json:
        print_json(answer)
        return
    where = f" on {answer['node']}" if answer["node"] else ""
    click.echo(
        f"job {answer['job'][:8]} is {answer['state']}{where}" + (f": {answer['detail']}" if answer["detail"] else "")
    )
    click.echo(f"  its record is kept by {', '.join(answer['witnesses'])}")
    for attempt in answer["attempts"]:
        click.echo(f"  attempt {attempt['number']} on {attempt['node']}: {attempt['reason'] or 'under way'}")
    if answer["heir"] is not None:
        has = "has" if answer["warm"] else "does not have"
        click.echo(f"  it would go to {answer['heir']} next, which {has} its last checkpoint")
    if answer["submitted_by"]:
        click.echo(f"  {answer['submitted_by']}")
    placement = answer["placement"]
    if placement["zone"] is not None:
        click.echo(
            f"  placed by zone first (since there were {placement['two_level_since']} nodes): zone "
            f"{placement['zone'] or '(none)'}, coordinator {placement['coordinator'] or 'none'}"
        )
    if answer["decision"] is not None:
        click.echo("  " + _decided(answer["decision"]))
    click.echo("for its next attempt: " + answer["explanation"][0])
    rows = [
        [str(place), candidate["nick"], str(candidate["weight"]), f"advert {candidate['advert_version']}"]
        for place, candidate in enumerate(answer["candidates"], 1)
    ]
    rows += [["-", refusal["nick"], "-", "; ".join(refusal["reasons"])] for refusal in answer["refused"]]
    if rows:
        table(["RANK", "NODE", "SURVIVAL/64", "WHY"], rows)
    if answer["would"] is None:
        return
    if answer["would"]:
        click.echo("it could start:")
    elif answer["candidates"]:
        click.echo("it could start now, as far as places go")
    else:
        click.echo("no single change of what it asks, or of one node, would let it start now")
    for change in answer["would"]:
        click.echo(f"  {'with ' if change['of'] == 'request' else ''}{change['text']}")


def _decided(decision: dict[str, Any]) -> str:
    """Who was chosen, by whom, out of what."""
    first, *after = decision["order"]
    then = f", before {', '.join(row['nick'] for row in after)}" if after else ""
    chosen = f"{first['nick']} (advert {first['advert_version']})"
    return f"{decision['by']} gave attempt {decision['attempt']} to {chosen}{then}; {_checkable(decision)}"


def _checkable(decision: dict[str, Any]) -> str:
    """What of it anybody can still compute again: nobody keeps adverts of old versions."""
    changed = [row["nick"] for row in decision["order"] if row["advert_now"] != row["advert_version"]]
    if not changed:
        return "the adverts that it names are as they were"
    adverts = f"advert{'' if len(changed) == 1 else 's'} of {', '.join(changed)}"
    return f"changed since: the {adverts}, so it is signed but cannot be computed again"
