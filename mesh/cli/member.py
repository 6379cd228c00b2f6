"""`mesh init`, `mesh join` and `mesh member`: who belongs to the mesh."""

import getpass
import re
import socket
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from membership.addresses import address_text, parse_seed
from mesh.cli.listing import listing, show
from mesh.cli.names import NODE, WAITING
from mesh.cli.output import ask_secret, confirm, print_json, say, table, to_copy
from mesh.cli.progress import waiting_for
from mesh.cli.terminal import DURATION, ago, client, json_option, layout
from mesh.daemon.config import GOSSIP_PORT
from mesh.daemon.layout import Layout, save_membership
from mesh.util.duration import lasting
from mesh.util.errors import ConfigError, ExitCode, MeshError
from mesh.util.lookup import node_meant
from mesh.util.text import hours, plural

if TYPE_CHECKING:
    from membership.admission import JoinAnswer
    from membership.identity import Identity
    from membership.trust import Credentials, Grant, TrustStore

FIRST_PAUSE_S, ASK_AGAIN_S = 0.25, 2.0
MAX_INVITE_CHARACTERS = 16_384  # an invite has some 700
USAGE_HEADS = {"user": "USER", "node": "NODE", "zone": "ZONE", "month": "MONTH"}

nick_option = click.option("--nick", help="Name of this node (default: `nick` in config.toml, else the host name).")
user_option = click.option("--user", help="Your name in the mesh (default: of the invite, or your login).")
role_option = click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["provider", "user"]),
    help="Permission: provider may lend, user may submit. Repeatable; default: both.",
)


@click.command()
@click.argument("name")
@nick_option
@user_option
@click.option("--founder", "founders", multiple=True, metavar="KEY", help="Key of another founder (`mesh member key`).")
@click.option("--quorum", type=int, default=1, show_default=True, help="Founders that must agree to revoke or promote.")
@json_option
@click.pass_context
def init(
    ctx: click.Context,
    name: str,
    nick: str | None,
    user: str | None,
    founders: tuple[str, ...],
    quorum: int,
    as_json: bool,
) -> None:
    """Found a mesh called NAME with this node as its first member.

    Further founders join as `mesh join HOST` and are admitted at once. Each of them can admit members; to revoke a key, or to let
    a node admit others, a quorum of the founders must agree.
    """
    from membership.identity import parse_id
    from membership.trust import found_mesh

    where = layout(ctx)
    _refuse_member(where)
    identity, login = _own_identity(where), user or _login()
    try:
        others = [parse_id(key) for key in founders]
        genesis, chain = found_mesh(identity, name, _nick(where, nick), login, time.time(), others, quorum)
    except ValueError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    save_membership(where, genesis, chain, ())
    _print_member("founded", name, login, identity, as_json)
    say(
        "next: `mesh up --lend` here, then `mesh member invite NAME` for another person, or --mine for a machine of yours",
        err=True,
    )


@click.command()
@click.argument("where_to", metavar="[INVITE|HOST[:PORT]]", required=False)
@click.option("--file", "file", type=click.File(), help="Read the invite from this file (-: standard input).")
@nick_option
@user_option
@click.option("--mesh-id", default="", help="With HOST: join only the mesh whose id begins so.")
@click.option(
    "--ssh-identity",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="SSH key that an invite is bound to (default: found in ~/.ssh or ssh-agent).",
)
@json_option
@click.pass_context
def join(
    ctx: click.Context,
    where_to: str | None,
    file: IO[str] | None,
    nick: str | None,
    user: str | None,
    mesh_id: str,
    ssh_identity: Path | None,
    as_json: bool,
) -> None:
    """Join a mesh with an INVITE, or ask the node at HOST and wait for an approval.

    The node that made the invite admits this one. A request to HOST waits for `mesh member approve` on a node that may admit
    others. Without an argument, the invite is asked for, so that it is in no list of processes; `-` reads standard input.
    """
    where = layout(ctx)
    _refuse_member(where)
    text = _invite_text(where_to, file)
    if text.startswith("mesh1-"):
        request = _invited(where, text, nick, user, ssh_identity)
    else:
        request = _asking(where, text, nick, user, mesh_id.lower())
    name, login = _ask_until_admitted(where, request)
    _print_member("joined", name, login, request.identity, as_json)
    say("next: `mesh up --lend` to lend this machine, or `mesh up` to use others only", err=True)


