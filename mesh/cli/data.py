"""`mesh data`: data sets that jobs read, and the copies of them on this node."""

import time
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.listing import listing, show
from mesh.cli.names import DATA, GROUP
from mesh.cli.output import leave_or_stop, print_json, say, table
from mesh.cli.progress import progress
from mesh.cli.terminal import client, json_option, quote
from mesh.util.byte_text import amount
from mesh.util.errors import MeshError
from mesh.util.text import plural

POLL_S = 0.1
PROGRESS_S = 2.0


@click.group()
def data() -> None:
    """Share data sets with jobs: directories or files that nodes fetch once and jobs read."""


@data.command()
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, resolve_path=True))
@click.option(
    "--reader",
    "readers",
    multiple=True,
    metavar="USER",
    help="User whose jobs may read it, too, or group:NAME. Repeatable.",
)
@click.option("--everybody", is_flag=True, help="Jobs of everybody in the mesh may read it.")
@click.option("--rehash", is_flag=True, help="Read every file again, also those that have not changed.")
@json_option
@click.pass_context
def add(
    ctx: click.Context,
    name: str,
    path: str,
    readers: tuple[str, ...],
    everybody: bool,
    rehash: bool,
    as_json: bool,
) -> None:
    """Add PATH, a directory or file, as your data set NAME; or a new version of it, by reading only what has changed."""
    daemon = client(ctx)
    order = {"name": name, "path": path, "readers": list(readers), "everybody": everybody, "rehash": rehash}
    answer = _wait(daemon, daemon.post("/v1/data/add", order), f"{name}: ", "adding it")
    if as_json:
        print_json(answer)
        return
    say(
        f"{name} has {plural(answer['files'], 'entry', 'entries')} with {amount(answer['bytes'])}; read "
        f"{amount(answer['read_bytes'])}, stored {amount(answer['new_bytes'])} in {answer['seconds']:.1f} s"
    )
    who = f"your jobs and those of {', '.join(readers)}" if readers else "only your own jobs"
    who = "jobs of everybody in the mesh" if everybody else who
    say(f"{who} can read it: mesh run --data {name} -- ...", err=True)


@data.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List the data sets of the mesh, who may read them, and which nodes have them."""
    daemon = client(ctx)
    show(form, lambda: daemon.get("/v1/data"), lambda answer: [row["name"] for row in answer["data"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    table(["NAME", "SIZE", "ENTRIES", "READERS", "HERE", "NODES"], [_row(row) for row in answer["data"]])
    for name, path in answer["paths"].items():
        say(f"this node offers {path} to jobs as {name}", err=True)
    quota = answer["quota_bytes"]
    limit = "" if quota is None else f" of {amount(quota)} (data_quota_gib)"
    say(f"data sets use {amount(answer['used_bytes'])}{limit} of this node's disk", err=True)


@data.command("show")
@click.argument("name", type=DATA)
@click.argument("path", default="")
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, path: str, as_json: bool) -> None:
    """Show a data set, and the files in its directory PATH if it is on this node."""
    answer = client(ctx).get(f"/v1/data/show?name={quote(name)}&path={quote(path)}")
    if as_json:
        print_json(answer)
        return
    say(f"{answer['name']}  {amount(answer['bytes'])} in {plural(answer['files'], 'entry', 'entries')}")
    say(f"  version {answer['id'][:12]} of {time.strftime('%Y-%m-%d %H:%M', time.localtime(answer['created_unix']))}")
    say(f"  readers: {_readers(answer)}")
    say(f"  nodes: {', '.join(answer['nodes']) or 'none is there'}")
    if answer["path"]:
        say(f"  this node offers {answer['path']} for it")
    if answer["encrypted"]:
        say("  encrypted on the disks of these nodes")
    if answer["entries"] is None and answer["here"]:
        say("mesh: its files are not listed, since this node does not have its key", err=True)
        return
    if answer["entries"] is None:
        say(f"mesh: it is not on this node: `mesh data pin {answer['name']}` brings it and lists its files", err=True)
        return
    say()
    table(["NAME", "SIZE", ""], [[row["name"], amount(row["bytes"]), _kind(row)] for row in answer["entries"]])
    if answer["more"]:
        say(f"mesh: these are the first {len(answer['entries'])}", err=True)


@data.command()
@click.argument("name", type=DATA)
@click.option("--off", is_flag=True, help="Let it go again when space is needed and another node has it.")
@json_option
@click.pass_context
def pin(ctx: click.Context, name: str, off: bool, as_json: bool) -> None:
    """Keep a data set on this node, and fetch it if it is not here."""
    daemon = client(ctx)
    answer = _wait(daemon, daemon.post("/v1/data/pin", {"name": name, "off": off}), "", "fetching it")
    if as_json:
        print_json(answer)
        return
    say(f"{name} may go when space is needed" if off else f"{name} is here and stays")


@data.command()
@click.argument("name", type=DATA)
@json_option
@click.pass_context
def verify(ctx: click.Context, name: str, as_json: bool) -> None:
    """Read every chunk of this node's data sets, and fetch again what is damaged of NAME."""
    daemon = client(ctx)
    answer = _wait(daemon, daemon.post("/v1/data/verify", {"name": name}), f"{name}: ", "verifying it")
    if as_json:
        print_json(answer)
        return
    bad = f"{plural(answer['damaged'], 'damaged chunk')}, {answer['fetched_again']} of {name} fetched again"
    say(
        f"{plural(answer['chunks'], 'chunk')} verified; {bad if answer['damaged'] or answer['fetched_again'] else 'all are good'}"
    )


