"""`mesh init`, `mesh invite`, `mesh join`: founding a mesh and getting into one."""

import getpass
import socket
import time
from typing import TYPE_CHECKING

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import DURATION, client, json_option, layout, print_json, table
from mesh.config import Layout, save_membership

if TYPE_CHECKING:
    from membership.identity import Identity


def default_nick() -> str:
    return socket.gethostname().split(".")[0][:40] or "node"


def refuse_member(where: Layout) -> None:
    if where.genesis.exists():
        raise MeshError(
            f"{where.root} belongs to a mesh already: `mesh status` shows it. For another mesh, name another --state",
            ExitCode.REFUSED,
        )


@click.command()
@click.argument("name")
@click.option("--nick", help="This node's name for people (default: the host's).")
@click.option("--user", help="Your name in the mesh (default: your login).")
@click.pass_context
def init(ctx: click.Context, name: str, nick: str | None, user: str | None) -> None:
    """Found a mesh called NAME, with this node as its first member."""
    from membership.identity import format_id
    from membership.trust import TrustError, found_mesh

    where = layout(ctx)
    refuse_member(where)
    identity = _own_identity(where)
    try:
        genesis, chain = found_mesh(identity, name, nick or default_nick(), user or getpass.getuser(), time.time())
    except TrustError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    save_membership(where, genesis, chain, ())
    click.echo(f"founded mesh {name!r}; this node is {format_id(identity.node_id)}")
    click.echo("next: `mesh up --lend` here, then `mesh invite` prints the line for other machines", err=True)


@click.command()
@click.option("--ttl", type=DURATION, default="1d", show_default=True, help="How long the invite is good for.")
@click.pass_context
def invite(ctx: click.Context, ttl: float) -> None:
    """Print an invite. Whoever has the string can join until it ends: send it as you would send a password."""
    text = client(ctx).post("/v1/invite", {"ttl_s": ttl})["invite"]
    click.echo(text)
    click.echo("on the other machine: `mesh join INVITE && mesh up --lend`", err=True)


@click.command()
@click.argument("invite_text", metavar="INVITE")
@click.option("--nick", help="This node's name for people (default: the host's).")
@click.option("--user", help="Your name in the mesh (default: your login).")
@click.pass_context
def join(ctx: click.Context, invite_text: str, nick: str | None, user: str | None) -> None:
    """Join the mesh that INVITE comes from. Needs no server: the invite itself admits this node."""
    from membership.identity import format_id
    from membership.trust import TrustError, TrustStore, accept_invite, parse_invite

    where = layout(ctx)
    refuse_member(where)
    try:
        invite_read = parse_invite(invite_text, time.time())
        identity = _own_identity(where)
        chain = accept_invite(
            invite_read, identity.node_id, nick or default_nick(), user or getpass.getuser(), time.time()
        )
        name = TrustStore(invite_read.genesis).genesis.name
    except TrustError as error:
        raise MeshError(str(error), ExitCode.REFUSED) from error
    save_membership(where, invite_read.genesis, chain, invite_read.seeds)
    click.echo(f"joined mesh {name!r}; this node is {format_id(identity.node_id)}")
    click.echo("next: `mesh up --lend` to lend this machine, or `mesh up` only to use others'", err=True)


@click.command()
@click.argument("node")
@click.option("--reason", default="", help="Why; everybody can read it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def revoke(ctx: click.Context, node: str, reason: str, yes: bool) -> None:
    """Shut NODE out of the mesh for good, by its key. On the node that founded the mesh; cannot be taken back."""
    if not yes:
        click.confirm(f"shut {node} out for good?", abort=True)
    answer = client(ctx).post("/v1/revoke", {"node": node, "reason": reason})
    word = "is shut out already" if answer["already"] else "is shut out"
    click.echo(f"{answer['nick']} ({answer['node']}) {word}")
    click.echo("invites that are still good admit new keys: `mesh trust ls` shows who comes", err=True)


@click.group()
def trust() -> None:
    """Who belongs to the mesh."""


@trust.command("ls")
@json_option
@click.pass_context
def trust_ls(ctx: click.Context, as_json: bool) -> None:
    """Everybody with a certificate, until when, and who was shut out."""
    answer = client(ctx).get("/v1/trust")
    if as_json:
        print_json(answer)
        return
    rows = []
    for member in answer["members"]:
        standing = "unknown"
        if member["ends_unix"] is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(member["ends_unix"]))
            standing = f"ended {day}" if member["ended"] else f"until {day}"
        if member["revoked_unix"] is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(member["revoked_unix"]))
            standing = f"revoked {day}" + (f": {member['reason']}" if member["reason"] else "")
        rows.append(
            [member["nick"], member["user"], "founder" if member["founder"] else "member", member["node"], standing]
        )
    table(["NODE", "USER", "ROLE", "KEY", "STANDING"], rows)


@click.group()
def key() -> None:
    """This node's own key."""


@key.command("show")
@json_option
@click.pass_context
def key_show(ctx: click.Context, as_json: bool) -> None:
    """This node's id, which is its public key. Needs no daemon."""
    from membership.identity import Identity, IdentityError, format_id

    where = layout(ctx)
    if not where.key.exists():
        raise MeshError(f"{where.root} has no key yet: `mesh init` or `mesh join` makes one", ExitCode.NOT_FOUND)
    try:
        node = format_id(Identity.load(where.key).node_id)
    except IdentityError as error:
        raise MeshError(str(error)) from error
    if as_json:
        print_json({"schema": 1, "node": node, "file": str(where.key)})
        return
    click.echo(node)


def _own_identity(where: Layout) -> "Identity":
    from membership.identity import Identity, IdentityError

    try:
        where.root.mkdir(parents=True, exist_ok=True)
        if where.key.exists():
            return Identity.load(where.key)
        identity = Identity.generate()
        identity.save(where.key)
    except IdentityError as error:
        raise MeshError(str(error)) from error
    except OSError as error:
        raise MeshError(f"cannot write {where.root}: {error.strerror}. Name another place with --state DIR.") from error
    return identity
