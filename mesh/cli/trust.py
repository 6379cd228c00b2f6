"""`mesh init`, `invite`, `join`, `pending`, `approve`, `revoke`, `trust`, `key`: who belongs."""

import getpass
import socket
import time
from typing import TYPE_CHECKING, Any

import click

from mesh.api.errors import ConfigError, ExitCode, MeshError
from mesh.api.naming import node_meant
from mesh.cli.listing import listing, show
from mesh.cli.names import NODE, WAITING
from mesh.cli.terminal import DURATION, ago, client, json_option, layout, print_json, table
from mesh.config import GOSSIP_PORT
from mesh.layout import Layout, save_membership

if TYPE_CHECKING:
    from membership.identity import Identity


KNOCK_AGAIN_S = 2.0


def _nick(where: Layout, given: str | None) -> str:
    """How this node is to be called: as its owner says, here or in config.toml, else as its host."""
    from mesh.config import load_settings

    try:
        return given or load_settings(where.config, {}).nick or socket.gethostname().split(".")[0][:40] or "node"
    except ConfigError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error


def refuse_member(where: Layout) -> None:
    if where.genesis.exists():
        raise MeshError(
            f"{where.root} belongs to a mesh already: `mesh status` shows it. For another mesh, name another --state",
            ExitCode.REFUSED,
        )


@click.command()
@click.argument("name")
@click.option("--nick", help="This node's name for people (default: `nick` in config.toml, else the host's).")
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
        genesis, chain = found_mesh(identity, name, _nick(where, nick), user or getpass.getuser(), time.time())
    except TrustError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    save_membership(where, identity, genesis, chain, ())
    click.echo(f"founded mesh {name!r}; this node is {format_id(identity.node_id)}")
    click.echo("next: `mesh up --lend` here, then `mesh invite` prints the line for other machines", err=True)


role_option = click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["provider", "user"]),
    help="What it may do: lend (provider), submit (user). Repeatable; both without it.",
)


@click.command()
@click.option("--ttl", type=DURATION, default="1d", show_default=True, help="How long the invite is good for.")
@role_option
@click.option("--user", default="", help="Who joins by it can only be this user.")
@click.pass_context
def invite(ctx: click.Context, ttl: float, roles: tuple[str, ...], user: str) -> None:
    """Print an invite. Whoever has the string can join until it ends: send it as you would send a password."""
    text = client(ctx).post("/v1/invite", {"ttl_s": ttl, "roles": roles, "user": user})["invite"]
    click.echo(text)
    click.echo("on the other machine: `mesh join INVITE && mesh up --lend`", err=True)


@click.command()
@click.argument("where_to", metavar="INVITE|HOST[:PORT]")
@click.option("--nick", help="This node's name for people (default: `nick` in config.toml, else the host's).")
@click.option("--user", help="Your name in the mesh (default: your login).")
@click.option("--mesh-id", default="", help="With HOST: join only the mesh with this id, or beginning of one.")
@click.pass_context
def join(ctx: click.Context, where_to: str, nick: str | None, user: str | None, mesh_id: str) -> None:
    """Join a mesh: by an INVITE, which admits at once, or by knocking at a node, where somebody must approve.

    An invite needs no server. After a knock this waits until `mesh approve` is given on a node that may admit.
    """
    where = layout(ctx)
    refuse_member(where)
    if where_to.strip().startswith("mesh1-"):
        _join_by_invite(where, where_to, nick, user)
    else:
        _join_by_knocking(where, where_to, nick, user, mesh_id.lower())
    click.echo("next: `mesh up --lend` to lend this machine, or `mesh up` only to use others'", err=True)


def _join_by_invite(where: Layout, text: str, nick: str | None, user: str | None) -> None:
    from membership.identity import format_id
    from membership.trust import TrustError, TrustStore, accept_invite, parse_invite

    try:
        invite_read = parse_invite(text, time.time())
        identity = _own_identity(where)
        store = TrustStore(invite_read.genesis)
        name = user or store.invited_user(invite_read) or getpass.getuser()
        chain = accept_invite(invite_read, identity.node_id, _nick(where, nick), name, time.time())
    except TrustError as error:
        raise MeshError(str(error), ExitCode.REFUSED) from error
    save_membership(where, identity, invite_read.genesis, chain, invite_read.seeds)
    click.echo(f"joined mesh {store.genesis.name!r}; this node is {format_id(identity.node_id)}")


