"""The reference that is made of the code: exit codes in the docs, and the manual page."""

import shutil
import subprocess
from pathlib import Path

from click.testing import CliRunner

import mesh.release
from mesh import __version__
from mesh.cli.main import SECTIONS, cli
from mesh.cli.manual import exit_table, page
from mesh.release import built_from

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_docs_have_the_exit_codes_of_the_code() -> None:
    _, _, rest = DOCS.read_text().partition("<!-- exit codes: made by `python -m mesh.cli.manual exits` -->\n")
    assert rest.partition("<!-- end -->")[0] == exit_table()


def test_the_page_has_every_command_and_groff_finds_nothing_wrong() -> None:
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


def test_the_version_has_the_commit_where_it_is_known(tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["--version"]).output
    assert said.startswith(f"mesh {__version__}")
    assert built_from(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert built_from(tmp_path) == "", "no repository, whatever it looks like"
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh" / mesh.release.COMMIT).write_text("0123456789ab\n")
    assert built_from(tmp_path) == "0123456789ab"
