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
    for commit, said in (("0123456789ab", f"{VERSION} (0123456789ab)"), ("", VERSION)):
        monkeypatch.setattr(mesh.util.release, "built_from", lambda root, commit=commit: commit)
        assert mesh.util.release.release() == said


def test_version_of_a_checkout_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=ada", "-c", "user.email=ada@campus.test", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *settings, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "-am", "one", "v1")
    commit = git("rev-parse", "HEAD")[:12]
    assert built_from(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert built_from(tmp_path) == f"{commit}-dirty"
    for error in (FileNotFoundError("git"), subprocess.TimeoutExpired("git", 2)):

        def fails(*asked: object, timeout: float, error: Exception = error, **how: object) -> None:
            assert timeout == 2
            raise error

        monkeypatch.setattr(subprocess, "run", fails)
        assert built_from(tmp_path) == ""
