"""`mesh install-service`: this node as a systemd service of an unprivileged user."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mesh.api.client import Client
from mesh.cli.output import print_json, print_text, say
from mesh.cli.terminal import json_option, layout
from mesh.daemon.config import load_settings
from mesh.daemon.launcher import last_words
from mesh.daemon.layout import Layout, node_layout
from mesh.daemon.systemd import EXTRAS, SYSTEM_DIRECTORY, UNIT, Extra, Service, unit
from mesh.util.errors import ConfigError, MeshError

BOOTED = Path("/run/systemd/system")  # as sd_booted(3) looks


@click.command("install-service")
@click.option("--as", "user", metavar="USER", help="For root: user of the service (default: the user who called sudo).")
@click.option(
    "--allow",
    "extras",
    multiple=True,
    type=click.Choice(list(EXTRAS)),
    help="For root: a privilege beyond the user's own (default: none). Repeatable.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the unit; change nothing.")
@click.option("--no-start", is_flag=True, help="Write the unit, but do not start it.")
@click.option("--remove", is_flag=True, help="Stop the service and remove its unit. The state stays.")
@json_option
@click.pass_context
def install_service(
    ctx: click.Context,
    user: str | None,
    extras: tuple[Extra, ...],
    only_print: bool,
    no_start: bool,
    remove: bool,
    as_json: bool,
) -> None:
    """Start this node's daemon at every boot, by systemd.

    Without root, it is a service of your user. With root (`sudo mesh install-service`), it is a service of the machine and
    runs as the user who called sudo, or as --as USER, never as root. Each --allow adds one privilege:

    \b
    edge    CAP_NET_ADMIN, CAP_BPF: cut guests off the network at once, limit the rate of migrations
    kill    CAP_KILL: kill processes of containers even if the container engine hangs
    docker  the group `docker`: run containers (this group is equivalent to root)

    The service takes its settings from config.toml (`mesh config`), not from options of `mesh up`.
    """
    root = os.geteuid() == 0
    if not root and (user or extras):
        raise MeshError("--as and --allow need root: sudo mesh install-service ...")
    owner = _owner(user) if root else None
    where = _layout_of(ctx, owner) if owner is not None else layout(ctx)
    try:
        settings = load_settings(where.config, {})
    except ConfigError as error:
        raise MeshError(str(error)) from error
    name = owner.pw_name if owner is not None else None
    try:
        text = unit(
            Service(
                sys.executable,
                str(where.root),
                settings.grace_s,
                name,
                extras,
                str(where.edge),
                str(where.config_root or ""),
            )
        )
    except ValueError as error:
        raise MeshError(str(error)) from error
    path = (Path(SYSTEM_DIRECTORY) if root else user_directory()) / UNIT
    answer = {"path": str(path), "user": name or pwd.getpwuid(os.geteuid()).pw_name, "allow": list(extras)}
    if only_print:
        if as_json:
            print_json({**answer, "unit": text})
        else:
            print_text(text)
        return
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        raise MeshError(
            "systemd does not run here: `mesh install-service --print` prints the unit, `mesh up` starts a daemon"
        )
    if remove:
        _remove(path, root)
        words = "service removed; the node has left the mesh, its state stays"
    else:
        _write(path, text, where, root)
        say(f"{path} written", err=True)
        for extra in extras:
            say(f"privilege: {EXTRAS[extra]}", err=True)
        if no_start:
            say(f"next: {' '.join(_command(root, 'enable', '--now', UNIT))}", err=True)
            words = ""
        else:
            _start(where, root)
            words = "the service runs: `mesh status` shows it, `mesh install-service --remove` removes it"
        if not root and not Path(f"/var/lib/systemd/linger/{answer['user']}").exists():
            say("it runs while you are logged in; to start it at boot: sudo loginctl enable-linger $USER", err=True)
    if as_json:
        print_json({**answer, "runs": not (remove or no_start), "removed": remove})
    elif words:
        say(words)


def _write(path: Path, text: str, where: Layout, root: bool) -> None:
    if not where.genesis.exists():
        raise MeshError(
            f"{where.root} belongs to no mesh yet: first run `mesh init NAME` or `mesh join INVITE` as that user"
        )
    if not path.exists() and Client(where.socket).alive():
        raise MeshError("a daemon runs here already, not as a service: stop it with `mesh down`, then run this again")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _systemctl(root, "daemon-reload")


def _start(where: Layout, root: bool) -> None:
    _systemctl(root, "enable", UNIT)
    try:
        _systemctl(root, "restart", UNIT)
    except MeshError as error:
        raise MeshError(f"the service did not start: {last_words(where.log)} ({error})") from error


def _owner(name: str | None) -> pwd.struct_passwd:
    """Return the user of the service."""
    wanted = name or os.environ.get("SUDO_USER")
    if wanted is None:
        raise MeshError("--as USER is required: the service runs as an unprivileged user")
    try:
        found = pwd.getpwnam(wanted)
    except (KeyError, ValueError) as error:
        raise MeshError(f"there is no user {wanted!r}: `useradd --system --create-home {wanted}` adds one") from error
    if found.pw_uid == 0:
        raise MeshError("the daemon does not run as root: use --as USER, and --allow for privileges")
    return found


def _layout_of(ctx: click.Context, owner: pwd.struct_passwd) -> Layout:
    """Return the files of that user's node, not of root's."""
    home = Path(owner.pw_dir)
    own = Layout(home / ".local/state/campus-mesh", home / ".config/campus-mesh")
    where = node_layout(ctx.obj) if ctx.obj else own
    if where.root.exists() and where.root.stat().st_uid != owner.pw_uid:
        raise MeshError(
            f"{where.root} does not belong to {owner.pw_name}: name the right directory with `mesh --state DIR`"
        )
    return where


def user_directory() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"


def _remove(path: Path, root: bool) -> None:
    if not path.exists():
        raise MeshError(f"there is no service to remove: {path} does not exist")
    _systemctl(root, "disable", "--now", UNIT)
    path.unlink()
    _systemctl(root, "daemon-reload")


def _command(root: bool, *words: str) -> list[str]:
    return ["systemctl", *([] if root else ["--user"]), *words]


def _systemctl(root: bool, *words: str) -> None:
    command = _command(root, *words)
    done: subprocess.CompletedProcess[Any] = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeshError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