def _invite_text(where_to: str | None, file: IO[str] | None) -> str:
    """Return the invite or address: the argument, or from a file, standard input or a prompt."""
    if file is not None and where_to is not None:
        raise MeshError("give the invite or --file, not both", ExitCode.USAGE)
    if file is not None:
        return file.read(MAX_INVITE_CHARACTERS).strip()
    if where_to == "-":
        return sys.stdin.read(MAX_INVITE_CHARACTERS).strip()
    if where_to is None:
        if not sys.stdin.isatty():
            raise MeshError("which mesh? Give an INVITE, the HOST of a member, or - for standard input", ExitCode.USAGE)
        return ask_secret("invite, or host of a member (not shown)").strip()
    return where_to.strip()


def _refuse_member(where: Layout) -> None:
    if where.genesis.exists():
        raise MeshError(
            f"{where.root} belongs to a mesh already (`mesh status`): `mesh leave` leaves it, --state names another node",
            ExitCode.REFUSED,
        )


def _nick(where: Layout, given: str | None) -> str:
    """Return this node's name: as given here or in config.toml, else the host's."""
    from mesh.daemon.config import load_settings

    try:
        return given or load_settings(where.config, {}).nick or socket.gethostname().split(".")[0][:40] or "node"
    except ConfigError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error


def _own_identity(where: Layout) -> "Identity":
    """Load this node's key; make one if there is none."""
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
        raise MeshError(
            f"cannot write {where.root}: {error.strerror}. Choose another directory with --state"
        ) from error
    return identity


def _login() -> str:
    """Return this user's login, in the letters that a name in the mesh may have."""
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", getpass.getuser())[:64]


def _print_member(verb: str, name: str, user: str, identity: "Identity", as_json: bool) -> None:
    from membership.identity import format_id

    node = format_id(identity.node_id)
    if as_json:
        print_json({"mesh": name, "user": user, "node": node})
    else:
        say(f"{verb} mesh {name!r} as {user}; this node is {node}")


class _Request(NamedTuple):
    """A join request, and the addresses of nodes to ask, the first one that answers. `issuer` made the invite.

    `expected` is the user whose machine this one shall become, empty if that is not known.
    """

    identity: "Identity"
    nick: str
    user: str
    expected: str
    addresses: tuple[tuple[str, int], ...]
    mesh_id: str
    grant: bytes = b""
    proof: bytes = b""
    ssh_proof: bytes = b""
    issuer: str = ""


def _invited(where: Layout, text: str, nick: str | None, user: str | None, ssh_identity: Path | None) -> _Request:
    from membership.trust import TrustStore, WrongTerms, parse_invite, prove_invite

    try:
        invite = parse_invite(text, time.time())
        store = TrustStore(invite.genesis)
        grant = store.open_grant(invite.grant)[1] if invite.grant else None
        addresses = tuple(parse_seed(seed, GOSSIP_PORT) for seed in invite.seeds)
    except WrongTerms as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except ValueError as error:
        raise MeshError(str(error), ExitCode.REFUSED) from error
    if grant is not None and user is not None and (grant.mine or (grant.uses == 1 and grant.user != user)):
        whom = "a machine of the user who made it" if grant.mine else f"user {grant.user!r}"
        raise MeshError(f"this invite is for {whom}, not for user {user!r}: leave out --user", ExitCode.REFUSED)
    if ssh_identity is not None and (grant is None or not grant.ssh_key):
        raise MeshError("this invite is bound to no SSH key: leave out --ssh-identity", ExitCode.USAGE)
    identity, login = _own_identity(where), user or _login()
    return _Request(
        identity,
        _nick(where, nick),
        login,
        grant.user if grant is not None else login,
        addresses,
        store.mesh_id.hex(),
        invite.grant,
        prove_invite(invite, identity.node_id, login),
        _prove_ssh_key(store.mesh_id, grant, identity, ssh_identity) if grant is not None and grant.ssh_key else b"",
        invite.issuer,
    )


