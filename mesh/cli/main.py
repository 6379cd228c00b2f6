"""`mesh`: the group of all commands, in the order in which a newcomer meets them."""

import gc
import sys
from typing import TYPE_CHECKING

import click

from mesh.api.errors import MEANS, ExitCode, MeshError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SECTIONS: dict[str, list[tuple[str, str, str]]] = {
    "Use the mesh": [
        ("run", "mesh.cli.jobs", "Run a command on the mesh and follow it"),
        ("submit", "mesh.cli.jobs", "Submit a command and return at once"),
        ("ps", "mesh.cli.jobs", "List jobs"),
        ("logs", "mesh.cli.jobs", "Show a job's output, over all its attempts"),
        ("attach", "mesh.cli.interactive", "Follow a job's output and state"),
        ("exec", "mesh.cli.interactive", "Run a command beside a running job"),
        ("forward", "mesh.cli.interactive", "Reach a port of a running job from here"),
        ("jupyter", "mesh.cli.interactive", "JupyterLab on a node of the mesh"),
        ("why", "mesh.cli.why", "Explain where a job runs, or why it waits"),
        ("cancel", "mesh.cli.jobs", "End a job"),
        ("wait", "mesh.cli.jobs", "Wait until jobs are over"),
        ("describe", "mesh.cli.inspect", "All about one job"),
        ("cp", "mesh.cli.inspect", "Copy a job's files here, while it runs too"),
        ("migrate", "mesh.cli.jobs", "Move a running job to another node"),
        ("recover", "mesh.cli.jobs", "Go on with a job whose record is lost, most of it"),
        ("pull", "mesh.cli.jobs", "Fetch a finished job's published files"),
        ("ckpt", "mesh.cli.ckpt", "The checkpoints kept here: ls, verify, pull, rm, gc"),
        ("rehearse", "mesh.cli.rehearse", "Find out here whether a job survives departures"),
        ("image", "mesh.cli.image", "Container images: ls, allow, deny, pull, push, prune"),
        ("events", "mesh.cli.jobs", "What this node saw happen to jobs"),
        ("nodes", "mesh.cli.nodes", "List nodes, and what they lend"),
        ("top", "mesh.cli.top", "The mesh in one terminal: nodes, jobs, transfers; pause and reclaim"),
        ("web", "mesh.cli.web", "This node's page, in a browser"),
        ("survive", "mesh.cli.survive", "How long a node is likely to stay; eval: on a trace"),
    ],
    "Lend your machine": [
        ("up", "mesh.cli.nodes", "Start this node's daemon"),
        ("down", "mesh.cli.nodes", "Leave: guests save and move on, then the daemon ends"),
        ("lend", "mesh.cli.lend", "Lend this machine, and in which hours"),
        ("pause", "mesh.cli.lend", "Take no new guests"),
        ("resume", "mesh.cli.lend", "Take guests again"),
        ("reclaim", "mesh.cli.lend", "Take the machine, or one GPU, back from its guests"),
        ("killall", "mesh.cli.seize", "End every guest here at once, also where the daemon hangs or is gone"),
        ("status", "mesh.cli.nodes", "This node's own state"),
        ("usage", "mesh.cli.usage", "Hours lent and borrowed, and what ran here"),
        ("gpus", "mesh.cli.gpus", "This node's GPUs, and who has what of them"),
        ("install-service", "mesh.cli.service", "Start this node at every boot, by systemd"),
        ("config", "mesh.cli.config", "This node's settings: ls, get, set, unset"),
        ("doctor", "mesh.cli.doctor", "Find what keeps this machine from being a good node"),
        ("dump", "mesh.cli.dump", "What tells what went wrong here, in one file, without secrets"),
    ],
    "Found or join a mesh": [
        ("init", "mesh.cli.trust", "Found a mesh"),
        ("invite", "mesh.cli.trust", "Print a string that lets its holder join"),
        ("join", "mesh.cli.trust", "Join a mesh, by an invite or by knocking at a node"),
        ("revoke", "mesh.cli.trust", "Shut a node out for good"),
        ("pending", "mesh.cli.trust", "Who knocks, and waits to be let in"),
        ("approve", "mesh.cli.trust", "Let in one who waits"),
        ("trust", "mesh.cli.trust", "Who belongs (`mesh trust ls`)"),
        ("key", "mesh.cli.trust", "This node's own key (`mesh key show`)"),
    ],
    "Try it": [
        ("demo", "mesh.cli.demo", "Watch a training survive three departures"),
        ("devstack", "mesh.cli.devstack", "Several real daemons on this machine"),
        ("api", "mesh.cli.api", "The daemon's API, as an OpenAPI document"),
        ("completion", "mesh.cli.completion", "What makes bash, zsh or fish complete `mesh`"),
        ("sim", "sim.cli", "Study a campus's churn: which policy, which machines, how much is lost"),
    ],
}


