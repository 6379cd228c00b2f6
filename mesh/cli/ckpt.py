"""`mesh ckpt`: the checkpoints in this node's store."""

from pathlib import Path
from typing import Any

import click

from mesh.amount import amount
from mesh.api.errors import ExitCode
from mesh.cli.listing import listing, show
from mesh.cli.names import JOB
from mesh.cli.telling import patience
from mesh.cli.terminal import DURATION, ago, client, json_option, print_json, quote, table


@click.group()
def ckpt() -> None:
    """The checkpoints in this node's store: what is kept here, and whether it is whole."""


@ckpt.command("ls")
@click.argument("job", type=JOB, required=False)
@listing
@click.pass_context
def list_(ctx: click.Context, /, job: str | None, **form: bool) -> None:
    """List what this node keeps, of JOB or of all: checkpoints, working directories, results."""
    daemon, path = client(ctx), "/v1/checkpoints" + (f"?job={quote(job)}" if job else "")
    show(form, lambda: daemon.get(path), lambda answer: [row["id"] for row in answer["checkpoints"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    table(
        ["ID", "JOB", "KIND", "NUMBER", "SIZE", "FILES", "SAVED", "USE", "ALSO ON"],
        [
            [
                row["id"][:12],
                row["name"] or (row["job"][:8] if row["job"].strip("a") else "-"),  # many may share a working directory
                row["kind"],
                str(row["seq"]),
                amount(row["bytes"]),
                str(row["files"]),
                ago(row["created_unix"] * 1000),
                row["use"],
                ", ".join(row["holders"]) or "-",
            ]
            for row in answer["checkpoints"]
        ],
        spare=["FILES", "NUMBER", "SAVED", "KIND"],
    )
    quota = f" of {amount(answer['quota_bytes'])}" if answer["quota_bytes"] is not None else ""
    theirs = f", {amount(answer['foreign_bytes'])} of it of other users" if answer["foreign_bytes"] else ""
    if answer["foreign_quota_bytes"] is not None:
        theirs += f" (they may have {amount(answer['foreign_quota_bytes'])})"
    click.echo(
        f"\n{amount(answer['stored_bytes'])}{quota} on this disk{theirs}, after compression; what is alike is kept once"
    )


@ckpt.command()
@json_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Read everything back and compare it with its hashes; fetch what is damaged from other nodes."""
    with patience("reading every chunk"):
        answer = client(ctx).post("/v1/checkpoints/verify", {}, timeout_s=86_400)
    if as_json:
        print_json(answer)
    else:
        _tell(answer)
    if answer["lost"]:
        raise click.exceptions.Exit(ExitCode.ERROR)


def _tell(answer: dict[str, Any]) -> None:
    click.echo(f"{answer['chunks']} chunks read, {answer['bad_chunks']} damaged")
    if answer["quarantined"]:
        click.echo(f"put away in {answer['quarantine']}: {', '.join(answer['quarantined'])}")
    for identity in answer["repaired"]:
        click.echo(f"checkpoint {identity[:12]}: whole again, from other nodes")
    for identity, why in answer["lost"].items():
        click.echo(f"checkpoint {identity[:12]}: cannot be restored from here: {why}", err=True)


@ckpt.command()
@click.argument("job", type=JOB)
@click.argument("directory", type=click.Path())
@click.option("--seq", type=click.IntRange(min=0), help="A checkpoint by its number, if it is in this node's store.")
@json_option
@click.pass_context
def pull(ctx: click.Context, job: str, directory: str, seq: int | None, as_json: bool) -> None:
    """Write the files of JOB's last committed checkpoint to DIRECTORY, which must be new."""
    order = {"job": job, "destination": str(Path(directory).resolve()), "seq": seq}
    with patience("fetching the checkpoint"):
        answer = client(ctx).post("/v1/checkpoints/pull", order, timeout_s=86_400)
    if as_json:
        print_json(answer)
        return
    click.echo(
        f"checkpoint {answer['seq']}: {answer['files']} files, {amount(answer['bytes'])} in {answer['destination']}"
    )


@ckpt.command()
@click.argument("ids", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Even what a job may need.")
@json_option
@click.pass_context
def rm(ctx: click.Context, ids: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove checkpoints from this node's store, by the beginnings of their IDS. Other nodes keep theirs."""
    answer = client(ctx).post("/v1/checkpoints/remove", {"ids": list(ids), "force": force})
    if as_json:
        print_json(answer)
        return
    for identity in answer["removed"]:
        click.echo(identity[:12])
    click.echo("`mesh ckpt gc` frees their room; it is freed by itself within the hour", err=True)


@ckpt.command()
@click.option(
    "--older", type=DURATION, default=900.0, show_default="15m", help="Only what nobody has used for so long."
)
@json_option
@click.pass_context
def gc(ctx: click.Context, older: float, as_json: bool) -> None:
    """Free the room of what nothing needs any more."""
    with patience("collecting"):
        answer = client(ctx).post("/v1/checkpoints/collect", {"min_age_s": older}, timeout_s=86_400)
    if as_json:
        print_json(answer)
        return
    click.echo(f"{amount(answer['bytes'])} freed; {amount(answer['stored_bytes'])} are kept")
