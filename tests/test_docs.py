"""The documentation site as `make docs` builds it: complete, from the checkout alone, readable without a network."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click import Context, Group, exceptions

from mesh.cli.main import SECTIONS, cli
from mesh.daemon.config import Settings

ROOT = Path(__file__).parents[1]
FETCHED = re.compile(
    r"<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A dead link, a dead anchor or a missing public name fails the build."""
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(where)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return where


def test_site_menu_links_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / page).exists() for page in pages)
    home = (site / "reference" / "cli.html").read_text()
    links = {os.path.normpath(Path("reference") / link) for link in re.findall(r'href="([^"#:]+\.html)', home)}
    assert {str(page) for page in pages} <= links, "each page is linked from the menu"


def test_site_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = [tag for tag in FETCHED.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert not fetched, f"{page.name}: {fetched}"


def test_reference_is_generated_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"mesh {name}" in commands for rows in SECTIONS.values() for name, _, _ in rows)
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"<code>{field.name}</code>" in settings for field in msgspec.structs.fields(Settings))
    assert "should_checkpoint" in (site / "reference" / "python.html").read_text()


def test_benchmark_page_has_every_benchmark(site: Path) -> None:
    wanted = set(re.findall(r"^(bench-[a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    collected = (site / "explanation" / "benchmarks.html").read_text()
    assert wanted
    assert all(f"<code>make {name}</code>" in collected for name in wanted)
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    measured = [page for page in pages if "\n## Measured\n" in (ROOT / "docs" / page).read_text()]
    links = [os.path.relpath(page.with_suffix(".html"), "explanation") for page in measured]
    assert measured
    assert all(f'From <a href="{link}#measured">' in collected for link in links)


def test_files_named_in_pages_exist() -> None:
    """Check paths such as `mesh/jobs` in pages. `mesh/v1` is the prefix of signature contexts, not a path."""
    named = re.compile(
        r"(?<![\w/.-])((?:mesh|membership|placement|ckptstore|cuda_guard|sim|tests)/(?!v1)[\w./-]*\w)(?![\w{*-])"
    )
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    gone = {
        f"{page.name}: {path}"
        for page in pages
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    }
    assert not gone, f"these pages name files that do not exist: {gone}"


def test_functions_named_in_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    hops = re.findall(r"`([\w/]+\.py):(\w+)`", page)
    assert len(hops) > 15
    gone = [hop for hop in hops if not re.search(rf"def {hop[1]}\(", (ROOT / hop[0]).read_text())]
    assert not gone, f"architecture.md names functions that do not exist: {gone}"


def test_each_bound_names_tests_that_exist() -> None:
    """Check the tables of bounds: a name without a file belongs to the one that the text before the table names."""
    named = re.compile(r"`(?:(tests/[\w/]+\.py)(?::|`))?(test_\w+)?`?")
    rows = 0
    for page in (ROOT / "docs").rglob("*.md"):
        before, *tables = page.read_text().split("\n| what | bound | test |\n|---|---|---|\n")
        for table in tables:
            inside = re.findall(r"Tests without a file are in `(tests/[\w/]+\.py)`", before)
            for line in table.partition("\n\n")[0].splitlines():
                rows += 1
                cell = line.strip(" |").rpartition("|")[2]
                tests = [(file or inside[-1], name) for file, name in named.findall(cell) if file or name]
                assert tests, f"{page.name}: no test: {line}"
                for file, name in tests:
                    assert f"def {name}" in (ROOT / file).read_text(), f"{page.name}: {file}:{name}"
            before += table
    assert rows > 30


def test_pages_named_in_code_exist() -> None:
    folders = ("mesh", "membership", "placement", "ckptstore", "cuda_guard", "sim", "tests", ".ci")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {"", ".py", ".c", ".h", ".toml"}
    ]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    named = re.compile(r"\b(docs/[\w/-]+\.(?:md|json|py|svg|png))\b")
    texts = {path: path.read_text(errors="ignore") for path in files if path.is_file()}
    gone = {
        f"{path.name}: {page}"
        for path, text in texts.items()
        for page in named.findall(text)
        if not (ROOT / page).exists()
    }
    assert not gone, f"these files name pages that do not exist: {gone}"


def test_commands_named_in_pages_exist() -> None:
    """Check `mesh COMMAND` and `mesh GROUP COMMAND` in code of pages."""
    code = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
    called = re.compile(r"(?:^|[\s`$|(])mesh (?!import\b)([a-z][a-z-]+)(?![\w-])(?: ([a-z][a-z-]+)(?![\w-]))?")
    gone = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        for span in code.findall(page.read_text()):
            for name, second in called.findall(span):
                command = cli.get_command(Context(cli), name)
                inner = isinstance(command, Group) and second and command.get_command(Context(command), second) is None
                if command is None or (inner and not command.invoke_without_command):
                    gone.add(f"{page.name}: mesh {name} {second}".rstrip())
    assert not gone, f"these pages name commands that do not exist: {sorted(gone)}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_each_command_of_a_page_has_the_options_that_it_gives(page: Path) -> None:
    for block in re.findall(r"```(?:console)?\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"^(?:\w*\$ )?(?:\w+=\S+ )*mesh (.*)", block, re.MULTILINE):
            words = shlex.split(re.split(r" [>|&;]", line)[0], comments=True)
            command, context = cli, Context(cli)
            try:
                while isinstance(command, Group) and words:
                    _, command, words = command.resolve_command(context, words)
                    context = Context(command, parent=context)
                command.make_parser(context).parse_args(words)
            except exceptions.UsageError as error:
                pytest.fail(f"mesh {line}: {error.format_message()}")
            except exceptions.Exit:  # `mesh --version`
                pass
