"""`mesh ckpt`: the checkpoints stored on this node."""

from pathlib import Path
from typing import Any

import click

from mesh.cli.listing import listing, show
from mesh.cli.names import JOB
from mesh.cli.output import print_json, say, table
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import DURATION, ago, client, json_option, quote
from mesh.util.byte_text import amount
from mesh.util.errors import ExitCode


@click.group()
def ckpt() -> None:
    """List, verify and clean up the checkpoints stored on this node."""


@ckpt.command("ls")
@click.argument("job", type=JOB, required=False)
@listing
@click.pass_context
def list_(ctx: click.Context, /, job: str | None, **form: bool) -> None:
    """List the checkpoints, working directories and results of JOB, or of all jobs."""
    daemon, path = client(ctx), "/v1/checkpoints" + (f"?job={quote(job)}" if job else "")
    show(form, lambda: daemon.get(path), lambda answer: [row["id"] for row in answer["checkpoints"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    table(
        ["ID", "JOB", "KIND", "NUMBER", "SIZE", "FILES", "SAVED", "USE", "ALSO ON"],
        [
            [
                row["id"][:12],
                row["name"] or (row["job"][:8] if row["job"].strip("a") else "-"),  # jobs may share a working directory
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
    theirs = f", {amount(answer['foreign_bytes'])} of them of other users" if answer["foreign_bytes"] else ""
    if answer["foreign_quota_bytes"] is not None:
        theirs += f" (at most {amount(answer['foreign_quota_bytes'])})"
    say()
    say(f"{amount(answer['stored_bytes'])}{quota} on this disk{theirs}, compressed and deduplicated")


@ckpt.command()
@json_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Compare everything stored here with its hashes, and repair damage from other nodes."""
    with waiting_for("reading every chunk"):
        answer = client(ctx).post("/v1/checkpoints/verify", {}, timeout_s=86_400)
    if as_json:
        print_json(answer)
    else:
        _draw_verified(answer)
    if answer["lost"]:
        raise click.exceptions.Exit(ExitCode.ERROR)


def _draw_verified(answer: dict[str, Any]) -> None:
    say(f"{answer['chunks']} chunks read, {answer['bad_chunks']} damaged")
    if answer["quarantined"]:
        say(f"moved to {answer['quarantine']}: {', '.join(answer['quarantined'])}")
    for identity in answer["repaired"]:
        say(f"checkpoint {identity[:12]}: repaired from other nodes")
    for identity, why in answer["lost"].items():
        say(f"checkpoint {identity[:12]}: cannot be restored: {why}", err=True)


@ckpt.command()
@click.argument("job", type=JOB)
@click.argument("directory", type=click.Path())
@click.option(
    "--seq",
    type=click.IntRange(min=0),
    help="Number of the checkpoint, if it is stored on this node (default: the last one).",
)
@json_option
@click.pass_context
def extract(ctx: click.Context, job: str, directory: str, seq: int | None, as_json: bool) -> None:
    """Write the files of JOB's last committed checkpoint to a new DIRECTORY."""
    request = {"job": job, "destination": str(Path(directory).resolve()), "seq": seq}
    with waiting_for("fetching the checkpoint"):
        answer = client(ctx).post("/v1/checkpoints/pull", request, timeout_s=86_400)
    if as_json:
        print_json(answer)
        return
    say(f"checkpoint {answer['seq']}: {answer['files']} files, {amount(answer['bytes'])} in {answer['destination']}")


@ckpt.command()
@click.argument("ids", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also remove what a job may need.")
@json_option
@click.pass_context
def rm(ctx: click.Context, ids: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove checkpoints from this node, by the beginnings of their IDS. Other nodes keep their copies."""
    answer = client(ctx).post("/v1/checkpoints/remove", {"ids": list(ids), "force": force})
    if as_json:
        print_json(answer)
        return
    for identity in answer["removed"]:
        say(identity[:12])
    say("their space is freed within the hour, or now by `mesh ckpt gc`", err=True)


@ckpt.command()
@click.option(
    "--older", type=DURATION, default=900.0, show_default="15m", help="Only what has not been used for this long."
)
@json_option
@click.pass_context
def gc(ctx: click.Context, older: float, as_json: bool) -> None:
    """Free the space of data that nothing needs any more."""
    with waiting_for("freeing space"):
        answer = client(ctx).post("/v1/checkpoints/collect", {"min_age_s": older}, timeout_s=86_400)
    if as_json:
        print_json(answer)
        return
    say(f"{amount(answer['bytes'])} freed; {amount(answer['stored_bytes'])} stored")