def _prove_ssh_key(mesh_id: bytes, grant: "Grant", identity: "Identity", file: Path | None) -> bytes:
    from membership.trust import SSH_NAMESPACE, ssh_message
    from mesh.cli.ssh_signing import sign

    return sign(grant.ssh_key, file, SSH_NAMESPACE, ssh_message(mesh_id, grant, identity.node_id))


def _asking(where: Layout, text: str, nick: str | None, user: str | None, mesh_id: str) -> _Request:

    try:
        address = parse_seed(text, GOSSIP_PORT)
    except ValueError as error:
        raise MeshError(
            f"{text!r} is neither an invite (they begin with mesh1-) nor an address: {error}", ExitCode.USAGE
        ) from error
    login = user or _login()
    return _Request(_own_identity(where), _nick(where, nick), login, login, (address,), mesh_id)


def _ask_until_admitted(where: Layout, request: _Request) -> tuple[str, str]:
    """Ask to be admitted until a node decides; return the names of the mesh and of the user."""
    from membership.trust import TrustError

    announced, pause_s = False, FIRST_PAUSE_S
    try:
        while True:
            (host, port), node, store, answer = _ask_any(request)
            mesh = store.genesis.name
            if not store.mesh_id.hex().startswith(request.mesh_id):
                raise MeshError(
                    f"{address_text(host, port)} belongs to mesh {store.mesh_id.hex()}, not {request.mesh_id}",
                    ExitCode.REFUSED,
                )
            if answer.state == "revoked":
                raise MeshError(f"the key of this node was revoked in mesh {mesh!r}", ExitCode.REFUSED)
            if answer.state == "refused":
                raise MeshError(answer.problem, ExitCode.REFUSED)
            if answer.state == "full" and not request.grant:
                raise MeshError(
                    "too many requests wait at that node: ask another node, or use an invite", ExitCode.REFUSED
                )
            if answer.state == "admitted":
                break
            if not announced:
                announced = True
                _announce_waiting(request, node, store)
            time.sleep(pause_s)
            pause_s = min(ASK_AGAIN_S, 2 * pause_s)
        credentials = store.check_chain(answer.granted, time.time())
        if credentials.node_id != request.identity.node_id:
            raise MeshError("the certificate in the answer belongs to another node", ExitCode.REFUSED)
        _refuse_another_user(request, credentials)
    except TrustError as error:
        raise MeshError(str(error), ExitCode.REFUSED) from error
    except KeyboardInterrupt:
        raise MeshError(
            "the request stays for an hour: run the same command again to go on", ExitCode.REFUSED
        ) from None
    seeds = dict.fromkeys([(host, port), *request.addresses])
    save_membership(where, answer.genesis, answer.granted, tuple(address_text(*seed) for seed in seeds))
    return mesh, credentials.user


def _refuse_another_user(request: _Request, credentials: "Credentials") -> None:
    """MeshError if this node became a machine of a user who was not asked for: their programs would count as its owner's."""
    is_own = credentials.user_key == request.identity.node_id  # no other machine has this user, whatever its name is
    if is_own or request.expected in {credentials.user, ""}:
        return
    user = credentials.user
    advice = (
        f"do not use this invite, and tell {request.issuer}"
        if request.grant
        else f"if you are {user}, add --user {user}"
    )
    raise MeshError(
        f"this node was admitted as a machine of {user}, not of {request.expected}: {user} could run programs on it "
        f"without a container. It did not join; {advice}",
        ExitCode.REFUSED,
    )


def _announce_waiting(request: _Request, node: bytes, store: "TrustStore") -> None:
    from membership.identity import format_id, short_id

    key = format_id(request.identity.node_id)
    if request.grant:
        say(
            f"asked {short_id(node)}; waiting for {request.issuer}, the node that made the invite: its daemon has "
            "to run (`mesh up` there)",
            err=True,
        )
        return
    mesh = f"mesh {store.genesis.name!r} (id {store.mesh_id.hex()}; compare it with `mesh status` there)"
    say(f"asked {short_id(node)} of {mesh}", err=True)
    say(f"this node is {key}", err=True)
    say(f"waiting until a node that may admit others runs: mesh member approve {key[:7]}", err=True)


