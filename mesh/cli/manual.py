"""The manual page and the table of exit codes, made from the commands.

python -m mesh.cli.manual [exits] > mesh.1
"""

import re
import sys
from collections.abc import Iterator

import click

from mesh.cli.main import SECTIONS, cli
from mesh.cli.output import print_text
from mesh.util.errors import MEANS
from mesh.util.version import VERSION

FILES = {
    "~/.local/state/campus-mesh": "State of this node, unless --state or MESH_STATE name another directory.",
    "~/.config/campus-mesh": "config.toml and policy.toml of this node; --state and MESH_STATE replace it too.",
}
ENVIRONMENT = {
    "MESH_STATE": "State directory, which then holds the configuration too.",
    "XDG_STATE_HOME": "Replaces ~/.local/state.",
    "XDG_CONFIG_HOME": "Replaces ~/.config.",
    "NO_COLOR": "No colors, if it is set.",
}


def exit_table() -> str:
    rows = [f"| {int(code)} | {text} |" for code, text in MEANS.items()]
    return "\n".join(["| exit | means |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """mesh(1), in man(7)."""
    root = click.Context(cli, info_name="mesh")
    lines = [
        f'.TH MESH 1 "" "campus-mesh {VERSION}" "User Commands"',
        ".SH NAME",
        f"mesh \\- {_plain('lend and borrow lab GPUs on a campus LAN')}",
        ".SH SYNOPSIS",
        ".B mesh",
        "[\\fB\\-\\-state\\fR \\fIDIR\\fR] \\fICOMMAND\\fR ...",
        ".SH DESCRIPTION",
        *_paragraphs(cli.help or ""),
    ]
    for title, rows in SECTIONS.items():
        lines.append(f'.SH "{title.upper()}"')
        for name, _, _ in rows:
            command = cli.get_command(root, name)
            assert command is not None
            lines += _command(command, click.Context(command, info_name=name, parent=root))
    lines.append(".SH EXIT STATUS")
    for code, text in MEANS.items():
        lines += [".TP", str(int(code)), _plain(text.replace("`", ""))]
    for title, entries in (("FILES", FILES), ("ENVIRONMENT", ENVIRONMENT)):
        lines.append(f".SH {title}")
        for name, text in entries.items():
            lines += [".TP", _plain(name), _plain(text)]
    return "\n".join(lines) + "\n"


def _command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield from (".SS " + _plain(ctx.command_path), ".B " + _plain(usage), ".PP", *_paragraphs(command.help or ""))
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        if isinstance(parameter, click.Option) and record is not None and parameter.name != "help":
            yield from (".TP", ".B " + _plain(record[0]), _plain(record[1]))
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=ctx))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *(_plain(line.strip()) for line in paragraph.splitlines()[1:]), ".fi")
        else:
            yield _plain(" ".join(paragraph.split()))


def _plain(text: str) -> str:
    """Escape what roff would read as a request."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\\&" + escaped if escaped.startswith((".", "\\(aq")) else escaped


if __name__ == "__main__":
    print_text(exit_table() if sys.argv[1:] == ["exits"] else page())
