"""The generated reference: exit codes in the docs, and the manual page."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import mesh.util.release
from mesh.cli.main import SECTIONS, cli
from mesh.cli.manual import exit_table, page
from mesh.util.release import built_from
from mesh.util.version import VERSION

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_docs_list_every_exit_code() -> None:
    _, _, rest = DOCS.read_text().partition("<!-- exit codes: made by `python -m mesh.cli.manual exits` -->\n")
    assert rest.partition("<!-- end -->")[0] == exit_table()


def test_manual_page_has_every_command_and_no_groff_warning() -> None:
    text = page()
    for rows in SECTIONS.values():
        for name, _, _ in rows:
            assert f"\n.SS mesh {name}\n".replace("-", "\\-") in text
    assert "\n.SS mesh config set\n" in text and ".B \\-f, \\-\\-file JOB.yaml" in text
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=text.encode(), capture_output=True, timeout=60, check=True
        )
        assert done.stderr == b""


def test_version_includes_known_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(cli, ["--version"]).output
    assert said.startswith(f"mesh {VERSION}")
    with monkeypatch.context() as here:
        here.setattr(subprocess, "run", lambda *asked, **how: pytest.fail("a directory above may be a repository"))
        assert built_from(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert built_from(tmp_path) == "", "an empty .git is no repository"
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh" / mesh.util.release.COMMIT).write_text("0123456789ab\n")
    assert built_from(tmp_path) == "0123456789ab"
