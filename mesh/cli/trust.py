"""`mesh init`, `mesh invite`, `mesh join`: founding a mesh and getting into one."""

import getpass
import socket
import time
from typing import TYPE_CHECKING

import click

from mesh.api.errors import ExitCode, MeshError
from mesh.cli.terminal import DURATION, client, layout
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