def _ask_any(request: _Request) -> "tuple[tuple[str, int], bytes, TrustStore, JoinAnswer]":
    """Send the join request to the first address that answers; return the address, the node, its trust store and its answer."""
    problems: list[MeshError] = []
    for address in request.addresses:
        try:
            return (address, *_ask(*address, request))
        except MeshError as error:
            problems.append(error)
    if not request.issuer:
        raise problems[0] if problems else MeshError("the invite has no address: give the HOST of a member instead")
    texts = "; ".join(str(problem) for problem in problems) or "it has no address"
    raise MeshError(f"no node of the invite answers ({texts}): start {request.issuer} (`mesh up` there)")


def _ask(host: str, port: int, request: _Request) -> "tuple[bytes, TrustStore, JoinAnswer]":
    """Send one join request; return the asked node, its mesh's trust store and its answer."""
    import asyncio
    import secrets

    from membership.admission import request_join
    from membership.trust import TrustError

    nonce = secrets.randbits(62)
    proofs = request.grant, request.proof, request.ssh_proof
    asked = request_join(host, port, request.identity, request.nick, request.user, nonce, time.time(), *proofs)
    try:
        return asyncio.run(asked)
    except TimeoutError as error:
        raise MeshError(
            f"no answer from {address_text(host, port)}: does a node run there? (`mesh status` there shows its address)"
        ) from error
    except socket.gaierror as error:
        text = f"{host!r} is neither a known host nor an invite (they begin with mesh1-)"
        raise MeshError(text, ExitCode.NOT_FOUND) from error
    except OSError as error:
        raise MeshError(f"cannot reach {address_text(host, port)}: {error.strerror or error}") from error
    except TrustError as error:
        raise MeshError(f"{address_text(host, port)}: {error}", ExitCode.REFUSED) from error


@click.group()
def member() -> None:
    """List, admit and revoke members of the mesh."""


@member.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List all certificates, their ends and revocations."""
    daemon = client(ctx)
    show(form, lambda: daemon.get("/v1/trust"), lambda answer: [row["node"] for row in answer["members"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    rows = []
    for one in answer["members"]:
        standing = "unknown"
        if one["ends_unix"] is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(one["ends_unix"]))
            standing = f"ended {day}" if one["ended"] else f"until {day}"
        if one["problem"] and not one["ended"]:
            standing = one["problem"]
        if one["revoked_unix"] is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["revoked_unix"]))
            standing = f"revoked {day}" + (f": {one['reason']}" if one["reason"] else "")
        rows.append([one["nick"], one["user"], _role(one), standing, one["node"]])
    table(["NODE", "USER", "ROLE", "STANDING", "KEY"], rows, spare=["USER"])


def _role(one: dict[str, Any]) -> str:
    if one["founder"]:
        return "founder"
    return ",".join([*(["admitter"] if one["can_admit"] else []), *one["roles"]]) or "-"


@member.command()
@click.argument("name", required=False, default="")
@click.option("--mine", is_flag=True, help="For another machine of yours, instead of a new user.")
@click.option("--uses", type=int, default=1, show_default=True, help="Machines it admits: each is a user NAME-login.")
@click.option("--ttl", type=DURATION, default="1d", show_default=True, help="Lifetime of the invite: 1m to 365d.")
@click.option(
    "--ssh-key",
    type=click.File(),
    metavar="FILE",
    help="Bind it to the SSH public key in this file (-: standard input).",
)
@role_option
@json_option
@click.pass_context
def invite(
    ctx: click.Context,
    name: str,
    mine: bool,
    uses: int,
    ttl: float,
    ssh_key: IO[str] | None,
    roles: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print an invite for the new user NAME. It admits one machine: send it as you would send a password.

    Without a NAME, the invite admits nobody: it names the mesh, and the machine that uses it waits for an approval. With
    --ssh-key, only a person who has that SSH key can use the invite, so it is no secret.
    """
    order = {"ttl_s": ttl, "roles": roles, "user": name, "mine": mine, "uses": uses}
    if ssh_key is not None:
        order["ssh_key"] = ssh_key.read(MAX_INVITE_CHARACTERS)
    answer = client(ctx).post("/v1/invite", order)
    if as_json:
        print_json(answer)
        return
    say(answer["invite"])
    say("next, on the other machine: `mesh join`, paste the invite, then `mesh up --lend`", err=True)
    if name or mine:
        say("this node has to run then: it admits the machine", err=True)
    else:
        say("it waits there for an approval: `mesh member pending` here", err=True)


