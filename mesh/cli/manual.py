"""The manual page, and the table of exit codes, made of the commands themselves.

python -m mesh.cli.manual [exits] > mesh.1
"""

import re
import sys
from collections.abc import Iterator

import click

from mesh import __version__
from mesh.api.errors import MEANS
from mesh.cli.main import SECTIONS, cli


def exit_table() -> str:
    rows = [f"| {int(code)} | {words} |" for code, words in MEANS.items()]
    return "\n".join(["| exit | means |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """mesh(1), in man(7)."""
    root = click.Context(cli, info_name="mesh")
    lines = [
        f'.TH MESH 1 "" "campus-mesh {__version__}" "User Commands"',
        ".SH NAME",
        f"mesh \\- {_plain('lend and borrow lab GPUs on a campus LAN')}",
        ".SH SYNOPSIS",
        ".B mesh",
        "[\\fB\\-\\-state\\fR \\fIDIR\\fR] \\fICOMMAND\\fR ...",
        ".SH DESCRIPTION",
        *_text(cli.help or ""),
    ]
    for title, rows in SECTIONS.items():
        lines.append(f'.SH "{title.upper()}"')
        for name, _, _ in rows:
            command = cli.get_command(root, name)
            assert command is not None
            lines += _command(command, click.Context(command, info_name=name, parent=root))
    lines.append(".SH EXIT STATUS")
    for code, words in MEANS.items():
        lines += [".TP", str(int(code)), _plain(words.replace("`", ""))]
    lines += [
        *(
            ".SH FILES",
            ".TP",
            "~/.local/state/campus\\-mesh",
            "The state of this node: $MESH_STATE or \\-\\-state name another.",
        ),
        *(
            ".SH ENVIRONMENT",
            ".TP",
            "MESH_STATE",
            "The state directory.",
            ".TP",
            "NO_COLOR",
            "No colours, if it is set.",
        ),
    ]
    return "\n".join(lines) + "\n"


def _command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield from (".SS " + _plain(ctx.command_path), ".B " + _plain(usage), ".PP", *_text(command.help or ""))
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        if isinstance(parameter, click.Option) and record is not None and parameter.name != "help":
            yield from (".TP", ".B " + _plain(record[0]), _plain(record[1]))
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=ctx))


def _text(words: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", words.strip()):
        yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *(_plain(line.strip()) for line in paragraph.splitlines()[1:]), ".fi")
        else:
            yield _plain(" ".join(paragraph.split()))


def _plain(text: str) -> str:
    """Text in which nothing is a request of roff's."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\\&" + escaped if escaped.startswith((".", "\\(aq")) else escaped


if __name__ == "__main__":
    click.echo(exit_table() if sys.argv[1:] == ["exits"] else page(), nl=False)
