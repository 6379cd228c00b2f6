"""What the site has besides the pages in docs/: the reference, read from the code, and all figures, read from the pages that
measured them."""

import ast
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
from mesh.api.errors import ExitCode
from mesh.cli.main import SECTIONS, cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = (
    "mesh.job",
    "mesh.integrations.hf",
    "mesh.integrations.lightning",
)  # what programs of users import, besides `mesh`
MEASURED = "<!-- measured -->"
FIGURES = {
    "How it was measured",
    "Measured",
    "Beside Slurm",
    "What the papers claim",
}  # headings above sections of figures


def on_config(config: MkDocsConfig) -> None:
    """Put pages that the nav does not name at the end of Concepts, and the decisions in a list of their own."""
    assert config.nav is not None
    named = set(_leaves(config.nav))
    concepts: list[Any] = next(entry["Concepts"] for entry in config.nav if "Concepts" in entry)
    concepts += [path.name for path in sorted(DOCS.glob("*.md")) if path.name not in named]
    concepts.append({"Decisions": [f"decisions/{path.name}" for path in sorted((DOCS / "decisions").glob("*.md"))]})


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
    if page.file.src_uri != "benchmarks.md":
        return markdown
    return markdown.replace(MEASURED, "\n".join([*unlisted(markdown), *measured()]))


def commands() -> str:
    """Every command with its options, as the command line itself knows them."""
    lines = ["# Every command", "", "Made from the program: `mesh COMMAND --help` says the same.", ""]
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
    """Directives that mkdocstrings fills from signatures and docstrings."""
    lines = ["# Python", "", "Made from the code's own signatures and docstrings.", "", "## mesh", ""]
    offered = {name: getattr(mesh, name) for name in dir(mesh)}
    for name, thing in offered.items():
        if getattr(thing, "__module__", "").startswith("mesh."):
            lines += [f"::: {thing.__module__}.{name}", "    options:", "      heading_level: 3", ""]
    for module in PUBLIC:
        lines += [f"::: {module}", "    options:", "      show_root_full_path: true", ""]
    return "\n".join(lines)


def settings() -> str:
    """The fields of `Settings`, with their types, defaults and the comments beside them."""
    source = (ROOT / "mesh" / "config.py").read_text()
    lines = source.splitlines()
    owner = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    text = [
        "# Settings",
        "",
        "`config.toml` in the state directory; all of it may be left out. An unknown key is an error. From `mesh/config.py`.",
        "When a machine is lent stands in `policy.toml`: [the owner's page](../provider.md#the-policy-file).",
        "",
        "| key | type | default | |",
        "|---|---|---|---|",
    ]
    for field in owner.body:
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert field.value is not None
            kind = ast.unparse(field.annotation).replace("|", "\\|")
            said = " ".join(
                part.partition("  # ")[2] or part.partition("# ")[2]
                for part in lines[field.lineno - 1 : field.end_lineno]
                if "# " in part
            )
            text.append(f"| `{field.target.id}` | `{kind}` | `{ast.unparse(field.value)}` | {said} |")
    return "\n".join(text)


def exit_codes() -> str:
    """The numbers of `ExitCode`; what they mean to a person is in cli.md."""
    rows = [f"| {code.value} | `{code.name}` |" for code in ExitCode]
    head = ["# Exit codes", "", "Made from `mesh/api/errors.py`; [what each means, and those of jobs](../cli.md).", ""]
    return "\n".join([*head, "| exit | name |", "|---|---|", *rows])


def unlisted(markdown: str) -> Iterator[str]:
    """Benchmarks of the Makefile that the page's table lacks, with what the Makefile says of them."""
    makefile = (ROOT / "Makefile").read_text()
    for comment, name in re.findall(r"((?:^# .*\n)*)^(bench-[a-z-]+):", makefile, re.MULTILINE):
        if f"`make {name}`" not in markdown:
            yield f"`make {name}`: {' '.join(comment.replace('# ', '').split()) or 'see the Makefile.'}\n"


def measured() -> Iterator[str]:
    """The sections of figures of all pages, as they stand there."""
    for path in sorted(DOCS.glob("*.md")):
        title, *sections = re.split(r"^#{1,2} ", path.read_text().removeprefix("# "), flags=re.MULTILINE)
        for heading, _, text in (section.partition("\n") for section in sections):
            if heading in FIGURES:
                page = path.name
                yield f"## {title.partition(chr(10))[0]}\n\nFrom [{page}]({page}#{slugify(case='lower')(heading, '-')}).\n"
                yield re.sub(r"\]\(#", f"]({page}#", text.strip()) + "\n"
