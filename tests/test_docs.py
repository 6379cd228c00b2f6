"""The docs site as `make docs` builds it: whole, from nothing but the checkout, and readable without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mesh.cli.main import SECTIONS
from mesh.config import Settings

ROOT = Path(__file__).parents[1]
FETCHED = re.compile(
    r"<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link or an anchor that leads nowhere fails it, and so does a public name that is gone."""
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(where)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return where


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / page).exists() for page in pages)
    home = (site / "cli.html").read_text()
    assert all(str(page) in home for page in pages), "a page that no menu leads to"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = [tag for tag in FETCHED.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert not fetched, f"{page.name}: {fetched}"


def test_the_reference_is_the_code_s_own(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"mesh {name}" in commands for rows in SECTIONS.values() for name, _, _ in rows)
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"<code>{field.name}</code>" in settings for field in msgspec.structs.fields(Settings))
    assert "should_checkpoint" in (site / "reference" / "python.html").read_text()


def test_every_benchmark_is_on_the_page_of_benchmarks(site: Path) -> None:
    wanted = set(re.findall(r"^(bench-[a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    collected = (site / "benchmarks.html").read_text()
    assert wanted
    assert all(f"<code>make {name}</code>" in collected for name in wanted)
    measured = [path.stem for path in (ROOT / "docs").glob("*.md") if "\n## Measured\n" in path.read_text()]
    assert measured
    assert all(f'From <a href="{name}.html#measured">' in collected for name in measured)
