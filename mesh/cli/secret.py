"""`mesh secret`: the user's secrets on this node, for `mesh run --secret NAME`."""

import sys
from pathlib import Path
from typing import Any

import click

from mesh.cli.listing import listing, show
from mesh.cli.names import SECRET
from mesh.cli.output import print_json, say, table
from mesh.cli.terminal import ago, client, json_option
from mesh.util.errors import ExitCode, MeshError

MOST_READ = 1 << 16  # more than the daemon takes


@click.group()
def secret() -> None:
    """Keep secrets for jobs on this node, as API keys. `mesh run --secret NAME` gives one to a job."""


@secret.command("set")
@click.argument("name", type=SECRET)
@click.option("--file", "path", type=click.Path(dir_okay=False), help="Take the bytes of this file as they are.")
@json_option
@click.pass_context
def set_(ctx: click.Context, name: str, path: str | None, as_json: bool) -> None:
    """Set the secret NAME: asked for without an echo, or read from standard input (less a line break at its end).

    Jobs that have an older value keep it.
    """
    from base64 import b64encode

    value = _value(name, path)
    if len(value) > MOST_READ:
        raise MeshError(f"the value of {name} is longer than a secret may be (16 KiB)", ExitCode.USAGE)
    order = {"name": name, "value": b64encode(value).decode()}
    answer = client(ctx).post("/v1/secrets", order)
    if as_json:
        print_json(answer)
        return
    say(f"{name} is {'replaced' if answer['replaced'] else 'set'}: `mesh run --secret {name} -- COMMAND`")


def _value(name: str, path: str | None) -> bytes:
    if path is not None:
        try:
            with Path(path).open("rb") as file:
                return file.read(MOST_READ + 1)
        except OSError as error:
            raise click.BadParameter(f"cannot read {path}: {error.strerror}", param_hint="--file") from error
    if sys.stdin.isatty():
        from getpass import getpass

        return getpass(f"Value of {name}: ").encode()
    return sys.stdin.buffer.read(MOST_READ + 1).removesuffix(b"\n").removesuffix(b"\r")


@secret.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List the names of the secrets on this node. No command shows a value."""
    daemon = client(ctx)
    show(form, lambda: daemon.get("/v1/secrets"), lambda answer: [row["name"] for row in answer["secrets"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    table(["NAME", "SET"], [[row["name"], f"{ago(row['changed_unix'] * 1000)} ago"] for row in answer["secrets"]])


@secret.command()
@click.argument("names", type=SECRET, nargs=-1, required=True)
@json_option
@click.pass_context
def rm(ctx: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """Remove secrets from this node. Jobs that have them keep them: to undo that, revoke the key where you got it."""
    answer = client(ctx).post("/v1/secrets/remove", {"names": list(names)})
    if as_json:
        print_json(answer)
        return
    for name in answer["removed"]:
        say(f"{name} is removed")