@data.command()
@click.argument("name", type=DATA)
@click.option("--here", is_flag=True, help="Only from this node.")
@click.option("--force", is_flag=True, help="With --here: even if no other node has it.")
@json_option
@click.pass_context
def rm(ctx: click.Context, name: str, here: bool, force: bool, as_json: bool) -> None:
    """Remove your data set NAME from the mesh, or any data set from this node. Jobs that need it fail to start."""
    answer = client(ctx).post("/v1/data/remove", {"name": name, "here": here, "force": force}, timeout_s=600)
    if as_json:
        print_json(answer)
        return
    say(
        f"{answer['name']} is removed {'from this node' if answer['here'] else 'from the mesh; nodes drop it as they hear of it'}"
    )


@data.group()
def group() -> None:
    """Name users together, as readers of data sets: `mesh data add --reader group:NAME`."""


@group.command("set")
@click.argument("name")
@click.argument("users", nargs=-1, required=True)
@json_option
@click.pass_context
def set_(ctx: click.Context, name: str, users: tuple[str, ...], as_json: bool) -> None:
    """Have exactly these USERS in your group NAME from now on."""
    answer = client(ctx).post("/v1/data/groups", {"name": name, "members": list(users)})
    if as_json:
        print_json(answer)
        return
    row = answer["groups"][0]
    say(f"{row['name']} has {plural(len(row['members']), 'member')}: {', '.join(row['members'])}")


@group.command("ls")
@listing
@click.pass_context
def list_groups(ctx: click.Context, /, **form: bool) -> None:
    """List the groups of the mesh."""
    daemon = client(ctx)

    def draw(answer: dict[str, Any]) -> None:
        rows = [[row["name"], ", ".join(row["members"]), ", ".join(row["data"]) or "-"] for row in answer["groups"]]
        table(["NAME", "MEMBERS", "DATA SETS"], rows)

    show(form, lambda: daemon.get("/v1/data/groups"), lambda answer: [row["name"] for row in answer["groups"]], draw)


@group.command("show")
@click.argument("name", type=GROUP)
@json_option
@click.pass_context
def show_group(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show who is in a group, and which data sets they may read."""
    row = client(ctx).get(f"/v1/data/groups?name={quote(name)}")["groups"][0]
    if as_json:
        print_json(row)
        return
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed_unix"]))
    say(f"{row['name']} since {since}, as set on {row['changed_on']}")
    say(f"  members: {', '.join(row['members'])}")
    say(f"  data sets: {', '.join(row['data']) or 'none'}")


@group.command("rm")
@click.argument("name", type=GROUP)
@json_option
@click.pass_context
def rm_group(ctx: click.Context, name: str, as_json: bool) -> None:
    """Remove your group NAME. Data sets that name it let none of its members in any more."""
    answer = client(ctx).post("/v1/data/groups", {"name": name, "members": []})
    if as_json:
        print_json(answer)
        return
    say(f"{name} is removed")


def _wait(daemon: Client, answer: dict[str, Any], head: str, doing: str) -> dict[str, Any]:
    """Follow something in the background to its end, with progress; Ctrl-C leaves it, twice ends it. MeshError if it failed."""
    work = {"kind": answer["kind"], "name": answer["name"]}
    try:
        with progress(lambda: f"{head}{answer['words']}" if answer["words"] else "", PROGRESS_S):
            while not answer["over"]:
                time.sleep(POLL_S)
                answer.update(daemon.get(f"/v1/data/work?kind={quote(work['kind'])}&name={quote(work['name'])}"))
    except KeyboardInterrupt:
        goes_on = f"mesh: the daemon goes on {doing}: the same command waits again. Press Ctrl-C once more to stop it."
        stopped = "mesh: it is stopped: the same command continues it"
        leave_or_stop(goes_on, lambda: daemon.post("/v1/data/stop", work), stopped)
        raise
    if answer["problem"]:
        raise MeshError(answer["problem"])
    return answer


def _row(row: dict[str, Any]) -> list[str]:
    here = "yes" if row["here"] else row["fetching"] or "no"
    here = f"{here}, pinned" if row["pinned"] else here
    here = row["path"] or here
    return [row["name"], amount(row["bytes"]), str(row["files"]), _readers(row), here, ", ".join(row["nodes"]) or "-"]


def _readers(row: dict[str, Any]) -> str:
    if row["cache"]:
        return "owner (cache)"
    return "everybody" if row["everybody"] else ", ".join(row["readers"]) or "owner"


def _kind(row: dict[str, Any]) -> str:
    if row["kind"] == "directory":
        return plural(row["files"], "entry", "entries")
    return f"-> {row['target']}" if row["kind"] == "link" else ""
