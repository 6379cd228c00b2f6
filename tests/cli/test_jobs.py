"""Options of job commands: environment variables, the last lines of the output, exit codes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner

from mesh.cli.job_options import job_options, make_order
from mesh.cli.jobs import _print_output, _print_tail, exit_code, follow_log
from mesh.cli.main import cli


def environment(*words: str) -> dict[str, str]:
    command = click.command()(job_options(lambda **options: options))
    options: dict[str, Any] = command.make_context("submit", [*words, "--no-workdir", "x"]).params
    return dict(make_order(options.pop("command"), options)["env"])


def test_env_takes_values_from_the_environment_and_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    file = tmp_path / "job.env"
    file.write_text("# comment\n\nA=1\n  B = two=2\nFROM_HERE\n")
    assert environment("--env-file", str(file), "-e", "A=3") == {"A": "3", "B ": " two=2", "FROM_HERE": "here"}
    assert environment("--env", "FROM_HERE") == {"FROM_HERE": "here"}
    for wrong in ("=1", "NOT_SET_ANYWHERE"):
        with pytest.raises(click.BadParameter, match="write KEY=VALUE"):
            environment("-e", wrong)


def test_after_takes_several_jobs_with_commas() -> None:
    command = click.command()(job_options(lambda **options: options))
    words = ["--after", "a,b", "--after", "sweep_3", "--no-workdir", "x"]
    options: dict[str, Any] = command.make_context("submit", words).params
    assert make_order(options.pop("command"), options)["after"] == ["a", "b", "sweep_3"]


def test_bytes_that_are_not_utf8_are_refused_here() -> None:
    for words, text in ((["-e", "A=\udcff"], "a variable"), (["--name", "\udcff"], "name has bytes")):
        with pytest.raises(click.UsageError, match=text):
            environment(*words)


@pytest.mark.parametrize(
    ("pieces", "count", "shown"),
    [
        ([b"a\nb\n", b"c\n"], 2, "b\nc\n"),
        ([b"a\nb", b"b\nc"], 2, "bb\nc"),
        ([b"a\n"], 5, "a\n"),
        ([b"a\n"], 0, ""),
        ([], 3, ""),
    ],
)
def test_tail_prints_the_last_lines_and_returns_the_size(
    pieces: list[bytes], count: int, shown: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert _print_tail(iter(pieces), count) == len(b"".join(pieces))
    assert capfdbinary.readouterr().out == shown.encode()


def test_followed_output_skips_bytes_already_shown(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    _print_output(iter([b"abc", b"def", b"gh"]), 4)
    assert capfdbinary.readouterr().out == b"efgh"


@pytest.mark.parametrize(
    ("pieces", "skip", "open_line"),
    [([b"a\n", b"b"], 0, True), ([b"a\n"], 0, False), ([], 0, False), ([b"a\n", b""], 0, False), ([b"ab"], 2, False)],
)
def test_output_tells_whether_its_last_line_has_an_end(pieces: list[bytes], skip: int, open_line: bool) -> None:
    assert _print_output(iter(pieces), skip) == open_line


@pytest.mark.parametrize(("terminal", "shown"), [(True, "no end\n"), (False, "no end")])
def test_message_begins_on_a_line_of_its_own_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, shown: str
) -> None:
    state = {"job": {"state": "done", "detail": ""}}
    daemon = SimpleNamespace(stream=lambda path: iter([b"no end"]), get=lambda path: state)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    follow_log(cast(Any, daemon), "j", lambda text: None)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"kind": "done", "exit_code": 0}, 0),
        ({"kind": "failed", "exit_code": 103}, 103),
        ({"kind": "failed", "exit_code": None}, 125),
        ({"kind": "cancelled", "exit_code": 137}, 125),
        (None, 125),
    ],
)
def test_run_exits_with_the_code_of_the_job(outcome: dict[str, Any] | None, code: int) -> None:
    assert exit_code({"outcome": outcome}) == code


def test_sdk_gives_a_project_what_it_imports(tmp_path: Path) -> None:
    """Without the `mesh` package, its Python imports the copy, which replaces an older one."""
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh" / "job.py").write_text("old")
    assert CliRunner().invoke(cli, ["job", "sdk", str(tmp_path)]).exit_code == 0
    script = "from mesh import job; print(job.__file__, job.EXIT_SAVED)"
    isolated = ["-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {script}"]
    done = subprocess.run([sys.executable, *isolated], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{tmp_path}/mesh/job.py", "85"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mesh").write_text("a file")
    refused = CliRunner().invoke(cli, ["job", "sdk", str(tmp_path / "sub")])
    assert refused.exit_code == 1 and "cannot be written" in refused.output
