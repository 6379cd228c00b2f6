"""`mesh top`: the mesh in one terminal, once as text, or in a browser."""

import os
import sys
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.output import print_json, say
from mesh.cli.terminal import client, json_option, layout
from mesh.util.errors import MeshError

EVENTS_SHOWN = 20
ENDED_SHOWN = 5  # jobs (own choice)
PIPE_COLUMNS = 160  # width of the text in a pipe (own choice)


@click.command()
@click.option("--once", is_flag=True, help="Print the text once and exit; so does a pipe.")
@click.option("-a", "--all", "everything", is_flag=True, help="With --once: also jobs that ended long ago.")
@click.option("--web", is_flag=True, help="Print the address of this node's web page, valid for one visit.")
@click.option("--open", "open_", is_flag=True, help="With --web: open the page in the browser.")
@json_option
@click.pass_context
def top(ctx: click.Context, once: bool, everything: bool, web: bool, open_: bool, as_json: bool) -> None:
    """Watch nodes, jobs at risk, transfers and events. Keys pause lending and reclaim this machine; `?` lists them.

    The web page listens on this machine only; its address is valid for ten minutes. To see it from another machine:
    `ssh -L PORT:127.0.0.1:PORT this-machine`, with `web_port = PORT` in config.toml.
    """
    if web or open_:
        _show_page(ctx, open_, as_json)
    elif as_json:
        print_json(_json(ctx))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(ctx, everything)
    else:
        _run(ctx)


def _show_page(ctx: click.Context, open_: bool, as_json: bool) -> None:
    answer = client(ctx).post("/v1/web")
    if as_json:
        print_json(answer)
    else:
        say(answer["url"])
    if open_:
        import webbrowser

        if not webbrowser.open(answer["url"]):
            say("mesh: no browser could be started: open the address yourself", err=True)


def _json(ctx: click.Context) -> dict[str, Any]:
    from mesh.top.answers import PATHS, Source
    from mesh.top.view import View

    daemon, view = client(ctx), View()
    view.take(Source(daemon).look())
    answers = {name: daemon.get(path) for name, path in PATHS.items()}
    schema = answers["node"]["schema"]
    shown = {name: {key: value for key, value in answer.items() if key != "schema"} for name, answer in answers.items()}
    lists = {name: shown[name][name] for name in ("nodes", "jobs", "gpus", "transfers")}
    return {"schema": schema, "node": shown["node"], "totals": view.totals()._asdict(), **lists}


def _print(ctx: click.Context, everything: bool) -> None:
    import shutil

    import msgspec

    from mesh.top.answers import Source
    from mesh.top.view import View, text_lines

    view, look = View(), Source(client(ctx)).look()
    if not everything:
        over = sorted((job.outcome.ended_unix_ms, job.job) for job in look.jobs if job.outcome is not None)
        left_out = {job for _, job in over[:-ENDED_SHOWN]}
        look = msgspec.structs.replace(look, jobs=[job for job in look.jobs if job.job not in left_out])
    view.take(look)
    for line in text_lines(view, shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns, EVENTS_SHOWN):
        say(line)


def _run(ctx: click.Context) -> None:
    if os.environ.get("TERM", "dumb") == "dumb":
        raise MeshError("this terminal (TERM) cannot show full-screen programs: use `mesh top --once`")
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise MeshError(
            "`mesh top` needs textual, which is not installed: install campus-mesh with its extra `top` "
            "(`pipx install --force 'campus_mesh-VERSION-py3-none-any.whl[top]'`), or use `mesh top --once`"
        ) from error
    from mesh.top.answers import Source
    from mesh.top.app import Top

    where = layout(ctx)

    def kill() -> str:
        from time import monotonic

        from mesh.cli.kill import kill_guests, outcome

        begun = monotonic()
        killed, problems, by = kill_guests(where)
        failed = any(one.problem for one in killed)
        next_step = "run `mesh killall`" if failed else "u lends again"
        return "; ".join([f"{outcome(killed, by, monotonic() - begun)} ({next_step})", *problems])

    Top(Source(Client(where.socket)), kill).run()
