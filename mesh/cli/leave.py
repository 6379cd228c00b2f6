"""`mesh leave`: this machine leaves its mesh for good."""

import time
from pathlib import Path
from typing import Any

import click

from mesh.api.client import Client
from mesh.api.no_daemon import NoDaemon
from mesh.cli.nodes import grace_option, now_option, stop
from mesh.cli.output import confirm, print_json, say, to_copy
from mesh.cli.terminal import client, json_option, layout
from mesh.daemon.layout import Layout
from mesh.util.errors import ExitCode, MeshError
from mesh.util.text import plural

GONE = {"left", "dead", "revoked"}  # states of nodes that are not counted as here


@click.command()
@grace_option
@now_option
@click.option("--remove", is_flag=True, help="Remove the state, with the node's key, instead of putting it aside.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_context
def leave(ctx: click.Context, grace: float | None, now: bool, remove: bool, yes: bool, as_json: bool) -> None:
    """Leave the mesh for good: stop as `mesh down` does, then put this node's state aside.

    Guests save and move on, and other nodes take its places as a witness. This machine can then join another mesh. To return as
    the same member, move the state back. Without --yes, show first what is lost.
    """
    where, daemon = layout(ctx), client(ctx)
    if not where.genesis.exists():
        raise MeshError(f"{where.root} belongs to no mesh: there is none to leave", ExitCode.NOT_FOUND)
    _refuse_service(where)
    mesh, nick, loss = _member(where)
    if not yes:
        for words in [*filter(None, [loss]), *_stays_here(daemon)]:
            say(f"mesh: {words}", err=True)
        confirm(f"leave mesh {mesh!r} for good and {'remove' if remove else 'put aside'} {where.root}?", err=True)
    stop(ctx, grace, now)
    kept: Path | None = None
    if remove:
        _remove(where)
    else:
        kept = _put_aside(where.root)
    if as_json:
        print_json({"mesh": mesh, "state": str(kept) if kept is not None else None})
        return
    say(f"this machine has left mesh {mesh!r}; its state is {f'in {kept}' if kept is not None else 'removed'}")
    if nick:
        say(f"next, on a founder's node, to shut its key out: {to_copy(f'mesh member revoke {nick}')}", err=True)


def _refuse_service(where: Layout) -> None:
    """MeshError if systemd would start this node again."""
    from mesh.cli.install_service import user_directory
    from mesh.daemon.systemd import SYSTEM_DIRECTORY, UNIT

    for path in (Path(SYSTEM_DIRECTORY) / UNIT, user_directory() / UNIT):
        if path.is_file() and str(where.root) in path.read_text(errors="replace"):
            sudo = "sudo " if path.is_relative_to(SYSTEM_DIRECTORY) else ""
            raise MeshError(f"a service starts this node ({path}): first run `{sudo}mesh install-service --remove`")


def _member(where: Layout) -> tuple[str, str, str]:
    """Return the mesh's name, the name of this node if its key can be revoked, and what the mesh loses with its key.

    All are empty if its files are damaged, or its certificate has ended.
    """
    from membership.identity import Identity, IdentityError
    from membership.trust import TrustError, TrustStore

    try:
        store, node = TrustStore(where.genesis.read_bytes()), Identity.load(where.key).node_id
        nick = store.check_chain(where.chain.read_bytes(), time.time()).nick
    except (TrustError, IdentityError, OSError):
        return "", "", ""
    mesh, founders = store.genesis, store.genesis.roots
    if node not in founders:
        return mesh.name, nick, ""
    if len(founders) > mesh.quorum:
        return mesh.name, "", ""
    words = f"without the key of this founder nobody can revoke machines or let nodes admit others: keep {where.key}"
    return mesh.name, "", words


def _stays_here(daemon: Client) -> list[str]:
    """Return what only this node has, in words; nothing if no daemon runs."""
    try:
        nodes, jobs = daemon.get("/v1/nodes")["nodes"], daemon.get("/v1/jobs?over=false")["jobs"]
        sets = daemon.get("/v1/data")["data"]
    except NoDaemon as error:
        if error.runs:
            raise
        return []
    me: dict[str, Any] = next(node for node in nodes if node["me"])
    others = [node for node in nodes if node["user"] == me["user"] and not node["me"] and node["state"] not in GONE]
    mine = [] if others else [job["job"][:8] for job in jobs if job["user"] == me["user"]]
    alone = [row["name"] for row in sets if row["nodes"] == [me["nick"]]]
    words = []
    if mine:
        words.append(
            f"{plural(len(mine), 'job')} of yours will go on, and no other machine of yours can fetch or cancel "
            f"{'it' if len(mine) == 1 else 'them'}: {', '.join(mine)}"
        )
    if alone:
        words.append(f"no other node has {plural(len(alone), 'data set')} (`mesh data pin` there): {', '.join(alone)}")
    return words


def _put_aside(root: Path) -> Path:
    """Rename the state directory, so that it belongs to no mesh; return its new path."""
    aside = root.with_name(f"{root.name}-left-{time.strftime('%Y-%m-%d-%H%M%S')}")
    try:
        return root.rename(aside)
    except OSError as error:
        raise _left_behind(root, error.strerror or str(error)) from error


def _remove(where: Layout) -> None:
    """Remove the state directory, and what a link to it leads to. The genesis goes last, so that this can be done again."""
    from mesh.util import trees

    root = where.root
    for path in [*(path for path in root.iterdir() if path != where.genesis), root.resolve(), root]:
        trees.remove(path)
    if root.exists():
        raise _left_behind(root, "some of it cannot be removed")


def _left_behind(root: Path, why: str) -> MeshError:
    return MeshError(f"this node has left, but its state stays in {root}: {why}. Move or remove it yourself")