def _join_by_knocking(where: Layout, text: str, nick: str | None, user: str | None, mesh_id: str) -> None:
    import asyncio
    import secrets

    from membership.admission import knock_at
    from membership.discovery import parse_seed
    from membership.identity import format_id, short_id
    from membership.trust import TrustError

    try:
        host, port = parse_seed(text, GOSSIP_PORT)
    except ValueError as error:
        raise MeshError(
            f"{text!r} is neither an invite (they begin with mesh1-) nor an address: {error}", ExitCode.USAGE
        ) from error
    identity = _own_identity(where)
    name, login = _nick(where, nick), user or getpass.getuser()
    told = False
    try:
        while True:
            try:
                knock = knock_at(host, port, identity, name, login, secrets.randbits(62), time.time())
                node, store, answer = asyncio.run(knock)
            except TimeoutError as error:
                raise MeshError(
                    f"nothing answers at {host}:{port}: is a node up there? (`mesh status` shows its address)"
                ) from error
            except socket.gaierror as error:
                text = f"{host!r} is no host that is known here, and no invite (they begin with mesh1-)"
                raise MeshError(text, ExitCode.NOT_FOUND) from error
            except OSError as error:
                raise MeshError(f"cannot reach {host}:{port}: {error.strerror or error}") from error
            except TrustError as error:
                raise MeshError(f"{host}:{port}: {error}", ExitCode.REFUSED) from error
            if not store.mesh_id.hex().startswith(mesh_id):
                raise MeshError(f"{host}:{port} is of mesh {store.mesh_id.hex()}, not {mesh_id}", ExitCode.REFUSED)
            if answer.state == "revoked":
                raise MeshError(f"this node's key was shut out of mesh {store.genesis.name!r}", ExitCode.REFUSED)
            if answer.state == "full":
                raise MeshError(
                    "too many wait at that node already: try another one, or ask for an invite", ExitCode.REFUSED
                )
            if answer.state == "admitted":
                break
            if not told:
                told = True
                key_text = format_id(identity.node_id)
                click.echo(
                    f"knocked at {short_id(node)} of mesh {store.genesis.name!r} (id {store.mesh_id.hex()}; compare it with "
                    f"`mesh status` there)\nthis node is {key_text}\nwaiting for somebody who may admit to run: "
                    f"mesh approve {key_text[:7]}",
                    err=True,
                )
            time.sleep(KNOCK_AGAIN_S)
        if store.check_chain(answer.granted, time.time()).node_id != identity.node_id:
            raise MeshError("the certificate that came is for somebody else", ExitCode.REFUSED)
    except TrustError as error:
        raise MeshError(str(error), ExitCode.REFUSED) from error
    except KeyboardInterrupt:
        raise MeshError("it still waits, for an hour: run the same command again to go on", ExitCode.REFUSED) from None
    save_membership(where, identity, answer.genesis, answer.granted, (f"{host}:{port}",))
    click.echo(f"joined mesh {store.genesis.name!r}; this node is {format_id(identity.node_id)}")


@click.command()
@listing
@click.pass_context
def pending(ctx: click.Context, /, **form: bool) -> None:
    """Who has knocked at any node of the mesh (`mesh join HOST`), and waits to be let in."""
    daemon = client(ctx)
    show(
        form,
        lambda: daemon.get("/v1/pending"),
        lambda answer: [row["node"] for row in answer["pending"]],
        _draw_pending,
    )


def _draw_pending(answer: dict[str, Any]) -> None:
    rows = [
        [row["nick"], row["user"], row["host"], ago(row["since_unix"] * 1000), row["node"]] for row in answer["pending"]
    ]
    table(["NODE", "USER", "FROM", "SINCE", "KEY"], rows)
    if rows:
        click.echo("names are what they call themselves; compare the key. next: `mesh approve KEY`", err=True)


