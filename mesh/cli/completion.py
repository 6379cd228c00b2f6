"""`mesh completion`: what makes a shell complete commands, options, and the names of jobs, nodes and images."""

import sys

import click

SHELLS = ("bash", "zsh", "fish")
FILES = {
    "bash": "~/.local/share/bash-completion/completions/mesh",
    "zsh": "~/.zfunc/_mesh",
    "fish": "~/.config/fish/completions/mesh.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL; what to do with it is said on standard error."""
    click.echo(script(shell), nl=False)
    zsh = "; in ~/.zshrc, before compinit: fpath=(~/.zfunc $fpath)" if shell == "zsh" else ""
    if sys.stdout.isatty():
        click.echo(f"next: mesh completion {shell} > {FILES[shell]}{zsh}", err=True)


# How click's script knows that zsh has loaded it as a function: true at its first call only, so the next Tab completes nothing.
CLICKS_AUTOLOADED, AUTOLOADED = "$zsh_eval_context[-1] == loadautofunc", "$funcstack[1] == _mesh"


def script(shell: str) -> str:
    """As click makes it: the script asks `mesh` itself."""
    from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

    from mesh.cli.main import cli

    kinds: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    made = kinds[shell](cli, {}, "mesh", "_MESH_COMPLETE")
    return str(made.source_template % made.source_vars()).replace(CLICKS_AUTOLOADED, AUTOLOADED)