@member.command()
@listing
@click.pass_context
def pending(ctx: click.Context, /, **form: bool) -> None:
    """List pending join requests (`mesh join HOST`), made at any node of the mesh."""
    daemon = client(ctx)
    ask = lambda: daemon.get("/v1/pending")  # noqa: E731
    show(form, ask, lambda answer: [row["node"] for row in answer["pending"]], _draw_pending)


def _draw_pending(answer: dict[str, Any]) -> None:
    rows = [
        [row["nick"], row["user"], row["host"], ago(row["since_unix"] * 1000), row["node"]] for row in answer["pending"]
    ]
    table(["NODE", "USER", "FROM", "SINCE", "KEY"], rows)
    if rows:
        say("nodes choose their own names: compare the key. next: `mesh member approve KEY`", err=True)


@member.command()
@click.argument("node", type=WAITING)
@click.option("--nick", default="", help="Call it so, instead of the name it asks for.")
@click.option("--user", default="", help="Set its user, instead of the one it asks for.")
@role_option
@click.option("--existing", is_flag=True, help="Make it a machine of a user who has that name already.")
@click.option("--admit", is_flag=True, help="Let it invite and approve others. Only the founder can.")
@json_option
@click.pass_context
def approve(
    ctx: click.Context,
    node: str,
    nick: str,
    user: str,
    roles: tuple[str, ...],
    existing: bool,
    admit: bool,
    as_json: bool,
) -> None:
    """Admit NODE, one of `mesh member pending`: its name, or the beginning of its key.

    Without --role, one that was a member before gets the roles that it had.
    """
    order = {"node": node, "nick": nick, "user": user, "roles": roles, "admit": admit, "existing": existing}
    answer = client(ctx).post("/v1/approve", order)
    if as_json:
        print_json(answer)
    else:
        say(f"admitted {answer['nick']} (user {answer['user']}, {answer['node']})")


