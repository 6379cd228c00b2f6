"""`mesh image`: which container images may be run, where they are, and bringing them to nodes."""

import time
from typing import Any

import click

from mesh.amount import amount
from mesh.api.errors import ExitCode, MeshError
from mesh.cli.listing import listing, show
from mesh.cli.names import IMAGE, NODE
from mesh.cli.telling import patience, telling
from mesh.cli.terminal import DURATION, client, json_option, print_json, table
from mesh.client import Client
from mesh.duration import lasting

LOOK_S = 0.5
TELL_S = 2.0


@click.group()
def image() -> None:
    """Container images: which may be run, where they are, and bringing them to nodes. No registry is ever asked."""


@image.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List the images that may be run, who allowed each, and which nodes have it."""
    daemon = client(ctx)
    show(form, lambda: daemon.get("/v1/images"), lambda answer: [row["alias"] for row in answer["images"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    if answer["listed"]:
        rows = [_row(row) for row in answer["images"]]
        table(["ALIAS", "IMAGE", "SIZE", "SIGNED BY", "HERE", "NODES"], rows)
        if answer["anything"]:
            click.echo("every other image on a node may be run there too (`*` is on the list)", err=True)
    else:
        click.echo(
            "this mesh has no list of images: what is on a node may be run there, by name, by those whom it accepts; "
            "`mesh image allow ALIAS` begins a list",
            err=True,
        )
    if answer["by_name"]:
        if answer["listed"]:
            click.echo("")
        table(["BY NAME", "NODES"], [[row["name"], ", ".join(row["nodes"])] for row in answer["by_name"]])
    for alias, row in answer["own"]["allowed"].items():
        click.echo(f"this node's owner allows {alias} here ({_short(row['id'])})", err=True)
    for alias in answer["own"]["denied"]:
        click.echo(f"this node's owner denies {alias} here", err=True)
    fetched = answer["fetched"]
    if fetched["images"]:
        size = _size(sum(row["bytes"] for row in fetched["images"]))
        bounds = f"at most {_size(fetched['most_bytes'])}, and each until it was unused for {lasting(fetched['most_unused_s'])}"
        click.echo(f"fetched from others: {len(fetched['images'])}, {size} ({bounds}; `mesh image prune`)", err=True)
    for row in answer["images"]:
        if row["problem"]:
            click.echo(f"mesh: {row['alias']} was not fetched: {row['problem']}", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@click.option(
    "--from", "source", default="", metavar="NAME", help="What it is called on this node's engine, if not ALIAS."
)
@click.option(
    "--id", "id_", default="", metavar="sha256:...", help="An image that is not on this node, by its image id."
)
@click.option("--here", is_flag=True, help="On this node alone, whatever the mesh's list says.")
@json_option
@click.pass_context
def allow(ctx: click.Context, alias: str, source: str, id_: str, here: bool, as_json: bool) -> None:
    """Put an image on the mesh's list under the name ALIAS, signed by this node: jobs may ask for it by that name anywhere.

    The list holds the image's content (both digests), so a tag that is moved later changes nothing. `*` allows every image.
    """
    order = {"alias": alias, "source": source, "id": id_, "here": here}
    answer = client(ctx).post("/v1/images/allow", order)
    if as_json:
        print_json(answer)
        return
    if alias == "*":
        click.echo("every image on a node may be run there")
        return
    if answer["by_list"]:
        click.echo(f"{alias} is not denied here any more: the mesh's list decides ({_short(answer['id'])})")
        return
    where = "on this node" if here else "on the mesh's list"
    registry = f", in registries {answer['manifest'][:19]}" if answer["manifest"] else ""
    click.echo(f"{alias} is {_short(answer['id'])}{registry}, {where}")
    if answer["first"]:
        click.echo(
            "mesh: from now on only what is on the list is started, and what nodes' owners allow on their own; "
            "`mesh image allow '*'` allows everything again",
            err=True,
        )
    if here and not answer["listed"]:
        click.echo("mesh: the mesh has no list yet, so everything on this node may be run anyway", err=True)
    if not answer["on_engine"]:
        click.echo("mesh: it is not on this node; nodes fetch it from those who have it", err=True)
    if answer["denied_here"]:
        click.echo(f"mesh: this node's owner denies it here: `mesh image allow {alias} --here` ends that", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@click.option("--mesh", is_flag=True, help="Take it from the mesh's list, for everybody.")
@json_option
@click.pass_context
def deny(ctx: click.Context, alias: str, mesh: bool, as_json: bool) -> None:
    """Do not run the image ALIAS on this node, whatever the mesh's list says. Guests that run now are left alone."""
    answer = client(ctx).post("/v1/images/deny", {"alias": alias, "mesh": mesh})
    if as_json:
        print_json(answer)
        return
    click.echo(f"{alias} is {'taken from the list' if mesh else 'denied on this node'}; what runs now is left alone")
    if answer["still_allowed_here"]:
        click.echo(f"mesh: this node's owner still allows it here: `mesh image deny {alias}` ends that", err=True)


