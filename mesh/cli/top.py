"""`mesh top`: the mesh in one terminal, or once as text."""

import os
import sys
from typing import Any

import click

from mesh.api.errors import MeshError
from mesh.cli.terminal import client, json_option, layout, print_json
from mesh.client import Client

EVENTS_SHOWN = 20
PLAIN_COLUMNS = 160  # where nobody says how wide it is; ours


@click.command()
@click.option("--once", is_flag=True, help="Print it once, as text, and end; so does a pipe.")
@json_option
@click.pass_context
def top(ctx: click.Context, once: bool, as_json: bool) -> None:
    """Watch the mesh: this node, all nodes, jobs and what is at risk, transfers, events. Keys pause lending and take the
    machine back; `?` lists them."""
    if as_json:
        print_json(_json(ctx))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(ctx)
    else:
        _run(ctx)


def _json(ctx: click.Context) -> dict[str, Any]:
    from mesh.top.answers import PATHS, Source
    from mesh.top.view import View

    daemon, view = client(ctx), View()
    view.take(Source(daemon).look())
    answers = {name: daemon.get(path) for name, path in PATHS.items()}
    schema = answers["node"]["schema"]
    told = {name: {key: value for key, value in answer.items() if key != "schema"} for name, answer in answers.items()}
    lists = {name: told[name][name] for name in ("nodes", "jobs", "gpus", "transfers")}
    return {"schema": schema, "node": told["node"], "totals": view.totals()._asdict(), **lists}


def _print(ctx: click.Context) -> None:
    import shutil

    from mesh.top.answers import Source
    from mesh.top.plain import plain
    from mesh.top.view import View

    view = View()
    view.take(Source(client(ctx)).look())
    for line in plain(view, shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns, EVENTS_SHOWN):
        click.echo(line)


def _run(ctx: click.Context) -> None:
    if os.environ.get("TERM", "dumb") == "dumb":
        raise MeshError("this terminal (TERM) cannot be drawn on: `mesh top --once` prints the same")
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise MeshError(
            "`mesh top` needs textual, which is not installed: pip install 'campus-mesh[top]'. "
            "`mesh top --once` does without"
        ) from error
    from mesh.top.answers import Source
    from mesh.top.app import Top
    from mesh.top.table import many

    where = layout(ctx)

    def strike() -> str:
        from mesh.cli.seize import strike as end_guests

        struck, problems, by = end_guests(where)
        struck = [one for one in struck if one.processes]
        left = [one for one in struck if one.left]
        if left:
            return f"{len(left)} guests are left: `mesh killall`. {'; '.join(problems)}"
        words = (
            f"yours; {many(len(struck), 'guest')} ended at once, {by} (u lends again)"
            if struck
            else "yours; nobody was here"
        )
        return "; ".join([words, *problems])

    Top(Source(Client(layout(ctx).socket)), strike).run()