@member.command()
@click.argument("node", type=NODE)
@click.option("--reason", default="", help="Reason, visible to all members.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_context
def revoke(ctx: click.Context, node: str, reason: str, yes: bool, as_json: bool) -> None:
    """Revoke the key of NODE for good. Only the mesh's founder can, and it cannot be undone.

    All members that came in through NODE go with it: those that it admitted, added to its user or renewed, and theirs. The
    command lists them with the line that admits each again; those keep their keys, users and stores.
    """
    daemon = client(ctx)
    if not yes:
        rows = daemon.get("/v1/nodes")["nodes"]
        nicks = {row["node"]: row["nick"] for row in rows}
        meant = node_meant(node, nicks, {row["node"]: row["user"] for row in rows}, whole=True)
        others = [row for row in daemon.get("/v1/trust")["members"] if meant in row["through"] and not row["problem"]]
        along = f", and with it {plural(len(others), 'member')} that came in through it" if others else ""
        confirm(f"revoke {nicks[meant]} ({meant}){along} for good?", err=as_json)
    answer = daemon.post("/v1/revoke", {"node": node, "reason": reason})
    if as_json:
        print_json(answer)
        return
    if answer["founders"] < answer["quorum"]:
        say(f"{answer['nick']} is not revoked yet: {answer['founders']} of {answer['quorum']} founders have signed")
        say(f"next, on another founder's node: `mesh member revoke {answer['nick']}`", err=True)
        return
    say(f"{answer['nick']} ({answer['node']}) {'was revoked already' if answer['already'] else 'is revoked'}")
    if lost := answer["lost"]:
        say(
            f"{plural(len(lost), 'member')} that it admitted, added or renewed, or that came through these, went with it.",
            err=True,
        )
        say("next, for each that you still trust (its daemon asks again by itself):", err=True)
        for one in lost:
            existing = " --existing" if one["existing"] else ""
            command = to_copy(f"mesh member approve {one['node'][:7]}{existing}")
            say(f"  {command}  # {one['nick']}, user {one['user']}", err=True)


@member.command()
@click.argument("node", type=NODE)
@json_option
@click.pass_context
def promote(ctx: click.Context, node: str, as_json: bool) -> None:
    """Sign, as a founder, that NODE may admit others.

    In a mesh of several founders, `mesh member approve --admit` takes effect when a quorum of them has signed.
    """
    answer = client(ctx).post("/v1/promote", {"node": node})
    if as_json:
        print_json(answer)
        return
    say(f"{answer['nick']}: {answer['founders']} of {answer['quorum']} founders have signed that it may admit others")


@member.command()
@json_option
@click.pass_context
def key(ctx: click.Context, as_json: bool) -> None:
    """Print this node's id, which is its public key; make one if there is none. Needs no daemon and no mesh.

    A mesh that has the key in its allow list admits this node with `mesh join HOST` without an approval.
    """
    from membership.identity import format_id

    where = layout(ctx)
    node = format_id(_own_identity(where).node_id)
    if as_json:
        print_json({"node": node, "file": str(where.key)})
    else:
        say(node)


@member.command()
@click.option("--since", type=DURATION, default="30d", show_default=True, help="Length of the period, until now.")
@click.option(
    "--by", type=click.Choice(list(USAGE_HEADS)), default="user", show_default=True, help="Group rows by this."
)
@click.option("--here", is_flag=True, help="Use only this node's receipts; ask no other node.")
@click.option("--runs", is_flag=True, help="List the attempts that ran on this node instead.")
@json_option
@click.pass_context
def usage(ctx: click.Context, since: float, by: str, here: bool, runs: bool, as_json: bool) -> None:
    """Sum up hours lent and borrowed, from the receipts that lenders sign.

    LENT is what a row's machines did for others, BORROWED what others' machines did for it, OWN what it ran on its own. Hours are
    GPU hours, and after the + slot hours, of jobs without a GPU. Nodes that are away are not counted.
    """
    path = f"/v1/usage?since_s={since:.3f}&by={by}&here={'true' if here or runs else 'false'}"
    with waiting_for("asking the other nodes for their receipts"):
        answer = client(ctx).get(path, timeout_s=120)
    if as_json:
        print_json(answer)
    elif runs:
        _draw_runs(answer)
    else:
        _draw_usage(answer, by)


def _draw_usage(answer: dict[str, Any], by: str) -> None:
    header = [USAGE_HEADS[by], "LENT", "BORROWED", "OWN", "MEASURED", "LOST", "RUNS"]
    rows = []
    for row in answer["rows"]:
        kinds = [hours(row[f"{kind}_gpu_h"], row[f"{kind}_slot_h"]) for kind in ("lent", "borrowed", "own")]
        rest = [f"{row['measured_gpu_h']:.3g}", f"{row['lost_h']:.3g}", str(row["attempts"])]
        if by == "user":
            known = "fair_points" in row
            rest.append(f"{row['decayed_gpu_h']:.3g} GPU h: {row['fair_points']} points ahead" if known else "-")
        rows.append([row["name"], *kinds, *rest])
    table([*header, "FAIR SHARE"] if by == "user" else header, rows, spare=["MEASURED", "LOST"])
    if not rows:
        say("nothing ran in that time")
    if answer["silent"]:
        say(f"not counted, because they did not answer: {', '.join(answer['silent'])}", err=True)
    if answer["cut"]:
        say(f"only the newest receipts are counted of: {', '.join(answer['cut'])}", err=True)


def _draw_runs(answer: dict[str, Any]) -> None:
    rows = []
    for run in answer["runs"]:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["from_unix_ms"] / 1000))
        ran_s = (run["until_unix_ms"] - run["from_unix_ms"]) / 1000
        held = f"{run['gpu_percent'] / 100:g} GPU" if run["gpu_percent"] else "slot"
        lost = lasting(run["lost_s"]) if run["lost_s"] else "-"
        rows.append([began, run["job"][:8], run["user"], held, lasting(ran_s), lost, run["end"] or "running"])
    table(["BEGAN", "JOB", "USER", "HELD", "RAN", "LOST", "END"], rows)
