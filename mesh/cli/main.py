"""The `mesh` command: all commands by section, loaded when they are called."""

import gc
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from mesh.util.errors import ExitCode, MeshError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Command = tuple[str, str, str]  # its name, the module that holds it, one line of help
SECTIONS: dict[str, list[Command]] = {
    "Jobs": [
        ("run", "mesh.cli.jobs", "Run a command on the mesh and follow its output"),
        ("submit", "mesh.cli.jobs", "Submit a command and return at once"),
        ("ps", "mesh.cli.jobs", "List jobs"),
        ("logs", "mesh.cli.jobs", "Show a job's output from all its attempts"),
        ("describe", "mesh.cli.describe", "Show one job in detail"),
        ("why", "mesh.cli.describe", "Explain where a job runs or why it waits"),
        ("wait", "mesh.cli.jobs", "Wait until jobs have ended"),
        ("cancel", "mesh.cli.jobs", "End jobs"),
        ("exec", "mesh.cli.interactive", "Run a command next to a running job"),
        ("cp", "mesh.cli.describe", "Copy files of a job to this machine"),
        ("secret", "mesh.cli.secret", "Secrets for jobs, as API keys: set, ls, rm"),
        ("job", "mesh.cli.main", "jupyter, attach, forward, migrate, events, rehearse, sdk, recover"),
    ],
    "The mesh": [
        ("init", "mesh.cli.member", "Found a mesh"),
        ("join", "mesh.cli.member", "Join a mesh with an invite, or ask one of its nodes"),
        ("leave", "mesh.cli.leave", "Leave the mesh for good; state is put aside or removed"),
        ("member", "mesh.cli.member", "ls, invite, pending, approve, revoke, key, usage"),
        ("nodes", "mesh.cli.nodes", "List nodes and what they lend"),
        ("top", "mesh.cli.top", "Watch the mesh in this terminal, or --web in a browser"),
        ("ckpt", "mesh.cli.ckpt", "Checkpoints stored here: ls, verify, extract, rm, gc"),
        ("data", "mesh.cli.data", "Data sets for jobs: add, ls, show, pin, verify, rm"),
        ("image", "mesh.cli.image", "Container images: ls, allow, deny, pull, push, prune"),
        ("debug", "mesh.cli.main", "demo, devstack, sim, survive, dump, api, completion"),
    ],
    "This machine": [
        ("up", "mesh.cli.nodes", "Start this node"),
        ("down", "mesh.cli.nodes", "Stop this node; its guests save and move on first"),
        ("status", "mesh.cli.nodes", "Show this node: what it lends, who uses it"),
        ("lend", "mesh.cli.lend", "Lend this machine (again), always or in some hours"),
        ("pause", "mesh.cli.lend", "Accept no new guests for a while"),
        ("reclaim", "mesh.cli.lend", "Take this machine, or one of its GPUs, back from guests"),
        ("killall", "mesh.cli.kill", "Kill every guest at once, even if the daemon hangs"),
        ("gpus", "mesh.cli.gpus", "Show and change how jobs share this node's GPUs"),
        ("config", "mesh.cli.config", "Settings of this node: ls, get, set, unset"),
        ("doctor", "mesh.cli.doctor", "Find problems of this machine and their remedies"),
        ("install-service", "mesh.cli.install_service", "Start this node at every boot (systemd)"),
    ],
}


class LazyGroup(click.Group):
    """A group that imports a command only when it is called, so that the command line answers at once."""

    sections: dict[str, list[Command]]

    def __init__(self, sections: dict[str, list[Command]], **settings: Any) -> None:
        super().__init__(**settings)
        self.sections = sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for rows in self.sections.values() for name, _, _ in rows]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from importlib import import_module

        for rows in self.sections.values():
            for name, module, _ in rows:
                if name == cmd_name:
                    command = getattr(import_module(module), name.replace("-", "_"))
                    assert isinstance(command, click.Command)
                    return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            from mesh.cli.suggest import meant

            near = meant(args[0], cli, "" if self is cli else str(self.name))
            words = " or ".join(f"`mesh {path}`" for path in near)
            hint = f"Did you mean {words}?" if near else f"See `{ctx.command_path} --help`."
            raise click.UsageError(f"there is no command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        rows = [row for section in self.sections.values() for row in section]
        found = [CompletionItem(name, help=text) for name, _, text in rows if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, _, text in rows])