@image.command()
@click.argument("alias", type=IMAGE)
@json_option
@click.pass_context
def pull(ctx: click.Context, alias: str, as_json: bool) -> None:
    """Fetch an image of the mesh's list to this node, before a job needs it, from nodes that have it."""
    daemon = client(ctx)
    answer = daemon.post("/v1/images/pull", {"alias": alias})
    try:
        with telling(lambda: f"{alias}: {answer['words']}" if answer["words"] else "", TELL_S):
            while not answer["here"]:
                time.sleep(LOOK_S)
                found = [row for row in daemon.get("/v1/images")["images"] if row["id"] == answer["id"]]
                if not found or found[0]["problem"]:
                    why = found[0]["problem"] if found else "it is not on the mesh's list any more"
                    raise MeshError(why if alias in why else f"{alias}: {why}")
                answer.update(here=found[0]["here"], words=found[0]["fetching"])
    except KeyboardInterrupt:
        click.echo(
            f"\nmesh: it goes on; `mesh image ls` shows how far, `mesh image pull {alias}` waits again", err=True
        )
        raise
    if as_json:
        print_json(answer)
        return
    click.echo(f"{alias} is here ({_short(answer['id'])})")


@image.command()
@click.argument("alias", type=IMAGE)
@click.argument("nodes", type=NODE, nargs=-1, required=True)
@json_option
@click.pass_context
def push(ctx: click.Context, alias: str, nodes: tuple[str, ...], as_json: bool) -> None:
    """Ask NODES to fetch an image of the mesh's list, and wait until they have it. A node's owner may refuse it."""
    daemon = client(ctx)
    order: dict[str, Any] = {"alias": alias, "nodes": list(nodes)}
    with patience("asking the nodes"):
        rows = daemon.post("/v1/images/push", order)["nodes"]

    def told() -> str:
        words = "; ".join(f"{row['node']}: {row['words']}" for row in rows if row["words"])
        return f"{alias}: {words}" if words else ""

    try:
        with telling(told, TELL_S):
            while any(not row["here"] and not row["failed"] for row in rows):
                time.sleep(LOOK_S)
                rows = _looked(daemon, order, rows)
    except KeyboardInterrupt:
        click.echo("\nmesh: they go on; `mesh image ls` shows who has it", err=True)
        raise
    if as_json:
        print_json({"alias": alias, "nodes": rows})
    else:
        for row in rows:
            click.echo(f"{row['node']} {'has it' if row['here'] else 'has not got it: ' + row['words']}")
    if any(row["failed"] for row in rows):
        raise click.exceptions.Exit(ExitCode.ERROR)


@image.command()
@click.option("--unused", type=DURATION, help="What was not used for so long (default: as image_keep_days says).")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
@click.pass_context
def prune(ctx: click.Context, unused: float | None, dry_run: bool, as_json: bool) -> None:
    """Remove images that were fetched from other nodes, and are not used any more, from this node's engine.

    The daemon does so by itself when they take more than image_keep_gib, or were unused for image_keep_days. What its owner has
    put there or named himself is never removed, nor what a container is made of, nor what was used in the last ten minutes.
    """
    with patience("removing images"):
        answer = client(ctx).post("/v1/images/prune", {"unused_s": unused, "dry_run": dry_run}, timeout_s=600)
    if as_json:
        print_json(answer)
        return
    if not answer["images"]:
        click.echo("nothing is to go: `mesh image ls` shows what was fetched", err=True)
    for row in answer["images"]:
        what = "stays" if not row["gone"] else "would go" if dry_run else "is gone"
        told = f"unused for {lasting(row['unused_s'])}: {row['words']}"
        click.echo(f"{row['alias']} ({_short(row['id'])}, {_size(row['bytes'])}) {what}; {told}")


def _looked(daemon: Client, order: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far they are; who has settled stays as it is. One that was started anew meanwhile knows nothing of it."""
    now = daemon.post("/v1/images/push", {**order, "look": True})["nodes"]
    for row in now:
        if not row["here"] and not row["words"]:
            row.update(failed=True, words="it does not fetch it any more; ask again")
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
