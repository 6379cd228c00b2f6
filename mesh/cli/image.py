"""`mesh image`: the container images that jobs may use, and their transfer between nodes."""

import time
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.listing import listing, show
from mesh.cli.names import IMAGE, NODE
from mesh.cli.output import print_json, say, table
from mesh.cli.progress import progress, waiting_for
from mesh.cli.terminal import DURATION, client, json_option
from mesh.util.byte_text import amount
from mesh.util.duration import lasting
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import plural

POLL_S = 0.5
PROGRESS_S = 2.0
ENGINE_S = 3600.0  # for the engine to compress and push a large image (own choice)


@click.group()
def image() -> None:
    """Manage the container images that jobs may use, and move them between nodes."""


@image.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List the allowed images, who allowed each, and which nodes have it."""
    daemon = client(ctx)
    show(form, lambda: daemon.get("/v1/images"), lambda answer: [row["alias"] for row in answer["images"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    if answer["listed"] or answer["images"]:
        rows = [_row(row) for row in answer["images"]]
        table(["ALIAS", "IMAGE", "SIZE", "SIGNED BY", "HERE", "NODES"], rows)
    if answer["anything"]:
        say("nodes may also run any other image that they have (`*` is on the list)", err=True)
    if not answer["listed"]:
        say(
            "this mesh has no list of images: a node runs any image that it has, for the users it accepts. "
            "`mesh image allow ALIAS` starts a list",
            err=True,
        )
    if answer["by_name"]:
        if answer["listed"]:
            say()
        table(["BY NAME", "NODES"], [[row["name"], ", ".join(row["nodes"])] for row in answer["by_name"]])
    for alias, row in answer["own"]["allowed"].items():
        say(f"this node's owner allows {alias} here ({_short(row['id'])})", err=True)
    for alias in answer["own"]["denied"]:
        say(f"this node's owner denies {alias} here", err=True)
    fetched = answer["fetched"]
    if fetched["images"]:
        size = _size(sum(row["bytes"] for row in fetched["images"]))
        bounds = f"at most {_size(fetched['most_bytes'])}, each until unused for {lasting(fetched['most_unused_s'])}"
        say(
            f"fetched from other nodes: {plural(len(fetched['images']), 'image')}, {size} ({bounds}; `mesh image prune`)",
            err=True,
        )
    for row in answer["images"]:
        if row["problem"]:
            say(f"mesh: {row['alias']} was not fetched: {row['problem']}", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@click.option("--from", "source", default="", metavar="NAME", help="Its name on this node's engine (default: ALIAS).")
@click.option("--id", "id_", default="", metavar="sha256:...", help="Id of an image that is not on this node.")
@click.option("--here", is_flag=True, help="On this node only, whatever the mesh's list says.")
@json_option
@click.pass_context
def allow(ctx: click.Context, alias: str, source: str, id_: str, here: bool, as_json: bool) -> None:
    """Put an image on the mesh's list under the name ALIAS, signed by this node. Jobs can then use it on any node.

    The list holds digests, so moving the tag later changes nothing. `*` allows every image.
    """
    order = {"alias": alias, "source": source, "id": id_, "here": here}
    with waiting_for("pushing the image into this node's registry"):
        answer = client(ctx).post("/v1/images/allow", order, timeout_s=ENGINE_S)
    if as_json:
        print_json(answer)
        return
    if alias == "*":
        say("nodes may run every image that they have")
        return
    if answer["by_list"]:
        say(f"{alias} is no longer denied here: the mesh's list decides ({_short(answer['id'])})")
        return
    where = "on this node" if here else "on the mesh's list"
    registry = f", in registries {answer['manifest'][:19]}" if answer["manifest"] else ""
    say(f"{alias} is {_short(answer['id'])}{registry}, {where}")
    if answer["first"]:
        say(
            "mesh: from now on nodes run only images on the list, and those that their owners allow with --here; "
            "`mesh image allow '*'` allows every image again",
            err=True,
        )
    if here and not answer["listed"]:
        say("mesh: the mesh has no list yet, so this node runs every image that it has anyway", err=True)
    if not answer["on_engine"]:
        say("mesh: this node does not have it; nodes fetch it from other nodes", err=True)
    if answer["denied_here"]:
        say(f"mesh: this node's owner denies it here: `mesh image allow {alias} --here` allows it", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@click.option("--mesh", is_flag=True, help="Remove it from the mesh's list, for all nodes.")
@json_option
@click.pass_context
def deny(ctx: click.Context, alias: str, mesh: bool, as_json: bool) -> None:
    """Refuse the image ALIAS on this node, whatever the mesh's list says. Running guests continue."""
    answer = client(ctx).post("/v1/images/deny", {"alias": alias, "mesh": mesh})
    if as_json:
        print_json(answer)
        return
    say(f"{alias} is {'removed from the list' if mesh else 'denied on this node'}; running guests continue")
    if answer["still_allowed_here"]:
        say(f"mesh: this node's owner still allows it here: `mesh image deny {alias}` denies it", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@json_option
@click.pass_context
def pull(ctx: click.Context, alias: str, as_json: bool) -> None:
    """Fetch an image of the mesh's list from another node to this one, before a job needs it."""
    daemon = client(ctx)
    answer = daemon.post("/v1/images/pull", {"alias": alias})
    try:
        with progress(lambda: f"{alias}: {answer['words']}" if answer["words"] else "", PROGRESS_S):
            while not answer["here"]:
                time.sleep(POLL_S)
                found = [row for row in daemon.get("/v1/images")["images"] if row["id"] == answer["id"]]
                if not found or found[0]["problem"]:
                    why = found[0]["problem"] if found else "it is no longer on the mesh's list"
                    raise MeshError(why if alias in why else f"{alias}: {why}")
                answer.update(here=found[0]["here"], words=found[0]["fetching"])
    except KeyboardInterrupt:
        say(err=True)
        say(f"mesh: the transfer continues: `mesh image ls` shows it, `mesh image pull {alias}` waits again", err=True)
        raise
    if as_json:
        print_json(answer)
        return
    say(f"{alias} is here ({_short(answer['id'])})")


@image.command()
@click.argument("alias", type=IMAGE)
@click.argument("nodes", type=NODE, nargs=-1)
@json_option
@click.pass_context
def push(ctx: click.Context, alias: str, nodes: tuple[str, ...], as_json: bool) -> None:
    """Push the image ALIAS of this node's engine into the node's registry, so that other nodes can fetch it.

    With NODES, ask these to fetch an image of the mesh's list, and wait until they have it. Their owners may refuse.
    """
    daemon = client(ctx)
    order: dict[str, Any] = {"alias": alias, "nodes": list(nodes)}
    with waiting_for("asking the nodes" if nodes else "pushing the image"):
        answer = daemon.post("/v1/images/push", order, timeout_s=ENGINE_S)
    if not nodes:
        if as_json:
            print_json(answer)
        else:
            say(
                f"{alias} is {answer['manifest']} in this node's registry; `mesh image allow {alias}` puts it on the list"
            )
        return
    rows = answer["nodes"]

    def read() -> str:
        text = "; ".join(f"{row['node']}: {row['words']}" for row in rows if row["words"])
        return f"{alias}: {text}" if text else ""

    try:
        with progress(read, PROGRESS_S):
            while any(not row["here"] and not row["failed"] for row in rows):
                time.sleep(POLL_S)
                rows = _refreshed(daemon, order, rows)
    except KeyboardInterrupt:
        say(err=True)
        say("mesh: the transfers continue: `mesh image ls` shows which nodes have it", err=True)
        raise
    if as_json:
        print_json({**answer, "nodes": rows})
    else:
        for row in rows:
            say(f"{row['node']} {'has it' if row['here'] else 'does not have it: ' + row['words']}")
    if any(row["failed"] for row in rows):
        raise click.exceptions.Exit(ExitCode.ERROR)


@image.command()
@json_option
@click.pass_context
def registry(ctx: click.Context, as_json: bool) -> None:
    """Show the address of this node's image registry, and the password for pushes into it.

    Engines and tools of this machine can pull allowed images from it: `docker pull ADDRESS/NAME@DIGEST`.
    """
    answer = client(ctx).get("/v1/images/registry")
    if as_json:
        print_json(answer)
        return
    say(f"address   {answer['address']}")
    say(f"user      {answer['user']}")
    say(f"password  {answer['password']} (until the daemon ends)")


@image.command()
@click.option("--unused", type=DURATION, help="Only images unused for this long (default: image_keep_days).")
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@json_option
@click.pass_context
def prune(ctx: click.Context, unused: float | None, dry_run: bool, as_json: bool) -> None:
    """Remove unused images that were fetched from other nodes.

    The daemon does so itself above image_keep_gib, or after image_keep_days without use. Images that the owner pulled or tagged,
    images of containers, and images used in the last ten minutes are never removed.
    """
    with waiting_for("removing images"):
        answer = client(ctx).post("/v1/images/prune", {"unused_s": unused, "dry_run": dry_run}, timeout_s=600)
    if as_json:
        print_json(answer)
        return
    if not answer["images"]:
        say("there is nothing to remove: `mesh image ls` shows the fetched images", err=True)
    for row in answer["images"]:
        what = "stays" if not row["gone"] else "would be removed" if dry_run else "removed"
        reason = f"unused for {lasting(row['unused_s'])}: {row['words']}"
        say(f"{row['alias']} ({_short(row['id'])}, {_size(row['bytes'])}) {what}; {reason}")


def _refreshed(daemon: Client, order: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the present state of nodes that have not finished. A node that was restarted has forgotten the request."""
    now = daemon.post("/v1/images/push", {**order, "look": True})["nodes"]
    for row in now:
        if not row["here"] and not row["words"]:
            row.update(failed=True, words="it no longer fetches the image: push it again")
    return [old if old["here"] or old["failed"] else new for old, new in zip(rows, now, strict=True)]


def _row(row: dict[str, Any]) -> list[str]:
    if not row["allowed"]:
        return [row["alias"], "denied", "-", row["by"], "-", "-"]
    here = "denied" if row["denied_here"] else "yes" if row["here"] else row["fetching"] or "no"
    return [row["alias"], _short(row["id"]), _size(row["bytes"]), row["by"], here, ", ".join(row["nodes"]) or "-"]


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _size(count: int) -> str:
    return amount(count) if count else "?"
