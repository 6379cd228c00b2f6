"""`mesh install-service`: this node from boot on, by systemd, as an unprivileged user."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mesh.api.errors import ConfigError, MeshError
from mesh.cli.terminal import layout
from mesh.client import Client
from mesh.config import load_settings
from mesh.launcher import last_words
from mesh.layout import Layout, state_directory
from mesh.systemd import EXTRAS, SYSTEM_DIRECTORY, UNIT, Extra, Service, unit

BOOTED = Path("/run/systemd/system")  # as sd_booted(3) looks


@click.command("install-service")
@click.option("--as", "user", metavar="USER", help="For root: whose service it is (default: who called sudo).")
@click.option(
    "--allow",
    "extras",
    multiple=True,
    type=click.Choice(list(EXTRAS)),
    help="For root: a privilege beyond the user's own. Can be given several times; none is the default.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the unit, and change nothing.")
@click.option("--no-start", is_flag=True, help="Write the unit, but do not start it.")
@click.option("--remove", is_flag=True, help="Stop the service and remove its unit. The state stays.")
@click.pass_context
def install_service(
    ctx: click.Context, user: str | None, extras: tuple[Extra, ...], only_print: bool, no_start: bool, remove: bool
) -> None:
    """Start this node's daemon at every boot, by systemd.

    Called by yourself, it is a service of yours, with your rights and no more. Called by root (`sudo mesh install-service`), it
    is the machine's service, and runs as the user who called sudo, or --as another: never as root. What it needs beyond that
    user's rights is named by --allow, one privilege each:

    \b
    edge    CAP_NET_ADMIN, CAP_BPF: cut guests off the network at once, keep migrations to their rate
    kill    CAP_KILL: end the processes of containers even if the container engine hangs
    docker  the group `docker`: run containers (who has it is root on this machine)

    What the daemon does is said by config.toml in its state directory; options of `mesh up` do not count here.
    """
    root = os.geteuid() == 0
    if not root and (user or extras):
        raise MeshError("only root gives a service another user or privileges: sudo mesh install-service ...")
    owner = _owner(user) if root else None
    where = _layout_of(ctx, owner) if owner is not None else layout(ctx)
    try:
        settings = load_settings(where.config, {})
    except ConfigError as error:
        raise MeshError(str(error)) from error
    name = owner.pw_name if owner is not None else None
    try:
        text = unit(Service(sys.executable, str(where.root), settings.grace_s, name, extras, str(where.edge)))
    except ValueError as error:
        raise MeshError(str(error)) from error
    if only_print:
        click.echo(text, nl=False)
        return
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        raise MeshError(
            "systemd does not run here: `mesh install-service --print` shows the unit, `mesh up` starts a daemon"
        )
    path = (Path(SYSTEM_DIRECTORY) if root else _user_directory()) / UNIT
    if remove:
        _remove(path, root)
        return
    if not where.genesis.exists():
        raise MeshError(
            f"{where.root} belongs to no mesh yet: `mesh init NAME` or `mesh join INVITE` first, as that user"
        )
    if not path.exists() and Client(where.socket).alive():
        raise MeshError("a daemon runs here already, not as a service: `mesh down`, then again")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _systemctl(root, "daemon-reload")
    click.echo(f"{path} written", err=True)
    for extra in extras:
        click.echo(f"it may: {EXTRAS[extra]}", err=True)
    if no_start:
        click.echo(f"next: {' '.join(_command(root, 'enable', '--now', UNIT))}", err=True)
    else:
        _systemctl(root, "enable", UNIT)
        try:
            _systemctl(root, "restart", UNIT)
        except MeshError as error:
            raise MeshError(f"it did not start: {last_words(where.log)} ({error})") from error
        click.echo("running; `mesh status` shows it, `mesh install-service --remove` ends it")
    if not root and not Path(f"/var/lib/systemd/linger/{pwd.getpwuid(os.geteuid()).pw_name}").exists():
        click.echo(
            "it runs while you are logged in; to have it run from boot on: sudo loginctl enable-linger $USER", err=True
        )


def _owner(name: str | None) -> pwd.struct_passwd:
    """Whose service it shall be."""
    wanted = name or os.environ.get("SUDO_USER")
    if wanted is None:
        raise MeshError("whose service shall it be? `mesh install-service --as USER`, an unprivileged one")
    try:
        found = pwd.getpwnam(wanted)
    except (KeyError, ValueError) as error:
        raise MeshError(f"there is no user {wanted!r}: `useradd --system --create-home {wanted}` makes one") from error
    if found.pw_uid == 0:
        raise MeshError(
            "the daemon needs no root, and a service of root is refused: --as USER, and --allow what it needs"
        )
    return found


def _layout_of(ctx: click.Context, owner: pwd.struct_passwd) -> Layout:
    """That user's state directory, which is not that of root, who asks."""
    where = Layout(state_directory(ctx.obj)) if ctx.obj else Layout(Path(owner.pw_dir, ".local/state/campus-mesh"))
    if where.root.exists() and where.root.stat().st_uid != owner.pw_uid:
        raise MeshError(f"{where.root} does not belong to {owner.pw_name}: name the right one by `mesh --state DIR`")
    return where


def _user_directory() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"


def _remove(path: Path, root: bool) -> None:
    if not path.exists():
        raise MeshError(f"there is no service to remove: no {path}")
    _systemctl(root, "disable", "--now", UNIT)
    path.unlink()
    _systemctl(root, "daemon-reload")
    click.echo("removed; the node has left the mesh, its state is still there")


def _command(root: bool, *words: str) -> list[str]:
    return ["systemctl", *([] if root else ["--user"]), *words]


def _systemctl(root: bool, *words: str) -> None:
    command = _command(root, *words)
    done: subprocess.CompletedProcess[Any] = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeshError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
