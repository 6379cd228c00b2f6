"""Generate the reference pages from the code, and collect all measured sections on the page of benchmarks."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

import mesh
from mesh.cli.main import SECTIONS, cli
from mesh.daemon.setting_notes import setting_notes
from mesh.util.errors import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = (
    "mesh.job",
    "mesh.sdk.integrations.hf",
    "mesh.sdk.integrations.lightning",
)  # modules that users import, besides `mesh`
PARTS = {
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Decisions": "decisions",
}  # part of the nav -> its folder
BENCHMARKS = "explanation/benchmarks.md"
MEASURED = "<!-- measured -->"
FIGURES = {
    "How it was measured",
    "Measured",
    "What the papers claim",
}  # headings of the sections that hold figures


def on_config(config: MkDocsConfig) -> None:
    """Add pages that the nav does not name to the end of the part for their folder."""
    assert config.nav is not None
    named = set(_leaves(config.nav))
    for title, folder in PARTS.items():
        part: list[Any] = next(entry[title] for entry in config.nav if title in entry)
        pages = [path.relative_to(DOCS).as_posix() for path in sorted((DOCS / folder).glob("*.md"))]
        part += [page for page in pages if page not in named]


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in (
        ("commands", commands()),
        ("python", python()),
        ("settings", settings()),
        ("exit-codes", exit_codes()),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != BENCHMARKS:
        return markdown
    return markdown.replace(MEASURED, "\n".join([*unlisted(markdown), *measured()]))


def commands() -> str:
    """Return the page of all commands with their help texts."""
    lines = ["# Every command", "", "Generated from the program; `mesh COMMAND --help` prints the same text.", ""]
    context = click.Context(cli, info_name="mesh")
    for title, rows in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name, _, short in rows:
            command = cli.get_command(context, name)
            assert command is not None, name
            lines += _command(command, click.Context(command, context, info_name=name), short, 3)
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context, short: str, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {context.command_path}", "", f"{short}." if short else "", "")
    yield from ("```text", command.get_help(context), "```", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            if not child.hidden:
                yield from _command(child, click.Context(child, context, info_name=name), "", level + 1)


def python() -> str:
    """Return the page of mkdocstrings directives for the public Python names."""
    lines = ["# Python", "", "Generated from the code's signatures and docstrings.", "", "## mesh", ""]
    offered = {name: getattr(mesh, name) for name in dir(mesh)}
    for name, thing in offered.items():
        if getattr(thing, "__module__", "").startswith("mesh."):
            lines += [f"::: {thing.__module__}.{name}", "    options:", "      heading_level: 3", ""]
    for module in PUBLIC:
        lines += [f"::: {module}", "    options:", "      show_root_full_path: true", ""]
    return "\n".join(lines)


def settings() -> str:
    """Return the page of the fields of `Settings`, with types, defaults and comments."""
    source = (ROOT / "mesh" / "daemon" / "config.py").read_text()
    notes = setting_notes()
    owner = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    text = [
        "# Settings",
        "",
        "`config.toml` in `~/.config/campus-mesh`, or in the directory that `--state` names. Every setting is optional; "
        "an unknown key is an error (`mesh/daemon/config.py`).",
        "`policy.toml` says when a machine is lent: [the policy file](policy.md).",
        "",
        "| key | type | default | |",
        "|---|---|---|---|",
    ]
    for field in owner.body:
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert field.value is not None
            key, kind = field.target.id, ast.unparse(field.annotation).replace("|", "\\|")
            text.append(f"| `{key}` | `{kind}` | `{ast.unparse(field.value)}` | {notes[key]} |")
    return "\n".join(text)


def exit_codes() -> str:
    """Return the page of exit codes; cli.md explains their meaning."""
    rows = [f"| {code.value} | `{code.name}` |" for code in ExitCode]
    head = ["# Exit codes", "", "Generated from `mesh/util/errors.py`. [The command line](cli.md) explains them.", ""]
    return "\n".join([*head, "| exit | name |", "|---|---|", *rows])


def unlisted(markdown: str) -> Iterator[str]:
    """Yield the benchmarks of the Makefile that are missing in `markdown`, with their comments."""
    makefile = (ROOT / "Makefile").read_text()
    for comment, name in re.findall(r"((?:^# .*\n)*)^(bench-[a-z-]+):", makefile, re.MULTILINE):
        if f"`make {name}`" not in markdown:
            yield f"`make {name}`: {' '.join(comment.replace('# ', '').split()) or 'see the Makefile.'}\n"


def measured() -> Iterator[str]:
    """Yield the measured sections of all pages."""
    for path in sorted(DOCS.glob("*/*.md"), key=lambda path: path.name):
        title, *sections = re.split(r"^#{1,2} ", path.read_text().removeprefix("# "), flags=re.MULTILINE)
        for heading, _, text in (section.partition("\n") for section in sections):
            if heading in FIGURES:
                page = os.path.relpath(path, (DOCS / BENCHMARKS).parent)
                yield f"## {title.partition(chr(10))[0]}\n\nFrom [{path.name}]({page}#{slugify(case='lower')(heading, '-')}).\n"
                yield re.sub(r"\]\(#", f"]({page}#", text.strip()) + "\n"