@click.command()
@click.argument("node", type=WAITING)
@click.option("--nick", default="", help="Call it so, instead of what it calls itself.")
@click.option("--user", default="", help="Its user is this one, whatever it says.")
@role_option
@click.option("--admit", is_flag=True, help="It may itself invite and approve others. Only the founder gives that.")
@click.pass_context
def approve(ctx: click.Context, node: str, nick: str, user: str, roles: tuple[str, ...], admit: bool) -> None:
    """Let in NODE, one of `mesh pending`: a nick, or the beginning of a key."""
    order = {"node": node, "nick": nick, "user": user, "roles": roles, "admit": admit}
    answer = client(ctx).post("/v1/approve", order)
    click.echo(f"let in {answer['nick']} (user {answer['user']}, {answer['node']})")


@click.command()
@click.argument("node", type=NODE)
@click.option("--reason", default="", help="Why; everybody can read it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def revoke(ctx: click.Context, node: str, reason: str, yes: bool) -> None:
    """Shut NODE out of the mesh for good, by its key. On the node that founded the mesh; cannot be taken back."""
    daemon = client(ctx)
    if not yes:
        nicks = {row["node"]: row["nick"] for row in daemon.get("/v1/nodes")["nodes"]}
        meant = node_meant(node, nicks, whole=True)
        click.confirm(f"shut {nicks[meant]} ({meant}) out for good?", abort=True)
    answer = daemon.post("/v1/revoke", {"node": node, "reason": reason})
    word = "is shut out already" if answer["already"] else "is shut out"
    click.echo(f"{answer['nick']} ({answer['node']}) {word}")
    click.echo("invites that are still good admit new keys: `mesh trust ls` shows who comes", err=True)


@click.group()
def trust() -> None:
    """Who belongs to the mesh."""


@trust.command("ls")
@listing
@click.pass_context
def trust_ls(ctx: click.Context, /, **form: bool) -> None:
    """Everybody with a certificate, until when, and who was shut out."""
    daemon = client(ctx)
    show(
        form, lambda: daemon.get("/v1/trust"), lambda answer: [row["node"] for row in answer["members"]], _draw_members
    )


def _draw_members(answer: dict[str, Any]) -> None:
    rows = []
    for member in answer["members"]:
        standing = "unknown"
        if member["ends_unix"] is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(member["ends_unix"]))
            standing = f"ended {day}" if member["ended"] else f"until {day}"
        if member["revoked_unix"] is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(member["revoked_unix"]))
            standing = f"revoked {day}" + (f": {member['reason']}" if member["reason"] else "")
        rows.append([member["nick"], member["user"], _role(member), standing, member["node"]])
    table(["NODE", "USER", "ROLE", "STANDING", "KEY"], rows, spare=["USER"])


def _role(member: dict[str, Any]) -> str:
    if member["founder"]:
        return "founder"
    words = ["admitter"] if member["can_admit"] else []
    return ",".join([*words, *member["roles"]]) or "-"


@click.group()
def key() -> None:
    """This node's own key."""


@key.command("show")
@json_option
@click.pass_context
def key_show(ctx: click.Context, as_json: bool) -> None:
    """This node's id, which is its public key; made now if there is none. Needs no daemon, and no mesh.

    Give it to whoever keeps the mesh's allow list, and `mesh join HOST` lets this node in without waiting.
    """
    from membership.identity import format_id

    where = layout(ctx)
    node = format_id(_own_identity(where).node_id)
    if as_json:
        print_json({"schema": 1, "node": node, "file": str(where.key)})
        return
    click.echo(node)


def _own_identity(where: Layout) -> "Identity":
    from membership.identity import Identity, IdentityError

    try:
        where.make()
        if where.key.exists():
            return Identity.load(where.key)
        identity = Identity.generate()
        identity.save(where.key)
    except (IdentityError, ConfigError) as error:
        raise MeshError(str(error)) from error
    except OSError as error:
        raise MeshError(f"cannot write {where.root}: {error.strerror}. Name another place with --state DIR.") from error
    return identity
