"""`mesh debug devstack`, `api` and `completion`."""

import json
import sys
import time

import click

from mesh.cli.output import print_json, print_text, say
from mesh.cli.signals import cleaned_up
from mesh.cli.terminal import engines_option, json_option

COMPLETION_FILES = {
    "bash": "~/.local/share/bash-completion/completions/mesh",
    "zsh": "~/.zfunc/_mesh",
    "fish": "~/.config/fish/completions/mesh.fish",
}
# Click's test whether zsh loaded its script as a function is true at the first call only, so the next Tab completes nothing.
CLICKS_AUTOLOADED, AUTOLOADED = "$zsh_eval_context[-1] == loadautofunc", "$funcstack[1] == _mesh"


@click.command()
@click.option("-n", "--nodes", type=click.IntRange(1, 60), default=3, show_default=True, help="Number of daemons.")
@click.option("--slots", type=click.IntRange(0, 64), default=1, show_default=True, help="Job slots that each lends.")
@engines_option
@json_option
def devstack(nodes: int, slots: int, engines: tuple[str, ...], as_json: bool) -> None:
    """Run several real daemons on this machine until Ctrl-C. They find each other by mDNS on loopback."""
    from mesh.daemon.stack import Stack

    with cleaned_up() as cleanup:
        overrides = {"slots": slots, "engines": list(engines or ("process",))}
        stack = cleanup.enter_context(Stack(nodes, overrides=overrides))
        say(f"starting {nodes} daemons ...", err=True)
        try:
            stack.start_all()
            if as_json:
                print_json({"nodes": [{"node": node.nick, "state": str(node.where.root)} for node in stack.nodes]})
            else:
                for node in stack.nodes:
                    say(f"{node.nick}  export MESH_STATE={node.where.root}")
            sys.stdout.flush()
            say("use any of them from another terminal; Ctrl-C stops them all", err=True)
            while any(node.running for node in stack.nodes):
                time.sleep(0.5)
        except KeyboardInterrupt:
            say(err=True)
            say("stopping the daemons ...", err=True)


@click.command()
def api() -> None:
    """Print the OpenAPI document of the API on the daemon's socket. Needs no daemon."""
    from mesh.api.openapi import document
    from mesh.api.routes import ROUTES

    print_text(json.dumps(document(ROUTES), indent=2) + "\n")


@click.command()
@click.argument("shell", type=click.Choice(list(COMPLETION_FILES)))
def completion(shell: str) -> None:
    """Print the completion script for SHELL; on a terminal, also where to put it."""
    print_text(completion_script(shell))
    zsh = "; in ~/.zshrc, before compinit: fpath=(~/.zfunc $fpath)" if shell == "zsh" else ""
    if sys.stdout.isatty():
        say(f"next: mesh debug completion {shell} > {COMPLETION_FILES[shell]}{zsh}", err=True)


def completion_script(shell: str) -> str:
    """Return click's script, which asks `mesh` itself for completions."""
    from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

    from mesh.cli.main import cli

    kinds: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    made = kinds[shell](cli, {}, "mesh", "_MESH_COMPLETE")
    return str(made.source_template % made.source_vars()).replace(CLICKS_AUTOLOADED, AUTOLOADED)