class Mesh(LazyGroup):
    """`mesh` itself: turns errors into messages and exit codes."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[--state DIR] [--version] [--help]", "COMMAND [ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)  # the usage line names the options, so that all fits on one screen

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None and not gc.isenabled():  # `entry` disables it until all modules are loaded
            gc.freeze()
            gc.enable()
        return command

    def invoke(self, ctx: click.Context) -> object:
        from mesh.cli.output import say, suggested, use_state

        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            told = click.UsageError(suggested(error.format_message()), error.ctx)
            if code := self._own_code(ctx, 0):
                told.show()
                ctx.exit(code)
            raise told from error
        except MeshError as error:
            say(f"mesh: {error}", err=True)
            if error.code == ExitCode.USAGE and (text := other_release(ctx.obj)):
                say(f"mesh: {text}", err=True)
            ctx.exit(self._own_code(ctx, int(error.code)))
        except (LookupError, TypeError):  # an answer lacks a field, or has one of another type
            if not (text := other_release(ctx.obj)):
                raise
            say(f"mesh: {text}", err=True)
            ctx.exit(self._own_code(ctx, int(ExitCode.ERROR)))
        except KeyboardInterrupt:
            say(err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))
        except BrokenPipeError:
            _drop_output(1, 2)
            ctx.exit(int(ExitCode.READER_GONE))
        except (OSError, UnicodeDecodeError) as error:
            text, code = _file_error(error)
            say(f"mesh: {text}", err=True)
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output(1)
            ctx.exit(self._own_code(ctx, int(code)))
        finally:
            use_state(None)

    @staticmethod
    def _own_code(ctx: click.Context, code: int) -> int:
        """Return the exit code of a failure of mesh itself: `run` reserves one, since it passes the job's codes through."""
        return int(ExitCode.NO_EXIT_CODE) if ctx.invoked_subcommand == "run" else code


def _drop_output(*streams: int) -> None:
    """Drop what could not be written: Python would try again at its exit, and fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)


def _file_error(error: OSError | UnicodeDecodeError) -> tuple[str, ExitCode]:
    """Return what to say about a file that could not be read or written, and the exit code."""
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not text in UTF-8 ({error.reason}): name a text file", ExitCode.USAGE
    reason = error.strerror or str(error)
    failed = f"{error.filename}: {reason}" if error.filename is not None else f"a file cannot be used: {reason}"
    if isinstance(error, PermissionError):
        return f"{failed}. Run this as the user of that file, or name another node with --state.", ExitCode.REFUSED
    return f"{failed}. Correct that, and run the command again.", ExitCode.ERROR


def other_release(state: str | None) -> str:
    """Return what to do if the daemon runs another release than this command; empty if both are the same."""
    from mesh.api.client import Client
    from mesh.daemon.layout import node_layout
    from mesh.util.version import VERSION

    try:
        version = Client(node_layout(state).socket).get("/v1/status", timeout_s=5.0)["version"]
    except (MeshError, OSError, ValueError, LookupError, TypeError):
        return ""
    if version == VERSION:
        return ""
    return (
        f"the daemon here runs campus-mesh {version}, this command is {VERSION}: "
        "restart the daemon with `mesh down` and `mesh up`"
    )


def print_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from mesh.cli.output import say
        from mesh.util.release import release

        say(f"mesh {release()}")
        ctx.exit()


@click.pass_context
def _set_state(ctx: click.Context, state: str | None) -> None:
    from mesh.cli.output import use_state

    ctx.obj = state
    use_state(state)


cli = Mesh(
    SECTIONS,
    name="mesh",
    callback=_set_state,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Lend and borrow lab GPUs on a campus LAN. `mesh COMMAND --help` says more.",
    params=[
        click.Option(
            ["--state"],
            metavar="DIR",
            help="State directory (default: $MESH_STATE, else $XDG_STATE_HOME/campus-mesh, else ~/.local/state/campus-mesh).",
        ),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=print_version,
            help="Print the version and exit.",
        ),
    ],
)


job = LazyGroup(
    {
        "Commands": [
            ("jupyter", "mesh.cli.interactive", "Open JupyterLab on a node of the mesh"),
            ("attach", "mesh.cli.interactive", "Follow a job's output and state"),
            ("forward", "mesh.cli.interactive", "Forward a port of this machine to a running job"),
            ("migrate", "mesh.cli.jobs", "Move a running job to another node"),
            ("events", "mesh.cli.jobs", "Show what happened to a job, or on this node"),
            ("rehearse", "mesh.cli.rehearse", "Test on this machine whether a job survives departures"),
            ("sdk", "mesh.cli.sdk", "Give a project the files that its programs import"),
            ("recover", "mesh.cli.jobs", "Recover a job that lost its quorum"),
        ]
    },
    name="job",
    help="Interact with a job, move it, rehearse it, or recover it.",
)

debug = LazyGroup(
    {
        "Commands": [
            ("demo", "mesh.cli.demo", "Watch a training survive three departures"),
            ("devstack", "mesh.cli.debug", "Run several real daemons on this machine"),
            ("sim", "sim.cli", "Simulate a campus: compare policies and machines"),
            ("survive", "mesh.cli.survive", "Estimate how long a node stays, or evaluate the estimate"),
            ("dump", "mesh.cli.dump", "Collect logs and state into one archive, without secrets"),
            ("api", "mesh.cli.debug", "Print the daemon's API as an OpenAPI document"),
            ("completion", "mesh.cli.debug", "Print the completion script of bash, zsh or fish"),
        ]
    },
    name="debug",
    help="Try, study and diagnose a mesh.",
)


def _show_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an exception that is a bug; its text may be that of another node."""
    from traceback import format_exception

    from mesh.cli.output import say

    for part in format_exception(kind, error, trace):
        for line in part.splitlines():
            say(line, err=True)


def main() -> None:
    sys.excepthook = _show_crash
    cli(prog_name="mesh")