class Mesh(click.Group):
    """Commands are imported when they are called, so that the command line answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for rows in SECTIONS.values() for name, _, _ in rows]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from importlib import import_module

        for rows in SECTIONS.values():
            for name, module, _ in rows:
                if name == cmd_name:
                    command = getattr(import_module(module), name.replace("-", "_"))
                    if not gc.isenabled():  # as `entry` leaves it: all is loaded now
                        gc.freeze()
                        gc.enable()
                    assert isinstance(command, click.Command)
                    return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            not ctx.resilient_parsing
            and args
            and args[0] not in self.list_commands(ctx)
            and not args[0].startswith("-")
        ):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f" Did you mean `mesh {near[0]}`?" if near else " `mesh --help` lists them."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        rows = [(name, words) for section in SECTIONS.values() for name, _, words in section]
        found = [CompletionItem(name, help=words) for name, words in rows if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, help_text) for name, _, help_text in rows])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MeshError as error:
            click.echo(f"mesh: {error}", err=True)
            if error.code == ExitCode.USAGE and (words := other_release(ctx.obj)):
                click.echo(f"mesh: {words}", err=True)
            ctx.exit(int(error.code))
        except (LookupError, TypeError):  # something in an answer is missing, or is not what it was
            if not (words := other_release(ctx.obj)):
                raise
            click.echo(f"mesh: {words}", err=True)
            ctx.exit(int(ExitCode.ERROR))
        except KeyboardInterrupt:
            click.echo("", err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))
        except BrokenPipeError:
            sys.stderr.close()  # the reader (head, less) has had enough
            ctx.exit(0)


def other_release(state: str | None) -> str:
    """What to do where the daemon is of another release than this command; empty where it is not."""
    from mesh import __version__
    from mesh.client import Client
    from mesh.layout import Layout, state_directory

    try:
        version = Client(Layout(state_directory(state)).socket).get("/v1/status", timeout_s=5.0)["version"]
    except (MeshError, OSError, ValueError, LookupError, TypeError):
        return ""
    if version == __version__:
        return ""
    return f"the daemon here is campus-mesh {version}, this command is {__version__}: `mesh down`, then `mesh up`, renews it"


def tell_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from mesh.release import release

        click.echo(f"mesh {release()}")
        ctx.exit()


@click.group(
    cls=Mesh,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: "
    + "; ".join(f"{int(code)} {words.partition(';')[0]}" for code, words in MEANS.items())
    + "; `run` passes the job's own code through.",
)
@click.option("--state", metavar="DIR", help="State directory (default: $MESH_STATE, or ~/.local/state/campus-mesh).")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=tell_version, help="Print the version."
)
@click.pass_context
def cli(ctx: click.Context, state: str | None) -> None:
    """Lend and borrow lab GPUs on a campus LAN. No server, no admin.

    The owner always wins; the guest never loses work.
    """
    ctx.obj = state


def main() -> None:
    cli(prog_name="mesh")
